"""`average_gradients`: the reduction rules for a plain PyTorch loop, in place after `backward()`.

A call has two steps. Every rank first tells the others, in one small exchange, what it is about to reduce: whether it
met a problem, digests of its parameters and gradients, its node and its weight. Whatever does not fit together raises
the same error on all ranks, before any gradient has changed. Then the gradients are summed, in flat buckets of which
all are in flight at once.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg.lightning_internals import copy_each, views_of
from lightning_gradavg.ranks import Agreed, Contribution, World, by_value, on_ranks
from lightning_gradavg.reduction.combine import is_number, rank_factors
from lightning_gradavg.reduction.sums import SUM_DTYPES, as_real, sum_sparse, zero_gradient
from lightning_gradavg.reduction.window import as_weight
from lightning_gradavg.rules import Rule, RuleFunction, resolve_rule
from lightning_gradavg.wire.codecs import CODECS, Codec, refuse_double_precision
from lightning_gradavg.wire.exchange import Exchange
from lightning_gradavg.wire.route import Hop, Route

__all__ = ["agreed_factors", "average_gradients", "checked_weight"]

_Form: TypeAlias = tuple[torch.dtype, int] | None
"""Of a gradient: its dtype and its sparse dimensions, 0 of a dense one; None where it is None."""

# A tensor has at most 64 dimensions. Ranks exchange the index here: that of None is the least.
_FORMS: tuple[_Form, ...] = (None, *product(SUM_DTYPES, range(65)))
_CODES = {form: code for code, form in enumerate(_FORMS)}

# The cap is DDP's: larger buckets gain no bandwidth and start later.
BUCKET_BYTES = 25 * 2**20

# From this size on a gradient is a bucket of its own, usually without a copy: one more collective is cheaper than
# copying 1 MiB into a bucket and back.
SINGLE_BYTES = 2**20


@torch.no_grad()
def average_gradients(
    module_or_parameters: nn.Module | Iterable[Tensor],
    *,
    reduction: str | RuleFunction | Rule = "mean",
    weight: float | Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    wire_dtype: Literal["bfloat16", "float16"] | None = None,
) -> None:
    """Reduce the gradients over the ranks of a process group, in place. Call it on every rank, after `backward()`.

    Every gradient becomes `sum over r of w_r * g_r / Z` with `Z = sum over r of z_r`, where the rule gives each rank
    its share `(w_r, z_r)`; see `lightning_gradavg.rules`. All ranks end with the same bits. Without an initialized
    process group this is a world of one rank: nothing is communicated, and the formula still applies.

    - A gradient that is None on some ranks counts as zero there, and those ranks receive the reduced one. None on
      all ranks stays None.
    - Gradients are dense or sparse (COO), real or complex, in any memory format. Those of fewer than 32 bits are
      summed in float32. A gradient that is sparse, repeats an element in memory (`expand`) or is lazily conjugated
      is replaced by a new tensor; others are written in place.
    - Under a rule that uses weights, a rank of weight 0 contributes nothing, even if its gradients are NaN. If no rank
      has any weight, the gradients become zero.
    - With no parameters nothing is reduced, but the arguments are checked all the same.

    Nodes are those of the launcher, see `lightning_gradavg.place.node_from_environment`.

    Args:
        module_or_parameters: The module, or its parameters in the same order on all ranks. Each counts once.
        reduction: A key of `lightning_gradavg.rules.RULES`, or a function `(place, weight) -> Share`, pure and the
            same on all ranks.
        weight: The count of loss terms behind this rank's gradient: a number >= 0 of any type, or a tensor with one
            element. Pass it on all ranks or on none; rules that do not use it ignore it. Summed in float64.
        group: The process group to reduce over; the default group if None.
        wire_dtype: What dense gradients are sent as between ranks, the same on all: `"bfloat16"` or `"float16"`, half
            the bytes of float32. They are summed in float32, each number rounded once before the sum and once after it.
            Gradients in double precision are refused. None for the type that they are summed in. See
            docs/performance.md.

    Raises:
        ValueError: On all ranks alike and with the gradients untouched, if an argument is not usable on some rank, or
            if the ranks' arguments, parameters or gradients do not fit together. On this process alone, if it is not
            a member of `group`.
    """
    world = World.of(group)
    mine, agreed = world.agree(
        "average_gradients cannot reduce",
        lambda: _Gradients.of(module_or_parameters, reduction, weight, world.device_types, wire_dtype),
        _difference,
    )
    _require_weights(mine.rule, agreed.weights)
    factor = agreed_factors(mine.rule, agreed)[world.rank]
    _reduce(world, mine.parameters, _agreed_forms(mine, agreed.details), factor, mine.codec)


@dataclass(frozen=True)
class _Gradients(Contribution):
    """What this rank brings to a reduction, each part checked.

    Attributes:
        rule: The reduction rule.
        labels: What messages call each parameter.
        parameters: The parameters, each once.
        codec: What numbers are sent by; None for the type that they are summed in.
    """

    rule: Rule
    labels: list[str]
    parameters: list[Tensor]
    codec: Codec | None

    @classmethod
    def of(
        cls,
        module_or_parameters: nn.Module | Iterable[Tensor],
        reduction: str | RuleFunction | Rule,
        weight: float | Tensor | None,
        device_types: Sequence[str] | None,
        wire_dtype: str | None,
    ) -> _Gradients:
        """Check the arguments of a reduction and the gradients."""
        rule = resolve_rule(reduction)
        if wire_dtype not in (None, *CODECS):
            raise ValueError(
                f"wire_dtype={wire_dtype!r} is not a type that gradients can be sent as. Use"
                f" {', '.join(map(repr, CODECS))}, or None to send gradients in their own type"
            )
        labeled = _labeled(module_or_parameters)
        forms = [_CODES[_form_of(label, parameter, device_types, wire_dtype)] for label, parameter in labeled]
        # Which parameters share a device decides which share a bucket.
        devices = enumerate(dict.fromkeys(parameter.device for _, parameter in labeled))
        ordinals = {device: f", device {ordinal} of the rank" * (ordinal > 0) for ordinal, device in devices}
        descriptions = [
            f"{label} of shape {tuple(parameter.shape)}, {parameter.dtype} on {parameter.device.type}"
            f"{ordinals[parameter.device]}"
            for label, parameter in labeled
        ]
        alike = f"{rule.name!r}, {rule.formula}", wire_dtype, descriptions
        number = None if weight is None else checked_weight(weight)
        labels, parameters = [label for label, _ in labeled], [parameter for _, parameter in labeled]
        codec = None if wire_dtype is None else CODECS[wire_dtype]
        return cls(alike, forms, number, rule, labels, parameters, codec)


def checked_weight(weight: float | Tensor) -> float:
    """Return a weight as a number.

    Raises:
        TypeError: If it is not one number.
        ValueError: If it is not finite and >= 0.
    """
    number = float(as_weight(weight, torch.device("cpu")))
    if not is_number(number):
        raise ValueError(
            f"weight {number!r} is not a finite number >= 0: pass the number of loss terms behind the rank's gradient"
        )
    return number


def agreed_factors(rule: Rule, agreed: Agreed) -> list[float]:
    """Return what the reduction multiplies each rank's gradient by, where nodes may be unknown if they do not matter.

    Raises:
        ValueError: If they do, or the rule fails.
    """
    weights = [1.0 if weight is None else weight for weight in agreed.weights]
    nodes, count = [node for node in agreed.nodes if node is not None], len(weights)
    # One node, a node for each rank, and uneven nodes, which some rules tell apart only from the other two.
    unknown = ([0] * count, range(count), [0] * (count - 1) + [1])
    factors, *others = (rank_factors(rule, layout, weights) for layout in ([nodes] if len(nodes) == count else unknown))
    if any(other != factors for other in others):
        ranks = [rank for rank, node in enumerate(agreed.nodes) if node is None]
        raise ValueError(
            f"reduction={rule.name!r} depends on nodes, and no environment variable of the launcher tells the node"
            f" {on_ranks(ranks)}. Set NODE_RANK there to the index of the node, from 0."
        )
    return factors


def _require_weights(rule: Rule, weights: Sequence[float | None]) -> None:
    absent = [rank for rank, weight in enumerate(weights) if weight is None]
    if 0 < len(absent) < len(weights):
        present = [rank for rank, weight in enumerate(weights) if weight is not None]
        raise ValueError(
            f"weight= was given {on_ranks(present)} but not {on_ranks(absent)}:"
            " pass it on all ranks, 0 where a rank has no loss term, or on none."
        )
    if rule.uses_weight and absent:
        raise ValueError(
            f"reduction={rule.name!r}, {rule.formula}, needs a weight: pass weight= on every rank,"
            " the number of loss terms (samples, tokens, ...) behind its gradient."
        )


def _difference(alike: Sequence[tuple[str, str | None, list[str]]]) -> str:
    """Return the first thing that the ranks do not have in common."""
    reductions, wire_dtypes, descriptions = zip(*alike, strict=True)
    of_parameters = zip(*descriptions, strict=False)  # how many there are is compared first
    compared = [
        ("reduction= differs between ranks", "Pass the same", reductions),
        ("wire_dtype= differs between ranks", "Pass the same", tuple(map(repr, wire_dtypes))),
        (
            "the ranks pass different numbers of parameters",
            "Pass the same parameters",
            tuple(f"{len(of_rank)} parameters" for of_rank in descriptions),
        ),
        *(
            ("the ranks pass different parameters", "Pass the same parameters in the same order", texts)
            for texts in of_parameters
        ),
    ]
    what, advice, values = next(one for one in compared if len(set(one[-1])) > 1)
    return f"{what}: {by_value(values)}. {advice} on all ranks."


def _agreed_forms(mine: _Gradients, details: Sequence[list[int]]) -> list[_Form]:
    """Return the form that each gradient has on the ranks where it is not None."""
    codes = mine.details
    if any(of_rank is not mine.details for of_rank in details):
        codes = []
        for label, of_ranks in zip(mine.labels, zip(*details, strict=True), strict=True):
            codes.append(max(of_ranks))
            if set(of_ranks) - {_CODES[None], codes[-1]}:
                raise ValueError(
                    f"the gradient of {label} differs between ranks:"
                    f" {by_value(_form_text(_FORMS[code]) for code in of_ranks)}."
                    " It must have one layout and one dtype wherever it is not None."
                )
    return [_FORMS[code] for code in codes]


def _labeled(source: nn.Module | Iterable[Tensor]) -> list[tuple[str, Tensor]]:
    """Return every parameter once, with what messages call it."""
    if isinstance(source, nn.Module):
        _refuse_wrapped(source)
        return [(f"parameter {name!r}", parameter) for name, parameter in source.named_parameters()]
    if not isinstance(source, Iterable):
        raise TypeError(f"pass a module or its parameters; got {source!r} of type {type(source).__name__}")
    found: dict[int, tuple[str, Tensor]] = {}
    for index, tensor in enumerate([source] if isinstance(source, Tensor) else source):  # not its rows
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"parameter {index} is {tensor!r} of type {type(tensor).__name__}:"
                " pass a module, or an iterable of parameters such as model.parameters()"
            )
        found.setdefault(id(tensor), (f"parameter {index}", tensor))
    return list(found.values())


def _refuse_wrapped(module: nn.Module) -> None:
    # A module of that type exists only if its package has been imported, which is slow.
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    reasons: dict[Any, str] = {
        DistributedDataParallel: "is a DistributedDataParallel, which has reduced the gradients during backward()"
        " already. Leave out average_gradients; or pass the wrapped `.module` if every backward() runs within"
        " no_sync()",
        sharded: "is a FullyShardedDataParallel, whose ranks hold different parts of gradients that it has reduced"
        " already. Leave out average_gradients",
    }
    for (name, submodule), (kind, reason) in product(module.named_modules(), reasons.items()):
        if isinstance(submodule, kind):
            raise TypeError(f"the {f'submodule {name!r}' if name else 'module'} {reason}")


def _form_of(label: str, parameter: Tensor, device_types: Sequence[str] | None, wire_dtype: str | None) -> _Form:
    """Return the form of a parameter's gradient, after checking that it can be reduced."""
    if type(parameter) is not nn.Parameter:
        _refuse_special(label, parameter)
    gradient = parameter.grad
    if gradient is None:
        return None
    named = f"the gradient of {label}"
    if type(gradient) is not Tensor:
        _refuse_special(named, gradient)
    if gradient.layout not in (torch.strided, torch.sparse_coo):
        raise ValueError(f"{named} is {gradient.layout}; only torch.strided and torch.sparse_coo can be reduced")
    if gradient.dtype not in SUM_DTYPES:
        raise ValueError(f"{named} is {gradient.dtype}; only {', '.join(map(str, SUM_DTYPES))} can be reduced")
    if device_types is not None and gradient.device.type not in device_types:
        raise ValueError(
            f"{named} is on {gradient.device.type}, but the process group serves"
            f" {', '.join(device_types)}. Move the module, or initialize the group with a backend for that device"
        )
    if gradient.is_sparse:
        return gradient.dtype, gradient.sparse_dim()
    if wire_dtype is not None:
        refuse_double_precision(wire_dtype, label, gradient.dtype)
    return gradient.dtype, 0


