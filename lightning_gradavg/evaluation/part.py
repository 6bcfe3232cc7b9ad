"""Evaluation that sees each sample exactly once, on any world size.

The loaders are dealt (`lightning_gradavg.evaluation.dealt`), so a rank may have fewer batches than another, or none.
What follows from that is done here:

* no step runs through DDP, whose forward broadcasts buffers: all ranks take rank 0's once, at the start;
* what is reduced or gathered within a step, such as `self.log(on_step=True, sync_dist=True)`, is refused where some
  ranks may have no batch then: at the end of the pass, where no rank waits for another;
* before anything is computed at the end, the ranks agree on what was logged, in which order, and take over what they
  lack with its neutral value;
* predictions are put back into the order of the loader.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any

import torch
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_gradavg.evaluation.dealt import EvaluationLoader, compare_streams, sampler_problem
from lightning_gradavg.evaluation.logged import complete, describe
from lightning_gradavg.lightning_internals import (
    EvaluationPass,
    broadcast_from_first,
    injects_samplers,
    limited_batches,
    restore_evaluation_loops,
    set_injection_of_samplers,
)
from lightning_gradavg.loaders import distributed_sampler, is_sharded, length_of, user_loader
from lightning_gradavg.part import Part, Run

__all__ = ["Evaluation", "ExactEvaluation"]

_STAGES = {
    "val": RunningStage.VALIDATING,
    "test": RunningStage.TESTING,
    "predict": RunningStage.PREDICTING,
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


_REFUSED = (
    "something is reduced or gathered over the ranks within an evaluation step (self.log with on_step=True and"
    " sync_dist=True, self.all_gather, or a metric with dist_sync_on_step=True), but with exact evaluation some ranks"
    " may have no batch in a step. Log with on_step=False, on_epoch=True, which is reduced once at the end; gather in"
    " on_validation_epoch_end; or leave exact_evaluation out."
)


class ExactEvaluation(Evaluation):
    """Evaluates each sample exactly once, on two or more ranks."""

    _pass: EvaluationPass | None = None
    _loaders: Sequence[EvaluationLoader] = ()  # of the pass, until its last batch
    _refused = False

    def setup(self, run: Run) -> None:
        """Begin a run."""
        super().setup(run)
        # One rank evaluates as in stock. On several, those with fewer batches would not take part in DDP's broadcasts.
        self.through_ddp = run.world.size == 1
        self._stages = {} if self.through_ddp else _STAGES
        self._injects_samplers = injects_samplers(run.trainer)
        self.prepares, self._pass, self._loaders = False, None, ()
        self._put_back_options, self._put_back, self._within_step = ExitStack(), ExitStack(), ExitStack()

    def prepare_loaders(self, stage: str) -> None:
        """Have Lightning leave the samplers and the number of batches to us, for the loaders of a stage."""
        self._put_back_options.close()
        trainer: Any = self.run.trainer
        self.prepares = stage in self._stages
        if self.prepares:
            self._stage = self._stages[stage]
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
        world, prefix = self.run.world, self._stage.dataloader_prefix
        loader = user_loader(loader)
        sampler = distributed_sampler(loader)
        kept = is_sharded(loader) or sampler is not None or not self._injects_samplers
        limited, problem = 0.0, sampler_problem(sampler, world.size)
        try:
            limited = limited_batches(self._stage, length_of(loader), self._limit)
        except MisconfigurationException as error:
            problem = str(error)
        # A problem that only some ranks have is raised by them all: nobody waits for a rank that has given up.
        of_kept, lengths, problems = zip(*world.gather_objects((kept, limited, problem)), strict=True)
        problem = next(filter(None, problems), None)
        if problem is not None:
            raise ValueError(problem)
        if len(set(of_kept)) > 1 or (not kept and len(set(lengths)) > 1):
            raise ValueError(
                f"the ranks' {prefix} loaders differ: in rank order they have {', '.join(map(str, lengths))} batches,"
                " but exact evaluation treats them as one. Make them the same on all ranks; or, where every rank is to"
                " evaluate its own data, set `sharded_by_rank = True` on the loader or its dataset, or"
                " Trainer(use_distributed_sampler=False)."
            )
        limit = None if limited == math.inf else int(limited)
        of_ranks = None if math.inf in lengths else [int(length) for length in lengths]
        if of_ranks is not None and not kept:
            of_ranks = [len(range(rank, of_ranks[0], world.size)) for rank in range(world.size)]
        wrapped = EvaluationLoader(loader, world, kept=kept, limit=limit, lengths=of_ranks)
        rank_zero_info(f"GradAvgStrategy: {prefix} {wrapped.describe()}")
        return wrapped

    def on_evaluation_start(self) -> None:
        """Prepare one pass over the loaders. A collective operation, when Lightning's loop has set them up."""
        if self.through_ddp:
            return
        self._put_back_options.close()
        self.prepares = False
        self._pass = now = EvaluationPass(self.run.trainer)
        if now.mode == "max_size_cycle":
            raise ValueError(
                f"CombinedLoader(mode={now.mode!r}) repeats the batches of the shorter loaders, so their samples would"
                " be evaluated more than once. Use 'sequential', 'min_size' or 'max_size'."
            )
        self._loaders, self._refused = now.loaders, False
        if self.run.model is not None:
            self._take_buffers(self.run.model)
        metrics = self._metrics()
        self._updates = {name: metric.update_count for name, metric in metrics.items()}
        for metric in metrics.values():
            if metric.dist_sync_on_step:
                self._within_step.callback(setattr, metric, "dist_sync_fn", metric.dist_sync_fn)
                metric.dist_sync_fn = partial(self._gathered, metric.dist_sync_fn or gather_all_tensors)
        if not self.run.trainer.predicting:
            now.compute_at_end(self._complete)

    def alone(self) -> bool:
        """Return whether what is about to be reduced over the ranks is left as it is, to be refused later.

        Refused here, the ranks that have no batch would wait for this one.
        """
        within = any(each.begun for each in self._loaders) and any(each.uneven for each in self._loaders)
        self._refused |= within
        return within

    def _gathered(self, gather: Any, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """Return a state of a metric on all ranks."""
        return [tensor] if self.alone() else gather(tensor, group)

    def _agreed(self, now: EvaluationPass, *mine: Any) -> list[Any]:
        """Return what each rank brings, after raising on all what is wrong with the pass. A collective operation."""
        row = self._refused, [loader.read for loader in now.loaders], *mine
        refused, reads, *others = zip(*self.run.world.gather_objects(row), strict=True)
        if any(refused):
            raise RuntimeError(_REFUSED)
        compare_streams(reads, together=now.mode != "sequential")
        return others

    def on_evaluation_end(self) -> None:
        """End one pass, when its results are computed. A collective operation for predictions."""
        now, world = self._pass, self.run.world
        if now is None:
            return
        self._leave()
        self._put_back.close()
        self._pass = None
        if not self.run.trainer.predicting:
            return
        self._agreed(now)
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
        restore_evaluation_loops(self.run.trainer)
        self._within_step.close()

    def _metrics(self) -> dict[str, Metric]:
        """Return the metrics whose states are shared by all ranks when they are computed."""
        return {
            name: module
            for name, module in self.run.module.named_modules()
            if isinstance(module, Metric) and module.sync_on_compute and module.process_group is None
        }

    def _leave(self) -> None:
        """Note that no batch is evaluated any more: what is reduced now is so over all ranks."""
        for loader in self._loaders:
            loader.begun = False  # not at the start: of a stream the first batch is fetched before
        self._loaders = ()
        self._within_step.close()

    def _take_buffers(self, model: DistributedDataParallel) -> None:
        """Take over rank 0's buffers until the end: the next forward of DDP does it anew, if the user wants it."""
        buffers = [one for name, one in model.module.named_buffers() if name not in model.parameters_to_ignore]
        own = [buffer.clone() for buffer in buffers]
        broadcast_from_first(buffers, model.process_group)
        self._put_back.callback(_give_back, buffers, own, [buffer.clone() for buffer in buffers])

    def _complete(self) -> None:
        """Have all ranks agree on what was logged, before the results are computed."""
        now, world = self._pass, self.run.world
        assert now is not None
        self._leave()
        metrics = self._metrics()
        updated = {
            name: metric for name, metric in metrics.items() if metric.update_count != self._updates.get(name, 0)
        }
        results = now.results
        (described,) = self._agreed(now, describe(results, updated))
        lacking, put_back = complete(results, metrics, described, self.run.module, world)
        self._put_back.push(put_back)
        if lacking and not self.run.trainer.sanity_checking:
            rank_zero_warn(
                f"{', '.join(map(repr, lacking))} was logged by some ranks and not by others, which had no batch to log"
                " it from, and is not reduced over the ranks: each rank has its own value, or none. Log it with"
                " sync_dist=True to have the value of one process on all ranks."
            )


def _give_back(buffers: Sequence[Tensor], own: Sequence[Tensor], taken: Sequence[Tensor]) -> None:
    for buffer, before, given in zip(buffers, own, taken, strict=True):
        if torch.equal(buffer, given):  # otherwise the evaluation has written it
            buffer.copy_(before)
