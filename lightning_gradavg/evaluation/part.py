"""Evaluation that sees each sample exactly once, on any world size.

The loaders are dealt (`lightning_gradavg.evaluation.dealt`), so a rank may have fewer batches than another, or none.
What follows from that is done here:

* no step runs through DDP, whose forward broadcasts buffers: all ranks take rank 0's once, at the start;
* what is reduced or gathered within a step, such as `self.log(on_step=True, sync_dist=True)`, is refused where some
  ranks may have no batch then: at the end of the pass, where no rank waits for another;
* Lightning and torchmetrics reduce what was logged key by key and state by state, in the order in which a rank has it.
  Before that, the ranks agree on keys and order, take over what they lack with its neutral value, and gather lists of
  any length;
* predictions are put back into the order of the loader;
* hooks at the end of a pass find nothing on a rank that had no batch: a line names such ranks, and so does an error of
  such a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import chain
from types import MethodType
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_info
from torchmetrics import Metric

from lightning_gradavg._lightning.internals import (
    COMPUTED,
    REDUCTIONS,
    SYNC,
    UPDATES,
    EvaluationPass,
    broadcast_from_first,
    injects_samplers,
    limited_batches,
    neutral,
    reduce_by,
    restore_evaluation_loops,
    set_injection_of_samplers,
)
from lightning_gradavg._lightning.loaders import distributed_sampler, is_sharded, length_of, user_loader
from lightning_gradavg._lightning.methods import replaced
from lightning_gradavg._lightning.part import Part, Run
from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.text import on_ranks
from lightning_gradavg.evaluation.dealt import EvaluationLoader, require_each_once
from lightning_gradavg.faults.failure_reports import is_broken_exchange

__all__ = ["Evaluation", "ExactEvaluation", "gathers_lists"]

_STAGES = {
    stage.dataloader_prefix: stage for stage in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.PREDICTING)
}


class Evaluation(Part):
    """Every rank evaluates what Lightning gives it, as in stock DDP."""

    through_ddp: bool = True
    """Whether a validation step may run through DDP, whose forward broadcasts buffers."""
    prepares: bool = False
    """Whether the loaders that Lightning prepares now are evaluation loaders, to be processed here."""

    def alone(self) -> bool:
        """Return whether what is about to be reduced over the ranks is left as it is, to be refused later."""
        return False

    def explain(self, exception: BaseException) -> None:
        """Add to an exception that ends the run what evaluation knows of its cause."""


_REFUSED = (
    "something is reduced or gathered over the ranks within an evaluation step (self.log with on_step=True and"
    " sync_dist=True, self.all_gather, or a metric with dist_sync_on_step=True), but with exact evaluation some ranks"
    " may have no batch in a step. Log with on_step=False, on_epoch=True, which is reduced once at the end; gather in"
    " on_validation_epoch_end; or leave exact_evaluation out."
)
_DIFFERENT = (
    "evaluation loader {} does not yield the same batches on all ranks, so some were left out and others evaluated more"
    " than once. Where every rank reads its own part of the data, set `sharded_by_rank = True` on the loader or its"
    " dataset; otherwise make it independent of the rank."
)


_NO_BATCH = (
    "exact evaluation has no batch of the {} for {}. What steps leave for on_{}_epoch_end is missing there: have the"
    " hook return where there is nothing. What is logged with sync_dist=True, and torchmetrics, need no care."
)


class ExactEvaluation(Evaluation):
    """Evaluates each sample exactly once. One rank evaluates as stock Lightning does on one device."""

    _pass: EvaluationPass | None = None  # until its last batch
    _loaders: Sequence[EvaluationLoader] = ()  # of the pass under way, until its last hook
    _refused = False

    def setup(self, run: Run) -> None:
        """Begin a run."""
        super().setup(run)
        # Of several ranks, those with fewer batches would not take part in DDP's broadcasts.
        self.through_ddp = run.world.size == 1
        self._injects_samplers = injects_samplers(run.trainer)
        self.prepares, self._pass = False, None
        self._loaders = []
        self._told = {""}  # lines about ranks without a batch
        self._put_back_options, self._put_back = ExitStack(), ExitStack()

    def prepare_loaders(self, stage: str) -> None:
        """Have Lightning leave the samplers and the number of batches to us, for the loaders of a stage."""
        self._put_back_options.close()
        trainer: Any = self.run.trainer
        self.prepares = stage in _STAGES
        if self.prepares:
            self._stage = _STAGES[stage]
            limited = f"limit_{self._stage.dataloader_prefix}_batches"
            self._limit = getattr(trainer, limited)
            self._put_back_options.callback(setattr, trainer, limited, self._limit)
            self._put_back_options.callback(set_injection_of_samplers, trainer, self._injects_samplers)
            setattr(trainer, limited, 1.0)
            set_injection_of_samplers(trainer, False)

    def process_dataloader(self, loader: Any) -> EvaluationLoader:
        """Return this rank's part of an evaluation loader. A collective operation.

        It is dealt, unless the user shares out the data: with `Trainer(use_distributed_sampler=False)`, a true
        attribute `sharded_by_rank` of the loader or its dataset, or a `DistributedSampler`.
        """
        world, loader = self.run.world, user_loader(loader)
        sampler = distributed_sampler(loader)
        if sampler is not None:
            require_each_once(sampler, world.size)
        kept = world.size == 1 or is_sharded(loader) or sampler is not None or not self._injects_samplers
        count = limited_batches(self._stage, length_of(loader), self._limit)
        rows = world.gather_objects((kept, count))
        counts = [count for _, count in rows]
        if len(set(rows)) > 1 and not all(kept for kept, _ in rows):
            raise ValueError(
                f"the ranks' {self._stage.dataloader_prefix} loaders differ: in rank order they have"
                f" {', '.join(map(str, counts))} batches, but exact evaluation treats them as one. Make them the same"
                " on all ranks; or, where every rank is to evaluate its own data, set `sharded_by_rank = True` on the"
                " loader or its dataset, or Trainer(use_distributed_sampler=False)."
            )
        return EvaluationLoader(loader, world, kept=kept, counts=counts)

    def on_evaluation_start(self) -> None:
        """Prepare one pass over the loaders. A collective operation, when Lightning's loop has set them up."""
        self._put_back_options.close()
        self.prepares = False
        if self.through_ddp:
            return
        now = EvaluationPass(self.run.trainer)
        if now.mode != "sequential":
            raise ValueError(
                f"CombinedLoader(mode={now.mode!r}) reads evaluation loaders together, which exact evaluation does not:"
                " of each, another number of batches is dealt. Use 'sequential', or leave exact_evaluation out."
            )
        self._pass, self._refused, model = now, False, self.run.model
        self._loaders = now.loaders
        self._tell([loader.ranks_without_batch for loader in now.loaders])
        if model is not None and model.broadcast_buffers:
            buffers = (one for name, one in model.module.named_buffers() if name not in model.parameters_to_ignore)
            with torch.profiler.record_function("GradAvg: broadcast buffers"):
                broadcast_from_first(list(buffers), model.process_group)
        modules = self.run.module.modules()
        self._metrics = [one for one in modules if isinstance(one, Metric) and one.process_group is None]
        for metric in self._metrics:
            setattr(metric, COMPUTED, None)  # a value of before would keep this rank from computing with the others
            self._put_back.enter_context(gathers_lists(metric, self.run.world, self.alone))
        if not self.run.trainer.predicting:
            now.compute_at_end(self._complete)

    def alone(self) -> bool:
        """Return whether what is about to be reduced over the ranks is left as it is, to be refused later.

        Refused here, the ranks that have no batch would wait for this one.
        """
        now = self._pass
        within = now is not None and now.begun and any(each.uneven for each in now.loaders)
        self._refused |= within
        return within

    def _agreed(self, mine: Any = None) -> Sequence[Any]:
        """Return what each rank brings, after raising on all what is wrong with the pass. A collective operation."""
        now, self._pass = self._pass, None  # no batch is evaluated any more: what is reduced now is so over all ranks
        assert now is not None
        row = self._refused, [loader.read for loader in now.loaders], [loader.is_empty for loader in now.loaders], mine
        refused, reads, empty, others = zip(*self.run.world.gather_objects(row), strict=True)
        if any(refused):
            raise RuntimeError(_REFUSED)
        for index, of_ranks in enumerate(zip(*reads, strict=True)):
            if len(set(of_ranks)) > 1:
                raise RuntimeError(_DIFFERENT.format(index))
        # Of a stream it is known only now.
        of_loaders = zip(*empty, strict=True)
        self._tell([[rank for rank, is_empty in enumerate(of_ranks) if is_empty] for of_ranks in of_loaders])
        return others

    def _tell(self, ranks_without_batch: Sequence[Sequence[int]]) -> None:
        """Log a line for each loader of which some ranks have no batch, once in a run."""
        for index, ranks in enumerate(ranks_without_batch):
            line = self._no_batch(index, ranks) if ranks else ""
            if line not in self._told:
                self._told.add(line)
                rank_zero_info(f"GradAvgStrategy: {line}")

    def _no_batch(self, index: int, ranks: Sequence[int]) -> str:
        trainer = self.run.trainer
        stage = "validation"
        if trainer.testing:
            stage = "test"
        if trainer.predicting:
            stage = "predict"
        loader = f"{stage} loader"
        if len(self._loaders) > 1:
            loader += f" {index}"
        return _NO_BATCH.format(loader, on_ranks(ranks).removeprefix("on "), stage)

    def explain(self, exception: BaseException) -> None:
        """Say of an exception in a pass if this rank had no batch of a loader: hooks may have expected some."""
        if not isinstance(exception, Exception) or is_broken_exchange(exception):
            return
        empty = [index for index, loader in enumerate(self._loaders) if loader.is_empty]
        if empty:
            lines = [self._no_batch(index, [self.run.world.rank]) for index in empty]
            exception.args = ("\n".join([str(exception), *lines]),)

    def _complete(self, results: dict[str, Any]) -> None:
        """Add what other ranks logged and this one did not, and put all into one order, before it is computed."""
        mine = {key: neutral(entry) for key, entry in results.items() if _is_of_all_ranks(entry)}
        everything = {key: entry for of_rank in self._agreed(mine) for key, entry in of_rank.items()}
        ordered = {key: results[key] if key in mine else self._taken_over(one) for key, one in everything.items()}
        merged = ordered | results | ordered  # what is not of all ranks comes last
        results.clear()
        results.update(merged)
        for metric in self._metrics:
            if not metric.update_called:  # it warns when it is computed, although other ranks have updated it
                self._put_back.callback(setattr, metric, UPDATES, 0)
                setattr(metric, UPDATES, 1)

    def _taken_over(self, entry: Any) -> Any:
        """Return another rank's neutral value for this rank's results."""
        module = self.run.module
        reduce_by(entry, module.trainer.strategy.reduce)
        entry.to(module.device)
        if not entry.is_tensor:
            entry.value = module.get_submodule(entry.meta.metric_attribute)  # Lightning logs none that it does not find
        return entry

    def on_evaluation_end(self) -> None:
        """End one pass, when its results are computed. A collective operation for predictions."""
        self._put_back.close()
        now, world = self._pass, self.run.world
        if now is not None:
            self._end_predictions(now, world)
        self._loaders = []

    def _end_predictions(self, now: EvaluationPass, world: World) -> None:
        self._agreed()
        for loader, own in zip(now.loaders, now.predictions, strict=False):  # there may be none
            if not loader.kept:
                most = max(length for (length,) in world.gather_integers([len(own)]))
                # Round by round, in which batches were dealt: what is gathered goes through the device's memory.
                rounds = [world.gather_objects(own[n : n + 1]) for n in range(most)]
                # In place: this list is what the loop returns.
                own[:] = chain.from_iterable(chain.from_iterable(rounds))

    def teardown(self) -> None:
        """Put everything back at the end of the run."""
        self._put_back_options.close()
        self._put_back.close()
        restore_evaluation_loops(self.run.trainer)


