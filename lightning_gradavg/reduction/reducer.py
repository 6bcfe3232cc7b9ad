"""`GradAvgReducer`: the rules for `DistributedDataParallel` in loops that are not those of Lightning's Trainer."""

from __future__ import annotations

import math
import warnings
import weakref
from functools import partial
from typing import NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_gradavg._lightning.internals import after_backward, parameters_known_to
from lightning_gradavg._support.collectives import Contribution, World
from lightning_gradavg._support.place import places_on_nodes
from lightning_gradavg._support.tree import leaves
from lightning_gradavg.reduction.average import problem_without_weight
from lightning_gradavg.reduction.comm_hook import CommHook, Hook, require_hookable
from lightning_gradavg.reduction.gradients import DDP_REDUCES, ReplicatedGradients
from lightning_gradavg.reduction.guard import BypassGuard
from lightning_gradavg.reduction.loss import MicroBatch, Weights, require_loss, weighed
from lightning_gradavg.reduction.window import Ranks, WeightUnit, Window, WindowState
from lightning_gradavg.rules import RULES, Rule, resolve_rule

__all__ = ["GradAvgReducer"]

_NOTHING_REDUCED = f"DDP would reduce nothing in this backward: {DDP_REDUCES}"


class _Model:
    """What the reducer knows of a registered model."""

    def __init__(self, model: DistributedDataParallel, window: Window, gradients: ReplicatedGradients) -> None:
        self.window = window
        self.gradients = gradients
        # Whether DDP reduces in the next backward. It decides so in a forward with gradients (`_post_forward`), for the
        # first backward after it. A forward without gradients, as in validation, changes DDP's flag, and not that.
        self.reduces = True
        # Whether the window multiplies what DDP reduces. Under the plain mean stock DDP averages.
        self.is_hooked = False
        self._model = weakref.ref(model)

    @property
    def is_synced(self) -> bool:
        """Whether the user is outside of `no_sync()`, and so expects DDP to reduce."""
        model = self._model()
        return model is not None and bool(model.require_backward_grad_sync)


class _RunningLoss:
    """A weighed loss whose backward runs."""

    def __init__(self, micro_batch: MicroBatch, divisor: float) -> None:
        self.micro_batch = micro_batch
        self.divisor = divisor
        self.reached: list[_Model] = []  # the models whose windows the loss was added to


