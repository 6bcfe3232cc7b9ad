"""A guard on the gradients of parameters: what bypasses the rule is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

__all__ = ["BypassGuard"]


class BypassGuard:
    """Raises a RuntimeError if a gradient reaches the model by a backward whose loss was not weighed.

    Such a gradient would be averaged, whatever the rule says. `GradAvgReducer` and the strategy for shards have a
    guard. `GradAvgStrategy` needs none: DDP's hook finds such a backward (`CommHook`).
    """

    def __init__(self, leaves: Iterable[nn.Parameter], rule_name: str, is_weighed: Callable[[], bool]) -> None:
        """Guard some parameters; `is_weighed` returns whether the backward of a weighed loss runs."""
        self._rule_name = rule_name
        self._is_weighed = is_weighed
        # After the gradient is accumulated: `torch.autograd.grad` accumulates none, and calls no such hook.
        self._handles = [leaf.register_post_accumulate_grad_hook(self._check) for leaf in leaves if leaf.requires_grad]

    def _check(self, leaf: Tensor) -> None:
        if not self._is_weighed():
            # A user who catches the error must not step on this gradient.
            leaf.grad = None
            raise RuntimeError(
                f"a gradient of shape {tuple(leaf.shape)} reached the model by a backward that bypassed"
                f" reduction={self._rule_name!r}, so it would be averaged. Call self.manual_backward,"
                " fabric.backward or GradAvgReducer.weigh(...).backward() with weight= instead of loss.backward()."
            )

    def remove(self) -> None:
        """Remove the hooks. Those of a `GradAvgReducer` stay as long as its model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
