"""Runs drawn at random: options, batches, weights, losses and faults, each with the gradients that it must train on.

A run is judged by its gradients, which are those of one process by `reduction.combine`, or by its error, which all
ranks raise. Errors are only expected where `Config.refusals` says why.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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

__all__ = ["Config", "Outcome", "judged", "outcomes"]

WORLD_SIZE, STEPS, LR = 2, 2, 0.1
WEIGHTED = ("weighted_mean", "normalized_sum")
COUNTS_RANKS = ("mean_of_node_sums", "mean_of_node_means", "sum_of_node_means")


@dataclass(frozen=True)
class Outcome:
    """What a rank answers: the gradient of every step, the steps made, and the error, if it raised one."""

    gradients: list[list[float]]
    error: str | None


class Config:
    """One run, all of which follows from a seed.

    Args:
        seed: Any integer.
    """

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.seed = seed
        chance = lambda share: draw.random() < share  # noqa: E731  # as short as what it says
        self.rule = draw.choice(list(RULES))
        self.split = chance(0.3)
        self.nodes = draw.choice([[0, 0], [0, 1]])
        self.loss = draw.choice(["mean", "sum"])
        self.manual = chance(0.1)
        self.window = draw.choice([1, 1, 2, 3])
        self.window = 1 if self.manual else self.window
        self.stream = chance(0.3)
        self.weight = draw.choice([None, None, "samples", "drawn", "zero on rank 1"])
        self.named = self.weight is not None and chance(0.2)
        self.fault = draw.choice([None, None, "nan", "none", "steep"])
        self.fault_at = draw.randrange(WORLD_SIZE), draw.randrange(STEPS * self.window)
        self.wrong_weight = chance(0.05)
        strategy: dict[str, Any] = {"reduction": self.rule}
        for name, share in {
            "gradient_as_bucket_view": 0.3,
            "find_unused_parameters": 0.2,
            "static_graph": 0.1,
        }.items():
            if chance(share):
                strategy[name] = True
        if chance(0.3):
            strategy["bucket_cap_mb"] = 0.00001
        if chance(0.5):
            strategy["nonfinite"] = draw.choice(["raise", "skip_step"])
        if self.split:
            strategy["split_batches"] = True
            self.fault, self.weight, self.named = None, draw.choice([None, "samples"]), False
            # How a batch is cut further matters to a mean loss that is summed, and to a sum that is averaged.
            suits = "mean" if self.rule in ("mean", "weighted_mean") else "sum"
            cuts = self.rule not in COUNTS_RANKS and chance(0.6)
            self.loss = suits if cuts else self.loss
            if cuts and chance(0.7):
                strategy["max_device_batch_size"] = draw.choice([1, 2, 3])
            elif cuts:
                strategy["num_replicas"] = draw.choice([1, 2, 3])
        # Of one replica rank 1 has no samples, whose weight nobody asks.
        self.wrong_weight &= strategy.get("num_replicas") != 1
        if chance(0.2):
            strategy["check_replicas_every_n_steps"] = draw.choice([None, 1])
        self.strategy = strategy
        self.nonfinite = strategy.get("nonfinite", "propagate")
        if self.fault == "none" and (self.manual or self.nonfinite == "propagate"):
            self.fault = "nan"  # without a loss one rank raises alone: docs/faults.md
        count = STEPS * self.window
        fewer = 0 if self.split or not chance(0.3) else draw.randrange(1, count + 1)
        self.counts = [count, count - fewer] if chance(0.5) else [count - fewer, count]
        generator = torch.Generator().manual_seed(seed)
        even = chance(0.5)

        def batch() -> Tensor:
            rows = 3 if even else draw.randint(1, 5)
            return torch.randn(rows, 3, generator=generator, dtype=torch.float64)

        of_rank = [[batch() for _ in range(number)] for number in self.counts]
        self.batches = [of_rank[0]] * WORLD_SIZE if self.split else of_rank

    def refusals(self) -> list[str]:
        """Return why all ranks may raise."""
        uneven = self.counts[0] != self.counts[1]
        fails = self.fault is not None and self.fault_at[1] < self.counts[self.fault_at[0]]
        judged = self.nonfinite != "propagate"
        reasons = {
            "a node's ranks have the same say": self.split and self.rule in COUNTS_RANKS[1:],
            "static_graph is judged": judged and "static_graph" in self.strategy,
            "static_graph with named terms": "static_graph" in self.strategy and self.named,
            "static_graph and unused": "static_graph" in self.strategy,
            "a step by hand is judged": judged and self.manual,
            "ranks are counted that are done": uneven and (self.rule in COUNTS_RANKS or self.manual),
            "micro-batches by hand": self.manual and "max_device_batch_size" in self.strategy,
            "a fault is an error": fails and self.nonfinite == "raise",
            "names are not known before a loss": self.named and self.fault == "none" and self.fault_at[1] == 0,
            "a weight that is none": self.wrong_weight and self.rule in WEIGHTED,
            "named terms in a window": self.named and self.window > 1,
            "named terms without weights": self.named and self.rule not in WEIGHTED,
            "no batch at all": 0 in self.counts and not self.stream,
        }
        return [reason for reason, holds in reasons.items() if holds]

    def weight_of(self, batch: Tensor, rank: int, index: int) -> float | None:
        """Return the weight that the user gives, or None."""
        if self.wrong_weight and (rank, index) == (1, 0) and self.weight is not None:
            return math.nan
        if self.weight is None:
            return None
        drawn = round(1 + 3 * abs(float(batch[0, 0])), 3)
        return {"samples": len(batch), "drawn": drawn, "zero on rank 1": float(len(batch)) * (rank == 0)}[self.weight]

    def expected(self) -> list[list[float]]:
        """Return the gradient of every step, by one process."""
        w, found = _start(), []
        for step in range(-(-max(self.counts) // self.window)):
            indices = range(step * self.window, min((step + 1) * self.window, max(self.counts)))
            gradient = self._expected_step(w, indices)
            found.append(gradient.tolist() if gradient is not None else [])
            w = w if gradient is None else w - LR * gradient
        return found

    def _expected_step(self, w: Tensor, indices: range) -> Tensor | None:
        pairs: list[tuple[int, Tensor, float]] = []
        dropped = set()
        for rank in range(WORLD_SIZE):
            for index in indices:
                if index >= self.counts[rank]:
                    continue
                batch = self.batches[rank][index]
                if self.split:
                    start, stop = chunk_bounds(len(batch), WORLD_SIZE)[rank]
                    batch = batch[start:stop]
                    if len(batch) == 0:
                        pairs.append((rank, torch.zeros_like(w), 0))
                        continue
                fault = self.fault if (rank, index) == self.fault_at else None
                weight = self.weight_of(batch, rank, index)
                weight = len(batch) if weight is None else weight
                counted = weight > 0 or self.rule not in WEIGHTED
                if fault is not None and (counted or fault == "none"):
                    dropped.add(rank)
                gradient = _gradient(w, batch, self.loss)
                pairs.append((rank, gradient * math.nan if fault in ("nan", "steep") else gradient, weight))
        if dropped and self.nonfinite == "skip_step":
            return None
        nothing = self.rule in WEIGHTED and not any(weight for *_, weight in pairs)
        if nothing and "find_unused_parameters" in self.strategy:
            return None  # DDP takes a parameter that no rank has a gradient of for unused
        rule = rule_of_split_batches(RULES[self.rule]) if self.split else RULES[self.rule]
        return combine(
            torch.stack([gradient for _, gradient, _ in pairs]),
            rule=rule,
            nodes=[self.nodes[rank] for rank, _, _ in pairs],
            weights=[weight for _, _, weight in pairs],
        )

    def __repr__(self) -> str:
        facts = {name: value for name, value in vars(self).items() if name not in ("batches", "rule", "nonfinite")}
        return f"Config({facts})"


def _start() -> Tensor:
    return torch.tensor([0.5, -0.25, 1.0], dtype=torch.float64)


def _losses(w: Tensor, batch: Tensor) -> Tensor:
    return 0.5 * (batch @ w - 1).square()


def _gradient(w: Tensor, batch: Tensor, loss: str) -> Tensor:
    w = w.clone().requires_grad_()
    losses = _losses(w, batch)
    (gradient,) = torch.autograd.grad(losses.mean() if loss == "mean" else losses.sum(), w)
    return gradient


class Stream(IterableDataset[Tensor]):
    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


class Global(torch.utils.data.Dataset[Tensor]):
    """Samples, of which a batch sampler makes the batches."""

    batch_size = 5  # the largest

    def __init__(self, batches: list[Tensor]) -> None:
        self.rows = torch.cat(batches)
        ends = torch.tensor([len(batch) for batch in batches]).cumsum(0).tolist()
        self.batches = [list(range(end - len(batch), end)) for end, batch in zip(ends, batches, strict=True)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Drawn(LightningModule):
    """Trains a config, and keeps the reduced gradients."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(_start())
        self.config, self.automatic_optimization = config, not config.manual
        self.gradients: list[list[float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        config, rank = self.config, dist.get_rank()
        losses = _losses(self.w, batch)
        loss = losses.mean() if config.loss == "mean" else losses.sum()
        weight = config.weight_of(batch, rank, batch_idx)
        if config.fault is not None and (rank, batch_idx) == config.fault_at:
            if config.fault == "none":
                return None
            nothing = (loss - loss.detach()).abs().sqrt()
            loss = loss * math.nan if config.fault == "nan" else loss + nothing
        if not self.automatic_optimization:
            self.manual_backward(loss, weight=weight)
            self.keep()
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
            return None
        if config.named and weight is not None:
            return {"loss": {"a": loss}, "weight": {"a": weight}}
        return loss if weight is None else {"loss": loss, "weight": weight}

    def keep(self) -> None:
        self.gradients.append([] if self.w.grad is None else self.w.grad.tolist())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.automatic_optimization:
            self.keep()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


def outcomes(seeds: range) -> list[Outcome]:
    """Body: train the configs of some seeds, one after another."""
    return [_outcome(Config(seed)) for seed in seeds]


def _outcome(config: Config) -> Outcome:
    model, error = Drawn(config), None
    batches = config.batches[dist.get_rank()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = make_trainer(
                GradAvgStrategy(**config.strategy),
                nodes=config.nodes,
                max_epochs=1,
                use_distributed_sampler=False,
                accumulate_grad_batches=config.window,
            )
            if config.split:
                data = Global(batches)
                loader: Any = DataLoader(data, batch_sampler=data.batches)
            else:
                loader = DataLoader(Stream(batches) if config.stream else batches, batch_size=None)  # type: ignore[arg-type]  # a list is a dataset
            trainer.fit(model, loader)
    except Exception as raised:  # noqa: BLE001  # whatever it is, the test looks at it
        error = f"{type(raised).__name__}: {raised}"
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (config.seed, error is None))
    if len(set(ranks)) > 1:
        raise AssertionError(f"the ranks part: {ranks}, here {error}; {config}")
    return Outcome(model.gradients, error)


def judged(seed: int, ranks: list[Outcome]) -> str | None:
    """Return what is wrong with the outcomes of a config on all ranks, or None."""
    config, first = Config(seed), ranks[0]
    if first.error is not None:
        late = config.fault is not None or config.counts[0] != config.counts[1]
        problems = {
            f"raised without reason: {first.error}": not config.refusals(),
            f"raised after a step: {first.error}": bool(first.gradients) and not late,
        }
    else:
        expected = config.expected()
        problems = {
            f"the ranks differ: {ranks}": any(repr(one.gradients) != repr(first.gradients) for one in ranks),
            f"gradients {first.gradients} instead of {expected}": not _alike(expected, first.gradients),
        }
    return next((problem for problem, holds in problems.items() if holds), None)


def _alike(expected: list[list[float]], found: list[list[float]]) -> bool:
    """Return whether gradients are those expected, up to the first step that is no number."""
    for want, got in zip(expected, found, strict=False):
        one, other = (torch.tensor(numbers, dtype=torch.float64) for numbers in (want, got))
        if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-9, atol=1e-12, equal_nan=True):
            return False
        if one.isnan().any():
            return True
    return len(expected) == len(found)
