"""Evaluation that sees each sample exactly once, on any world size.

The loaders are dealt (`lightning_gradavg.evaluation.dealt`), so a rank may have fewer batches than another, or none.
Each batch is evaluated whole, by one rank, as one process would evaluate it. What follows from that is done here:

* within steps, ranks exchange nothing: no step runs through DDP, whose forward broadcasts buffers (all ranks take rank
  0's once, at the start); the value of a step is that of its batch; and what is reduced or gathered there is an error;
* after the last batch of each loader, and after the hooks at the end, ranks send each other what they have logged, and
  merge it. A rank that lacks some of it takes it over from the others;
* metrics merge their states wherever they are computed (`lightning_gradavg.evaluation.metrics`);
* predictions are put back into the order of the loader;
* hooks at the end of a pass find nothing on a rank that had no batch: a line names such ranks, and so does an error of
  such a rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torchmetrics import Metric

from lightning_gradavg._lightning.internals import (
    COMPUTED,
    EvaluationPass,
    injects_samplers,
    limited_batches,
    restore_evaluation_loops,
    sendable,
    set_injection_of_samplers,
)
from lightning_gradavg._lightning.loaders import distributed_sampler, is_sharded, length_of, user_loader
from lightning_gradavg._lightning.methods import method_of, replaced
from lightning_gradavg._lightning.part import Part, Run, Saved
from lightning_gradavg._support.flat import broadcast_from_first
from lightning_gradavg._support.random_state import RandomState, random_state, stream_key
from lightning_gradavg._support.text import on_ranks
from lightning_gradavg.batches.streams import run_seed
from lightning_gradavg.evaluation.dealt import EvaluationLoader, EvaluationStreams, PassRecord, require_each_once
from lightning_gradavg.evaluation.metrics import merged_over_ranks, running_refused
from lightning_gradavg.faults.failure_reports import is_broken_exchange
from lightning_gradavg.reduction.gather import gather_refused

__all__ = ["Evaluation", "ExactEvaluation"]

_STAGES: Mapping[str, RunningStage] = {
    "val": RunningStage.VALIDATING,
    "test": RunningStage.TESTING,
    "predict": RunningStage.PREDICTING,
}
"""The stages of evaluation, by the name that `Part.prepare_loaders` gets."""

_REFUSED = (
    "gather, global_mean, self.all_gather, strategy.reduce, and a metric that is computed over the ranks (by compute(),"
    " dist_sync_on_step=True, or the forward of a wrapper such as MinMaxMetric) are refused in an evaluation step: with"
    " exact evaluation each batch is evaluated whole, by one rank, and other ranks may have none. Update metrics in the"
    " step; compute them, and gather, in on_validation_epoch_end or its like for test and prediction"
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
        logs_step: Whether a value is being logged whose step is that of this rank alone.
    """

    through_ddp: bool = True
    prepares: bool = False
    logs_step: bool = False

    def own_state(self) -> RandomState:
        """Return the own random state of the process."""
        return random_state()

    def explain(self, exception: BaseException) -> None:
        """Add to an exception that ends the run what evaluation knows of its cause."""


class _PassState(Enum):
    """Where a pass over the evaluation loaders is. `ExactEvaluation` has the table."""

    TOGETHER = "all ranks run the same hooks"
    STEPS = "each rank evaluates its batches"


@dataclass
class _Pass:
    """One pass over the evaluation loaders."""

    loop: EvaluationPass
    state: _PassState = _PassState.TOGETHER
    finished: int = 0  # loaders whose batches are evaluated, and whose results are stored
    taken_over: list[str] = field(default_factory=list)  # keys of what only other ranks have logged

    @property
    def loaders(self) -> Sequence[EvaluationLoader]:
        return self.loop.loaders


class _LoaderOfRank(NamedTuple):
    """What a rank tells the others after its last batch of a loader."""

    pass_record: PassRecord
    is_empty: bool  # whether the rank had no batch of it
    entries: dict[str, object]  # what was logged for all ranks, by Lightning's key


