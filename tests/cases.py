"""What the product promises of one step, as a table: losses, weights and windows, and the gradient by hand.

A micro-batch is the gradient of its loss, or a pair of that and its weight, or a tensor of its samples' gradients. A
row holds, for each rank, the windows of its run, each a list of micro-batches; in a user's own loop, something else may
happen between them. `test_ranks_cases.py` runs every row in each of its ways, and `test_ranks_fuzz.py` draws more rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg._support.place import Place
from lightning_gradavg.rules import RULES, Share, resolve_rule

NAN, INF = math.nan, math.inf
LOOPS = ("manual", "fabric", "reducer")
"""Ways in which the user says where a window ends."""
OF_DDP = ("automatic", *LOOPS)
WAYS = (*OF_DDP, "average", "sharded")
"""And "split": the ranks share each batch of the loader, which is what they have of it, end to end.

In "twice", one Trainer makes two runs.
"""
OF_SHARDED = ("mean", "sum", "weighted_mean", "normalized_sum")
CLEARS = CLEARED, ZEROED = "gradients set to None", "gradients set to 0"
"""Between micro-batches: what the user does to gradients, and so gives up the window that has begun."""


class Fails(NamedTuple):
    """A micro-batch whose backward raises, which ends its window: those after it do not run."""

    gradient: float
    weight: float


class Steep(NamedTuple):
    """A micro-batch of a finite loss whose gradient is NaN."""

    gradient: Any
    weight: Any


BOTH = ("first", "second")


class Trains(NamedTuple):
    """A micro-batch from which on these parameters train, and no others; whether it ends their window, None if last."""

    gradient: Any
    weight: Any
    parameters: Sequence[str] = BOTH
    ends: bool | None = None


@dataclass(frozen=True)
class Case:
    """A row.

    Attributes:
        name: What is special about it.
        reduction: The rule.
        windows: `windows[rank][window]`, a list of micro-batches.
        gradients: After each window, by hand: one number, or one for each parameter; or what all ranks raise.
        ways: How it is run; ways that cannot serve the row at all are left out.
        nodes: The node of each rank; all on one by default.
        refused: Ways that refuse the row, with what the error says.
        options: Of the strategy, or of DDP where there is none.
        keeps: Whether no gradient is zeroed between windows.
        dtype: Of the parameters.
        begins: The parameters that train at first.
        loss: What the loss of a tensor of samples is to the samples' losses.
        reads: What kind of loader yields the micro-batches of an automatic run.
        collects: Whether every automatic step runs a collective of the user's own.
    """

    name: str
    reduction: Any
    windows: Sequence[Sequence[Sequence[Any]]]
    gradients: Sequence[Any] | str
    ways: Sequence[str] = WAYS
    nodes: Sequence[int] | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    keeps: bool = False
    dtype: torch.dtype = torch.float64
    begins: Sequence[str] = BOTH
    loss: Callable[[torch.Tensor], torch.Tensor] = torch.mean
    reads: str = "list"
    collects: bool = False

    def said(self, way: str) -> str | None:
        """Return what the error says, or None if there is none."""
        return self.refused.get(way, self.gradients if isinstance(self.gradients, str) else None)

    def __str__(self) -> str:
        return f"{getattr(self.reduction, '__name__', self.reduction)}-{self.name}".replace(" ", "_")


def root(place: Place, weight: Any) -> Share:
    """A user's rule: node means, weighed by the square root of the weight, which also normalizes."""
    return Share(weight**0.5 / place.ranks_on_node, weight**0.5)


def halved(place: Place, weight: Any) -> Share:
    """A user's rule that windows may have any length of."""
    return Share(weight / 2, weight)


def infinite(place: Place, weight: Any) -> Share:
    return Share(weight, INF if place.rank == 1 else weight)


def no_share(place: Place, weight: Any) -> Any:
    return weight


def of_world(place: Place, weight: Any) -> Share:
    """Its multiplier follows the length of the window."""
    return Share(weight / place.world_size, weight)


def drifting(place: Place, weight: Any) -> Share:
    """Its multiplier follows the length of the window by a factor that depends on the weight."""
    return Share(weight + place.world_size, 1.0)


