"""What the options of the strategy come to: the run to reproduce, the rule, and the options of DDP."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg.arguments import did_you_mean, refuse_unknown
from lightning_gradavg.rules import Rule, resolve_rule, rule_of_split_batches

__all__ = ["PRESETS", "Options", "StrategyFacts", "options_of_ddp", "refuse_unserved"]

PRESETS = _DATA_PARALLEL, _SINGLE_DEVICE = "data_parallel", "single_device"
"""The runs to reproduce, as `equivalent_to` names them."""

_WHOLE_BATCH = ("mean", "weighted_mean", "sum", "normalized_sum")


class _Given(dict[str, Any]):
    """Options by name; None for one that was not given. `rule` is the rule."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    @property
    def preset(self) -> Any:
        return self.equivalent_to or (_DATA_PARALLEL if self.reproducible else None)

    @property
    def splits(self) -> bool:
        return bool(self.split_batches or self.preset)

    @property
    def reduces(self) -> str:
        """The value of `reduction`, as messages quote it."""
        return repr(self.rule.name) if isinstance(self.reduction, str) else self.rule.name


_AGAINST = "{name}={v} contradicts equivalent_to={o.preset!r}, "
_BITS = "{name}={v!r} contradicts reproducible=True, which "
_ONE = " Leave one of them out."

_REFUSED: Mapping[str, tuple[str, Callable[[Any, Any], object]]] = {
    "{name}={v!r} is no preset.{hint} Use one of 'data_parallel', 'single_device', or None.": (
        ("equivalent_to", lambda _, v: v is not None and v not in PRESETS)
    ),
    "{name} must be 1 or more, or None for the world size, got {v}": (
        ("num_replicas", lambda _, v: v is not None and v < 1)
    ),
    "{name} must be 1 or more, or None for no limit, got {v}": (
        ("max_device_batch_size", lambda _, v: v is not None and v < 1)
    ),
    "{name}={v} averages weights instead of reducing gradients. Leave it out, or use"
    " lightning.pytorch.strategies.DDPStrategy.": ("model_averaging_period", lambda _, v: v is not None),
    "{name}={v!r} is the size of buckets in MiB: give more than 0, or None for DDP's own": (
        (
            "bucket_cap_mb bucket_cap_mb_list",
            lambda _, v: any(size <= 0 for size in (v if isinstance(v, list) else [v]) if size is not None),
        )
    ),
    "{name}={v!r} reduces gradients over some of the run's ranks, and the rule counts them all. Use"
    " lightning.pytorch.strategies.DDPStrategy, or average_gradients(group=...) in your own loop.": (
        ("process_group device_mesh", lambda _, v: v is not None)
    ),
    f"{_BITS}has replicas on any number of ranks. Use equivalent_to='data_parallel'.{_ONE}": (
        ("equivalent_to", lambda o, v: o.reproducible and v not in (None, _DATA_PARALLEL))
    ),
    "reproducible=True needs num_replicas, the chunks of each loader batch, got None. Give a number that every number"
    " of ranks to be used divides, such as num_replicas=8.": (
        "num_replicas",
        lambda o, v: o.reproducible and v is None,
    ),
    f"{_BITS}sums in its own order.{_ONE}": ("ddp_comm_hook ddp_comm_wrapper", lambda o, v: o.reproducible and v),
    f"{_BITS}runs one backward for each replica.{_ONE}": ("static_graph", lambda o, v: o.reproducible and v),
    f"{_BITS}reduces nothing before the last backward.{_ONE}": (
        ("nonfinite", lambda o, v: o.reproducible and v != "propagate")
    ),
    "{name}={v} cuts the chunks of split_batches=True, not set here. Set it, or choose the loader's batch_size and"
    " accumulate_grad_batches yourself.": (
        ("max_device_batch_size num_replicas", lambda o, v: v is not None and not o.splits)
    ),
    "{name}={v} cuts the replicas of num_replicas={o.num_replicas}, each of which is one forward. Raise num_replicas,"
    " or use torch.utils.checkpoint in the model.": (
        ("max_device_batch_size", lambda o, v: None not in (o.num_replicas, v) and not o.equivalent_to)
    ),
    f"{_AGAINST}whose gradient is that of the loss over the whole batch. Use one of"
    f" {', '.join(map(repr, _WHOLE_BATCH))}, or leave equivalent_to out.": (
        ("reduction", lambda o, _: o.preset is not None and o.rule.name not in _WHOLE_BATCH)
    ),
    f"{_AGAINST}whose global batch is the loader's batch.{_ONE}": (
        ("split_batches", lambda o, v: o.preset and v is False)
    ),
    f"{_AGAINST}which evaluates each sample once.{_ONE}": ("exact_evaluation", lambda o, v: o.preset and v is False),
    f"{_AGAINST}whose ranks all hold the buffers of one run.{_ONE}": (
        ("broadcast_buffers forward_sync_buffers", lambda o, v: o.preset and v is False)
    ),
    f"{_AGAINST}which computes each replica whole. Raise num_replicas, or use torch.utils.checkpoint in the model.": (
        ("max_device_batch_size", lambda o, v: o.preset == _DATA_PARALLEL and v is not None)
    ),
    f"{_AGAINST}which has one replica on any number of ranks. Leave it out, or use equivalent_to='data_parallel'.": (
        ("num_replicas", lambda o, v: o.preset == _SINGLE_DEVICE and v is not None)
    ),
}
"""Why options of the strategy are refused: their names, and a predicate of all options and the value."""


