"""What one rank measures of an optimizer step: its own gradient, before the reduction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType

import torch
from torch import Tensor, nn

from lightning_gradavg.reduction.sums import SUM_DTYPES

__all__ = ["LocalGradients", "squared_norm"]


class LocalGradients:
    """Measures every parameter's accumulated gradient during a backward, before DDP reduces it.

    Torch runs these hooks within `AccumulateGrad`, and DDP's after it. `accumulated` says whether the parameters hold
    gradients of earlier micro-batches.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, accumulated: bool) -> None:
        self._parameters, self._accumulated = parameters, accumulated
        self._squares: dict[Tensor, Tensor] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> None:
        for parameter in self._parameters:
            if self._accumulated:  # for the parameters that this backward does not reach
                self._see(parameter)
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._see))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _see(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._squares[parameter] = squared_norm([parameter.grad.detach()])

    def squared_norm(self, device: torch.device) -> Tensor:
        """Return the squared norm over all parameters, a 0-dim float64 tensor on `device`."""
        return _total(self._squares.values(), device)


def squared_norm(gradients: Iterable[Tensor | None], device: torch.device | None = None) -> Tensor:
    """Return the squared norm of all gradients, a 0-dim float64 tensor; half precision is measured in float32."""
    dense = (each.coalesce().values() if each.is_sparse else each for each in gradients if each is not None)
    norms = (torch.linalg.vector_norm(each, dtype=SUM_DTYPES[each.dtype]) for each in dense)
    return _total((norm.double().square() for norm in norms), device)


def _total(values: Iterable[Tensor], device: torch.device | None) -> Tensor:
    found = [value.to(device) for value in values]
    return torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64, device=device)
