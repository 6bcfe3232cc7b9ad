"""The strategy that users name: its options, and DDPStrategy's methods in the order in which Lightning calls them.

Each of them is handed on to the parts that have something to say to it. What one part needs of another is an argument
here; where the order of two parts matters, it stands here.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gradavg.arguments import by_keyword
from lightning_gradavg.batches.part import Batches, SplitBatches
from lightning_gradavg.checkpoints import WholeCheckpoints, whole_checkpoint
from lightning_gradavg.evaluation.part import Evaluation, ExactEvaluation
from lightning_gradavg.faults.nonfinite import NonFinite, refuse_unjudged
from lightning_gradavg.faults.part import faults_of
from lightning_gradavg.fingerprint import combined, state_digests
from lightning_gradavg.launch import destroy_at_exit, plain, require_alike, require_launch
from lightning_gradavg.lightning_internals import MixedPrecision
from lightning_gradavg.loaders import loader_batch_size
from lightning_gradavg.options import Options, StrategyFacts, check_groups, check_reproducible, options_of_ddp
from lightning_gradavg.part import Part, Run, Saved
from lightning_gradavg.random_state import random_state, restore_random_state
from lightning_gradavg.ranks import World, require_members
from lightning_gradavg.rates.part import rates_of
from lightning_gradavg.rates.recipe import RunRecipe
from lightning_gradavg.rates.scaling import ScaleFunction
from lightning_gradavg.reduction.gather import losses_weighed, require_allowed
from lightning_gradavg.reduction.loss import WeighedLoss
from lightning_gradavg.reduction.reduction import Reduction
from lightning_gradavg.replicas.single_device import replicas_of
from lightning_gradavg.report.part import Reports
from lightning_gradavg.report.report import StepReport
from lightning_gradavg.reproducible.part import AlignedReplicas, Arithmetic, FixedArithmetic
from lightning_gradavg.reproducible.reduction import TreeReduction
from lightning_gradavg.rules import RULES, RuleFunction
from lightning_gradavg.termination import Termination
from lightning_gradavg.wire.route import WireOptions

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

WireName = Literal["bfloat16", "float16"]

NonFiniteName = Literal["propagate", "raise", "skip_step", "drop_rank"]

_CHECKPOINT_KEY = "lightning_gradavg"


class GradAvgStrategy(DDPStrategy):
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
        reproducible: True to train to the same bits on any number of ranks that divides `num_replicas`, and on any
            grouping of them into nodes. It sets `equivalent_to="data_parallel"`, computes in one thread per process by
            deterministic algorithms, and sums the replicas' gradients in one order. See docs/reproducible.md.
        wire_dtype: What gradients are sent as between ranks: `"bfloat16"` or `"float16"`, half the bytes. They are
            summed in float32, and all ranks get the same bits. None for their own type. See docs/performance.md.
        wire_scope: `"all"` to use `wire_dtype` between any ranks, `"nodes"` only between nodes.
        node_aware: True for the hierarchical all-reduce, which sums within each node before anything is sent between
            nodes, False for none, None for where it pays: with nodes of equally many ranks, two or more, on gloo under
            a rule that has a hook anyway, and on NCCL with a `wire_dtype`.
        nonfinite: What becomes of a step in which a rank's loss or gradient is NaN or infinite, or its `training_step`
            returns None: `"propagate"` steps as stock DDP does, `"raise"` raises on all ranks, `"skip_step"` leaves the
            step out on all ranks, `"drop_rank"` gives that rank weight 0 in it. All but the first reduce after the
            backward instead of while it runs. See docs/faults.md.
        check_replicas_every_n_steps: Optimizer steps from one comparison of the ranks' parameters to the next; they are
            also compared when training begins, and after every epoch. Ranks that differ are a `RuntimeError` on all of
            them. None for no comparison. See docs/faults.md.
        accelerator: As in `DDPStrategy`.
        parallel_devices: As in `DDPStrategy`.
        cluster_environment: As in `DDPStrategy`.
        checkpoint_io: As in `DDPStrategy`.
        precision_plugin: As in `DDPStrategy`.
        ddp_comm_state: State of `ddp_comm_hook`.
        ddp_comm_hook: Reduces each bucket; it must return the mean over the ranks, which the rule then scales. It is
            used on CPU too.
        ddp_comm_wrapper: Wraps `ddp_comm_hook`, or a plain all-reduce.
        model_averaging_period: Refused: averaging models is not reducing gradients.
        process_group_backend: As in `DDPStrategy`.
        timeout: As in `DDPStrategy`.
        start_method: As in `DDPStrategy`.
        output_device: As in `DistributedDataParallel`, like all that follow.
        dim: See above.
        broadcast_buffers: See above.
        init_sync: See above.
        process_group: See above. The rule counts its ranks. Data, logs and metrics are those of all ranks, as in stock
            DDP, so `split_batches`, `equivalent_to`, `exact_evaluation` and `lr_scaling` are refused beside it.
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
        TypeError: If an option is unknown, to this class or to the installed torch, or its value is of a wrong type.
    """

    @by_keyword
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
        reproducible: bool = False,
        wire_dtype: WireName | None = None,
        wire_scope: Literal["all", "nodes"] = "all",
        node_aware: bool | None = None,
        nonfinite: NonFiniteName = "propagate",
        check_replicas_every_n_steps: int | None = 1000,
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
        mixed_precision: MixedPrecision | None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        given = dict(locals())
        check_reproducible(given)
        options = Options.of(**{name: given[name] for name in _OF_OPTIONS})
        check_groups(options, given)
        recipe = RunRecipe(
            options.rule,
            split_batches=options.split_batches,
            lr_scaling=lr_scaling,
            base_batch_size=base_batch_size,
            base_world_size=base_world_size,
            lr_warmup_steps=lr_warmup_steps,
            equivalent_to=options.preset.name if options.preset is not None else None,
        )
        if model_averaging_period is not None:
            raise ValueError(
                f"model_averaging_period={model_averaging_period} averages weights instead of reducing gradients."
                " Leave it out, or use lightning.pytorch.strategies.DDPStrategy."
            )
        wire = WireOptions(wire_dtype, wire_scope, node_aware)
        of_user = [name for name in ("ddp_comm_hook", "ddp_comm_wrapper") if given[name] is not None]
        if of_user and wire.asked_for is not None:
            raise ValueError(
                f"{wire.asked_for} says how gradients are reduced, and so does {of_user[0]}. Leave one of them out."
            )
        judge = None if nonfinite == "propagate" else NonFinite(nonfinite, rank_zero_info)
        judged = None if judge is None else f"nonfinite={nonfinite!r}"
        refuse_unjudged(options, given)
        stock_rule = options.rule == RULES["mean"]
        hooked = next(iter(of_user), wire.asked_for or judged) if stock_rule else f"reduction={options.rule.name!r}"
        super().__init__(
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
            **options_of_ddp(given, GradAvgStrategy.__init__, hooked),
        )
        self._options, self._plain = options, plain(given)
        self._members = (process_group, device_mesh)
        hook = ddp_comm_hook, ddp_comm_state, ddp_comm_wrapper
        self._reports = Reports(options.rule, crosses_ranks=options.replicated)
        replicas = num_replicas or 1
        reduction_of = partial(TreeReduction, replicas=replicas) if reproducible else Reduction
        self._reduction = reduction_of(
            options.rule,
            wire,
            hook,
            timeout,
            crosses_ranks=options.replicated,
            on_weighed=self._reports.weighed,
            judge=judge,
        )
        self._batches = SplitBatches(options) if options.split_batches else Batches()
        self._rates = rates_of(recipe, allow_change=allow_recipe_change, may_differ=self._reduction.is_stock)
        self._replicas = (AlignedReplicas if reproducible else replicas_of)(options, static_graph=static_graph)
        self._arithmetic = FixedArithmetic(replicas) if reproducible else Arithmetic()
        self._evaluation = ExactEvaluation(timeout) if options.exact_evaluation else Evaluation()
        # Without replicas DDP's next forward makes buffers alike, so after a step they may differ.
        self._faults = faults_of(check_replicas_every_n_steps, buffers=options.replicated)
        self._parts: tuple[Part, ...] = (
            self._arithmetic,
            self._reduction,
            self._batches,
            self._rates,
            self._replicas,
            self._evaluation,
            self._reports,
            self._faults,
            Termination(),
        )
        self._begun: list[Part] = []
        self._prepares: str | None = None
        self._saved: Saved | None = None

    def __repr__(self) -> str:
        # pytorch_lightning and Fabric quote a strategy of lightning.pytorch by its repr when they refuse it.
        return (
            f"{type(self).__name__}(reduction={self._options.rule.name!r})"
            " [a strategy for lightning.pytorch.Trainer, of the package `lightning`: neither pytorch_lightning.Trainer,"
            " of the package `pytorch-lightning`, nor Fabric can use it. Fabric takes"
            " lightning_gradavg.fabric.GradAvgStrategy; in a loop of your own call lightning_gradavg.average_gradients]"
        )

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the names of this strategy. Doing it again changes nothing."""
        for name, options in _NAMES.items():
            description = f"{cls.__name__} with {options}" if options else cls.__name__
            strategy_registry.register(name, cls, description=description, override=True, **options)

    @property
    def global_batch_size(self) -> int | None:
        """Samples of one optimizer step, over ranks and window; None before `fit` or where no loader tells."""
        return self._rates.recipe.global_batch_size

    @property
    def lr_scale(self) -> float:
        """What `lr_scaling` multiplies the learning rate by, the warm-up being over."""
        return self._rates.recipe.lr_scale

    @property
    def num_replicas(self) -> int:
        """Chunks that each loader batch is computed in."""
        return self._replicas.num_replicas(self.world_size)

    @property
    def _shaping_replicas(self) -> int | None:
        """Chunks of each loader batch that have batch statistics of their own, which the result depends on."""
        return self.num_replicas if self._options.replicated and not self._options.one_device else None

    def observe_next_step(self, *, cosines: bool = True) -> None:
        """Observe the optimizer step whose window begins next; `report()` returns it once its gradients are reduced.

        A collective operation: every rank must call it before the same step. The observed step exchanges one vector of
        some 240 numbers and, on an accelerator, waits for its gradients.

        Args:
            cosines: Whether to measure the angle between local and reduced gradients, which takes a copy of the
                gradients for the length of a backward.
        """
        self._reports.observe_next_step(copies=cosines)

    @property
    def observing(self) -> bool:
        """Whether a step that was asked for has not been reported yet."""
        return self._reports.observing

    def report(self) -> StepReport:
        """Return what was observed of the last observed step, the same on all ranks.

        Raises:
            RuntimeError: If no step was observed.
        """
        return self._reports.report()

    def facts(self) -> StrategyFacts:
        """Return what decides the mathematics of the run, while it trains."""
        options = self._options
        return StrategyFacts(
            rule=options.rule,
            splits_batches=options.split_batches,
            accumulation=self._batches.accumulation,
            micro_batches=self._batches.micro_batches,
            replicas=self._shaping_replicas,
            replicated=options.replicated,
            counts_replicas=options.counts_replicas,
            equivalent_to=options.preset.name if options.preset is not None else None,
            scales_rates=self._rates.recipe.scales,
            samples=self._replicas.samples(self._batches.chunk),
        )

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that are the same where parameters, buffers, optimizer and random state are.

        A collective operation. Of a run with `reproducible=True` they are the same after the same step on any number of
        ranks. Of random states that of the CPU on rank 0 counts, and the seed of the replicas.

        Raises:
            RuntimeError: If there is no module yet.
        """
        return combined(self.state_digests())

    def state_digests(self) -> dict[str, str]:
        """Return what the fingerprint is made of: as many digits of every tensor and number of the state, by name.

        A collective operation.

        Raises:
            RuntimeError: If there is no module yet.
        """
        if self.lightning_module is None:
            raise RuntimeError("there is nothing to take a fingerprint of before the Trainer has begun a run")
        drawn: Saved = {"random state": World.of(None).from_first(random_state())}
        self._replicas.save(drawn, {})
        return state_digests(self.lightning_module, self.optimizers, drawn)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # Stock multiplies nodes by devices, which is another number where nodes are uneven.
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        require_launch(self)

    @override
    def setup_distributed(self) -> None:
        """Join the process group, and see to its end."""
        state, ours = random_state(), not dist.is_initialized()
        super().setup_distributed()
        if self._options.replicated:
            # Lightning starts random numbers anew from the seed here, so that ranks draw alike, which loaders see to
            # themselves: a script goes on drawing as on one device.
            restore_random_state(state)
        if ours:
            destroy_at_exit()

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        run = Run(trainer, self.lightning_module, self.root_device, World.of(None))
        self._begun = []
        for part in self._parts:
            part.setup(run)
            self._begun.append(part)
        if type(self.checkpoint_io) is TorchCheckpointIO:
            self.checkpoint_io = WholeCheckpoints()
        if trainer.state.fn == TrainerFn.FITTING:
            of_all = None if any(each is not None for each in self._members) else run.module
            require_alike(run.world, trainer, of_all, self._plain)
        if any(each is not None for each in self._members):
            require_members(run.world, *self._members)
        super().setup(trainer)

    @override
    def _register_ddp_hooks(self) -> None:
        """Register the reduction, on CPU as on CUDA, where Lightning would drop a hook without a word."""
        model, module = self.model, self.lightning_module
        assert isinstance(model, DistributedDataParallel)
        assert module is not None
        places = World.of(model.process_group).places(self.node_rank)
        run = Run(module.trainer, module, self.root_device, World.of(None), model, places)
        for part in self._parts:
            part.configure_ddp(run)
        recipe = self._rates.recipe
        recipe.num_replicas, recipe.arithmetic = self._shaping_replicas, self._arithmetic.settings

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        self._rates.setup_optimizers(self.optimizers, self._schedulers)

    @property
    def _schedulers(self) -> list[Any]:
        return [config.scheduler for config in self.lr_scheduler_configs]

    @override
    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks. Lightning names the loaders here that it is about to prepare."""
        super().barrier(name, *args, **kwargs)
        if name is not None and name.endswith("_dataloader()"):
            self._prepares = name.removesuffix("_dataloader()")
            for part in self._parts:
                part.prepare_loaders(self._prepares)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        module = self.lightning_module
        if self._evaluation.prepares:
            return self._evaluation.process_dataloader(dataloader)
        if self._prepares != "train" or module is None or module.trainer.state.fn != TrainerFn.FITTING:
            return dataloader
        size = loader_batch_size(dataloader)
        dataloader = self._batches.process_dataloader(dataloader)
        self._rates.add_loader(size, self._batches.accumulation)
        return dataloader

    def on_train_start(self) -> None:
        """Begin with the training loaders, which are known now."""
        super().on_train_start()
        for part in self._parts:
            part.on_train_start()
        for message in self._rates.begin(self._schedulers, self._batches.accumulation):
            self._reduction.warn(message)
        if self._saved is not None and self._ddp_comm_state is not None:
            rank_zero_info("GradAvgStrategy: ddp_comm_state is not part of a checkpoint and begins anew")
        self._saved = None
        rank_zero_info(self._start_line())

    def _start_line(self) -> str:
        run, rule, size = self._reduction.run, self._options.rule, self.global_batch_size
        ranks, nodes, window = len(run.places), run.num_nodes, run.trainer.accumulate_grad_batches
        return (
            f"GradAvgStrategy: reduction={rule.name!r}, g = {rule.formula};"
            f" {ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"
            f" ({dist.get_backend(run.ddp.process_group)});"
            f" global batch {size if size is not None else 'unknown'}, windows of {window}"
            f" micro-batch{'es' * (window > 1)}{''.join(part.describe() for part in self._parts)}"
        )

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self.lightning_module is not None and self.lightning_module.trainer.training:
            self._faults.on_train_batch_start()
            self._batches.on_train_batch_start()
            self._reduction.look_at(batch)
            self._rates.follow(self._schedulers, self._batches.accumulation)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self.lightning_module is not None
        automatic = self.lightning_module.automatic_optimization
        self._reduction.begin_step(args[0] if args else next(iter(kwargs.values()), None), self._batches.missing)
        self._reports.begin_step()
        try:
            step = self._replicas.step(self._reduction, self._batches)
            with self._reduction.forward(), step, losses_weighed(self._reduction.on_gather):
                output = super().training_step(*args, **kwargs)
            return self._replicas.read(output, self._reduction, self._batches.chunk) if automatic else output
        except ValueError as error:
            # Of a chunk of one sample. Raised here, the other ranks would wait for this one; in manual optimization
            # there is no loss that could carry the news.
            if not (automatic and self._options.rule.uses_weight and "more than 1 value per channel" in str(error)):
                raise
            return self._reduction.fail_together(str(error))

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep the gradients of a micro-batch local."""
        end = self._reduction.withhold()
        if end is None:
            with super().block_backward_sync():
                yield
            return
        try:
            yield
        finally:
            end()

    @override
    def backward(
        self, closure_loss: Any, optimizer: Optimizer | None, *args: Any, weight: Any = None, **kwargs: Any
    ) -> Tensor:
        """Run the backward of a step's loss, or of the loss of each of its replicas one after another."""
        module, precision = self.lightning_module, self.precision_plugin
        assert module is not None
        if not module.automatic_optimization:
            closure_loss = self._reduction.add(closure_loss, weight, self._replicas.samples(self._batches.chunk)).value
        losses = self._reduction.take()
        self.pre_backward(closure_loss)
        roots = [precision.pre_backward(closure_loss, module)]
        if len(losses) > 1:
            # Hooks see one backward, of the mean of the replicas' losses.
            scaler, window = getattr(precision, "scaler", None), module.trainer.accumulate_grad_batches
            divided = [loss.value / window for loss in losses]
            roots = divided if scaler is None else [scaler.scale(root) for root in divided]
        for index, (loss, root) in enumerate(zip(losses, roots, strict=True)):
            first, final = index == 0, index == len(losses) - 1
            self._backward_of(loss, root, optimizer, args, kwargs, first=first, final=final)
        # The first backward of a static graph in manual optimization is reduced in post_backward.
        deferred = not module.automatic_optimization and self._reduction.defers
        if not deferred:
            self._end_backward()
        closed: Tensor = precision.post_backward(roots[0] if len(losses) == 1 else closure_loss, module)
        self.post_backward(closed)
        if deferred:
            self._end_backward()
        return closed

    def _backward_of(
        self, loss: WeighedLoss, root: Tensor, optimizer: Optimizer | None, args: Any, kwargs: Any, **position: bool
    ) -> None:
        """Run the backward of one of a step's losses."""

        def run(**extra: Any) -> None:
            assert self.lightning_module is not None
            self.precision_plugin.backward(root, self.lightning_module, optimizer, *args, **kwargs, **extra)

        with self._reports.backward(loss, last=self._reduction.ends_window(final=position["final"])):
            self._reduction.backward(loss, root, run, **position)

    def _end_backward(self) -> None:
        """End a micro-batch, once its gradients are there."""
        if self._reduction.skipped:
            self._reports.postpone()
        if self._reports.measures:
            scaler = getattr(self.precision_plugin, "scaler", None)
            loss_scale = float(scaler.get_scale()) if scaler is not None else 1.0
            self._reports.end_window(
                self._reduction.closed, self.optimizers, lr_scale=self.lr_scale, loss_scale=loss_scale
            )
        # It adds what was accumulated in earlier windows, which is no part of the report.
        self._reduction.end_backward()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        if self._reduction.manual is not None:
            self._reduction.manual.note_step(optimizer)
        step = super().optimizer_step
        return self._rates.optimizer_step(optimizer, lambda: step(optimizer, closure, model, **kwargs))

    @override
    def on_train_end(self) -> None:
        """Check the weights of the last step, which no further step does."""
        super().on_train_end()
        self._reduction.check()
        self._faults.on_train_end()

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._start_evaluation()

    @override
    def on_test_start(self) -> None:
        super().on_test_start()
        self._start_evaluation()

    @override
    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._start_evaluation()

    def _start_evaluation(self) -> None:
        self._replicas.on_evaluation_start()
        self._evaluation.on_evaluation_start()
        self._faults.on_evaluation_start()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self._evaluation.through_ddp:
            return super().validation_step(*args, **kwargs)
        # DDP's forward broadcasts buffers, in which ranks with fewer batches would not take part.
        assert self.lightning_module is not None
        with self.precision_plugin.val_step_context():
            return self.lightning_module.validation_step(*args, **kwargs)

    @override
    def reduce(
        self, tensor: Tensor, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor:
        """Reduce a tensor over the ranks, in exact evaluation over those that have a batch of what is evaluated.

        Where ranks share batches the mean of integers, such as batch sizes, is exact, too: stock cuts off its decimals
        on gloo.
        """
        averages = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        exact = averages and (self._options.split_batches or self._options.exact_evaluation)
        reduced = _widened(tensor) if exact else tensor
        return super().reduce(reduced, self._evaluation.group() if group is None else group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        require_allowed()
        # Of no group, `LightningModule.all_gather` makes that of all ranks.
        if group in (None, dist.group.WORLD):
            group = self._evaluation.group()
        return super().all_gather(tensor, group, sync_grads)

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._end_evaluation()

    @override
    def on_test_end(self) -> None:
        super().on_test_end()
        self._end_evaluation()

    @override
    def on_predict_end(self) -> None:
        super().on_predict_end()
        self._end_evaluation()

    def _end_evaluation(self) -> None:
        self._replicas.on_evaluation_end()
        self._evaluation.on_evaluation_end()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._rates.optimizer_state(optimizer, super().optimizer_state(optimizer))

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        load = super().load_optimizer_state_dict
        self._rates.load_optimizers(checkpoint.get(_CHECKPOINT_KEY), lambda: load(checkpoint))

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        # What is wrong with the last step must not get into a file.
        self._reduction.check()
        saved: Saved = {}
        for part in self._parts:
            part.save(saved, checkpoint)
        super().save_checkpoint({**checkpoint, _CHECKPOINT_KEY: saved}, *args, **kwargs)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        module = self.lightning_module
        trains = module is not None and module.trainer.state.fn == TrainerFn.FITTING
        if trains:
            checkpoint_path = whole_checkpoint(checkpoint_path, World.of(None))
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._saved = checkpoint.get(_CHECKPOINT_KEY)
        if trains:
            # Of a checkpoint of another strategy only the recipe is asked, which it does not have.
            for part in self._parts if self._saved is not None else (self._rates,):
                part.load(self._saved or {})
        return checkpoint

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Name the parameters that DDP only counts when it misses their gradients, and the rank that failed first."""
        advice = self._reduction.advice(exception)
        if advice is not None:
            exception.args = (advice,)
        told = self._faults.on_exception(exception)
        if told is not None:
            exception.args = (f"{told}.\n{exception}",)
        if advice is None:
            super().on_exception(exception)

    @override
    def teardown(self) -> None:
        for part in reversed(self._begun):
            part.teardown()
        super().teardown()


_OF_OPTIONS = (
    "reduction",
    "equivalent_to",
    "num_replicas",
    "recompute_replicas",
    "reproducible",
    "split_batches",
    "max_device_batch_size",
    "exact_evaluation",
    "broadcast_buffers",
    "forward_sync_buffers",
)

_NAMES: dict[str, dict[str, Any]] = {
    "gradavg": {},
    "gradavg_sum": {"reduction": "sum"},
    "gradavg_weighted": {"reduction": "weighted_mean"},
    "gradavg_data_parallel": {"equivalent_to": "data_parallel"},
    "gradavg_single_device": {"equivalent_to": "single_device"},
    "gradavg_spawn": {"start_method": "spawn"},
    "gradavg_fork": {"start_method": "fork"},
    "gradavg_notebook": {"start_method": "fork"},
    # Without options LightningCLI takes `--trainer.strategy=lightning_gradavg.GradAvgStrategy` for a name
    # (https://github.com/Lightning-AI/pytorch-lightning/issues/19682), and the Trainer makes names lower case.
    "lightning_gradavg.gradavgstrategy": {},
}


def _widened(value: Any) -> Any:
    """Return integers in float64. Lightning reduces what is not a tensor, too."""
    integral = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
    return value.double() if integral else value
