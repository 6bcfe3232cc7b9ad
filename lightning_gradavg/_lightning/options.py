"""What the options of the strategy come to: the run to reproduce, the rule, and the options of DDP."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg._support.arguments import SET_BY_STRATEGIES, as_count_or_none, refuse_unknown
from lightning_gradavg.rules import Rule, resolve_rule, rule_of_split_batches

__all__ = [
    "PRESETS",
    "Options",
    "StrategyFacts",
    "in_code",
    "options_of_ddp",
    "refuse_unserved",
    "strategy_in_code",
    "trainer_in_diff",
]

_DATA_PARALLEL = "data_parallel"
_SINGLE_DEVICE = "single_device"
PRESETS = (_DATA_PARALLEL, _SINGLE_DEVICE)
"""The runs to reproduce, as `equivalent_to` names them."""

_WHOLE_BATCH = ("mean", "weighted_mean", "sum", "normalized_sum")
"""The rules under which a run may be that of another number of processes: they know no nodes."""


@dataclass(frozen=True)
class Options:
    """How batches are split and evaluated, and losses reduced: what the constructor's options come to.

    Attributes:
        rule: The reduction rule; of split batches, the one that counts samples.
        preset: The run to reproduce, one of `PRESETS`, or None.
        split_batches: Whether each rank takes its chunk of the loader's batches.
        num_replicas: Chunks of each loader batch, if the user gave their number.
        max_device_batch_size: The most samples that a rank computes at once, if the user gave it.
        reproducible: Whether bits do not depend on the number of ranks.
        exact_evaluation: Whether evaluation sees each sample once.
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
        """Return what the constructor's options come to, or raise a ValueError about the first that is refused."""
        rule = resolve_rule(options["reduction"])
        num_replicas = as_count_or_none("num_replicas", options["num_replicas"])
        max_device_batch_size = as_count_or_none("max_device_batch_size", options["max_device_batch_size"])
        reproducible = bool(options["reproducible"])
        preset = options["equivalent_to"]
        if preset is None and reproducible:
            preset = _DATA_PARALLEL
        splits = preset is not None or bool(options["split_batches"])

        # The order decides which error a user sees who gives several options that contradict each other.
        _refuse_other_reductions(options)
        if reproducible:
            _refuse_under_reproducible(options)
        _refuse_cuts(options, preset, splits=splits)
        if preset is not None:
            _refuse_under_preset(options, preset, rule)

        if splits:
            rule = rule_of_split_batches(rule)
        return cls(
            rule=rule,
            preset=preset,
            split_batches=splits,
            num_replicas=num_replicas,
            max_device_batch_size=max_device_batch_size,
            reproducible=reproducible,
            exact_evaluation=preset is not None or bool(options["exact_evaluation"]),
        )

    @property
    def one_device(self) -> bool:
        """Whether the run to reproduce is that of a single device, whose batch norm sees the whole batch."""
        return self.preset == _SINGLE_DEVICE

    def in_pieces(self, world_size: int) -> bool:
        """Return whether a rank may compute its samples in several pieces, one after another."""
        if self.max_device_batch_size is not None:
            return True
        return self.num_replicas is not None and self.num_replicas > world_size

    @property
    def replicated(self) -> bool:
        """Whether a training step runs once per replica, each with its own buffers and random numbers."""
        return self.preset is not None or self.num_replicas is not None

    def shaping_replicas(self, world_size: int) -> int | None:
        """Return the chunks of each loader batch with their own batch statistics; None if those are the ranks' own."""
        if self.one_device or not self.replicated:
            return None
        return world_size if self.num_replicas is None else self.num_replicas


def _refuse_other_reductions(options: Mapping[str, object]) -> None:
    """Refuse options of DDP by which something else is reduced than the rule says."""
    period = options["model_averaging_period"]
    if period is not None:
        raise ValueError(
            f"model_averaging_period={period} averages weights instead of reducing gradients. Leave it out, or use"
            " lightning.pytorch.strategies.DDPStrategy."
        )
    for name in ("process_group", "device_mesh"):
        value = options.get(name)
        if value is not None:
            raise ValueError(
                f"{name}={value!r} reduces gradients over some of the run's ranks, and the rule counts them all. Use"
                " lightning.pytorch.strategies.DDPStrategy, or average_gradients(group=...) in your own loop."
            )


def _refuse_under_reproducible(options: Mapping[str, object]) -> None:
    """Refuse what contradicts `reproducible=True`."""
    preset = options["equivalent_to"]
    if preset not in (None, _DATA_PARALLEL):
        raise ValueError(
            f"equivalent_to={preset!r} contradicts reproducible=True, which has replicas on any number of ranks. Use"
            " equivalent_to='data_parallel'. Leave one of them out."
        )
    if options["num_replicas"] is None:
        raise ValueError(
            "reproducible=True needs num_replicas, the chunks of each loader batch, got None. Give a number that every"
            " number of ranks to be used divides, such as num_replicas=8."
        )
    # Hooks and a static graph belong to DDP's reducer, which such a run does not use (`reproducible.engine`).
    allowed_values: Mapping[str, tuple[object, ...]] = {
        "ddp_comm_hook": (None,),
        "ddp_comm_wrapper": (None,),
        "static_graph": (None, False),
    }
    for name, allowed in allowed_values.items():
        value = options.get(name)
        if value not in allowed:
            raise ValueError(
                f"{name}={value!r} contradicts reproducible=True, which runs one backward for each replica, and reduces"
                " in its own order after the last. Leave one of them out."
            )


