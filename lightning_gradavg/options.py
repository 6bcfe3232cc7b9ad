"""What the options of the strategy come to: the preset, the rule, and the options of DDP."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg.arguments import did_you_mean
from lightning_gradavg.rules import Rule, resolve_rule, rule_of_split_batches

__all__ = ["PRESETS", "Options", "Preset", "StrategyFacts", "options_of_ddp"]


@dataclass(frozen=True)
class Preset:
    """The run to reproduce.

    Attributes:
        name: The value of `equivalent_to`.
        synchronizes_statistics: Whether batch norm normalizes over the whole batch, not over a replica's chunk.
        refused: Options that may only be None or True, each with the reason.
    """

    name: str
    synchronizes_statistics: bool
    refused: Mapping[str, str]


_BUFFERS = "whose ranks all hold the buffers of one run. Leave one of them out."
_NEVER_FALSE = {
    "split_batches": "whose global batch is the loader's batch. Leave one of them out.",
    "exact_evaluation": "which evaluates each sample once. Leave one of them out.",
    "broadcast_buffers": _BUFFERS,
    "forward_sync_buffers": _BUFFERS,
}
_ONE_REPLICA = "which has one replica on any number of ranks. Leave it out, or use equivalent_to='data_parallel'."
_WHOLE_REPLICAS = "which computes each replica whole. Raise num_replicas, or use torch.utils.checkpoint in the model."
_WHOLE_BATCH = ("mean", "weighted_mean", "sum", "normalized_sum")
_DATA_PARALLEL = "data_parallel"

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        _DATA_PARALLEL: Preset(_DATA_PARALLEL, False, {**_NEVER_FALSE, "max_device_batch_size": _WHOLE_REPLICAS}),
        "single_device": Preset("single_device", True, {**_NEVER_FALSE, "num_replicas": _ONE_REPLICA}),
    }
)


class _Given(dict[str, Any]):
    """Options by name; None for one that was not given."""

    __getattr__ = dict.get


def _splits(o: Any) -> bool:
    return bool(o.split_batches or o.equivalent_to or o.reproducible)


_NOT_SPLIT = (
    "cuts the chunks of split_batches=True, not set here. Set it, or choose the loader's batch_size and"
    " accumulate_grad_batches yourself."
)
_SOME_RANKS = (
    "reduces gradients over some of the run's ranks, and the rule counts them all. Use"
    " lightning.pytorch.strategies.DDPStrategy, or average_gradients(group=...) in your own loop."
)
_BUCKETS = "is the size of buckets in MiB: give more than 0, or None for DDP's own"
_OWN_ORDER = "contradicts reproducible=True: it sums in an order of its own. Leave one of them out."

_REFUSED: Sequence[tuple[Callable[[Any], object], str]] = (
    (
        lambda o: o.equivalent_to is not None and o.equivalent_to not in PRESETS,
        (
            f"equivalent_to={{o.equivalent_to!r}} names no run.{{hint}} Use one of {', '.join(map(repr, PRESETS))}, or"
            " None."
        ),
    ),
    (
        lambda o: o.num_replicas is not None and o.num_replicas < 1,
        "num_replicas must be 1 or more, or None for the world size, got {o.num_replicas}",
    ),
    (
        lambda o: o.max_device_batch_size is not None and o.max_device_batch_size < 1,
        "max_device_batch_size must be 1 or more, or None for no limit, got {o.max_device_batch_size}",
    ),
    (
        lambda o: o.model_averaging_period is not None,
        (
            "model_averaging_period={o.model_averaging_period} averages weights instead of reducing gradients. Leave it"
            " out, or use lightning.pytorch.strategies.DDPStrategy."
        ),
    ),
    (lambda o: o.bucket_cap_mb is not None and o.bucket_cap_mb <= 0, f"bucket_cap_mb={{o.bucket_cap_mb!r}} {_BUCKETS}"),
    (
        lambda o: min(o.bucket_cap_mb_list or [1]) <= 0,
        f"bucket_cap_mb_list={{o.bucket_cap_mb_list!r}} {_BUCKETS}",
    ),
    (lambda o: o.process_group is not None, f"process_group={{o.process_group!r}} {_SOME_RANKS}"),
    (lambda o: o.device_mesh is not None, f"device_mesh={{o.device_mesh!r}} {_SOME_RANKS}"),
    (
        lambda o: o.reproducible and o.equivalent_to not in (None, _DATA_PARALLEL),
        (
            "equivalent_to={o.equivalent_to!r} contradicts reproducible=True, whose steps have the same replicas on any"
            f" number of ranks. Use equivalent_to={_DATA_PARALLEL!r}, or leave one of them out."
        ),
    ),
    (
        lambda o: o.reproducible and o.num_replicas is None,
        (
            "reproducible=True needs num_replicas, the chunks of each loader batch on any number of ranks, got None."
            " Give a number that every number of ranks to be used divides, such as num_replicas=8."
        ),
    ),
    (lambda o: o.reproducible and o.ddp_comm_hook, f"ddp_comm_hook={{o.ddp_comm_hook!r}} {_OWN_ORDER}"),
    (lambda o: o.reproducible and o.ddp_comm_wrapper, f"ddp_comm_wrapper={{o.ddp_comm_wrapper!r}} {_OWN_ORDER}"),
    (
        lambda o: o.reproducible and o.static_graph,
        (
            "static_graph=True contradicts reproducible=True: it expects one backward in each step, and a rank runs one"
            " for each of its replicas. Leave one of them out."
        ),
    ),
    (
        lambda o: o.reproducible and o.nonfinite != "propagate",
        "nonfinite={o.nonfinite!r} reduces what reproducible=True adds up in one order: leave one of them out.",
    ),
    (
        lambda o: o.max_device_batch_size is not None and not _splits(o),
        f"max_device_batch_size={{o.max_device_batch_size}} {_NOT_SPLIT}",
    ),
    (lambda o: o.num_replicas is not None and not _splits(o), f"num_replicas={{o.num_replicas}} {_NOT_SPLIT}"),
    (
        lambda o: None not in (o.num_replicas, o.max_device_batch_size) and not o.equivalent_to,
        (
            "max_device_batch_size={o.max_device_batch_size} cuts the replicas of num_replicas={o.num_replicas}, each"
            " of which is one forward. Raise num_replicas, or use torch.utils.checkpoint in the model."
        ),
    ),
)
"""Options of the strategy that are refused: a predicate and the message, in which `o` has the options."""


def _refuse_contradictions(preset: Preset, rule: Rule, given: Mapping[str, Any]) -> None:
    """Raise a ValueError that names both, if an option needs another run than that of the preset."""
    named = f"equivalent_to={preset.name!r}"
    if rule.name not in _WHOLE_BATCH:
        shown = repr(rule.name) if isinstance(given["reduction"], str) else rule.name
        raise ValueError(
            f"reduction={shown} contradicts {named}, whose gradient is that of the loss over the whole batch. Use one"
            f" of {', '.join(map(repr, _WHOLE_BATCH))}, or leave equivalent_to out."
        )
    for name, why in preset.refused.items():
        if given.get(name) not in (None, True):
            raise ValueError(f"{name}={given[name]} contradicts {named}, {why}")


@dataclass(frozen=True)
class Options:
    """How batches are split and evaluated, and losses reduced: what the constructor's options come to.

    Attributes:
        rule: The reduction rule.
        preset: The run to reproduce, if any.
        split_batches: Whether the loader's batches are the global batches.
        num_replicas: Chunks of each loader batch; None for the world size.
        max_device_batch_size: Most samples that a rank computes at once, if limited.
        reproducible: Whether the bits do not depend on the number of ranks.
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
    def of(cls, options: Mapping[str, Any]) -> Options:
        """Return what the constructor's options come to.

        Raises:
            ValueError: If a name is unknown, a number is too small, or two options contradict each other.
            TypeError: If `reduction` is neither a name nor a function.
        """
        given = _Given(options)
        for holds, message in _REFUSED:
            if holds(given):
                raise ValueError(message.format(o=given, hint=did_you_mean(given["equivalent_to"], PRESETS)))
        rule = resolve_rule(given["reduction"])
        name = given["equivalent_to"] or (_DATA_PARALLEL if given["reproducible"] else None)
        preset = PRESETS[name] if name is not None else None
        if preset is not None:
            _refuse_contradictions(preset, rule, given)
        split = _splits(given)
        return cls(
            rule_of_split_batches(rule) if split else rule,
            preset,
            split,
            given["num_replicas"],
            given["max_device_batch_size"],
            bool(given["reproducible"]),
            preset is not None or bool(given["exact_evaluation"]),
        )

    @property
    def one_device(self) -> bool:
        """Whether the run to reproduce is that of a single device."""
        return self.preset is not None and self.preset.synchronizes_statistics

    def in_pieces(self, world_size: int) -> bool:
        """Return whether a rank may compute its samples in several pieces, one after another."""
        return self.max_device_batch_size is not None or (self.num_replicas or 0) > world_size

    @property
    def replicated(self) -> bool:
        """Whether a training step runs once per replica, each with its own buffers and random numbers."""
        return self.preset is not None or self.num_replicas is not None


@dataclass(frozen=True)
class StrategyFacts:
    """What decides the mathematics of a run, as `GradAvgStrategy.facts()` tells it; by default of stock DDP.

    Attributes:
        rule: The reduction rule.
        splits_batches: Whether each rank takes its chunk of the loader's batches.
        accumulation: Loader batches per optimizer step.
        micro_batches: Micro-batches that a rank takes of each loader batch.
        replicas: Chunks of each loader batch with their own batch statistics, if they are not those of the ranks.
        replicated: Whether a training step runs once per replica, and gradients of one rank's loss reach another.
        equivalent_to: The name of the run to reproduce, if any.
        scales_rates: Whether the learning rate follows the global batch.
        samples: Samples of the current micro-batch that count, if the strategy knows; 0 for a stand-in.
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


def options_of_ddp(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that DDP has and that differ from its defaults: command lines hand on every default."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {name: value for name, value in given.items() if name in known and value != known[name].default}
