"""Rows of `cases.py` drawn by chance: trained on the gradient that `combine` says, or all ranks raise for a reason."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import CLEARS, LOOPS, NAN, OF_DDP, OF_SHARDED, WAYS, Case, Fails, Steep, root
from test_ranks_cases import WAY_OF, Grads, by_hand

from lightning_gradavg.batches.chunks import even_bounds
from lightning_gradavg.reduction.reference import combine
from lightning_gradavg.rules import RULES, resolve_rule, rule_of_split_batches

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS, IN_ONE_CALL = 3, 10
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
    """A row and a way to run it, all of which follows from a seed: options, samples, weights, windows and a fault."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        chance = lambda share: draw.random() < share  # noqa: E731  # as short as what it says
        self.seed, self.way = seed, draw.choice([*WAYS, *["automatic"] * 3, *["split"] * 3])
        self.reduction: Any = draw.choice({"split": [*RULES], "sharded": OF_SHARDED}.get(self.way, [*RULES, root]))
        self.rule, of_ddp = resolve_rule(self.reduction), self.way in OF_DDP
        in_trainer = self.way in ("automatic", "split", "manual")
        of_way = (OPTIONS | OF_TRAINER if in_trainer else OPTIONS if of_ddp else {}).items()
        self.options = {name: draw.choice(values) for name, (share, values) in of_way if chance(share)}
        reduced: list[Any] = [torch.mean, torch.sum]
        self.loss, self.nodes = draw.choice(reduced), draw.choice(NODES[seed // IN_ONE_CALL % len(NODES)])
        self.size, self.stream = len(self.nodes), chance(0.3)
        length = 1 if self.way == "average" else draw.choice([1, 1, 2, 3])
        self.lengths = draw.choices([1, 2, 4], k=STEPS) if self.way in LOOPS and chance(0.5) else [length] * STEPS
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
        elif self.fault is not None or self.way != "automatic":
            self.weight = self.weight or "samples"
        self.nonfinite = self.options.get("nonfinite", "propagate")
        self.named = of_ddp and self.weight is not None and self.rule.uses_weight and chance(0.2)
        self.wrong_weight = self.weight is not None and self.rule.uses_weight and chance(0.05)
        # Without a loss one rank raises alone, or all leave the step out: docs/faults.md
        agreed = self.way == "automatic" and self.nonfinite != "propagate" and self.size > 1
        if self.fault == "none" and not (agreed and (self.fault_at[1] > 0 or "static_graph" not in self.options)):
            self.fault = "nan"
        if self.fault == "steep" and (self.way != "automatic" or self.named):
            self.fault = "nan"
        self.counts = ends[-1:] * self.size
        if self.way in ("automatic", "manual") and self.size > 1 and chance(0.3):
            fewer = range(ends[-1]) if self.way == "automatic" else [0, *ends[:-1]]
            self.counts[draw.randrange(self.size)] = draw.choice(fewer)
        self.uneven = len({*self.counts}) > 1
        even, generator = chance(0.5), torch.Generator().manual_seed(seed)
        of_loop = self.way in LOOPS and not self.named
        self.keeps = self.fault is None and self.nonfinite == "propagate" and of_ddp and chance(0.3)
        # Before each step of a loop: what begins its window and is given up, and a window whose backward raises.
        self.given_up = [
            [*[(100.0, 7)] * draw.randint(1, 2), draw.choice(CLEARS)] * (of_loop and chance(0.3)) for _ in range(STEPS)
        ]
        self.raises = [of_loop and not self.uneven and self.rule.name != "mean" and chance(0.2) for _ in range(STEPS)]
        self.raising = [(7.0, 1), Fails(1000.0, draw.choice([50, -1])), (7.0, 1)][draw.randrange(2) :]
        self.samples: list[list[torch.Tensor]] = []
        self.weights = [[draw.choice(MAGNITUDES) for _ in self.nodes] for _ in range(ends[-1])]
        for _ in range(ends[-1]):
            sizes = [3 if even else draw.randint(1, 5) for _ in self.nodes]
            if self.way == "split":
                sizes = [stop - start for start, stop in even_bounds(sum(sizes), self.size)]
            self.samples.append([torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes])

    @property
    def may_raise(self) -> bool:
        reasons = {
            "a node's ranks have the same say": self.way == "split" and self.rule.name in COUNTS_RANKS[1:3],
            "static_graph is judged, has named terms, or unused parameters": "static_graph" in self.options,
            "a step by hand is judged": self.nonfinite != "propagate" and self.way == "manual",
            "ranks are counted that are done": self.uneven and (self.rule.name in COUNTS_RANKS or self.way == "manual"),
            "a fault is an error": self.fails and self.nonfinite == "raise",
            "names are not known before a loss": self.named and self.fault == "none" and self.fault_at[1] == 0,
            "a weight that is none": self.wrong_weight,
            "named terms in a window": self.named and max(self.lengths) > 1,
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
        return ({"a": gradient}, {"a": weight}) if self.named and gradient is not None else (gradient, weight)

    def gradient(self, indices: range) -> float:
        """Return the gradient of a step, by one process; 0 where it is left out."""
        gradients, nodes, weights = list[float](), list[int](), list[float]()
        for rank, index in ((r, i) for r in range(self.size) for i in indices if i < self.counts[r]):
            weight = self.weight_of(rank, index)
            fails = self.fault is not None and (rank, index) == self.fault_at
            counts = weight > 0 or not self.rule.uses_weight or self.fault == "none"
            if fails and counts and self.nonfinite == "skip_step":
                return 0.0
            gradients.append(NAN if fails else self.loss_of(rank, index))
            nodes.append(self.nodes[rank])
            weights.append(weight)
        rule = rule_of_split_batches(self.rule) if self.way == "split" else self.rule
        dense = torch.tensor(gradients, dtype=torch.float64)[:, None]
        return combine(dense, rule=rule, nodes=nodes, weights=weights).item()

    def expected(self) -> list[float]:
        found = [0.0]
        of_steps = zip(self.steps, self.raises, self.given_up, strict=True)
        for step, raises, given_up in (one for one in of_steps if one[0][0] < max(self.counts)):
            found += [found[-1] * self.keeps] * raises
            found.append((0.0 if given_up else found[-1] * self.keeps) + self.gradient(step))
        return found[1:]

    def windows(self, rank: int) -> Iterator[list[Any]]:
        for step, raises, given_up in zip(self.steps, self.raises, self.given_up, strict=True):
            if step[0] < self.counts[rank]:
                yield from [self.raising] * raises
                yield [*given_up, *(self.micro_batch(rank, index) for index in step if index < self.counts[rank])]

    @property
    def case(self) -> Case:
        return Case(
            *(repr(self), self.reduction, [list(self.windows(rank)) for rank in range(self.size)], []),
            nodes=self.nodes,
            options=self.options,
            keeps=self.keeps,
            loss=self.loss,
            reads="stream" if self.stream else "list",
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
    "first", [pytest.param(first, marks=[pytest.mark.full] * (first >= 80)) for first in range(0, 500, IN_ONE_CALL)]
)
def test_drawn_rows_have_the_gradients_of_one_process_or_raise_together(world, first):
    seeds = range(first, first + IN_ONE_CALL)
    of_ranks = zip(*world(Drawn(first).size).run(outcomes, seeds), strict=True)
    found = {Drawn(seed): judged(Drawn(seed), *ranks) for seed, ranks in zip(seeds, of_ranks, strict=True)}
    assert {} == {drawn: wrong for drawn, wrong in found.items() if wrong is not None}
