"""`average_gradients`: the reduction rules for a plain PyTorch loop, in place after `backward()`.

Every rank first sends the others, in one small exchange, what it is about to reduce. Whatever does not fit together
raises the same error on all ranks, before any gradient has changed. Then the gradients are summed, in flat buckets of
which all are in flight at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gradavg._lightning.internals import copy_each
from lightning_gradavg._support.collectives import Contribution, World
from lightning_gradavg._support.flat import buckets_of, views_of
from lightning_gradavg.reduction.loss import as_weight
from lightning_gradavg.reduction.reference import rank_factors
from lightning_gradavg.rules import RULES, Rule, is_number, resolve_rule

__all__ = ["average_gradients", "problem_without_weight", "sum_gradients_over_ranks"]

_BUCKET_BYTES = 25 * 2**20  # as DDP's: while one is on its way, the next is copied


@torch.no_grad()
def average_gradients(
    module_or_parameters: nn.Module | Iterable[Tensor],
    *,
    reduction: str | Rule = "mean",
    weight: float | Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Reduce the gradients over the ranks of a process group, in place. Call it on every rank, after `backward()`.

    Every gradient becomes `sum over r of w_r * g_r / Z` with `Z = sum over r of z_r`, where the rule gives each rank
    its share `(w_r, z_r)`; see `lightning_gradavg.rules`. All ranks end with the same bits. Without an initialized
    process group this is a world of one rank: nothing is communicated, and the formula still applies.

    - A gradient that is None on some ranks counts as zero there, and those ranks receive the reduced one. None on
      all ranks stays None.
    - Gradients are dense, real or complex, in any memory format. Those of fewer than 32 bits are summed in float32. A
      gradient that is lazily conjugated is replaced by a new tensor; others are written in place.
    - Under a rule that uses weights, a rank of weight 0 contributes nothing, even if its gradients are NaN. If no rank
      has any weight, the gradients become zero.
    - Without parameters, only the arguments are checked.
    - After `lightning_gradavg.gather`, a rule that weighs ranks differently comes too late: see `docs/contrastive.md`.

    Nodes are those of the launcher: `GROUP_RANK`, `SLURM_NODEID` or `NODE_RANK`.

    Args:
        module_or_parameters: The module, or its parameters in the same order on all ranks. Each counts once.
        reduction: A key of `lightning_gradavg.rules.RULES`.
        weight: The count of loss terms behind this rank's gradient: a number >= 0 of any type, or a tensor with one
            element. Pass it on all ranks or on none; rules that do not use it ignore it. Summed in float64.
        group: The process group to reduce over; the default group if None.

    Raises:
        ValueError: On all ranks, without changing gradients, if an argument is invalid on some rank, or if the ranks'
            arguments, parameters or gradients don't fit together. On this process alone, if it is no member of `group`.
    """
    world = World.of(group)

    # `agree` calls it, so that an error on one rank, such as an unknown rule, is raised on all.
    def contribute() -> Contribution:
        return _contribution(module_or_parameters, resolve_rule(reduction), weight)

    contribution, agreed = world.agree("average_gradients cannot reduce", contribute)
    factor = rank_factors(resolve_rule(reduction), agreed.nodes, agreed.weights)[world.rank]
    _reduce(contribution.tensors, agreed.details, factor, world)


@torch.no_grad()
def sum_gradients_over_ranks(parameters: Sequence[Tensor], factor: float, group: dist.ProcessGroup | None) -> None:
    """Replace gradients by their sum over all ranks, times a factor that all ranks share. A collective operation.

    For parameters that the engine of a run does not reduce (`ReplicatedGradients.reduce_unfrozen`).

    Raises:
        ValueError: On all ranks, without changing gradients, if the ranks' parameters or gradients don't fit together.
    """
    world = World.of(group)

    def contribute() -> Contribution:
        # A rule without weights: the factor has them.
        return _contribution(parameters, RULES["sum"], None)

    contribution, agreed = world.agree("the gradients of unfrozen parameters cannot be reduced", contribute)
    _reduce(contribution.tensors, agreed.details, factor, world)


def _reduce(
    parameters: Mapping[str, Tensor], has_gradient: Sequence[Sequence[int]], factor: float, world: World
) -> None:
    """Multiply this rank's gradients by a factor, and replace them by the sum over all ranks. A collective operation.

    Args:
        parameters: Those of this rank.
        has_gradient: Of every rank, whether each parameter has a gradient.
        factor: That of this rank; 0 discards its gradients.
        world: The ranks.
    """
    has_gradient_on_ranks = list(zip(*has_gradient, strict=True))  # of each parameter
    gradients: list[Tensor] = []
    for parameter, has_gradient_on_rank in zip(parameters.values(), has_gradient_on_ranks, strict=True):
        if any(has_gradient_on_rank):
            gradients.append(_writable(parameter))
    sums: list[_Bucket] = []
    works: list[dist.Work] = []
    for members in buckets_of(gradients, _BUCKET_BYTES):
        with torch.profiler.record_function("GradAvg: reduce gradients"):
            # In no fewer than 32 bits: a sum of float16 overflows and a pre-divided one underflows where the result
            # does neither, and bfloat16 loses bits at every addition.
            wide = torch.promote_types(members[0].dtype, torch.float32)
            flat = torch.cat([gradient.reshape(-1) for gradient in members]).to(wide)
            if factor > 0:
                flat.mul_(factor)
            else:
                flat.zero_()  # 0 times NaN is NaN
            if world.group is not None:
                works.append(dist.all_reduce(flat, group=world.group, async_op=True))
        sums.append(_Bucket(members, flat))
    with torch.profiler.record_function("GradAvg: wait for gradients"):
        for work in works:
            work.wait()
    with torch.profiler.record_function("GradAvg: write gradients"):
        for bucket in sums:
            copy_each(bucket.gradients, views_of(bucket.flat, bucket.gradients))


