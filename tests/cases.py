"""CASES: what one optimizer step promises, as a table of losses, weights, windows, and the gradients computed by hand.

To add a row, append a `Case` to the group that it belongs to. Write what each rank trains on as
`windows[rank][window][micro_batch]`. A micro-batch is one of

    2.0                   a loss whose gradient is 2
    (2.0, 3)              the same with weight 3; (None, 3) is a training step that returns no loss
    samples(1.0, 3.0)     a loss over samples with these gradients, averaged or as `loss` says
    Fails, Steep, Trains  see `case_parts.py`
    CLEARED, ZEROED       no micro-batch: what the user does to gradients between two of them

Compute `gradients` by hand, one for each window, and write the arithmetic down, such as (1 * 1 + 3 * 4) / 5: no row
takes them from the package. If all ranks raise instead, write what the error contains as `error`. `test_ranks_cases.py`
runs the row once in each of its `ways`. On every rank it compares the gradient that the optimizer sees, or the error.
`test_ranks_fuzz.py` draws more rows, whose gradients it takes from `lightning_gradavg.reduction.reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from case_parts import (
    BOTH,
    CLEARED,
    FIRST,
    INF,
    LOOPS,
    NAN,
    OF_DDP,
    OF_SHARDED,
    SECOND,
    WAYS,
    ZEROED,
    Trains,
    doubling,
    samples,
    tripled,
)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

from lightning_gradavg.rules import RULES, resolve_rule


@dataclass(frozen=True)
class Case:
    """A row of CASES."""

    # What is special about the row. Its id in pytest is the way, the rule and this.
    name: str
    # The name of the rule.
    reduction: str
    # What each rank trains on: `windows[rank][window]`, a list of micro-batches.
    windows: Sequence[Sequence[Sequence[Any]]]
    # After each window, by hand: one number, or a pair of numbers for the parameters "first" and "second".
    gradients: Sequence[Any] = ()
    # What the error contains, which all ranks raise; None if there is none.
    error: str | None = None
    # How the row is run: names of `WAY_OF` in test_ranks_cases.py.
    ways: Sequence[str] = WAYS
    # Ways whose error is another one than `error`, and what it contains.
    error_of_way: Mapping[str, str] = field(default_factory=dict)
    # The node of each rank. None: all ranks are on one node.
    nodes: Sequence[int] | None = None
    # Options of the strategy, or of DDP in ways without a strategy.
    options: Mapping[str, Any] = field(default_factory=dict)
    # Whether no gradient is zeroed between windows, so the gradients of windows add up.
    keeps_gradients: bool = False
    # The type of the parameters.
    dtype: torch.dtype = torch.float64
    # The parameters that train until a `Trains` says otherwise.
    trains: Sequence[str] = BOTH
    # How the losses of samples become the loss of a micro-batch.
    loss: Callable[[torch.Tensor], torch.Tensor] = torch.mean
    # The kind of loader in an automatic run: a name of `LOADERS` in test_ranks_cases.py.
    loader: str = "list"
    # Whether every automatic step runs a collective of the user's own.
    runs_collective: bool = False

    @property
    def served_ways(self) -> list[str]:
        """Return the ways in which the row is run: averages have no windows of several micro-batches."""
        if self.longest_window == 1:
            return list(self.ways)
        return [way for way in self.ways if way != "average"]

    @property
    def longest_window(self) -> int:
        """Return the largest number of micro-batches in a window of any rank."""
        lengths = [1]
        for windows_of_rank in self.windows:
            lengths += [len(window) for window in windows_of_rank]
        return max(lengths)

    @property
    def uses_weight(self) -> bool:
        """Return whether the rule reads weights."""
        return resolve_rule(self.reduction).uses_weight

    def expected_error(self, way: str) -> str | None:
        """Return what the error contains in this way, or None if there is none."""
        if way in self.error_of_way:
            return self.error_of_way[way]
        if way == "sharded" and self.reduction not in OF_SHARDED:
            return "needs the node of each rank"
        return self.error

    def __str__(self) -> str:
        return f"{self.reduction}-{self.name}".replace(" ", "_")


def make_rows(name: str, windows: Any, gradients_of_rules: Mapping[Any, Sequence[Any]], **fields: Any) -> list[Case]:
    """Return a row for each rule, with its gradients; `fields` are the same in all of them."""
    return [Case(name, rule, windows, gradients, **fields) for rule, gradients in gradients_of_rules.items()]


# 1. Rules: what each of them makes of losses and weights.

# A window of two micro-batches, and a short one; one rank on each of two nodes.
ON_TWO_NODES = [
    [[(1.0, 1), (3.0, 4)], [(5.0, 1)]],
    [[(5.0, 9), (8.0, 16)], [(9.0, 3)]],
]
RULES_BY_HAND = [
    # Two ranks on one node and one on another.
    *make_rows(
        "of three ranks",
        [[[(1.0, 1)]], [[(3.0, 4)]], [[(8.0, 9)]]],
        {
            "mean": [4.0],
            "sum": [12.0],
            "weighted_mean": [85 / 14],
            "normalized_sum": [12 / 14],
            "mean_of_node_sums": [(4 + 8) / 2],
            "mean_of_node_means": [(2 + 8) / 2],
            "sum_of_node_means": [10.0],
        },
        nodes=[0, 0, 1],
        ways=["automatic", "average"],
    ),
    *make_rows(
        "in windows on two nodes",
        ON_TWO_NODES,
        {
            "mean": [17 / 4, 14 / 2],
            "sum": [17.0, 14.0],
            "weighted_mean": [186 / 30, 32 / 4],
            "normalized_sum": [17 / 30, 14 / 4],
            "mean_of_node_sums": [(4 + 13) / 2, 14 / 2],
            "mean_of_node_means": [(2 + 6.5) / 2, 14 / 2],
            "sum_of_node_means": [2 + 6.5, 14.0],
        },
        nodes=[0, 1],
    ),
    *make_rows(
        "in windows, with validation in them, and in a second run",
        ON_TWO_NODES,
        {"mean": [17 / 4, 14 / 2] * 2, "weighted_mean": [186 / 30, 32 / 4] * 2},
        ways=["twice"],
    ),
    *make_rows(
        "with windows of different lengths",
        [[[(1.0, 1), (3.0, 3)]], [[(5.0, 4)]]],
        {"weighted_mean": [(1 + 9 + 20) / 8], "normalized_sum": [9 / 8], "sum": [9.0]},
    ),
    Case(
        "with windows of different lengths",
        "mean_of_node_means",
        [[[1.0, 3.0]], [[5.0]]],
        error="losses differ: no weight given, in a window of 2, which 'mean_of_node_means' depends on",
        error_of_way={
            "automatic": "1 of 2 ranks have no more batches in this epoch, and reduction='mean_of_node_means'"
        },
        ways=OF_DDP,
    ),
    # Totals of so many micro-batches have squares that float64 rounds.
    Case("of a long window", "weighted_mean", [[[(2.0, 1)] * 1500], [[(4.0, 3)] * 1500]], [3.5], ways=["reducer"]),
]


# 2. Weights: of every type and magnitude. A weight of 0 keeps NaN out.


def make_weights_of_every_type() -> list[Any]:
    """Return 3 in every type of a number and of a tensor of one element."""
    weights: list[Any] = [3, 3.0, np.int64(3), np.float32(3), np.float64(3), np.uint8(3), np.array(3)]
    weights += [Fraction(3), Decimal(3)]
    weights.append(torch.ones(3, dtype=torch.bool).sum())
    floating = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    integer = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
    for shape in ((), (1,), (1, 1)):
        weights += [torch.full(shape, 3, dtype=dtype, requires_grad=True) for dtype in floating]
        weights += [torch.full(shape, 3, dtype=dtype) for dtype in integer]
    return weights


WEIGHTS_OF_EVERY_TYPE = make_weights_of_every_type()
EXTREME_WEIGHTS = [
    [[(1.0, 1e-300)], [(1.0, -0.0)], [(1.0, 1e300)]],
    [[(3.0, 3e-300)], [(3.0, 5)], [(3.0, 3e300)]],
]
WEIGHTS = [
    *make_rows(
        "whose loss of weight 0 is NaN",
        [[[(2.0, 1)]] * 3, [[(4.0, 3)], [(NAN, 0)], [(6.0, 1)]]],
        {"weighted_mean": [3.5, 2.0, 4.0], "normalized_sum": [1.5, 2.0, 4.0]},
    ),
    Case(
        "whose loss is NaN after one of weight 0",
        "weighted_mean",
        [[[(1.0, 1)]] * 2, [[(NAN, 0)], [(NAN, 1)]]],
        [1.0, NAN],
        ways=OF_DDP,
    ),
    *make_rows(
        "whose totals change after steps of equal totals",
        [
            [*[[(1.0, 1)]] * 3, [(2.0, 3)], *[[(NAN, 0)]] * 3, [(2.0, 1)]],
            [*[[(3.0, 1)]] * 3, [(4.0, 5)], [(6.0, 2)], *[[(NAN, 0)]] * 2, [(4.0, 3)]],
        ],
        {
            "weighted_mean": [2.0] * 3 + [26 / 8, 6.0, 0.0, 0.0, 3.5],
            "normalized_sum": [2.0] * 3 + [6 / 8, 6 / 2, 0.0, 0.0, 6 / 4],
        },
    ),
    Case(
        "of nothing in a window",
        "weighted_mean",
        [[[(NAN, 0)] * 3, [(1.0, 1)]], [[(NAN, 0)] * 3, [(NAN, 0)]]],
        [0.0, 1.0],
    ),
    Case("of weights beyond float32", "weighted_mean", [[[(0.0, 2**24)]], [[(2.0**24 + 1, 1)]]], [1.0]),
    Case(
        "of weights of every type",
        "weighted_mean",
        [[[(2.0, weight)] for weight in WEIGHTS_OF_EVERY_TYPE], [[(10.0, 1)]] * len(WEIGHTS_OF_EVERY_TYPE)],
        [4.0] * len(WEIGHTS_OF_EVERY_TYPE),
    ),
    # Losses are scaled by the weights of the window before.
    Case("of extreme weights", "weighted_mean", EXTREME_WEIGHTS, [2.5, 3.0, 2.5]),
    Case(
        "of weights that grow beyond float64",
        "weighted_mean",
        [[[(1.0, 1e-300)], [(1.0, 1e300)]], [[(3.0, 3e-300)], [(3.0, 3e-300)]]],
        error="cannot be applied on rank 0: its weight 1e+300 overflows beside the weights of the window before",
        ways=OF_DDP,
    ),
]


# 3. Ranks whose batches run out before the others'.

# Rank 0 has five windows of one micro-batch, and rank 1 has three.
FIVE_AND_THREE = [[[(1.0, 1)]] * 5, [[(3.0, 1)]] * 3]
OF_FIVE_AND_THREE = [2.0] * 3 + [1.0] * 2
# Rank 0 has windows of 2, 2 and 1 micro-batches, and rank 1 of 2 and 1.
SIX_AND_THREE = [[[1.0, 2.0], [3.0, 5.0], [7.0]], [[6.0, 11.0], [2.0]]]
DOUBLED = {"ddp_comm_hook": doubling}


def make_rows_of_fewer_batches() -> list[Case]:
    """Return rows for the kinds of loaders that yield fewer batches on a rank."""
    rows = []
    kinds_of_rules = {
        "weighted_mean": ["list", "workers"],
        "mean": ["list", "stream", "stream with an estimated length", "iterable"],
    }
    for rule, kinds in kinds_of_rules.items():
        for kind in kinds:
            name = f"of fewer batches of a {kind} on a rank"
            rows.append(Case(name, rule, FIVE_AND_THREE, OF_FIVE_AND_THREE, ways=["automatic"], loader=kind))
    return rows


FEWER_BATCHES = [
    *make_rows_of_fewer_batches(),
    Case("of fewer batches on a rank", "weighted_mean", FIVE_AND_THREE, OF_FIVE_AND_THREE, ways=["manual"]),
    Case(
        "of fewer batches on a rank",
        "mean",
        FIVE_AND_THREE,
        error="1 of 2 ranks have no more batches in this epoch, and reduction='mean' counts ranks in manual",
        ways=["manual"],
    ),
    Case(
        "of fewer batches on a rank",
        "mean_of_node_sums",
        FIVE_AND_THREE,
        error="have no more batches in this epoch, and reduction='mean_of_node_sums'",
        ways=["automatic", "manual"],
    ),
    Case("of a rank without batch", "weighted_mean", [[], [[(2.0, 1)], [(4.0, 1)]]], [2.0, 4.0], ways=["automatic"]),
    Case(
        "of a rank without batch",
        "mean",
        [[], [[2.0], [4.0]]],
        [2.0, 4.0],
        ways=["automatic"],
        options={"check_replicas_every_n_steps": 1},
    ),
    Case("of a rank that has fewer", "mean", SIX_AND_THREE, [20 / 4, 10 / 3, 7.0], ways=["automatic"]),
    Case(
        "of a rank that has fewer, under a hook",
        "mean",
        SIX_AND_THREE,
        [2 * 20 / 4, 2 * 10 / 3, 2 * 7.0],
        ways=["automatic"],
        options=DOUBLED,
    ),
]


# 4. Communication hooks and options of DDP.

# Two ranks with a window each: (1 * 1 + 5 * 3) / 4 is 4.
ONE_WINDOW = [[[(1.0, 1)]], [[(5.0, 3)]]]


def make_rows_under_hooks() -> list[Case]:
    """Return rows for hooks of a user: those that serve, and those that own the averaging or need another backend."""
    # What the hook multiplies the mean by, and the options. 16 bits hold the numbers of the rows.
    hooks: Mapping[str, tuple[float, Mapping[str, Any]]] = {
        "a partial function": (2, {"ddp_comm_hook": partial(doubling)}),
        "a hook in 16 bits": (1, {"ddp_comm_hook": default_hooks.fp16_compress_hook}),
        "a wrapped hook": (6, {"ddp_comm_hook": doubling, "ddp_comm_wrapper": tripled}),
        "a wrapper alone": (3, {"ddp_comm_wrapper": tripled}),
    }
    rows = []
    for name, (factor, options) in hooks.items():
        rows.append(
            Case(f"under {name}", "weighted_mean", ONE_WINDOW, [4.0 * factor], ways=["automatic"], options=options)
        )
    # Hooks that are refused, with their states.
    refused: Mapping[Any, Any] = {
        post_localSGD_hook: PostLocalSGDState(None, None, start_localSGD_iter=2),
        powerSGD_hook.powerSGD_hook: powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2),
        quantization_hooks.quantization_pertensor_hook: None,
    }
    for hook, state in refused.items():
        rows.append(
            Case(
                f"under {hook.__name__}",
                "weighted_mean",
                [[[(1.0, 1)]]] * 2,
                error=f"ddp_comm_hook={hook.__name__} cannot be combined with a reduction",
                ways=["automatic"],
                options={"ddp_comm_hook": hook, "ddp_comm_state": state},
            )
        )
    return rows


STATIC_GRAPHS: Sequence[Mapping[str, Any]] = (
    {"static_graph": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
    {"static_graph": True, "gradient_as_bucket_view": False},
)
# What an error about static graphs contains.
NO_STATIC_GRAPH = "static_graph"


def make_rows_under_options_of_ddp() -> list[Case]:
    """Return rows for the options of DDP. Static graphs are refused, as DDP then reduces past its hook."""
    options_of_ddp: Sequence[Mapping[str, Any]] = (
        {"gradient_as_bucket_view": True},
        {"gradient_as_bucket_view": False},
        {"find_unused_parameters": True},
        {"bucket_cap_mb": 1e-5},
        {"broadcast_buffers": False},
    )
    ways = ["automatic", "manual"]
    rows = []
    for options in options_of_ddp:
        name = f"under {options}"
        rows.append(Case(name, "weighted_mean", ON_TWO_NODES, [186 / 30, 8.0], ways=ways, options=options))
    for reduction in ("sum", "weighted_mean"):
        for options in STATIC_GRAPHS:
            for name, windows in (("in windows", ON_TWO_NODES), ("in windows of one", ONE_WINDOW)):
                row = Case(
                    f"{name} under {options}", reduction, windows, error=NO_STATIC_GRAPH, ways=ways, options=options
                )
                rows.append(row)
    return rows


HOOKS_AND_OPTIONS = [
    Case(
        "in windows under a hook of the user",
        "weighted_mean",
        ON_TWO_NODES,
        [2 * 186 / 30, 2 * 8.0],
        ways=["automatic"],
        options=DOUBLED,
    ),
    *make_rows_under_hooks(),
    *make_rows_under_options_of_ddp(),
]


# 5. Gradients that are kept: those of one window after the other add up.

# A window of one micro-batch by a letter: what two ranks train on, and its gradient by each rule.
KEPT_WINDOWS: Mapping[str, Any] = {
    "A": ((1.0, 1), (3.0, 3), {"mean": 2.0, "sum": 4.0, "weighted_mean": 10 / 4, "normalized_sum": 4 / 4}),
    "B": ((2.0, 3), (4.0, 5), {"mean": 3.0, "sum": 6.0, "weighted_mean": 26 / 8, "normalized_sum": 6 / 8}),
    "C": ((5.0, 1), (7.0, 1), {"mean": 6.0, "sum": 12.0, "weighted_mean": 6.0, "normalized_sum": 12 / 2}),
    "-": ((NAN, 0), (NAN, 0), {"weighted_mean": 0.0, "normalized_sum": 0.0}),
}


def make_row_of_kept_windows(letters: str, reduction: str, length: int, *, is_view: bool) -> Case:
    """Return a row of one window after the other, each with `length` times the micro-batch that its letter names."""
    windows: list[list[Any]] = [[], []]
    gradients_of_windows = []
    for letter in letters:
        micro_batch_of_rank_0, micro_batch_of_rank_1, gradient_of_rule = KEPT_WINDOWS[letter]
        windows[0].append([micro_batch_of_rank_0] * length)
        windows[1].append([micro_batch_of_rank_1] * length)
        gradient = gradient_of_rule[reduction]
        # A sum over the micro-batches of a window grows with its length; means and normalized sums do not.
        if reduction == "sum":
            gradient *= length
        gradients_of_windows.append(gradient)
    options = {"gradient_as_bucket_view": is_view}
    return Case(
        f"kept, totals {letters} in windows of {length}, {options}",
        reduction,
        windows,
        [*accumulate(gradients_of_windows)],
        ways=OF_DDP,
        options=options,
        keeps_gradients=True,
    )


def make_rows_of_kept_windows() -> list[Case]:
    """Return a row for every order of totals, rule, length and kind of gradient."""
    rows = []
    for letters in ("AAAA", "ABCA", "AAABC", "AA--AB"):
        for reduction in OF_SHARDED:
            # The loss of weight 0 is NaN, which rules without weights do not keep out.
            if "-" in letters and reduction in ("mean", "sum"):
                continue
            for length in (1, 2):
                for is_view in (False, True):
                    rows.append(make_row_of_kept_windows(letters, reduction, length, is_view=is_view))
    return rows


KEPT_GRADIENTS = [
    # The next reduction overwrites what is in a bucket.
    Case(
        "added to gradients that are kept",
        "weighted_mean",
        ON_TWO_NODES,
        [6.2, 6.2 + 8],
        ways=OF_DDP,
        options={"gradient_as_bucket_view": True},
        keeps_gradients=True,
    ),
    Case(
        "added to gradients that are kept, of another size at last",
        "weighted_mean",
        [[[(2.0, 1)]] * 4, [*[[(4.0, 1)]] * 3, [(2.0, 3)]]],
        [3.0, 6.0, 9.0, 9.0 + 2.0],
        ways=OF_DDP,
        keeps_gradients=True,
    ),
    *make_rows_of_kept_windows(),
]


# 6. Steps without a loss.

SECOND_LOST: Sequence[Any] = [[(2.0, 1)], [(None, 1)], [(6.0, 1)]]


def make_rows_without_a_loss() -> list[Case]:
    """Return rows in which `training_step` returns None: under a rule with a window it does not count."""
    rows = []
    for name, windows in (("of one", [SECOND_LOST]), ("of two", [SECOND_LOST] * 2)):
        rows.append(Case(f"without a loss {name}", "weighted_mean", windows, [2.0, 0.0, 6.0], ways=["automatic"]))
    # Of three pairs (2 * 1 + 6 * 1 + 4 * 2) / 4; of the sum 2 + 6 + 4.
    lost: Sequence[Any] = [[[(2.0, 1), (None, 1)]], [[(6.0, 1), (4.0, 2)]]]
    for reduction, gradient in (("weighted_mean", 4.0), ("sum", 12.0)):
        rows.append(Case("without a loss in a window", reduction, lost, [gradient], ways=["automatic"]))
        swapped = [[window[::-1] for window in windows] for windows in lost]
        rows.append(Case("without a loss first in a window", reduction, swapped, [gradient], ways=["automatic"]))
    return rows


def make_rows_of_shared_batches() -> list[Case]:
    """Return rows whose ranks share batches."""
    splits: Sequence[Mapping[str, Any]] = (
        {"split_batches": True},
        {"split_batches": True, "max_device_batch_size": 1},
        {"equivalent_to": "data_parallel"},
        {"equivalent_to": "data_parallel", "num_replicas": 4},
    )
    rows = []
    for options in splits:
        rows.append(
            Case(
                f"of samples that ranks share under {options}",
                "mean",
                [[[samples(1, 2)], [samples(5, 6)]], [[samples(3, 4)], [samples(7, 8)]]],
                [2.5, 6.5],
                ways=["split"],
                options=options,
            )
        )
    return rows


WITHOUT_LOSS = [
    *make_rows_without_a_loss(),
    *make_rows_of_shared_batches(),
]


# 7. Windows of some parameters: two optimizers by turns or at once, and parameters that begin or stop to train.

UNUSED = {"find_unused_parameters": True}
OTHERS_TRAIN = "other parameters train than in the micro-batches before it"


def make_windows_by_turns(of_first: tuple[float, int], of_second: tuple[float, int]) -> list[Any]:
    """Return windows of one parameter and then the other, twice, as of a generator and its critic."""
    return [[Trains(*of_first, FIRST)], [Trains(*of_second, SECOND)]] * 2


def make_windows_open_at_once(
    of_first: tuple[float, int],
    last_of_first: tuple[float, int],
    of_second: tuple[float, int],
    last_of_second: tuple[float, int],
) -> list[Any]:
    """Return what a rank trains on in two windows of two micro-batches each, which are open at once."""
    return [
        Trains(*of_first, FIRST, ends=False),
        Trains(*of_second, SECOND, ends=False),
        Trains(*last_of_first, FIRST, ends=True),
        Trains(*last_of_second, SECOND, ends=True),
    ]


OPEN_AT_ONCE = [
    make_windows_open_at_once((1.0, 1), (3.0, 2), (5.0, 1), (7.0, 1)),
    make_windows_open_at_once((2.0, 1), (6.0, 4), (8.0, 3), (4.0, 1)),
]
"""Of each rank."""


def make_rows_open_at_once() -> list[Case]:
    """Return rows with two open windows, on one rank and on two: a model has one, but under the plain mean none."""
    rows = []
    for size, gradient in ((1, (4 / 2, 12 / 2)), (2, (12 / 4, 24 / 4))):
        for rule in OF_SHARDED:
            windows = [[window] * 2 for window in OPEN_AT_ONCE[:size]]
            row = Case(
                f"of two windows that are open at once on {size}",
                rule,
                windows,
                [gradient] * 2,
                ways=LOOPS,
                options=UNUSED,
            )
            if rule != "mean":
                row = replace(row, gradients=(), error=OTHERS_TRAIN)
            rows.append(row)
    return rows


def make_rows_of_overlapping_windows() -> list[Case]:
    """Return rows that train some parameters of an open window, with or without others that are not in it."""
    overlaps: Mapping[str, list[Any]] = {
        "before it ends": [Trains(1.0, 1, FIRST, ends=False), Trains(2.0, 1, BOTH, ends=True)],
        "while it goes on": [
            Trains(1.0, 1, FIRST, ends=False),
            Trains(2.0, 1, BOTH, ends=False),
            Trains(3.0, 1, FIRST, ends=True),
        ],
        "of more parameters": [Trains(1.0, 1, BOTH, ends=False), Trains(2.0, 1, FIRST, ends=True)],
    }
    rows = []
    for name, window in overlaps.items():
        for reduction in ("sum", "weighted_mean"):
            for size in (1, 2):
                rows.append(
                    Case(
                        f"of a window begun {name} on {size}",
                        reduction,
                        [[window]] * size,
                        error=OTHERS_TRAIN,
                        ways=LOOPS,
                        options=UNUSED,
                    )
                )
    return rows


def make_rows_that_begin_within_a_window() -> list[Case]:
    """Return rows in which "second" trains from the second micro-batch on: stock under the plain mean, else refused."""
    windows = [[[(1.0, 3), Trains(2.0, 3)]], [[(5.0, 1), Trains(6.0, 1)]]]
    rows = []
    for options in ({"gradient_as_bucket_view": True}, {"gradient_as_bucket_view": False}):
        name = f"within which a parameter begins to train {options}"
        fields: Mapping[str, Any] = {"ways": ["automatic"], "options": options, "trains": ["first"]}
        rows.append(Case(name, "mean", windows, [(3.5, 2.0)], **fields))
        for rule in ("sum", "weighted_mean", "normalized_sum"):
            rows.append(Case(name, rule, windows, error=OTHERS_TRAIN, **fields))
    return rows


def make_windows_between_which_a_parameter_freezes(
    length: int, early: float, late: float, weight: int, last: Trains
) -> list[Any]:
    """Return the windows of a rank: both parameters, "first", both again, and "second" once."""
    return [
        [(early, weight)] * length,
        [Trains(early, weight, FIRST)] * length,
        [Trains(late, weight)] * length,
        [last],
    ]


def make_rows_of_freezing_parameters() -> list[Case]:
    """Return rows in which a parameter freezes between windows, or within one, which is an error."""
    rows = []
    for length in (1, 2):
        rows += make_rows(
            f"between which a parameter freezes, of {length}",
            [
                make_windows_between_which_a_parameter_freezes(length, 1.0, 2.0, 3, Trains(9.0, 1, SECOND)),
                make_windows_between_which_a_parameter_freezes(length, 5.0, 6.0, 1, Trains(1.0, 3, SECOND)),
            ],
            {
                "mean": [3.0, (3.0, 0.0), 4.0, (0.0, 5.0)],
                "sum": [6.0 * length, (6.0 * length, 0.0), 8.0 * length, (0.0, 10.0)],
                "weighted_mean": [2.0, (2.0, 0.0), 3.0, (0.0, 3.0)],
            },
            ways=["automatic"],
            options=UNUSED,
        )
    for reduction in ("sum", "weighted_mean", "normalized_sum"):
        for options in ({}, UNUSED):
            rows.append(
                Case(
                    f"within which a parameter freezes {options}",
                    reduction,
                    [[[(1.0, 3)] * 2, [(1.0, 3), Trains(2.0, 3, FIRST)]]] * 2,
                    error=OTHERS_TRAIN,
                    ways=["automatic"],
                    options=options,
                )
            )
    return rows


WINDOWS_OF_SOME_PARAMETERS = [
    *make_rows(
        "of losses by turns",
        [make_windows_by_turns((1.0, 3), (9.0, 1)), make_windows_by_turns((5.0, 1), (1.0, 3))],
        {"mean": [(3.0, 0.0), (0.0, 5.0)] * 2, "weighted_mean": [(2.0, 0.0), (0.0, 3.0)] * 2},
        ways=LOOPS,
        options=UNUSED,
    ),
    *make_rows_open_at_once(),
    *make_rows_of_overlapping_windows(),
    Case(
        "of a window begun within another on one rank",
        "weighted_mean",
        [
            [[Trains(1.0, 1, FIRST, ends=False), Trains(2.0, 1, FIRST, ends=True)]],
            [[Trains(1.0, 1, FIRST, ends=False), Trains(2.0, 1, BOTH, ends=True)]],
        ],
        error=OTHERS_TRAIN,
        ways=LOOPS,
        options=UNUSED,
    ),
    Case(
        "of a window begun after another was given up",
        "weighted_mean",
        [
            [[Trains(9.0, 1, FIRST, ends=False), CLEARED, Trains(2.0, 1, BOTH, ends=True)]],
            [[Trains(9.0, 1, FIRST, ends=False), CLEARED, Trains(6.0, 3, BOTH, ends=True)]],
        ],
        [5.0],
        ways=LOOPS,
        options=UNUSED,
    ),
    Case(
        "of a window begun after another was zeroed",
        "normalized_sum",
        [
            [[Trains(9.0, 1, BOTH, ends=False), ZEROED, Trains(2.0, 1, BOTH, ends=True)]],
            [[Trains(9.0, 1, BOTH, ends=False), ZEROED, Trains(6.0, 3, BOTH, ends=True)]],
        ],
        [8 / 4],
        ways=LOOPS,
        options=UNUSED,
    ),
    # DDP knows "first" alone. No bucket says what is wrong with the other one's gradient.
    Case(
        "in which a parameter begins to train with a wrong weight on one rank",
        "weighted_mean",
        [[[(1.0, 3)], [Trains(2.0, 3, BOTH)]], [[(5.0, 1)], [Trains(6.0, -1, BOTH)]]],
        error="cannot be applied on rank 1: weight -1.0 is not a finite number >= 0",
        ways=["automatic", "manual"],
        trains=["first"],
    ),
    *make_rows(
        "in which a parameter begins to train",
        [[[(1.0, 3)], [Trains(2.0, 3)], [(1.0, 1)]], [[(5.0, 1)], [Trains(6.0, 1)], [(5.0, 3)]]],
        {"mean": [(3.0, 0.0), 4.0, 3.0], "sum": [(6.0, 0.0), 8.0, 6.0], "weighted_mean": [(2.0, 0.0), 3.0, 4.0]},
        ways=["automatic", "manual"],
        trains=["first"],
    ),
    *make_rows_that_begin_within_a_window(),
    *make_rows_of_freezing_parameters(),
    Case(
        "within which a parameter freezes on one rank",
        "weighted_mean",
        [[[(1.0, 3)] * 2], [[(1.0, 3), Trains(2.0, 3, FIRST)]]],
        error=OTHERS_TRAIN,
        ways=["automatic"],
        options=UNUSED,
    ),
]


# 8. Parameters in 16 bits: neither what the weights multiply nor the sum over the ranks overflows, or underflows.


def make_rows_in_16_bits() -> list[Case]:
    """Return rows of gradients near the largest float16, and of tiny ones."""
    rows = []
    ways_of_length = {1: ["automatic", "manual", "average"], 2: ["automatic"]}
    for dtype in (torch.float16, torch.bfloat16):
        for length, ways in ways_of_length.items():
            windows = [
                [[(20000.0, 3)] * length, [(20000.0 * 2.0**-38, 3)] * length],
                [[(16000.0, 1)] * length, [(16000.0 * 2.0**-38, 1)] * length],
            ]
            rows.append(
                Case(
                    f"of {dtype} in windows of {length}",
                    "weighted_mean",
                    windows,
                    [19000.0, 19000.0 * 2.0**-38],
                    ways=ways,
                    dtype=dtype,
                )
            )
    return rows


IN_16_BITS = [
    *make_rows_in_16_bits(),
    # Losses carry 4096 in units of 2**-26 once, and infinity; afterwards the unit is that of 4096.
    Case(
        "of float16 after a first weight that is tiny",
        "weighted_mean",
        [[[(150.0, weight)] for weight in (1e-8, 4096, 4096)]] * 2,
        [150.0, INF, 150.0],
        ways=["automatic"],
        dtype=torch.float16,
    ),
    Case(
        "of float16 with weights that grow",
        "weighted_mean",
        [[[(150.0, weight)] * 2 for weight in (1, 8, 64)]] * 2,
        [150.0] * 3,
        ways=OF_DDP,
        dtype=torch.float16,
    ),
]


# 9. Weights, losses and rules that are refused, on all ranks with one error.

BY_NAME = {"a": 1.0, "b": 2.0}
"""A loss or a weight for each term by name. `global_mean` serves these, as the error says."""


def make_rows_by_name() -> list[Case]:
    """Return rows with a loss or a weight for each term by its name."""
    rows = []
    for reduction, name, micro_batch in (
        ("weighted_mean", "losses", (BY_NAME, 1)),
        ("weighted_mean", "weights", (1.0, BY_NAME)),
        ("weighted_mean", "losses and weights", (BY_NAME, BY_NAME)),
        ("normalized_sum", "losses and weights", (BY_NAME, BY_NAME)),
        ("sum", "losses", (BY_NAME, 1)),
    ):
        for length in (1, 2):
            rows.append(
                Case(
                    f"with {name} by name in a window of {length}",
                    reduction,
                    [[[micro_batch] * length]] * 2,
                    error="global_mean",
                    ways=(*OF_DDP, "sharded"),
                )
            )
    return rows


def make_rows_of_unusable_weights() -> list[Case]:
    """Return rows in which the last weight of rank 1 is no finite number >= 0, or no number."""
    rows = []
    for weight in (-1.0, NAN, INF):
        for length in (1, 2):
            of_rank_1: list[Any] = [[(1.0, 1)] * length, [*[(1.0, 1)] * (length - 1), (1.0, weight)]]
            where = "" if length == 1 else f"in micro-batch {length - 1} of {length}, "
            error = f"cannot be applied on rank 1: {where}weight {weight} is not a finite number >= 0."
            rows.append(
                Case(
                    f"of weight {weight} in a window of {length}",
                    "weighted_mean",
                    [[[(1.0, 1)] * length] * 2, of_rank_1],
                    error=error,
                    ways=OF_DDP,
                )
            )
    no_numbers: Mapping[str, Any] = {
        "a weight is one number, got 'many' of type str": "many",
        "a weight is one number, got a tensor of shape (2,)": torch.ones(2),
        "of type int": 10**400,
        "a tensor of shape () and torch.complex64": torch.tensor(1j),
        "global_mean": BY_NAME,
    }
    for error, weight in no_numbers.items():
        windows = [[[(1.0, 1)]], [[(1.0, weight)]]]
        rows.append(Case(error, "weighted_mean", windows, error=error, ways=["automatic", "reducer", "average"]))
    return rows


REFUSED = [
    *make_rows_by_name(),
    *make_rows_of_unusable_weights(),
    Case(
        "a negative weight",
        "weighted_mean",
        [[[(1.0, 1)]], [[(1.0, -1)]]],
        error="weight",
        ways=["average", "sharded"],
    ),
    Case(
        "without a weight on one rank",
        "weighted_mean",
        [[[(1.0, 1)]], [[1.0]]],
        error="needs a weight: pass weight= on every rank, with every loss",
        ways=["fabric", "reducer"],
    ),
    Case(
        "without a weight on one rank",
        "weighted_mean",
        [[[(1.0, 1)]], [[1.0]]],
        error="losses differ: a weight given on rank 0; no weight given on rank 1. For weights: return",
        error_of_way={
            "automatic": "the number of samples cannot be read from a batch of type float: return",
            "manual": "the number of samples cannot be read from a batch of type list: return",
        },
        ways=["automatic", "manual"],
    ),
    Case(
        "without a weight in the second step",
        "weighted_mean",
        [[[(1.0, 1)], [1.0]]] * 2,
        error="a weight was given in the steps before, but not in this one",
        ways=["automatic", "manual"],
    ),
]


CASES: Sequence[Case] = [
    *RULES_BY_HAND,
    *WEIGHTS,
    *FEWER_BATCHES,
    *HOOKS_AND_OPTIONS,
    *KEPT_GRADIENTS,
    *WITHOUT_LOSS,
    *WINDOWS_OF_SOME_PARAMETERS,
    *IN_16_BITS,
    *REFUSED,
]

# A new rule must have a row.
assert {row.reduction for row in CASES} >= set(RULES)
