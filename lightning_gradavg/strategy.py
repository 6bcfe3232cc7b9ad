"""The Lightning strategy: it translates between the training loop and the reducer, and does no arithmetic."""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import _StrategyRegistry
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gradavg.accumulate import Accumulator, WeighedLoss, zero_loss
from lightning_gradavg.ddp_options import changed_options
from lightning_gradavg.hooks import adapt_hook
from lightning_gradavg.outputs import read_weights
from lightning_gradavg.reducer import Reducer, gather_places
from lightning_gradavg.rules import RULES, RuleFunction, resolve_rule
from lightning_gradavg.window import WHOLE_LOSS, MicroBatch

__all__ = ["GradAvgStrategy"]

ReductionName = Literal[
    "mean",
    "sum",
    "weighted_mean",
    "normalized_sum",
    "mean_of_node_sums",
    "mean_of_node_means",
    "sum_of_node_means",
]


class GradAvgStrategy(DDPStrategy):
    """Data-parallel training whose reduced gradient is that of a stated rule, over all ranks and micro-batches.

    With no option it is stock DDP: the same bits, and no communication hook. The one difference is a last accumulation
    window shorter than `accumulate_grad_batches`, whose mean is taken over the micro-batches that it has.

    A rule that uses weights takes them from `training_step`, which returns `{"loss": loss, "weight": n}`, or from
    `self.manual_backward(loss, weight=n)`; not given, the weight is the number of samples in the batch. Loss terms with
    their own denominators are named: `{"loss": {"cls": a, "box": b}, "weight": {"cls": n, "box": m}}`.

    Args:
        reduction: The name of a rule, or a function `(place, weight) -> Share`. See `lightning_gradavg.rules`.
        accelerator: As in `DDPStrategy`.
        parallel_devices: As in `DDPStrategy`.
        cluster_environment: As in `DDPStrategy`.
        checkpoint_io: As in `DDPStrategy`.
        precision_plugin: As in `DDPStrategy`.
        ddp_comm_state: State of `ddp_comm_hook`.
        ddp_comm_hook: Reduces each bucket, which the rule has scaled before; it must return the mean over the ranks. It
            is used on CPU too.
        ddp_comm_wrapper: Wraps `ddp_comm_hook`, or a plain all-reduce.
        model_averaging_period: Refused: averaging models is not reducing gradients.
        process_group_backend: As in `DDPStrategy`.
        timeout: As in `DDPStrategy`.
        start_method: As in `DDPStrategy`.
        output_device: As in `DistributedDataParallel`, like all that follow.
        dim: See above.
        broadcast_buffers: See above.
        init_sync: See above.
        process_group: See above. The rule counts the ranks of this group.
        bucket_cap_mb: See above, in MiB.
        find_unused_parameters: See above.
        check_reduction: See above.
        gradient_as_bucket_view: See above.
        static_graph: See above.
        delay_all_reduce_named_params: See above; with `reduction="mean"` only.
        param_to_hook_all_reduce: See above; with `reduction="mean"` only.
        mixed_precision: See above; with `reduction="mean"` only.
        device_mesh: See above.
        skip_all_reduce_unused_params: See above.
        bucket_cap_mb_list: See above, in MiB.
        batched_grad_copy: See above.
        forward_sync_buffers: See above.

    Raises:
        ValueError: If `reduction` names no rule, or an option cannot be combined with it.
        TypeError: If an option is unknown to the installed torch.
    """

    def __init__(
        self,
        *,
        reduction: ReductionName | RuleFunction = "mean",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: list[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: _MixedPrecision | None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        given = locals()
        self._rule = resolve_rule(reduction)
        # Stock DDP is the mean; a hook of any kind would change how it divides, and so its bits.
        self._stock = self._rule is RULES["mean"] and ddp_comm_hook is None and ddp_comm_wrapper is None
        options = changed_options(given, hook_of=None if self._stock else self._rule.name)
        if model_averaging_period is not None:
            raise ValueError(
                f"model_averaging_period={model_averaging_period} averages weights instead of reducing gradients."
                " Leave it out, or use lightning.pytorch.strategies.DDPStrategy."
            )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            **options,
        )
        self._accumulator: Accumulator | None = None
        self._loss: WeighedLoss | None = None
        self._batch: Any = None
        self._withheld = False
        self._static_graph_seen = False
        self._reductions = 0
        self._reductions_at_step: dict[int, int] = {}
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        # pytorch_lightning quotes a strategy of lightning.pytorch by its repr when it refuses it.
        return (
            f"{type(self).__name__}(reduction={self._rule.name!r})"
            " [a strategy for lightning.pytorch.Trainer, of the package `lightning`;"
            " pytorch_lightning.Trainer, of the package `pytorch-lightning`, cannot use it]"
        )

    @override
    def setup(self, trainer: Trainer) -> None:
        self._accumulator = None
        self._loss = self._batch = None
        self._static_graph_seen = False
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._announce(trainer)

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
        if self._stock and not (model.static_graph and accumulates):
            return
        group = model.process_group
        hook = None
        if self._ddp_comm_hook is not None or self._ddp_comm_wrapper is not None:
            user_hook = self._ddp_comm_hook or allreduce_hook
            hook = adapt_hook(user_hook, self._ddp_comm_state, self._ddp_comm_wrapper, group)
        manual = not self.lightning_module.automatic_optimization
        places = gather_places(self.node_rank, group)
        reducer = Reducer(self._rule, places, dist.get_rank(group), group, self.root_device, hook, manual)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._accumulator = Accumulator(reducer, parameters, preserves_gradients=manual)
        model.register_comm_hook(None, reducer.hook)

    def _announce(self, trainer: Trainer) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        group = self.model.process_group
        nodes = {place.node for place in self._accumulator.reducer.places} if self._accumulator else None
        where = f" on {len(nodes)} node{'s' if len(nodes) > 1 else ''}" if nodes else f" on {self.num_nodes} node(s)"
        rank_zero_info(
            f"GradAvgStrategy: reduction={self._rule.name!r}, g = {self._rule.formula};"
            f" {dist.get_world_size(group)} ranks{where} ({dist.get_backend(group)});"
            f" windows of {trainer.accumulate_grad_batches} micro-batches"
        )

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
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._batch = args[0] if args else next(iter(kwargs.values()), None)
        try:
            output = super().training_step(*args, **kwargs)
            assert self.lightning_module is not None
            if not self.lightning_module.automatic_optimization:
                return output
            return self._take_loss(output)
        finally:
            self._batch = None

    def _take_loss(self, output: STEP_OUTPUT) -> STEP_OUTPUT:
        """Return the output with one loss to run the backward from, and remember its weights."""
        weight = output.get("weight") if isinstance(output, Mapping) else None
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None:
            return output
        self._loss = self._weigh(loss, weight, alone=self._trainer.accumulate_grad_batches == 1)
        if isinstance(output, Mapping):
            return output if self._loss.value is loss else {**output, "loss": self._loss.value}
        return self._loss.value

    def _weigh(self, loss: Any, weight: Any, *, alone: bool) -> WeighedLoss:
        terms: Mapping[str, Tensor] = loss if isinstance(loss, Mapping) else {WHOLE_LOSS: loss}
        if weight is not None and not self._rule.uses_weight:
            self._warn(f'a "weight" was given, but reduction={self._rule.name!r} does not use weights: it is ignored.')
        if self._accumulator is None:
            losses = list(terms.values())
            return WeighedLoss(sum(losses[1:], losses[0]), MicroBatch({WHOLE_LOSS: 1.0}))
        micro_batch = read_weights(self._rule, terms, weight, self._batch, self.root_device)
        if micro_batch.explicit and 0.0 in [w for w in micro_batch.weights.values() if not isinstance(w, Tensor)]:
            self._warn(
                f"rank {self.global_rank} has a micro-batch of weight 0, which contributes nothing to the gradient."
                " Further ones are not reported.",
                everywhere=True,
            )
        if not any(term.requires_grad for term in terms.values()) and not any(micro_batch.weights.values()):
            terms = {WHOLE_LOSS: zero_loss(self._accumulator.parameters)}
            micro_batch = MicroBatch({WHOLE_LOSS: 0.0}, micro_batch.explicit, micro_batch.problem)
            assert isinstance(self.model, DistributedDataParallel)
            prepare_for_backward(self.model, terms)
        return self._accumulator.weigh(terms, micro_batch, alone=alone)

    @override
    def backward(
        self, closure_loss: Any, optimizer: Optimizer | None, *args: Any, weight: Any = None, **kwargs: Any
    ) -> Tensor:
        module = self.lightning_module
        assert module is not None
        if module.automatic_optimization:
            loss, self._loss = self._loss, None
        else:
            loss = self._weigh(closure_loss, weight, alone=False)
            closure_loss = loss.value

        self.pre_backward(closure_loss)
        scaled = self.precision_plugin.pre_backward(closure_loss, module)

        def run(**extra: Any) -> None:
            self.precision_plugin.backward(scaled, module, optimizer, *args, **kwargs, **extra)

        finish = self._run(loss, run)
        self._static_graph_seen = True
        # The first backward of a static graph in manual optimization is reduced in post_backward.
        deferred = not module.automatic_optimization and self._defers_reduction
        if not deferred:
            finish()
        closed = self.precision_plugin.post_backward(scaled, module)
        self.post_backward(closed)
        if deferred:
            finish()
        return closed

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

    def _run(self, loss: WeighedLoss | None, run: Callable[..., None]) -> Callable[[], None]:
        """Run one backward, and return what ends its window."""
        model, trainer, module = self.model, self._trainer, self.lightning_module
        if module is None or not isinstance(model, DistributedDataParallel):
            run()
            return _nothing
        automatic = module.automatic_optimization
        divisor = trainer.accumulate_grad_batches if automatic else 1
        length = trainer.fit_loop.epoch_loop.batch_idx % divisor + 1
        last = model.require_backward_grad_sync and not self._withheld
        self._reductions += last
        if self._accumulator is None:
            run()
            return partial(_multiply_gradients, model, divisor / length) if last and length < divisor else _nothing
        assert loss is not None
        if automatic and length == 1:
            self._accumulator.reset()
        if not automatic and self._rule is RULES["mean"]:
            # As in stock DDP, the user divides the losses of a window in manual optimization.
            divisor = self._accumulator.pending + 1
        self._accumulator.backward(loss, run, last=last, loss_divisor=divisor)
        return self._accumulator.finish if last else self._accumulator.pause

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
        model, message = self.model, str(exception)
        indices = re.search(r"Parameter indices which did not receive grad for rank (\d+): ([\d ]+)", message)
        if indices is None or not isinstance(model, DistributedDataParallel):
            super().on_exception(exception)
            return
        parameters, _ = model._build_params_for_reducer()
        names = {parameter: name for name, parameter in model.module.named_parameters()}
        unused = ", ".join(names[parameters[int(index)]] for index in indices[2].split())
        advice = (
            f"parameters without gradient on rank {indices[1]}: {unused}. They are not used in the loss that"
            " training_step returns. If that is meant, use GradAvgStrategy(find_unused_parameters=True), or freeze"
            " them with requires_grad_(False)."
        )
        exception.args = (advice,)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Register the names of this strategy. Doing it again changes nothing."""
        for name, options in _NAMES.items():
            description = f"{cls.__name__} with {options}" if options else cls.__name__
            strategy_registry.register(name, cls, description=description, override=True, **options)


_NAMES: dict[str, dict[str, Any]] = {
    "gradavg": {},
    "gradavg_sum": {"reduction": "sum"},
    "gradavg_weighted": {"reduction": "weighted_mean"},
    "gradavg_spawn": {"start_method": "spawn"},
    "gradavg_fork": {"start_method": "fork"},
    "gradavg_notebook": {"start_method": "fork"},
}


def _nothing() -> None:
    """End a backward that ends no window."""


def _multiply_gradients(module: nn.Module, factor: float) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None and parameter.requires_grad:
            parameter.grad.mul_(factor)