class ExactEvaluation(Evaluation):
    """Evaluates each sample exactly once. One rank evaluates as stock Lightning does on one device.

    The calls of a run, in this order:

    1. `setup`.
    2. `prepare_loaders` before Lightning prepares loaders, and `process_dataloader` for each evaluation loader. In
       `fit` this comes once, unless loaders are reloaded.
    3. `on_evaluation_start` begins a pass.
    4. `_begin_batch` before each batch. After the last one of each loader, `_finish_loader`, on all ranks in one order.
    5. `_end_steps` after the last batch, before the hooks at the end; `_ending_hooks` has the last of these.
    6. `on_evaluation_end`. Then 2, 3 or 7 may come next.
    7. `teardown`. If an exception ends the run, `explain` comes before it, in any state.

    | `_pass.state` | from                                | what is reduced or gathered over the ranks           |
    |---------------|-------------------------------------|------------------------------------------------------|
    | no pass       | `on_evaluation_end`                 | is none of evaluation's concern                      |
    | `TOGETHER`    | `on_evaluation_start`, `_end_steps` | goes through, and metrics merge their states         |
    | `STEPS`       | `_begin_batch`                      | is an error; `self.log` logs the value of the batch   |

    A rank without a batch never leaves `TOGETHER`.
    """

    def __init__(self, drawing_order: Callable[[], AbstractContextManager[None]]) -> None:
        """Deal the loaders; seeds of workers are drawn within `drawing_order`, which keeps the order of training."""
        self._drawing_order = drawing_order
        self._loaded_seed: int | None = None  # of a checkpoint that the next run resumes

    # Metrics that were computed over the ranks, by identity: they have other notions of equality.
    _computed: WeakValueDictionary[int, Metric] | None = None
    _pass: _Pass | None = None
    _stage: RunningStage  # of the loaders that were prepared last
    _limit: float  # the user's `limit_*_batches` of that stage

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
        # Not made in `__init__`, because a strategy may be pickled before it runs, for the processes that it starts.
        # Kept in further runs, in which a metric still has the value that was computed in this one.
        if self._computed is None:
            self._computed = WeakValueDictionary[int, Metric]()
        self._changed_options = ExitStack()  # of the Trainer, while it prepares loaders
        self._changed_in_pass = ExitStack()
        self._changed_in_steps = ExitStack()

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

    def process_dataloader(self, loader: object) -> EvaluationLoader:
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
            most=self._most_batches,
        )

    def _most_batches(self) -> float:
        """Return how many batches of a loader the pass at hand evaluates at most, on all ranks together."""
        if self.run.trainer.sanity_checking:
            # One for each rank: hooks that look at what the steps left would fail, or hang, in the default check of two
            # batches on three ranks.
            return max(self.run.trainer.num_sanity_val_steps, self.run.world.size)
        return math.inf

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
        step = f"{self._stage_in_words()}_step"
        if is_param_in_hook_signature(getattr(self.run.module, step), "dataloader_iter", explicit=True):
            raise ValueError(
                f"{step}(dataloader_iter) fetches its own batches, so exact evaluation does not see where one begins,"
                " and ranks have different numbers of them. Take (batch, batch_idx), or leave exact_evaluation out."
            )
        running = _Pass(loop)
        self._pass = running
        for index, loader in enumerate(loop.loaders):
            self._name_ranks_without_batch(index, loader.ranks_without_batch)
        self._broadcast_buffers()
        strategy = self.run.trainer.strategy
        change = self._changed_in_pass.enter_context
        # Lightning's first call with a batch: hooks of the user come after it.
        change(replaced(strategy, "batch_to_device", self._beginning_batch(running, strategy.batch_to_device)))
        change(merged_over_ranks(Metric, self.run.world, self._computed))

        def is_updated(metric: Metric) -> bool:
            # Ranks compute a metric together, also one that only others have updated.
            return running.state is _PassState.TOGETHER or metric.update_count > 0

        change(replaced(Metric, "update_called", property(is_updated)))
        loop.call_at_end(partial(self._end_steps, running))
        if not self.run.trainer.predicting:
            # The last of the hooks at the end; Lightning computes next what they have logged.
            module = self.run.module
            name = f"on_{self._stage_in_words()}_epoch_end"
            ending = self._ending_hooks(running, getattr(module, name))
            change(replaced(module, name, method_of(module, name, ending)))

    def _log_of_step(self, log: Callable[..., None]) -> Callable[..., None]:
        """Return the module's `log`, which logs the value of the batch for a step, as one process does."""

        def logged(*args: Any, **kwargs: Any) -> None:
            self.logs_step = True
            try:
                log(*args, **kwargs)
            finally:
                self.logs_step = False

        return logged

    def _beginning_batch(self, running: _Pass, to_device: Callable[..., Any]) -> Callable[..., Any]:
        """Return the strategy's `batch_to_device`, which begins a batch."""

        def moved(batch: object, device: torch.device | None = None, dataloader_idx: int = 0) -> object:
            self._begin_batch(running, dataloader_idx)
            return to_device(batch, device, dataloader_idx)

        return moved

    def _begin_batch(self, running: _Pass, loader_index: int) -> None:
        """Begin with a batch, and finish the loaders before it. A collective operation if there are some."""
        if running.finished < loader_index:
            self._be_together(running)
        while running.finished < loader_index:
            self._finish_loader(running)
        if running.state is _PassState.TOGETHER:
            running.state = _PassState.STEPS
            self._changed_in_steps.enter_context(gather_refused(_REFUSED))
            self._changed_in_steps.enter_context(running_refused())
            module = self.run.module
            log = self._log_of_step(module.log)
            self._changed_in_steps.enter_context(replaced(module, "log", method_of(module, "log", log)))

    def _be_together(self, running: _Pass) -> None:
        """End the steps of this rank, for now."""
        running.state = _PassState.TOGETHER
        self._changed_in_steps.close()

    def _end_steps(self, running: _Pass) -> None:
        """End the steps of the pass, and finish all loaders. A collective operation."""
        self._be_together(running)
        while running.finished < len(running.loaders):
            self._finish_loader(running)

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

    def _finish_loader(self, running: _Pass) -> None:
        """Finish the next loader: store the results of all ranks, or raise on all of them. A collective operation."""
        index = running.finished
        running.finished += 1
        loader = running.loaders[index]
        entries = self._entries_to_compute(running, running.loop.index_in_results(index))
        ranks = self.run.world.gather_objects(_LoaderOfRank(loader.pass_record, loader.is_empty, entries))
        if len({rank.pass_record for rank in ranks}) > 1:
            raise RuntimeError(_DIFFERENT.format(index))
        # The length of a stream is known only now.
        self._name_ranks_without_batch(index, [number for number, rank in enumerate(ranks) if rank.is_empty])
        if not self.run.trainer.predicting:
            self._compute(running, entries, [rank.entries for rank in ranks])
            running.loop.store_results(index)

    def _ending_hooks(self, running: _Pass, hook: Callable[[], None]) -> Callable[[], None]:
        """Return the module's hook at the end of a pass, behind which the ranks compute what such hooks have logged.

        Some ranks log nothing there, where they had no batch. Each value is a collective operation.
        """

        def ended() -> None:
            hook()
            entries = self._entries_to_compute(running, None)
            self._compute(running, entries, self.run.world.gather_objects(entries))

        return ended

    def _entries_to_compute(self, running: _Pass, place: int | None) -> dict[str, object]:
        """Return what this rank has logged for all ranks at a place of the results, and what is not computed yet."""
        assert self._computed is not None
        for metric in self._computed.values():
            # Torchmetrics returns a value that it has computed before. A rank that has not updated the metric since
            # would not compute it with the others.
            setattr(metric, COMPUTED, None)
        entries: dict[str, object] = {}
        if self.run.trainer.predicting:
            return entries  # nothing is logged
        for key, entry in running.loop.results.items():
            is_computed = getattr(entry, COMPUTED) is not None
            if entry.meta.dataloader_idx == place and _is_of_all_ranks(entry) and not is_computed:
                entries[key] = sendable(entry)
        return entries

    def _compute(
        self, running: _Pass, local_entries: dict[str, Any], entries_of_ranks: Sequence[dict[str, Any]]
    ) -> None:
        """Compute what was logged, over all ranks. A collective operation if there are metrics."""
        entries: dict[str, list[Any]] = {}  # by key, in an order that is the same on all ranks
        for entries_of_rank in entries_of_ranks:
            for key, entry in entries_of_rank.items():
                entries.setdefault(key, []).append(entry)
        results = running.loop.results
        module = self.run.module
        for key, of_ranks in entries.items():
            if key not in local_entries:
                results[key] = of_ranks[0]
                running.taken_over.append(key)
                if not results[key].is_tensor:
                    # A metric is not sent, only its name. Mostly, Lightning logs attributes of the module only.
                    results[key].value = module.get_submodule(of_ranks[0].meta.metric_attribute)
            if results[key].is_tensor:
                # Lightning does not compute what has a value.
                setattr(results[key], COMPUTED, _value_over_ranks(of_ranks).to(module.device))
            else:
                results[key].compute()

    def _name_ranks_without_batch(self, loader_index: int, ranks: Sequence[int]) -> None:
        """Log a line, once in a run, if some ranks have no batch of a loader."""
        if not ranks:
            return
        line = self._line_about(loader_index, ranks)
        if line not in self._said:
            self._said.add(line)
            rank_zero_info(f"GradAvgStrategy: {line}")

    def _line_about(self, loader_index: int, ranks: Sequence[int]) -> str:
        """Return the line that names the ranks without a batch of a loader."""
        stage = self._stage_in_words()
        loader = f"{stage} loader"
        if self._pass is not None and len(self._pass.loaders) > 1:
            loader += f" {loader_index}"
        return _NO_BATCH.format(loader, on_ranks(ranks).removeprefix("on "), stage)

    def _stage_in_words(self) -> str:
        """Return how Lightning names the step and the hooks of the pass."""
        if self.run.trainer.testing:
            return "test"
        if self.run.trainer.predicting:
            return "predict"
        return "validation"

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

    def on_evaluation_end(self) -> None:
        """End a pass, after its results are computed. A collective operation for predictions."""
        self._streams.restore()
        self._changed_in_pass.close()
        running = self._pass
        self._pass = None
        if running is None:
            return
        for key in running.taken_over:
            # In the next pass this rank may log it itself, and Lightning compares how. Lightning resets what it finds
            # there next: this rank may have updated a metric that only another one has logged.
            running.loop.results.pop(key).reset()
        if self.run.trainer.predicting:
            self._gather_predictions(running)

    def _gather_predictions(self, running: _Pass) -> None:
        """Give every rank the predictions of all, in the order of the loader. A collective operation."""
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
        self._changed_in_steps.close()
        self._changed_in_pass.close()
        self._pass = None
        restore_evaluation_loops(self.run.trainer)


def _is_of_all_ranks(entry: Any) -> bool:
    """Return whether a value of an epoch is one of all ranks: an entry of Lightning's type `_ResultMetric`."""
    if entry.has_reset or not entry.meta.on_epoch:
        return False  # it was logged in an earlier pass, or for steps alone
    sync = entry.meta.sync
    if sync.rank_zero_only or sync.group is not None:
        return False  # some ranks take part, and the user knows which
    return bool(sync.should) or not entry.is_tensor


def _value_over_ranks(entries: Sequence[Any]) -> Tensor:
    """Return the value of an epoch from what each rank has logged of it."""
    values = torch.stack([entry.value for entry in entries])
    meta = entries[0].meta
    value: Tensor
    if meta.is_mean_reduction:
        value = values.sum() / torch.stack([entry.cumulated_batch_size for entry in entries]).sum()
        return value
    value = meta.reduce_fx(values)
    return value
