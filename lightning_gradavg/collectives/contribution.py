"""What a rank brings to a reduction, each part checked on its own before the ranks compare."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg.collectives.agreement import Header
from lightning_gradavg.collectives.buckets import WIRE_DTYPES
from lightning_gradavg.place import node_from_environment
from lightning_gradavg.rules import Rule, RuleFunction, resolve_rule
from lightning_gradavg.weights import as_weight, weight_problem
from lightning_gradavg.wire.codecs import CODECS

__all__ = ["ABSENT", "STATELESS", "Contribution", "form_dtype", "form_sparse_dim", "form_text"]

STATELESS = tuple(name for name, codec in CODECS.items() if not codec.lossy)
"""The keys of `CODECS` that need no memory of what earlier steps did not send."""

ABSENT = 0
"""The form of a gradient that is None."""

_DTYPES = tuple(WIRE_DTYPES)
# Another form is 1 + this many times the index of its dtype + its number of sparse dimensions, 0 for a dense gradient.
_SPARSE_DIMENSIONS = 64


@dataclass(frozen=True)
class Contribution:
    """What this rank brings to a reduction, each part checked.

    Attributes:
        rule: The reduction rule.
        labels: What messages call each parameter.
        parameters: The parameters, each once.
        descriptions: Label, shape, dtype and device of each parameter: what must be equal on all ranks.
        forms: The form of each parameter's gradient: absent, or its dtype and number of sparse dimensions.
        node: The node of this rank, or None if it is not known.
        weight: The weight, or None if it was not given.
        wire_dtype: What numbers are sent as, a member of `STATELESS`; None for the type that they are summed in.
    """

    rule: Rule
    labels: list[str]
    parameters: list[Tensor]
    descriptions: list[str]
    forms: list[int]
    node: int | None
    weight: float | None
    wire_dtype: str | None

    @classmethod
    def of(
        cls,
        module_or_parameters: nn.Module | Iterable[Tensor],
        reduction: str | RuleFunction | Rule,
        weight: float | Tensor | None,
        device_types: Sequence[str] | None,
        wire_dtype: str | None = None,
    ) -> Contribution:
        """Check the arguments of a reduction and the gradients.

        Args:
            module_or_parameters: The module or the parameters.
            reduction: The reduction rule, by name or not.
            weight: The weight in whatever type, or None.
            device_types: Where gradients may be; None for anywhere.
            wire_dtype: What numbers are to be sent as, or None.

        Raises:
            TypeError: If an argument or a tensor is of a type that cannot be reduced.
            ValueError: If one has a value that cannot be reduced.
        """
        rule = resolve_rule(reduction)
        _check_wire(wire_dtype)
        labels, parameters, descriptions, forms = [], [], [], []
        devices: dict[torch.device, int] = {}
        for label, parameter in _labeled(module_or_parameters):
            forms.append(_form_of(label, parameter, device_types))
            if wire_dtype is not None:
                _refuse_double_precision(label, forms[-1], wire_dtype)
            labels.append(label)
            parameters.append(parameter)
            # Which parameters share a device decides which share a bucket.
            ordinal = devices.setdefault(parameter.device, len(devices))
            descriptions.append(
                f"{label} of shape {tuple(parameter.shape)}, {parameter.dtype} on {parameter.device.type}"
                + (f", device {ordinal} of the rank" if ordinal else "")
            )
        number = None if weight is None else _checked_weight(weight)
        return cls(rule, labels, parameters, descriptions, forms, node_from_environment(), number, wire_dtype)

    @property
    def reduction(self) -> str:
        """The rule in words."""
        return f"{self.rule.name!r}, {self.rule.formula}"

    @property
    def header(self) -> Header:
        """What the other ranks need to know of this contribution, as long as they bring the like."""
        parameters = _digest("\n".join([self.reduction, str(self.wire_dtype), *self.descriptions]))
        return Header(False, parameters, _digest(str(self.forms)), self.node, self.weight)


def form_text(form: int) -> str:
    """Return a gradient's form in words."""
    if form == ABSENT:
        return "None"
    dimensions = form_sparse_dim(form)
    layout = f"sparse with {dimensions} sparse dimension{'s' * (dimensions > 1)}" if dimensions else "dense"
    return f"{layout}, {form_dtype(form)}"


def form_dtype(form: int) -> torch.dtype:
    """Return the dtype of a gradient of that form."""
    return _DTYPES[(form - 1) // _SPARSE_DIMENSIONS]


def form_sparse_dim(form: int) -> int:
    """Return the number of sparse dimensions of a gradient of that form, 0 if it is dense."""
    return (form - 1) % _SPARSE_DIMENSIONS


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _check_wire(wire_dtype: str | None) -> None:
    if wire_dtype is None or wire_dtype in STATELESS:
        return
    accepted = f"Use {', '.join(map(repr, STATELESS))}, or None to send gradients in their own type"
    if wire_dtype in CODECS:
        raise ValueError(
            f"wire_dtype={wire_dtype!r} has to keep what a step did not send and add it to the next one, and a function"
            f" keeps nothing between calls. {accepted}; GradAvgStrategy(wire_dtype={wire_dtype!r}) keeps it"
        )
    raise ValueError(f"wire_dtype={wire_dtype!r} is not a type that gradients can be sent as. {accepted}")


def _refuse_double_precision(label: str, form: int, wire_dtype: str) -> None:
    # Sparse gradients are sent as they are.
    if form == ABSENT or form_sparse_dim(form) > 0:
        return
    if form_dtype(form) in (torch.float64, torch.complex128):
        raise ValueError(
            f"wire_dtype={wire_dtype!r} would round the gradient of {label}, which is {form_dtype(form)}, to a quarter"
            " of its digits or fewer. Leave wire_dtype out, or train in float32"
        )


def _checked_weight(weight: float | Tensor) -> float:
    device = weight.device if isinstance(weight, Tensor) else torch.device("cpu")
    number = float(as_weight(weight, device))
    problem = weight_problem(number)
    if problem is not None:
        raise ValueError(f"{problem}: pass the number of loss terms behind the rank's gradient")
    return number


def _labeled(source: nn.Module | Iterable[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter once, with what messages call it."""
    if isinstance(source, nn.Module):
        _refuse_wrapped(source)
        for name, parameter in source.named_parameters():
            yield f"parameter {name!r}", parameter
        return
    if not isinstance(source, Iterable):
        raise TypeError(f"pass a module or its parameters; got {source!r} of type {type(source).__name__}")
    alone = isinstance(source, Tensor)  # iterating over it would yield its rows
    seen = set()
    for index, tensor in enumerate([source] if alone else source):
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
        return ABSENT
    if type(gradient) is not Tensor:
        _refuse_special(f"the gradient of {label}", gradient)
    if gradient.layout not in (torch.strided, torch.sparse_coo):
        raise ValueError(
            f"the gradient of {label} is {gradient.layout}; only torch.strided and torch.sparse_coo can be reduced"
        )
    if gradient.dtype not in WIRE_DTYPES:
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
