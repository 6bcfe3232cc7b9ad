"""What the options of the strategy come to: the run to reproduce, the rule, and the options of DDP."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg._support.arguments import SET_BY_STRATEGIES, as_count_or_none, refuse_unknown
from lightning_gradavg.rules import Rule, resolve_rule, rule_of_split_batches

__all__ = ["PRESETS", "Options", "StrategyFacts", "options_of_ddp", "refuse_unserved"]

PRESETS = _DATA_PARALLEL, _SINGLE_DEVICE = "data_parallel", "single_device"
"""The runs to reproduce, as `equivalent_to` names them."""

_WHOLE_BATCH = ("mean", "weighted_mean", "sum", "normalized_sum")


_AGAINST = "{name}={v!r} contradicts equivalent_to={o.preset!r}, "
_ONE = " Leave one of them out."


_REFUSED: Mapping[str, tuple[str, tuple[Any, ...], Callable[[Any], object]]] = {
    "{name}={v} averages weights instead of reducing gradients. Leave it out, or use"
    " lightning.pytorch.strategies.DDPStrategy.": ("model_averaging_period", (None,), lambda _: True),
    "{name}={v!r} reduces gradients over some of the run's ranks, and the rule counts them all. Use"
    " lightning.pytorch.strategies.DDPStrategy, or average_gradients(group=...) in your own loop.": (
        "process_group device_mesh",
        (None,),
        lambda _: True,
    ),
    "{name}={v!r} contradicts reproducible=True, which has replicas on any number of ranks. Use"
    f" equivalent_to='data_parallel'.{_ONE}": ("equivalent_to", (None, _DATA_PARALLEL), lambda o: o.reproducible),
    "reproducible=True needs num_replicas, the chunks of each loader batch, got None. Give a number that every"
    " number of ranks to be used divides, such as num_replicas=8.": (
        "num_replicas",
        (),
        lambda o: o.reproducible and o.num_replicas is None,
    ),
    "{name}={v!r} contradicts reproducible=True, which runs one backward for each replica, and reduces in its own"
    f" order after the last.{_ONE}": (
        "ddp_comm_hook ddp_comm_wrapper static_graph nonfinite",
        (None, False, "propagate"),
        lambda o: o.reproducible,
    ),
    "{name}={v} cuts the chunks of split_batches=True, not set here. Set it, or choose the loader's batch_size and"
    " accumulate_grad_batches yourself.": ("max_device_batch_size num_replicas", (None,), lambda o: not o.splits),
    "{name}={v} cuts the replicas of num_replicas={o.num_replicas}, each of which is one forward. Raise"
    " num_replicas, or use torch.utils.checkpoint in the model.": (
        "max_device_batch_size",
        (None,),
        lambda o: o.num_replicas is not None or o.preset == _DATA_PARALLEL,
    ),
    f"{_AGAINST}whose gradient is that of the loss over the whole batch. Use one of"
    f" {', '.join(map(repr, _WHOLE_BATCH))}, or leave equivalent_to out.": (
        "reduction",
        _WHOLE_BATCH,
        lambda o: o.preset,
    ),
    f"{_AGAINST}which shares out the loader's batches, evaluates each sample once, and keeps buffers equal.{_ONE}": (
        "split_batches exact_evaluation broadcast_buffers forward_sync_buffers",
        (None, True),
        lambda o: o.preset,
    ),
    f"{_AGAINST}which has one replica on any number of ranks. Use equivalent_to='data_parallel'.{_ONE}": (
        "num_replicas",
        (None,),
        lambda o: o.preset == _SINGLE_DEVICE,
    ),
}
"""Messages about refused options: the names of the options, the values that pass, and a predicate of all options."""


@dataclass(frozen=True)
class Options:
    """How batches are split and evaluated, and losses reduced: what the constructor's options come to."""

    rule: Rule
    preset: str | None
    split_batches: bool
    num_replicas: int | None
    max_device_batch_size: int | None
    reproducible: bool
    exact_evaluation: bool

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Options:
        """Return what the constructor's options come to, or raise a ValueError about the first that is refused."""
        o, rule = SimpleNamespace(**options), resolve_rule(options["reduction"])
        o.reduction, o.preset = rule.name, o.equivalent_to or (_DATA_PARALLEL if o.reproducible else None)
        o.splits = bool(o.split_batches or o.preset)
        for name in ("num_replicas", "max_device_batch_size"):
            as_count_or_none(name, options[name])
        for why, (names, accepted, when) in _REFUSED.items():
            for name, value in ((name, vars(o).get(name)) for name in names.split()):
                if value not in accepted and when(o):
                    raise ValueError(why.format(name=name, v=value, o=o))
        return cls(
            rule_of_split_batches(rule) if o.splits else rule,
            o.preset,
            o.splits,
            o.num_replicas,
            o.max_device_batch_size,
            bool(o.reproducible),
            o.preset is not None or bool(o.exact_evaluation),
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

    def shaping_replicas(self, world_size: int) -> int | None:
        """Return the chunks of each loader batch with their own batch statistics; None if those are the ranks' own."""
        return (self.num_replicas or world_size) if self.replicated and not self.one_device else None


@dataclass(frozen=True)
class StrategyFacts:
    """What decides the mathematics of a run, as `GradAvgStrategy.facts()` tells it; by default of stock DDP.

    Attributes:
        rule: The reduction rule.
        splits_batches: Whether each rank takes its chunk of the loader's batches.
        accumulation: Loader batches per optimizer step.
        replicas: Chunks of each loader batch with their own batch statistics, if they are not those of the ranks.
        replicated: Whether a training step runs once per replica, and gradients of one rank's loss reach another.
        scales_rates: Whether the learning rate follows the global batch.
        samples: Samples of the current micro-batch that count, if the strategy knows; 0 for a stand-in.
    """

    rule: Rule
    splits_batches: bool = False
    accumulation: int = 1
    replicas: int | None = None
    replicated: bool = False
    scales_rates: bool = False
    samples: float | None = None


def refuse_unserved(owner: str, options: Mapping[str, object], *engines: type) -> None:
    """Raise a TypeError about the first option that no constructor of some engines has."""
    of_engines = [name for engine in engines for name in inspect.signature(engine).parameters]
    known = [name for name in ["reduction", *of_engines] if name not in {"kwargs", *SET_BY_STRATEGIES}]
    refuse_unknown(owner, options, known)


def options_of_ddp(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that DDP has and that differ from its defaults: command lines hand on every default."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {name: value for name, value in given.items() if name in known and value != known[name].default}
