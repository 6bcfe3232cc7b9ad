"""`GradAvgReducer`: the rules as a communication hook of DDP, for loops that are not those of Lightning's Trainer.

A trainer that calls `loss.backward()` itself leaves no room around it. So `weigh` returns a loss whose backward runs
that of the user's loss inside: what accumulates and reduces gradients stands around the inner one, as in the Trainer.
"""

from __future__ import annotations

import atexit
import math
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg.lightning_internals import keeps_graph
from lightning_gradavg.place import Place, places_on_nodes
from lightning_gradavg.ranks import Contribution, World, by_value
from lightning_gradavg.reduction.accumulation import Accumulation
from lightning_gradavg.reduction.average import agreed_factors
from lightning_gradavg.reduction.gather import weigh_losses_from_here
from lightning_gradavg.reduction.hooks import OwnGroups, exchange_sum
from lightning_gradavg.reduction.loss import NoWeights, WeighedLoss, Weights, loss_terms, sparse_weights, zero_loss
from lightning_gradavg.reduction.reducer import Reducer
from lightning_gradavg.reduction.sums import plain_sum
from lightning_gradavg.rules import RULES, Rule, RuleFunction, resolve_rule
from lightning_gradavg.wire.codecs import refuse_double_precision
from lightning_gradavg.wire.route import WireOptions

__all__ = ["GradAvgReducer"]


