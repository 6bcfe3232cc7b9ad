"""What one rank measures of an optimizer step: its own gradient, before the reduction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType

import torch
from torch import Tensor, nn

from lightning_gradavg.reduction.sums import SUM_DTYPES, as_real

__all__ = ["LocalGradients", "squared_norm"]


class LocalGradients:
    """Sees every parameter's accumulated gradient during a backward, before DDP takes it to the other ranks.

    A hook that torch runs within `AccumulateGrad` comes before DDP's own, which runs after it. Nothing is changed.

    Args:
        parameters: The parameters.
        copies: Whether to keep copies, for the angle to the reduced gradient; without, only norms are kept.
        accumulated: Whether the parameters hold the gradients of earlier micro-batches of the window.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, copies: bool, accumulated: bool) -> None:
        self._parameters = parameters
        self._copies = copies
        self._accumulated = accumulated
        self._seen: dict[nn.Parameter, Tensor] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> None:
        if self._accumulated:
            # For the parameters that this backward does not reach.
            for parameter in self._parameters:
                self._see(parameter)
        self._handles = [parameter.register_post_accumulate_grad_hook(self._see) for parameter in self._parameters]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _see(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is not None:
            gradient = parameter.grad.detach()
            self._seen[parameter] = gradient.clone() if self._copies else squared_norm([gradient])

    def squared_norm(self, device: torch.device) -> Tensor:
        """Return the squared norm over all parameters, a 0-dim float64 tensor on `device`."""
        if self._copies:
            return squared_norm(self._seen.values(), device)
        return _total(self._seen.values(), device)

    def product(self, device: torch.device) -> Tensor:
        """Return the inner product of the copies with the gradients that the parameters have now, a float64 tensor."""
        pairs = ((local, parameter.grad) for parameter, local in self._seen.items())
        return _total((_product(local, now) for local, now in pairs if now is not None), device)


def squared_norm(gradients: Iterable[Tensor | None], device: torch.device | None = None) -> Tensor:
    """Return the squared norm of all gradients, a 0-dim float64 tensor; half precision is measured in float32."""
    return _total((_norm(gradient).double().square() for gradient in gradients if gradient is not None), device)


def _total(values: Iterable[Tensor], device: torch.device | None) -> Tensor:
    found = [value.to(device) for value in values]
    return torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64, device=device)


def _norm(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=SUM_DTYPES[gradient.dtype])
    return norm


def _product(one: Tensor, other: Tensor) -> Tensor:
    if one.is_sparse or other.is_sparse:
        return (one * other).coalesce().values().double().sum()
    one, other = (as_real(tensor.to(SUM_DTYPES[tensor.dtype])).reshape(-1) for tensor in (one, other))
    return torch.dot(one, other).double()
