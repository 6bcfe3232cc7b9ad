"""The DDP communication hook that reduces a window by a rule, with one small exchange per optimizer step."""

# DDP compares the hook's annotations with the real objects, so this module must not postpone their evaluation.

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.profiler import record_function

from lightning_gradavg.place import Place
from lightning_gradavg.reduction.reduce import constant_normalizer, depends_on_window, window_factor
from lightning_gradavg.reduction.sums import keep, scale, sum_scaled, unchanged
from lightning_gradavg.reduction.window import WHOLE_LOSS, MicroBatch, Totals, Window
from lightning_gradavg.rules import Rule, Weight
from lightning_gradavg.wire.exchange import Exchange

__all__ = ["AveragingHook", "Reducer"]

AveragingHook = Callable[[GradBucket], Future[Tensor]]
"""A hook that returns the mean of a bucket over the ranks, which is what DDP asks of a communication hook."""


@dataclass
class _Closed:
    """A window whose totals are on their way.

    Attributes:
        window: The window.
        loss_divisor: What every loss of the window was already divided by.
        summary: This rank's summary, being summed over the ranks in place; None if nothing is exchanged.
        work: The sum under way, or None.
        folded: Whether every normalizer is already in the gradient, so that buckets are only summed.
        factor: What buckets are multiplied by before the sum, once it is known.
        waiting: The buckets that came before the totals, with what their hooks returned.
    """

    window: Window
    loss_divisor: float
    summary: Tensor | None = None
    work: dist.Work | None = None
    folded: bool = False
    factor: Weight | None = None
    waiting: list[tuple[Tensor, Future[Tensor]]] = field(default_factory=list)


