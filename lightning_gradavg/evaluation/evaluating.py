"""A strategy that can evaluate every sample once, on any number of ranks, all those of the run or a group of them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors
from typing_extensions import override

from lightning_gradavg.collectives.agreement import on_ranks
from lightning_gradavg.evaluation.evaluation import ExactEvaluation
from lightning_gradavg.monitoring.observing import ObservingStrategy
from lightning_gradavg.rules import Rule

__all__ = ["EvaluatingStrategy"]

_BROADCAST_BYTES = 250 * 2**20  # as DistributedDataParallel broadcasts its parameters


class EvaluatingStrategy(ObservingStrategy):
    """Hands Lightning's evaluation to `ExactEvaluation`, where that is asked for.

    With a process group of some ranks those are the data-parallel ones: loaders are dealt to them, and what is logged
    is reduced over them. Whether to end, and when to go on, is still agreed on by all ranks of the run.

    Args:
        rule: The reduction rule.
        exact_evaluation: Whether validation, test and prediction see each sample exactly once.
        **options: Those of `DDPStrategy`.
    """

    def __init__(self, rule: Rule, *, exact_evaluation: bool, **options: Any) -> None:
        super().__init__(rule, **options)
        _check_options(self._ddp_kwargs)
        self._exact_evaluation = exact_evaluation
        self._evaluation: ExactEvaluation | None = None
        self._metrics_of_group: list[Metric] = []

    @property
    def _group(self) -> dist.ProcessGroup | None:
        """The process group that gradients are reduced over; None for that of all ranks."""
        mesh = self._ddp_kwargs.get("device_mesh")
        group = mesh.get_group() if mesh is not None else self._ddp_kwargs.get("process_group")
        return None if group is dist.group.WORLD else group

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self._group is None:
            return super().distributed_sampler_kwargs
        return {"num_replicas": dist.get_world_size(self._group), "rank": dist.get_rank(self._group)}

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        _check_members(self._ddp_kwargs)

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        group = self._group
        wanted = self._exact_evaluation and dist.get_world_size(group) > 1
        self._evaluation = ExactEvaluation(trainer, module, group) if wanted else None
        if group is None:
            super().setup(trainer)
            return
        self._metrics_of_group = _synchronize_metrics(module, group)
        if trainer.state.fn == TrainerFn.FITTING:
            if any(_is_dtensor(parameter) for parameter in module.parameters()):
                rank_zero_warn(
                    "DistributedDataParallel takes DTensor parameters out of the module at its first forward: it trains"
                    " them, but state_dict() and checkpoints do not hold them from then on. Keep what you need of"
                    " optimizer.param_groups, or use lightning.pytorch.strategies.ModelParallelStrategy."
                )
            super().setup(trainer)
            return
        with _not_synchronized(module):
            super().setup(trainer)
        _synchronize(module, group)

    @override
    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks. Lightning names the loaders here that it is about to prepare."""
        loaders = name if name is not None and name.endswith("_dataloader()") else None
        if loaders is not None and self._evaluation is not None:
            self._evaluation.put_options_back()
        super().barrier(name, *args, **kwargs)
        if loaders is not None:
            self._prepare_loaders(loaders)
            if self._evaluation is not None:
                self._evaluation.before_loaders(loaders)

    def _prepare_loaders(self, name: str) -> None:
        """Get ready for the loaders of `name`, which Lightning asked the user for and does not know the samplers of."""

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        evaluation = self._evaluation
        return evaluation.wrap(dataloader) if evaluation is not None and evaluation.prepares else dataloader

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
        if self._evaluation is not None:
            self._evaluation.start(self.model)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self._evaluation is None:
            return super().validation_step(*args, **kwargs)
        # Not through DDP, whose forward broadcasts buffers: ranks with fewer batches would not take part.
        assert self.lightning_module is not None
        with self.precision_plugin.val_step_context():
            return self.lightning_module.validation_step(*args, **kwargs)

    @override
    def reduce(
        self, tensor: Tensor, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor:
        """Reduce a tensor over the ranks. The mean of integers is not floored, as Lightning's is on gloo."""
        if group is None:
            group = self._ranks_of_round
        # Lightning passes on what is not a tensor, too, whatever the annotation says.
        value: Any = tensor
        integral = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
        if integral and isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    @override
    def reduce_boolean_decision(
        self,
        decision: bool,
        all: bool = True,
    ) -> bool:
        if self._group is None:
            return super().reduce_boolean_decision(decision, all)
        # Of all ranks of the run: they end together, whatever they reduce over.
        count = int(super().reduce(torch.tensor(int(decision), device=self.root_device), dist.group.WORLD, "sum"))
        return count == dist.get_world_size() if all else count > 0

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        # Of no group, `LightningModule.all_gather` makes that of all ranks.
        if group in (None, dist.group.WORLD):
            group = self._ranks_of_round
        return super().all_gather(tensor, group, sync_grads)

    @property
    def _ranks_of_round(self) -> Any:
        """The process group of the ranks that have a batch of what is being evaluated; None for that of all ranks."""
        of_round = self._evaluation.group() if self._evaluation is not None else None
        return self._group if of_round is None else of_round

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
        if self._evaluation is not None:
            self._evaluation.end()

    @override
    def teardown(self) -> None:
        if self._evaluation is not None:
            self._evaluation.restore()
            self._evaluation = None
        for metric in self._metrics_of_group:
            metric.dist_sync_fn = None
        self._metrics_of_group = []
        super().teardown()


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise if it is not clear over which ranks gradients are reduced."""
    group, mesh = options.get("process_group"), options.get("device_mesh")
    if mesh is None:
        return
    if group is not None:
        raise ValueError(
            "process_group and device_mesh both say over which ranks gradients are reduced. Leave one of them out."
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        dimensions = f"the dimensions {', '.join(map(repr, names))}" if names else f"{mesh.ndim} dimensions"
        raise ValueError(
            f"device_mesh has {dimensions}, and gradients are reduced over one. Pass that one, as in"
            f" device_mesh=mesh[{names[0] if names else 'dp'!r}]."
        )


def _check_members(options: Mapping[str, Any]) -> None:
    """Raise, on all ranks of the run alike, unless each is in a group that all its members reduce over.

    A collective operation, where a group was given.
    """
    group, mesh = options.get("process_group"), options.get("device_mesh")
    if group is None and mesh is None:
        return
    if mesh is not None:
        group = mesh.get_group() if mesh.get_coordinate() is not None else None
    # What new_group returns to a process that it leaves out is no process group.
    mine = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else []
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    name = "process_group" if mesh is None else "device_mesh"
    outside = [rank for rank, members in enumerate(of_ranks) if rank not in members]
    if outside:
        raise ValueError(
            f"{name} does not contain the process {on_ranks(outside)}. Pass every rank of the run the group that it is"
            " a member of: one of its own where it trains alone."
        )
    for rank, members in enumerate(of_ranks):
        other = next((other for other in members if of_ranks[other] != members), None)
        if other is not None:
            raise ValueError(
                f"{name} differs within a group: rank {rank} is to reduce over the ranks {members}, and rank {other}"
                f" over {of_ranks[other]}. Pass all members of a group the same one."
            )


def _synchronize_metrics(module: nn.Module, ours: dist.ProcessGroup) -> list[Metric]:
    """Have the metrics of the module that are synchronized over all ranks be so over those of a group."""

    def gather_of_group(tensor: Tensor, group: Any = None) -> list[Tensor]:
        return gather_all_tensors(tensor, ours if group is None else group)

    metrics = [one for one in module.modules() if isinstance(one, Metric)]
    changed = [one for one in metrics if one.process_group is None and one.dist_sync_fn is None]
    for metric in changed:
        # Not its process_group: a module that holds one cannot be copied, as averages of weights do.
        metric.dist_sync_fn = gather_of_group
    return changed


def _is_dtensor(tensor: Any) -> bool:
    # Its own module is slow to import.
    return hasattr(tensor, "to_local")


def _synchronize(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all ranks of a group the parameters and buffers of its first rank, as DistributedDataParallel would."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    states = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad():
        taken: list[Any] = [tensor for name, tensor in states.items() if name not in ignored]
        # Of a DTensor, which no collective takes, the part that the ranks of the group have in common.
        tensors = [tensor.to_local() if _is_dtensor(tensor) else tensor.detach() for tensor in taken]
        if tensors:
            dist._broadcast_coalesced(group, tensors, _BROADCAST_BYTES, 0)


@contextmanager
def _not_synchronized(module: nn.Module) -> Iterator[None]:
    """Keep Lightning from giving all ranks the module of rank 0, of which other groups may hold other parts."""
    names = [*dict(module.named_parameters()), *dict(module.named_buffers())]
    attributes: dict[str, Any] = vars(module)
    before = attributes.get("_ddp_params_and_buffers_to_ignore")
    attributes["_ddp_params_and_buffers_to_ignore"] = names
    try:
        yield
    finally:
        del attributes["_ddp_params_and_buffers_to_ignore"]
        if before is not None:
            attributes["_ddp_params_and_buffers_to_ignore"] = before
