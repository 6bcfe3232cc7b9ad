"""Runs drawn at random train on the gradient that `combine` says, or all ranks raise for a reason; none waits."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from ranks import make_trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.batches.chunks import chunk_bounds
from lightning_gradavg.reduction.reference import combine
from lightning_gradavg.rules import RULES, rule_of_split_batches

WORLD_SIZE, STEPS, IN_ONE_CALL = 2, 2, 10
COUNTS_RANKS = ("mean_of_node_sums", "mean_of_node_means", "sum_of_node_means")
Gradients = list[list[float]]
"""Of every step; of a step that was left out, an empty one."""


class Config:
    """One run, all of which follows from a seed: options, batches, weights, losses and a fault."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        chance = lambda share: draw.random() < share  # noqa: E731  # as short as what it says
        self.seed, self.rule = seed, draw.choice(list(RULES))
        self.split, self.nodes, self.loss = chance(0.3), draw.choice([[0, 0], [0, 1]]), draw.choice(["mean", "sum"])
        self.manual, self.stream, self.wrong_weight = chance(0.1), chance(0.3), chance(0.05)
        self.window = 1 if self.manual else draw.choice([1, 1, 2, 3])
        self.weight = draw.choice([None, None, "samples", "drawn", "zero on rank 1"])
        self.named = self.weight is not None and chance(0.2)
        count = STEPS * self.window
        self.fault = draw.choice([None, None, "nan", "none", "steep"])
        self.fault_at = draw.randrange(WORLD_SIZE), draw.randrange(count)
        options = {"gradient_as_bucket_view": 0.3, "find_unused_parameters": 0.2, "static_graph": 0.1}
        self.strategy: dict[str, Any] = {name: True for name, share in options.items() if chance(share)}
        self.strategy["reduction"] = self.rule
        if chance(0.3):
            self.strategy["bucket_cap_mb"] = 0.00001
        if chance(0.5):
            self.strategy["nonfinite"] = draw.choice(["raise", "skip_step"])
        if chance(0.2):
            self.strategy["check_replicas_every_n_steps"] = draw.choice([None, 1])
        if self.split:
            self.strategy["split_batches"] = True
            self.fault, self.weight, self.named = None, draw.choice([None, "samples"]), False
            if self.rule not in COUNTS_RANKS and chance(0.6):
                # How a batch is cut further matters to a mean loss that is summed, and to a sum that is averaged.
                self.loss = "mean" if self.rule in ("mean", "weighted_mean") else "sum"
                self.strategy[draw.choice(["num_replicas", *["max_device_batch_size"] * 2])] = draw.choice([1, 2, 3])
        # Of one replica rank 1 has no samples, whose weight nobody asks.
        self.wrong_weight &= self.strategy.get("num_replicas") != 1
        self.nonfinite = self.strategy.get("nonfinite", "propagate")
        if self.fault == "none" and (self.manual or self.nonfinite == "propagate"):
            self.fault = "nan"  # without a loss one rank raises alone: docs/faults.md
        fewer = 0 if self.split or not chance(0.3) else draw.randrange(1, count + 1)
        self.counts = [count, count - fewer] if chance(0.5) else [count - fewer, count]
        generator, even = torch.Generator().manual_seed(seed), chance(0.5)
        of_rank = [
            [torch.randn(3 if even else draw.randint(1, 5), 3, generator=generator).double() for _ in range(number)]
            for number in self.counts
        ]
        self.batches = [of_rank[0]] * WORLD_SIZE if self.split else of_rank

    @property
    def may_raise(self) -> bool:
        """Whether all ranks may raise."""
        uneven, judged = self.counts[0] != self.counts[1], self.nonfinite != "propagate"
        fails = self.fault is not None and self.fault_at[1] < self.counts[self.fault_at[0]]
        reasons = {
            "a node's ranks have the same say": self.split and self.rule in COUNTS_RANKS[1:],
            "static_graph is judged, has named terms, or unused parameters": "static_graph" in self.strategy,
            "a step by hand is judged": judged and self.manual,
            "ranks are counted that are done": uneven and (self.rule in COUNTS_RANKS or self.manual),
            "micro-batches by hand": self.manual and "max_device_batch_size" in self.strategy,
            "a fault is an error": fails and self.nonfinite == "raise",
            "names are not known before a loss": self.named and self.fault == "none" and self.fault_at[1] == 0,
            "a weight that is none": self.wrong_weight and RULES[self.rule].uses_weight,
            "named terms in a window": self.named and self.window > 1,
            "named terms without weights": self.named and not RULES[self.rule].uses_weight,
            "no batch at all": 0 in self.counts and not self.stream,
        }
        return any(reasons.values())

    def weight_of(self, batch: Tensor, rank: int, index: int) -> float | None:
        """Return the weight that the user gives, or None."""
        if self.weight is None:
            return None
        if self.wrong_weight and (rank, index) == (1, 0):
            return math.nan
        drawn = round(1 + 3 * abs(float(batch[0, 0])), 3)
        return {"samples": len(batch), "drawn": drawn, "zero on rank 1": float(len(batch)) * (rank == 0)}[self.weight]

    def reduced(self, losses: Tensor) -> Tensor:
        return losses.mean(0) if self.loss == "mean" else losses.sum(0)

    def expected(self) -> Gradients:
        """Return the gradient of every step, by one process."""
        return [self._of_step(range(at, at + self.window)) for at in range(0, max(self.counts), self.window)]

    def _of_step(self, indices: range) -> list[float]:
        gradients, nodes, weights = list[Tensor](), list[int](), list[float]()
        for rank, index in ((r, i) for r in range(WORLD_SIZE) for i in indices if i < self.counts[r]):
            batch = self.batches[rank][index]
            if self.split:
                batch = batch[slice(*chunk_bounds(len(batch), WORLD_SIZE)[rank])]
            weight = self.weight_of(batch, rank, index) if len(batch) > 0 else 0
            weight = len(batch) if weight is None else weight
            gradient = self.reduced(batch) if len(batch) > 0 else torch.zeros(3).double()
            if self.fault is not None and (rank, index) == self.fault_at:
                gradient = gradient * (1 if self.fault == "none" else math.nan)
                counts = weight > 0 or not RULES[self.rule].uses_weight or self.fault == "none"
                if counts and self.nonfinite == "skip_step":
                    return []
            gradients.append(gradient)
            nodes.append(self.nodes[rank])
            weights.append(weight)
        rule = rule_of_split_batches(RULES[self.rule]) if self.split else RULES[self.rule]
        if rule.uses_weight and not any(weights) and "find_unused_parameters" in self.strategy:
            return []  # DDP takes a parameter that no rank has a gradient of for unused
        return combine(torch.stack(gradients), rule=rule, nodes=nodes, weights=weights).tolist()

    def __repr__(self) -> str:
        return f"Config({ {name: value for name, value in vars(self).items() if name != 'batches'} })"


