"""The strategy that users name: its options, and DDPStrategy's methods in the order in which Lightning calls them.

It hands each of them on to its parts (`_lightning/part.py` has their moments). What one part needs of another is an
argument here. Where the order of two parts matters, it is that of these calls.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gradavg._lightning.launch import plain, require_launch
from lightning_gradavg._lightning.loaders import loader_batch_size
from lightning_gradavg._lightning.options import Options, StrategyFacts, in_code, options_of_ddp, strategy_in_code
from lightning_gradavg._lightning.part import Part, Saved
from lightning_gradavg._support.arguments import by_keyword
from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.fingerprint import combined, state_digests
from lightning_gradavg._support.means import averages, averages_integers, mean_of_integers
from lightning_gradavg._support.random_state import RandomState, random_state, restore_random_state
from lightning_gradavg._support.running import running_forward
from lightning_gradavg._support.text import plural
from lightning_gradavg._training import WeighedTraining
from lightning_gradavg.batches.part import Batches, SplitBatches
from lightning_gradavg.evaluation.part import Evaluation, ExactEvaluation
from lightning_gradavg.faults.part import Faults
from lightning_gradavg.rates.part import Rates
from lightning_gradavg.rates.scaling import ScaleFunction
from lightning_gradavg.reduction.comm_hook import CommHook
from lightning_gradavg.reduction.gather import require_gather_allowed
from lightning_gradavg.reduction.reduction import Reduction
from lightning_gradavg.reduction.uncounted import note_hidden_exchange
from lightning_gradavg.replicas.part import OneForward, Replicas, Step
from lightning_gradavg.report.part import Reports
from lightning_gradavg.report.report import StepReport
from lightning_gradavg.report.start_line import StartFacts, drops_out, normalizes_by_rank, start_line
from lightning_gradavg.reproducible.engine import ReplicaGradients
from lightning_gradavg.reproducible.part import FixedArithmetic
from lightning_gradavg.rules import RULES

__all__ = ["GradAvgStrategy"]

ReductionName = Literal[
    "mean", "sum", "weighted_mean", "normalized_sum", "mean_of_node_sums", "mean_of_node_means", "sum_of_node_means"
]
PresetName = Literal["data_parallel", "single_device"]
ScalingName = Literal["none", "linear", "sqrt", "adam_sde"]

_CHECKPOINT_KEY = "lightning_gradavg"


class GradAvgStrategy(WeighedTraining, DDPStrategy):
    """Trains with DDP by the gradient of a stated rule, over all ranks and micro-batches.

    Without options it computes the bits of stock DDP if every accumulation window is full; a shorter window is divided
    by its own length. The ranks' parameters are still compared (`check_replicas_every_n_steps`), which changes no bit.

    Return the weight from `training_step`, `{"loss": loss, "weight": n}`, or pass it to
    `self.manual_backward(loss, weight=n)`. The default is the number of samples in the batch. For loss terms that have
    counts of their own, use `lightning_gradavg.global_mean` under the plain mean. See docs/reduction.md.

    The options stand below in this order:

    - the reduction: `reduction`
    - the run that this one must equal: `equivalent_to`, `num_replicas`, `split_batches`, `max_device_batch_size`,
      `reproducible`
    - the learning rate: `lr_scaling`, `base_batch_size`, `base_world_size`, `global_batch_size`, `lr_warmup_steps`,
      `allow_recipe_change`
    - evaluation: `exact_evaluation`
    - what is checked and logged: `check_replicas_every_n_steps`, `log_hyperparams`
    - options of `DistributedDataParallel` and of Lightning's `DDPStrategy`: all others

    Args:
        reduction: The name of a rule. See `lightning_gradavg.rules`.
        equivalent_to: The run to reproduce on any number of ranks: `"data_parallel"`, that of `nn.DataParallel` on
            `num_replicas` devices, or `"single_device"`. It sets `split_batches` and `exact_evaluation`, and keeps
            buffers equal on all ranks. What it cannot reproduce is an error at the start of `fit`. See
            docs/equivalence.md.
        num_replicas: Chunks of every loader batch, each with its own batch norm statistics and random numbers; by
            default one per rank. A rank computes several one after another. It needs `split_batches`.
        split_batches: True if the training loader's batches are the global batches: every rank loads and collates its
            own contiguous chunk of each, in one order on all ranks. Chunks differ by at most one sample, except that
            replicas are cut as `torch.chunk` cuts. The mean is then over the samples of the global batch. The default
            follows `equivalent_to`.
        max_device_batch_size: With `split_batches`, the most samples that a rank moves to the device and computes at
            once. It computes larger chunks in pieces, within one step of Lightning, with the same result.
        reproducible: True to train to the same bits on any number of ranks that divides `num_replicas`, on any nodes.
            It sets `equivalent_to="data_parallel"`, uses one thread per process and deterministic algorithms, and sums
            the replicas' gradients in a fixed order. See docs/reproducible.md.
        lr_scaling: How the learning rate follows the ratio of the global batch to the base batch: `"none"`, `"linear"`,
            `"sqrt"`, `"adam_sde"`, or a function of the ratio. See docs/scaling.md.
        base_batch_size: The global batch, in samples, that the learning rate was tuned for.
        base_world_size: Without `base_batch_size`, the number of ranks that the learning rate was tuned for.
        global_batch_size: With `base_batch_size`, the samples of one optimizer step over all ranks, where the strategy
            cannot know them: in manual optimization, and where a loader has no batch size.
        lr_warmup_steps: Optimizer steps from the base learning rate to the scaled one.
        allow_recipe_change: True to resume a checkpoint with another rule, base or number of replicas. By default this
            is an error.
        exact_evaluation: True for validation, test and prediction to see each sample exactly once, and to log the
            values of one process. See docs/evaluation.md. The default follows `equivalent_to`.
        check_replicas_every_n_steps: Compares the ranks' parameters after this many optimizer steps, and when training
            begins and after every epoch. If they differ, all ranks raise a `RuntimeError`. None compares nothing. See
            docs/faults.md.
        log_hyperparams: Whether to give the rule and `num_replicas` to the Trainer's loggers when training begins.
        gradient_as_bucket_view: As in `DistributedDataParallel`. The default is True for every rule but the plain mean,
            which is faster and saves a copy of the gradients; `parameter.grad` is then a view. The plain mean keeps
            stock's setting, and so stock's bits.
        accelerator: As in `DDPStrategy`.
        parallel_devices: As in `DDPStrategy`.
        cluster_environment: As in `DDPStrategy`.
        checkpoint_io: As in `DDPStrategy`.
        precision_plugin: As in `DDPStrategy`.
        ddp_comm_state: State of `ddp_comm_hook`.
        ddp_comm_hook: Reduces each bucket, also on CPUs. It must return the mean over the ranks. See
            `lightning_gradavg.hooks`.
        ddp_comm_wrapper: Wraps `ddp_comm_hook`, or a plain all-reduce.
        model_averaging_period: Refused: averaging models is not reducing gradients.
        process_group_backend: As in `DDPStrategy`.
        timeout: As in `DDPStrategy`.
        start_method: As in `DDPStrategy`.
        ddp_options: Options of `DistributedDataParallel`, by name, except `process_group` and `device_mesh`.

    Raises:
        ValueError: If `reduction` names no rule, or an option contradicts another.
        TypeError: If this class or the installed torch does not know an option, or its value has a wrong type.
    """

    _given: dict[str, Any]  # the options that the user gave, which `by_keyword` sets
    names: ClassVar = {
        "gradavg": {},
        "gradavg_sum": {"reduction": "sum"},
        "gradavg_weighted": {"reduction": "weighted_mean"},
        "gradavg_weighted_mean": {"reduction": "weighted_mean"},  # as the option is called
        "gradavg_data_parallel": {"equivalent_to": "data_parallel"},
        "gradavg_single_device": {"equivalent_to": "single_device"},
        "gradavg_spawn": {"start_method": "spawn"},
        "gradavg_fork": {"start_method": "fork"},
        "gradavg_notebook": {"start_method": "fork"},
        # LightningCLI reads `--trainer.strategy=lightning_gradavg.GradAvgStrategy` without options as a name
        # (https://github.com/Lightning-AI/pytorch-lightning/issues/19682), and the Trainer makes names lower case.
        "lightning_gradavg.gradavgstrategy": {},
    }

    @by_keyword
    def __init__(
        self,
        *,
        reduction: ReductionName = "mean",
        equivalent_to: PresetName | None = None,
        num_replicas: int | None = None,
        split_batches: bool | None = None,
        max_device_batch_size: int | None = None,
        reproducible: bool = False,
        lr_scaling: ScalingName | ScaleFunction = "none",
        base_batch_size: int | None = None,
        base_world_size: int = 1,
        global_batch_size: int | None = None,
        lr_warmup_steps: int = 0,
        allow_recipe_change: bool = False,
        exact_evaluation: bool | None = None,
        check_replicas_every_n_steps: int | None = 1000,
        log_hyperparams: bool = True,
        gradient_as_bucket_view: bool | None = None,
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
        **ddp_options: Any,
    ) -> None:
        # All options by name, with defaults. `locals()` holds the arguments alone, as this is the first line.
        given: dict[str, Any] = {**locals(), **ddp_options}
        options = Options.of(given)
        self._ddp_given = options_of_ddp(ddp_options)
        parameters = inspect.signature(GradAvgStrategy).parameters
        # Without defaults: command lines give every option.
        own_options = {name: value for name, value in self._given.items() if name in parameters}
        changed = {name: value for name, value in own_options.items() if value != parameters[name].default}
        self._changed_options = {**changed, **self._ddp_given}
        if gradient_as_bucket_view is None:
            # DDP divides by W where a gradient is a view, and multiplies by 1/W where it is not: other bits.
            gradient_as_bucket_view = options.rule != RULES["mean"] and not reproducible
        ddp_options = dict(self._ddp_given)
        if gradient_as_bucket_view:
            ddp_options["gradient_as_bucket_view"] = True
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
            **ddp_options,  # by this name, from which jsonargparse learns which options DDP has
        )
        self._options = options
        self._plain_options = plain(given)
        self._log_hyperparams = log_hyperparams

        self._reports = Reports(options.rule, self._lr_factors)
        static_graph = bool(ddp_options.get("static_graph"))
        self._replicas = OneForward(options, static_graph=static_graph)
        end_step: Callable[[], None] | None = None
        if options.replicated or max_device_batch_size is not None:
            replicas = Replicas(options, static_graph=static_graph)
            self._replicas = replicas
            end_step = replicas.end_step
        make_tree = None
        if reproducible:
            assert num_replicas is not None
            make_tree = partial(ReplicaGradients, replicas=num_replicas)
        self._reduction = Reduction(
            options.rule,
            CommHook(ddp_comm_hook, ddp_comm_state, ddp_comm_wrapper),
            end_step=end_step,
            make_tree=make_tree,
            timeout=timeout,
        )
        self._batches = Batches()
        if options.split_batches:
            self._batches = SplitBatches(
                options,
                to_device=super(WeighedTraining, self).batch_to_device,
                own_state=self._own_state,
            )
        self._rates = Rates(
            options,
            lr_scaling=lr_scaling,
            base_batch_size=base_batch_size,
            base_world_size=base_world_size,
            global_batch_size=global_batch_size,
            lr_warmup_steps=lr_warmup_steps,
            allow_change=allow_recipe_change,
            stock=options.rule == RULES["mean"],
        )
        self._evaluation = Evaluation()
        if options.exact_evaluation:
            self._evaluation = ExactEvaluation(self._batches.drawing_order)
        # Without replicas DDP's next forward makes buffers equal: after a step they may differ.
        self._faults = Faults(check_replicas_every_n_steps, buffers=options.replicated)

        parts: list[Part] = [
            self._reduction,
            self._batches,
            self._rates,
            self._replicas,
            self._evaluation,
            self._reports,
            self._faults,
        ]
        if reproducible:
            parts.insert(0, FixedArithmetic())  # before any other part computes
        self._parts = tuple(parts)
        # Those that answer the moments of evaluation.
        self._evaluating: tuple[Part, ...] = (self._replicas, self._evaluation, self._faults)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self._changed_options.items())
        # A Trainer of pytorch_lightning and Fabric quote a strategy by its repr when they refuse it.
        return (
            f"{type(self).__name__}({options}) [not for pytorch_lightning.Trainer: import Trainer from"
            " lightning.pytorch; not for Fabric: lightning_gradavg.fabric has another]"
        )

    @property
    def global_batch_size(self) -> int | None:
        """Samples of one optimizer step, over ranks and window; None before `fit`, or where they are not known."""
        return self._rates.global_batch_size

    @property
    def lr_scale(self) -> float:
        """What `lr_scaling` multiplies the learning rate by after the warm-up."""
        return self._rates.lr_scale

    @property
    def num_replicas(self) -> int:
        """Chunks of each loader batch."""
        return self._replicas.num_replicas(self.world_size)

    def observe_next_step(self) -> None:
        """Observe the optimizer step whose window begins next; `report()` returns it once its gradients are reduced.

        Call it on every rank before the same step, which then waits for its gradients and exchanges a number.
        """
        self._reports.observe_next_step()

    @property
    def observing(self) -> bool:
        """Whether `observe_next_step` waits for its step."""
        return self._reports.observing

    def report(self) -> StepReport:
        """Return the numbers of the last observed step.

        Raises:
            RuntimeError: If no step was observed.
        """
        return self._reports.report()

    def facts(self) -> StrategyFacts:
        """Return what determines the mathematics of a run in training."""
        options = self._options
        return StrategyFacts(
            rule=options.rule,
            splits_batches=options.split_batches,
            accumulation=self._run.loop.accumulation,
            replicas=options.shaping_replicas(self.world_size),
            replicated=options.replicated,
            scales_rates=self._rates.scales,
            samples=self._batches.samples,
            given=self._changed_options,
        )

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that depend on the bits of parameters, buffers, optimizers and random state.

        With `reproducible=True` they are equal after the same step on any number of ranks. Of random states, that of
        the CPU on rank 0 counts, and the seed of the replicas. A collective operation.

        Raises:
            RuntimeError: If there is no module yet.
        """
        return combined(self.state_digests())

    def _own_state(self) -> RandomState:
        """Return the own random state of the process, also where evaluation draws from its streams."""
        return self._evaluation.own_state()

    def state_digests(self) -> dict[str, str]:
        """Return as many digits for every tensor and number of the state, by name. A collective operation.

        Raises:
            RuntimeError: If there is no module yet.
        """
        if self.lightning_module is None:
            raise RuntimeError("there is nothing to take a fingerprint of before the Trainer has begun a run")
        world = World.of(None)
        if self._faults.ends_apart():
            world = World()  # of this rank alone: the others exchange nothing any more
        drawn: Saved = {"random state": world.from_first(self._own_state())}
        if isinstance(self._batches, SplitBatches):
            drawn["seed"] = self._batches.seed
        return state_digests(self.lightning_module, self.optimizers, drawn)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # `DDPStrategy` multiplies nodes by devices, which is wrong for uneven nodes.
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @override
    def _configure_launcher(self) -> None:
        # The Trainer's constructor calls this: what cannot start is refused there.
        super()._configure_launcher()
        require_launch(self, self._given.get("start_method", "popen"))

    @override
    def setup_distributed(self) -> None:
        state = random_state()
        # `DDPStrategy` seeds again here (`reset_seed`), so that all ranks draw the same.
        super().setup_distributed()
        if self._options.split_batches:
            # Our loaders have all ranks draw the same themselves, and a script goes on drawing as on one device.
            restore_random_state(state)

    @override
    def _register_ddp_hooks(self) -> None:
        """Begin a run that trains, with the module wrapped: `DDPStrategy.configure_ddp` calls this last.

        The reduction registers the communication hook, on CPU, too, where Lightning silently drops it.
        """
        model, module = self.model, self.lightning_module
        assert isinstance(model, DistributedDataParallel)
        assert module is not None
        places = World.of(None).places(self.node_rank)
        self._run = replace(self._run, model=model, places=places)
        for part in self._parts:
            part.configure_ddp(self._run)

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        return super().optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        # `super()` has no setter. A user may replace the optimizers at any time, and step at once.
        DDPStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        self._rates.attach(optimizers)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        # A loader that a user has processed is none of the run's.
        if self._evaluation.prepares and self._preparing is not None:
            return self._evaluation.process_dataloader(dataloader)
        processed = super().process_dataloader(dataloader)
        if self._preparing not in (None, "train") and self._trains:
            return self._batches.as_evaluated(processed)
        return processed

    @override
    def _process_training_loader(self, loader: object) -> object:
        size = loader_batch_size(loader)  # of the user's loader: ours shows the chunks of a rank
        loader = super()._process_training_loader(loader)
        self._rates.add_loader(size)
        return loader

    def on_train_start(self) -> None:
        """Begin with the training loaders, which are known now."""
        super().on_train_start()
        rank_zero_info(self._start_line())
        if self._log_hyperparams:
            # Options alone. World size, versions, global batch and factor may change when the run goes on elsewhere,
            # and MLflow refuses another value of a hyperparameter: the start line says them.
            hyperparams = {
                "gradavg/reduction": self._options.rule.name,
                "gradavg/num_replicas": self._options.num_replicas,
            }
            for logger in self._run.trainer.loggers:
                logger.log_hyperparams(hyperparams)

    def _start_line(self) -> str:
        run, options = self._run, self._options
        ranks = len(run.places)
        replicas = options.shaping_replicas(ranks)
        facts = StartFacts(
            strategy="GradAvgStrategy",
            rule=options.rule,
            ranks=ranks,
            place=f"{plural(ranks, 'rank')} on {plural(run.num_nodes, 'node')} ({dist.get_backend()})",
            global_batch=self.global_batch_size,
            loader_batch=self._rates.loader_batch_size,
            window=run.loop.accumulation,
            last_window=run.loop.short_last_window,
            splits=options.split_batches,
            draws_order=self._batches.draws_order,
            replicas=replicas,
            cuts_in_pieces=options.max_device_batch_size is not None,
            normalizes_by_rank=not options.one_device and replicas is None and normalizes_by_rank(run.module),
            drops_out=drops_out(run.module),
        )
        return start_line(facts, [part.describe() for part in self._parts])

    @override
    def _begin_batch(self, batch: object) -> None:
        # The batches come first: an error of another part may write a checkpoint, which must know which batch is in
        # training.
        super()._begin_batch(batch)
        self._faults.on_train_batch_start()
        self._rates.on_train_batch_start()

    @override
    def _run_step(self, forward: Callable[..., Any], *arguments: Any) -> Any:
        """Run the forwards of a step, one or one per piece, and the backwards of all pieces but the last."""
        self._reduction.observer = None
        if self._reports.observing:
            begins_window = self._reduction.is_at_window_start()
            self._reduction.observer = self._reports.begin_step(begins_window=begins_window)
        step = Step(forward, self._backward_within_step, self._reduction, self._batches)
        try:
            return self._replicas.run_step(step, *arguments)
        finally:
            if self._rates.scales:
                self._rates.end_failed_steps()

    def _backward_within_step(self) -> None:
        """Run the backward of a piece that is not the last of its step. Hooks see the last one only."""
        loss, precision, module = self._reduction.pending, self.precision_plugin, self.lightning_module
        assert loss is not None
        assert module is not None
        # As Lightning does with the last piece's loss: `ClosureResult.from_training_step_output` divides it, and
        # `MixedPrecision.pre_backward` scales it.
        root = loss / module.trainer.accumulate_grad_batches
        scaler = getattr(precision, "scaler", None)
        if scaler is not None:
            root = scaler.scale(root)
        self._reduction.backward(lambda: precision.backward(root, module, None), is_last_piece=False)

    def _lr_factors(self) -> tuple[float, ...]:
        return self._rates.factors()

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        step = partial(super().optimizer_step, optimizer, *args, **kwargs)
        return self._rates.optimizer_step(optimizer, step)

    @override
    def on_validation_start(self) -> None:
        self._preparing = None
        for part in self._evaluating:
            part.on_evaluation_start()

    on_test_start = on_validation_start
    on_predict_start = on_validation_start

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self._evaluation.through_ddp:
            return super().validation_step(*args, **kwargs)
        # DDP's forward broadcasts buffers, and would wait for ranks with fewer batches.
        assert self.lightning_module is not None
        with self.precision_plugin.val_step_context():
            return self.lightning_module.validation_step(*args, **kwargs)

    @override
    def reduce(
        self, tensor: Tensor, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor:
        """Reduce a tensor over the ranks. A collective operation, but where this rank's tensor is returned.

        | case | result |
        |---|---|
        | this rank ends apart | its own tensor |
        | the mean of integers | keeps its decimals, unlike Lightning's |
        | a mean in a step that some ranks have no samples in | over the ranks that have some |
        | a value that is logged in a step of exact evaluation | its own tensor, which is the batch's |
        | another tensor in such a step, without a group | an error |
        | any other | as in `DDPStrategy` |
        """
        if self._faults.ends_apart():
            return super().reduce(tensor, group, reduce_op)  # of `Collectives`, which answers locally
        if group is None:
            if self._evaluation.logs_step:
                return tensor
            require_gather_allowed()
        if averages_integers(tensor, reduce_op):
            return mean_of_integers(tensor, lambda wide: self.reduce(wide, group, reduce_op))
        forward = running_forward()
        if averages(reduce_op) and forward.ranks_without_samples and isinstance(tensor, Tensor):
            # An older torch has no ranks of None. `test_a_stand_in_leaves_no_trace` logs without a group.
            sharing: Any = dist.group.WORLD if group is None else group
            ranks_with_samples = set(dist.get_process_group_ranks(sharing)) - set(forward.ranks_without_samples)
            counted = torch.zeros_like(tensor) if forward.stands_in else tensor
            total = super().reduce(counted, group, "sum")
            return total / max(len(ranks_with_samples), 1)
        return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        if self._faults.ends_apart():
            return super().all_gather(tensor, group, sync_grads)  # of `Collectives`, which answers locally
        require_gather_allowed()
        if sync_grads:
            note_hidden_exchange("self.all_gather(..., sync_grads=True)", tensor)
        return super().all_gather(tensor, group, sync_grads)

    @override
    def on_validation_end(self) -> None:
        for part in reversed(self._evaluating):  # as both may replace methods of metrics
            part.on_evaluation_end()

    on_test_end = on_validation_end
    on_predict_end = on_validation_end

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._rates.load_optimizers(checkpoint.get(_CHECKPOINT_KEY))
        super().load_optimizer_state_dict(checkpoint)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if self._faults.ends_apart():
            return
        if not self._parts_set_up:
            # The process that has forked or spawned the ranks, after their fit. It saves what stock saves there: the
            # weights that they have sent back (`test_states.py`: a process that has not trained).
            super().save_checkpoint(checkpoint, *args, **kwargs)
            return
        saved: Saved = {}
        for part in self._parts:
            part.save(saved, checkpoint)
        super().save_checkpoint({**checkpoint, _CHECKPOINT_KEY: saved}, *args, **kwargs)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        saved = checkpoint.get(_CHECKPOINT_KEY)
        if self._restores and saved is not None:
            for part in self._parts:
                part.load(saved)
        return checkpoint

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Name the rank that failed first."""
        self._rates.end_failed_steps()
        self._evaluation.explain(exception)
        super().on_exception(exception)
        # The text of an exception of the user's own type may raise when it is read.
        if type(exception) is RuntimeError and "`find_unused_parameters=True`" in str(exception):
            # DDP says that it has this option, and not where it stands beside the user's.
            options = {**in_code(self._changed_options), "find_unused_parameters": "True"}
            exception.args = (f"{exception}\nHere it is strategy={strategy_in_code(options)}.",)