@dataclass(frozen=True)
class Options:
    """How batches are split and evaluated, and losses reduced: what the constructor's options come to.

    Attributes:
        rule: The reduction rule.
        preset: The name of the run to reproduce, if any.
        split_batches: Whether the loader's batches are the global batches.
        num_replicas: Chunks of each loader batch; None for the world size.
        max_device_batch_size: Most samples that a rank computes at once, if limited.
        reproducible: Whether the bits do not depend on the number of ranks.
        exact_evaluation: Whether evaluation sees each sample exactly once.
    """

    rule: Rule
    preset: str | None
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
        given = _Given(options, rule=resolve_rule(options["reduction"]))
        for message, (names, holds) in _REFUSED.items():
            for name in names.split():
                if holds(given, given.get(name)):
                    value = given.reduces if name == "reduction" else given.get(name)
                    hint = did_you_mean(given.equivalent_to, PRESETS)
                    raise ValueError(message.format(name=name, v=value, o=given, hint=hint))
        return cls(
            rule_of_split_batches(given.rule) if given.splits else given.rule,
            given.preset,
            given.splits,
            given.num_replicas,
            given.max_device_batch_size,
            bool(given.reproducible),
            given.preset is not None or bool(given.exact_evaluation),
        )

    @property
    def one_device(self) -> bool:
        """Whether the run to reproduce is that of a single device, whose batch norm sees the whole batch."""
        return self.preset == _SINGLE_DEVICE

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


_INSTEAD: Mapping[str, str] = {
    "configures DistributedDataParallel, or what starts it: configure fully_shard instead": (
        f"{' '.join(inspect.signature(DistributedDataParallel.__init__).parameters)} start_method ddp_options"
    ),
    "is for lightning_gradavg.GradAvgStrategy, with Lightning's Trainer and the whole model on every rank": (
        "equivalent_to num_replicas reproducible allow_recipe_change check_replicas_every_n_steps"
        " ddp_comm_hook ddp_comm_state ddp_comm_wrapper model_averaging_period"
    ),
    "follows the batches of GradAvgStrategy: set the learning rate that `gradavg plan` prints": (
        "lr_scaling base_batch_size base_world_size lr_warmup_steps"
    ),
    "cuts loader batches: set the loader's batch_size": "split_batches",
    "cuts batches: set the loader's batch_size, or in your loop run all parts of a batch but the last within"
    " fabric.no_backward_sync(model)": "max_device_batch_size",
    "is your loop's in Fabric: use split_batches=True, and count fabric.strategy.samples": "exact_evaluation",
    "checks the gradients of GradAvgStrategy: give a loss that is not finite weight=0": "nonfinite",
    "is for GradAvgStrategy: call log_hyperparams of your loggers": "log_hyperparams",
    "is called precision in Fabric": "precision_plugin",
}


def refuse_unserved(owner: str, options: Mapping[str, object], where: str, *engines: type) -> None:
    """Raise a TypeError about the first option that no constructor of some engines has, with what to do instead."""
    signatures = (inspect.signature(engine).parameters for engine in engines)
    known = sorted(
        {"reduction", *(name for names in signatures for name in names)} - {"kwargs", "module", "device_ids"}
    )
    refuse_unknown(
        owner, options, known, {name: why for why, names in _INSTEAD.items() for name in names.split()}, where
    )


def options_of_ddp(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that DDP has and that differ from its defaults: command lines hand on every default."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {name: value for name, value in given.items() if name in known and value != known[name].default}
