"""`average_gradients`: the reduction rules for a plain PyTorch loop, in place after `backward()`.

A call has two steps. Every rank first tells the others, in one small exchange, what it is about to reduce: whether it
met a problem, digests of its parameters and gradients, its node and its weight. Whatever does not fit together raises
the same error on all ranks, before any gradient has changed. Then the gradients are summed, in flat buckets of which
all are in flight at once.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg.lightning_internals import copy_each, views_of
from lightning_gradavg.place import node_from_environment
from lightning_gradavg.ranks import Header, World, by_value, digest, on_ranks, ranks_by_value
from lightning_gradavg.reduction.combine import is_number, rank_factors
from lightning_gradavg.reduction.sums import SUM_DTYPES, as_real, sum_sparse, zero_gradient
from lightning_gradavg.reduction.window import as_weight
from lightning_gradavg.rules import Rule, RuleFunction, resolve_rule
from lightning_gradavg.wire.codecs import CODECS, Codec, refuse_double_precision
from lightning_gradavg.wire.exchange import Exchange
from lightning_gradavg.wire.route import Hop, Route

__all__ = ["agreed_factors", "average_gradients", "checked_weight"]

_ABSENT = 0
_DTYPES = tuple(SUM_DTYPES)
# A gradient's form is 0 if it is None, else 1 + this many times the index of its dtype + its sparse dimensions.
_SPARSE_DIMENSIONS = 64

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
            docs/communication.md.

    Raises:
        ValueError: On all ranks alike and with the gradients untouched, if an argument is not usable on some rank, or
            if the ranks' arguments, parameters or gradients do not fit together. On this process alone, if it is not
            a member of `group`.
    """
    world = World.of(group)
    mine, error = None, None
    try:
        mine = _Contribution.of(module_or_parameters, reduction, weight, world.device_types, wire_dtype)
    except Exception as failure:  # noqa: BLE001  # whatever this rank meets: the others would wait for it for ever
        error = failure
    header = mine.header if mine is not None else Header(failed=True)
    headers = [Header.unpack(row) for row in world.gather_integers(header.pack())]
    if mine is None or any(header.failed for header in headers):
        raise ValueError(_problems(world, error)) from error
    if len({header.call for header in headers}) > 1:
        raise ValueError(_difference(world, mine))
    factor = _factors_for_loss(mine.rule, headers)[world.rank]
    forms = mine.forms if len({header.forms for header in headers}) == 1 else _agreed_forms(world, mine)
    codec = None if mine.wire_dtype is None else CODECS[mine.wire_dtype]
    _reduce(world, mine.parameters, forms, factor, codec)


@dataclass(frozen=True)
class _Contribution:
    """What this rank brings to a reduction, each part checked.

    Attributes:
        rule: The reduction rule.
        labels: What messages call each parameter.
        parameters: The parameters, each once.
        descriptions: Label, shape, dtype and device of each parameter: what must be equal on all ranks.
        forms: The form of each parameter's gradient: absent, or its dtype and number of sparse dimensions.
        weight: The weight, or None if it was not given.
        wire_dtype: What numbers are sent as; None for the type that they are summed in.
    """

    rule: Rule
    labels: list[str]
    parameters: list[Tensor]
    descriptions: list[str]
    forms: list[int]
    weight: float | None
    wire_dtype: str | None

    @classmethod
    def of(
        cls,
        module_or_parameters: nn.Module | Iterable[Tensor],
        reduction: str | RuleFunction | Rule,
        weight: float | Tensor | None,
        device_types: Sequence[str] | None,
        wire_dtype: str | None,
    ) -> _Contribution:
        """Check the arguments of a reduction and the gradients."""
        rule = resolve_rule(reduction)
        if wire_dtype is not None and wire_dtype not in CODECS:
            raise ValueError(
                f"wire_dtype={wire_dtype!r} is not a type that gradients can be sent as. Use"
                f" {', '.join(map(repr, CODECS))}, or None to send gradients in their own type"
            )
        labels, parameters, descriptions, forms = [], [], [], []
        devices: dict[torch.device, int] = {}
        for label, parameter in _labeled(module_or_parameters):
            forms.append(_form_of(label, parameter, device_types))
            if wire_dtype is not None and forms[-1] != _ABSENT and _sparse_dim(forms[-1]) == 0:
                refuse_double_precision(wire_dtype, label, _dtype(forms[-1]))
            labels.append(label)
            parameters.append(parameter)
            # Which parameters share a device decides which share a bucket.
            ordinal = devices.setdefault(parameter.device, len(devices))
            descriptions.append(
                f"{label} of shape {tuple(parameter.shape)}, {parameter.dtype} on {parameter.device.type}"
                + (f", device {ordinal} of the rank" if ordinal else "")
            )
        number = None if weight is None else checked_weight(weight)
        return cls(rule, labels, parameters, descriptions, forms, number, wire_dtype)

    @property
    def reduction(self) -> str:
        """The rule in words."""
        return f"{self.rule.name!r}, {self.rule.formula}"

    @property
    def header(self) -> Header:
        """What the other ranks need to know of this contribution, as long as they bring the like."""
        call = digest("\n".join([self.reduction, str(self.wire_dtype), *self.descriptions]))
        return Header(False, call, digest(str(self.forms)), node_from_environment(), self.weight)


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