def _refuse_cuts(options: Mapping[str, object], preset: str | None, *, splits: bool) -> None:
    """Refuse cuts of batches that are not split, and cuts of replicas."""
    most = options["max_device_batch_size"]
    num_replicas = options["num_replicas"]
    if most is not None and not splits:
        raise ValueError(
            f"max_device_batch_size={most} requires split_batches=True. Set it, or choose the loader's batch_size and"
            " accumulate_grad_batches yourself."
        )
    if num_replicas is not None and not splits:
        raise ValueError(
            f"num_replicas={num_replicas} requires split_batches=True. Set it, or one of the options that set it:"
            " reproducible=True for the same bits on any number of ranks, equivalent_to='data_parallel' for the run of"
            " nn.DataParallel."
        )
    if most is not None and (num_replicas is not None or preset == _DATA_PARALLEL):
        raise ValueError(
            f"max_device_batch_size={most} cuts the replicas of num_replicas={num_replicas}, each of which is one"
            " forward. Raise num_replicas, or use torch.utils.checkpoint in the model."
        )


def _refuse_under_preset(options: Mapping[str, object], preset: str, rule: Rule) -> None:
    """Refuse what contradicts `equivalent_to`."""
    if rule.name not in _WHOLE_BATCH:
        raise ValueError(
            f"reduction={rule.name!r} contradicts equivalent_to={preset!r}, whose gradient is that of the loss over the"
            f" whole batch. Use one of {', '.join(map(repr, _WHOLE_BATCH))}, or leave equivalent_to out."
        )
    for name in ("split_batches", "exact_evaluation", "broadcast_buffers", "forward_sync_buffers"):
        value = options.get(name)
        if value not in (None, True):
            raise ValueError(
                f"{name}={value!r} contradicts equivalent_to={preset!r}, which shares out the loader's batches,"
                " evaluates each sample once, and keeps buffers equal. Leave one of them out."
            )
    num_replicas = options["num_replicas"]
    if preset == _SINGLE_DEVICE and num_replicas is not None:
        raise ValueError(
            f"num_replicas={num_replicas!r} contradicts equivalent_to={preset!r}, which has one replica on any number"
            " of ranks. Use equivalent_to='data_parallel'. Leave one of them out."
        )


@dataclass(frozen=True)
class StrategyFacts:
    """What decides the mathematics of a run, as `facts()` of a strategy says it; by default of stock DDP and FSDP2.

    Attributes:
        rule: The reduction rule.
        splits_batches: Whether each rank takes its chunk of the loader's batches.
        accumulation: Loader batches per optimizer step.
        replicas: Chunks of each loader batch with their own batch statistics, if they are not those of the ranks.
        replicated: Whether a training step runs once per replica, and gradients of one rank's loss reach another.
        scales_rates: Whether the learning rate follows the global batch.
        samples: Samples of the current micro-batch that count, if the strategy knows; 0 for a stand-in.
        given: The options that the user gave.
    """

    rule: Rule
    splits_batches: bool = False
    accumulation: int = 1
    replicas: int | None = None
    replicated: bool = False
    scales_rates: bool = False
    samples: float | None = None
    given: Mapping[str, object] = field(default_factory=dict)


def in_code(options: Mapping[str, object]) -> dict[str, str]:
    """Return options as a script has them; a function by its name."""
    texts = {}
    for name, value in options.items():
        texts[name] = getattr(value, "__name__", repr(value))
        if isinstance(value, str):
            texts[name] = f'"{value}"'
    return texts


def strategy_in_code(options: Mapping[str, str]) -> str:
    """Return how a script makes a strategy with these options, which `in_code` returns."""
    arguments = [f"{name}={text}" for name, text in options.items()]
    return f"GradAvgStrategy({', '.join(arguments)})"


def trainer_in_diff(options: Mapping[str, str]) -> str:
    """Return the lines that give a script's Trainer a strategy with these options."""
    return (
        f"+from lightning_gradavg import GradAvgStrategy\n+trainer = Trainer(strategy={strategy_in_code(options)}, ...)"
    )


def refuse_unserved(owner: str, own: Sequence[str], options: Mapping[str, object], *engines: type) -> None:
    """Raise a TypeError about the first option that is none of the owner's `own`, and none of its engines'."""
    known = list(own)
    for engine in engines:
        for name in inspect.signature(engine).parameters:
            if name != "kwargs" and name not in SET_BY_STRATEGIES:
                known.append(name)
    refuse_unknown(owner, options, known)


def options_of_ddp(given: Mapping[str, object]) -> dict[str, object]:
    """Return the options that DDP has and that differ from its defaults: command lines hand on every default."""
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    known = {name: value for name, value in given.items() if name in parameters}
    return {name: value for name, value in known.items() if value != parameters[name].default}
