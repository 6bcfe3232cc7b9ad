"""Presets: which run a run must reproduce, and the options that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lightning_gradavg.rules import RULES, Rule, resolve_rule, rule_of_replica_losses, rule_of_split_batches

__all__ = ["PRESETS", "Plan", "Preset", "StrategyFacts", "plan_of"]


@dataclass(frozen=True)
class Preset:
    """The run that is to be reproduced.

    Attributes:
        name: The value of `equivalent_to`.
        reductions: The values of `reduction` that say how the replicas' losses make up that of the whole batch.
        synchronizes_statistics: Whether batch norm normalizes over the whole batch, and not over a replica's chunk.
    """

    name: str
    reductions: tuple[str, ...]
    synchronizes_statistics: bool


_WHOLE_BATCH = ("mean", "weighted_mean", "sum", "normalized_sum")

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            Preset("data_parallel", (*_WHOLE_BATCH, "mean_of_replica_losses"), False),
            Preset("single_device", _WHOLE_BATCH, True),
        )
    }
)


@dataclass(frozen=True)
class Plan:
    """How batches are split and evaluated, and losses reduced: what the constructor's options come to.

    Attributes:
        rule: The reduction rule.
        preset: The run to be reproduced, or None.
        split_batches: Whether the loader's batches are the global batches.
        num_replicas: Chunks that each loader batch has, or None for the world size.
        max_device_batch_size: Most samples that a rank computes at once, or None.
        recompute_replicas: Whether each replica is computed again in the backward instead of being kept.
        exact_evaluation: Whether evaluation sees each sample exactly once.
    """

    rule: Rule
    preset: Preset | None
    split_batches: bool
    num_replicas: int | None
    max_device_batch_size: int | None
    recompute_replicas: bool
    exact_evaluation: bool

    @property
    def counts_replicas(self) -> bool:
        """Whether every replica has the same say, however many samples it has."""
        return self.rule is rule_of_replica_losses()

    @property
    def replicated(self) -> bool:
        """Whether a training step is run once per replica, each with its own buffers and random numbers."""
        return self.preset is not None or self.num_replicas is not None


@dataclass(frozen=True)
class StrategyFacts:
    """What decides the mathematics of a run, as `GradAvgStrategy.facts()` tells it.

    Attributes:
        rule: The reduction rule.
        splits_batches: Whether the loader's batches are the global batches, of which each rank takes its chunk.
        accumulation: Loader batches per optimizer step.
        micro_batches: Micro-batches that a rank takes of each loader batch.
        replicas: Chunks of each loader batch with batch statistics of their own; None where the whole batch has one, or
            a rank's batch is its own.
        replicated: Whether a training step is run once per replica, and gradients of one rank's loss reach another.
        counts_replicas: Whether every replica has the same say, however many samples it has.
        equivalent_to: The run that is to be reproduced, by its name, or None.
        scales_rates: Whether the learning rate follows the global batch.
        samples: Samples of the micro-batch in training that count, where the strategy knows: 0 for one that only keeps
            the rank busy; None where it does not.
    """

    rule: Rule
    splits_batches: bool
    accumulation: int
    micro_batches: int
    replicas: int | None
    replicated: bool
    counts_replicas: bool
    equivalent_to: str | None
    scales_rates: bool
    samples: float | None


def plan_of(
    *,
    reduction: object,
    equivalent_to: str | None,
    num_replicas: int | None,
    recompute_replicas: bool,
    split_batches: bool | None,
    max_device_batch_size: int | None,
    exact_evaluation: bool | None,
    broadcast_buffers: bool | None,
    forward_sync_buffers: bool | None,
) -> Plan:
    """Return what the options come to.

    Raises:
        ValueError: If `equivalent_to` or `reduction` is no known name, a number is below 1, or two options contradict
            each other.
        TypeError: If `reduction` is neither a name nor a function.
    """
    if equivalent_to is not None and equivalent_to not in PRESETS:
        raise ValueError(
            f"equivalent_to={equivalent_to!r} names no run. Use one of {', '.join(map(repr, PRESETS))}, or None."
        )
    preset = PRESETS[equivalent_to] if equivalent_to is not None else None
    if num_replicas is not None and num_replicas < 1:
        raise ValueError(f"num_replicas must be 1 or more, or None for the world size, got {num_replicas}")
    if preset is not None:
        _refuse_contradictions(
            preset,
            reduction,
            num_replicas,
            split_batches,
            max_device_batch_size,
            exact_evaluation,
            broadcast_buffers,
            forward_sync_buffers,
        )
        split_batches = exact_evaluation = True
    split_batches, exact_evaluation = bool(split_batches), bool(exact_evaluation)
    for name, value in (("max_device_batch_size", max_device_batch_size), ("num_replicas", num_replicas)):
        if value is not None and not split_batches:
            raise ValueError(
                f"{name}={value} cuts the chunks of split_batches=True, not set here."
                " Set it, or choose the loader's batch_size and accumulate_grad_batches yourself."
            )
    if num_replicas is not None and max_device_batch_size is not None:
        raise ValueError(
            f"max_device_batch_size={max_device_batch_size} cuts the replicas of num_replicas={num_replicas}, each of"
            " which is one forward. Raise num_replicas, or keep one replica at a time by recompute_replicas=True."
        )
    if recompute_replicas and num_replicas is None:
        raise ValueError(
            "recompute_replicas=True saves memory where a rank computes several replicas: set num_replicas, to more"
            " than the number of ranks. For one replica per rank use torch.utils.checkpoint in the model."
        )
    return Plan(
        _rule(reduction, preset, split_batches=split_batches),
        preset,
        split_batches,
        num_replicas,
        max_device_batch_size,
        recompute_replicas,
        exact_evaluation,
    )


def _rule(reduction: object, preset: Preset | None, *, split_batches: bool) -> Rule:
    if reduction == "mean_of_replica_losses":
        if preset is None:
            raise ValueError(
                "reduction='mean_of_replica_losses' is the mean over the replicas of DataParallel: use it with"
                " equivalent_to='data_parallel'. The mean over the ranks is 'mean'."
            )
        return rule_of_replica_losses()
    rule = resolve_rule(reduction)  # type: ignore[arg-type]  # it checks the type
    return rule_of_split_batches(rule) if split_batches else rule


def _refuse_contradictions(
    preset: Preset,
    reduction: object,
    num_replicas: int | None,
    split_batches: bool | None,
    max_device_batch_size: int | None,
    exact_evaluation: bool | None,
    broadcast_buffers: bool | None,
    forward_sync_buffers: bool | None,
) -> None:
    if reduction not in preset.reductions:
        if isinstance(reduction, str) and reduction not in RULES and reduction != "mean_of_replica_losses":
            resolve_rule(reduction)
        given = repr(reduction) if isinstance(reduction, str) else getattr(reduction, "__qualname__", repr(reduction))
        raise ValueError(
            f"reduction={given} contradicts equivalent_to={preset.name!r}, whose gradient is that of the loss over the"
            f" whole batch. Use one of {', '.join(map(repr, preset.reductions))}, or leave equivalent_to out."
        )
    never = (
        ("split_batches", split_batches, "whose global batch is the loader's batch"),
        ("exact_evaluation", exact_evaluation, "which evaluates each sample once"),
        ("broadcast_buffers", broadcast_buffers, "whose ranks all hold the buffers of one run"),
        ("forward_sync_buffers", forward_sync_buffers, "whose ranks all hold the buffers of one run"),
    )
    for name, value, why in never:
        if value is False:
            raise ValueError(f"{name}=False contradicts equivalent_to={preset.name!r}, {why}. Leave one of them out.")
    if preset.synchronizes_statistics and num_replicas is not None:
        raise ValueError(
            f"num_replicas={num_replicas} contradicts equivalent_to={preset.name!r}, which has one replica whatever the"
            " number of ranks. Leave it out, or use equivalent_to='data_parallel'."
        )
    if not preset.synchronizes_statistics and max_device_batch_size is not None:
        raise ValueError(
            f"max_device_batch_size={max_device_batch_size} contradicts equivalent_to={preset.name!r}, whose replicas"
            " are computed whole. Raise num_replicas, or keep one replica at a time by recompute_replicas=True."
        )
