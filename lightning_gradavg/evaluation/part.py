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

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

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
    injects_samplers,
    limited_batches,
    neutral,
    reduce_by,
    restore_evaluation_loops,
    set_injection_of_samplers,
)
from lightning_gradavg._lightning.loaders import distributed_sampler, is_sharded, length_of, user_loader
from lightning_gradavg._lightning.methods import replaced
from lightning_gradavg._lightning.part import Part, Run, Saved
from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.flat import broadcast_from_first
from lightning_gradavg._support.random_state import RandomState, random_state, stream_key
from lightning_gradavg._support.text import on_ranks
from lightning_gradavg.batches.streams import run_seed
from lightning_gradavg.evaluation.dealt import EvaluationLoader, EvaluationStreams, StreamRecord, require_each_once
from lightning_gradavg.faults.failure_reports import is_broken_exchange

__all__ = ["Evaluation", "ExactEvaluation", "gathers_lists"]

_STAGES: Mapping[str, RunningStage] = {
    "val": RunningStage.VALIDATING,
    "test": RunningStage.TESTING,
    "predict": RunningStage.PREDICTING,
}
"""The stages of evaluation, by the name that `Part.prepare_loaders` gets."""

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


class Evaluation(Part):
    """Every rank evaluates what Lightning gives it, as in stock DDP.

    Attributes:
        through_ddp: Whether a validation step may run through DDP, whose forward broadcasts buffers.
        prepares: Whether the loaders that Lightning prepares now are evaluation loaders, to be processed here.
    """

    through_ddp: bool = True
    prepares: bool = False

    def refuses_reduction(self) -> bool:
        """Return whether what is about to be reduced over the ranks is left as it is, and refused later."""
        return False

    def own_state(self) -> RandomState:
        """Return the own random state of the process."""
        return random_state()

    def explain(self, exception: BaseException) -> None:
        """Add to an exception that ends the run what evaluation knows of its cause."""


class _PassState(Enum):
    """Where a pass over the evaluation loaders is. `ExactEvaluation` has the table."""

    STEPS = "evaluates batches"
    END = "has no batch left"


@dataclass
class _Pass:
    """One pass over the evaluation loaders."""

    loop: EvaluationPass
    state: _PassState = _PassState.STEPS
    has_refused: bool = False  # whether a step on this rank has reduced something, which is an error at the end

    @property
    def loaders(self) -> Sequence[EvaluationLoader]:
        return self.loop.loaders


class _PassOfRank(NamedTuple):
    """What a rank tells the others at the end of a pass."""

    has_refused: bool
    stream_records: list[StreamRecord]  # of each loader
    empty: list[bool]  # of each loader, whether the rank had no batch of it
    entries: dict[str, Any]  # what was logged for all ranks, by Lightning's key, with neutral values


