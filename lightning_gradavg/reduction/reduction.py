"""The reduction of a run: the part of the strategy that reads losses and weights, and has a window do the rest."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache, partial
from typing import Protocol

import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_gradavg._lightning.part import Part, Run
from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.running import OF_A_LOOP, Forward, running, running_forward
from lightning_gradavg.reduction.comm_hook import CommHook, require_hookable
from lightning_gradavg.reduction.gradients import Gradients, ReplicatedGradients
from lightning_gradavg.reduction.loss import MicroBatch, Weights, require_loss, weighed
from lightning_gradavg.reduction.plain_mean import PlainMean
from lightning_gradavg.reduction.uncounted import sparse_weights, zero_loss
from lightning_gradavg.reduction.window import Ranks, WeightUnit, Window, WindowRecord, WindowState
from lightning_gradavg.rules import RULES, Rule

__all__ = ["Observer", "Reduction"]

_WORD_OF_COUNTS = re.compile(r"(^|_)(n|num|count|counts|size|length|items|samples|terms|tokens|ntokens)(_|$)")
"""What the name of a count has, as in "num_tokens"."""


@lru_cache(maxsize=1)
def _exchanging_world(of_all: dist.ProcessGroup, timeout: timedelta | None) -> World:
    """Return all ranks, in a process group of their own for exchanges. A collective operation, the first time.

    It is kept for all runs of the process: each group has threads that wake a hundred times a second.

    Args:
        of_all: The default process group: a process that ends it and makes another one needs another one here, too.
        timeout: The timeout of the group that is made.
    """
    assert of_all is dist.group.WORLD  # whose ranks `new_group` takes
    return World.of(dist.new_group(timeout=timeout))


def _synchronizes_batch_norm(module: nn.Module) -> bool:
    """Return whether a layer of torch's normalizes over the ranks; its backward is a collective operation."""
    return any(isinstance(layer, nn.SyncBatchNorm) and layer.training for layer in module.modules())


def _keys_of_counts(output: Mapping[str, object]) -> list[str]:
    """Return the keys of a dict from `training_step` that may be its weight: whole numbers, and misspelt weights."""
    found = []
    for key, value in output.items():
        letters = sorted(str(key).lower().removesuffix("s"))
        is_misspelt = key != "weight" and letters == sorted("weight")
        is_whole = isinstance(value, int)
        if isinstance(value, Tensor):
            # By its type: its value would have to be read from the device.
            is_whole = value.numel() == 1 and not value.is_floating_point() and not value.is_complex()
        if is_misspelt or (is_whole and _WORD_OF_COUNTS.search(str(key).lower())):
            found.append(str(key))
    return found


class Observer(Protocol):
    """What a step is reported to: `report.part.Reports`, in a step that a user asked for (`observe_next_step`)."""

    def reduced(self, record: WindowRecord) -> None:
        """Report a window whose gradients are reduced. A collective operation."""


