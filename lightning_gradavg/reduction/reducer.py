"""`GradAvgReducer`: the rules for `DistributedDataParallel` in loops that are not those of Lightning's Trainer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg.lightning_internals import after_backward
from lightning_gradavg.place import Place, places_on_nodes
from lightning_gradavg.ranks import Contribution, World
from lightning_gradavg.reduction.average import needs_weight
from lightning_gradavg.reduction.weights import WeighedLoss, Weights
from lightning_gradavg.reduction.window import Accumulation
from lightning_gradavg.rules import RULES, Rule, RuleFunction, resolve_rule

__all__ = ["GradAvgReducer"]


def _refuse_loss() -> bool:
    raise RuntimeError("there is no model yet whose gradients are reduced: call register first")


class GradAvgReducer:
    """Scales losses so that `DistributedDataParallel` reduces their gradients by a rule, in any training loop.

    ::

        reducer = GradAvgReducer(reduction="weighted_mean")
        reducer.register(ddp_model)
        ...
        reducer.weigh(loss, weight=n).backward()

    The sums run over (rank, micro-batch) pairs. Micro-batches within `ddp_model.no_sync()` belong to the window that
    ends with the next backward outside of it. Don't divide the loss by the window's length. Each backward runs one
    weighed loss. A backward that raises discards its window, and keeps earlier gradients. Under the plain mean losses
    stay as they are, as with stock DDP, which you divide by the window's length.

    Args:
        reduction: A key of `lightning_gradavg.rules.RULES`, or a function `(place, weight) -> Share`, pure and the same
            on all ranks.

    Raises:
        ValueError: If `reduction` names no rule.
        TypeError: If `reduction` is neither a name nor a function.
    """

    def __init__(self, *, reduction: str | RuleFunction | Rule = "mean") -> None:
        self._rule = resolve_rule(reduction)
        self._is_mean = self._rule == RULES["mean"]
        self._divisor = None if self._is_mean else 1.0
        nothing = Accumulation(self._rule, (Place(),), World(), torch.device("cpu"), parameters=(), owned_by_user=True)
        self._use(nothing, _refuse_loss)
        # Models come and go, as in cross-validation; of each, whether DDP reduces after its last forward.
        self._models: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()

    def register(self, model: DistributedDataParallel, *, node: int | None = None) -> None:
        """Reduce the gradients of a model by the rule from now on. A collective operation.

        You can register several models, such as those of a GAN. One loss may reach only some of them.

        Args:
            model: The wrapped model.
            node: The index of this process's node; the default comes from the launcher.

        Raises:
            TypeError: If the model is not wrapped.
            ValueError: If it cannot be served, or the ranks' arguments differ.
        """
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"the model must be a DistributedDataParallel, got {type(model).__name__}. Wrap the model"
                " first; or call lightning_gradavg.average_gradients after the backward of one that is not wrapped."
            )
        if model.static_graph and not self._is_mean:
            raise ValueError(
                "static_graph=True makes DDP treat its first backward as every step's, which those within a window"
                " are not. Leave it out, or use lightning_gradavg.GradAvgStrategy with Lightning's Trainer."
            )
        world, rule = World.of(model.process_group), self._rule
        if self._models and world != self._accumulation.world:
            raise ValueError("the models of one reducer are reduced over one process group: use a reducer for each")
        equal = [f"reduction={rule.name!r}, {rule.formula}"]
        _, agreed = world.agree(
            "GradAvgReducer cannot reduce", lambda: Contribution(equal, node=rule.node if node is None else node)
        )
        # Once each: models may share some.
        parameters = dict.fromkeys(one for each in [*self._models, model] for one in each.parameters())
        frozen = [*self._accumulation.frozen, *(one for one in model.parameters() if not one.requires_grad)]
        own = Accumulation(
            *(rule, places_on_nodes(agreed.nodes), world, next(model.parameters()).device),
            parameters=list(parameters),
            owned_by_user=True,
            frozen=[one for one in frozen if one in parameters and world.size > 1],
            guards=not self._is_mean,
            compares=not self._is_mean,
            afterwards=True,
        )
        self.watch(model, own, self._reduces_next)

    def watch(self, model: nn.Module, accumulation: Accumulation, ends_window: Callable[[], bool]) -> None:
        """Weigh the losses of a model of any engine from its next forward on."""
        self._accumulation.close()
        self._use(accumulation, ends_window)
        self._models[model] = True
        model.register_forward_pre_hook(self._on_forward)

    def _use(self, accumulation: Accumulation, ends_window: Callable[[], bool]) -> None:
        self._accumulation, self._ends_window = accumulation, ends_window
        self._weights = Weights(self._rule, accumulation.device, warnings.warn, lambda _: None)

    def _on_forward(self, model: Any, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._models[model] = getattr(model, "require_backward_grad_sync", True)

    def weigh(
        self,
        loss: Tensor | Mapping[str, Tensor],
        *,
        weight: Any = None,
        divided_by: float | None = None,
        samples: int | None = None,
    ) -> Tensor:
        """Return a loss of equal value, whose backward accumulates and reduces by the rule at the end of the window.

        At the end of a window, under a rule with weights, this is a collective operation.

        Args:
            loss: The loss with its graph, or its terms by name, each normalized by its own global weight.
            weight: The number of loss terms (samples, tokens, ...), >= 0 and of any type; one per named term. A rule
                that uses weights needs it.
            divided_by: What the trainer divides every loss of the window by before the backward.
            samples: The number of samples of a chunk from `split_batches`; the default weight. With 0 samples the loss
                does not count.

        Raises:
            RuntimeError: If no model is registered, or some are within `no_sync()` and some are not, or DDP would
                reduce nothing, as after a forward within `no_sync()`.
            ValueError: If `divided_by` is not a number > 0; on all ranks, if some rank's weight is missing or not
                usable: of the same window on a CPU, of the one before on an accelerator, which is not waited for.
        """
        if divided_by is not None and not 0 < divided_by < math.inf:
            raise ValueError(
                f"divided_by={divided_by!r} is not a finite number > 0: pass what the trainer divides each loss by"
            )
        unknown = weight is None and samples is None
        problem = needs_weight(self._rule) if unknown else None
        terms, micro_batch = self._weights.read(loss, weight, None, samples, problem)
        if self._is_mean and divided_by is None and not micro_batch.absent:
            return WeighedLoss.of(terms, micro_batch, plain=True).value  # to the bits of stock DDP
        begin = partial(self._begin, self._accumulation, last=self._ends_window(), divisor=divided_by or self._divisor)
        return WeighedLoss.of(terms, micro_batch, begin=begin).value

    def _reduces_next(self) -> bool:
        """Return whether DDP reduces in the next backward."""
        synced = {model.require_backward_grad_sync for model in self._models}
        if len(synced) != 1:
            raise RuntimeError(
                "some models are within no_sync() and some are not, so it is not clear whether this backward ends the"
                " window. Enter it for all models of the loop, or for none."
            )
        (last,) = synced
        if last and not any(self._models.values()):
            # Gradients would stay those of each rank, without a word, as with stock DDP.
            raise RuntimeError(
                "DDP would reduce nothing in this backward: it reduces in the first backward after a forward outside of"
                " no_sync(). Have the window's last forward outside of it, too; and run one backward for each forward:"
                " pass several losses as one, their sum, or as named terms with a weight each."
            )
        return bool(last)

    def _begin(self, accumulation: Accumulation, loss: WeighedLoss, *, last: bool, divisor: float | None) -> None:
        """Weigh a loss, at the root of its backward."""
        accumulation.loss_divisor = divisor
        accumulation.begin(loss, last=last)

        def end() -> None:
            self._models.update(dict.fromkeys(self._models, False))
            accumulation.reduce()
            accumulation.end()

        after_backward(end, accumulation.abandon)

    def check(self) -> None:
        """Raise if the last window was invalid. Call it at the end of training, and before you save the model."""
        self._accumulation.check()
