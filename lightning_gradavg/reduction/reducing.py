"""A DDP strategy whose gradients are reduced by a rule: between Lightning's loop and the accumulator."""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import lightning
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gradavg.reduction.accumulate import Accumulator, WeighedLoss
from lightning_gradavg.reduction.hooks import adapt_hook, power_sgd
from lightning_gradavg.reduction.outputs import read_weights
from lightning_gradavg.reduction.reducer import Reducer, gather_places, twin_group
from lightning_gradavg.reduction.terms import zero_loss
from lightning_gradavg.reduction.window import MOST_TERMS, WHOLE_LOSS, MicroBatch
from lightning_gradavg.rules import RULES, Rule
from lightning_gradavg.wire.build import build_exchange
from lightning_gradavg.wire.exchange import Exchange
from lightning_gradavg.wire.options import WireOptions

__all__ = ["ReducingStrategy"]


class ReducingStrategy(DDPStrategy):
    """Weighs each micro-batch's loss, and reduces the gradients of a window by a rule.

    Args:
        rule: The reduction rule.
        wire: How buckets travel.
        **options: Those of `DDPStrategy`.
    """

    def __init__(self, rule: Rule, *, wire: WireOptions, **options: Any) -> None:
        super().__init__(**options)
        self._rule = rule
        self._wire = wire
        self._exchange: Exchange | None = None
        hooked = self._ddp_comm_hook is not None or self._ddp_comm_wrapper is not None or wire.asked_for is not None
        # Stock DDP is the mean; a hook of any kind would change how it divides, and so its bits.
        self._stock = rule is RULES["mean"] and not hooked
        self._divided_by_hand = rule is RULES["mean"]
        self._accumulator: Accumulator | None = None
        self._frozen: list[tuple[str, nn.Parameter]] = []
        self._reduced: list[str] = []
        self._sparse: set[int] = set()
        # More than one where a step runs several replicas.
        self._losses: list[WeighedLoss] = []
        self._batch: Any = None
        self._withheld = False
        # Whether the forward has left it to the last backward of the step to have DDP expect its gradients.
        self._unprepared = False
        self._static_graph_seen = False
        self._reductions = 0
        self._reductions_at_step: dict[int, int] = {}
        self._warned: set[str] = set()

    @property
    def _crosses_ranks(self) -> bool:
        """Whether gradients of one rank's loss reach another within the backward."""
        return False

    def _samples(self) -> float | None:
        """Return how many samples of the batch count, where the strategy knows; 0 for a stand-in."""
        return None

    def _around_step(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def setup(self, trainer: Trainer) -> None:
        self._accumulator = None
        self._losses, self._batch = [], None
        self._static_graph_seen = False
        self._reductions, self._reductions_at_step = 0, {}
        super().setup(trainer)

    @override
    def _register_ddp_hooks(self) -> None:
        """Register the reduction, on CPU as on CUDA, where Lightning would drop a hook without a word."""
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        assert self.lightning_module is not None
        accumulates = self._trainer.accumulate_grad_batches > 1 or any(
            isinstance(callback, GradientAccumulationScheduler)
            for callback in self._trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        )
        manual = not self.lightning_module.automatic_optimization
        if manual and model.static_graph and not hasattr(self, "_pl_static_graph_delay_done"):
            raise ValueError(
                "static_graph=True with manual optimization needs a lightning that starts the reduction of the first"
                f" backward, as 2.6 does; in lightning {lightning.__version__} it would not be reduced."
                " Leave static_graph out, or use a newer lightning."
            )
        group = model.process_group
        self._frozen = [(name, p) for name, p in model.module.named_parameters() if not p.requires_grad]
        names = {p: name for name, p in model.module.named_parameters()}
        # Now: a user may toggle which parameters require gradients.
        self._reduced = [names[p] for p in model._build_params_for_reducer()[0]]
        if self._stock and not (model.static_graph and accumulates):
            return
        hook = None
        if self._ddp_comm_hook is not None or self._ddp_comm_wrapper is not None:
            user_hook = self._ddp_comm_hook or allreduce_hook
            hook = adapt_hook(user_hook, self._ddp_comm_state, self._ddp_comm_wrapper, group)
        trained = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad]
        if self._wire.power_sgd_rank is not None:
            hook = power_sgd(self._wire.power_sgd_rank, self._wire.power_sgd_start_step, group, trained)
        places = gather_places(self.node_rank, group)
        if hook is None and not self._stock:
            self._exchange, obstacle = build_exchange(
                self._wire, places, dist.get_rank(group), group, self.root_device, trained
            )
            if obstacle is not None:
                self._warn(obstacle)
        reducer = Reducer(
            self._rule,
            places,
            dist.get_rank(group),
            group,
            self.root_device,
            hook,
            manual,
            not self._crosses_ranks,
            exchange=self._exchange,
            bucket_group=self._bucket_group(group) if hook is None and self._exchange is None else None,
        )
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._sparse = {
            id(module.weight)
            for module in model.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        }
        self._accumulator = Accumulator(reducer, parameters, preserves_gradients=manual)
        model.register_comm_hook(None, reducer.hook)

    def _bucket_group(self, group: dist.ProcessGroup) -> dist.ProcessGroup | None:
        """Return a process group for the buckets alone, where a hook would otherwise wait for the totals."""
        # On an accelerator nothing waits on the host; and where DDP skips buckets, the last may not come.
        skips = self._ddp_kwargs.get("skip_all_reduce_unused_params", False)
        if not self._rule.uses_weight or dist.get_backend(group) != "gloo" or dist.get_world_size(group) == 1 or skips:
            return None
        return twin_group(group, self._timeout)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep the gradients of a micro-batch local.

        With a static graph DDP must see its first backward, or an assertion of torch's reducer fails; there the hook
        runs, and leaves the buckets as they are.
        """
        model = self.model
        static = isinstance(model, DistributedDataParallel) and model.static_graph and self._accumulator is not None
        if not static or self._static_graph_seen:
            with super().block_backward_sync():
                yield
            return
        self._withheld = True
        try:
            yield
        finally:
            self._withheld = False

    @override
    def teardown(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
        super().teardown()

    def on_train_end(self) -> None:
        """Check the weights of the last step, which no further step does."""
        super().on_train_end()
        if self._accumulator is not None:
            self._accumulator.reducer.check()

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
    def _num_nodes_seen(self) -> int:
        return len({place.node for place in self._accumulator.reducer.places}) if self._accumulator else self.num_nodes

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def _defers_reduction(self) -> bool:
        assert isinstance(self.model, DistributedDataParallel)
        return self.model.static_graph and not getattr(self, "_pl_static_graph_delay_done", True)

    def _warn(self, message: str, *, everywhere: bool = False) -> None:
        if message not in self._warned:
            self._warned.add(message)
            (warnings.warn if everywhere else rank_zero_warn)(message, stacklevel=2)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Name the parameters that DDP only counts when it misses their gradients."""
        message = str(exception)
        indices = re.search(r"Parameter indices which did not receive grad for rank (\d+): ([\d ]+)", message)
        if indices is None or not self._reduced:
            super().on_exception(exception)
            return
        unused = ", ".join(self._reduced[int(index)] for index in indices[2].split())
        advice = (
            f"parameters without gradient on rank {indices[1]}: {unused}. They are not used in the loss that"
            " training_step returns. If that is meant, use GradAvgStrategy(find_unused_parameters=True), or freeze"
            " them with requires_grad_(False)."
        )
        exception.args = (advice,)


def _nothing() -> None:
    """End a backward that ends no window."""


def _multiply_gradients(module: nn.Module, factor: float) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None and parameter.requires_grad:
            parameter.grad.mul_(factor)