def normalizing(place: Place, weight: Any) -> Share:
    """Its normalizer follows the length of the window."""
    return Share(weight, weight / place.ranks_on_node)


def uneven(place: Place, weight: Any) -> Share:
    """Its multiplier follows the length of the window on one rank alone."""
    return Share(weight / place.ranks_on_node ** (place.rank == 0), weight)


def doubling(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A user's communication hook, whose calls show: twice the mean."""
    return default_hooks.allreduce_hook(state, bucket).then(lambda done: 2 * done.value())


def tripled(hook: Any) -> Any:
    """A user's wrapper of a hook: three times what it gives."""
    return lambda state, bucket: hook(state, bucket).then(lambda done: 3 * done.value())


def of_rules(name: str, windows: Any, gradients: Mapping[Any, Any], **options: Any) -> list[Case]:
    """Return a row for each rule, of which sharded models know some, and averages have no windows."""
    rows = []
    for rule, expected in gradients.items():
        refused = {} if rule in OF_SHARDED else {"sharded": "needs the node of each rank"}
        longer = any(len(window) > 1 for of_rank in windows for window in of_rank)
        ways = [way for way in options.get("ways", WAYS) if not (longer and way == "average")]
        rows.append(Case(name, rule, windows, expected, **{**options, "ways": ways}, refused=refused))
    return rows


def weighted(name: str, windows: Any, gradients: Any, reduction: Any = "weighted_mean", **options: Any) -> Case:
    (row,) = of_rules(name, windows, {reduction: gradients}, **options)
    return row


def samples(*gradients: float) -> torch.Tensor:
    return torch.tensor(gradients, dtype=torch.float64)


THREE = [[[(1.0, 1)]], [[(3.0, 4)]], [[(8.0, 9)]]]
"""Two ranks on one node and one on another."""
TWO = [[[(1.0, 1), (3.0, 4)], [(5.0, 1)]], [[(5.0, 9), (8.0, 16)], [(9.0, 3)]]]
"""A window of two, and a short one."""
ON_TWO_NODES: Mapping[Any, Any] = {
    "mean": [17 / 4, 14 / 2],
    "sum": [17.0, 14.0],
    "weighted_mean": [186 / 30, 32 / 4],
    "normalized_sum": [17 / 30, 14 / 4],
    "mean_of_node_sums": [(4 + 13) / 2, 14 / 2],
    "mean_of_node_means": [(2 + 6.5) / 2, 14 / 2],
    "sum_of_node_means": [2 + 6.5, 14.0],
    halved: [186 / 30 / 2, 32 / 4 / 2],
}
LATE = [[[(2.0, 1)]] * 3, [[(4.0, 3)], [(NAN, 0)], [(6.0, 1)]]]
FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
WEIGHTS: Sequence[Any] = [
    *(3, 3.0, np.int64(3), np.float32(3), np.float64(3), np.uint8(3), np.array(3), Fraction(3), Decimal(3)),
    torch.ones(3, dtype=torch.bool).sum(),
    *(
        torch.full(shape, 3, dtype=dtype, requires_grad=dtype in FLOATING)
        for shape in ((), (1,), (1, 1))
        for dtype in (*FLOATING, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    ),
]
"""3 in every type."""
NO_WEIGHTS: Mapping[str, Any] = {
    "a weight is one number, got 'many' of type str": "many",
    "a weight is one number, got a tensor of shape (2,)": torch.ones(2),
    "of type int": 10**400,
    "a tensor of shape () and torch.complex64": torch.tensor(1j),
    "global_mean": {"a": 1.0, "b": 2.0},
}
NAMED = {"a": 1.0, "b": 2.0}
"""A loss or a weight for each term by name, which is retired."""
GLOBAL_MEAN = "global_mean"
"""What serves them instead, as the error says."""
OF_LENGTH = "depends on the number of micro-batches"
DDP_OPTIONS: Sequence[Mapping[str, Any]] = (
    {"gradient_as_bucket_view": True},
    {"gradient_as_bucket_view": False},
    {"find_unused_parameters": True},
    {"bucket_cap_mb": 1e-5},
    {"broadcast_buffers": False},
)
HOOKS: Mapping[str, tuple[float, Mapping[str, Any]]] = {
    "a partial function": (2, {"ddp_comm_hook": partial(doubling)}),
    "a hook in 16 bits": (1, {"ddp_comm_hook": default_hooks.fp16_compress_hook}),
    "a wrapped hook": (6, {"ddp_comm_hook": doubling, "ddp_comm_wrapper": tripled}),
    "a wrapper alone": (3, {"ddp_comm_wrapper": tripled}),
}
"""What the hook multiplies the mean by, and the options. 16 bits hold the numbers of the rows."""
HOOKS_REFUSED: Mapping[Any, Any] = {
    post_localSGD_hook: PostLocalSGDState(None, None, start_localSGD_iter=2),
    powerSGD_hook.powerSGD_hook: powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2),
    quantization_hooks.quantization_pertensor_hook: None,
}
"""Those that own the averaging, or cannot run on the backend, with their states."""
STATIC_GRAPHS: Sequence[Mapping[str, Any]] = (
    {"static_graph": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
    {"static_graph": True, "gradient_as_bucket_view": False},
)
STATIC_BY_HAND = hasattr(GradAvgStrategy(), "_pl_static_graph_delay_done")
"""Whether Lightning starts the first reduction of a static graph in manual optimization."""
FIRST, SECOND = ("first",), ("second",)
TURNS = [
    [[Trains(*first, FIRST)], [Trains(*second, SECOND)]] * 2
    for first, second in (((1.0, 3), (9.0, 1)), ((5.0, 1), (1.0, 3)))
]
"""As of a generator and its critic."""
OPEN_AT_ONCE = [
    [
        Trains(*first, FIRST, ends=False), Trains(*second, SECOND, ends=False),
        Trains(*last_of_first, FIRST, ends=True), Trains(*last_of_second, SECOND, ends=True),
    ]
    for first, last_of_first, second, last_of_second in (
        ((1.0, 1), (3.0, 2), (5.0, 1), (7.0, 1)),
        ((2.0, 1), (6.0, 4), (8.0, 3), (4.0, 1)),
    )
]  # fmt: skip
"""Of two ranks: as of a generator and its critic, whose windows of two micro-batches are open at once."""
ON_ONE_RANK: Mapping[str, Any] = {
    "mean": (4 / 2, 12 / 2), "sum": (4.0, 12.0), "weighted_mean": (7 / 3, 12 / 2), "normalized_sum": (4 / 3, 12 / 2),
}  # fmt: skip
ON_TWO_RANKS: Mapping[str, Any] = {
    "mean": (12 / 4, 24 / 4), "sum": (12.0, 24.0), "weighted_mean": (33 / 8, 40 / 6),
    "normalized_sum": (12 / 8, 24 / 6),
}  # fmt: skip
TWO_OPEN = "two windows are open at once"
STOPPED = "stopped training within a window"
OVERLAPS: Mapping[str, Any] = {
    "before it ends": [(1.0, 1, FIRST, False), (2.0, 1, BOTH, True)],
    "while it goes on": [(1.0, 1, FIRST, False), (2.0, 1, BOTH, False), (3.0, 1, FIRST, True)],
    "of more parameters": [(1.0, 1, BOTH, False), (2.0, 1, FIRST, True)],
}
"""What is trained while a window of other parameters is open, of which it trains some."""
KEPT: Mapping[str, Any] = {
    # What two ranks have, and the gradient by each rule; in windows of n, n times the sum.
    "A": ((1.0, 1), (3.0, 3), {"mean": 2.0, "sum": 4.0, "weighted_mean": 10 / 4, "normalized_sum": 4 / 4}),
    "B": ((2.0, 3), (4.0, 5), {"mean": 3.0, "sum": 6.0, "weighted_mean": 26 / 8, "normalized_sum": 6 / 8}),
    "C": ((5.0, 1), (7.0, 1), {"mean": 6.0, "sum": 12.0, "weighted_mean": 6.0, "normalized_sum": 12 / 2}),
    "-": ((NAN, 0), (NAN, 0), {"weighted_mean": 0.0, "normalized_sum": 0.0}),
}
UNUSED = {"find_unused_parameters": True}
HALVES = ((20000.0, 3), (16000.0, 1))
NO_LOSS = "training_step returned no loss within an accumulation window, which would then not be reduced."
SECOND_LOST: Sequence[Any] = [[(2.0, 1)], [(None, 1)], [(6.0, 1)]]
EXTREME = [[[(1.0, number)] for number in (1e-300, -0.0, 1e300)], [[(3.0, number)] for number in (3e-300, 5, 3e300)]]
FEWER = [[[(1.0, 1)]] * 5, [[(3.0, 1)]] * 3]
GONE_BY_HAND = "1 of 2 ranks have no more batches in this epoch, and reduction='mean' counts ranks in manual"
LESS = [[[1.0, 2.0], [3.0, 5.0], [7.0]], [[6.0, 11.0], [2.0]]]
HOOKED = {"ddp_comm_hook": doubling}
JUDGED, SKIPPED = {"nonfinite": "raise"}, {"nonfinite": "skip_step"}
SPLITS: Sequence[Mapping[str, Any]] = (
    {"split_batches": True},
    {"split_batches": True, "max_device_batch_size": 1},
    {"equivalent_to": "data_parallel"},
    {"equivalent_to": "data_parallel", "num_replicas": 4},
)
NO_STATIC_GRAPH = "static_graph"


def kept(totals: str, reduction: str, length: int, **options: Any) -> Case:
    """Return a row in which the gradients of windows add up, whose micro-batches are those that `totals` names."""
    steps = [KEPT[one] for one in totals]
    of_ranks = [[[step[rank]] * length for step in steps] for rank in (0, 1)]
    factor = length if reduction == "sum" else 1
    gradients = [*accumulate(factor * step[2][reduction] for step in steps)]
    name = f"kept, totals {totals} in windows of {length}, {options}"
    return Case(name, reduction, of_ranks, gradients, OF_DDP, options=options, keeps=True)


# fmt: off
CASES: Sequence[Case] = [
    *of_rules(
        "of three ranks", THREE,
        {
            "mean": [4.0], "sum": [12.0], "weighted_mean": [85 / 14], "normalized_sum": [12 / 14],
            "mean_of_node_sums": [(4 + 8) / 2], "mean_of_node_means": [(2 + 8) / 2], "sum_of_node_means": [10.0],
            root: [(1 / 2 + 2 * 3 / 2 + 3 * 8) / 6],
        },
        nodes=[0, 0, 1], ways=["automatic", "average"]),
    *of_rules("in windows on two nodes", TWO, ON_TWO_NODES, nodes=[0, 1]),
    *of_rules(
        "in windows, with validation in them, and in a second run", TWO,
        {"mean": [17 / 4, 14 / 2] * 2, "weighted_mean": [186 / 30, 32 / 4] * 2}, ways=["twice"]),
    weighted("in windows under a hook of the user", TWO, [2 * 186 / 30, 2 * 8.0], ways=["automatic"], options=HOOKED),
    *(
        weighted(f"under {name}", [[[(1.0, 1)]], [[(5.0, 3)]]], [4.0 * factor], ways=["automatic"], options=options)
        for name, (factor, options) in HOOKS.items()
    ),
    *(
        weighted(
            f"under {hook.__name__}", [[[(1.0, 1)]]] * 2,
            f"ddp_comm_hook={hook.__name__} cannot be combined with a reduction", ways=["automatic"],
            options={"ddp_comm_hook": hook, "ddp_comm_state": state})
        for hook, state in HOOKS_REFUSED.items()
    ),
    *of_rules(
        "whose loss of weight 0 is NaN", LATE, {"weighted_mean": [3.5, 2.0, 4.0], "normalized_sum": [1.5, 2.0, 4.0]}),
    weighted(
        "whose loss is NaN after one of weight 0", [[[(1.0, 1)]] * 2, [[(NAN, 0)], [(NAN, 1)]]], [1.0, NAN], ways=OF_DDP
    ),
    *of_rules(
        "whose totals change after steps of equal totals",
        [
            [*[[(1.0, 1)]] * 3, [(2.0, 3)], *[[(NAN, 0)]] * 3, [(2.0, 1)]],
            [*[[(3.0, 1)]] * 3, [(4.0, 5)], [(6.0, 2)], *[[(NAN, 0)]] * 2, [(4.0, 3)]],
        ],
        {
            "weighted_mean": [2.0] * 3 + [26 / 8, 6.0, 0.0, 0.0, 3.5],
            "normalized_sum": [2.0] * 3 + [6 / 8, 6 / 2, 0.0, 0.0, 6 / 4],
        }),
    weighted("of nothing in a window", [[[(NAN, 0)] * 3, [(1.0, 1)]], [[(NAN, 0)] * 3, [(NAN, 0)]]], [0.0, 1.0]),
    weighted("of weights beyond float32", [[[(0.0, 2**24)]], [[(2.0**24 + 1, 1)]]], [1.0]),
    weighted(
        "of weights of every type", [[[(2.0, one)] for one in WEIGHTS], [[(10.0, 1)]] * len(WEIGHTS)],
        [4.0] * len(WEIGHTS)),
    *(
        weighted("of extreme weights", EXTREME, expected, ways=ways)
        for ways, expected in (
            (["automatic", "average", "sharded"], [2.5, 3.0, 2.5]),
            # The first window chooses what losses are scaled by where their windows may be longer.
            (LOOPS, "rank 0: micro-batch 0 of the window: its multiplier 1e+300 overflows when it is scaled by"),
        )
    ),
    # Totals of so many micro-batches have squares that float64 rounds.
    weighted("of a long window", [[[(2.0, 1)] * 1500], [[(4.0, 3)] * 1500]], [3.5], ways=["reducer"]),
    *of_rules(
        "with windows of different lengths", [[[(1.0, 1), (3.0, 3)]], [[(5.0, 4)]]],
        {"weighted_mean": [(1 + 9 + 20) / 8], "normalized_sum": [9 / 8], "sum": [9.0]}),
    Case(
        "with windows of different lengths", "mean_of_node_means", [[[1.0, 3.0]], [[5.0]]],
        "rank 0: one loss, no weight given, in a window of 2, which 'mean_of_node_means' depends on", OF_DDP,
        refused={"automatic": "1 of 2 ranks have no more batches in this epoch, and reduction='mean_of_node_means'"}),
    *(
        Case(f"of fewer batches of a {kind} on a rank", rule, FEWER, [2.0] * 3 + [1.0] * 2, ["automatic"], reads=kind)
        for rule, kinds in (("weighted_mean", ("list", "workers")), ("mean", ("list", "stream", "iterable")))
        for kind in kinds
    ),
    Case("of fewer batches on a rank", "weighted_mean", FEWER, [2.0] * 3 + [1.0] * 2, ["manual"]),
    Case("of fewer batches on a rank", "mean", FEWER, GONE_BY_HAND, ["manual"]),
    *(
        Case(
            "of fewer batches on a rank", root, FEWER, "have no more batches in this epoch, and reduction='root'", [way]
        )
        for way in ("automatic", "manual")
    ),
    *(
        Case(f"of {name}", rule, windows, gradients, ["automatic"], options=options)
        for name, rule, windows, gradients, options in (
            ("a rank without batch", "weighted_mean", [[], [[(2.0, 1)], [(4.0, 1)]]], [2.0, 4.0], {}),
            ("a rank without batch", "mean", [[], [[2.0], [4.0]]], [2.0, 4.0], {"check_replicas_every_n_steps": 1}),
            ("a rank that has fewer, judged", "mean", LESS, [20 / 4, 10 / 3, 7.0], JUDGED),
            ("a rank that has fewer, under a hook", "mean", LESS, [2 * 20 / 4, 2 * 10 / 3, 2 * 7.0], HOOKED),
        )
    ),
    *(
        Case(f"under {options}", "weighted_mean", TWO, [186 / 30, 8.0], ["automatic", "manual"], options=options)
        for options in DDP_OPTIONS
    ),
    *(
        Case(
            f"under {options}", "weighted_mean", [[[(1.0, 1)], [(5.0, 1)]], [[(5.0, 3)], [(9.0, 1)]]], [4.0, 7.0],
            ["automatic", "manual"], options=options,
            refused={} if STATIC_BY_HAND else {"manual": "with manual optimization"})
        for options in STATIC_GRAPHS
    ),
    # DDP records one backward, which those within a window are not.
    *(
        Case(f"in windows under {options}", reduction, TWO, NO_STATIC_GRAPH, ["automatic", "manual"], options=options)
        for reduction in ("sum", "weighted_mean")
        for options in STATIC_GRAPHS
    ),
    # The next reduction overwrites what is in a bucket.
    weighted(
        "added to gradients that are kept", TWO, [6.2, 6.2 + 8], ways=OF_DDP,
        options={"gradient_as_bucket_view": True}, keeps=True),
    *(
        Case(f"without a loss {where}", reduction, windows, expected, ["automatic"])
        for reduction in ("mean", "weighted_mean")
        for where, windows, expected in (
            ("of one", [SECOND_LOST], [2.0, 0.0, 6.0]),
            ("of two", [SECOND_LOST] * 2, [2.0, 0.0, 6.0]),
            ("in a window", [[[(2.0, 1), (None, 1)]]], NO_LOSS),
            ("first in a window", [[[(None, 1), (2.0, 1)]]], NO_LOSS),
        )
    ),
    *(
        Case(
            f"raised for {name}", "mean", [[[2.0]] * 3, [[2.0], [2.0], [last]]], f"optimizer step 2: {said}",
            ["automatic"], options=JUDGED)
        for name, last, said in (
            ("a loss", NAN, "nothing on rank 0; the loss is not finite on rank 1"),
            ("no loss", (None, 1), "nothing on rank 0; training_step returned no loss on rank 1"),
            ("a gradient", Steep(2.0, 1), "the gradient of parameter 'net.first' is not finite"),
        )
    ),
    *(
        Case(f"without a loss, {what}", "mean", [SECOND_LOST] * 2, [2.0, 0.0, 6.0], ["automatic"], options=options)
        for what, options in (("judged", JUDGED), ("left out", SKIPPED))
    ),
    *(
        Case(
            f"without a loss of a static graph {options}", reduction, [SECOND_LOST[1:]] * 2, NO_STATIC_GRAPH,
            ["automatic"], options=options)
        for reduction, options in (
            ("weighted_mean", {"static_graph": True}), ("mean", {"static_graph": True, **SKIPPED}),
        )
    ),
    Case("judged", "mean", [[[1.0]]] * 2, "nonfinite='raise' checks a step before", ["manual"], options=JUDGED),
    *(
        Case(
            f"of samples that ranks share, to {gradients[1]} under {options}", "mean",
            [[[samples(1, 2)], [samples(5, fault)]], [[samples(3, 4)], [samples(7, 8)]]], gradients, ["split"],
            options={**options, **SKIPPED})
        for options in SPLITS
        for fault, gradients in ((6, [2.5, 6.5]), (NAN, [2.5, 0.0]))
    ),
    weighted(
        "added to gradients that are kept, of another size at last",
        [[[(2.0, 1)]] * 4, [*[[(4.0, 1)]] * 3, [(2.0, 3)]]], [3.0, 6.0, 9.0, 9.0 + 2.0], ways=OF_DDP, keeps=True),
    *(
        kept(totals, reduction, length, gradient_as_bucket_view=is_view)
        for totals in ("AAAA", "ABCA", "AAABC", "AA--AB")
        for reduction in OF_SHARDED
        for length in (1, 2)
        for is_view in (False, True)
        if not ("-" in totals and reduction in ("mean", "sum"))
    ),
    # The optimizer sees no gradient, and what was kept is there again for the next window.
    *(
        Case(
            f"kept over a step that is left out for {fault[0]}, in windows of {length}", reduction,
            [[[(2.0, 1)] * length, [(2.0, 1)] * length, [(6.0, 1)] * length],
             [[(4.0, 1)] * length, [*[(4.0, 1)] * (length - 1), fault], [(8.0, 1)] * length]],
            [3.0, 0.0, 3.0 + 7.0], ["automatic"], options=SKIPPED, keeps=True)
        for reduction in ("mean", "weighted_mean")
        for length in (1, 2)
        for fault in ((NAN, 1), (None, 1))
    ),
    *of_rules(
        "of losses by turns", TURNS,
        {"mean": [(3.0, 0.0), (0.0, 5.0)] * 2, "weighted_mean": [(2.0, 0.0), (0.0, 3.0)] * 2},
        ways=LOOPS, options=UNUSED),
    *(
        row
        for size, gradients in ((1, ON_ONE_RANK), (2, ON_TWO_RANKS))
        for row in of_rules(
            f"of two windows that are open at once on {size}", [[of_rank] * 2 for of_rank in OPEN_AT_ONCE[:size]],
            {rule: [of_rule] * 2 for rule, of_rule in gradients.items()}, ways=LOOPS, options=UNUSED)
    ),
    *(
        Case(
            f"of a window begun {what} on {size}", reduction, [[[Trains(*one) for one in window]]] * size, TWO_OPEN,
            LOOPS, options=UNUSED)
        for what, window in OVERLAPS.items()
        for reduction in ("sum", "weighted_mean")
        for size in (1, 2)
    ),
    weighted(
        "of a window begun within another on one rank",
        [[[Trains(1.0, 1, FIRST, ends=False), Trains(2.0, 1, FIRST, ends=True)]],
         [[Trains(1.0, 1, FIRST, ends=False), Trains(2.0, 1, BOTH, ends=True)]]],
        TWO_OPEN, ways=LOOPS, options=UNUSED),
    weighted(
        "of a window begun after another was given up",
        [[[Trains(9.0, 1, FIRST, ends=False), CLEARED, Trains(2.0, 1, BOTH, ends=True)]],
         [[Trains(9.0, 1, FIRST, ends=False), CLEARED, Trains(6.0, 3, BOTH, ends=True)]]],
        [5.0], ways=LOOPS, options=UNUSED),
    *of_rules(
        "in which a parameter begins to train",
        [[[(1.0, 3)], [Trains(2.0, 3)], [(1.0, 1)]], [[(5.0, 1)], [Trains(6.0, 1)], [(5.0, 3)]]],
        {"mean": [(3.0, 0.0), 4.0, 3.0], "sum": [(6.0, 0.0), 8.0, 6.0], "weighted_mean": [(2.0, 0.0), 3.0, 4.0]},
        ways=["automatic", "manual"], begins=["first"]),
    # The gradient of a parameter is the sum over the micro-batches in which it trained, over the window's total.
    *(
        row
        for options in ({"gradient_as_bucket_view": True}, {"gradient_as_bucket_view": False})
        for row in of_rules(
            f"within which a parameter begins to train {options}",
            [[[(1.0, 3), Trains(2.0, 3)]], [[(5.0, 1), Trains(6.0, 1)]]],
            {
                "mean": [(3.5, 2.0)], "sum": [(14.0, 8.0)], "weighted_mean": [(2.5, 1.5)],
                "normalized_sum": [(14 / 8, 8 / 8)],
            },
            ways=["automatic"], options=options, begins=["first"])
    ),
    *of_rules(
        "within which a parameter trains again",
        [[[(1.0, 3)] * 2, [Trains(1.0, 3, FIRST), Trains(2.0, 3)]],
         [[(5.0, 1)] * 2, [Trains(5.0, 1, FIRST), Trains(6.0, 1)]]],
        {"sum": [12.0, (14.0, 8.0)], "weighted_mean": [2.0, (2.5, 1.5)], "normalized_sum": [12 / 8, (14 / 8, 8 / 8)]},
        ways=["automatic"], options=UNUSED),
    *(
        row
        for length in (1, 2)
        for row in of_rules(
            f"between which a parameter freezes, of {length}",
            [
                [
                    [(early, weight)] * length, [Trains(early, weight, FIRST)] * length,
                    [Trains(late, weight)] * length, last,
                ]
                for early, late, weight, last in (
                    (1.0, 2.0, 3, [Trains(9.0, 1, SECOND)]),
                    (5.0, 6.0, 1, [Trains(1.0, 3, SECOND)]),
                )
            ],
            {
                "mean": [3.0, (3.0, 0.0), 4.0, (0.0, 5.0)],
                "sum": [6.0 * length, (6.0 * length, 0.0), 8.0 * length, (0.0, 10.0)],
                "weighted_mean": [2.0, (2.0, 0.0), 3.0, (0.0, 3.0)],
            },
            ways=["automatic"], options=UNUSED)
    ),
    *(
        Case(
            f"within which a parameter freezes {options}", reduction,
            [[[(1.0, 3)] * 2, [(1.0, 3), Trains(2.0, 3, FIRST)]]] * 2, STOPPED, ["automatic"], options=options)
        for reduction in ("sum", "weighted_mean", "normalized_sum")
        for options in ({}, UNUSED)
    ),
    weighted(
        "within which a parameter freezes on one rank",
        [[[(1.0, 3)] * 2], [[(1.0, 3), Trains(2.0, 3, FIRST)]]], STOPPED, ways=["automatic"], options=UNUSED),
    # Neither what the weights multiply nor the sum over the ranks overflows, or underflows.
    *(
        weighted(
            f"of {dtype} in windows of {length}",
            [[[(gradient * small, weight)] * length for small in (1.0, 2.0**-38)] for gradient, weight in HALVES],
            [19000.0, 19000.0 * 2.0**-38], ways=["automatic", "manual", "average"] if length == 1 else ["automatic"],
            dtype=dtype)
        for dtype in (torch.float16, torch.bfloat16)
        for length in (1, 2)
    ),
    weighted(
        "of float16 with weights that grow", [[[(150.0, weight)] * 2 for weight in (1, 8, 64)]] * 2, [150.0] * 3,
        ways=OF_DDP, dtype=torch.float16),
    *(
        Case(
            f"with {what} by name in a window of {length}", reduction, [[[micro_batch] * length]] * 2, GLOBAL_MEAN,
            (*OF_DDP, "sharded"))
        for reduction, what, micro_batch in (
            ("weighted_mean", "losses", (NAMED, 1)),
            ("weighted_mean", "weights", (1.0, NAMED)),
            ("weighted_mean", "losses and weights", (NAMED, NAMED)),
            ("normalized_sum", "losses and weights", (NAMED, NAMED)),
            ("sum", "losses", (NAMED, 1)),
        )
        for length in (1, 2)
    ),
    *(
        weighted(
            f"of weight {weight} in a window of {n}",
            [[[(1.0, 1)] * n] * 2, [[(1.0, 1)] * n, [*[(1.0, 1)] * (n - 1), (1.0, weight)]]],
            f"rank 1: micro-batch {n - 1} of the window: weight {weight} is not a finite number >= 0", ways=OF_DDP)
        for weight in (-1.0, NAN, INF)
        for n in (1, 2)
    ),
    *(
        weighted(said, [[[(1.0, 1)]], [[(1.0, one)]]], said, ways=["automatic", "reducer", "average"])
        for said, one in NO_WEIGHTS.items()
    ),
    weighted("a negative weight", [[[(1.0, 1)]], [[(1.0, -1)]]], "weight", ways=["average", "sharded"]),
    weighted(
        "without a weight on one rank", [[[(1.0, 1)]], [[1.0]]],
        "needs a weight: pass weight= on every rank, with every loss", ways=["fabric", "reducer"]),
    Case(
        "without a weight on one rank", "weighted_mean", [[[(1.0, 1)]], [[1.0]]],
        "rank 0: one loss, a weight given\n  rank 1: one loss, no weight given", ["automatic", "manual"],
        refused={"automatic": "the number of samples cannot be read from a batch of type float: return"}),
    weighted(
        "without a weight in the second step", [[[(1.0, 1)], [1.0]]] * 2,
        "a weight was given in the steps before, but not in this one", ways=["automatic", "manual"]),
    *(
        Case("of a user", rule, [[[(1.0, 2)]], [[(3.0, 4)]]], said, (*OF_DDP, "average"))
        for rule, said in ((infinite, "'infinite' returned normalizer=inf"), (no_share, "'no_share' failed on"))
    ),
    *(
        Case("in a window", rule, [[[(1.0, 2), (1.0, 5)]], [[(3.0, 2), (1.0, 1)]]], OF_LENGTH, OF_DDP)
        for rule in (root, of_world, drifting, normalizing, uneven)
    ),
    # Their windows have one micro-batch.
    Case("of a user alone", of_world, [[[(1.0, 2)]], [[(3.0, 4)]]], [14 / 2 / 6], (*OF_DDP, "average")),
    Case("of a user alone", normalizing, [[[(1.0, 2)]], [[(3.0, 4)]]], [14 / 3], (*OF_DDP, "average")),
]
# fmt: on

assert {row.reduction for row in CASES} >= set(RULES)


def uses_weight(case: Case) -> bool:
    return resolve_rule(case.reduction).uses_weight
