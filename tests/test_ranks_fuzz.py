"""Rows of `cases.py` drawn by chance: trained on the gradient that `combine` says, or all ranks raise for a reason."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from case_parts import (
    BOTH,
    CLEARS,
    FIRST,
    LOOPS,
    NAN,
    OF_DDP,
    OF_SHARDED,
    SECOND,
    WAYS,
    Fails,
    Steep,
    Trains,
)
from cases import Case
from ranks import SHARDS_ON_CPU
from test_ranks_cases import WAY_OF, Grads, expected_gradients

from lightning_gradavg.batches.chunks import even_bounds
from lightning_gradavg.reduction.reference import combine
from lightning_gradavg.rules import RULES, resolve_rule, rule_of_split_batches

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 4
# Rows that are drawn and trained in one call of the ranks.
IN_ONE_CALL = 10
NODES = ([[0, 0], [0, 1]], [[1, 0, 0], [0, 0, 0]], [[0, 0], [0, 1]], [[0]])
"""The nodes of the ranks; of the seeds of one call, as many ranks."""
COUNTS_RANKS = ("mean_of_node_sums", "mean_of_node_means", "sum_of_node_means")
"""Rules that depend on how many ranks there are, or are on a node."""
MAGNITUDES = [0.0, 0.0, 1.0, 3.0, 0.125, 4096.0, 1e-3]
"""Weights."""


class Chance(NamedTuple):
    """An option that may be set."""

    # The probability that it is set.
    share: float
    # To what it is set.
    values: list[Any]


OPTIONS = {
    "gradient_as_bucket_view": Chance(0.3, [True]),
    "find_unused_parameters": Chance(0.2, [True]),
    "bucket_cap_mb": Chance(0.3, [1e-5]),
}
"""Options of DDP."""
OPTIONS_OF_TRAINER = {
    "static_graph": Chance(0.1, [True]),
    "check_replicas_every_n_steps": Chance(0.2, [None, 1]),
}
"""Options that the strategies of the Trainer have, too."""


def comes_true(draw: random.Random, share: float) -> bool:
    """Draw whether something of this probability happens."""
    return draw.random() < share


class Drawn:
    """A row and a way to run it, all of which follows from a seed.

    These are options, samples, weights, windows, what trains in each of them, and a fault. What is drawn first decides
    what is drawn at all, so a new draw belongs after the others: it leaves the rows of most seeds as they are.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        draw = random.Random(seed)
        self._draw_way_and_rule(draw)
        self._draw_options(draw)
        self._draw_ranks_and_windows(draw)
        self._draw_changes(draw)
        # The micro-batches of each step, by their numbers in the run.
        ends = [*accumulate(self.lengths)]
        self.steps = [range(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]
        micro_batches = ends[-1]
        self._draw_fault_and_weight(draw, micro_batches)
        self._draw_counts(draw, ends)
        self._draw_what_is_kept(draw)
        self._draw_interruptions(draw)
        self._draw_samples(draw, micro_batches)
        self._draw_trained_parameters(draw)
        self._draw_tail(draw)

    @property
    def in_trainer(self) -> bool:
        """Whether a Trainer runs the row under DDP."""
        return self.way in ("automatic", "split", "manual")

    @property
    def of_ddp(self) -> bool:
        return self.way in OF_DDP

    @property
    def uneven(self) -> bool:
        """Whether ranks have different numbers of micro-batches."""
        return len({*self.counts}) > 1

    def _draw_way_and_rule(self, draw: random.Random) -> None:
        self.way = draw.choice([*WAYS, *["automatic"] * 3, *["split"] * 3])
        if self.way == "sharded" and not SHARDS_ON_CPU:
            self.way = "automatic"
        rules: Sequence[str] = [*RULES]
        if self.way == "sharded":
            rules = OF_SHARDED
        self.reduction = draw.choice(rules)
        self.rule = resolve_rule(self.reduction)

    def _draw_options(self, draw: random.Random) -> None:
        chances: dict[str, Chance] = {}
        if self.in_trainer:
            chances = OPTIONS | OPTIONS_OF_TRAINER
        elif self.of_ddp:
            chances = OPTIONS
        self.options: dict[str, Any] = {}
        for name, (share, values) in chances.items():
            if comes_true(draw, share):
                self.options[name] = draw.choice(values)

    def _draw_ranks_and_windows(self, draw: random.Random) -> None:
        """Draw the loss of several samples, the nodes of the ranks, the kind of loader, and the lengths of windows."""
        losses: list[Any] = [torch.mean, torch.sum]
        self.loss = draw.choice(losses)
        self.nodes = draw.choice(NODES[self.seed // IN_ONE_CALL % len(NODES)])
        self.size = len(self.nodes)
        self.stream = comes_true(draw, 0.3)
        length = 1
        if self.way != "average":
            length = draw.choice([1, 1, 2, 3])
        self.lengths = [length] * STEPS
        if self.way in LOOPS and comes_true(draw, 0.5):
            self.lengths = draw.choices([1, 2, 4], k=STEPS)

    def _draw_changes(self, draw: random.Random) -> None:
        """Draw whether two optimizers take turns, as the plain mean allows, or parameters freeze and unfreeze."""
        self.takes_turns = self.way in LOOPS and self.rule.name == "mean" and comes_true(draw, 0.5)
        if self.takes_turns:
            self.lengths = draw.choices([2, 3, 4], k=STEPS)
        self.freezes = self.of_ddp and not self.takes_turns and comes_true(draw, 0.25)
        self.changes = self.takes_turns or self.freezes
        if self.changes:
            self.options["find_unused_parameters"] = True
            self.options.pop("static_graph", None)

    def _draw_fault_and_weight(self, draw: random.Random, micro_batches: int) -> None:
        """Draw a fault of one micro-batch, and what the weights are; both must be possible in the way."""
        self.fault = draw.choice([None, None, "nan", "steep"])
        self.weight = draw.choice([None, None, "samples", "drawn", "drawn", "zero but on rank 0"])
        # The rank and the micro-batch of the fault.
        self.fault_at = (draw.randrange(self.size), draw.randrange(micro_batches))
        if self.way == "split":
            self._draw_split(draw)
        elif (self.fault is not None or self.way != "automatic" or self.changes) and self.weight is None:
            self.weight = "samples"
        self.wrong_weight = self.weight is not None and self.rule.uses_weight and comes_true(draw, 0.05)
        if self.fault == "steep" and (self.way != "automatic" or self.changes):
            self.fault = "nan"

    def _draw_split(self, draw: random.Random) -> None:
        """Draw how a batch that ranks share is cut further."""
        self.options["split_batches"] = True
        self.fault = None
        self.weight = None
        if self.rule.name not in COUNTS_RANKS and comes_true(draw, 0.6):
            # How a batch is cut further matters to a mean loss that is summed, and to a sum that is averaged.
            self.loss = torch.sum
            if self.rule.name in ("mean", "weighted_mean"):
                self.loss = torch.mean
            number = draw.choice([1, 2, 3])
            name = draw.choice(["num_replicas", "max_device_batch_size", "max_device_batch_size"])
            self.options[name] = number

    def _draw_counts(self, draw: random.Random, ends: list[int]) -> None:
        """Draw how many micro-batches each rank has. A rank without batches does not hear which parameters train."""
        self.counts = [ends[-1]] * self.size
        if self.way in ("automatic", "manual") and self.size > 1 and not self.changes and comes_true(draw, 0.3):
            fewer: Sequence[int] = range(ends[-1])
            if self.way == "manual":
                fewer = [0, *ends[:-1]]
            count = draw.choice(fewer)
            self.counts[draw.randrange(self.size)] = count

    def _draw_what_is_kept(self, draw: random.Random) -> None:
        """Draw whether gradients are kept: nothing is added to NaN, so faults must be left out."""
        self.keeps = self.of_ddp and self.fault is None and comes_true(draw, 0.4)

    def _draw_interruptions(self, draw: random.Random) -> None:
        """Draw, before each step of a loop, what begins its window and is given up, and a window whose backward raises.

        DDP fails if a parameter that was used in `no_sync` has in the end neither gradient nor use, so what is given up
        is of the parameters that train next.
        """
        is_loop = self.way in LOOPS
        begun = [(100.0, 7)] * draw.randint(1, 2)
        # What comes before each step's window, and is given up.
        self.given_up: list[list[Any]] = []
        for _ in range(STEPS):
            given_up: list[Any] = []
            if is_loop and comes_true(draw, 0.3) and not self.takes_turns:
                given_up = [*begun, draw.choice(CLEARS)]
            self.given_up.append(given_up)
        may_raise = not self.uneven and not self.changes and self.rule.name != "mean"
        # Whether a window that raises comes before each step's window.
        self.raises = [may_raise and is_loop and comes_true(draw, 0.2) for _ in range(STEPS)]
        window = [(7.0, 1), Fails(1000.0, draw.choice([50, -1])), (7.0, 1)]
        self.raising = window[draw.randrange(2) :]

    def _draw_samples(self, draw: random.Random, micro_batches: int) -> None:
        """Draw the samples and the weights of all micro-batches; steady ones have the same totals in each step."""
        even = comes_true(draw, 0.5)
        self.totals = draw.choice(["drawn", "drawn", "steady", "steady until the last step"])
        # The number of micro-batches that are like the first one.
        steady = 0
        if self.totals == "steady":
            steady = micro_batches
        elif self.totals == "steady until the last step":
            steady = self.steps[-1][0]
        sizes_of_micro_batches = []
        for _ in range(micro_batches):
            sizes_of_micro_batches.append([3 if even else draw.randint(1, 5) for _ in self.nodes])
        sizes_of_micro_batches[:steady] = sizes_of_micro_batches[:1] * steady
        if self.way == "split":
            sizes_of_micro_batches = [self._split(sum(sizes)) for sizes in sizes_of_micro_batches]
        generator = torch.Generator().manual_seed(self.seed)
        self.samples: list[list[torch.Tensor]] = []
        for sizes in sizes_of_micro_batches:
            self.samples.append([torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes])
        self.weights = []
        for _ in range(micro_batches):
            self.weights.append([draw.choice(MAGNITUDES) for _ in self.nodes])
        self.weights[:steady] = self.weights[:1] * steady

    def _split(self, samples: int) -> list[int]:
        """Return how many samples of a global batch each rank gets."""
        return [stop - start for start, stop in even_bounds(samples, self.size)]

    def _draw_trained_parameters(self, draw: random.Random) -> None:
        """Draw which parameters train: at first, where the row says in the end what trains, and in each micro-batch."""
        self.begins: Sequence[str] = BOTH
        if self.freezes and self.way in ("automatic", "manual") and comes_true(draw, 0.3):
            self.begins = FIRST
        self.trains: list[Sequence[str]] = []
        for step in self.steps:
            self.trains += self._draw_parameters_of_step(draw, len(step))

    def _draw_parameters_of_step(self, draw: random.Random, length: int) -> list[Sequence[str]]:
        """Return the parameters that train in each micro-batch of a step, the same on all ranks."""
        if self.takes_turns:
            names: list[Sequence[str]] = [FIRST, SECOND, *draw.choices([FIRST, SECOND], k=length - 2)]
            draw.shuffle(names)
            return names
        if not self.freezes:
            return [BOTH] * length
        # DDP fails in a step of parameters that were frozen when it was made, and of no others.
        choices = [FIRST, SECOND, BOTH] if self.begins == BOTH else [FIRST, BOTH]
        some = draw.choice(choices)
        if self.way != "automatic":
            return [some] * length
        if comes_true(draw, 0.2):
            return draw.choices(choices, k=length)
        begin = draw.randrange(length + 1)
        return [*[some] * begin, *[BOTH] * (length - begin)]

    def _draw_tail(self, draw: random.Random) -> None:
        """Draw a last batch that leaves ranks without samples, and whether steps run a collective of the user's own."""
        whole = self.way == "split" and not {"num_replicas", "max_device_batch_size"} & self.options.keys()
        self.has_tail = whole and self.size > 1 and comes_true(draw, 0.5)
        self.collects = whole and comes_true(draw, 0.5)
        if self.has_tail:
            sizes = self._split(draw.randrange(1, self.size))
            self.samples[-1] = [samples[:size] for samples, size in zip(self.samples[-1], sizes, strict=True)]

    @property
    def changes_within_a_window(self) -> bool:
        """Whether other parameters train in one micro-batch of a window than in another."""
        if not self.freezes:
            return False
        return any(len({self.trains[index] for index in step}) > 1 for step in self.steps)

    @property
    def may_raise(self) -> bool:
        """Whether there is a reason for which all ranks may raise."""
        # A node's ranks have the same say.
        if self.way == "split" and self.rule.name in ("mean_of_node_means", "sum_of_node_means"):
            return True
        # Under a static graph DDP reduces past its hook.
        if "static_graph" in self.options:
            return True
        # Ranks are counted that are done.
        if self.uneven and (self.rule.name in COUNTS_RANKS or self.way == "manual"):
            return True
        # A weight that is none.
        if self.wrong_weight:
            return True
        # Other parameters train within a window, where there is one: the plain mean has none where lengths are known.
        if self.changes_within_a_window and (self.rule.name != "mean" or self.stream):
            return True
        # A rank has no batch at all.
        return 0 in self.counts and (not self.stream or self.way == "manual")

    def weight_of(self, rank: int, index: int) -> float:
        """Return the weight of a micro-batch: by default the number of its samples."""
        samples = len(self.samples[index][rank])
        if self.wrong_weight and (rank, index) == (self.size - 1, 0):
            return NAN
        if self.weight == "drawn":
            return self.weights[index][rank]
        if self.weight == "zero but on rank 0":
            return float(samples) if rank == 0 else 0.0
        return samples

    def loss_of(self, rank: int, index: int) -> float:
        """Return the gradient without the fault: NaN where it does not count."""
        if self.weight == "drawn" and self.rule.uses_weight and self.weight_of(rank, index) == 0:
            return NAN
        samples = self.samples[index][rank]
        if len(samples) == 0:
            return 0.0
        return float(self.loss(samples))

    def micro_batch(self, rank: int, index: int) -> Any:
        """Return a micro-batch as a row of `cases.py` has it."""
        if self.weight is None:
            return self.samples[index][rank]
        weight = self.weight_of(rank, index)
        gradient = self.loss_of(rank, index)
        if (rank, index) == self.fault_at and self.fault is not None:
            if self.fault == "steep":
                return Steep(gradient, weight)
            gradient = NAN
        if self.changes:
            return Trains(gradient, weight, self.trains[index], self._ends(index))
        return gradient, weight

    def _ends(self, index: int) -> bool | None:
        """Return whether a micro-batch is the last of its optimizer's window, if two are open."""
        if not self.takes_turns:
            return None
        (step,) = (step for step in self.steps if index in step)
        return all(self.trains[later] != self.trains[index] for later in range(index + 1, step.stop))

    def gradient(self, name: str, indices: range) -> float:
        """Return the gradient of a parameter in a step, by one process."""
        gradients: list[float] = []
        nodes: list[int] = []
        weights: list[float] = []
        for rank in range(self.size):
            for index in indices:
                is_of_other_window = self.takes_turns and name not in self.trains[index]
                if is_of_other_window or index >= self.counts[rank]:
                    continue
                gradient = self.loss_of(rank, index)
                if self.fault is not None and (rank, index) == self.fault_at:
                    gradient = NAN
                gradients.append(gradient if name in self.trains[index] else 0.0)
                nodes.append(self.nodes[rank])
                weights.append(self.weight_of(rank, index))
        rule = rule_of_split_batches(self.rule) if self.way == "split" else self.rule
        column = torch.tensor(gradients, dtype=torch.float64)[:, None]
        return combine(column, rule=rule, nodes=nodes, weights=weights).item()

    def expected(self) -> list[tuple[float, ...]]:
        """Return the gradients of the parameters after each window, as the optimizer sees them."""
        nothing = (0.0,) * len(BOTH)
        expected: list[tuple[float, ...]] = []
        kept = nothing
        for step, raises, given_up in zip(self.steps, self.raises, self.given_up, strict=True):
            if step[0] >= max(self.counts):
                continue
            # A window that raises leaves the gradients from before it.
            if raises:
                expected.append(kept)
            before = nothing if given_up else kept
            gradients = tuple(old + self.gradient(name, step) for old, name in zip(before, BOTH, strict=True))
            expected.append(gradients)
            kept = gradients if self.keeps else nothing
        return expected

    def windows(self, rank: int) -> list[list[Any]]:
        """Return the windows of a rank as a row of `cases.py` has them."""
        windows = []
        for step, raises, given_up in zip(self.steps, self.raises, self.given_up, strict=True):
            if step[0] >= self.counts[rank]:
                continue
            if raises:
                windows.append(self.raising)
            window: list[Any] = []
            for item in given_up:
                if self.freezes and item not in CLEARS:
                    window.append(Trains(100.0, 7, self.trains[step[0]]))
                else:
                    window.append(item)
            for index in step:
                if index < self.counts[rank]:
                    window.append(self.micro_batch(rank, index))
            windows.append(window)
        return windows

    @property
    def case(self) -> Case:
        """Return the row, without the expected gradients."""
        return Case(
            repr(self),
            self.reduction,
            [self.windows(rank) for rank in range(self.size)],
            nodes=self.nodes,
            options=self.options,
            keeps_gradients=self.keeps,
            trains=self.begins,
            loss=self.loss,
            runs_collective=self.collects,
            loader="stream" if self.stream else "list",
        )

    def __repr__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if name not in ("samples", "weights")}
        return f"Drawn({shown})"


def train_all(seeds: range) -> list[Grads | str]:
    """Body: train what some seeds give, one after another; return the gradients of each, or its error."""
    return [train(Drawn(seed)) for seed in seeds]


def train(drawn: Drawn) -> Grads | str:
    """Body: return the gradients, or the error."""
    result: Grads | str
    try:
        result = WAY_OF[drawn.way](drawn.case)
    except Exception as raised:  # noqa: BLE001  # whatever it is, the test looks at it
        result = f"{type(raised).__name__}: {raised}"
    # A rank that raises alone would leave the ranks out of step for the next seeds.
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (drawn.seed, isinstance(result, str)))
    assert len(set(outcomes)) == 1, f"the ranks differ: {outcomes}, here {result}; {drawn}"
    return result


def find_fault(drawn: Drawn, results_of_ranks: Sequence[Grads | str]) -> str | None:
    """Return what is wrong with the results of all ranks, or None."""
    first = results_of_ranks[0]
    if isinstance(first, str):
        if drawn.may_raise:
            return None
        return f"raised without reason: {first}"
    for result in results_of_ranks:
        if repr(result) != repr(first):
            return f"the ranks differ: {results_of_ranks}"
    gradients = [gradient.tolist() for gradient in first]
    expected = expected_gradients(replace(drawn.case, gradients=drawn.expected()))
    # All after NaN is NaN.
    compared = len(expected)
    for number, gradient in enumerate(gradients, start=1):
        if any(math.isnan(value) for value in gradient):
            compared = number
            break
    if expected[:compared] == gradients[:compared]:
        return None
    return f"gradients {gradients} instead of {expected}"


def make_parameters_of_calls() -> list[Any]:
    """Return a parameter of pytest for the first seed of each call; most are trained before a release only."""
    parameters = []
    for first in range(0, 500, IN_ONE_CALL):
        marks = [pytest.mark.full] if first >= 80 else []
        parameters.append(pytest.param(first, marks=marks))
    return parameters


@pytest.mark.parametrize("first", make_parameters_of_calls())
def test_drawn_rows_have_the_gradients_of_one_process_or_raise_together(world, first):
    seeds = range(first, first + IN_ONE_CALL)
    results_of_ranks = world(Drawn(first).size).run(train_all, seeds)
    faults = {}
    for seed, *results in zip(seeds, *results_of_ranks, strict=True):
        drawn = Drawn(seed)
        fault = find_fault(drawn, results)
        if fault is not None:
            faults[drawn] = fault
    assert {} == faults
