"""The strategy that users name: its options, and how Lightning finds it."""

import atexit
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import _StrategyRegistry
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel.distributed import _MixedPrecision
from typing_extensions import override

from lightning_gradavg.data.batches import Split
from lightning_gradavg.presets import StrategyFacts, plan_of
from lightning_gradavg.rates.run_recipe import RunRecipe
from lightning_gradavg.rates.scaling import ScaleFunction
from lightning_gradavg.reduction.ddp_options import changed_options
from lightning_gradavg.reduction.reducer import Reducer
from lightning_gradavg.replication.replicating import ReplicatingStrategy
from lightning_gradavg.rules import RULES, RuleFunction
from lightning_gradavg.termination import Termination
from lightning_gradavg.wire.options import WireOptions

__all__ = ["GradAvgStrategy"]

ReductionName = Literal[
    "mean",
    "sum",
    "weighted_mean",
    "normalized_sum",
    "mean_of_node_sums",
    "mean_of_node_means",
    "sum_of_node_means",
    "mean_of_replica_losses",
]

PresetName = Literal["data_parallel", "single_device"]

ScalingName = Literal["none", "linear", "sqrt", "adam_sde"]

WireName = Literal["bfloat16", "float16", "int8"]


class GradAvgStrategy(ReplicatingStrategy):
    """Data-parallel training whose reduced gradient is that of a stated rule, over all ranks and micro-batches.

    With no option it is stock DDP: the same bits, no communication hook. The one difference is a last accumulation
    window shorter than `accumulate_grad_batches`, whose mean is taken over the micro-batches that it has.

    A rule that uses weights takes them from `training_step`, which returns `{"loss": loss, "weight": n}`, or from
    `self.manual_backward(loss, weight=n)`; not given, the weight is the number of samples in the batch. Loss terms with
    their own denominators are named: `{"loss": {"cls": a, "box": b}, "weight": {"cls": n, "box": m}}`.

    Args:
        reduction: The name of a rule, or a function `(place, weight) -> Share`. See `lightning_gradavg.rules`.
            `"mean_of_replica_losses"`, with `equivalent_to="data_parallel"` only, is what Lightning 1.x did with the
            losses of the replicas: each has the same say, however many samples it has.
        equivalent_to: The run to reproduce, on any number of ranks: `"data_parallel"`, that of `nn.DataParallel` on
            `num_replicas` devices, or `"single_device"`. It sets `split_batches` and `exact_evaluation`, hands the
            outputs of all replicas to `training_step_end`, where the module has that hook of Lightning 1.x, and keeps
            the buffers alike on all ranks. What cannot be reproduced is an error at the start of `fit`. See
            docs/equivalence.md.
        num_replicas: Chunks that every loader batch is computed in, each with its own batch norm statistics and random
            numbers; by default one per rank. A rank runs several one after another. Needs `split_batches`, which
            `equivalent_to="data_parallel"` sets.
        recompute_replicas: True to have a rank keep the activations of one replica at a time, and compute each again
            in the backward.
        split_batches: True if the training loader's batches are the global batches: every rank gets its contiguous
            chunk of each, cut as `torch.chunk` cuts, in the order of a run on one process. The mean is then the mean
            over the samples of the global batch, however unevenly the ranks share them. None for what `equivalent_to`
            says, and False without it.
        max_device_batch_size: With `split_batches`, the most samples that a rank computes at once: chunks that are
            larger are accumulated, which does not change the result.
        lr_scaling: How the learning rate follows the ratio of the global batch to the base batch: `"none"`, `"linear"`,
            `"sqrt"`, `"adam_sde"`, or a function of the ratio. See `lightning_gradavg.rates.scaling`.
        base_batch_size: The global batch that the learning rate was tuned for, in samples.
        base_world_size: Without `base_batch_size`, the number of ranks that the learning rate was tuned for.
        lr_warmup_steps: Optimizer steps from the base learning rate to the scaled one.
        allow_recipe_change: True to resume a checkpoint of another recipe, with another global batch, rule or base.
            Otherwise the differences are an error.
        exact_evaluation: True to have validation, test and prediction see each sample exactly once, and log the values
            of one process. See docs/evaluation.md. None for what `equivalent_to` says, and False without it.
        wire_dtype: What gradients are sent as between ranks: `"bfloat16"` or `"float16"`, half the bytes, or `"int8"`,
            a quarter, with error feedback. They are summed in float32, and all ranks get the same bits. None for their
            own type. See docs/communication.md.
        wire_scope: `"all"` to use `wire_dtype` between any ranks, `"nodes"` only between nodes.
        node_aware: True to sum within each node before anything is sent between nodes, False not to, None to do so
            where it pays: on gloo, under a rule that has a hook anyway, with nodes of equally many ranks, two or more.
        power_sgd_rank: To send matrices of this rank instead of gradients, by torch's PowerSGD.
        power_sgd_start_step: Optimizer steps before PowerSGD begins.
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
        process_group: See above. Its ranks are the data-parallel ones: the rule counts them, data are dealt to them,
            and what is logged is reduced over them. Every rank of the run is in one group. See docs/reduction.md.
        bucket_cap_mb: See above, in MiB.
        find_unused_parameters: See above.
        check_reduction: See above.
        gradient_as_bucket_view: See above.
        static_graph: See above.
        delay_all_reduce_named_params: See above; with `reduction="mean"` only.
        param_to_hook_all_reduce: See above; with `reduction="mean"` only.
        mixed_precision: See above; with `reduction="mean"` only.
        device_mesh: See above: one dimension of a mesh, instead of `process_group`.
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
        equivalent_to: PresetName | None = None,
        num_replicas: int | None = None,
        recompute_replicas: bool = False,
        split_batches: bool | None = None,
        max_device_batch_size: int | None = None,
        lr_scaling: ScalingName | ScaleFunction = "none",
        base_batch_size: int | None = None,
        base_world_size: int = 1,
        lr_warmup_steps: int = 0,
        allow_recipe_change: bool = False,
        exact_evaluation: bool | None = None,
        wire_dtype: WireName | None = None,
        wire_scope: Literal["all", "nodes"] = "all",
        node_aware: bool | None = None,
        power_sgd_rank: int | None = None,
        power_sgd_start_step: int = 1000,
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
        plan = plan_of(
            reduction=reduction,
            equivalent_to=equivalent_to,
            num_replicas=num_replicas,
            recompute_replicas=recompute_replicas,
            split_batches=split_batches,
            max_device_batch_size=max_device_batch_size,
            exact_evaluation=exact_evaluation,
            broadcast_buffers=broadcast_buffers,
            forward_sync_buffers=forward_sync_buffers,
        )
        Split(max_samples=max_device_batch_size)
        recipe = RunRecipe(
            plan.rule,
            split_batches=plan.split_batches,
            lr_scaling=lr_scaling,
            base_batch_size=base_batch_size,
            base_world_size=base_world_size,
            lr_warmup_steps=lr_warmup_steps,
            equivalent_to=equivalent_to,
        )
        if model_averaging_period is not None:
            raise ValueError(
                f"model_averaging_period={model_averaging_period} averages weights instead of reducing gradients."
                " Leave it out, or use lightning.pytorch.strategies.DDPStrategy."
            )
        wire = WireOptions(wire_dtype, wire_scope, node_aware, power_sgd_rank, power_sgd_start_step)
        of_user = [name for name in ("ddp_comm_hook", "ddp_comm_wrapper") if given[name] is not None]
        if of_user and wire.asked_for is not None:
            raise ValueError(
                f"{wire.asked_for} says how gradients are reduced, and so does {of_user[0]}. Leave one of them out."
            )
        hooked = [*([wire.asked_for] if wire.asked_for is not None else []), *of_user]
        if plan.rule is not RULES["mean"]:
            hooked = [f"reduction={plan.rule.name!r}"]
        super().__init__(
            plan,
            recipe,
            wire=wire,
            allow_recipe_change=allow_recipe_change,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            **changed_options(given, hook_of=hooked[0] if hooked else None),
        )

        self._termination: Termination | None = None

    def __repr__(self) -> str:
        # pytorch_lightning quotes a strategy of lightning.pytorch by its repr when it refuses it.
        return (
            f"{type(self).__name__}(reduction={self._rule.name!r})"
            " [a strategy for lightning.pytorch.Trainer, of the package `lightning`;"
            " pytorch_lightning.Trainer, of the package `pytorch-lightning`, cannot use it]"
        )

    def facts(self) -> StrategyFacts:
        """Return what decides the mathematics of the run, while it trains."""
        data, plan = self._data, self._plan
        shared = plan.preset is not None and plan.preset.synchronizes_statistics
        return StrategyFacts(
            rule=self._rule,
            splits_batches=data is not None,
            accumulation=self._trainer.accumulate_grad_batches if data is None else data.accumulation,
            micro_batches=1 if data is None else data.micro_batches,
            replicas=self.num_replicas if plan.replicated and not shared else None,
            replicated=plan.replicated,
            counts_replicas=plan.counts_replicas,
            equivalent_to=plan.preset.name if plan.preset is not None else None,
            scales_rates=self._recipe.rates is not None,
            samples=self._samples(),
        )

    @override
    def setup_distributed(self) -> None:
        ours = not dist.is_initialized()
        super().setup_distributed()
        if ours and dist.is_initialized() and dist.get_backend() != "nccl":
            # Lightning does it for NCCL alone. Gloo's threads, left to the interpreter's end, can abort the process.
            atexit.register(_destroy_process_group)

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and self.world_size > 1 and Termination.applies_to(trainer):
            self._termination = Termination(trainer, self.root_device, self._reducer_of_all)

    @property
    def _reducer_of_all(self) -> Reducer | None:
        """What exchanges totals over all ranks of the run, or None."""
        if self._accumulator is None or len(self._accumulator.reducer.places) < self.world_size:
            return None
        return self._accumulator.reducer

    @override
    def teardown(self) -> None:
        if self._termination is not None:
            self._termination.remove()
            self._termination = None
        super().teardown()

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
    "gradavg_data_parallel": {"equivalent_to": "data_parallel"},
    "gradavg_single_device": {"equivalent_to": "single_device"},
    "gradavg_spawn": {"start_method": "spawn"},
    "gradavg_fork": {"start_method": "fork"},
    "gradavg_notebook": {"start_method": "fork"},
}


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