class ExactEvaluation(Evaluation):
    """Evaluates each sample exactly once. One rank evaluates as stock Lightning does on one device.

    The calls of a run, in this order:

    1. `setup`.
    2. `prepare_loaders` before Lightning prepares loaders, and `process_dataloader` for each evaluation loader. In
       `fit` this comes once, unless loaders are reloaded.
    3. `on_evaluation_start` begins a pass.
    4. `refuses_reduction` for whatever is reduced over the ranks.
    5. `_complete` after the last batch, before Lightning computes what was logged.
    6. `on_evaluation_end`, after the hooks at the end of the pass. Then 2, 3 or 7 may come next.
    7. `teardown`. If an exception ends the run, `explain` comes before it, in any state.

    | `_pass.state` | from                  | what is reduced over the ranks                                     |
    |---------------|-----------------------|--------------------------------------------------------------------|
    | no pass       | `on_evaluation_end`   | is none of evaluation's concern                                    |
    | `STEPS`       | `on_evaluation_start` | is refused if some rank may have no batch in the step              |
    | `END`         | `_complete`           | is reduced: all ranks run the same hooks, in which they may log    |

    Lightning logs nothing in prediction and computes nothing at its end. There `on_evaluation_end` itself does what
    `_complete` does for the other stages, and gathers the predictions.
    """

    def __init__(self, drawing_order: Callable[[], AbstractContextManager[None]]) -> None:
        """Deal the loaders; seeds of workers are drawn within `drawing_order`, which keeps the order of training."""
        self._drawing_order = drawing_order
        self._loaded_seed: int | None = None  # of a checkpoint that the next run resumes

    _pass: _Pass | None = None
    _stage: RunningStage  # of the loaders that were prepared last
    _limit: float  # the user's `limit_*_batches` of that stage
    _metrics: Sequence[Metric] = ()  # of the pass, those that are reduced over all ranks

    def setup(self, run: Run) -> None:
        """Forget an earlier run."""
        super().setup(run)
        # Of several ranks, those with fewer batches would not take part in DDP's broadcasts.
        self.through_ddp = run.world.size == 1
        self.prepares = False
        self._injects_samplers = injects_samplers(run.trainer)
        self._pass = None
        seed = self._loaded_seed
        if seed is None:
            seed = run_seed(run.world)
        self._seed = seed  # of the streams of all batches
        self._loaded_seed = None
        self._streams = EvaluationStreams(run.device)
        self._loaders_of_stage = 0  # that are processed
        self._said: set[str] = set()  # lines about ranks without a batch
        self._changed_options = ExitStack()  # of the Trainer, while it prepares loaders
        self._changed_metrics = ExitStack()  # in a pass

    def prepare_loaders(self, stage: str) -> None:
        """Keep Lightning from limiting the batches of evaluation loaders, and from replacing their samplers.

        `process_dataloader` does both. Called for every stage, before Lightning prepares its loaders. Lightning reads
        the options next, and `on_evaluation_start` restores them.
        """
        self._changed_options.close()
        self.prepares = stage in _STAGES
        if not self.prepares:
            return
        self._loaders_of_stage = 0
        trainer: Any = self.run.trainer
        self._stage = _STAGES[stage]
        option = f"limit_{stage}_batches"
        self._limit = getattr(trainer, option)
        self._changed_options.callback(setattr, trainer, option, self._limit)
        self._changed_options.callback(set_injection_of_samplers, trainer, self._injects_samplers)
        setattr(trainer, option, 1.0)
        set_injection_of_samplers(trainer, False)

    def process_dataloader(self, loader: Any) -> EvaluationLoader:
        """Return this rank's part of an evaluation loader. A collective operation.

        It is dealt, unless the user shares out the data: with `Trainer(use_distributed_sampler=False)`, a true
        attribute `sharded_by_rank` of the loader or its dataset, or a `DistributedSampler`.
        """
        world = self.run.world
        loader = user_loader(loader)
        sampler = distributed_sampler(loader)
        if sampler is not None:
            require_each_once(sampler, world.size)
        user_shares = is_sharded(loader) or sampler is not None or not self._injects_samplers
        is_dealt = not user_shares
        count = limited_batches(self._stage, length_of(loader), self._limit)
        of_ranks: list[tuple[bool, float]] = world.gather_objects((is_dealt, count))
        counts = [count for _, count in of_ranks]
        if len(set(of_ranks)) > 1 and any(is_dealt for is_dealt, _ in of_ranks):
            raise ValueError(
                f"the ranks' {self._stage.dataloader_prefix} loaders differ: in rank order they have"
                f" {', '.join(map(str, counts))} batches, but exact evaluation treats them as one. Make them the same"
                " on all ranks; or, where every rank is to evaluate its own data, set `sharded_by_rank = True` on the"
                " loader or its dataset, or Trainer(use_distributed_sampler=False)."
            )
        position = self._loaders_of_stage
        self._loaders_of_stage += 1
        return EvaluationLoader(
            loader,
            world,
            self._streams,
            partial(self._key, position),
            self._drawing_order,
            is_dealt=is_dealt,
            counts=counts,
        )

    def _key(self, position: int, what: str, *number: int) -> bytes | None:
        """Return the key of a stream of a loader in the pass at hand; None where a user looks at the data."""
        trainer = self.run.trainer
        stage = trainer.state.stage
        if stage is None or not (stage.evaluating or trainer.predicting):
            return None
        return stream_key(self._seed, stage.value, trainer.current_epoch, position, what, *number)

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save the seed, from which all that evaluation draws follows."""
        saved["evaluation_seed"] = self._seed

    def load(self, saved: Saved) -> None:
        """Keep the seed of a checkpoint for the next run."""
        self._loaded_seed = saved.get("evaluation_seed")

    def on_evaluation_start(self) -> None:
        """Begin a pass over the loaders, which Lightning's loop has now. A collective operation."""
        self._changed_options.close()
        self.prepares = False
        if self.through_ddp:
            return
        loop = EvaluationPass(self.run.trainer)
        # Only the loop tells the mode: `process_dataloader` gets one loader at a time.
        if loop.mode != "sequential":
            raise ValueError(
                f"CombinedLoader(mode={loop.mode!r}) reads evaluation loaders together, which exact evaluation does"
                " not: of each, another number of batches is dealt. Use 'sequential', or leave exact_evaluation out."
            )
        self._pass = _Pass(loop)
        self._name_ranks_without_batch([loader.ranks_without_batch for loader in loop.loaders])
        self._broadcast_buffers()
        self._metrics = [
            module
            for module in self.run.module.modules()
            if isinstance(module, Metric) and module.process_group is None
        ]
        for metric in self._metrics:
            # Torchmetrics returns a value that it has computed before. Then this rank would not reduce with the others.
            setattr(metric, COMPUTED, None)
            self._changed_metrics.enter_context(gathers_lists(metric, self.run.world, self.refuses_reduction))
        if not self.run.trainer.predicting:
            loop.compute_at_end(self._complete)

    def own_state(self) -> RandomState:
        """Return the own random state of the process, which is kept aside within a pass."""
        return self._streams.own_state()

    def _broadcast_buffers(self) -> None:
        """Write rank 0's buffers into those of all ranks, as DDP does before each forward. A collective operation."""
        model = self.run.model
        if model is None or not model.broadcast_buffers:
            return
        buffers = [buffer for name, buffer in model.module.named_buffers() if name not in model.parameters_to_ignore]
        with torch.profiler.record_function("GradAvg: broadcast buffers"):
            broadcast_from_first(buffers, model.process_group)

    def refuses_reduction(self) -> bool:
        """Return whether what is about to be reduced over the ranks is left as it is, and refused at the end.

        An error here would leave the ranks that have a batch waiting for this one, and those without would not hear of
        it.
        """
        running = self._pass
        if running is None or running.state is not _PassState.STEPS or not running.loop.begun:
            return False
        if not any(loader.uneven for loader in running.loaders):
            return False
        running.has_refused = True
        return True

    def _end_steps(self, running: _Pass, entries: dict[str, Any]) -> list[dict[str, Any]]:
        """End the steps of a pass: return every rank's entries, or raise on all ranks what is wrong with the pass.

        A collective operation.
        """
        # Also before an error is raised: the pass has no step left in which a reduction would have to be refused.
        running.state = _PassState.END
        loaders = running.loaders
        local = _PassOfRank(
            has_refused=running.has_refused,
            stream_records=[loader.stream_record for loader in loaders],
            empty=[loader.is_empty for loader in loaders],
            entries=entries,
        )
        of_ranks: list[_PassOfRank] = self.run.world.gather_objects(local)
        if any(rank.has_refused for rank in of_ranks):
            raise RuntimeError(_REFUSED)
        for index in range(len(loaders)):
            records = {rank.stream_records[index] for rank in of_ranks}
            if len(records) > 1:
                raise RuntimeError(_DIFFERENT.format(index))
        # The length of a stream is known only now.
        ranks_without_batch: list[list[int]] = []
        for index in range(len(loaders)):
            ranks_without_batch.append([number for number, rank in enumerate(of_ranks) if rank.empty[index]])
        self._name_ranks_without_batch(ranks_without_batch)
        return [rank.entries for rank in of_ranks]

    def _name_ranks_without_batch(self, ranks_without_batch: Sequence[Sequence[int]]) -> None:
        """Log a line, once in a run, for each loader of which some ranks have no batch."""
        for index, ranks in enumerate(ranks_without_batch):
            if not ranks:
                continue
            line = self._line_about(index, ranks)
            if line not in self._said:
                self._said.add(line)
                rank_zero_info(f"GradAvgStrategy: {line}")

    def _line_about(self, loader_index: int, ranks: Sequence[int]) -> str:
        """Return the line that names the ranks without a batch of a loader."""
        trainer = self.run.trainer
        stage = "validation"
        if trainer.testing:
            stage = "test"
        if trainer.predicting:
            stage = "predict"
        loader = f"{stage} loader"
        if self._pass is not None and len(self._pass.loaders) > 1:
            loader += f" {loader_index}"
        return _NO_BATCH.format(loader, on_ranks(ranks).removeprefix("on "), stage)

    def explain(self, exception: BaseException) -> None:
        """Add to an exception in a pass that this rank had no batch of a loader: hooks may have expected some."""
        if self._pass is None:
            return
        if not isinstance(exception, Exception) or is_broken_exchange(exception):
            return
        lines: list[str] = []
        for index, loader in enumerate(self._pass.loaders):
            if loader.is_empty:
                lines.append(self._line_about(index, [self.run.world.rank]))
        if lines:
            exception.args = ("\n".join([str(exception), *lines]),)

    def _complete(self, results: dict[str, Any]) -> None:
        """Make Lightning's results hold the same keys in the same order on all ranks, before they are computed.

        Lightning computes them in their order, and each is a collective operation. What this rank lacks gets a value
        that changes nothing in the reduction. A collective operation.

        Args:
            results: Lightning's `_ResultMetric` of everything that was logged, by key.
        """
        assert self._pass is not None
        neutral_entries = {key: neutral(entry) for key, entry in results.items() if _is_of_all_ranks(entry)}
        entries: dict[str, Any] = {}
        for of_rank in self._end_steps(self._pass, neutral_entries):
            entries.update(of_rank)  # in rank order, so the order of keys is the same on all ranks
        # This rank's value of each key, or a neutral one of a key that only other ranks have.
        completed: dict[str, Any] = {}
        for key, entry in entries.items():
            if key in neutral_entries:
                completed[key] = results[key]
            else:
                completed[key] = self._take_over(entry)
        for key, entry in results.items():
            # What is not of all ranks comes last: it delays no other rank.
            completed.setdefault(key, entry)
        results.clear()
        results.update(completed)
        for metric in self._metrics:
            if not metric.update_called:
                # Torchmetrics would warn about computing it, although other ranks have updated it.
                self._changed_metrics.callback(setattr, metric, UPDATES, 0)
                setattr(metric, UPDATES, 1)

    def _take_over(self, entry: Any) -> Any:
        """Make another rank's neutral entry, which was sent, one of this rank's results."""
        module = self.run.module
        reduce_by(entry, module.trainer.strategy.reduce)
        entry.to(module.device)
        if not entry.is_tensor:
            # A metric is not sent, only its name. Lightning refuses to log one that is not an attribute of the module.
            entry.value = module.get_submodule(entry.meta.metric_attribute)
        return entry

    def on_evaluation_end(self) -> None:
        """End a pass, after its results are computed. A collective operation for predictions."""
        self._streams.restore()
        self._changed_metrics.close()
        running = self._pass
        if running is not None and running.state is _PassState.STEPS:
            self._end_predictions(running)
        self._pass = None

    def _end_predictions(self, running: _Pass) -> None:
        """Give every rank the predictions of all, in the order of the loader. A collective operation."""
        self._end_steps(running, {})
        world = self.run.world
        # With `return_predictions=False` there are none to gather.
        for loader, predictions in zip(running.loaders, running.loop.predictions, strict=False):
            if not loader.is_dealt:
                continue
            rounds = max(length for (length,) in world.gather_integers([len(predictions)]))
            in_order: list[Any] = []
            for number in range(rounds):
                # Round by round, as batches were dealt: what is gathered goes through the device's memory.
                for of_rank in world.gather_objects(predictions[number : number + 1]):
                    in_order.extend(of_rank)
            predictions[:] = in_order  # in place: the loop returns this list

    def teardown(self) -> None:
        """Restore options, metrics, loops and the random state at the end of the run."""
        self._streams.restore()
        self._changed_options.close()
        self._changed_metrics.close()
        restore_evaluation_loops(self.run.trainer)


