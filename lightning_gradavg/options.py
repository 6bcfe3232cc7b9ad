"""What the options of the strategy come to: the preset, the rule, and what is handed on to DDP."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg.rules import Rule, resolve_rule, rule_of_split_batches

__all__ = ["PRESETS", "Options", "Preset", "StrategyFacts", "check_reproducible", "options_of_ddp"]


@dataclass(frozen=True)
class Preset:
    """The run that is to be reproduced.

    Attributes:
        name: The value of `equivalent_to`.
        reductions: The values of `reduction` that say how the replicas' losses make up that of the whole batch.
        synchronizes_statistics: Whether batch norm normalizes over the whole batch, and not over a replica's chunk.
        refused: Options that the run leaves no choice of, each with the reason: they may be None or True.
    """

    name: str
    reductions: tuple[str, ...]
    synchronizes_statistics: bool

    refused: Mapping[str, str]

    def refuse_contradictions(self, reduction: object, rule: Rule, given: Mapping[str, Any]) -> None:
        """Raise a ValueError that names both, where an option was given that another run would need."""
        if reduction not in self.reductions:
            named = repr(reduction) if isinstance(reduction, str) else rule.name
            raise ValueError(
                f"reduction={named} contradicts equivalent_to={self.name!r}, whose gradient is that of the loss over"
                f" the whole batch. Use one of {', '.join(map(repr, self.reductions))}, or leave equivalent_to out."
            )
        for name, why in self.refused.items():
            if given.get(name) not in (None, True):
                raise ValueError(f"{name}={given[name]} contradicts equivalent_to={self.name!r}, {why}")


_NEVER_FALSE = {
    "split_batches": "whose global batch is the loader's batch. Leave one of them out.",
    "exact_evaluation": "which evaluates each sample once. Leave one of them out.",
    "broadcast_buffers": "whose ranks all hold the buffers of one run. Leave one of them out.",
    "forward_sync_buffers": "whose ranks all hold the buffers of one run. Leave one of them out.",
}
_ONE_REPLICA = {
    "num_replicas": (
        "which has one replica whatever the number of ranks. Leave it out, or use equivalent_to='data_parallel'."
    )
}
_WHOLE_REPLICAS = {
    "max_device_batch_size": (
        "whose replicas are computed whole. Raise num_replicas, or use torch.utils.checkpoint in the model."
    )
}
_WHOLE_BATCH = ("mean", "weighted_mean", "sum", "normalized_sum")

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            Preset("data_parallel", _WHOLE_BATCH, False, _NEVER_FALSE | _WHOLE_REPLICAS),
            Preset("single_device", _WHOLE_BATCH, True, _NEVER_FALSE | _ONE_REPLICA),
        )
    }
)


@dataclass(frozen=True)
class Options:
    """How batches are split and evaluated, and losses reduced: what the constructor's options come to.

    Attributes:
        rule: The reduction rule.
        preset: The run to be reproduced, or None.
        split_batches: Whether the loader's batches are the global batches.
        num_replicas: Chunks that each loader batch has, or None for the world size.
        max_device_batch_size: Most samples that a rank computes at once, or None.
        reproducible: Whether the number of ranks must not show in the bits.
        exact_evaluation: Whether evaluation sees each sample exactly once.
    """

    rule: Rule
    preset: Preset | None
    split_batches: bool
    num_replicas: int | None
    max_device_batch_size: int | None
    reproducible: bool
    exact_evaluation: bool

    @classmethod
    def of(cls, *, reduction: object, equivalent_to: str | None, reproducible: bool = False, **given: Any) -> Options:
        """Return what the options come to. Takes those of the constructor that `Options` and presets are about.

        Raises:
            ValueError: If `equivalent_to` or `reduction` is no known name, a number is below 1, or two options
                contradict each other.
            TypeError: If `reduction` is neither a name nor a function.
        """
        equivalent_to = _OF_BITS if reproducible and equivalent_to is None else equivalent_to
        if equivalent_to is not None and equivalent_to not in PRESETS:
            raise ValueError(
                f"equivalent_to={equivalent_to!r} names no run. Use one of {', '.join(map(repr, PRESETS))}, or None."
            )
        preset = PRESETS[equivalent_to] if equivalent_to is not None else None
        for name in ("num_replicas", "max_device_batch_size"):
            if given[name] is not None and given[name] < 1:
                unlimited = "the world size" if name == "num_replicas" else "no limit"
                raise ValueError(f"{name} must be 1 or more, or None for {unlimited}, got {given[name]}")
        rule = resolve_rule(reduction)  # type: ignore[arg-type]  # it checks the type
        if preset is not None:
            preset.refuse_contradictions(reduction, rule, given)
        split = preset is not None or bool(given["split_batches"])
        _refuse_uncut(split, given)
        return cls(
            rule_of_split_batches(rule) if split else rule,
            preset,
            split,
            given["num_replicas"],
            given["max_device_batch_size"],
            reproducible,
            preset is not None or bool(given["exact_evaluation"]),
        )

    @property
    def one_device(self) -> bool:
        """Whether the run to be reproduced is that of a single device."""
        return self.preset is not None and self.preset.synchronizes_statistics

    def in_pieces(self, world_size: int) -> bool:
        """Return whether a rank may compute its samples in several pieces, one after another."""
        return self.max_device_batch_size is not None or (self.num_replicas or 0) > world_size

    @property
    def replicated(self) -> bool:
        """Whether a training step is run once per replica, each with its own buffers and random numbers."""
        return self.preset is not None or self.num_replicas is not None


@dataclass(frozen=True)
class StrategyFacts:
    """What decides the mathematics of a run, as `GradAvgStrategy.facts()` tells it; by default of stock DDP.

    Attributes:
        rule: The reduction rule.
        splits_batches: Whether the loader's batches are the global batches, of which each rank takes its chunk.
        accumulation: Loader batches per optimizer step.
        micro_batches: Micro-batches that a rank takes of each loader batch.
        replicas: Chunks of each loader batch with batch statistics of their own; None where the whole batch has one, or
            a rank's batch is its own.
        replicated: Whether a training step is run once per replica, and gradients of one rank's loss reach another.
        equivalent_to: The run that is to be reproduced, by its name, or None.
        scales_rates: Whether the learning rate follows the global batch.
        samples: Samples of the micro-batch in training that count, where the strategy knows: 0 for one that only keeps
            the rank busy; None where it does not.
    """

    rule: Rule
    splits_batches: bool = False
    accumulation: int = 1
    micro_batches: int = 1
    replicas: int | None = None
    replicated: bool = False
    equivalent_to: str | None = None
    scales_rates: bool = False
    samples: float | None = None


def _refuse_uncut(split: bool, given: Mapping[str, Any]) -> None:
    """Raise where an option cuts chunks that are not there, or cuts them twice."""
    replicas, most = given["num_replicas"], given["max_device_batch_size"]
    for name, value in (("max_device_batch_size", most), ("num_replicas", replicas)):
        if value is not None and not split:
            raise ValueError(
                f"{name}={value} cuts the chunks of split_batches=True, not set here."
                " Set it, or choose the loader's batch_size and accumulate_grad_batches yourself."
            )
    if replicas is not None and most is not None:
        raise ValueError(
            f"max_device_batch_size={most} cuts the replicas of num_replicas={replicas}, each of which is one forward."
            " Raise num_replicas, or use torch.utils.checkpoint in the model."
        )


def options_of_ddp(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of DDP that are not left at their defaults.

    Args:
        given: Values by name.

    Raises:
        ValueError: If a bucket size is not above 0, or gradients are to be reduced over some of the ranks only.
    """
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    options = {name: value for name, value in given.items() if name in known and value != known[name].default}
    for name in ("bucket_cap_mb", "bucket_cap_mb_list"):
        value = options.get(name)
        if value is not None and min(value if isinstance(value, list) else [value], default=0) <= 0:
            raise ValueError(f"{name}={value!r} is the size of buckets in MiB: give more than 0, or None for DDP's own")
    for name in ("process_group", "device_mesh"):
        if name in options:
            raise ValueError(
                f"{name}={options[name]!r} reduces gradients over some of the run's ranks, and the rule counts them"
                " all. Use lightning.pytorch.strategies.DDPStrategy, or average_gradients(group=...) in your own loop."
            )
    return options


