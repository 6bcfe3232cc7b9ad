"""What a run leaves behind for the comparison: its batches, losses, gradients and weights, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Facts", "MicroBatch", "Part", "Replay", "Run", "Step", "Tensors", "copied", "gradients_of"]

Tensors: TypeAlias = dict[str, Tensor]
"""Tensors on the CPU by the name of their parameter or buffer."""


@dataclass
class MicroBatch:
    """A batch that one rank trained on.

    Attributes:
        index: Its `batch_idx`.
        batch: The batch as `training_step` got it.
        samples: A fingerprint of every sample; none where the batch only kept the rank busy.
        random: The state of all random generators before its training step.
        draws: Whether the training step drew random numbers.
        weight: The weight that `training_step` returned, or None.
        outputs: The tensors that the module's `forward` returned; where that was not called, those of its children.
    """

    index: int
    batch: Any
    samples: tuple[bytes, ...]
    random: dict[str, Any]
    draws: bool = False
    weight: float | dict[str, float] | None = None
    outputs: Tensors = field(default_factory=dict)


@dataclass
class Part:
    """One backward.

    Attributes:
        micro_batch: Position of its micro-batch in the step.
        loss: The loss that `training_step` computed, before any division.
        gradient: The gradient of that loss on this rank alone.
    """

    micro_batch: int
    loss: float
    gradient: Tensors


@dataclass
class Step:
    """One optimizer step on one rank.

    Attributes:
        epoch: The epoch.
        micro_batches: What was trained on since the step before; empty for a second optimizer of a batch.
        parts: The backwards since the step before.
        buffers_before: The buffers before its first micro-batch.
        weights_before: The weights before the step.
        optimizer_before: The optimizer's state before the step.
        groups: The options of the optimizer's parameter groups, without the parameters.
        optimizer: Which of the optimizers stepped.
        gradient: The gradient after reduction.
        clipped: The gradient after clipping.
        weights_after: The weights after the step.
        buffers_after: The buffers after the step.
        random_after: A fingerprint of the random generators after the step.
    """

    epoch: int
    micro_batches: list[MicroBatch]
    parts: list[Part]
    buffers_before: Tensors
    weights_before: Tensors
    optimizer_before: dict[Any, Any]
    groups: list[dict[str, Any]]
    optimizer: int
    gradient: Tensors
    clipped: Tensors = field(default_factory=dict)
    weights_after: Tensors = field(default_factory=dict)
    buffers_after: Tensors = field(default_factory=dict)
    random_after: bytes = b""


@dataclass(frozen=True)
class Facts:
    """How a run was set up.

    Attributes:
        strategy: The class of its strategy.
        reduction: The rule's name; "mean" for stock DDP.
        rule: The rule where the strategy has one.
        nodes: The node of every rank.
        accumulation: Loader batches per optimizer step.
        cuts: Micro-batches that every loader batch is cut into on a rank.
        splits: Whether the loader's batches are the global batches.
        replicas: Number of replicas of a run that is to equal `DataParallel`; None for one that is to equal one device.
        counts_replicas: Whether each replica's loss counts the same, whatever its samples.
        crosses_ranks: Whether gradients of one rank's loss reach another within the backward.
        step_end: Whether the loss is that of `training_step_end`, on the outputs of all replicas.
        scales_rates: Whether the strategy scales the learning rate because the user asked for it.
        automatic: Whether Lightning runs the backward and the optimizer.
        estimated_steps: What `Trainer.estimated_stepping_batches` says; None where it cannot be known.
        epoch_batches: Batches of an epoch on each rank; infinite for a stream without length.
        padded: Samples that the sampler repeats in an epoch so that all ranks have equally many.
        precision: `precision` of the Trainer.
        clip: `gradient_clip_val` of the Trainer.
    """

    strategy: str
    reduction: str = "mean"
    rule: Any = None
    nodes: tuple[int, ...] = ()
    accumulation: int = 1
    cuts: int = 1
    splits: bool = False
    replicas: int | None = None
    counts_replicas: bool = False
    crosses_ranks: bool = False
    step_end: bool = False
    scales_rates: bool = False
    automatic: bool = True
    estimated_steps: float | None = None
    epoch_batches: float = float("inf")
    padded: int = 0
    precision: str = "32-true"
    clip: float | None = None


@dataclass
class Replay:
    """One step computed again on one process, from the weights and random numbers of the run.

    Attributes:
        parts: Loss and gradient of every micro-batch on its own, in the order of `pairs`.
        whole: Those of the whole global batch; None where its micro-batches cannot be joined.
    """

    parts: list[tuple[float, Tensors]]
    whole: tuple[float, Tensors] | None


@dataclass
class Run:
    """What one process recorded.

    Attributes:
        rank: Its rank.
        world_size: The number of ranks.
        initial: Weights and buffers when training began.
        steps: The optimizer steps.
        facts: How the run was set up.
        replays: Of a reference, by the position of the step and by variant: "plain", "still" without random layers,
            "frozen" without batch statistics either.
        draws_in: Of a reference, modules that drew random numbers.
        norms: Modules that used statistics of the batch.
        remarks: What could not be recorded, and why.
    """

    rank: int
    world_size: int
    initial: Tensors
    steps: list[Step]
    facts: Facts
    replays: dict[int, dict[str, Replay]] = field(default_factory=dict)
    draws_in: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def copied(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return dense copies on the CPU."""
    return {
        name: (tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()).cpu().clone()
        for name, tensor in tensors.items()
    }


def gradients_of(module: nn.Module, optimizer: Optimizer) -> Tensors:
    """Return copies of the gradients of the parameters that `optimizer` trains, by name."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return copied(
        {
            name: parameter.grad
            for name, parameter in module.named_parameters()
            if id(parameter) in trained and parameter.grad is not None
        }
    )
