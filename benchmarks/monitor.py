"""What `GradAvgMonitor` costs on the demo's language model: `python -m benchmarks.monitor`.

One training run goes through rounds of as many steps as lie between two logged ones, with the monitor and without it,
on the same batches. Two rounds that follow each other make a pair, in turn begun with and without. The ratio within a
pair does not see how fast the machine is at that time, and the medians over the pairs do not see what else it does now
and then. Next to the time by the clock stands the processor time of rank 0, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from examples.demo.text import ByteLanguageModel, DocstringData, collate
from examples.demo.training import close_process_group
from lightning_gradavg import GradAvgMonitor, GradAvgStrategy

__all__ = ["Rounds", "batches", "main", "report"]

SAMPLES_PER_RANK = 16
"""Half of the demo's global batch of 32."""

BATCHES = 30

Seconds = tuple[float, float]
"""By the clock, and of the processor."""


def _now() -> Seconds:
    return time.perf_counter(), time.process_time()


class Rounds(Callback):
    """Hands the events of every other round to a monitor, and takes the time.

    Attributes:
        rounds: Of each round, in order: whether it was monitored, and of each of its steps the seconds by the clock and
            of the processor.
    """

    def __init__(self, monitor: Callback, steps: int) -> None:
        self.rounds: list[tuple[bool, list[Seconds]]] = []
        self._monitor = monitor
        self._steps = steps
        self._since = _now()

    def _monitored(self, step: int) -> bool:
        pair, second = divmod(step // self._steps, 2)
        return second != pair % 2

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the monitor."""
        self._monitor.on_train_start(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a step, and perhaps a round."""
        if batch_idx % self._steps == 0:
            trainer.strategy.barrier()
            self.rounds.append((self._monitored(batch_idx), []))
        self._since = _now()
        if self._monitored(batch_idx):
            self._monitor.on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a step."""
        if self._monitored(batch_idx):
            self._monitor.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        now = _now()
        self.rounds[-1][1].append((now[0] - self._since[0], now[1] - self._since[1]))


def batches(rank: int, steps: int, rounds: int) -> DataLoader[Any]:
    """Return a rank's batches of so many rounds, all of them alike."""
    data = DocstringData(num_train=2 * SAMPLES_PER_RANK * BATCHES)
    data.setup("fit")
    starts = range(rank % 2 * SAMPLES_PER_RANK, len(data.samples), 2 * SAMPLES_PER_RANK)
    collated = [collate(data.samples[start : start + SAMPLES_PER_RANK]) for start in starts][:BATCHES]
    of_round = [collated[index % BATCHES] for index in range(steps)]
    everything: Any = of_round * rounds
    return DataLoader(everything, batch_size=None)


def _spread(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:+.2f} % [{low:+.2f}, {high:+.2f}]"


def report(rounds: Sequence[tuple[bool, list[Seconds]]], steps: int, what: str = "the monitor") -> str:
    """Return what rounds with something cost, against those without."""
    pairs = [dict(rounds[index : index + 2]) for index in range(2, len(rounds), 2)]  # the first pair warms up
    lines = [f"{len(pairs)} pairs of rounds of {steps} steps; medians [quartiles]"]
    for kind, name in enumerate(("by the clock", "of the processor")):
        times = [{monitored: [step[kind] for step in pair[monitored]] for monitored in (False, True)} for pair in pairs]
        step = statistics.median(second for pair in times for second in pair[False])
        logged = [pair[True][-1] - pair[False][-1] for pair in times]
        medians = [[statistics.median(pair[monitored][:-1]) for monitored in (True, False)] for pair in times]
        of_rounds = _spread([_more(sum(pair[True]), sum(pair[False])) for pair in times])
        of_logged = _spread([100 * more / (steps * step) for more in logged])
        of_others = _spread([_more(*pair) for pair in medians])
        lines += [
            f"{name}, median step {1e3 * step:.1f} ms",
            f"  rounds with {what}, against those without: {of_rounds}",
            f"  cost of the logged step, as a part of a round:  {of_logged}, {1e3 * statistics.median(logged):.2f} ms",
            f"  median step that is not logged:                 {of_others}",
        ]
    return "\n".join(lines)


def _more(one: float, other: float) -> float:
    """Return how many per cent more the first is."""
    return 100 * (one / other - 1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure what GradAvgMonitor costs.")
    parser.add_argument("--devices", type=int, default=2, help="number of processes (default: 2)")
    parser.add_argument("--pairs", type=int, default=16, help="pairs of rounds that count (default: 16)")
    parser.add_argument("--every-n-steps", type=int, default=50, help="steps between two logged ones (default: 50)")
    parser.add_argument("--reduction", default="weighted_mean", help="reduction rule (default: weighted_mean)")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    monitor = GradAvgMonitor(arguments.every_n_steps, check_data=False)
    rounds = Rounds(monitor, arguments.every_n_steps)
    strategy = GradAvgStrategy(reduction=arguments.reduction)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            devices=arguments.devices,
            strategy=strategy,
            max_epochs=1,
            use_distributed_sampler=False,
            callbacks=[rounds, TQDMProgressBar(refresh_rate=arguments.every_n_steps)],
            logger=CSVLogger(folder),
            log_every_n_steps=arguments.every_n_steps,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        loader = batches(trainer.global_rank, arguments.every_n_steps, 2 * (arguments.pairs + 1))
        trainer.fit(ByteLanguageModel(lr=0.01), loader)
    if trainer.is_global_zero:
        print(report(rounds.rounds, arguments.every_n_steps))  # noqa: T201  # a benchmark prints
    close_process_group()


if __name__ == "__main__":
    main()