class GradAvgReducer:
    """Scales losses so that `DistributedDataParallel` reduces their gradients by a rule, in any training loop.

    ::

        reducer = GradAvgReducer(reduction="weighted_mean")
        reducer.register(ddp_model)
        ...
        reducer.weigh(loss, weight=n).backward()

    The sums run over (rank, micro-batch) pairs. Micro-batches whose forward is within `ddp_model.no_sync()` belong to
    the window that ends with the next one outside of it. Don't divide the loss by the window's length. Each backward
    runs one weighed loss. Under the plain mean losses stay as they are, as with stock DDP, which you divide by the
    window's length. Under other rules, a backward that raises discards its window, and keeps earlier gradients. Every
    model has a window of its own, whose micro-batches train the same parameters; see docs/reduction.md.

    Args:
        reduction: A key of `lightning_gradavg.rules.RULES`.

    Raises:
        ValueError: If `reduction` names no rule.
        TypeError: If `reduction` is no name.
    """

    def __init__(self, *, reduction: str | Rule = "mean") -> None:
        self._rule = resolve_rule(reduction)
        self._is_mean = self._rule == RULES["mean"]
        self._weights = Weights(self._rule, warnings.warn, _say_nothing)
        self._ranks: Ranks | None = None  # from the first `register` on
        self._unit: WeightUnit | None = None
        self._running: _RunningLoss | None = None
        # Weak: models come and go, as in cross-validation.
        self._models: WeakKeyDictionary[DistributedDataParallel, _Model] | None = None
        self._optimizers: WeakSet[Optimizer] | None = None

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Know of an optimizer: two that train in one window of several micro-batches are refused."""
        if self._optimizers is None:
            self._optimizers = WeakSet()  # made here, as a strategy is pickled before it has any
        self._optimizers.add(optimizer)

    def register(
        self,
        model: DistributedDataParallel,
        *,
        node: int | None = None,
        comm_hook: Hook | None = None,
        comm_state: object = None,
    ) -> None:
        """Reduce the gradients of a model by the rule from now on. A collective operation.

        You can register several models, such as those of a GAN. One loss may reach only some of them.

        Args:
            model: The wrapped model.
            node: The index of this process's node; the default comes from the launcher.
            comm_hook: A communication hook, which returns the mean of a bucket over the ranks. Give it here, and not to
                the model: DDP takes one hook, which is the rule's. Under the plain mean, give it to the model.
            comm_state: The state of `comm_hook`.

        Raises:
            TypeError: If the model is not wrapped.
            ValueError: If it cannot be served, or the ranks' arguments differ.
        """
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"the model must be a DistributedDataParallel, got {type(model).__name__}. Wrap the model"
                " first; or call lightning_gradavg.average_gradients after the backward of one that is not wrapped."
            )
        hook = CommHook(comm_hook, comm_state)
        if not self._is_mean:
            require_hookable(model, self._rule)
            hook.require_served(model, next(model.parameters()).device)
        elif comm_hook is not None:
            raise ValueError(
                f"comm_hook={comm_hook!r} under reduction='mean', which DDP computes itself: call"
                " model.register_comm_hook."
            )
        world = World.of(model.process_group)
        if self._ranks is not None and self._models and world != self._ranks.world:
            raise ValueError("the models of one reducer are reduced over one process group: use a reducer for each")
        nodes = self._agree(world, node)
        _require_known_parameters(model, world)
        if self._models is None:
            self._models = WeakKeyDictionary()
        if self._ranks is None or not self._models:
            device = next(model.parameters()).device
            self._ranks = Ranks(world, places_on_nodes(nodes), device)
            self._unit = WeightUnit(self._rule, self._ranks)
        assert self._unit is not None
        gradients = ReplicatedGradients(model, world.group)
        window = Window(
            self._rule,
            self._ranks,
            gradients,
            self._unit,
            user_ends_windows=True,
            optimizers=lambda: list(self._optimizers or ()),
        )
        registered = _Model(model, window, gradients)
        self._models[model] = registered
        if self._is_mean:
            # Stock DDP, until `weigh` gets a loss with `divided_by`: from then on the window multiplies.
            model.register_forward_pre_hook(partial(_require_frozen, gradients))
        else:
            self._hook_in(model, registered, hook)

    def _registered(self) -> list[_Model]:
        """Return the registered models that still exist."""
        if self._models is None:
            return []
        return list(self._models.values())

    def _hook_in(self, model: DistributedDataParallel, registered: _Model, hook: CommHook) -> None:
        """Have the window of a model multiply what DDP reduces."""
        registered.is_hooked = True
        registered.reduces = bool(model.require_forward_param_sync)
        hook.window = registered.window
        hook.register(model)
        # `torch.distributed.algorithms.Join` asks every model that it joins for a hook.
        vars(model)["join_hook"] = partial(_refuse_join, self._rule.name)
        model.register_forward_hook(partial(self._on_forward, registered))
        BypassGuard(registered.gradients.leaves(), self._rule.name, self._is_in_backward)

    def _is_in_backward(self) -> bool:
        """Return whether the backward of a weighed loss has reached a model."""
        # Of any: two models may share a parameter.
        return any(registered.window.state == WindowState.BACKWARD for registered in self._registered())

    def _on_forward(self, registered: _Model, model: nn.Module, _: object, output: object) -> None:
        """Note whether DDP will reduce, and have a backward that reaches the model by its output call `_reach`."""
        if not torch.is_grad_enabled():
            return
        registered.reduces = bool(model.require_forward_param_sync)
        for _, leaf in leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(partial(self._reach, registered))

    def _agree(self, world: World, node: int | None) -> list[int]:
        """Return the node of every rank; raise a ValueError on all if the ranks' rules differ. A collective operation.

        `node` is that of this rank, or None if the rule finds it from the launcher, where it needs one.
        """
        rule = self._rule

        def contribute() -> Contribution:
            node_of_rank = node
            if node_of_rank is None:
                node_of_rank = rule.node
            return Contribution([f"reduction={rule.name!r}, {rule.formula}"], node=node_of_rank)

        _, agreed = world.agree("GradAvgReducer cannot reduce", contribute)
        return agreed.nodes

    def weigh(
        self, loss: Tensor, *, weight: object = None, divided_by: float | None = None, samples: int | None = None
    ) -> Tensor:
        """Return a loss of equal value, whose backward accumulates and reduces by the rule at the end of the window.

        Its backward is a collective operation at the end of a window, and in the first one under a rule with weights.

        Args:
            loss: The loss with its graph.
            weight: The number of loss terms (samples, tokens, ...), >= 0 and of any type. A rule that uses weights
                needs it.
            divided_by: What the trainer divides every loss of the window by before the backward.
            samples: The number of samples of a chunk from `split_batches`; the default weight. With 0 samples the loss
                does not count.

        Raises:
            RuntimeError: If no model is registered, or DDP would reduce nothing, as after a forward within `no_sync()`.
            TypeError: If the loss is no tensor.
            ValueError: If `divided_by` is not a number > 0, or only some losses have it; in the last backward of a
                window, on all ranks, if some rank's weight is missing or not usable, or other parameters train.
        """
        if divided_by is not None and not 0 < divided_by < math.inf:
            raise ValueError(
                f"divided_by={divided_by!r} is not a finite number > 0: pass what the trainer divides each loss by"
            )
        if not self._models:
            raise RuntimeError("there is no model yet whose gradients are reduced: call register first")
        loss = require_loss(loss)
        problem = None
        if weight is None and samples is None and self._rule.uses_weight:
            problem = problem_without_weight(self._rule)
        micro_batch = self._weights.read(weight, None, samples, problem)
        if self._is_mean and divided_by is None:
            if micro_batch.absent:
                raise ValueError(
                    "samples=0 under reduction='mean', which counts every rank. Use reduction='weighted_mean', under"
                    " which a rank without samples does not count."
                )
            if any(registered.is_hooked for registered in self._registered()):
                raise ValueError("divided_by was given with the losses before: pass it with every loss, or with none")
            return loss  # to the bits of stock DDP
        for model, registered in self._models.items():
            if not registered.is_hooked:
                self._hook_in(model, registered, CommHook())
        self._require_reduction()
        divisor = 1.0
        if divided_by is not None:
            divisor = float(divided_by)
        return weighed(loss, partial(self._begin_backward, micro_batch, divisor))

    def _require_reduction(self) -> None:
        """Raise a RuntimeError if the user ends a window, and DDP will not reduce in its backward."""
        if all(registered.is_synced and not registered.reduces for registered in self._registered()):
            # Gradients would stay those of each rank, without a word, as with stock DDP.
            raise RuntimeError(_NOTHING_REDUCED)

    def _begin_backward(self, micro_batch: MicroBatch, divisor: float) -> float:
        """Begin the backward of a weighed loss, at its root; return what its gradient is multiplied by.

        The loop runs the backward, so autograd calls `_end_backward` after DDP's reduction, or `_abandon` if the
        backward or the reduction raises.
        """
        if self._running is not None:
            raise RuntimeError(
                "a backward runs two weighed losses, and each of them would end its window. Add the losses up, and"
                " weigh their sum."
            )
        self._running = _RunningLoss(micro_batch, divisor)
        after_backward(self._end_backward, self._abandon)
        models = self._registered()
        # The same for all models, as they share the unit.
        loss_factor = models[0].window.loss_factor(micro_batch)
        # Of several, one loss may reach only some, as those of an actor and a critic: their outputs tell.
        if len(models) == 1:
            self._reach(models[0])
        return loss_factor

    def _reach(self, model: _Model, _: object = None) -> None:
        """Add the running loss to the window of a model, before the backward reaches its parameters."""
        running = self._running
        # None: `torch.autograd.grad` goes through the model, as for a penalty on its gradient. It accumulates nothing.
        if running is None or model in running.reached:
            return
        if model.is_synced and not model.reduces:
            raise RuntimeError(_NOTHING_REDUCED)
        running.reached.append(model)
        model.window.add(running.micro_batch, ends=model.reduces, divisor=running.divisor)
        model.window.begin_backward()

    def _end_backward(self) -> None:
        """End the backward of a weighed loss, and the windows that end with it. May be a collective operation."""
        running = self._running
        assert running is not None
        self._running = None
        try:
            for model in running.reached:
                model.window.end_backward()
                if model.window.has_ended:
                    model.reduces = False  # DDP reduces in one backward after a forward
                    model.window.reduce()
                    model.window.close()
        except BaseException:
            for model in running.reached:
                model.window.abandon()
            raise

    def _abandon(self) -> None:
        """Abandon the windows that a backward has reached before it raised."""
        running = self._running
        self._running = None
        if running is not None:
            for model in running.reached:
                model.window.abandon()


def _refuse_join(rule: str, **_: object) -> NoReturn:
    """Stand for the `join_hook` of a model whose gradients a rule reduces."""
    raise RuntimeError(
        f"reduction={rule!r} within DistributedDataParallel.join, whose ranks without inputs send nothing that the"
        " others wait for. Give such a rank a loss of weight=0, and leave join out."
    )


def _require_known_parameters(model: DistributedDataParallel, world: World) -> None:
    """Raise a ValueError if parameters were frozen or unfrozen between DDP's making and now."""
    # DDP lists its parameters once, in `_build_params_for_reducer`.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if world.size > 1 and not model.parameters_to_ignore and len(trained) != parameters_known_to(model):
        raise ValueError(
            f"{len(trained)} parameters of the model require grad, but {parameters_known_to(model)} did when"
            " DistributedDataParallel was made, which reduces those alone. Freeze or unfreeze parameters before you"
            " wrap the model."
        )


def _require_frozen(gradients: ReplicatedGradients, *_: object) -> None:
    """Raise a RuntimeError if a parameter trains that was frozen when DDP was made: each rank would keep its own."""
    if torch.is_grad_enabled() and gradients.unfrozen:
        shape = tuple(gradients.unfrozen[0].shape)
        raise RuntimeError(
            f"a parameter of shape {shape} trains that was frozen when DistributedDataParallel was made, which reduces"
            " only what trained then: every rank would keep a gradient of its own. Wrap the model anew after you"
            " unfreeze it, or use another reduction than 'mean'."
        )


def _say_nothing(_: str) -> None:
    """Drop what `Weights` says of default weights, which a loop of your own does not have."""