class Stream(IterableDataset[Tensor]):
    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


class Drawn(LightningModule):
    """Trains a config, and keeps the reduced gradients: the gradient of a sample is the sample."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.config, self.automatic_optimization, self.gradients = config, not config.manual, Gradients()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        config, at = self.config, (dist.get_rank(), batch_idx)
        loss, weight = config.reduced(batch @ self.w), config.weight_of(batch, *at)
        if config.fault is not None and at == config.fault_at:
            if config.fault == "none":
                return None
            nothing = (loss - loss.detach()).abs().sqrt()  # of an infinite slope
            loss = loss * math.nan if config.fault == "nan" else loss + nothing
        if config.manual:
            self.manual_backward(loss, weight=weight)
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
            return None
        if config.named and weight is not None:
            return {"loss": {"a": loss}, "weight": {"a": weight}}
        return loss if weight is None else {"loss": loss, "weight": weight}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append([] if self.w.grad is None else self.w.grad.tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def outcomes(seeds: range) -> list[tuple[Gradients, str | None]]:
    """Body: train the configs of some seeds, one after another; return the gradients of each, and its error."""
    return [outcome(Config(seed)) for seed in seeds]


def outcome(config: Config) -> tuple[Gradients, str | None]:
    model, error, batches = Drawn(config), None, config.batches[dist.get_rank()]
    if config.split:
        order = torch.arange(sum(map(len, batches))).split([len(batch) for batch in batches])
        loader: Any = DataLoader(torch.cat(batches), batch_sampler=[one.tolist() for one in order])  # type: ignore[arg-type]  # rows
    else:
        loader = DataLoader(Stream(batches) if config.stream else batches, batch_size=None)  # type: ignore[arg-type]  # a list is a dataset
    options = {"max_epochs": 1, "use_distributed_sampler": False, "accumulate_grad_batches": config.window}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make_trainer(GradAvgStrategy(**config.strategy), nodes=config.nodes, **options).fit(model, loader)
    except Exception as raised:  # noqa: BLE001  # whatever it is, the test looks at it
        error = f"{type(raised).__name__}: {raised}"
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (config.seed, error is None))
    assert len(set(ranks)) == 1, f"the ranks part: {ranks}, here {error}; {config}"
    return model.gradients, error


def judged(config: Config, ranks: list[tuple[Gradients, str | None]]) -> str | None:
    """Return what is wrong with the outcomes of a config on all ranks, or None."""
    gradients, error = ranks[0]
    if error is not None:
        late = config.fault is not None or config.counts[0] != config.counts[1]
        return None if config.may_raise and (late or not gradients) else f"raised without reason, or late: {error}"
    if any(repr(one) != repr(ranks[0]) for one in ranks):
        return f"the ranks differ: {ranks}"
    for want, got in zip_longest(config.expected(), gradients):
        if got != pytest.approx(want, rel=1e-9, abs=1e-12, nan_ok=True):
            return f"gradients {gradients} instead of {config.expected()}"
        if any(map(math.isnan, want)):
            break  # all after it are no numbers
    return None


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.full] * (first >= 50)) for first in range(0, 500, IN_ONE_CALL)]
)
def test_drawn_runs_have_the_gradients_of_one_process_or_raise_together(world, first):
    configs = [Config(seed) for seed in range(first, first + IN_ONE_CALL)]
    of_ranks = world(WORLD_SIZE).run(outcomes, range(first, first + IN_ONE_CALL))
    found = {config: judged(config, list(ranks)) for config, *ranks in zip(configs, *of_ranks, strict=True)}
    assert {} == {config: wrong for config, wrong in found.items() if wrong is not None}
