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
from torch import nn
from toys import MLP, WEIGHTED, MemoryLogger, Toy, approx, make_loader, make_samples, same_everywhere, train

from lightning_gradavg import GradAvgMonitor, GradAvgStrategy
from lightning_gradavg.report.part import local_gradients, squared_norm
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


def agreed(of_ranks: Sequence[Sequence[StepReport]], steps: int = 1) -> Sequence[StepReport]:
    assert [steps] * len(of_ranks) == [len(reports) for reports in of_ranks]
    for reports in of_ranks[1:]:
        assert [str(report) for report in reports] == [str(report) for report in of_ranks[0]]
    return of_ranks[0]


def test_the_report_of_uneven_batches(world):
    """Case 55: weights [3, 1], divisor 4, global norm 7.5, local norms 4.6667 and 16, and the same text on a rerun."""
    report, again = (agreed(world(2).run(observe, ITEM_2, {"kind": "s"}, WEIGHTED))[0] for _ in range(2))
    assert ((3, 1), (3, 1), 4) == (report.weights, report.samples, report.normalizer)
    assert str(again) == str(report)
    assert [
        "step 0: reduction='weighted_mean', gradient = sum(n * g) / sum(n), 2 ranks",
        "  loss                  3.75",
        "  weights               3, 1",
        "  multipliers           3, 1",
        "  Z                     4",
        "  global batch          4",
        "  micro-batches         1, 1",
        "  gradient norm         7.5",
        "  local gradient norms  4.66667, 16",
        "  learning rates        0.01",
    ] == str(report).splitlines()


WINDOWS = [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
SHORT = [[[1], [3], [5]], [[1], [3], [7]]]
SHORT_NUMBERS = [(2.0, 2.0, (2.0, 2.0)), (6.0, 6.0, (5.0, 7.0))]
TWO = {"accumulate_grad_batches": 2}
FOUR = {"accumulate_grad_batches": 4}
SUM = {"reduction": "sum"}
FLOAT32 = {"start": [1.0, 1.0], "dtype": torch.float32}
SCALED = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=65536.0))]}
THREE = [[[1.0]], [[3.0]], [[5.0]]]
NODES = {"nodes": [0, 0, 1]}


# What each rank reads, the toy, the strategy, further options; of every step the loss, the norm and the local norms.
# fmt: off
REPORTS: dict[str, tuple[Any, ...]] = {
    "case 54, strided": ([[[1, 3]], [[2, 4]]], {"kind": "s"}, {}, {}, [(3.75, 7.5, (5.0, 10.0))]),
    "case 54, weighted": (ITEM_2, {"kind": "s"}, WEIGHTED, {}, [(3.75, 7.5, (14 / 3, 16.0))]),
    "case 17": ([[[8.0]] * 4] * 2, {}, {}, FOUR, [(8.0, 8.0, (8.0, 8.0))]),
    "a weighted mean over windows": (WINDOWS, {}, WEIGHTED, TWO, [(4.5, 4.5, (2.5, 6.5))]),
    "a sum over windows": (WINDOWS, {"loss": "sum"}, SUM, TWO, [(36.0, 36.0, (10.0, 26.0))]),
    "a normalized sum": (
        WINDOWS, {"loss": "sum"}, {"reduction": "normalized_sum"}, TWO, [(4.5, 4.5, (10.0, 26.0))]),
    "case 13, a short last window": (SHORT, {}, {}, TWO, SHORT_NUMBERS),
    "case 13, weighted": (SHORT, {}, WEIGHTED, TWO, SHORT_NUMBERS),
    "static graph": (ITEM_2, {"kind": "s"}, {"static_graph": True}, {}, [(31 / 6, 31 / 3, (14 / 3, 16.0))]),
    "case 5, a rank without samples": ([[[2, 4]], [[]]], {}, WEIGHTED, {}, [(3.0, 3.0, (3.0, 0.0))]),
    "two parameters": (
        [[[[3, 0]]], [[[0, 4]]]], {"start": [0.0, 0.0]}, {**WEIGHTED, "gradient_as_bucket_view": True}, {},
        [(0.0, 2.5, (3.0, 4.0))]),
    "named nodes": (THREE, {}, {"reduction": "mean_of_node_means"}, NODES, [(3.5, 3.5, (1.0, 3.0, 5.0))]),
    "a loss scale is removed": ([[[[3.0, 4.0]]]] * 2, FLOAT32, WEIGHTED, SCALED, [(7.0, 5.0, (5.0, 5.0))]),
}
# fmt: on


@pytest.mark.parametrize("name", REPORTS)
def test_loss_and_norms(world, name):
    """For one parameter `g = sum(w * g_r) / Z` holds among the reported numbers."""
    batches, toy, strategy, options, expected = REPORTS[name]
    run = observe, batches, {"lr": 0.0, **toy}, strategy
    reports = agreed(world(len(batches)).run(*run, **options), len(expected))
    close = functools.partial(approx, tolerance=1e-6 if toy is FLOAT32 else 1e-12)
    for index, (report, (loss, norm, local_norms)) in enumerate(zip(reports, expected, strict=True)):
        assert (index, close(loss), close(norm)) == (report.step, report.loss, report.gradient_norm)
        assert tuple(map(close, local_norms)) == report.local_gradient_norms
        if "start" not in toy:
            summed = sum(w * g for w, g in zip(report.multipliers, report.local_gradient_norms, strict=True))
            assert approx(summed / report.normalizer) == report.gradient_norm