class Reducer:
    """Reduces the gradients of a DDP module by a rule.

    A window goes through `accumulate` once per micro-batch, `close` before the backward of its last micro-batch,
    `hook` once per bucket during that backward, and `finish` after it.

    Args:
        rule: The reduction rule.
        places: The places of all ranks of the process group, in rank order.
        rank: This rank in the process group.
        group: The process group that DDP reduces over; None for the default one.
        device: Where the gradients are.
        averaging_hook: Reduces each scaled bucket instead of a plain sum.
        windows_may_differ: Whether ranks may accumulate different numbers of micro-batches, so that the numbers must
            be compared even where the rule uses no weight.
        relative: As in `Window`.
        exchange: Sums each bucket instead of a plain all-reduce; sparse ones excepted.
        bucket_group: The same ranks as `group`, for the buckets alone. With it the backward does not stop to wait for
            the totals. Without it buckets go through `group`.

    Attributes:
        flag: News of this rank for all others, which travels with the totals.
        flagged: Whether any rank's flag was up in totals that `finish` has looked at.
        exchanged: Number of windows whose totals were exchanged.
    """

    def __init__(
        self,
        rule: Rule,
        places: Sequence[Place],
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        averaging_hook: AveragingHook | None = None,
        windows_may_differ: bool = False,
        relative: bool = True,
        *,
        exchange: Exchange | None = None,
        bucket_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rule = rule
        self.places = tuple(places)
        self.group = group
        self.device = device
        self.window = Window(rule, self.places[rank], relative=relative)
        self._averaging_hook = averaging_hook
        self._exchange = exchange
        self._bucket_group = bucket_group
        self.flag = False
        self.flagged = False
        self.exchanged = 0
        self._constants: dict[int, float] = {}
        self._exchanges = rule.uses_weight or windows_may_differ
        self._depends_on_window = depends_on_window(rule, self.places)
        # While true, DDP runs the hook but the gradient is to stay local.
        self.accumulating = False
        self._closed: _Closed | None = None
        self._unchecked: _Copy | None = None

    def reset(self) -> None:
        """Forget a window that was begun and never reduced."""
        self.window = self.window.anew()
        self._closed = None

    def accumulate(self, micro_batch: MicroBatch) -> dict[str, Weight]:
        """Add a micro-batch to the window and return what each loss term's gradient is to be multiplied by.

        A coefficient of 0 means that the gradient is to be discarded, whatever it is.
        """
        self.window.add(micro_batch)
        return {term: self.window.coefficient(term) for term in sorted(micro_batch.weights)}

    def close(self, loss_divisor: float) -> None:
        """Begin the exchange of the totals; every rank must call this before its buckets are reduced."""
        summary, work = None, None
        if self._exchange is not None:
            self._exchange.begin()
        if self._exchanges:
            summary = self.window.summary(self.device, flag=self.flag)
            self.exchanged += 1
            if len(self.places) > 1:
                work = dist.all_reduce(summary, group=self.group, async_op=True)
        self._closed = _Closed(self.window, loss_divisor, summary, work)
        self.window = self.window.anew()

    def term_factors(self) -> dict[str, Weight]:
        """Return each loss term's factor of the closed window, waiting for the totals; buckets are then only summed.

        Different normalizers cannot be applied to a bucket that holds the gradients of all terms.
        """
        closed = self._require_closed()
        closed.folded = True
        return {term: self._factor_of(closed, term, index) for index, term in enumerate(closed.window.terms)}

    def hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """Scale a bucket by this rank's factor and sum it over the ranks: a DDP communication hook."""
        del state
        if not torch.autograd._profiler_enabled():
            return self._reduce(bucket)
        # So that a trace names the bucket, from here until it is reduced.
        with record_function(f"gradavg::bucket {bucket.index()}") as label:
            named: Future[Tensor] = label._call_end_callbacks_on_future(self._reduce(bucket))
        return named

    def _reduce(self, bucket: GradBucket) -> Future[Tensor]:
        if self.accumulating:
            return unchanged(bucket.buffer())
        closed = self._require_closed()
        if self._comes_early(closed, bucket):
            promise: Future[Tensor] = Future()
            closed.waiting.append((bucket.buffer(), promise))
            return promise
        buffer = bucket.buffer()
        if self._exchange is not None and not buffer.is_sparse:
            return self._exchange.sum(bucket, partial(self._factor, closed))
        factor = self._factor(closed)
        if self._averaging_hook is not None:
            scale(buffer, factor * len(self.places))
            return self._averaging_hook(bucket)
        group = self.group if self._bucket_group is None else self._bucket_group
        waiting, closed.waiting = closed.waiting, []
        for early, promise in waiting:
            sum_scaled(early, factor, group).add_done_callback(partial(keep, promise))
        return sum_scaled(buffer, factor, group)

    def _factor(self, closed: _Closed) -> Weight:
        """Return what buckets are multiplied by before the sum, waiting for the totals where they are needed."""
        if closed.factor is None:
            closed.factor = 1.0 if closed.folded else self._factor_of(closed, WHOLE_LOSS, 0)
        return closed.factor

    def _comes_early(self, closed: _Closed, bucket: GradBucket) -> bool:
        """Return whether a bucket is to wait until the hook of another one finds the totals there.

        The backward goes on meanwhile. How many buckets wait is another number on every rank, but all start in the
        order of their hooks; in a group that other collectives of the backward share, they would meet those.
        """
        return (
            self._bucket_group is not None
            and closed.factor is None
            and not closed.folded
            and not bucket.is_last()
            and closed.work is not None
            and not closed.work.is_completed()
        )

    def finish(self) -> None:
        """End the window and raise, on all ranks, what is wrong with it.

        Raises:
            ValueError: If a rank had an unusable weight or share, or some micro-batches had a weight and some had not;
                on an accelerator one optimizer step later, because the totals are not waited for.
        """
        closed, self._closed = self._require_closed(), None
        self.check()
        if closed.summary is None:
            return
        self._wait(closed)
        copy = _Copy(closed.window, closed.summary)
        if self.device.type == "cpu":
            self._check(copy)
        else:
            self._unchecked = copy

    def check(self) -> None:
        """Raise what `finish` would raise with the next window: to be called when training ends."""
        previous, self._unchecked = self._unchecked, None
        if previous is not None:
            self._check(previous)

    @property
    def closed(self) -> tuple[Window, float]:
        """The window that is being reduced, and what its losses were divided by; from `close` to `finish`."""
        closed = self._require_closed()
        return closed.window, closed.loss_divisor

    def _require_closed(self) -> _Closed:
        if self._closed is None:
            raise RuntimeError(
                f"a gradient reached the reduction {self.rule.name!r} by a backward that the strategy was not told of."
                " In manual optimization call self.manual_backward(loss, weight=...) instead of loss.backward()."
            )
        return self._closed

    def _wait(self, closed: _Closed) -> None:
        # A thread of the exchange may wait at the same time.
        work = closed.work
        if work is not None:
            work.wait()
            closed.work = None

    def _factor_of(self, closed: _Closed, term: str, index: int) -> Weight:
        window = closed.window
        length = len(window.micro_batches)
        normalizer: Weight
        if self.rule.uses_weight:
            assert closed.summary is not None
            self._wait(closed)
            total = closed.summary[Totals.NORMALIZERS + index]
            normalizer = float(total) if self.device.type == "cpu" else total
        else:
            if length not in self._constants:
                self._constants[length] = constant_normalizer(self.rule, self.places, length)
            normalizer = self._constants[length]
        reference = window.reference(term, whole=True)
        return window_factor(
            reference=reference,
            normalizer=normalizer,
            live=window.live(term),
            loss_divisor=closed.loss_divisor,
        )

    def _check(self, copy: "_Copy") -> None:
        totals = Totals(copy.read(), len(self.places))
        self.flagged |= totals.flagged
        problem = totals.problem
        if problem is None and totals.uneven and self._depends_on_window:
            problem = f"the ranks accumulated different numbers of micro-batches, which {self.rule.name!r} depends on"
        if problem is None:
            return
        found: list[Any] = [None] * len(self.places)
        if len(self.places) > 1:
            dist.all_gather_object(found, copy.window.problems, group=self.group)
        else:
            found = [copy.window.problems]
        culprits = "".join(f"\n  rank {rank}: {text}" for rank, problems in enumerate(found) for text in problems)
        raise ValueError(f"reduction {self.rule.name!r}: {problem}.{culprits}")


class _Copy:
    """A summed summary on its way to the host, and the window that it closes."""

    def __init__(self, window: Window, summary: Tensor) -> None:
        self.window = window
        self._event: torch.cuda.Event | None = None
        if summary.device.type == "cuda":
            self._values = torch.empty(summary.shape, dtype=summary.dtype, pin_memory=True)
            self._values.copy_(summary, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._values = summary

    def read(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()
