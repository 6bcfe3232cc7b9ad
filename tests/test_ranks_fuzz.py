"""Rows of `cases.py` drawn by chance: trained on the gradient that `combine` says, or all ranks raise for a reason."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

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
    halved,
    root,
)
from cases import Case
from test_ranks_cases import WAY_OF, Grads, expected_gradients

from lightning_gradavg.batches.chunks import even_bounds
from lightning_gradavg.reduction.reference import combine
from lightning_gradavg.rules import RULES, resolve_rule, rule_of_split_batches

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS, IN_ONE_CALL = 4, 10
NODES = ([[0, 0], [0, 1]], [[1, 0, 0], [0, 0, 0]], [[0, 0], [0, 1]], [[0]])
"""The nodes of the ranks; of the seeds of one call, as many ranks."""
COUNTS_RANKS = ("mean_of_node_sums", "mean_of_node_means", "sum_of_node_means", "root")
MAGNITUDES = [0.0, 0.0, 1.0, 3.0, 0.125, 4096.0, 1e-3]
OPTIONS: dict[str, tuple[float, list[Any]]] = {
    "gradient_as_bucket_view": (0.3, [True]),
    "find_unused_parameters": (0.2, [True]),
    "bucket_cap_mb": (0.3, [1e-5]),
}
"""With which chance they are set, and to what."""
OF_TRAINER: dict[str, tuple[float, list[Any]]] = {
    "static_graph": (0.1, [True]),
    "nonfinite": (0.5, ["raise", "skip_step"]),
    "check_replicas_every_n_steps": (0.2, [None, 1]),
}


class Drawn:
    """A row and a way to run it, all of which follows from a seed.

    These are options, samples, weights, windows, what trains in each of them, and a fault.
    """

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        chance = lambda share: draw.random() < share  # noqa: E731  # as short as what it says
        self.seed, self.way = seed, draw.choice([*WAYS, *["automatic"] * 3, *["split"] * 3])
        rules = {"split": [*RULES], "sharded": OF_SHARDED}.get(self.way, [*RULES, root, halved])
        self.reduction: Any = draw.choice(rules)
        self.rule, of_ddp = resolve_rule(self.reduction), self.way in OF_DDP
        in_trainer = self.way in ("automatic", "split", "manual")
        of_way = (OPTIONS | OF_TRAINER if in_trainer else OPTIONS if of_ddp else {}).items()
        self.options = {name: draw.choice(values) for name, (share, values) in of_way if chance(share)}
        reduced: list[Any] = [torch.mean, torch.sum]
        self.loss, self.nodes = draw.choice(reduced), draw.choice(NODES[seed // IN_ONE_CALL % len(NODES)])
        self.size, self.stream = len(self.nodes), chance(0.3)
        length = 1 if self.way == "average" else draw.choice([1, 1, 2, 3])
        self.lengths = draw.choices([1, 2, 4], k=STEPS) if self.way in LOOPS and chance(0.5) else [length] * STEPS
        self._draw_changes(draw)
        self.fault = draw.choice([None, None, "nan", "none", "steep"])
        self.weight = draw.choice([None, None, "samples", "drawn", "drawn", "zero but on rank 0"])
        ends = [*accumulate(self.lengths)]
        self.steps = [range(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]
        self.fault_at = (draw.randrange(self.size), draw.randrange(ends[-1]))
        if self.way == "split":
            self.options["split_batches"], self.fault, self.weight = True, None, None
            if self.rule.name not in COUNTS_RANKS and chance(0.6):
                # How a batch is cut further matters to a mean loss that is summed, and to a sum that is averaged.
                self.loss = torch.mean if self.rule.name in ("mean", "weighted_mean") else torch.sum
                self.options[draw.choice(["num_replicas", *["max_device_batch_size"] * 2])] = draw.choice([1, 2, 3])
        elif self.fault is not None or self.way != "automatic" or self.changes:
            self.weight = self.weight or "samples"
        self.nonfinite = self.options.get("nonfinite", "propagate")
        self.wrong_weight = self.weight is not None and self.rule.uses_weight and chance(0.05)
        # Without a loss one rank raises alone, or all leave the step out: docs/faults.md
        agreed = self.way == "automatic" and self.nonfinite != "propagate" and self.size > 1
        if self.fault == "none" and not (agreed and (self.fault_at[1] > 0 or "static_graph" not in self.options)):
            self.fault = "nan"
        if self.fault == "steep" and (self.way != "automatic" or self.changes):
            self.fault = "nan"
        self.counts = ends[-1:] * self.size
        # A rank without batches does not hear which parameters train.
        if self.way in ("automatic", "manual") and self.size > 1 and not self.changes and chance(0.3):
            fewer = range(ends[-1]) if self.way == "automatic" else [0, *ends[:-1]]
            self.counts[draw.randrange(self.size)] = draw.choice(fewer)
        self.uneven = len({*self.counts}) > 1
        left_out = self.nonfinite == "skip_step" and self.way == "automatic"
        self.keeps = of_ddp and (left_out or (self.fault is None and self.nonfinite == "propagate")) and chance(0.4)
        self._draw_interruptions(draw)
        self._draw_samples(draw, ends[-1])
        # A parameter may be frozen when the run begins, where it is told in the end what trains.
        frozen_first = self.freezes and self.way in ("automatic", "manual") and chance(0.3)
        self.begins = FIRST if frozen_first else BOTH
        self.trains = [names for step in self.steps for names in self._drawn_parameters(draw, len(step))]
        self._draw_tail(draw)

    def _draw_tail(self, draw: random.Random) -> None:
        """Draw a last batch that leaves ranks without samples, and whether steps run a collective of the user's own."""
        whole = self.way == "split" and not {"num_replicas", "max_device_batch_size"} & self.options.keys()
        self.has_tail = whole and self.size > 1 and draw.random() < 0.5
        self.collects = whole and draw.random() < 0.5
        if self.has_tail:
            few = draw.randrange(1, self.size)
            bounds = even_bounds(few, self.size)
            self.samples[-1] = [
                samples[: stop - start] for samples, (start, stop) in zip(self.samples[-1], bounds, strict=True)
            ]

    @property
    def must_raise(self) -> bool:
        """Whether a rank without samples runs a collective, which would count those of another rank."""
        return self.has_tail and self.collects

    def _draw_interruptions(self, draw: random.Random) -> None:
        """Draw, before each step of a loop, what begins its window and is given up, and a window whose backward raises.

        DDP fails if a parameter that was used in `no_sync` has in the end neither gradient nor use, so what is given up
        is of the parameters that train next.
        """
        chance = lambda share: self.way in LOOPS and draw.random() < share  # noqa: E731  # likewise
        begun = [(100.0, 7)] * draw.randint(1, 2)
        self.given_up: list[list[Any]] = [
            [*begun, draw.choice(CLEARS)] if chance(0.3) and not self.takes_turns else [] for _ in range(STEPS)
        ]
        may_raise = not self.uneven and not self.changes and self.rule.name != "mean"
        self.raises = [may_raise and chance(0.2) for _ in range(STEPS)]
        self.raising = [(7.0, 1), Fails(1000.0, draw.choice([50, -1])), (7.0, 1)][draw.randrange(2) :]

    def _draw_samples(self, draw: random.Random, count: int) -> None:
        """Draw the samples and the weights of all micro-batches; steady ones have the same totals in each step."""
        even = draw.random() < 0.5
        self.totals = draw.choice(["drawn", "drawn", "steady", "steady until the last step"])
        steady = {"drawn": 0, "steady": count}.get(self.totals, self.steps[-1][0])
        of_sizes = [[3 if even else draw.randint(1, 5) for _ in self.nodes] for _ in range(count)]
        of_sizes[:steady] = of_sizes[:1] * steady
        if self.way == "split":
            of_sizes = [[stop - start for start, stop in even_bounds(sum(sizes), self.size)] for sizes in of_sizes]
        generator = torch.Generator().manual_seed(self.seed)
        self.samples = [
            [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes] for sizes in of_sizes
        ]
        self.weights = [[draw.choice(MAGNITUDES) for _ in self.nodes] for _ in range(count)]
        self.weights[:steady] = self.weights[:1] * steady

    def _draw_changes(self, draw: random.Random) -> None:
        """Draw whether two optimizers have a window each, which are open at once, or parameters freeze and unfreeze."""
        self.takes_turns = self.way in LOOPS and draw.random() < 0.25
        if self.takes_turns:
            self.lengths = draw.choices([2, 3, 4], k=STEPS)
        self.freezes = self.way in OF_DDP and not self.takes_turns and draw.random() < 0.25
        self.changes = self.takes_turns or self.freezes
        if self.changes:
            self.options["find_unused_parameters"] = True
            self.options.pop("static_graph", None)

    def _drawn_parameters(self, draw: random.Random, length: int) -> list[Sequence[str]]:
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
        if draw.random() < 0.2:
            return draw.choices(choices, k=length)
        begin = draw.randrange(length + 1)
        return [*[some] * begin, *[BOTH] * (length - begin)]

    @property
    def stops(self) -> bool:
        """Whether a parameter ceases to train within a window that has a gradient of it."""
        of_steps = [[self.trains[index] for index in step] for step in self.steps]
        return self.freezes and any(
            not set(before) <= set(after) for step in of_steps for before, after in pairwise(step)
        )

    @property
    def may_raise(self) -> bool:
        reasons = {
            "a node's ranks have the same say": self.way == "split" and self.rule.name in COUNTS_RANKS[1:3],
            "static_graph is judged, or has windows, or a first step without a loss": "static_graph" in self.options,
            "a step by hand is judged": self.nonfinite != "propagate" and self.way == "manual",
            "ranks are counted that are done": self.uneven and (self.rule.name in COUNTS_RANKS or self.way == "manual"),
            "a fault is an error": self.fails and self.nonfinite == "raise",
            "a weight that is none": self.wrong_weight,
            "a user's rule depends on the length of a window": self.reduction is root and max(self.lengths) > 1,
            "a parameter stops training within a window": self.stops
            and not (self.rule.name == "mean" and self.nonfinite == "propagate"),
            "a rank without samples runs a collective": self.must_raise,
            "no batch at all": 0 in self.counts and (not self.stream or self.way == "manual"),
        }
        return any(reasons.values())

    @property
    def fails(self) -> bool:
        return self.fault is not None and self.fault_at[1] < self.counts[self.fault_at[0]]

    def weight_of(self, rank: int, index: int) -> float:
        samples = len(self.samples[index][rank])
        if self.wrong_weight and (rank, index) == (self.size - 1, 0):
            return NAN
        others = {"drawn": self.weights[index][rank], "zero but on rank 0": float(samples) * (rank == 0)}
        return others.get(str(self.weight), samples)

    def loss_of(self, rank: int, index: int) -> float:
        """Return the gradient without the fault: NaN where it does not count."""
        if self.weight == "drawn" and self.rule.uses_weight and self.weight_of(rank, index) == 0:
            return NAN
        samples = self.samples[index][rank]
        return self.loss(samples).item() if len(samples) > 0 else 0.0

    def micro_batch(self, rank: int, index: int) -> Any:
        samples, weight = self.samples[index][rank], self.weight_of(rank, index)
        if self.weight is None:
            return samples
        gradient: float | None = self.loss_of(rank, index)
        if (rank, index) == self.fault_at and self.fault is not None:
            if self.fault == "steep":
                return Steep(gradient, weight)
            gradient = None if self.fault == "none" else NAN
        if self.changes:
            return Trains(gradient, weight, self.trains[index], self._ends(index))
        return gradient, weight

    def _ends(self, index: int) -> bool | None:
        """Return whether a micro-batch is the last of its optimizer's window, if two are open."""
        if not self.takes_turns:
            return None
        (later,) = (range(index + 1, step.stop) for step in self.steps if index in step)
        return all(self.trains[other] != self.trains[index] for other in later)

    def is_left_out(self, indices: range) -> bool:
        rank, index = self.fault_at
        if not self.fails or index not in indices or self.nonfinite != "skip_step":
            return False
        return self.weight_of(rank, index) > 0 or not self.rule.uses_weight or self.fault == "none"

    def gradient(self, name: str, indices: range) -> float:
        """Return the gradient of a parameter in a step that is not left out, by one process."""
        gradients, nodes, weights = list[float](), list[int](), list[float]()
        window = [index for index in indices if not self.takes_turns or name in self.trains[index]]
        for rank, index in ((r, i) for r in range(self.size) for i in window if i < self.counts[r]):
            fails = self.fault is not None and (rank, index) == self.fault_at
            gradient = NAN if fails else self.loss_of(rank, index)
            gradients.append(gradient if name in self.trains[index] else 0.0)
            nodes.append(self.nodes[rank])
            weights.append(self.weight_of(rank, index))
        rule = rule_of_split_batches(self.rule) if self.way == "split" else self.rule
        dense = torch.tensor(gradients, dtype=torch.float64)[:, None]
        return combine(dense, rule=rule, nodes=nodes, weights=weights).item()

    def expected(self) -> list[tuple[float, ...]]:
        """Return the gradients of the parameters after each window, as the optimizer sees them."""
        nothing = (0.0,) * len(BOTH)
        found, kept = list[tuple[float, ...]](), nothing
        of_steps = zip(self.steps, self.raises, self.given_up, strict=True)
        for step, raises, given_up in (one for one in of_steps if one[0][0] < max(self.counts)):
            found += [kept] * raises
            before = nothing if given_up else kept
            if self.is_left_out(step):
                found.append(nothing)
                continue
            found.append(tuple(old + self.gradient(name, step) for old, name in zip(before, BOTH, strict=True)))
            kept = found[-1] if self.keeps else nothing
        return found

    def windows(self, rank: int) -> Iterator[list[Any]]:
        for step, raises, given_up in zip(self.steps, self.raises, self.given_up, strict=True):
            if step[0] < self.counts[rank]:
                yield from [self.raising] * raises
                begun = given_up
                if self.freezes:
                    next_ones = self.trains[step[0]]
                    begun = [one if one in CLEARS else Trains(100.0, 7, next_ones) for one in given_up]
                yield [*begun, *(self.micro_batch(rank, index) for index in step if index < self.counts[rank])]

    @property
    def case(self) -> Case:
        return Case(
            repr(self),
            self.reduction,
            [list(self.windows(rank)) for rank in range(self.size)],
            nodes=self.nodes,
            options=self.options,
            keeps_gradients=self.keeps,
            trains=self.begins,
            loss=self.loss,
            runs_collective=self.collects,
            loader="stream" if self.stream else "list",
        )

    def __repr__(self) -> str:
        return f"Drawn({ {name: value for name, value in vars(self).items() if name not in ('samples', 'weights')} })"