def _is_of_all_ranks(entry: Any) -> bool:
    # Of a group of its own, or logged by rank 0 alone, the user knows which ranks take part.
    sync = entry.meta.sync
    own = entry.has_reset or sync.rank_zero_only or sync.group is not None
    return not own and (sync.should or not entry.is_tensor)


def gathers_lists(metric: Metric, world: World, alone: Callable[[], bool]) -> AbstractContextManager[None]:
    """Have a metric gather list states of any length, on this rank with any content; nothing where it is `alone`.

    Its own way takes lists of one length, or concatenates them, for which an empty one lacks type and shape.
    """

    def synced(metric: Metric, *args: Any, **kwargs: Any) -> None:
        if alone():
            return
        lists = {name: state for name, state in metric.metric_state.items() if isinstance(state, list)}
        others = {name: how for name, how in getattr(metric, REDUCTIONS).items() if name not in lists}
        with replaced(metric, REDUCTIONS, others):
            getattr(type(metric), SYNC)(metric, *args, **kwargs)
        of_ranks = world.gather_objects(move_data_to_device(lists, "cpu")) if lists else []
        for name in lists:
            everything = [item for of_rank in of_ranks for item in of_rank[name]]
            setattr(metric, name, move_data_to_device(everything, metric.device))

    return replaced(metric, SYNC, MethodType(synced, metric))  # of a copy's own, where a metric is cloned
