"""A micro-batch's loss and weight, and losses whose gradient is multiplied when their backward begins."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["MicroBatch", "WeighedLoss", "sparse_weights", "zero_loss"]


class MicroBatch(NamedTuple):
    """What a rank knows about one micro-batch before its backward.

    Attributes:
        weight: The number of loss terms behind the loss; 1 under a rule without weights.
        explicit: Whether the user gave the weight. If not, it is the number of samples.
        problem: Why the weight cannot be used, or None. All ranks raise it together.
        absent: Whether the loss counts under no rule: its backward only keeps this rank in step with the others.
        without_loss: Whether it is absent because `training_step` returned no loss.
        samples: The number of samples, if the step is observed and they are known.
        loss: The loss as the user computed it, without its graph, if the step is observed.
    """

    weight: float
    explicit: bool = False
    problem: str | None = None
    absent: bool = False
    without_loss: bool = False
    samples: float | None = None
    loss: Tensor | None = None

    @property
    def counts(self) -> bool:
        """Whether the gradient adds anything to the reduced one."""
        if self.absent or self.problem is not None:
            return False
        return self.weight != 0


class WeighedLoss:
    """A loss whose gradient is multiplied by `factor` at the root of its backward; its value stays as it is.

    Attributes:
        value: The loss to run the backward of.
        micro_batch: What is known of it.
        factor: Set before the backward, when the totals of the window are known.
    """

    def __init__(
        self,
        loss: Tensor,
        micro_batch: MicroBatch,
        *,
        multiplies: bool = True,
        on_backward: Callable[[WeighedLoss], None] | None = None,
    ) -> None:
        """Make a loss.

        Args:
            loss: What the user returned, with its graph.
            micro_batch: What is known of it.
            multiplies: Whether a factor may be set. If not, the user's graph stays as it is.
            on_backward: Called with this loss when its backward begins; it may set the factor.
        """
        self.micro_batch = micro_batch
        self.factor = 1.0
        self._on_backward = on_backward
        self.value = loss
        if not multiplies:
            return
        # A node of its own: a hook on the node of the user's loss would also see other backwards through it.
        self.value = loss.clone()
        if self.value.grad_fn is not None:
            self.value.grad_fn.register_prehook(self._multiply)

    def _multiply(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if self._on_backward is not None:
            self._on_backward(self)
        if gradient is None or self.factor == 1:
            return gradients
        # The product with a Python number keeps the dtype, also of a scaled loss.
        return (gradient * self.factor,)


def sparse_weights(module: nn.Module) -> dict[int, Tensor]:
    """Return the parameters of a module with sparse gradients, by `id`."""
    found: dict[int, Tensor] = {}
    for submodule in module.modules():
        if isinstance(submodule, (nn.Embedding, nn.EmbeddingBag)) and submodule.sparse:
            found[id(submodule.weight)] = submodule.weight
    return found


class _ZeroGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sparse: Container[int], *parameters: Tensor) -> Tensor:
        ctx.like = [(parameter, id(parameter) in sparse) for parameter in parameters]
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor] = []
        for parameter, is_sparse in ctx.like:
            gradients.append(_no_rows(parameter) if is_sparse else torch.zeros_like(parameter))
        return None, *gradients


def _no_rows(parameter: Tensor) -> Tensor:
    """Return a sparse gradient without rows."""
    values = parameter.new_empty((0, *parameter.shape[1:]))
    indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    # The invariants hold by construction; checking them would wait for the device.
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def zero_loss(parameters: Sequence[Tensor], sparse: Container[int]) -> Tensor:
    """Return a loss of 0 that gives every trained parameter a zero gradient, sparse for each `id` in `sparse`."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    loss: Tensor = _ZeroGradients.apply(sparse, *trained)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return loss
