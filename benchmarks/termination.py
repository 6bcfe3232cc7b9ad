"""What it costs that all ranks agree at every batch whether to end: `python -m benchmarks.termination`.

One training run of the small model goes through triples of short blocks: with Lightning's own broadcast, which every
rank reads at once, with none, and with the flag that is read one step later. A block is compared with the one of its
triple that agrees on nothing; the order within triples rotates. On emulated nodes:
`python -m benchmarks.nodes --rate 1gbit --module benchmarks.termination`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console
from torch.utils.data import DataLoader

from benchmarks.report import Spread
from benchmarks.step import make_setting
from benchmarks.world import World, is_rank, joined, slowest, start
from lightning_gradavg.part import Run
from lightning_gradavg.ranks import World as RanksOfRun
from lightning_gradavg.termination import Termination

__all__ = ["main"]

KINDS = ("none", "broadcast, read at once", "all-reduce, read one step later")

DROPPED = 2
"""Steps at the begin of a block: they still see the block before."""


class _Blocks(Callback):
    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.seconds: list[list[float]] = []
        self._agree: Sequence[Callable[[], None]] = ()
        self._begun = 0
        self._before = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the place of Lightning's broadcast."""
        loop: Any = trainer.fit_loop.epoch_loop
        broadcast = loop._broadcast_sigterm_tensor
        later = Termination()
        later.configure_ddp(Run(trainer, pl_module, trainer.strategy.root_device, RanksOfRun.of(None)))
        self._agree = (lambda: None, broadcast, later._agree)
        loop._broadcast_sigterm_tensor = self._begin

    def kind(self, block: int) -> int:
        """Return what a block does."""
        triple, place = divmod(block, len(KINDS))
        return (triple + place) % len(KINDS)

    def _begin(self) -> None:
        """Begin a batch: the step before it ends here."""
        now = time.perf_counter()
        block, step = divmod(self._begun, self.steps)
        if self._begun > 0 and (self._begun - 1) % self.steps >= DROPPED:
            self.seconds[-1].append(now - self._before)
        if step == 0:
            self.seconds.append([])
        self._before = now
        self._begun += 1
        self._agree[self.kind(block)]()


def _measure(world: World, triples: int, steps: int) -> None:
    setting = make_setting("mlp", world, None)
    blocks = _Blocks(steps)
    trainer = Trainer(
        accelerator="cpu" if world.device.type == "cpu" else "gpu",
        devices=world.ranks_on_node,
        num_nodes=world.nodes,
        strategy=DDPStrategy(),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[blocks, TQDMProgressBar(refresh_rate=steps)],  # once in a block, whatever it does
    )
    # One triple more, which warms up, and a batch that ends the last block.
    batches: Any = [setting.batch] * (len(KINDS) * steps * (triples + 1) + 1)
    trainer.fit(setting.module, DataLoader(batches, batch_size=None))
    medians = slowest([statistics.median(one) for one in blocks.seconds if one], setting.device)
    found: dict[int, list[float]] = {kind: [] for kind in range(len(KINDS))}
    for block, median in enumerate(medians[: len(KINDS) * (triples + 1)]):
        if block >= len(KINDS):
            found[blocks.kind(block)].append(median)
    if dist.get_rank() == 0:
        console = Console()
        console.print(
            f"{dist.get_world_size()} ranks on {world.nodes} nodes, {triples} triples, load {os.getloadavg()[0]:.1f}"
        )
        for kind, name in enumerate(KINDS):
            ms, ratio = Spread.of(found[kind]), Spread.of([a / b for a, b in zip(found[kind], found[0], strict=True)])
            console.print(
                f"{name:32} {1e3 * ms.median:6.2f} ms, {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] of none",
                markup=False,
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure as a rank, or start two ranks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.termination", description="Measure the agreement.")
    parser.add_argument("--triples", type=int, default=60, help="triples of blocks that count (default: 60)")
    parser.add_argument("--steps", type=int, default=12, help="steps of a block (default: 12)")
    given = parser.parse_args(arguments)
    if given.triples < 1 or given.steps <= DROPPED:
        parser.error(f"--triples is 1 or more and --steps above {DROPPED}; got {given.triples} and {given.steps}")
    if not is_rank():
        start("benchmarks.termination", 2, sys.argv[1:] if arguments is None else arguments)
        return
    with joined() as world:
        _measure(world, given.triples, given.steps)


if __name__ == "__main__":
    main()