@pytest.mark.parametrize("options", [{"num_replicas": 4}, {"equivalent_to": "single_device"}])
def test_reference_modes(world, options):
    """Under equivalent_to= the loss and the norm are those of one process, however the replicas share the batch."""
    strategy = {"equivalent_to": "data_parallel", **options}
    reports = agreed(world(2).run(observe, [[[1, 2, 3, 4], [5]]] * 2, {"kind": "s", "lr": 0.0}, strategy), steps=2)
    assert [(approx(3.75), approx(7.5)), (approx(12.5), approx(25.0))] == [
        (report.loss, report.gradient_norm) for report in reports
    ]
    assert {(None, None)} == {report.samples for report in reports}, "a rank's loss may reach another's samples"


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
    """Item 2's split."""
    batches = [[[1, 2, 3]] * 2, [[4]] * 2]
    options = {"every_n_steps": 1, "per_rank": True}
    results = world(2).run(monitored, batches, options, {"kind": "s", "lr": 0.0}, WEIGHTED)
    (first, values), (second, later) = results[0]
    assert (0, 1) == (first, second)
    expected = {"loss": 3.75, "normalizer": 4, "gradient_norm": 7.5}
    expected |= {"lr_scale": 1, "lr/group_0": 0, "global_batch_size": 4}
    for name, (mean, smallest, largest, *of_ranks) in {
        "weight": (2, 1, 3, 3, 1),
        "local_gradient_norm": (31 / 3, 14 / 3, 16, 14 / 3, 16),
    }.items():
        expected |= {f"{name}/mean": mean, f"{name}/min": smallest, f"{name}/max": largest}
        expected |= {f"{name}/rank_{rank}": value for rank, value in enumerate(of_ranks)}
    assert {f"gradavg/{name}": approx(value) for name, value in expected.items()} == values
    assert values == later


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
HOOKS = [(torch.Tensor, "register_post_accumulate_grad_hook"), (torch.Tensor, "register_hook")]


def count_work(per_rank: Sequence[Any], monitors: Sequence[GradAvgMonitor]) -> list[int]:
    """Body: train, and return how many collectives Python started, and how many hooks it registered."""
    with ExitStack() as stack:
        counts = [
            [
                stack.enter_context(mock.patch.object(owner, name, autospec=True, side_effect=getattr(owner, name)))
                for owner, name in kind
            ]
            for kind in (COLLECTIVES, HOOKS)
        ]
        train(per_rank, callbacks=monitors)
        return [sum(each.call_count for each in kind) for kind in counts]


def test_steps_that_are_not_logged_do_nothing(world):
    """A logged step costs one exchange and one hook per parameter; 12 steps with 2 of them logged cost twice that."""
    batches = [[[index] for index in range(12)]] * 2
    monitors = [GradAvgMonitor(6, check_data=False)]
    alone, watched = (world(2).run(count_work, batches, each) for each in ([], monitors))
    for (collectives, hooks), found in zip(alone, watched, strict=True):
        assert [collectives + 2, hooks + 2] == found


def shown_metrics(prog_bar: bool) -> tuple[set[str], set[str]]:
    callbacks = [GradAvgMonitor(1, prefix="run", prog_bar=prog_bar)]
    trainer = make_trainer(GradAvgStrategy(), callbacks=callbacks, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(Toy(), make_loader([[1 + dist.get_rank()], [2]]))
    return {name for name in trainer.progress_bar_metrics if "/" in name}, set(trainer.callback_metrics)


@pytest.mark.parametrize(("prog_bar", "shown"), [(True, {"run/loss", "run/gradient_norm"}), (False, set())])
def test_the_progress_bar(world, prog_bar, shown):
    """With prog_bar the loss and the norm are in the progress bar, and in callback_metrics always, by the prefix."""
    for in_bar, in_callbacks in world(2).run(shown_metrics, prog_bar):
        assert shown == in_bar
        assert {"run/loss", "run/gradient_norm", "run/weight/min"} <= in_callbacks


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


def test_what_is_accumulated_is_seen():
    """A hook sees the gradient of the whole window, and no hook is left afterwards, not even after an error."""
    used = nn.Parameter(torch.ones(2))
    unused = nn.Parameter(torch.ones(1))
    (used * torch.tensor([1.0, 2.0])).sum().backward()
    (unused * 5).sum().backward()
    with local_gradients([used, unused, nn.Parameter(torch.zeros(2))], accumulated=True) as squares:
        (used * torch.tensor([2.0, 2.0])).sum().backward()
        assert used.grad is not None
        used.grad.zero_()  # as a reduction overwrites it
    assert {used: 9 + 16, unused: 25} == {parameter: float(square) for parameter, square in squares.items()}

    with pytest.raises(KeyError), local_gradients([used], accumulated=False) as later:
        raise KeyError
    used.sum().backward()
    assert {} == later
    assert 25 == squares[used]