def _is_of_all_ranks(entry: Any) -> bool:
    """Return whether all ranks reduce what was logged, an entry of Lightning's type `_ResultMetric`."""
    if entry.has_reset:
        return False  # it was logged in an earlier pass
    sync = entry.meta.sync
    if sync.rank_zero_only or sync.group is not None:
        return False  # some ranks take part, and the user knows which
    return bool(sync.should) or not entry.is_tensor


def gathers_lists(metric: Metric, world: World, skips: Callable[[], bool]) -> AbstractContextManager[None]:
    """Within the context, have a metric gather list states of any length and content.

    Torchmetrics gathers lists of one length, or concatenates them first, for which an empty list lacks type and shape.
    Other states are reduced as torchmetrics does it.

    Args:
        metric: The metric.
        world: The ranks.
        skips: Called when the metric is to be reduced; returns whether it is left as it is.
    """

    def sync_dist(metric: Metric, *args: Any, **kwargs: Any) -> None:
        if skips():
            return
        lists = {name: state for name, state in metric.metric_state.items() if isinstance(state, list)}
        # Torchmetrics goes through the reductions, so it leaves out the states that are not in them.
        reductions = {name: reduction for name, reduction in getattr(metric, REDUCTIONS).items() if name not in lists}
        with replaced(metric, REDUCTIONS, reductions):
            getattr(type(metric), SYNC)(metric, *args, **kwargs)
        if not lists:
            return
        # By pickle, from the CPU: the elements may be of any number, shape and type, as in detection metrics.
        lists_of_ranks = world.gather_objects(move_data_to_device(lists, "cpu"))
        for name in lists:
            gathered: list[Any] = []
            for lists_of_rank in lists_of_ranks:
                gathered.extend(lists_of_rank[name])
            setattr(metric, name, move_data_to_device(gathered, metric.device))

    # A method bound to the metric, so that a copy of the metric gets a method of its own.
    return replaced(metric, SYNC, MethodType(sync_dist, metric))
