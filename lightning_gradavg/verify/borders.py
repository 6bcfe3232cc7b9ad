"""What verify asks of the rest of the package, each question behind one function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_gradavg._lightning.loaders import user_loader
from lightning_gradavg._lightning.options import StrategyFacts, in_code
from lightning_gradavg.batches.chunks import Pieces
from lightning_gradavg.batches.cut import CutDataset, StreamCollator
from lightning_gradavg.rules import RULES
from lightning_gradavg.verify.records import Refused, RunFacts

__all__ = [
    "counts_samples",
    "facts_of",
    "loader_of_user",
    "pieces_of",
    "sources_of",
]


def _strategy_facts(strategy: Any) -> StrategyFacts:
    """Return what a strategy of this package says of the run; of any other what holds of stock DDP."""
    if not hasattr(strategy, "facts"):
        # Of DDP's options the one without which a run fails.
        needed = {"find_unused_parameters": True} if getattr(strategy.model, "find_unused_parameters", False) else {}
        return StrategyFacts(RULES["mean"], given=needed)
    facts: StrategyFacts = strategy.facts()
    return facts


def facts_of(trainer: Trainer) -> RunFacts:
    """Return how a run is set up, or raise `Refused` if one process cannot be set up so."""
    strategy = trainer.strategy
    name = type(strategy).__name__
    facts = _strategy_facts(strategy)
    if isinstance(strategy, ModelParallelStrategy) and strategy.device_mesh["tensor_parallel"].size() > 1:
        raise Refused(
            f"{name} has tensor parallelism, by which several ranks compute one loss: verify the run with"
            " tensor_parallel_size=1, and with data_parallel_size= as many as --devices"
        )
    if facts.replicas is not None and not trainer.lightning_module.automatic_optimization:
        raise Refused(
            f"{name} trains replicas in manual optimization: verify the run without num_replicas= and"
            " equivalent_to='data_parallel'"
        )
    if facts.scales_rates:
        raise Refused("lr_scaling= changes the learning rate with the number of ranks: verify the run without")
    return RunFacts(
        strategy=name,
        rule=facts.rule,
        splits_batches=facts.splits_batches,
        replicated=facts.replicated,
        replicas=facts.replicas,
        sharded=isinstance(strategy, ModelParallelStrategy),
        accumulation=trainer.accumulate_grad_batches,
        automatic=trainer.lightning_module.automatic_optimization,
        epoch_batches=float(trainer.num_training_batches),
        given=in_code(facts.given),
    )


def counts_samples(trainer: Trainer) -> bool:
    """Return whether the samples of the running batch count: not if the strategy only keeps the rank busy."""
    return _strategy_facts(trainer.strategy).samples != 0


def loader_of_user(trainer: Trainer) -> Any:
    """Return the user's own training loader, before a strategy cut or replaced it."""
    return user_loader(trainer.train_dataloader)


class FetchingParts(NamedTuple):
    """Which objects hold the user's data set and `collate_fn` in a pass of a loader."""

    of_dataset: Any  # has it as `dataset`
    of_collate: Any  # has it under `collate_name`
    collate_name: str


def sources_of(fetcher: Any) -> FetchingParts:
    """Return where torch's fetcher, or what a strategy has put into it, finds the user's data set and `collate_fn`."""
    if isinstance(fetcher.dataset, CutDataset):
        return FetchingParts(fetcher.dataset, fetcher.dataset, "collate")
    if isinstance(fetcher.collate_fn, StreamCollator):
        return FetchingParts(fetcher, fetcher.collate_fn, "collate")
    return FetchingParts(fetcher, fetcher, "collate_fn")


def pieces_of(batch: object) -> Sequence[object]:
    """Return the batches that `training_step` gets one after the other, of what a loader yielded."""
    if isinstance(batch, Pieces):
        return batch
    return [batch]
