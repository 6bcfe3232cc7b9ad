"""What verify asks of the rest of the package, each question behind one function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_gradavg._lightning.loaders import user_loader
from lightning_gradavg._lightning.options import StrategyFacts
from lightning_gradavg._support.tree import batch_samples
from lightning_gradavg.batches.chunks import PartCollator
from lightning_gradavg.reduction.global_mean import SCOPE
from lightning_gradavg.rules import RULES
from lightning_gradavg.verify.records import Refused, RunFacts

__all__ = [
    "CollatedPart",
    "counts_samples",
    "facts_of",
    "loader_of_user",
    "part_of_rank",
    "samples_of_piece",
    "uses_global_mean",
]


def _strategy_facts(trainer: Trainer) -> StrategyFacts:
    """Return what a strategy of this package says of the run; of any other what holds of stock DDP."""
    strategy: Any = trainer.strategy
    if not hasattr(strategy, "facts"):
        return StrategyFacts(RULES["mean"])
    facts: StrategyFacts = strategy.facts()
    return facts


def facts_of(trainer: Trainer) -> RunFacts:
    """Return how a run is set up, or raise `Refused` if one process cannot be set up so."""
    name = type(trainer.strategy).__name__
    facts = _strategy_facts(trainer)
    if facts.replicas is not None and not trainer.lightning_module.automatic_optimization:
        raise Refused(
            f"{name} trains replicas in manual optimization: verify the run without num_replicas= and"
            " equivalent_to='data_parallel'"
        )
    if facts.scales_rates:
        raise Refused("lr_scaling= changes the learning rate with the number of ranks: verify the run without")
    return RunFacts(
        strategy=name,
        is_gradavg=hasattr(trainer.strategy, "facts"),
        rule=replace(facts.rule, share=RULES["mean"].share),  # a user's function may have no pickle
        splits_batches=facts.splits_batches,
        replicated=facts.replicated,
        replicas=facts.replicas,
        sharded=isinstance(trainer.strategy, ModelParallelStrategy),
        accumulation=trainer.accumulate_grad_batches,
        automatic=trainer.lightning_module.automatic_optimization,
        epoch_batches=float(trainer.num_training_batches),
    )


def counts_samples(trainer: Trainer) -> bool:
    """Return whether the samples of the running batch count: not if the strategy only keeps the rank busy."""
    return _strategy_facts(trainer).samples != 0


def loader_of_user(trainer: Trainer) -> Any:
    """Return the user's own training loader, before a strategy cut or replaced it."""
    return user_loader(trainer.train_dataloader)


class CollatedPart(NamedTuple):
    """Which of the samples that a `collate_fn` is given this rank trains on."""

    samples: slice
    batch: Callable[[Any], object]  # gets what `collate_fn` returned, and returns what arrives at training


def part_of_rank(collate: object, samples: Sequence[object]) -> CollatedPart:
    """Return what a rank trains on of the samples that a loader collates at once."""
    if isinstance(collate, PartCollator):
        chunk = collate.split.cut(len(samples))
        return CollatedPart(slice(chunk.start, chunk.stop), lambda collated: collated.part)
    return CollatedPart(slice(None), lambda collated: collated)


def samples_of_piece(piece: object, most: int) -> int:
    """Return the number of samples of what `training_step` is given; `most`, those of the batch, if it is not known."""
    try:
        return min(batch_samples(piece), most)
    except ValueError:  # such as a graph, which is no piece
        return most


def uses_global_mean(scopes: set[str]) -> bool:
    """Return whether a run called `global_mean`, which enters a profiler scope."""
    return SCOPE in scopes