_OF_BITS = "data_parallel"
_IRREPRODUCIBLE = {
    "ddp_comm_hook": "sums in an order of its own",
    "ddp_comm_wrapper": "sums in an order of its own",
    "static_graph": "expects one backward in each step, and a rank runs one for each of its replicas",
}


def check_reproducible(given: Mapping[str, Any]) -> None:
    """Raise a ValueError if the number of ranks must not show in the bits, and an option has it show.

    Such a run is that of `equivalent_to="data_parallel"`, whose step is made of the same replicas on any ranks.
    """
    if not given["reproducible"]:
        return
    if given["equivalent_to"] not in (None, _OF_BITS):
        raise ValueError(
            f"equivalent_to={given['equivalent_to']!r} contradicts reproducible=True, whose steps are made of the same"
            f" replicas on any number of ranks. Use equivalent_to={_OF_BITS!r}, or leave one of them out."
        )
    if given["num_replicas"] is None:
        raise ValueError(
            "reproducible=True needs num_replicas, the chunks that each loader batch is computed in on any number of"
            " ranks, got None. Give a number that every number of ranks to be used divides, such as num_replicas=8."
        )
    for name, why in _IRREPRODUCIBLE.items():
        if given.get(name) not in (None, False):
            raise ValueError(f"{name}={given[name]!r} contradicts reproducible=True: it {why}. Leave one of them out.")
