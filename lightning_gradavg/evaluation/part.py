"""Evaluation that sees each sample exactly once, on any world size.

The loaders are dealt (`lightning_gradavg.evaluation.dealt`), so a rank may have fewer batches than another, or none.
What follows from that is done here:

* no step runs through DDP, whose forward broadcasts buffers: all ranks take rank 0's once, at the start;
* what is reduced or gathered within an incomplete round, such as `self.log(on_step=True, sync_dist=True)`, is so over
  the ranks that have a batch in it;
* before anything is computed at the end, the ranks agree on what was logged, in which order, and take over what they
  lack with its neutral value;
* predictions are put back into the order of the loader.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loops import _EvaluationLoop, _PredictionLoop
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric

from lightning_gradavg.evaluation.dealt import (
    EvaluationLoader,
    compare_streams,
    distributed_sampler,
    in_order,
    ranks_having,
    sampler_problem,
)
from lightning_gradavg.evaluation.logged import (
    complete_results,
    complete_states,
    describe_results,
    describe_states,
)
from lightning_gradavg.part import Part, Run
from lightning_gradavg.ranks import subgroups

__all__ = ["Evaluation", "ExactEvaluation"]

_STAGES = {
    "val": RunningStage.VALIDATING,
    "test": RunningStage.TESTING,
    "predict": RunningStage.PREDICTING,
}


class Evaluation(Part):
    """Every rank evaluates what Lightning gives it, as in stock DDP.

    Attributes:
        through_ddp: Whether a validation step may run through DDP, whose forward broadcasts buffers.
        prepares: Whether the loaders that Lightning prepares now are evaluation loaders, to be processed here.
    """

    through_ddp: bool = True
    prepares: bool = False

    def group(self) -> Any:
        """Return the process group of the ranks that have a batch of what is being evaluated; None for all."""
        return None

    def widened(self, value: Any) -> Any:
        """Return a value, a tensor or not, in the type that its mean over the ranks is to have."""
        return value


class ExactEvaluation(Evaluation):
    """Evaluates each sample exactly once, on two or more ranks.

    Args:
        timeout: How long a process group waits for a rank.
    """

    def __init__(self, timeout: timedelta | None) -> None:
        self._timeout = timeout
        self._latest: EvaluationLoader | None = None

    def setup(self, run: Run) -> None:
        """Begin a run."""
        super().setup(run)
        trainer = run.trainer
        self._trainer, self._module = trainer, run.module
        self._group = run.world.group
        self._injects_samplers = trainer._accelerator_connector.use_distributed_sampler
        self._stage: RunningStage | None = None
        self._options: list[tuple[Any, str, Any]] = []
        self._latest = None
        self._groups: dict[tuple[int, ...], Any] = {}
        self._updates: dict[str, int] = {}
        self._changed: list[tuple[Metric, dict[str, Any]]] = []
        self._regrouped: list[tuple[Metric, Any]] = []
        self._own_buffers: list[tuple[Tensor, Tensor, Tensor]] = []

    @property
    def prepares(self) -> bool:  # type: ignore[override]  # an attribute where it is always the same
        """Whether the loaders that Lightning prepares now are evaluation loaders, to be processed here."""
        return self._stage is not None

    @property
    def through_ddp(self) -> bool:  # type: ignore[override]  # likewise
        """Whether a step may run through DDP: ranks with fewer batches would not take part in its broadcasts."""
        return self._group is None

    def prepare_loaders(self, stage: str) -> None:
        """Have Lightning leave the samplers and the number of batches to us, for the loaders of a stage."""
        self.put_options_back()
        self._stage = _STAGES.get(stage) if self._group is not None else None
        if self._stage is not None:
            self._set(self._trainer, f"limit_{self._stage.dataloader_prefix}_batches", 1.0)
            self._set(self._trainer._accelerator_connector, "use_distributed_sampler", False)

    def put_options_back(self) -> None:
        """Give the Trainer the options again that `prepare_loaders` has replaced."""
        for owner, name, value in self._options:
            setattr(owner, name, value)
        self._options = []

    def process_dataloader(self, loader: Any) -> EvaluationLoader:
        """Return this rank's part of an evaluation loader. A collective operation.

        Args:
            loader: A `DataLoader`, of any subclass, or an iterable of batches, the same on all ranks. It is dealt,
                unless the user shares out the data: with `Trainer(use_distributed_sampler=False)`, a true attribute
                `sharded_by_rank` of the loader or its dataset, or a `DistributedSampler`.

        Raises:
            ValueError: If a `DistributedSampler` repeats or drops samples, the limit of batches does not fit the
                loader, or the ranks' loaders differ.
        """
        assert self._stage is not None
        limit = self._options[0][2]
        if isinstance(loader, EvaluationLoader):
            loader = loader.loader
        sampler = distributed_sampler(loader)
        owners = (loader, getattr(loader, "dataset", None))
        sharded = any(getattr(owner, "sharded_by_rank", False) for owner in owners)
        kept = sharded or sampler is not None or not self._injects_samplers
        problem = sampler_problem(sampler, dist.get_world_size(self._group)) if sampler is not None else None
        limited: float = 0
        try:
            length = sized_len(loader)
            limited = _parse_num_batches(self._stage, float("inf") if length is None else length, limit)
        except MisconfigurationException as error:
            problem = problem or str(error)
        every = self.run.world.gather_objects((kept, limited, problem))
        # A problem that only some ranks have is raised by them all: nobody waits for a rank that has given up.
        problem = next((of_rank[2] for of_rank in every if of_rank[2] is not None), None)
        if problem is None and len({of_rank[:2] if not of_rank[0] else True for of_rank in every}) > 1:
            counts = ", ".join(str(of_rank[1]) for of_rank in every)
            problem = (
                f"the ranks' {self._stage.dataloader_prefix} loaders differ: in rank order they have {counts} batches,"
                " but they are dealt as one and the same. Make them the same on all ranks; or, where every rank is to"
                " evaluate its own data, set `sharded_by_rank = True` on the loader or its dataset, or"
                " Trainer(use_distributed_sampler=False)."
            )
        if problem is not None:
            raise ValueError(problem)
        lengths = [of_rank[1] for of_rank in every]
        sized = float("inf") not in lengths
        ranks = range(dist.get_world_size(self._group))
        of_ranks = lengths if kept else [len(range(rank, int(lengths[0]), len(ranks))) for rank in ranks if sized]
        wrapped = EvaluationLoader(
            loader,
            kept=kept,
            limit=None if limited == float("inf") else int(limited),
            lengths=of_ranks if sized else None,
            group=self._group,
            on_batch=self._note,
        )
        rank_zero_info(f"GradAvgStrategy: {self._stage.dataloader_prefix} {wrapped.describe()}")
        return wrapped

    def on_evaluation_start(self) -> None:
        """Prepare one pass over the loaders. A collective operation, when Lightning's loop has set them up.

        Raises:
            ValueError: If batches would be repeated to fill up a `CombinedLoader`.
        """
        if self._group is None:
            return
        self.put_options_back()
        self._stage = self._latest = None
        loop, loaders, mode = self._loop, self._loaders, self._mode
        if mode == "max_size_cycle":
            raise ValueError(
                f"CombinedLoader(mode={mode!r}) repeats the batches of the shorter loaders, so their samples would be"
                " evaluated more than once. Use 'sequential', 'min_size' or 'max_size'."
            )
        together = [self._together(loaders)] if mode != "sequential" else [loader.lengths for loader in loaders]
        incomplete = {
            ranks_having(lengths, ended)
            for lengths in filter(None, together)
            for ended in set(lengths) - {max(lengths)}
        }
        self._groups |= subgroups(self.run.world, incomplete - set(self._groups), self._timeout)
        if self.run.model is not None:
            self._take_buffers(self.run.model)
        metrics = self._metrics()
        self._updates = {name: metric._update_count for name, metric in metrics}
        self._regrouped = [(metric, metric.process_group) for _, metric in metrics if metric.dist_sync_on_step]
        if isinstance(loop, _EvaluationLoop):
            connector = self._trainer._logger_connector
            # In stock, ranks that have no batch of a loader compute the results of fewer loaders than the others.
            loop._store_dataloader_outputs = connector.epoch_end_reached  # type: ignore[method-assign]  # see `_run_end`
            loop.on_run_end = partial(self._run_end, loop)  # type: ignore[method-assign]  # once per run

    def widened(self, value: Any) -> Any:
        """Return integers in float64: stock's mean of them has none of its decimals on gloo."""
        integral = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
        return value.double() if integral else value

    def group(self) -> Any:
        """Return the process group of the ranks that have a batch in this round; None if all have, or between passes.

        Raises:
            RuntimeError: If some rank does not know how many batches it has.
        """
        latest = self._latest
        if latest is None:
            return None
        loaders, taken = [latest], latest.taken
        if self._mode != "sequential":
            loaders = self._loaders
            taken = max(loader.taken for loader in loaders)
        lengths = self._together(loaders)
        if lengths is None:
            raise RuntimeError(
                "something is reduced or gathered over the ranks within an evaluation step, but it is not known which"
                " ranks have a batch then, because a loader has no length. Give it a `__len__`; or log with"
                " on_step=False, and use no metric with dist_sync_on_step=True."
            )
        return self._groups.get(ranks_having(lengths, taken - 1))

    def on_evaluation_end(self) -> None:
        """End one pass, when its results are computed. A collective operation for predictions."""
        if self._group is None:
            return
        self._latest = None
        for metric, attributes in self._changed:
            vars(metric).update(attributes)
        for metric, group in self._regrouped:
            metric.process_group = group
        for buffer, own, taken in self._own_buffers:
            if torch.equal(buffer, taken):  # otherwise the evaluation has written it
                buffer.copy_(own)
        self._changed, self._regrouped, self._own_buffers = [], [], []
        loop = self._loop
        if isinstance(loop, _PredictionLoop):
            compare_streams(self.run.world.gather_objects([loader.read for loader in self._loaders]), together=False)
            if loop.return_predictions:
                every = self.run.world.gather_objects(loop._predictions)
                for index, loader in enumerate(self._loaders):
                    if not loader.kept:
                        # In place: this list is what the loop returns.
                        loop._predictions[index][:] = in_order([of_rank[index] for of_rank in every])

    def teardown(self) -> None:
        """Put everything back at the end of the run."""
        if self._run is None:
            return
        self.put_options_back()
        trainer = self._trainer
        for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            for name in ("on_run_end", "_store_dataloader_outputs"):
                vars(loop).pop(name, None)
        for ranks, group in self._groups.items():
            if dist.get_rank(self._group) in ranks:
                dist.destroy_process_group(group)
        self._groups = {}

    @property
    def _loop(self) -> Any:
        return self._trainer._active_loop

    @property
    def _mode(self) -> str:
        return str(self._loop._combined_loader._mode)

    @property
    def _loaders(self) -> list[EvaluationLoader]:
        return list(self._loop._combined_loader.flattened)

    def _metrics(self) -> list[tuple[str, Metric]]:
        """Return the metrics whose states are shared by all ranks when they are computed."""
        found = [(name, module) for name, module in self._module.named_modules() if isinstance(module, Metric)]
        return [(name, metric) for name, metric in found if metric.sync_on_compute and metric.process_group is None]

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._options.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _together(self, loaders: Sequence[EvaluationLoader]) -> list[int] | None:
        """Return each rank's number of steps over the loaders, None if it is unknown."""
        fewest = self._mode == "min_size"
        lengths = [loader.lengths for loader in loaders if loader.lengths is not None]
        if len(lengths) < len(loaders):
            return None
        return [(min if fewest else max)(of_rank) for of_rank in zip(*lengths, strict=True)]

    def _note(self, loader: EvaluationLoader) -> None:
        """Note that a batch of the loader is evaluated next."""
        self._latest = loader
        for metric, _ in self._regrouped:
            metric.process_group = self.group()

    def _take_buffers(self, model: DistributedDataParallel) -> None:
        """Take over rank 0's buffers: for good where the next forward of DDP would do it, else until the end."""
        source = dist.get_global_rank(model.process_group, 0)
        for name, buffer in model.module.named_buffers():
            if name in model.parameters_to_ignore:
                continue
            taken = buffer.clone(memory_format=torch.contiguous_format)
            dist.broadcast(taken, source, group=model.process_group)
            if not model.broadcast_buffers:
                self._own_buffers.append((buffer, buffer.clone(), taken))
            buffer.copy_(taken)

    def _run_end(self, loop: _EvaluationLoop) -> Any:
        """Compute the results of all loaders on all ranks, and go on with what Lightning does at the end."""
        self._latest = None
        for metric, group in self._regrouped:
            metric.process_group = group
        self._complete(loop)
        connector = self._trainer._logger_connector
        count = loop.num_dataloaders
        for index in range(count) if loop._is_sequential and count > 1 else (None,):
            loop._results.dataloader_idx = index
            loop._logged_outputs.append(connector.update_eval_epoch_metrics())
        del loop.on_run_end, loop._store_dataloader_outputs  # those of the class are back
        return loop.on_run_end()

    def _complete(self, loop: _EvaluationLoop) -> None:
        metrics = dict(self._metrics())
        updated = {name: one for name, one in metrics.items() if one._update_count != self._updates.get(name, 0)}
        read = [loader.read for loader in self._loaders]
        every = self.run.world.gather_objects((describe_results(loop._results), describe_states(updated), read))
        results, states, reads = zip(*every, strict=True)
        compare_streams(reads, together=self._mode != "sequential")
        self._changed = complete_states(metrics, states, self._group)
        lacking = complete_results(loop._results, results, self._module)
        if lacking and not self._trainer.sanity_checking:
            rank_zero_warn(
                f"{', '.join(map(repr, lacking))} was logged by some ranks and not by others, which had no batch to log"
                " it from, and is not reduced over the ranks: each has a value of its own, or none. Log it with"
                " sync_dist=True to have the value of one process on all ranks."
            )
