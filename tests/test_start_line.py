"""The line at the start of a run says what the README and the first line of `gradavg verify` say of the same run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg._lightning.loaders import draws_order
from lightning_gradavg.rates.scaling import BatchScale
from lightning_gradavg.report.start_line import drops_out, normalizes_by_rank
from lightning_gradavg.verify.report import Baseline

README = " ".join((Path(__file__).resolve().parent.parent / "README.md").read_text("utf-8").split())

SAMPLES = "the samples of each step (split_batches=True keeps them)"
SHUFFLED = "the samples of each step, if Lightning's DistributedSampler shuffles them (split_batches=True keeps them)"
ORDER = "the shuffled order, if anything else draws on the CPU (a loader with generator= keeps it)"
DROPOUT, ANY = "dropout and other random numbers", "random numbers, if any are drawn"
BY_RANK = ", each rank's own (equivalent_to='data_parallel' with num_replicas= fixes them)"
BY_PIECE = ", of each piece of a batch its own"
BY_CHUNK = " are each chunk's own, on any number of ranks"
BATCH_NORM = "batch norm, which sees the samples of its own rank (equivalent_to='single_device' shares them)"

EQUAL_TERMS = " if every micro-batch has equally many loss terms, as in stock DDP"
WEIGHED = ' if its loss is a mean over its "weight", or over samples without one'
SUM = " if its loss is a sum"
SHORT = "divides the last window of an epoch, which has 1 micro-batch, by 2"
DIVIDED = f"Stock Lightning {SHORT}; here it is divided by 1"
ONE_STEP = " in one step over all samples"
AVERAGED = "Stock Lightning, on one process too, averages the losses of the 2 micro-batches"

WEIGHTED: dict[str, Any] = {"reduction": "weighted_mean"}
SPLIT: dict[str, Any] = {"split_batches": True}
ONE_DEVICE: dict[str, Any] = {"equivalent_to": "single_device"}
FOUR_DEVICES: dict[str, Any] = {"equivalent_to": "data_parallel", "num_replicas": 4}
CHUNKS = "one process with batch 8 in 4 chunks, as nn.DataParallel on 4 devices"
TWICE = "Your loader's batch is 8, so one process takes twice as many steps"
TWICE_IN_WINDOWS = "Your loader's batch is 8, and 2 of them are accumulated, so one process takes twice as many steps"
DROPPING = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.1))
NORMALIZING = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))


class Row(NamedTuple):
    """A run, and what its line says, beside its formula."""

    options: dict[str, Any]
    # The run of one process; "" if there is none.
    equals: str
    # What verify says of the number of steps, too.
    steps: str
    differs: tuple[str, ...]
    # The sentences after that.
    more: tuple[str, ...] = ()
    ranks: int = 2
    # With 2, the last window of an epoch has one micro-batch.
    window: int = 1
    # The batch size of the user's loader, None if it does not tell.
    size: int | None = 8
    shuffles: bool = False
    module: nn.Module = nn.Dropout(0.0)


# fmt: off
ROWS: dict[str, Row] = {
    "no option": Row({}, f"one process with batch 16{EQUAL_TERMS}", TWICE, (SAMPLES, f"{ANY}{BY_RANK}")),
    "no option, one process": Row(
        {}, "one process with batch 8", "", (SHUFFLED,), ranks=1, shuffles=True, module=DROPPING),
    "no option, short windows": Row(
        {}, f"one process with batch 32{ONE_STEP}{EQUAL_TERMS}", TWICE_IN_WINDOWS, (SAMPLES, f"{ANY}{BY_RANK}"),
        (DIVIDED,), window=2),
    "no option, short windows, one process": Row(
        {}, f"one process with batch 16{ONE_STEP}{EQUAL_TERMS}", "", (SHUFFLED,), (DIVIDED,),
        ranks=1, window=2),
    "weighted_mean": Row(
        WEIGHTED, f"one process with batch 16{WEIGHED}", TWICE, (SAMPLES, f"{DROPOUT}{BY_RANK}"), shuffles=True,
        module=DROPPING),
    "weighted_mean, batch norm": Row(
        WEIGHTED, f"one process with batch 16{WEIGHED}", TWICE, (SAMPLES, f"{ANY}{BY_RANK}", BATCH_NORM),
        module=NORMALIZING),
    "weighted_mean, 3 ranks": Row(
        WEIGHTED, f"one process with batch 24{WEIGHED}",
        "Your loader's batch is 8, so one process takes 3 times as many steps", (SAMPLES, f"{ANY}{BY_RANK}"), ranks=3),
    "sum": Row({"reduction": "sum"}, f"one process with batch 16{SUM}", TWICE, (SAMPLES, f"{ANY}{BY_RANK}")),
    "normalized_sum": Row(
        {"reduction": "normalized_sum"}, 'one process with batch 8 that divides its loss, a sum, by its "weight"', "",
        (SHUFFLED,), ranks=1),
    "a vote of each node": Row({"reduction": "mean_of_node_means"}, "", TWICE, (SAMPLES, f"{ANY}{BY_RANK}")),
    "a batch of unknown size": Row(
        {}, f"one process that takes the samples of all ranks in one step{EQUAL_TERMS}", "",
        (SAMPLES, f"{ANY}{BY_RANK}"), size=None),
    "split_batches": Row(
        SPLIT, f"one process with batch 8{WEIGHED}", "", (f"{ANY}{BY_RANK}", BATCH_NORM), module=NORMALIZING),
    "single_device": Row(
        ONE_DEVICE, f"one process with batch 8{WEIGHED}", "", (f"{ANY}{BY_RANK}",), module=NORMALIZING),
    "single_device, shuffled": Row(
        ONE_DEVICE, f"one process with batch 8{WEIGHED}", "", (ORDER, f"{DROPOUT}{BY_RANK}"), shuffles=True,
        module=DROPPING),
    "single_device, one process": Row(ONE_DEVICE, "one process with batch 8", "", (), ranks=1, module=DROPPING),
    "single_device, short windows": Row(
        ONE_DEVICE, f"one process with batch 16{ONE_STEP}{WEIGHED}", "", (f"{ANY}{BY_RANK}",),
        (f"{AVERAGED} and {SHORT}",), window=2),
    "single_device in pieces, one process": Row(
        {**ONE_DEVICE, "max_device_batch_size": 2}, f"one process with batch 8{WEIGHED}", "", (f"{ANY}{BY_PIECE}",),
        ranks=1),
    "data_parallel": Row(
        FOUR_DEVICES, f"{CHUNKS}{WEIGHED}", "", (ORDER,), (f"D{DROPOUT[1:]}{BY_CHUNK}",), shuffles=True,
        module=DROPPING),
    "data_parallel, one process": Row(
        FOUR_DEVICES, f"{CHUNKS}{WEIGHED}", "", (), (f"R{ANY[1:]}{BY_CHUNK}",), ranks=1, module=NORMALIZING),
}
# fmt: on


def global_batch_of(row: Row) -> int | None:
    if row.size is None:
        return None
    readers = 1 if GradAvgStrategy(**row.options)._options.split_batches else row.ranks
    return row.size * row.window * readers


def line_of(row: Row, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the line of a strategy with a run that no process has begun."""
    strategy: Any = GradAvgStrategy(**row.options)
    loop = SimpleNamespace(accumulation=row.window, short_last_window=row.window - 1)
    run = SimpleNamespace(places=range(row.ranks), num_nodes=1, loop=loop, module=row.module)
    run.module.automatic_optimization = True
    strategy._run = strategy._reduction.run = strategy._rates.run = run
    strategy._parts = (SimpleNamespace(describe=lambda: "A remark."), SimpleNamespace(describe=lambda: ""))
    batch = global_batch_of(row)
    strategy._rates.batch = BatchScale(batch or 1, 1, known=batch is not None)
    strategy._rates._loader_sizes = [row.size]
    if row.options.get("split_batches") or "equivalent_to" in row.options:
        strategy._batches._loaders = [SimpleNamespace(loader=DataLoader(range(8), 8, shuffle=row.shuffles))]
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "gloo")
    return str(strategy._start_line())


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_start_line(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *sentences, formula = line_of(row, monkeypatch).split(". ")

    batch = "unknown size" if row.size is None else f"{global_batch_of(row)} samples"
    ranks = "1 rank" if row.ranks == 1 else f"{row.ranks} ranks"
    windows = ", 2 micro-batches per optimizer step" if row.window == 2 else ""
    assert f"GradAvgStrategy: {ranks} on 1 node (gloo), global batch of {batch}{windows}" == first
    expected = [f"Equal to {row.equals}"] if row.equals else []
    if row.steps:
        expected.append(row.steps)
    if row.differs:
        expected.append(f"Different from one process: {'; '.join(row.differs)}")
    assert [*expected, *row.more, "A remark"] == sentences
    assert formula.startswith("gradient = ")
    shared = " of a batch that ranks share" if "n is its weight" in formula and "reduction" not in row.options else ""
    assert formula.endswith(f"(reduction={row.options.get('reduction', 'mean')!r}{shared}).")


def test_verify_names_the_same_run_and_steps() -> None:
    """The first line of a report has the same batch, and the same words about the number of steps."""
    for row in ROWS.values():
        if not row.equals:
            continue
        run, _, steps = str(Baseline(global_batch_of(row) or 0, row.size or 0, row.window)).partition(".")
        assert row.equals.startswith(run)
        assert row.steps == steps.strip().removesuffix(": see docs/which_run.md.")


def test_the_readme_says_the_same() -> None:
    """What the README calls equal and different, beside the loading, is what the line says of these runs."""
    assert "$ gradavg verify train.py:Net --strategy gradavg_single_device EQUAL to one process with batch 8." in README
    assert "DIFFERENT from one process with batch 16. Your loader's batch is 8, so one process takes twice" in README
    assert "- **Dropout and augmentation** draw other numbers on each process" in README
    assert 'use `equivalent_to="data_parallel"` with [`num_replicas=`]' in README
    assert (
        "counts as one batch, also if it is short. Stock Lightning averages its batches' means, and divides a short one"
        in README
    )


def test_a_batch_norm_of_one_rank() -> None:
    assert normalizes_by_rank(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
    assert not normalizes_by_rank(nn.Sequential(nn.SyncBatchNorm(1), nn.LayerNorm(1), nn.InstanceNorm1d(1)))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout1d(0.1),
        nn.AlphaDropout(0.1),
        nn.MultiheadAttention(4, 2, dropout=0.1),
        nn.LSTM(2, 2, num_layers=2, dropout=0.1),
        nn.TransformerEncoderLayer(4, 2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_dropout(layer: nn.Module) -> None:
    assert drops_out(nn.Sequential(layer))


def test_no_dropout() -> None:
    assert not drops_out(nn.Sequential(nn.Dropout(0.0), nn.LSTM(2, 2), nn.TransformerEncoderLayer(4, 2, dropout=0.0)))


class Stream(IterableDataset[int]):
    """Whose order is that in which it is read."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_an_order_that_is_drawn() -> None:
    data = range(4)
    assert draws_order(DataLoader(data, shuffle=True))
    assert draws_order(DataLoader(data, batch_sampler=[[0, 1], [2]]))
    assert draws_order(DataLoader(data, sampler=RandomSampler(data)))
    assert not draws_order(DataLoader(data, shuffle=True, generator=torch.Generator()))
    assert not draws_order(DataLoader(data))
    assert not draws_order(DataLoader(Stream()))
    assert not draws_order([[0, 1]])