def _refuse_special(label: str, tensor: Tensor) -> None:
    if any(base.__name__ == "DTensor" for base in type(tensor).__mro__):
        raise TypeError(
            f"{label} is a DTensor, whose placements say how it is reduced. Reduce it along its device mesh,"
            " or pass ordinary tensors"
        )
    if nn.parameter.is_lazy(tensor):
        raise ValueError(f"{label} has no shape yet: run the lazy module's first forward before reducing gradients")
    if not (tensor.is_leaf or tensor.retains_grad):
        raise ValueError(f"{label} is no leaf, so backward() leaves it without .grad: pass parameters, not results")


def _form_text(form: _Form) -> str:
    if form is None:
        return "None"
    dtype, dimensions = form
    layout = f"sparse with {dimensions} sparse dimension{'s' * (dimensions > 1)}" if dimensions else "dense"
    return f"{layout}, {dtype}"


def _reduce(
    world: World, parameters: Sequence[Tensor], forms: Sequence[_Form], factor: float, codec: Codec | None
) -> None:
    present = [(parameter, *form) for parameter, form in zip(parameters, forms, strict=True) if form is not None]
    gradients = [_writable(parameter, dtype, sparse_dim) for parameter, dtype, sparse_dim in present]
    for (parameter, *_), gradient in zip(present, gradients, strict=True):
        parameter.grad = gradient
    if world.size == 1 and factor == 1:
        return
    _sum_dense([gradient for gradient in gradients if not gradient.is_sparse], factor, world, codec)
    totals = iter(sum_sparse([gradient for gradient in gradients if gradient.is_sparse], world, factor))
    for parameter, _, sparse_dim in present:
        if sparse_dim > 0:
            parameter.grad = next(totals)


