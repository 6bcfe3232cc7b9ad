"""What an epoch takes under each option, beside Lightning's DDPStrategy: `python -m benchmarks.epoch`.

An epoch is what a user waits for: loading, transfer, training steps, validation and a checkpoint. A sample takes a
while to load, and a while to compute, in which the processor is free, as when a disk and a GPU are at work: so some
ranks on few cores do not wait for each other. `collate_fn` is the user's own. The batch of a rank is the same on any
number of ranks, and validation has one batch for each rank. Lightning gives stock a `DistributedSampler`, as it does
`weighted_mean`; under all other options the ranks share each batch of the training loader, and deal the batches of
validation. A dataset counts the samples that it loads, in workers, too.

In the first batch of a run the ranks compare one sample, which each loads twice more, and under a preset rank 0 loads
that batch as a whole. So the first epoch stands apart, and of the later ones the fastest counts: other programs only
add to a time. `--draw FILE` measures nothing: it draws the picture of docs/performance.md from a file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from benchmarks.report import RESULTS, STOCK, Row, Spread, load, print_table, save
from benchmarks.world import World, in_rounds, joined, progress, quiet_trainer, run, slowest
from lightning_gradavg import GradAvgStrategy

__all__ = ["PARTS", "STRATEGIES", "main", "measure_epochs", "parse", "print_epochs"]

REPLICAS = 4
EPOCHS = 3
BATCH = 8
"""Samples of a rank's batch."""
BATCHES = 8
"""Of a training epoch of a rank."""
WIDTH = 1024
"""Of the hidden layers, with a million parameters: 4 MB of gradients, and of checkpoint."""

STRATEGIES: Mapping[str, Callable[[], Strategy]] = {
    STOCK: DDPStrategy,
    "weighted_mean": partial(GradAvgStrategy, reduction="weighted_mean"),
    "single_device": partial(GradAvgStrategy, equivalent_to="single_device"),
    "data_parallel": partial(GradAvgStrategy, equivalent_to="data_parallel"),
    f"reproducible, num_replicas={REPLICAS}": partial(GradAvgStrategy, reproducible=True, num_replicas=REPLICAS),
}
_OWN_BATCHES = (STOCK, "weighted_mean")
"""The strategies under which each rank has a batch of its own."""

PARTS: Mapping[str, str] = {
    "loading": "train_dataloader_next",
    "transfer": ".batch_to_device",
    "steps": "run_training_batch",
    "validation": "",
    "checkpoint": "save_checkpoint",
    "rest": "",
}
"""The parts of an epoch, by how Lightning's profiler calls them; validation, and what is left, it does not call."""

_EPOCH = "run_training_epoch"
"""What Lightning's profiler calls an epoch. Its first part is the start of the workers, and so loading."""


class _SlowSamples(Dataset[Any]):
    """Samples of a classifier that take a while to load.

    Attributes:
        loaded: How many were loaded, by this process and its workers.
    """

    def __init__(self, size: int, seconds: float) -> None:
        self.loaded = torch.multiprocessing.Value("l", 0)
        self._size = size
        self._seconds = seconds

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self._seconds)
        with self.loaded.get_lock():
            self.loaded.value += 1
        return torch.full((16,), index / self._size), index % 16


def _collate(samples: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Be a `collate_fn` of the user's own, which nothing can be known of."""
    inputs = [of_sample for of_sample, _ in samples]
    targets = [target for _, target in samples]
    return torch.stack(inputs), torch.tensor(targets)


class _Classifier(LightningModule):
    """Three layers that sleep for each sample, as a slow accelerator makes the host wait."""

    def __init__(self, seconds: float, *, weighted: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 16)
        )
        self.seconds = seconds
        self.weighted = weighted

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        time.sleep(self.seconds * len(targets))
        return nn.functional.cross_entropy(self.layers(inputs), targets)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = self._loss(batch)
        if self.weighted:
            return {"loss": loss, "weight": len(batch[1])}
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("loss", self._loss(batch), batch_size=len(batch[1]), sync_dist=True)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Epoch(NamedTuple):
    """One epoch of training on this rank."""

    seconds: float  # the first one from the call of `fit` on
    processor: float  # seconds, user and system, of all threads of this process, without its workers
    loaded: int  # samples, by this rank and its workers, also those of validation
    parts: list[float]  # seconds of `PARTS`