class Reduction(Part):
    """Reads the losses and weights of Lightning's loop, and has a window reduce the gradients.

    The calls of a training step, in this order:

    1. `begin_step`, before `training_step`.
    2. `read` with its output in automatic optimization, once for each piece of the step; `add` in manual optimization,
       with the loss of every `manual_backward`, within `running` of the forward.
    3. `backward` for that loss. In manual optimization 2 to 4 come again for every backward.
    4. `finish`, after the backward: the gradients are those of the rule if it ended the window.

    Attributes:
        may_miss: Whether ranks may have different numbers of batches. Set before `on_train_start`.
        pending: The loss whose backward comes next.
        exchanging: The ranks, in the process group in which they exchange within a step. None of one rank, and under
            the plain mean without a window, where they exchange in the default group. Later runs keep it.
        observer: What the running step is reported to, or None.
    """

    may_miss = False
    exchanging: World | None = None

    def __init__(
        self,
        rule: Rule,
        hook: CommHook,
        *,
        end_step: Callable[[], None] | None = None,
        make_tree: Callable[[Run], Gradients] | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """Reduce by a rule.

        Args:
            rule: The reduction rule.
            hook: The communication hook of DDP.
            end_step: Called at the end of an automatic step, after its last backward.
            make_tree: Makes the gradients of a reproducible run.
            timeout: The timeout of the process group in which ranks exchange within a step; torch's if None.
        """
        self.rule = rule
        self._hook = hook
        self._call_at_end_of_step = end_step
        self._make_tree = make_tree
        self._timeout = timeout
        self._said: set[str] = set()

    def setup(self, run: Run) -> None:
        """Forget an earlier run."""
        # A strategy may serve several runs, as a learning-rate search before `fit`: nothing of an earlier one may stay.
        super().setup(run)
        self.is_manual = not run.module.automatic_optimization
        self._weights = Weights(self.rule, self._warn_on_rank_zero, self._inform_on_rank_zero)
        self.search_targets = self._weights.search_targets
        self.observer: Observer | None = None
        self.pending: Tensor | None = None
        self.may_miss = False
        # Of the running step.
        self._batch: object = None
        self._divisor = 1  # N
        self._length = 1  # of its window, where that is known when it begins
        self._skips_backward = False  # whether Lightning runs it without a backward
        self._window_continues = False  # whether the window goes on after the step
        self._forward: Forward = OF_A_LOOP  # of the pending loss
        # Of the run so far.
        self._batch_number = -1  # of the training step before
        # Of the run, from `configure_ddp` and `begin_run` on.
        self._parameters: Sequence[nn.Parameter] = ()
        self._sparse: dict[int, Tensor] = {}
        self._gradients: Gradients | None = None
        self._window: Window | PlainMean | None = None  # from `on_train_start` on
        self._hook.window = None
        self._is_hooked = False

    def configure_ddp(self, run: Run) -> None:
        """Begin a run that trains a wrapped model; raise a ValueError if it cannot be served."""
        # Also under the plain mean: stock DDP fails an assertion of its reducer in the first window.
        if run.ddp.static_graph and run.loop.accumulation > 1:
            raise ValueError(
                "static_graph=True in windows of several micro-batches: DDP treats its first backward as every step's,"
                " and those within a window are not reduced. Leave static_graph out, or do not accumulate."
            )
        self._hook.require_served(run.ddp, run.device)
        if self.rule != RULES["mean"]:
            require_hookable(run.ddp, self.rule)
        self._parameters = list(run.ddp.module.parameters())
        self._sparse = sparse_weights(run.ddp)
        gradients: Gradients
        # `reproducible/` is a floor above this one, so the strategy passes what makes the tree.
        if self._make_tree is not None:
            gradients = self._make_tree(run)
        else:
            gradients = ReplicatedGradients(run.ddp, run.world.group)
        self.begin_run(run, gradients)

    def begin_run(self, run: Run, gradients: Gradients) -> None:
        """Begin a run that trains, with its gradients. The sharded strategy, which wraps no model, begins here."""
        super().configure_ddp(run)
        self._gradients = gradients

    def on_train_start(self) -> None:
        """Choose between a window and the plain mean of the engine, now that the loaders are known. Collective.

        A search for a learning rate begins training before the run does, with the same wrapped model: then the window
        and the hook are there already.
        """
        run = self.run
        gradients = self._gradients
        assert gradients is not None
        if self._needs_window() and not isinstance(self._window, Window):
            if run.model is not None and not self._is_hooked:
                # Not asked in `configure_ddp` if the rule is the plain mean.
                require_hookable(run.model, self.rule)
            ranks = Ranks(run.world, run.places, run.device)
            unit = WeightUnit(self.rule, ranks, is_fixed=self._make_tree is not None)
            self._window = Window(
                self.rule,
                ranks,
                gradients,
                unit,
                user_ends_windows=self.is_manual,
                optimizers=lambda: run.trainer.optimizers,
            )
            self._hook.window = self._window
            self._make_exchanging_group()
        if self._window is None:
            self._window = PlainMean(partial(gradients.reduce_unfrozen, 1 / run.world.size))
        # The tree reduces after backwards in which DDP reduces nothing.
        if run.model is not None and self._make_tree is None and not self._is_hooked:
            self._is_hooked = self._hook.register(run.model)

    def _make_exchanging_group(self) -> None:
        """Make the process group of what ranks exchange within a step, unless an earlier run has. Collective.

        Not that of DDP's buckets: a rank whose loss is missing has its zeros for all parameters at once, and other
        ranks run the backward of a `gather` before they have the gradients of a layer beside it. In one group, each
        would wait for another operation (`test_ranks_crossing.py`: a layer beside gather).
        """
        of_all = dist.group.WORLD
        if self.run.world.size == 1 or of_all is None:
            return
        self.exchanging = _exchanging_world(of_all, self._timeout)

    def _needs_window(self) -> bool:
        """Return whether losses are weighed and gradients multiplied; all ranks answer alike.

        The plain mean has a window, in which w = z = 1, only where the engine cannot compute it: where the number of
        pairs in a window is not known when it begins.
        """
        if self.rule != RULES["mean"]:
            return True
        # Lightning divides losses by nothing, so there is nothing to correct.
        if self.is_manual:
            return False
        # Ranks may lack batches.
        if self.may_miss:
            return True
        trainer = self.run.trainer
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        has_schedule = any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks)
        has_windows = trainer.accumulate_grad_batches > 1 or has_schedule
        # A loader without length may end within a window. Where `limit_train_batches` is given, Lightning does not step
        # if it does.
        return has_windows and trainer.num_training_batches == float("inf")

    @contextmanager
    def window_continues(self) -> Iterator[None]:
        """Have the window go on after the backwards within."""
        # A user may enter this twice, as by `toggle_model` within `toggle_model`.
        before = self._window_continues
        self._window_continues = True
        try:
            yield
        finally:
            self._window_continues = before

    def begin_step(self, batch: object, missing: int = 0) -> None:
        """Begin a training step with its batch, which `missing` ranks do not have."""
        self._batch = batch
        self.pending = None  # of a step before, which has had no backward
        self._forward.forget_exchanges()
        self._skips_backward = self.run.loop.skips_backward
        if missing > 0:
            self._refuse_missing(missing)
        if not self.is_manual:
            self._begin_automatic_step()

    def _begin_automatic_step(self) -> None:
        """Note N and the length of the window, and abandon one that the epoch before has cut off.

        Lightning counts windows by the index of the batch in its epoch, and ends the last one with the epoch
        (`_TrainingEpochLoop._should_accumulate`).
        """
        epoch_loop = self.run.trainer.fit_loop.epoch_loop
        self._divisor = self.run.trainer.accumulate_grad_batches
        position = epoch_loop.batch_idx % self._divisor
        remaining = self.run.trainer.num_training_batches - (epoch_loop.batch_idx - position)
        self._length = int(min(self._divisor, remaining))
        self._refuse_repeated_batch(epoch_loop.total_batch_idx)
        window = self._window
        if position == 0 and window is not None and not window.is_empty:
            # Its gradients are of this rank alone, and its z would count in this window.
            # In manual optimization the user ends windows, also in the next epoch.
            window.abandon()

    def _refuse_missing(self, missing: int) -> None:
        """Raise a RuntimeError if the rule counts ranks, and some have no batch."""
        if self.rule.uses_weight or self.rule.name == "sum":
            return
        mode = ""
        if self.rule == RULES["mean"]:
            # The window counts pairs. In manual optimization there is none.
            if not self.is_manual:
                return
            mode = " in manual optimization"
        raise RuntimeError(
            f"{missing} of {self.run.world.size} ranks have no more batches in this epoch, and"
            f" reduction={self.rule.name!r} counts ranks{mode}. Use"
            " reduction='weighted_mean', which counts samples, or give all ranks the same number of batches."
        )

    def _refuse_repeated_batch(self, batch_number: int) -> None:
        """Raise a RuntimeError if a batch comes again within a window, where losses are weighed."""
        # Under the plain mean this is stock's business, which adds it up again (`test_ranks_stock.py`: L-BFGS).
        is_repeated = batch_number == self._batch_number
        self._batch_number = batch_number
        if is_repeated and self._divisor > 1 and isinstance(self._window, Window):
            raise RuntimeError(
                f"the optimizer evaluates its closure several times, as L-BFGS does, with reduction={self.rule.name!r}"
                f" and accumulate_grad_batches={self._divisor}: each evaluation adds the last micro-batch once more. Do"
                " not accumulate, or use another optimizer."
            )

    def end_step(self) -> None:
        """Forget the batch, when `training_step` has ended."""
        # Else its memory lasts until the next one, as no batch of stock does (`test_ranks_stock.py`: a batch is freed).
        self._batch = None

    def read(
        self,
        output: object,
        batch: object,
        forward: Forward,
        *,
        is_last_piece: bool = True,
    ) -> object:
        """Return the output of a forward of `batch` with a weighed loss, for the backward that Lightning runs of it.

        What Lightning refuses is returned as it is: the error is Lightning's.

        Args:
            output: What `training_step` returned.
            batch: The batch of the forward.
            forward: What is known of it.
            is_last_piece: Whether it is the last forward of the step.
        """
        if self.is_manual or self._skips_backward:
            return output
        self._batch = batch
        self._forward = forward
        if isinstance(output, Mapping):
            if "loss" not in output:
                return output  # refused, by `ClosureResult.from_training_step_output`
            return self._read_dict(output, is_last_piece=is_last_piece)
        if output is None:
            return self._without_loss(output, is_last_piece=is_last_piece)
        if not isinstance(output, Tensor):
            return output  # refused there, too
        return self._add(output, None, is_last_piece=is_last_piece)

    def _read_dict(self, output: Mapping[str, object], *, is_last_piece: bool) -> object:
        """Return a copy of a dict that `training_step` returned, with its loss weighed."""
        loss = output["loss"]
        weight = output.get("weight")
        if loss is None:
            pending = self._without_loss(None, is_last_piece=is_last_piece)
            return output if pending is None else {**output, "loss": pending}
        keys: list[str] = []
        if weight is None and self.rule.uses_weight:
            keys = _keys_of_counts(output)
        hint = ""
        if keys:
            # Once, and again in the error if the number of samples cannot be read, either.
            hint = f'the result of training_step has {", ".join(map(repr, keys))} and no "weight"'
            self._warn_on_rank_zero(
                f'{hint}: the loss is weighted by its samples. If that is the number of its terms, call it "weight".'
            )
        pending = self._add(loss, weight, hint=hint, is_last_piece=is_last_piece)
        if pending is loss:
            return output
        return {**output, "loss": pending}

    def add(self, loss: object, weight: object) -> Tensor:
        """Return a loss of `manual_backward` that is weighed for its backward. Collective as `Window.add` is.

        Args:
            loss: What the user gave for a loss.
            weight: What the user gave for its weight, or None.
        """
        self._forward = running_forward()
        return self._add(loss, weight)

    def _add(self, loss: object, weight: object, *, hint: str = "", is_last_piece: bool = True) -> Tensor:
        """Return a loss that is weighed for the next backward.

        Args:
            loss: What the user gave for a loss.
            weight: What the user gave for its weight, or None.
            hint: Where the weight may stand instead; the error of a weight that is not known begins with it.
            is_last_piece: As in `read`.
        """
        loss = require_loss(loss)
        micro_batch = self._weights.read(weight, self._batch, self._forward.samples)
        if micro_batch.problem is not None and hint:
            micro_batch = micro_batch._replace(problem=f"{hint}, and {micro_batch.problem}")
        self._warn_of_weight_0(micro_batch)
        # Such as a sum over no rows. The other ranks still wait for this rank's backward.
        if not micro_batch.counts and not loss.requires_grad:
            loss = self._zero_loss()
        return self._add_to_window(loss, micro_batch, is_last_piece=is_last_piece)

    def _warn_of_weight_0(self, micro_batch: MicroBatch) -> None:
        """Warn once on each rank where the user gives a weight of 0, which may come of a mistake in counting."""
        if micro_batch.absent or micro_batch.problem is not None:
            return
        if micro_batch.explicit and micro_batch.weight == 0:
            self._warn_once(
                f"rank {self.run.world.rank} has a micro-batch of weight 0, which contributes nothing to the gradient."
                " Further ones are not reported.",
                warnings.warn,
            )

    def _add_to_window(self, loss: Tensor, micro_batch: MicroBatch, *, is_last_piece: bool) -> Tensor:
        """Return the loss, weighed for the next backward. Collective as `Window.add` is.

        The window sends its row here, before the backward, in which the rows of the other ranks arrive.
        """
        ends = self._ends_window(is_last_piece=is_last_piece)
        window = self._window
        if isinstance(window, PlainMean):
            loss_factor = window.add(micro_batch, ends=ends, divisor=self._divisor, length=self._length)
        else:
            assert window is not None
            loss_factor = window.add(micro_batch, ends=ends, divisor=float(self._divisor))
        # Without a node of ours, the plain mean has stock's graph, and so its bits and memory (`test_ranks_stock.py`).
        if loss_factor != 1:
            loss = weighed(loss, lambda: loss_factor)
        self.pending = loss
        return loss

    def _ends_window(self, *, is_last_piece: bool) -> bool:
        """Return whether the window ends with a micro-batch, the last piece of its step or not."""
        if self.is_manual and self.run.model is not None:
            # DDP knows: a user may enter `no_sync` of the wrapped model, or `toggle_model`, one within the other.
            return bool(self.run.model.require_backward_grad_sync)
        return is_last_piece and not self._window_continues

    def _without_loss(self, output: object, *, is_last_piece: bool) -> object:
        """Return a loss of 0 for a missing loss, with which this rank joins the other ranks' backward.

        Under the plain mean without a window return `output`, which Lightning refuses on several ranks.
        """
        if not isinstance(self._window, Window):
            return output
        return self._add_to_window(self._zero_loss(), MicroBatch(0.0, absent=True), is_last_piece=is_last_piece)

    def _zero_loss(self) -> Tensor:
        """Return a loss of 0 that reaches all parameters and exchanges, with DDP ready for its backward."""
        forward = self._forward
        hidden_exchanges = list(forward.hidden_exchanges)
        if not forward.normalizes_over_ranks and _synchronizes_batch_norm(self.run.module):
            hidden_exchanges.append("SyncBatchNorm")
        if hidden_exchanges:
            raise RuntimeError(
                f"training_step returned no loss, or one without a graph, after {hidden_exchanges[0]}, whose"
                " backward only a loss reaches: the other ranks wait for it. Return the loss of the step with a weight"
                ' of 0, {"loss": loss, "weight": 0}; or use lightning_gradavg.gather, and no reentrant checkpoint.'
            )
        # A sharded model has no parameters here: the hooks with which FSDP2 reduces are on what its forward returns
        # (`FSDPState._register_pre_backward_hook`).
        if not self._parameters and not forward.exchanged:
            raise RuntimeError(
                "training_step returned no loss, or one without a graph, and did not run the sharded model: the other"
                " ranks need this one's backward. Run the model's forward in every training_step."
            )
        zero = zero_loss(self._parameters, self._sparse, forward.exchanged)
        if self.run.model is not None:
            # As Lightning's `DDPStrategy.pre_backward` does in manual optimization. DDP's `_post_forward` has prepared
            # the reducer for the graph of another output, or of none.
            prepare_for_backward(self.run.model, zero)
        return zero

    def backward(self, run: Callable[[], None], *, is_last_piece: bool = True) -> None:
        """Call `run` for the backward of the pending loss, the last one of its step or not.

        It runs where the forward ran: checkpoints compute parts of the forward again.
        """
        window = self._window
        forward = self._forward
        assert self.pending is not None
        assert window is not None
        self.pending = None
        try:
            window.begin_backward(is_last_of_step=is_last_piece, is_in_last_step=not self._window_continues)
            with running(forward), forward.in_backward():
                run()
            if not is_last_piece:
                window.end_backward()  # `finish` comes after the last piece alone
        except BaseException:
            # A user's loop may go on, as after a batch that did not fit in memory.
            window.abandon()
            raise
        finally:
            forward.forget_exchanges()  # also of what `torch.utils.checkpoint` has computed again

    def finish(self) -> None:
        """Finish the gradients after a backward, if it ended a window. May be a collective operation."""
        window = self._window
        assert window is not None
        window.end_backward()
        has_ended = window.has_ended
        if has_ended:
            window.reduce()
        # In manual optimization the step's end is that of `training_step`.
        if self._call_at_end_of_step is not None and not self.is_manual:
            self._call_at_end_of_step()
        if not has_ended:
            return
        if self.observer is not None:
            # The report leaves out gradients from before the window, which are added next.
            self.observer.reduced(window.record())
        window.close()

    def is_in_backward(self) -> bool:
        """Return whether the backward of a weighed loss runs."""
        return isinstance(self._window, Window) and self._window.state == WindowState.BACKWARD

    def is_at_window_start(self) -> bool:
        """Return whether the next micro-batch begins a window."""
        return self._window is None or self._window.is_empty

    def teardown(self) -> None:
        """Free what leads to the wrapped model, and the graph of a loss whose backward never ran."""
        self._window = None
        self._hook.window = None
        self._gradients = None
        self.pending = None
        self._forward = OF_A_LOOP

    def _warn_on_rank_zero(self, message: str) -> None:
        self._warn_once(message, rank_zero_warn)

    def _inform_on_rank_zero(self, message: str) -> None:
        self._warn_once(message, rank_zero_info)

    def _warn_once(self, message: str, how: Callable[[str], None]) -> None:
        """Give the user a message once per strategy."""
        if message not in self._said:
            self._said.add(message)
            how(message)

    def describe(self) -> str:
        """Return the start line's words about the hook."""
        return self._hook.describe(self._parameters)