def outcomes(seeds: range) -> list[Grads | str]:
    """Body: train what some seeds give, one after another; return the gradients of each, or its error."""
    return [outcome(Drawn(seed)) for seed in seeds]


def outcome(drawn: Drawn) -> Grads | str:
    try:
        found: Any = WAY_OF[drawn.way](drawn.case)
    except Exception as raised:  # noqa: BLE001  # whatever it is, the test looks at it
        found = f"{type(raised).__name__}: {raised}"
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (drawn.seed, isinstance(found, str)))
    assert len(set(ranks)) == 1, f"the ranks part: {ranks}, here {found}; {drawn}"
    return found


def judged(drawn: Drawn, first: Any, *others: Any) -> str | None:
    if drawn.must_raise and not isinstance(first, str):
        return f"a rank without samples ran a collective, with the result {first}"
    if isinstance(first, str):
        return None if drawn.may_raise else f"raised without reason: {first}"
    if any(repr(other) != repr(first) for other in others):
        return f"the ranks differ: {first}, {others}"
    found, expected = (
        [gradient.tolist() for gradient in first],
        expected_gradients(replace(drawn.case, gradients=drawn.expected())),
    )
    # All after NaN is NaN.
    until = next((at for at, numbers in enumerate(found, 1) if any(map(math.isnan, numbers))), len(expected))
    return None if expected[:until] == found[:until] else f"gradients {found} instead of {expected}"


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.full] * (first >= 80)) for first in range(0, 500, IN_ONE_CALL)]
)
def test_drawn_rows_have_the_gradients_of_one_process_or_raise_together(world, first):
    seeds = range(first, first + IN_ONE_CALL)
    of_ranks = zip(*world(Drawn(first).size).run(outcomes, seeds), strict=True)
    found = {Drawn(seed): judged(Drawn(seed), *ranks) for seed, ranks in zip(seeds, of_ranks, strict=True)}
    assert {} == {drawn: wrong for drawn, wrong in found.items() if wrong is not None}