class _Parts(Profiler):
    """Takes the time of the parts of an epoch. Within a part, what Lightning calls further belongs to it."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._action: str | None = None  # that began the running part
        self._began = 0.0

    @override
    def start(self, action_name: str) -> None:
        if self._action is None and _part_of(action_name) is not None:
            self._action = action_name
            self._began = time.perf_counter()

    @override
    def stop(self, action_name: str) -> None:
        has_first_batch = self._action == _EPOCH and action_name.endswith(PARTS["loading"])
        if has_first_batch or action_name == self._action:
            part = _part_of(action_name)
            assert part is not None
            self.seconds[part] += time.perf_counter() - self._began
            self._action = None

    @override
    def summary(self) -> str:
        return ""

    def take(self, seconds: float) -> list[float]:
        """Return the seconds of all parts of an epoch that took so many, and begin the next one."""
        found = self.seconds
        self.seconds = dict.fromkeys(PARTS, 0.0)
        found["rest"] = seconds - sum(found.values())
        return list(found.values())


def _part_of(action: str) -> str | None:
    if action == "validation":
        return action
    if action == _EPOCH:
        return "loading"
    for part, suffix in PARTS.items():
        if suffix and action.endswith(suffix):
            return part
    return None


class _Epochs(Callback):
    """Saves a checkpoint at the end of each epoch, and notes what the epoch took."""

    def __init__(self, data: Sequence[_SlowSamples], parts: _Parts, folder: str) -> None:
        self.epochs: list[Epoch] = []
        self._data = data
        self._parts = parts
        self._checkpoint = Path(folder, "epoch.ckpt")
        self._began = time.perf_counter()
        self._processor_before = time.process_time()
        self._loaded_before = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After the last batch, validation begins: also its loader, before Lightning's hooks of validation."""
        del module, outputs, batch
        if batch_idx + 1 == trainer.num_training_batches:
            self._parts.start("validation")

    def on_validation_end(self, *_: Any) -> None:
        """End validation."""
        self._parts.stop("validation")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """An epoch ends, and the next one begins."""
        del module
        trainer.save_checkpoint(self._checkpoint)
        now = time.perf_counter()
        processor = time.process_time()
        loaded = sum(data.loaded.value for data in self._data)
        seconds = now - self._began
        epoch = Epoch(
            seconds, processor - self._processor_before, loaded - self._loaded_before, self._parts.take(seconds)
        )
        self.epochs.append(epoch)
        self._began = now
        self._processor_before = processor
        self._loaded_before = loaded


@contextmanager
def _folder() -> Iterator[str]:
    """Yield a folder that all ranks of this machine share, and remove it."""
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            dist.broadcast_object_list([folder], src=0)
            yield folder
            dist.barrier()
    else:
        found: list[Any] = [None]
        dist.broadcast_object_list(found, src=0)
        yield found[0]
        dist.barrier()


def _train(name: str, arguments: argparse.Namespace, workers: int, world: World) -> list[Epoch]:
    """Train under a strategy; return the epochs of this rank. A collective operation."""
    ranks = dist.get_world_size()
    global_batch = arguments.batch * ranks
    seconds = arguments.milliseconds / 1000
    data = [_SlowSamples(size, seconds) for size in (global_batch * arguments.batches, global_batch)]
    loaders: list[DataLoader[Any]] = []
    for part, is_training in zip(data, (True, False), strict=True):
        # A batch that the ranks share in training is that of all ranks. Those of validation are dealt as they are.
        size = arguments.batch
        if is_training and name not in _OWN_BATCHES:
            size = global_batch
        loader: DataLoader[Any] = DataLoader(
            part,
            batch_size=size,
            shuffle=is_training,
            num_workers=workers,
            collate_fn=_collate,
            pin_memory=world.device.type == "cuda",
        )
        loaders.append(loader)
    torch.manual_seed(0)
    module = _Classifier(arguments.compute / 1000, weighted=name == "weighted_mean")
    with _folder() as folder:
        parts = _Parts()
        clock = _Epochs(data, parts, folder)
        trainer = quiet_trainer(
            STRATEGIES[name](),
            world,
            max_epochs=EPOCHS,
            callbacks=[clock],
            profiler=parts,
            use_distributed_sampler=True,
        )
        trainer.fit(module, *loaders)
    return clock.epochs


def measure_epochs(arguments: argparse.Namespace, workers: int, names: Sequence[str], world: World) -> list[Row]:
    """Measure all rounds with a number of workers; return a row for each strategy. A collective operation."""
    numbers: dict[str, dict[str, list[Any]]] = {}
    for name in names:
        numbers[name] = {"seconds": [], "first": [], "processor": [], "parts": [], "loaded": []}
    # The first epoch of each training is dropped, so no round need be.
    for name, _ in in_rounds(names, arguments.rounds, warm_up=0):
        epochs = _train(name, arguments, workers, world)
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, [epoch.loaded for epoch in epochs])
        seconds = slowest([epoch.seconds for epoch in epochs], world)
        fastest = min(range(1, EPOCHS), key=seconds.__getitem__)
        found = numbers[name]
        found["seconds"].append(seconds[fastest])
        found["first"].append(seconds[0])
        found["processor"].extend(slowest([epochs[fastest].processor], world))
        found["parts"].append(epochs[fastest].parts)
        found["loaded"] = [list(of_epoch) for of_epoch in zip(*of_ranks, strict=True)]  # the same in every round
    case = {"ranks": dist.get_world_size(), "device": world.device.type, "workers": workers}
    progress(f"{case['ranks']} ranks, {workers} workers: measured")
    rows = []
    for name, found in numbers.items():
        rows.append(Row(case, name, found.pop("seconds"), found))
    return rows