class GradAvgReducer:
    """Reduces the gradients of `DistributedDataParallel` by a rule, in any training loop.

    ::

        reducer = GradAvgReducer(reduction="weighted_mean")
        reducer.register(ddp_model)
        ...
        reducer.weigh(loss, weight=n).backward()

    The sums run over (rank, micro-batch) pairs: what is run within `ddp_model.no_sync()` belongs to the window that the
    next backward outside of it ends, and nothing is to be divided by hand, but for the plain mean, whose losses are
    divided by the window as with stock DDP. Every backward that reaches the model runs one weighed loss; one that
    raises gives its window up, and leaves the gradients that were there before it.

    Within the forward and until `weigh`, `lightning_gradavg.gather` knows the rule.

    Args:
        reduction: A key of `lightning_gradavg.rules.RULES`, or a function `(place, weight) -> Share`, pure and the same
            on all ranks.
        wire_dtype: What gradients are sent as between ranks: `"bfloat16"` or `"float16"`; they are summed in float32.
            None for their own type.

    Raises:
        ValueError: If `reduction` names no rule, or `wire_dtype` no type.
        TypeError: If `reduction` is neither a name nor a function.
    """

    def __init__(
        self,
        *,
        reduction: str | RuleFunction | Rule = "mean",
        wire_dtype: Literal["bfloat16", "float16"] | None = None,
    ) -> None:
        self._rule, self._wire = resolve_rule(reduction), WireOptions(wire_dtype)
        self._registered: list[weakref.ref[DistributedDataParallel]] = []

    @property
    def _models(self) -> list[DistributedDataParallel]:
        """The models that are still in use, which a program may wrap one after another, as in cross-validation."""
        return [model for model in (reference() for reference in self._registered) if model is not None]

    def register(self, model: DistributedDataParallel, *, node: int | None = None) -> None:
        """Reduce the gradients of a model from now on. A collective operation.

        Several models may be registered, of which one loss may reach some, as those of a GAN.

        Args:
            model: The wrapped model, without a communication hook.
            node: The node of this process; by default as its launcher tells it, see `lightning_gradavg.place`.

        Raises:
            TypeError: If the model is not wrapped.
            ValueError: If it cannot be served, or the ranks' arguments differ.
        """
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"a DistributedDataParallel has a communication hook, got {type(model).__name__}. Wrap the model first;"
                " or call lightning_gradavg.average_gradients after the backward of one that is not wrapped."
            )
        if model.static_graph:
            raise ValueError(
                "static_graph=True has DDP take its first backward for that of every step, which those within a window"
                " are not. Leave it out, or use lightning_gradavg.GradAvgStrategy with Lightning's Trainer."
            )
        if self._registered and World.of(model.process_group) != self._world:
            raise ValueError("the models of one reducer are reduced over one process group: use a reducer for each")
        for name, parameter in model.module.named_parameters() if self._wire.dtype is not None else ():
            refuse_double_precision(str(self._wire.dtype), repr(name), parameter.dtype)
        if not self._registered:
            self._begin(model, node)
        model.register_comm_hook(None, self._accumulation.reducer.hook)
        model.register_forward_pre_hook(self._on_forward)
        self._registered.append(weakref.ref(model))
        models = self._models
        # Once each: models may share some.
        self._accumulation.parameters = list(dict.fromkeys(one for each in models for one in each.module.parameters()))
        self._sparse = [one for each in models for one in sparse_weights(each)]

    def _begin(self, model: DistributedDataParallel, node: int | None) -> None:
        rule, group, device = self._rule, model.process_group, next(model.parameters()).device
        self._world = world = World.of(group)
        places = self._places(world, node)
        self._own = OwnGroups(world, device, None)
        # Registered after the process group was made, so it runs before whoever destroys that at exit.
        atexit.register(_close, weakref.ref(self._own))
        bucket_sum, obstacle = exchange_sum(self._wire, places, group, device, (), self._own)
        if obstacle is not None:
            warnings.warn(obstacle, stacklevel=3)
        reducer = Reducer(rule, places, group, device, bucket_sum or plain_sum(group), windows_may_differ=True)
        self._accumulation = Accumulation(reducer, [], preserves_gradients=True)
        reads = Weights if rule.uses_weight else NoWeights
        self._weights = reads(rule, device, "weigh was given", warnings.warn, lambda _: None)

    def _places(self, world: World, node: int | None) -> tuple[Place, ...]:
        """Return the places of all ranks, which reduce alike; their nodes may be unknown if they do not matter."""
        alike = f"{self._rule.name!r}, {self._rule.formula}, wire_dtype={self._wire.dtype!r}"
        _, agreed = world.agree(
            "GradAvgReducer cannot reduce",
            lambda: Contribution(alike, [], 1.0),
            lambda found: f"the reduction differs between ranks: {by_value(found)}. Pass the same on all of them.",
        )
        if node is not None:
            return world.places(node)
        agreed_factors(self._rule, agreed)
        return places_on_nodes([node or 0 for node in agreed.nodes])

    def _on_forward(self, *_: Any) -> None:
        weigh_losses_from_here(self._accumulation.on_gather)

    def weigh(
        self,
        loss: Tensor | Mapping[str, Tensor],
        *,
        weight: Any = None,
        divided_by: float | None = None,
        samples: int | None = None,
    ) -> Tensor:
        """Return a loss of the same value whose backward accumulates, and at the window's end reduces, by the rule.

        Args:
            loss: The loss, with graph; or its terms by name, each normalized by its own global weight.
            weight: The number of loss terms (samples, tokens, ...) behind it, >= 0 and of any type; of named terms one
                for each. A rule that uses weights needs it.
            divided_by: What the trainer divides every loss of the window by before the backward; None for nothing, and
                under the plain mean for what a window needs.
            samples: The number of samples, where the batch is a chunk of a split one: they are the weight if none is
                given. With 0 samples the loss does not count.

        Raises:
            RuntimeError: If no model is registered, or some are within `no_sync()` and some are not; from the backward,
                where DDP reduces nothing, as after a forward within `no_sync()`.
            ValueError: If `divided_by` is no number > 0; from the backward, on all ranks alike, if some rank's weight
                is missing or not usable: of the same window on a CPU, of the one before on an accelerator, which is
                not waited for.
        """
        if divided_by is not None and not 0 < divided_by < math.inf:
            raise ValueError(
                f"divided_by={divided_by!r} is no finite number > 0: pass what the trainer divides each loss by"
            )
        synced = {model.require_backward_grad_sync for model in self._models}
        if len(synced) != 1:
            raise RuntimeError(
                "some models are within no_sync() and some are not, so it is not clear whether this backward ends the"
                " window. Enter it for all models of the loop, or for none."
                if synced
                else "there is no model yet whose gradients are reduced: call register first"
            )
        weigh_losses_from_here(None)
        terms, problem = loss_terms(loss), None
        if self._rule.uses_weight and weight is None and samples is None:
            problem = (
                f"reduction={self._rule.name!r}, {self._rule.formula}, needs a weight: pass weight= with every loss,"
                " the number of loss terms (samples, tokens, ...) behind it"
            )
        micro_batch = self._weights.read(terms, weight, None, samples, problem)
        weighed = self._accumulation.weigh(terms, micro_batch)
        if self._sparse and all(weight == 0 for weight in micro_batch.weights.values()):
            # Its gradient is stopped at the loss, but DDP takes no sparse gradient that is undefined.
            zero = zero_loss(self._sparse, set(map(id, self._sparse)))
            weighed.value = weighed.value + zero.to(weighed.value.dtype)

        of_window = None if self._rule == RULES["mean"] else 1
        divisor = of_window if divided_by is None else divided_by

        def backward(gradient: Tensor) -> None:
            keeps = keeps_graph()

            def run(*, retain_graph: bool = False) -> None:
                torch.autograd.backward(weighed.value, gradient, retain_graph=retain_graph or keeps)

            try:
                self._backward(weighed, run, last=synced == {True}, loss_divisor=divisor)
            except BaseException:
                # A loop may go on with the next batch, as after one that did not fit into memory.
                self._accumulation.give_up()
                raise

        return _outer(backward, weighed.value)

    def _backward(self, loss: WeighedLoss, run: Callable[..., None], *, last: bool, loss_divisor: float | None) -> None:
        accumulation = self._accumulation
        accumulation.backward(loss, run, last=last, loss_divisor=loss_divisor)
        accumulation.crosses_ranks = False
        if last and not accumulation.reducer.reached:
            # Gradients would stay those of each rank, without a word, as with stock DDP.
            raise RuntimeError(
                "DDP reduced nothing in this backward: it reduces in the first backward after a forward outside of"
                " no_sync(). Have the window's last forward outside of it, too; and run one backward for each forward:"
                " pass several losses as one, their sum, or as named terms with a weight each."
            )
        end = accumulation.finish if last else accumulation.pause
        end()

    def check(self) -> None:
        """Raise what is wrong with the last window, where no further one does: at the end, or before it is saved."""
        if self._registered:
            self._accumulation.check()

    def close(self) -> None:
        """End what runs beside the backward, before the process group is destroyed; else the process's end does it."""
        if self._registered:
            self._own.close()


def _close(own: weakref.ref[OwnGroups]) -> None:
    groups = own()
    if groups is not None and dist.is_initialized():
        groups.close()


class _Outer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backward: Callable[[Tensor], None], value: Tensor, anchor: Tensor) -> Tensor:
        del anchor
        ctx.inner = backward
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        # Reentrant, as torch.utils.checkpoint does it. DDP ends its reduction with the inner backward.
        with torch.enable_grad():
            ctx.inner(grads[0])
        return None, None, None


def _outer(backward: Callable[[Tensor], None], loss: Tensor) -> Tensor:
    """Return the loss's value, whose backward is the function."""
    # The loss itself must be no input: autograd would go on to its graph, a second time.
    anchor = torch.zeros((), device=loss.device, requires_grad=True)
    outer: Tensor = _Outer.apply(backward, loss.detach(), anchor)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return outer
