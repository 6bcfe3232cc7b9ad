"""What the strategy reports of single optimizer steps and `GradAvgMonitor` logs, with numbers known by hand."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from ranks import make_trainer
from toys import MLP, WEIGHTED, MemoryLogger, Toy, approx, make_loader, make_samples, same_everywhere, train

from lightning_gradavg import GradAvgMonitor, GradAvgStrategy
from lightning_gradavg.report.part import squared_norm
from lightning_gradavg.report.report import StepReport

ITEM_2 = [[[1, 2, 3]], [[4]]]
"""Samples 1, 2, 3 on rank 0 and 4 on rank 1: Toy-S has the local gradients 14/3 and 16."""


class Reports(Callback):
    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if not trainer.strategy.observing:
            trainer.strategy.observe_next_step()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if not trainer.strategy.observing:
            self.reports.append(trainer.strategy.report())


def observe(*run: Any, **options: Any) -> list[StepReport]:
    seen = Reports()
    train(*run, callbacks=[seen], **options)
    return seen.reports


def test_the_report_of_uneven_batches(world):
    """Case 55: weights 3 and 1, divisor 4, global norm 7.5, and the same text on a rerun."""
    runs = [world(2).run(observe, ITEM_2, {"kind": "s"}, WEIGHTED) for _ in range(2)]
    assert [str(report) for (report,) in runs[0]] == [str(report) for (report,) in runs[1]]
    assert [
        "step 0: reduction='weighted_mean', gradient = sum(n * g) / sum(n)",
        "  weight of this rank   3",
        "  Z                     4",
        "  gradient norm         7.5",
        "  learning rate factor  1",
    ] == str(runs[0][0][0]).splitlines()


WINDOWS = [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
SHORT = [[[1], [3], [5]], [[1], [3], [7]]]
SHORT_NUMBERS = [(2.0, 4.0, (2, 2)), (6.0, 2.0, (1, 1))]
TWO = {"accumulate_grad_batches": 2}
FOUR = {"accumulate_grad_batches": 4}
SUM = {"reduction": "sum"}
FLOAT32 = {"start": [1.0, 1.0], "dtype": torch.float32}
SCALED = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=65536.0))]}
THREE = [[[1.0]], [[3.0]], [[5.0]]]
NODES = {"nodes": [0, 0, 1]}


# What each rank reads, the toy, the strategy, further options; of every step the norm, Z, and each rank's weight.
# fmt: off
REPORTS: dict[str, tuple[Any, ...]] = {
    "case 54, strided": ([[[1, 3]], [[2, 4]]], {"kind": "s"}, {}, {}, [(7.5, 2.0, (1, 1))]),
    "case 54, weighted": (ITEM_2, {"kind": "s"}, WEIGHTED, {}, [(7.5, 4.0, (3, 1))]),
    "case 17": ([[[8.0]] * 4] * 2, {}, {}, FOUR, [(8.0, 8.0, (4, 4))]),
    "a weighted mean over windows": (WINDOWS, {}, WEIGHTED, TWO, [(4.5, 8.0, (4, 4))]),
    "a sum over windows": (WINDOWS, {"loss": "sum"}, SUM, TWO, [(36.0, 1.0, (2, 2))]),
    "a normalized sum": (WINDOWS, {"loss": "sum"}, {"reduction": "normalized_sum"}, TWO, [(4.5, 8.0, (4, 4))]),
    "case 13, a short last window": (SHORT, {}, {}, TWO, SHORT_NUMBERS),
    "case 13, weighted": (SHORT, {}, WEIGHTED, TWO, SHORT_NUMBERS),
    "case 5, a rank without samples": ([[[2, 4]], [[]]], {}, WEIGHTED, {}, [(3.0, 2.0, (2, 0))]),
    "two parameters": (
        [[[[3, 0]]], [[[0, 4]]]], {"start": [0.0, 0.0]}, {**WEIGHTED, "gradient_as_bucket_view": True}, {},
        [(2.5, 2.0, (1, 1))]),
    "named nodes": (THREE, {}, {"reduction": "mean_of_node_means"}, NODES, [(3.5, 2.0, (1, 1, 1))]),
    "a loss scale is removed": ([[[[3.0, 4.0]]]] * 2, FLOAT32, WEIGHTED, SCALED, [(5.0, 2.0, (1, 1))]),
}
# fmt: on


@pytest.mark.parametrize("name", REPORTS)
def test_what_a_window_knows(world, name):
    """The norm of the reduced gradient, Z, and the rank's own weight."""
    batches, toy, strategy, options, expected = REPORTS[name]
    run = observe, batches, {"lr": 0.0, **toy}, strategy
    ranks = world(len(batches)).run(*run, **options)
    close = functools.partial(approx, tolerance=1e-6 if toy is FLOAT32 else 1e-12)
    assert len(ranks) == len(batches)
    for rank, reports in enumerate(ranks):
        assert [(step, close(norm), close(z), weights[rank]) for step, (norm, z, weights) in enumerate(expected)] == [
            (report.step, report.gradient_norm, report.normalizer, report.weight) for report in reports
        ]