class _Bucket(NamedTuple):
    """Gradients that are summed in one message."""

    gradients: list[Tensor]  # of one type and device
    flat: Tensor  # their elements, one gradient after another, in no fewer than 32 bits


def _writable(parameter: Tensor) -> Tensor:
    """Return a parameter's gradient, made writable: zeros where it has none, and stored as it reads."""
    # `average_gradients` writes in place, so that views that the user or DDP holds of a gradient stay valid.
    gradient = parameter.grad
    if gradient is None:
        parameter.grad = torch.zeros_like(parameter)
    else:
        # A lazily conjugated tensor cannot be written through.
        parameter.grad = gradient.resolve_conj().resolve_neg()
    return parameter.grad


def problem_without_weight(rule: Rule) -> str:
    """Return the message for a loss or gradient without a weight, under a rule that uses weights."""
    return (
        f"reduction={rule.name!r}, {rule.formula}, needs a weight: pass weight= on every rank, with every loss or its"
        " gradient, the number of loss terms (samples, tokens, ...) behind it, 0 where it has none"
    )


def _checked_weight(rule: Rule, weight: float | Tensor | None) -> float:
    """Return a rank's weight as a number; 1 under a rule without weights, which ignores whatever is given."""
    if not rule.uses_weight:
        return 1.0
    if weight is None:
        raise ValueError(problem_without_weight(rule))
    number = as_weight(weight)
    if not is_number(number):
        raise ValueError(f"weight {number!r} is not a finite number >= 0")
    return number


def _require_reducible(label: str, value: object) -> None:
    """Raise a ValueError unless a parameter, or its gradient, can be summed in a flat bucket."""
    if not isinstance(value, Tensor):
        raise ValueError(  # noqa: TRY004  # all ranks raise what one of them finds as a ValueError
            f"{label} is {value!r} of type {type(value).__name__}: pass a module, or an iterable such as"
            " model.parameters()"
        )
    if hasattr(value, "device_mesh"):
        raise ValueError(
            f"{label} is a DTensor, whose placements say how it is reduced: reduce it along its device mesh, or pass"
            " other tensors"
        )
    if value.layout != torch.strided:
        raise ValueError(
            f"{label} has a gradient of layout {value.layout}: convert it by to_dense(), or use DDP with GradAvgReducer"
        )
    if 0 in value.stride() and not value.is_contiguous():
        raise ValueError(f"{label} has a gradient that repeats elements in memory, as after expand(): clone() it")


def _contribution(source: object, rule: Rule, weight: float | Tensor | None) -> Contribution:
    """Return what this rank sends to be compared, checked. The details are whether each parameter has a gradient."""
    parameters = _labeled(source)
    has_gradient: list[bool] = []
    # What must be equal on all ranks.
    equal = [f"reduction={rule.name!r}, {rule.formula}", f"{len(parameters)} parameters"]
    for label, parameter in parameters.items():
        gradient = getattr(parameter, "grad", None)
        # A rank without a gradient gets zeros of the parameter's shape and type, which the others' gradients must have.
        like = parameter
        if gradient is not None:
            like = gradient
        _require_reducible(label, like)
        equal.append(f"{label} of shape {tuple(like.shape)}, {like.dtype} on {like.device.type}")
        has_gradient.append(gradient is not None)
    return Contribution(
        equal,
        details=has_gradient,
        weight=_checked_weight(rule, weight),
        node=rule.node,
        tensors=parameters,
    )


def _labeled(source: object) -> dict[str, Tensor]:
    """Return every parameter once, by what messages call it."""
    if isinstance(source, nn.Module):
        return _labeled_of_module(source)
    listed: Iterable[Tensor] = source  # type: ignore[assignment]  # what it yields is checked later, one by one
    if isinstance(source, Tensor):
        listed = [source]  # not its rows
    # By position: the same parameter in two groups counts where it comes first.
    labeled: dict[str, Tensor] = {}
    for index, parameter in enumerate(dict.fromkeys(listed)):
        labeled[f"parameter {index}"] = parameter
    return labeled


def _labeled_of_module(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a module by name, or raise a ValueError if a wrapper in it reduces gradients itself."""
    for name, submodule in module.named_modules():
        if hasattr(submodule, "no_sync"):  # DDP's and FSDP's
            raise ValueError(
                f"{name or 'the module'} is a {type(submodule).__name__}, which has reduced the gradients: leave this"
                " out, or use no_sync() and `.module`"
            )
    return {f"parameter {name!r}": parameter for name, parameter in module.named_parameters()}