def _writable(parameter: Tensor, dtype: torch.dtype, sparse_dim: int) -> Tensor:
    """Return the parameter's gradient: a zero one where it has none, a copy where it cannot be written in place."""
    gradient = parameter.grad
    if gradient is None:
        return zero_gradient(parameter, sparse_dim, dtype)
    if gradient.is_sparse or _is_writable(gradient):
        return gradient
    return gradient.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _is_writable(gradient: Tensor) -> bool:
    """Return whether every element has a memory of its own (not so after `expand`) that holds its value itself."""
    reach = 1
    for stride, size in sorted(zip(gradient.stride(), gradient.shape, strict=True)):
        if size > 1 and stride < reach:
            return False
        reach += stride * max(size - 1, 0)
    return not (gradient.is_conj() or gradient.is_neg())


def _sum_dense(gradients: Sequence[Tensor], factor: float, world: World, codec: Codec | None) -> None:
    """Replace every gradient by `sum over ranks of factor * gradient`, in place.

    Args:
        gradients: Strided, no two elements in one memory, none lazily conjugated. The same shapes and dtypes, in the
            same order, on all ranks; strides may differ.
        factor: What this rank's gradients are multiplied by; 0 discards them, whatever they hold.
        world: The ranks.
        codec: What numbers are sent by, where all are summed in float32; None for the type of the sum.
    """
    storages = Counter(gradient.untyped_storage().data_ptr() for gradient in gradients)
    # Of each bucket the memory that is summed, and its parts in the shapes of the gradients if it is not theirs.
    buckets = [(members, *_flat(members, factor, storages)) for members in _partition(gradients)]
    if world.group is not None:
        _sum_over(world.group, world, [flat for _, flat, _ in buckets], codec)
    for members, _, views in buckets:
        if views:
            copy_each(members, views)