@pytest.mark.parametrize("options", [{"num_replicas": 4}, {"equivalent_to": "single_device"}])
def test_reference_modes(world, options):
    """Under equivalent_to= the norm and Z are those of one process, however the replicas share the batch."""
    strategy = {"equivalent_to": "data_parallel", **options}
    for reports in world(2).run(observe, [[[1, 2, 3, 4], [5]]] * 2, {"kind": "s", "lr": 0.0}, strategy):
        assert [(approx(7.5), 4), (approx(25.0), 1)] == [
            (report.gradient_norm, report.normalizer) for report in reports
        ]


@pytest.mark.parametrize("strategy", [{}, {**WEIGHTED, "gradient_as_bucket_view": True}])
def test_observing_changes_no_bit(world, strategy):
    """Observed training ends with the same bits as training that nobody watches, also under stock DDP's reduction."""
    data = make_samples(27)
    run = train, [data[rank::3] for rank in range(3)], {}, strategy
    options = {"module": MLP, "max_epochs": 2, "accumulate_grad_batches": 2}
    alone, watched = (
        same_everywhere(world(3).run(*run, callbacks=monitors, **options)) for monitors in ([], [GradAvgMonitor(1)])
    )
    assert torch.equal(alone.weights[-1], watched.weights[-1])


def monitored(
    per_rank: Sequence[Any], monitor: Mapping[str, Any], *run: Any, **options: Any
) -> list[tuple[int | None, dict[str, float]]]:
    """Body: train on each rank's own micro-batches under a monitor, and return what it logged."""
    memory = MemoryLogger()
    callbacks = [GradAvgMonitor(**monitor)]
    train(per_rank, *run, **{"log_every_n_steps": 0, "logger": memory, "callbacks": callbacks, **options})
    return [(step, row) for step, row in memory.rows if any(name.startswith("gradavg/") for name in row)]


def test_every_value(world):
    """Item 2's split; a logger writes what rank 0 has."""
    batches = [[[1, 2, 3]] * 2, [[4]] * 2]
    scaled = {**WEIGHTED, "lr_scaling": "linear", "base_world_size": 1, "lr_warmup_steps": 1}
    ranks = world(2).run(monitored, batches, {"every_n_steps": 1}, {"kind": "s", "lr": 0.0}, scaled)
    for rank, rows in enumerate(ranks):
        expected = [
            {"weight": (3, 1)[rank], "normalizer": 4, "gradient_norm": 7.5, "lr_factor/optimizer_0": factor}
            for factor in (1, 2)
        ]
        assert [
            (step, {f"gradavg/{name}": approx(value) for name, value in values.items()})
            for step, values in enumerate(expected)
        ] == rows


@pytest.mark.parametrize(
    ("every", "log_every", "steps"), [(None, 3, [2, 5]), (4, 3, [3]), (None, 0, []), (1, 0, [0, 1, 2, 3, 4, 5, 6])]
)
def test_how_often(world, every, log_every, steps):
    options = {"log_every_n_steps": log_every, "accumulate_grad_batches": 2}
    batches = [[[index] for index in range(1, 15)]] * 2
    monitor = {"every_n_steps": every, "check_data": False}
    for rows in world(2).run(monitored, batches, monitor, **options):
        assert steps == [step for step, _ in rows]