def print_epochs(file: Path) -> None:
    """Print the table of the epochs in a file."""
    rows = load(file)
    lines = []
    for row in rows:
        ratio = row.ratio(rows)
        assert ratio is not None, "stock is always measured"
        first, *_, last = row.more["loaded"]
        lines.append(
            (
                row.variant,
                str(row.case["ranks"]),
                str(row.case["workers"]),
                Spread.of(row.seconds).text(2),
                ratio.text(3),
                Spread.of(row.more["first"]).text(2),
                f"{1000 * Spread.of(row.more['processor']).median:.0f}",
                " ".join(map(str, last)),
                " ".join(map(str, first)),
            )
        )
    columns = ["variant", "ranks", "workers", "epoch, s", "of stock", "first epoch, s", "CPU ms"]
    columns += ["samples loaded by each rank", "in the first epoch"]
    rounds = len(rows[0].seconds)
    caption = f"An epoch on the slowest rank: median [quartiles] over {rounds} rounds; ratios are taken within a round."
    print_table(file, columns, lines, caption)


def _draw(rows: Sequence[Row], file: Path) -> None:
    """Draw the parts of an epoch on rank 0, stacked: a panel for each number of workers."""
    import matplotlib as mpl  # noqa: PLC0415  # no dependency of the measurement
    from matplotlib.figure import Figure  # noqa: PLC0415

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "epoch"  # the same bytes from the same numbers
    workers = sorted({row.case["workers"] for row in rows})
    figure = Figure(figsize=(4.6 * len(workers), 4.4), layout="constrained", facecolor="white")
    axes = figure.subplots(1, len(workers), sharey=True, squeeze=False)[0]
    colors = ("#2f6fb0", "#7fb2dd", "#3a7d44", "#c8500a", "#8a5aa8", "#b8c0c8")
    for axis, number in zip(axes, workers, strict=True):
        shown = [row for row in rows if row.case["workers"] == number]
        names = [f"{row.variant}, {row.case['ranks']}" for row in shown]
        left = [0.0] * len(shown)
        for index, (part, color) in enumerate(zip(PARTS, colors, strict=True)):
            lengths = [Spread.of([parts[index] for parts in row.more["parts"]]).median for row in shown]
            axis.barh(names, lengths, left=left, color=color, label=part)
            left = [before + length for before, length in zip(left, lengths, strict=True)]
        axis.set_title(f"{number} workers", fontsize=10)
        axis.set_xlabel("seconds of an epoch")
        axis.tick_params(axis="y", labelsize=8)
    axes[0].invert_yaxis()  # the first row at the top; the axes share it
    axes[0].set_ylabel("option, ranks")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    figure.savefig(file, metadata={"Date": None})


def _run_rank(arguments: argparse.Namespace) -> None:
    """Measure with all numbers of workers; rank 0 saves."""
    with joined() as world:
        for workers in arguments.workers:
            rows = measure_epochs(arguments, workers, list(STRATEGIES), world)
            if dist.get_rank() == 0:
                save(arguments.output, rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line, by default that of this process."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.epoch", description="Measure an epoch whose samples are slow to load and to compute."
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2, 4], help="sizes of the worlds, one after the other")
    add("--workers", type=int, nargs="+", default=[0, 4], help="workers of each rank (default: 0 4)")
    add("--milliseconds", type=float, default=20.0, help="what a sample takes to load (default: 20)")
    add("--compute", type=float, default=5.0, help="milliseconds that a sample takes to compute (default: 5)")
    add("--batch", type=int, default=BATCH, help=f"samples of a rank's batch (default: {BATCH})")
    add("--batches", type=int, default=BATCHES, help=f"batches of an epoch (default: {BATCHES})")
    add("--rounds", type=int, default=3, help="trainings of each strategy (default: 3)")
    add("--output", type=Path, default=RESULTS / "epoch.json", help="file to write (default: %(default)s)")
    add("--table", type=Path, metavar="FILE", help="measure nothing, and print the table of a file")
    add("--draw", type=Path, metavar="FILE", help="measure nothing, and draw the picture of a file")
    add("--image", type=Path, default=Path("docs/images/epoch.svg"), help="the picture (default: %(default)s)")
    parsed = parser.parse_args(arguments)
    if min(*parsed.ranks, parsed.batch, parsed.batches, parsed.rounds) < 1:
        parser.error("--ranks, --batch, --batches and --rounds are 1 or more")
    return parsed


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or show what was measured."""
    parsed = parse(arguments)
    if parsed.table is not None:
        print_epochs(parsed.table)
    elif parsed.draw is not None:
        _draw(load(parsed.draw), parsed.image)
    else:
        run(_run_rank, parsed, print_epochs)


if __name__ == "__main__":
    main(sys.argv[1:])