def agreed_factors(rule: Rule, headers: Sequence[Header]) -> list[float]:
    """Return what the reduction multiplies each rank's gradient by, where nodes may be unknown if they do not matter.

    Raises:
        ValueError: If they do, or the rule fails.
    """
    weights = [1.0 if header.weight is None else header.weight for header in headers]
    unknown = [rank for rank, header in enumerate(headers) if header.node is None]
    if not unknown:
        return rank_factors(rule, [header.node or 0 for header in headers], weights)
    count = len(weights)
    # One node, a node for each rank, and uneven nodes, which some rules tell apart only from the other two.
    layouts = ([0] * count, range(count), [0] * (count - 1) + [1])
    one_node, *others = (rank_factors(rule, layout, weights) for layout in layouts)
    if any(other != one_node for other in others):
        raise ValueError(
            f"reduction={rule.name!r} depends on nodes, and no environment variable of the launcher tells the node"
            f" {on_ranks(unknown)}. Set NODE_RANK there to the index of the node, from 0."
        )
    return one_node


def _factors_for_loss(rule: Rule, headers: Sequence[Header]) -> list[float]:
    given = [header.weight is not None for header in headers]
    if any(given) and not all(given):
        present, absent = (
            [rank for rank, is_given in enumerate(given) if is_given is which] for which in (True, False)
        )
        raise ValueError(
            f"weight= was given {on_ranks(present)} but not {on_ranks(absent)}:"
            " pass it on all ranks, 0 where a rank has no loss term, or on none."
        )
    if rule.uses_weight and not any(given):
        raise ValueError(
            f"reduction={rule.name!r}, {rule.formula}, needs a weight: pass weight= on every rank,"
            " the number of loss terms (samples, tokens, ...) behind its gradient."
        )
    return agreed_factors(rule, headers)


def _problems(world: World, error: Exception | None) -> str:
    """Return what every rank that failed met, the same text on all ranks."""
    text = None
    if error is not None:
        text = str(error) if isinstance(error, (TypeError, ValueError)) else f"{type(error).__name__}: {error}"
    texts = ranks_by_value(world.gather_objects(text))
    found = (f"{on_ranks(ranks)}: {text}" for text, ranks in texts.items() if text is not None)
    return f"average_gradients cannot reduce, {'; '.join(found).rstrip('.')}."


def _difference(world: World, mine: _Contribution) -> str:
    """Return the first thing that the ranks do not have in common, the same text on all ranks."""
    gathered = world.gather_objects((mine.reduction, mine.wire_dtype, mine.descriptions))
    reductions, wire_dtypes, descriptions = zip(*gathered, strict=True)
    if len(set(reductions)) > 1:
        return f"reduction= differs between ranks: {by_value(reductions)}. Pass the same on all ranks."
    if len(set(wire_dtypes)) > 1:
        return f"wire_dtype= differs between ranks: {by_value(map(repr, wire_dtypes))}. Pass the same on all ranks."
    if len(set(map(len, descriptions))) > 1:
        numbers = by_value(f"{len(of_rank)} parameters" for of_rank in descriptions)
        return f"the ranks pass different numbers of parameters: {numbers}. Pass the same parameters on all ranks."
    different = next(of_ranks for of_ranks in zip(*descriptions, strict=True) if len(set(of_ranks)) > 1)
    return (
        f"the ranks pass different parameters: {by_value(different)}."
        " Pass the same parameters in the same order on all ranks."
    )


