"""Rows of `cases.py` drawn by chance: trained on the gradient that `combine` says, or all ranks raise for a reason."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import CLEARS, LOOPS, NAN, OF_DDP, Case, Fails, Steep
from test_ranks_cases import WAY_OF, Grads, by_hand

from lightning_gradavg.batches.chunks import chunk_bounds
from lightning_gradavg.reduction.reference import combine
from lightning_gradavg.rules import RULES, rule_of_split_batches

pytestmark = pytest.mark.filterwarnings("ignore")
WORLD_SIZE, STEPS, IN_ONE_CALL = 2, 2, 10
COUNTS_RANKS = ("mean_of_node_sums", "mean_of_node_means", "sum_of_node_means")
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
    """A row and a way to run it, all of which follows from a seed: options, samples, weights, windows and a fault."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        chance = lambda share: draw.random() < share  # noqa: E731  # as short as what it says
        self.seed, self.rule = seed, draw.choice([*RULES.values()])
        self.way = draw.choice([*OF_DDP, *["automatic"] * 3, *["split"] * 3])
        in_trainer = self.way in ("automatic", "split", "manual")
        of_way = OPTIONS | OF_TRAINER if in_trainer else OPTIONS
        self.options = {name: draw.choice(values) for name, (share, values) in of_way.items() if chance(share)}
        reduced: list[Any] = [torch.mean, torch.sum]
        self.loss, self.nodes = draw.choice(reduced), draw.choice([[0, 0], [0, 1]])
        self.length, self.stream = draw.choice([1, 1, 2, 3]), chance(0.3)
        self.fault = draw.choice([None, None, "nan", "none", "steep"])
        self.weight = draw.choice([None, None, "samples", "drawn", "zero on rank 1"])
        count = STEPS * self.length
        self.fault_at, fewer = (draw.randrange(WORLD_SIZE), draw.randrange(count)), 0
        if self.way == "split":
            self.options["split_batches"], self.fault, self.weight = True, None, None
            if self.rule.name not in COUNTS_RANKS and chance(0.6):
                # How a batch is cut further matters to a mean loss that is summed, and to a sum that is averaged.
                self.loss = torch.mean if self.rule.name in ("mean", "weighted_mean") else torch.sum
                self.options[draw.choice(["num_replicas", *["max_device_batch_size"] * 2])] = draw.choice([1, 2, 3])
        elif self.fault is not None or self.way != "automatic":
            self.weight = self.weight or "samples"
        self.nonfinite = self.options.get("nonfinite", "propagate")
        self.named = self.weight is not None and self.rule.uses_weight and chance(0.2)
        self.wrong_weight = self.weight is not None and self.rule.uses_weight and chance(0.05)
        if self.fault == "none" and (self.way != "automatic" or self.nonfinite == "propagate"):
            self.fault = "nan"  # without a loss one rank raises alone: docs/faults.md
        if self.fault == "steep" and (self.way != "automatic" or self.named):
            self.fault = "nan"
        if self.way in ("automatic", "manual") and chance(0.3):
            fewer = draw.randrange(1, count + 1) if self.way == "automatic" else self.length * draw.randint(1, STEPS)
        self.counts = [count, count - fewer] if chance(0.5) else [count - fewer, count]
        even, generator = chance(0.5), torch.Generator().manual_seed(seed)
        of_loop = self.way in LOOPS and not self.named
        self.keeps = self.fault is None and self.nonfinite == "propagate" and self.way != "split" and chance(0.3)
        # Before each step of a loop: what begins its window and is given up, and a window whose backward raises.
        self.given_up = [
            [*[(100.0, 7)] * draw.randint(1, 2), draw.choice(CLEARS)] * (of_loop and chance(0.3)) for _ in range(STEPS)
        ]
        others = [[(7.0, 1)] * draw.randrange(2) for _ in range(2)]
        self.raises = [of_loop and self.rule.name != "mean" and chance(0.2) for _ in range(STEPS)]
        self.raising = [*others[0], Fails(1000.0, 50), *others[1]]
        self.samples: list[list[torch.Tensor]] = []
        for _ in range(count):
            sizes = [3 if even else draw.randint(1, 5) for _ in range(WORLD_SIZE)]
            if self.way == "split":
                sizes = [stop - start for start, stop in chunk_bounds(sum(sizes), WORLD_SIZE)]
            self.samples.append([torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes])

    @property
    def may_raise(self) -> bool:
        """Whether all ranks may raise."""
        uneven = self.counts[0] != self.counts[1]
        reasons = {
            "a node's ranks have the same say": self.way == "split" and self.rule.name in COUNTS_RANKS[1:],
            "static_graph is judged, has named terms, or unused parameters": "static_graph" in self.options,
            "a step by hand is judged": self.nonfinite != "propagate" and self.way == "manual",
            "ranks are counted that are done": uneven and (self.rule.name in COUNTS_RANKS or self.way == "manual"),
            "a fault is an error": self.fails and self.nonfinite == "raise",
            "names are not known before a loss": self.named and self.fault == "none" and self.fault_at[1] == 0,
            "a weight that is none": self.wrong_weight,
            "named terms in a window": self.named and self.length > 1,
            "no batch at all": 0 in self.counts and (not self.stream or self.way == "manual"),
        }
        return any(reasons.values())

    @property
    def fails(self) -> bool:
        return self.fault is not None and self.fault_at[1] < self.counts[self.fault_at[0]]

    def weight_of(self, rank: int, index: int) -> float:
        samples = self.samples[index][rank]
        if self.wrong_weight and (rank, index) == (1, 0):
            return NAN
        drawn = round(1 + 3 * abs(float(samples.sum())), 3)
        others = {"drawn": drawn, "zero on rank 1": float(len(samples)) * (rank == 0)}
        return others.get(str(self.weight), len(samples))

    def micro_batch(self, rank: int, index: int) -> Any:
        """Return the samples, or their gradient with its weight."""
        samples, weight = self.samples[index][rank], self.weight_of(rank, index)
        if self.weight is None:
            return samples
        gradient: float | None = self.loss(samples).item()
        if (rank, index) == self.fault_at and self.fault is not None:
            if self.fault == "steep":
                return Steep(gradient, weight)
            gradient = None if self.fault == "none" else NAN
        return ({"a": gradient}, {"a": weight}) if self.named else (gradient, weight)

    def gradient(self, indices: range) -> float:
        """Return the gradient of a step, by one process; 0 where it is left out."""
        gradients, nodes, weights = list[float](), list[int](), list[float]()
        for rank, index in ((r, i) for r in range(WORLD_SIZE) for i in indices if i < self.counts[r]):
            samples, weight = self.samples[index][rank], self.weight_of(rank, index)
            fails = self.fault is not None and (rank, index) == self.fault_at
            counts = weight > 0 or not self.rule.uses_weight or self.fault == "none"
            if fails and counts and self.nonfinite == "skip_step":
                return 0.0
            gradients.append(NAN if fails else self.loss(samples).item() if len(samples) > 0 else 0.0)
            nodes.append(self.nodes[rank])
            weights.append(weight)
        rule = rule_of_split_batches(self.rule) if self.way == "split" else self.rule
        dense = torch.tensor(gradients, dtype=torch.float64)[:, None]
        return combine(dense, rule=rule, nodes=nodes, weights=weights).item()

    def expected(self) -> list[float]:
        """Return the gradient after every window."""
        found = [0.0]
        for (step, raises), given_up in zip(self.steps, self.given_up, strict=False):
            found += [found[-1] * self.keeps] * raises
            found.append((0.0 if given_up else found[-1] * self.keeps) + self.gradient(step))
        return found[1:]

    @property
    def steps(self) -> list[tuple[range, bool]]:
        """The indices of micro-batches of each step, and whether a window that raises comes before it."""
        of_steps = [range(at, at + self.length) for at in range(0, max(self.counts), self.length)]
        return list(zip(of_steps, self.raises, strict=False))

    def windows(self, rank: int) -> Iterator[list[Any]]:
        for (step, raises), given_up in zip(self.steps, self.given_up, strict=False):
            if step[0] < self.counts[rank]:
                yield from [self.raising] * raises
                yield [*given_up, *(self.micro_batch(rank, index) for index in step if index < self.counts[rank])]

    @property
    def case(self) -> Case:
        return Case(
            *(repr(self), self.rule.name, [list(self.windows(rank)) for rank in range(WORLD_SIZE)], []),
            nodes=self.nodes,
            options=self.options,
            keeps=self.keeps,
            loss=self.loss,
            reads="stream" if self.stream else "list",
        )

    def __repr__(self) -> str:
        return f"Drawn({ {name: value for name, value in vars(self).items() if name != 'samples'} })"


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
    """Return what is wrong with the outcomes of a row on all ranks, or None."""
    if isinstance(first, str):
        return None if drawn.may_raise else f"raised without reason: {first}"
    if any(repr(other) != repr(first) for other in others):
        return f"the ranks differ: {first}, {others}"
    found, expected = (
        [gradient.tolist() for gradient in first],
        by_hand(replace(drawn.case, gradients=drawn.expected())),
    )
    # All after NaN is NaN.
    until = next((at for at, numbers in enumerate(found, 1) if math.isnan(numbers[0])), len(expected))
    return None if expected[:until] == found[:until] else f"gradients {found} instead of {expected}"


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.full] * (first >= 50)) for first in range(0, 500, IN_ONE_CALL)]
)
def test_drawn_rows_have_the_gradients_of_one_process_or_raise_together(world, first):
    seeds = range(first, first + IN_ONE_CALL)
    of_ranks = zip(*world(WORLD_SIZE).run(outcomes, seeds), strict=True)
    found = {Drawn(seed): judged(Drawn(seed), *ranks) for seed, ranks in zip(seeds, of_ranks, strict=True)}
    assert {} == {drawn: wrong for drawn, wrong in found.items() if wrong is not None}
