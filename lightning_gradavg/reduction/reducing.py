"""A DDP strategy whose gradients are reduced by a rule: between Lightning's loop and the accumulator."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gradavg.reduction.accumulate import WeighedLoss
from lightning_gradavg.reduction.hooking import HookingStrategy
from lightning_gradavg.reduction.outputs import read_weights
from lightning_gradavg.reduction.terms import zero_loss
from lightning_gradavg.reduction.window import MOST_TERMS, WHOLE_LOSS, MicroBatch
from lightning_gradavg.rules import RULES, Rule
from lightning_gradavg.wire.options import WireOptions

__all__ = ["ReducingStrategy"]


class ReducingStrategy(HookingStrategy):
    """Weighs each micro-batch's loss, and reduces the gradients of a window by a rule.

    Args:
        rule: The reduction rule.
        wire: How buckets travel.
        **options: Those of `DDPStrategy`.
    """

    def __init__(self, rule: Rule, *, wire: WireOptions, **options: Any) -> None:
        super().__init__(rule, wire=wire, **options)
        self._divided_by_hand = rule is RULES["mean"]
        # More than one where a step runs several replicas.
        self._losses: list[WeighedLoss] = []
        self._batch: Any = None
        # Whether the forward has left it to the last backward of the step to have DDP expect its gradients.
        self._unprepared = False
        self._reductions = 0
        self._reductions_at_step: dict[int, int] = {}

    def _samples(self) -> float | None:
        """Return how many samples of the batch count, where the strategy knows; 0 for a stand-in."""
        return None

    def _around_step(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def setup(self, trainer: Trainer) -> None:
        self._losses, self._batch = [], None
        self._reductions, self._reductions_at_step = 0, {}
        super().setup(trainer)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._batch = args[0] if args else next(iter(kwargs.values()), None)
        assert self.lightning_module is not None
        try:
            with self._around_step():
                output = super().training_step(*args, **kwargs)
            if not self.lightning_module.automatic_optimization:
                return output
            return self._take_loss(output)
        except ValueError as error:
            # Of a chunk of one sample. Raised here, the other ranks would wait for this one; in manual optimization
            # there is no loss that could carry the news.
            automatic = self.lightning_module.automatic_optimization
            if not (automatic and self._rule.uses_weight and "more than 1 value per channel" in str(error)):
                raise
            return self._fail_together(str(error))
        finally:
            self._batch = None

    def _fail_together(self, problem: str) -> Tensor:
        """Return a loss whose window ends with an error on all ranks."""
        assert self._accumulator is not None
        assert isinstance(self.model, DistributedDataParallel)
        zero = zero_loss(self._accumulator.parameters, self._sparse)
        prepare_for_backward(self.model, zero)
        advice = "Batch norm needs two values per channel: choose a batch size that leaves no rank a single sample"
        self._losses = [WeighedLoss(zero, MicroBatch({WHOLE_LOSS: 0.0}, problem=f"{problem} {advice}"))]
        return zero

    def _take_loss(self, output: STEP_OUTPUT) -> STEP_OUTPUT:
        """Return the output with one loss to run the backward from, and remember its weights."""
        weight = output.get("weight") if isinstance(output, Mapping) else None
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None:
            if self._trainer.accumulate_grad_batches > 1:
                raise RuntimeError(
                    "training_step returned no loss within an accumulation window, which would then not be reduced."
                    ' Return {"loss": loss, "weight": 0} for a micro-batch that is not to count.'
                )
            return output
        alone = self._trainer.accumulate_grad_batches == 1
        weighed = self._weigh(loss, weight, alone=alone, samples=self._samples())
        self._losses = [weighed]
        if isinstance(output, Mapping):
            return output if weighed.value is loss else {**output, "loss": weighed.value}
        return weighed.value

    def _weigh(self, loss: Any, weight: Any, *, alone: bool, samples: float | None) -> WeighedLoss:
        terms: Mapping[str, Tensor] = loss if isinstance(loss, Mapping) else {WHOLE_LOSS: loss}
        for term in terms.values():
            if not isinstance(term, Tensor):
                raise TypeError(f"a loss is a tensor with a graph, got {term!r} of type {type(term).__name__}")
        if not 0 < len(terms) <= MOST_TERMS:
            raise ValueError(f"a loss has 1 to {MOST_TERMS} named terms, got {len(terms)}: add some of them up")
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        if weight is not None and not self._rule.uses_weight:
            self._warn(f'a "weight" was given, but reduction={self._rule.name!r} does not use weights: it is ignored.')
        if self._accumulator is None:
            losses = [terms[term] for term in sorted(terms)]
            return WeighedLoss(sum(losses[1:], losses[0]), MicroBatch({WHOLE_LOSS: 1.0}))
        micro_batch = read_weights(self._rule, terms, weight, self._batch, self.root_device, samples)
        if (
            micro_batch.explicit
            and not micro_batch.absent
            and 0.0 in [w for w in micro_batch.weights.values() if not isinstance(w, Tensor)]
        ):
            self._warn(
                f"rank {self.global_rank} has a micro-batch of weight 0, which contributes nothing to the gradient."
                " Further ones are not reported.",
                everywhere=True,
            )
        named = tuple(micro_batch.weights) != (WHOLE_LOSS,)
        if named and model.static_graph and not alone:
            raise ValueError(
                "static_graph=True needs the same backward in every micro-batch, but named loss terms take one per term"
                " in all but the last of a window. Leave static_graph out, or do not accumulate."
            )
        if not any(term.requires_grad for term in terms.values()) and not any(micro_batch.weights.values()):
            terms = dict.fromkeys(terms, zero_loss(self._accumulator.parameters, self._sparse))
            prepare_for_backward(model, terms)
        weighed = self._accumulator.weigh(terms, micro_batch, alone=alone)
        sparse = [parameter for parameter in self._accumulator.parameters if id(parameter) in self._sparse]
        stopped = all(not isinstance(weight, Tensor) and weight == 0 for weight in micro_batch.weights.values())
        if sparse and stopped and self._crosses_ranks:
            # Its gradient is stopped at the loss, but DDP takes no sparse gradient that is undefined.
            weighed.value = weighed.value + zero_loss(sparse, self._sparse).to(weighed.value.dtype)
        return weighed

    @override
    def backward(
        self, closure_loss: Any, optimizer: Optimizer | None, *args: Any, weight: Any = None, **kwargs: Any
    ) -> Tensor:
        module = self.lightning_module
        assert module is not None
        if not module.automatic_optimization:
            loss = self._weigh(closure_loss, weight, alone=False, samples=self._samples())
            return self._backward(loss, loss.value, optimizer, args, kwargs)
        losses, self._losses = self._losses, []
        if len(losses) <= 1:
            return self._backward(losses[0] if losses else None, closure_loss, optimizer, args, kwargs)
        # Hooks see one backward, of the mean of the replicas' losses.
        self.pre_backward(closure_loss)
        self.precision_plugin.pre_backward(closure_loss, module)
        scaler = getattr(self.precision_plugin, "scaler", None)
        for index, loss in enumerate(losses):
            root = loss.value / self._trainer.accumulate_grad_batches
            scaled = root if scaler is None else scaler.scale(root)
            final = index == len(losses) - 1
            self._backward_scaled(loss, scaled, optimizer, args, kwargs, first=index == 0, final=final)()
        closed: Tensor = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closed)
        return closed

    def _backward(
        self,
        loss: WeighedLoss | None,
        root: Tensor,
        optimizer: Optimizer | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Tensor:
        """Run the backward of the only loss of a training step."""
        module = self.lightning_module
        assert module is not None
        self.pre_backward(root)
        scaled = self.precision_plugin.pre_backward(root, module)
        finish = self._backward_scaled(loss, scaled, optimizer, args, kwargs)
        # The first backward of a static graph in manual optimization is reduced in post_backward.
        deferred = not module.automatic_optimization and self._defers_reduction
        if not deferred:
            finish()
        closed = self.precision_plugin.post_backward(scaled, module)
        self.post_backward(closed)
        if deferred:
            finish()
        return closed

    def _backward_scaled(
        self,
        loss: WeighedLoss | None,
        scaled: Tensor,
        optimizer: Optimizer | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        first: bool = True,
        final: bool = True,
    ) -> Callable[[], None]:
        """Run the backward of one of a step's losses, the first and the final one or one between.

        Returns:
            What ends the micro-batch, to be called once its gradients are there.
        """
        module, model = self.lightning_module, self.model
        assert module is not None
        if loss is not None:
            loss.root = scaled
        if final and self._unprepared and isinstance(model, DistributedDataParallel):
            self._unprepared = False
            prepare_for_backward(model, scaled)

        def run(**extra: Any) -> None:
            self.precision_plugin.backward(scaled, module, optimizer, *args, **kwargs, **extra)

        finish = self._run(loss, run, first=first, final=final)
        self._static_graph_seen = True
        return finish

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        module = self.lightning_module
        if module is not None and not module.automatic_optimization:
            self._require_reduced(optimizer)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _require_reduced(self, optimizer: Optimizer) -> None:
        """Raise where a manual loop steps on gradients that no manual_backward reduced: the ranks would drift apart."""
        before, self._reductions_at_step[id(optimizer)] = (
            self._reductions_at_step.get(id(optimizer), 0),
            self._reductions,
        )
        gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
        if before < self._reductions or self.world_size == 1 or all(gradient is None for gradient in gradients):
            return
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() was called on gradients that were not reduced since its last step."
            " In manual optimization call self.manual_backward(loss) instead of loss.backward(), and end every window"
            " with a backward outside of toggle_model(sync_grad=False)."
        )

    def _run(
        self, loss: WeighedLoss | None, run: Callable[..., None], *, first: bool, final: bool
    ) -> Callable[[], None]:
        """Run one backward, and return what ends its window."""
        model, trainer, module = self.model, self._trainer, self.lightning_module
        if module is None or not isinstance(model, DistributedDataParallel):
            run()
            return _nothing
        automatic = module.automatic_optimization
        divisor = trainer.accumulate_grad_batches if automatic else 1
        length = trainer.fit_loop.epoch_loop.batch_idx % divisor + 1
        last = self._ends_window(final)
        self._reductions += last
        for name, parameter in self._frozen if self._accumulator is not None or self.world_size > 1 else ():
            if parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} was frozen when training began and now requires a gradient, which DDP does not"
                    " reduce: the ranks would drift apart. Freeze it by a learning rate of 0 until then, or start"
                    " another fit() with it unfrozen."
                )
        if self._accumulator is None:
            run()
            return partial(_multiply_gradients, model, divisor / length) if last and length < divisor else _nothing
        assert loss is not None
        if automatic and length == 1 and first:
            self._accumulator.reset()
        if not automatic and self._divided_by_hand:
            # As in stock DDP, the user divides the losses of a window in manual optimization.
            divisor = self._accumulator.pending + 1
        self._accumulator.backward(loss, run, last=last, loss_divisor=divisor)
        return self._accumulator.finish if last else self._accumulator.pause

    def _ends_window(self, final: bool) -> bool:
        """Return whether the next backward, the final one of its step or not, is reduced."""
        model = self.model
        return isinstance(model, DistributedDataParallel) and (
            model.require_backward_grad_sync and not self._withheld and final
        )

    @property
    def _defers_reduction(self) -> bool:
        assert isinstance(self.model, DistributedDataParallel)
        return self.model.static_graph and not getattr(self, "_pl_static_graph_delay_done", True)


def _nothing() -> None:
    """End a backward that ends no window."""


def _multiply_gradients(module: nn.Module, factor: float) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None and parameter.requires_grad:
            parameter.grad.mul_(factor)