def _agreed_forms(world: World, mine: _Contribution) -> list[int]:
    """Return the form that each gradient has on the ranks where it is not None."""
    agreed = []
    of_parameters = zip(*world.gather_integers(mine.forms), strict=True)
    for label, forms in zip(mine.labels, of_parameters, strict=True):
        present = set(forms) - {_ABSENT}
        if len(present) > 1:
            raise ValueError(
                f"the gradient of {label} differs between ranks: {by_value(map(_form_text, forms))}."
                " It must have one layout and one dtype wherever it is not None."
            )
        agreed.append(max(forms))
    return agreed


def _labeled(source: nn.Module | Iterable[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter once, with what messages call it."""
    if isinstance(source, nn.Module):
        _refuse_wrapped(source)
        yield from ((f"parameter {name!r}", parameter) for name, parameter in source.named_parameters())
        return
    if not isinstance(source, Iterable):
        raise TypeError(f"pass a module or its parameters; got {source!r} of type {type(source).__name__}")
    seen: set[int] = set()
    for index, tensor in enumerate([source] if isinstance(source, Tensor) else source):  # not its rows
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"parameter {index} is {tensor!r} of type {type(tensor).__name__}:"
                " pass a module, or an iterable of parameters such as model.parameters()"
            )
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield f"parameter {index}", tensor


def _refuse_wrapped(module: nn.Module) -> None:
    # A module of that type exists only if its package has been imported, which is slow.
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    for name, submodule in module.named_modules():
        label = f"the submodule {name!r}" if name else "the module"
        if isinstance(submodule, DistributedDataParallel):
            raise TypeError(
                f"{label} is a DistributedDataParallel, which has reduced the gradients during backward() already."
                " Leave out average_gradients; or pass the wrapped `.module` if every backward() runs within no_sync()"
            )
        if isinstance(submodule, sharded):
            raise TypeError(
                f"{label} is a FullyShardedDataParallel, whose ranks hold different parts of gradients that it has"
                " reduced already. Leave out average_gradients"
            )


def _form_of(label: str, parameter: Tensor, device_types: Sequence[str] | None) -> int:
    """Return the form of a parameter's gradient, after checking that it can be reduced."""
    if type(parameter) is not nn.Parameter:
        _refuse_special(label, parameter)
    gradient = parameter.grad
    if gradient is None:
        return _ABSENT
    if type(gradient) is not Tensor:
        _refuse_special(f"the gradient of {label}", gradient)
    if gradient.layout not in (torch.strided, torch.sparse_coo):
        raise ValueError(
            f"the gradient of {label} is {gradient.layout}; only torch.strided and torch.sparse_coo can be reduced"
        )
    if gradient.dtype not in SUM_DTYPES:
        raise ValueError(
            f"the gradient of {label} is {gradient.dtype}; only {', '.join(map(str, _DTYPES))} can be reduced"
        )
    if device_types is not None and gradient.device.type not in device_types:
        raise ValueError(
            f"the gradient of {label} is on {gradient.device.type}, but the process group serves"
            f" {', '.join(device_types)}. Move the module, or initialize the group with a backend for that device"
        )
    return 1 + _SPARSE_DIMENSIONS * _DTYPES.index(gradient.dtype) + (gradient.sparse_dim() if gradient.is_sparse else 0)


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


def _form_text(form: int) -> str:
    if form == _ABSENT:
        return "None"
    dimensions = _sparse_dim(form)
    layout = f"sparse with {dimensions} sparse dimension{'s' * (dimensions > 1)}" if dimensions else "dense"
    return f"{layout}, {_dtype(form)}"


def _dtype(form: int) -> torch.dtype:
    return _DTYPES[(form - 1) // _SPARSE_DIMENSIONS]


def _sparse_dim(form: int) -> int:
    return (form - 1) % _SPARSE_DIMENSIONS


def _reduce(
    world: World, parameters: Sequence[Tensor], forms: Sequence[int], factor: float, codec: Codec | None
) -> None:
    present = [(parameter, form) for parameter, form in zip(parameters, forms, strict=True) if form != _ABSENT]
    for parameter, form in present:
        parameter.grad = _writable(parameter, form)
    if world.size == 1 and factor == 1:
        return
    dense = [parameter.grad for parameter, form in present if _sparse_dim(form) == 0]
    sparse = [parameter for parameter, form in present if _sparse_dim(form) > 0]
    _sum_dense([gradient for gradient in dense if gradient is not None], factor, world, codec)
    totals = sum_sparse([parameter.grad for parameter in sparse if parameter.grad is not None], world, factor)
    for parameter, total in zip(sparse, totals, strict=True):
        parameter.grad = total


def _writable(parameter: Tensor, form: int) -> Tensor:
    """Return the parameter's gradient: a zero one where it has none, a copy where it cannot be written in place."""
    gradient = parameter.grad
    if gradient is None:
        return zero_gradient(parameter, _sparse_dim(form), _dtype(form))
    if gradient.is_sparse or _is_writable(gradient):
        return gradient
    return gradient.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _is_writable(gradient: Tensor) -> bool:
    """Return whether every element has a memory of its own (not so after `expand`) that holds its value itself."""
    if gradient.is_conj() or gradient.is_neg():
        return False
    reach = 1
    for stride, size in sorted(zip(gradient.stride(), gradient.shape, strict=True)):
        if size > 1 and stride < reach:
            return False
        reach += stride * max(size - 1, 0)
    return True


@dataclass
class _Bucket:
    """Gradients that are summed together.

    Attributes:
        gradients: Receive the sum; contiguous or not, of any dtype that widens to that of the bucket.
        flat: The memory that is summed over ranks.
        views: `flat`, cut into the shapes of `gradients`; empty where `flat` is the memory of the only gradient.
    """

    gradients: list[Tensor]
    flat: Tensor
    views: list[Tensor]

    @classmethod
    def of(cls, gradients: list[Tensor], factor: float, shared: set[int]) -> _Bucket:
        """Return a bucket of gradients times a factor; 0 discards them, whatever they hold."""
        first = gradients[0]
        dtype = SUM_DTYPES[first.dtype]
        alone = len(gradients) == 1 and dtype == first.dtype and first.is_contiguous()
        if alone and first.untyped_storage().data_ptr() not in shared:
            bucket = cls(gradients, first, [])
        else:
            flat = torch.empty(sum(gradient.numel() for gradient in gradients), dtype=dtype, device=first.device)
            bucket = cls(gradients, flat, views_of(flat, gradients))
            copy_each(bucket.views, gradients)
        if factor == 0:
            bucket.flat.zero_()
        elif factor != 1:
            as_real(bucket.flat).mul_(factor)
        return bucket


def _sum_dense(gradients: Sequence[Tensor], factor: float, world: World, codec: Codec | None) -> None:
    """Replace every gradient by `sum over ranks of factor * gradient`, in place.

    Args:
        gradients: Strided, no two elements in one memory, none lazily conjugated. The same shapes and dtypes, in the
            same order, on all ranks; strides may differ.
        factor: What this rank's gradients are multiplied by; 0 discards them, whatever they hold.
        world: The ranks.
        codec: What numbers are sent by, where all are summed in float32; None for the type of the sum.
    """
    shared, works = _shared_storages(gradients), []
    exchange = None
    if codec is not None and world.group is not None:
        hop = Hop(tuple(range(world.size)), world.rank, narrow=True)
        exchange = Exchange(Route((hop,)), codec, {hop.ranks: world.group})
    buckets = [_Bucket.of(members, factor, shared) for members in _partition(gradients)]
    for bucket in buckets if world.group is not None else ():
        if exchange is not None:
            exchange.sum_(bucket.flat)
        else:
            works.append(dist.all_reduce(as_real(bucket.flat), group=world.group, async_op=True))
    for work in works:
        work.wait()
    for bucket in buckets:
        if bucket.views:
            copy_each(bucket.gradients, bucket.views)


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


def _shared_storages(gradients: Sequence[Tensor]) -> set[int]:
    """Return the memory that holds more than one gradient: reduced in place, one could be read half-summed."""
    if all(gradient.nbytes < SINGLE_BYTES for gradient in gradients):
        return set()
    counts = Counter(gradient.untyped_storage().data_ptr() for gradient in gradients)
    return {address for address, count in counts.items() if count > 1}