def _flat(members: list[Tensor], factor: float, storages: Mapping[int, int]) -> tuple[Tensor, list[Tensor]]:
    first, dtype, views = members[0], SUM_DTYPES[members[0].dtype], []
    alone = len(members) == 1 and dtype == first.dtype and first.is_contiguous()
    flat = first
    # What holds more than one gradient could be read half-summed, were it reduced in place.
    if not alone or storages[first.untyped_storage().data_ptr()] > 1:
        flat = torch.empty(sum(gradient.numel() for gradient in members), dtype=dtype, device=first.device)
        views = views_of(flat, members)
        copy_each(views, members)
    if factor == 0:
        flat.zero_()
    elif factor != 1:
        as_real(flat).mul_(factor)
    return flat, views


def _sum_over(group: dist.ProcessGroup, world: World, flats: Sequence[Tensor], codec: Codec | None) -> None:
    if codec is None:
        for work in [dist.all_reduce(as_real(flat), group=group, async_op=True) for flat in flats]:
            work.wait()
        return
    hop = Hop(tuple(range(world.size)), world.rank, narrow=True)
    exchange = Exchange(Route((hop,)), codec, {hop.ranks: group})
    for flat in flats:
        exchange.sum_(flat)


def _partition(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Cut gradients into buckets. Depends on nothing but their order, shapes, dtypes and which share a device."""
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for gradient in gradients:
        dtype = SUM_DTYPES[gradient.dtype]
        size = gradient.numel() * dtype.itemsize
        if size >= SINGLE_BYTES:
            yield [gradient]
        elif size > 0:
            members, used = open_buckets.get((dtype, gradient.device), ([], 0))
            if members and used + size > BUCKET_BYTES:
                yield members
                members, used = [], 0
            members.append(gradient)
            open_buckets[dtype, gradient.device] = members, used + size
    yield from (members for members, _ in open_buckets.values())