COLLECTIVES = [(dist, "all_reduce"), (dist, "all_gather"), (dist, "all_gather_object")]


def count_collectives(per_rank: Sequence[Any], monitors: Sequence[GradAvgMonitor]) -> int:
    """Body: train, and return how many collectives Python started."""
    with ExitStack() as stack:
        counts = [
            stack.enter_context(mock.patch.object(owner, name, autospec=True, side_effect=getattr(owner, name)))
            for owner, name in COLLECTIVES
        ]
        train(per_rank, callbacks=monitors)
        return sum(count.call_count for count in counts)


def test_steps_that_are_not_logged_do_nothing(world):
    """A logged step costs one exchange; 12 steps with 2 of them logged cost twice that."""
    batches = [[[index] for index in range(12)]] * 2
    monitors = [GradAvgMonitor(6, check_data=False)]
    alone, watched = (world(2).run(count_collectives, batches, each) for each in ([], monitors))
    assert [collectives + 2 for collectives in alone] == watched


def shown_metrics(prog_bar: bool) -> tuple[set[str], set[str]]:
    callbacks = [GradAvgMonitor(1, prefix="run", prog_bar=prog_bar)]
    trainer = make_trainer(GradAvgStrategy(), callbacks=callbacks, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(Toy(), make_loader([[1 + dist.get_rank()], [2]]))
    return {name for name in trainer.progress_bar_metrics if "/" in name}, set(trainer.callback_metrics)


@pytest.mark.parametrize(("prog_bar", "shown"), [(True, {"run/gradient_norm"}), (False, set())])
def test_the_progress_bar(world, prog_bar, shown):
    """With prog_bar the norm is in the progress bar, and in callback_metrics always, by the prefix."""
    for in_bar, in_callbacks in world(2).run(shown_metrics, prog_bar):
        assert shown == in_bar
        assert {"run/gradient_norm", "run/normalizer", "run/weight"} <= in_callbacks


def warned_of_data(per_rank: Sequence[Sequence[float]], steps: int) -> list[str]:
    """Body: train on these numbers of each rank, and return the warnings about them."""
    batches = [[[number] for number in numbers] for numbers in per_rank]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = train(batches, {"lr": 0.0}, callbacks=[GradAvgMonitor(1)], max_steps=steps)
    assert steps == len(seen.gradients)
    return [str(warning.message) for warning in caught if "same training batches" in str(warning.message)]


def test_identical_streams_are_noticed(world):
    """Case 40: within 3 steps, on rank 0; not those that are split by rank, or whose samples are all alike."""
    (message,), other = world(2).run(warned_of_data, [range(40)] * 2, 3)
    assert message.startswith("all ranks read the same training batches: every sample counts once per rank")
    assert [] == other
    for per_rank in ([range(0, 80, 2), range(1, 80, 2)], [[1] * 40] * 2):
        assert [[], []] == world(2).run(warned_of_data, per_rank, 20)


def test_norms_that_need_care():
    """(3, 4) beside (12,) in another dtype; a norm beyond float16's range; rows that occur twice are added first."""
    pair = [torch.tensor([3, 4], dtype=torch.bfloat16), None, torch.tensor([12], dtype=torch.complex64)]
    assert (169, torch.float64) == (float(squared_norm(pair)), squared_norm(pair).dtype)
    assert 0 == squared_norm([None])
    assert 1e9 == pytest.approx(float(squared_norm([torch.full((1000,), 1000.0, dtype=torch.float16)])), rel=1e-6)
    rows = torch.tensor([[1, 1, 4]])
    values = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    gradient = torch.sparse_coo_tensor(rows, values, (5, 2), check_invariants=True)
    assert 16 + 36 + 25 + 36 == pytest.approx(float(squared_norm([gradient])))
