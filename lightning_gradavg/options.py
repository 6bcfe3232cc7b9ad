"""What the options of the strategy come to: the preset, the rule, and what is handed on to DDP."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg.rules import Rule, resolve_rule, rule_of_replica_losses, rule_of_split_batches

__all__ = ["PRESETS", "Options", "Preset", "StrategyFacts", "check_groups", "check_reproducible", "options_of_ddp"]

_OF_REPLICAS = "mean_of_replica_losses"


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
            if given[name] is not None and given[name] is not True:
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
        "whose replicas are computed whole. Raise num_replicas, or keep one replica at a time by"
        " recompute_replicas=True."
    )
}
_WHOLE_BATCH = ("mean", "weighted_mean", "sum", "normalized_sum")

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            Preset("data_parallel", (*_WHOLE_BATCH, _OF_REPLICAS), False, _NEVER_FALSE | _WHOLE_REPLICAS),
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
        recompute_replicas: Whether each replica is computed again in the backward instead of being kept.
        reproducible: Whether the number of ranks must not show in the bits.
        exact_evaluation: Whether evaluation sees each sample exactly once.
    """

    rule: Rule
    preset: Preset | None
    split_batches: bool
    num_replicas: int | None
    max_device_batch_size: int | None
    recompute_replicas: bool
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
        rule = rule_of_replica_losses() if reduction == _OF_REPLICAS else resolve_rule(reduction)  # type: ignore[arg-type]  # it checks the type
        if preset is not None:
            preset.refuse_contradictions(reduction, rule, given)
        elif reduction == _OF_REPLICAS:
            raise ValueError(
                f"reduction={_OF_REPLICAS!r} is the mean over the replicas of DataParallel: use it with"
                " equivalent_to='data_parallel'. The mean over the ranks is 'mean'."
            )
        split = preset is not None or bool(given["split_batches"])
        _refuse_uncut(split, given)
        return cls(
            rule_of_split_batches(rule) if split else rule,
            preset,
            split,
            given["num_replicas"],
            given["max_device_batch_size"],
            given["recompute_replicas"],
            reproducible,
            preset is not None or bool(given["exact_evaluation"]),
        )

    @property
    def one_device(self) -> bool:
        """Whether the run to be reproduced is that of a single device."""
        return self.preset is not None and self.preset.synchronizes_statistics

    @property
    def counts_replicas(self) -> bool:
        """Whether every replica has the same say, however many samples it has."""
        return self.rule == rule_of_replica_losses()

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
        counts_replicas: Whether every replica has the same say, however many samples it has.
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
    counts_replicas: bool = False
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
            " Raise num_replicas, or keep one replica at a time by recompute_replicas=True."
        )
    if given["recompute_replicas"] and replicas is None:
        raise ValueError(
            "recompute_replicas=True saves memory where a rank computes several replicas: set num_replicas, to more"
            " than the number of ranks. For one replica per rank use torch.utils.checkpoint in the model."
        )


_REDUCED_BY_DDP_ITSELF = ("delay_all_reduce_named_params", "param_to_hook_all_reduce", "mixed_precision")


def options_of_ddp(given: Mapping[str, Any], constructor: Callable[..., None], hooked: str | None) -> dict[str, Any]:
    """Return the options of DDP that are not left at their defaults, so that an older torch need not know the others.

    Args:
        given: Values by name.
        constructor: The constructor of the strategy; its parameters after `start_method` are those of DDP.
        hooked: The option that needs DDP's communication hook, such as `reduction='sum'`, or None.

    Raises:
        TypeError: If the installed torch does not know an option.
        ValueError: If an option has DDP reduce gradients outside the communication hook that is needed.
    """
    parameters = list(inspect.signature(constructor).parameters.values())
    names = [parameter.name for parameter in parameters]
    of_ddp = parameters[names.index("start_method") + 1 :]
    options = {one.name: given[one.name] for one in of_ddp if given[one.name] != one.default}
    for name in ("bucket_cap_mb", "bucket_cap_mb_list"):
        value = given[name]
        if value is not None and min(value if isinstance(value, list) else [value], default=0) <= 0:
            raise ValueError(f"{name}={value!r} is the size of buckets in MiB: give more than 0, or None for DDP's own")
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    for name, value in options.items():
        if name not in known:
            raise TypeError(
                f"{name}={value!r} is not an option of DistributedDataParallel in torch {torch.__version__}."
            )
        if name in _REDUCED_BY_DDP_ITSELF and hooked is not None:
            raise ValueError(
                f"{name} has DDP reduce gradients outside the communication hook, which {hooked} needs."
                " Leave it out, or use reduction='mean' without options of the wire."
            )
    return options


_OF_BITS = "data_parallel"
_IRREPRODUCIBLE = {
    "wire_dtype": "rounds what is sent, which follows the number of ranks",
    "node_aware": "sums node by node, in an order that follows the nodes",
    "ddp_comm_hook": "sums in an order of its own",
    "ddp_comm_wrapper": "sums in an order of its own",
    "process_group": "reduces over some of the ranks, and replicas are those of all",
    "device_mesh": "reduces over some of the ranks, and replicas are those of all",
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
        if given[name] not in (None, False):
            raise ValueError(f"{name}={given[name]!r} contradicts reproducible=True: it {why}. Leave one of them out.")


def check_groups(options: Options, given: Mapping[str, Any]) -> None:
    """Raise a ValueError unless it is clear over which ranks gradients are reduced, and nothing else counts them.

    Some of the run's ranks reduce gradients as in stock DDP, beside model parallelism; data, logs, metrics and the
    learning rate are those of all ranks, as there.
    """
    group, mesh = given["process_group"], given["device_mesh"]
    name = "process_group" if mesh is None else "device_mesh"
    if group is None and mesh is None:
        return
    if group is not None and mesh is not None:
        raise ValueError(
            "process_group and device_mesh both say over which ranks gradients are reduced. Leave one of them out."
        )
    counting = {
        "equivalent_to": options.preset is not None,
        "split_batches": options.split_batches,
        "exact_evaluation": options.exact_evaluation,
        "lr_scaling": given["lr_scaling"] != "none",
        "nonfinite": given["nonfinite"] != "propagate",
    }
    counts = next((option for option, counted in counting.items() if counted), None)
    if counts is not None:
        raise ValueError(
            f"{name} has gradients reduced over some of the run's ranks, and {counts}={given[counts]!r} counts them"
            f" all, which are not all data-parallel to each other. Leave one of them out: {name} is served as in stock"
            " DDP, for the reduction alone."
        )
    if mesh is not None and mesh.ndim != 1:
        names = mesh.mesh_dim_names
        dimensions = f"the dimensions {', '.join(map(repr, names))}" if names else f"{mesh.ndim} dimensions"
        raise ValueError(
            f"device_mesh has {dimensions}, and gradients are reduced over one. Pass that one, as in"
            f" device_mesh=mesh[{names[0] if names else 'dp'!r}]."
        )
