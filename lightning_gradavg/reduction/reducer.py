"""`GradAvgReducer`: the rules for `DistributedDataParallel` in loops that are not those of Lightning's Trainer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg._lightning.internals import after_backward, parameters_known_to
from lightning_gradavg._support.collectives import Contribution, World
from lightning_gradavg._support.place import places_on_nodes
from lightning_gradavg.reduction.average import needs_weight
from lightning_gradavg.reduction.gradients import ModelGradients, ReplicatedGradients
from lightning_gradavg.reduction.guard import BypassGuard, ReachedParameters
from lightning_gradavg.reduction.lift import WindowOptions
from lightning_gradavg.reduction.loss import WeighedLoss, Weights, require_loss
from lightning_gradavg.reduction.window import OpenWindows
from lightning_gradavg.rules import RULES, Rule, RuleFunction, resolve_rule

__all__ = ["GradAvgReducer"]

_NOTHING_REDUCED = (
    "DDP would reduce nothing in this backward: it reduces in the first backward after a forward outside of no_sync()."
    " Have the window's last forward outside of it, too; and run one backward for each forward: pass several losses as"
    " one, their sum."
)


class GradAvgReducer:
    """Scales losses so that `DistributedDataParallel` reduces their gradients by a rule, in any training loop.

    ::

        reducer = GradAvgReducer(reduction="weighted_mean")
        reducer.register(ddp_model)
        ...
        reducer.weigh(loss, weight=n).backward()

    The sums run over (rank, micro-batch) pairs. Micro-batches within `ddp_model.no_sync()` belong to the window that
    ends with the next backward outside of it. Don't divide the loss by the window's length. Each backward runs one
    weighed loss. Under the plain mean losses stay as they are, as with stock DDP, which you divide by the window's
    length. Under other rules, a backward that raises discards its window, and keeps earlier gradients. Windows of
    different parameters may be open at once, as those of two optimizers; see docs/reduction.md.

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
        self._weights = Weights(self._rule, warnings.warn, _say_nothing)
        self._windows: OpenWindows | None = None  # None until a model is registered
        self._guard: BypassGuard | None = None
        self._ends_window: Callable[[], bool] = self._reduces_next
        self._frozen: list[nn.Parameter] = []  # when DDP was built
        # Of each model, whether DDP reduces after its last forward. Weak: models come and go, as in cross-validation.
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
        world = World.of(model.process_group)
        if self._models and self._windows is not None and world != self._windows.options.world:
            raise ValueError("the models of one reducer are reduced over one process group: use a reducer for each")
        nodes = self._agree(world, node)
        if self._windows is not None and not self._windows.are_empty:
            raise RuntimeError(
                "register is called within a window, which would be lost. Register models before the first backward, or"
                " after one that reduces."
            )
        self._require_known_parameters(model, world)
        # Each once, in order: models may share some.
        parameters: dict[nn.Parameter, None] = {}
        for registered in [*self._models, model]:
            parameters.update(dict.fromkeys(registered.parameters()))
        if world.size > 1:
            self._frozen += [parameter for parameter in model.parameters() if not parameter.requires_grad]
        # Those of models that are gone are not reduced any more.
        self._frozen = [parameter for parameter in self._frozen if parameter in parameters]
        options = WindowOptions(
            rule=self._rule,
            places=places_on_nodes(nodes),
            world=world,
            device=next(model.parameters()).device,
            user_ends_windows=True,
            has_float16=any(parameter.dtype == torch.float16 for parameter in parameters),
        )
        self.watch(model, options, ReplicatedGradients(list(parameters), frozen=self._frozen, group=world.group))

    def _agree(self, world: World, node: int | None) -> list[int]:
        """Return the node of every rank; raise a ValueError on all if the ranks' rules differ. A collective operation.

        `node` is that of this rank, or None if the rule finds it from the launcher, where it needs one.
        """
        rule = self._rule

        def contribute() -> Contribution:
            node_of_rank = rule.node if node is None else node
            return Contribution([f"reduction={rule.name!r}, {rule.formula}"], node=node_of_rank)

        _, agreed = world.agree("GradAvgReducer cannot reduce", contribute)
        return agreed.nodes

    @staticmethod
    def _require_known_parameters(model: DistributedDataParallel, world: World) -> None:
        """Raise a ValueError if parameters were frozen or unfrozen between DDP's making and now."""
        # DDP lists its parameters once, in `_build_params_for_reducer`. Those that are unfrozen after `register` are
        # averaged here (`ReplicatedGradients`), which knows of them because they are frozen now.
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if world.size > 1 and not model.parameters_to_ignore and len(trained) != parameters_known_to(model):
            raise ValueError(
                f"{len(trained)} parameters of the model require grad, but {parameters_known_to(model)} did when"
                " DistributedDataParallel was made, which reduces those alone. Freeze or unfreeze parameters before you"
                " wrap the model, or after register, which knows of the rest."
            )

    def watch(
        self,
        model: nn.Module,
        options: WindowOptions,
        gradients: ModelGradients,
        ends_window: Callable[[], bool] | None = None,
    ) -> None:
        """Weigh the losses of a model of any engine from its next forward on.

        Args:
            model: The model.
            options: What does not change in the run.
            gradients: Where the gradients of all registered models are.
            ends_window: Returns whether the next backward ends its window; by default DDP's `no_sync` says it.
        """
        # The guard and the windows are those of all models so far, and are made anew with each.
        if self._guard is not None:
            self._guard.remove()
        windows = OpenWindows(options, gradients)
        self._windows = windows
        if not self._is_mean:
            self._guard = BypassGuard(gradients.leaves(), self._rule.name, lambda: windows.are_in_backward)
        if ends_window is not None:
            self._ends_window = ends_window
        self._models[model] = True
        model.register_forward_pre_hook(self._on_forward)

    def _on_forward(self, model: nn.Module, *_: object) -> None:
        """Note whether DDP will reduce what this forward leads to, as DDP's `_post_forward` decides it."""
        # A forward without gradients, as in validation, prepares no reduction.
        if torch.is_grad_enabled():
            self._models[model] = bool(getattr(model, "require_backward_grad_sync", True))

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
            RuntimeError: If no model is registered, or some are within `no_sync()` and some are not, or DDP would
                reduce nothing, as after a forward within `no_sync()`.
            TypeError: If the loss is no tensor.
            ValueError: If `divided_by` is not a number > 0; in the last backward of a window, on all ranks, if some
                rank's weight is missing or not usable, or two windows that share parameters are open at once.
        """
        if divided_by is not None and not 0 < divided_by < math.inf:
            raise ValueError(
                f"divided_by={divided_by!r} is not a finite number > 0: pass what the trainer divides each loss by"
            )
        if self._windows is None:
            raise RuntimeError("there is no model yet whose gradients are reduced: call register first")
        loss = require_loss(loss)
        problem = None
        if weight is None and samples is None and self._rule.uses_weight:
            problem = needs_weight(self._rule)
        micro_batch = self._weights.read(weight, None, samples, problem)
        # As under `Stock`. With `divided_by` a trainer divides by N, and a short window must be multiplied.
        if self._is_mean and divided_by is None:
            if micro_batch.absent:
                raise ValueError(
                    "samples=0 under reduction='mean', which counts every rank. Use reduction='weighted_mean', under"
                    " which a rank without samples does not count."
                )
            return loss  # to the bits of stock DDP
        windows = self._windows
        # Now, not in the backward: the user may leave `no_sync()` between the two.
        ends_window = self._ends_window()
        divisor = 1.0 if divided_by is None else divided_by

        def begin(weighed: WeighedLoss) -> None:
            self._begin_backward(windows, weighed, ends_window=ends_window, divisor=divisor)

        return WeighedLoss(loss, micro_batch, on_backward=begin).value

    def _reduces_next(self) -> bool:
        """Return whether DDP reduces in the next backward."""
        synced = {model.require_backward_grad_sync for model in self._models}
        if len(synced) != 1:
            raise RuntimeError(
                "some models are within no_sync() and some are not, so it is not clear whether this backward ends the"
                " window. Enter it for all models of the loop, or for none."
            )
        (reduces,) = synced
        if reduces and not any(self._models.values()):
            # Gradients would stay those of each rank, without a word, as with stock DDP.
            raise RuntimeError(_NOTHING_REDUCED)
        return bool(reduces)

    def _begin_backward(self, windows: OpenWindows, loss: WeighedLoss, *, ends_window: bool, divisor: float) -> None:
        """Weigh a loss at the root of its backward, and finish the gradients after it.

        The loop runs the backward, so this comes within it: `WeighedLoss` calls this at its root, and autograd calls
        `end` after DDP's reduction, or `fail` if the backward or the reduction raises.
        """
        if windows.are_in_backward:
            raise RuntimeError(
                "a backward runs two weighed losses, and each of them would end its window. Add the losses up, and"
                " weigh their sum."
            )
        # Not in `weigh`: a loss may be weighed and never run, and the parameters that train now say whose it is.
        window = windows.next(loss)
        window.add(loss, ends_window=ends_window, divisor=divisor)
        window.begin_backward(loss)
        models = list(self._models)
        # Hooks on all parameters, which the usual loop of one model does not pay for.
        reaching: ReachedParameters | None = None
        if len(models) > 1:
            reaching = ReachedParameters(parameter for model in models for parameter in model.parameters())

        def end() -> None:
            reached: set[Tensor] | None = None  # None: all models are reached, as there is one
            if reaching is not None:
                reached = reaching.end()
            for model in models:
                # One loss may reach only some of the models, as those of an actor and a critic.
                if reached is not None and reached.isdisjoint(model.parameters()):
                    continue
                if ends_window and not self._models[model]:
                    window.abandon()
                    raise RuntimeError(_NOTHING_REDUCED)
                # DDP reduces in one backward after a forward: the next one needs a forward of its own.
                self._models[model] = False
            if window.end_backward():
                window.close()

        def fail() -> None:
            if reaching is not None:
                reaching.end()
            window.abandon()

        after_backward(end, fail)


def _say_nothing(_: str) -> None:
    """Drop what `Weights` says of default weights, which a loop of your own does not have."""
