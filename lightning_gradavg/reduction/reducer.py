"""The DDP communication hook that reduces a window by a rule, with one small exchange per optimizer step.

Buckets are summed as they come, and multiplied after the sum by what all ranks together know: no bucket waits for the
totals, which were begun before it and are long there when its sum is.
"""

# DDP compares the hook's annotations with the real objects, so this module must not postpone their evaluation.

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.profiler import record_function

from lightning_gradavg.device import HostCopy, on_device
from lightning_gradavg.lightning_internals import profiling, stored, until_done
from lightning_gradavg.place import Place
from lightning_gradavg.ranks import World
from lightning_gradavg.reduction.average import average_gradients
from lightning_gradavg.reduction.combine import (
    after_sum,
    constant_normalizer,
    depends_on_window,
    unit_above,
    window_ratio,
)
from lightning_gradavg.reduction.sums import BucketSum, as_real, done
from lightning_gradavg.reduction.window import WHOLE_LOSS, MicroBatch, Totals, Window, as_weight
from lightning_gradavg.rules import Rule

__all__ = ["BucketSum", "Reducer"]


@dataclass
class _Closed:
    """A window that is being reduced.

    Attributes:
        window: The window.
        divided_by: What its gradients were divided by before the sum: `N u`, where multipliers follow the window's
            length with their ratio.
        constant: Z of a rule that uses no weight.
        totals: The sum of the ranks' summaries, which is under way; None if nothing is exchanged.
        work: Its arrival.
        scale: The future of what sums of buckets are multiplied by; None where named terms have one each, which is in
            the gradients themselves.
        reached: Whether DDP has handed a bucket over.
    """

    window: Window
    divided_by: Any
    constant: float
    totals: Totals | None = None
    work: dist.Work | None = None
    scale: Future[Any] | None = None
    reached: bool = False


class Reducer:
    """Reduces the gradients of a DDP module by a rule.

    A window goes through `add` once per micro-batch, `close` before the backward of its last micro-batch, `hook` once
    per bucket during that backward, and `finish` after it.

    Args:
        rule: The reduction rule.
        places: The places of all ranks of the process group, in rank order.
        group: The process group that DDP reduces over; None for the default one.
        device: Where the gradients are.
        bucket_sum: Sums a bucket.
        averages: Whether `bucket_sum` returns the mean over the ranks, as DDP asks of a communication hook.
        windows_may_differ: Whether ranks may accumulate different numbers of micro-batches, so that the numbers must
            be compared even where the rule uses no weight.
        window: Makes the first window, of the rule, the places and the rank.

    Attributes:
        window: The window that is open.
        accumulating: While true, DDP runs the hook but the gradient is to stay local.
        discarded: While a tensor, whether this rank's gradient is not to count: buckets are zeroed where it is true,
            unread.
    """

    def __init__(
        self,
        rule: Rule,
        places: Sequence[Place],
        group: dist.ProcessGroup | None,
        device: torch.device,
        bucket_sum: BucketSum,
        *,
        averages: bool = False,
        windows_may_differ: bool = False,
        window: Callable[[Rule, Sequence[Place], int], Window] = Window,
    ) -> None:
        self.rule, self.places, self.device = rule, tuple(places), device
        self.world = World.of(group)
        self.window = window(rule, self.places, self.world.rank)
        self.accumulating = False
        self.discarded: Tensor | None = None
        self._bucket_sum = bucket_sum
        self._summands = len(self.places) if averages else 1
        self._exchanges = rule.uses_weight or windows_may_differ
        self._depends_on_window = depends_on_window(rule, self.places)
        self._unit = self.window.unit
        self._constants: dict[int, tuple[float, float]] = {}
        self._closed: _Closed | None = None
        self._unchecked: tuple[Window, HostCopy] | None = None
        self._read: Totals | None = None

    def reset(self) -> None:
        """Forget a window that was begun and never reduced."""
        self.window, self._closed = self.window.anew(), None

    def add(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """Append a micro-batch to the window, and return the multiplier `w` of each of its loss terms.

        The first time, a collective operation, for a unit: from then on it follows from the windows before.
        """
        shares = self.window.add(micro_batch)
        if self._unit is None and self.rule.uses_weight and self.window.length == 1:
            weights = [on_device(as_weight(share.normalizer, self.device), self.device) for share in shares.values()]
            largest = torch.stack(weights).nan_to_num(0, 0, 0).amax()
            if self.world.group is not None:
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.world.group)
            # Where no rank has any weight yet, the next window asks again.
            number = float(largest)
            self._unit = unit_above([number]) if number > 0 else None
        return {term: share.multiplier for term, share in shares.items()}

    @property
    def unit(self) -> float:
        """What multipliers are divided by before a loss is multiplied: a power of two, the same on all ranks."""
        return 1.0 if self._unit is None else self._unit

    def close(self, loss_divisor: float) -> None:
        """Begin the exchange of the totals; every rank must call this before its buckets are reduced.

        Raises:
            ValueError: If a rule that uses no weight cannot be accumulated.
        """
        window, self.window, self.discarded = self.window, self.window.anew(), None
        constant, ratio = self._constants_of(window)
        closed = self._closed = _Closed(window, loss_divisor * ratio * self.unit, constant)
        if self._exchanges:
            summary = window.summary(self.device)
            closed.totals = window.totals(summary)
            if self.world.group is not None:
                closed.work = dist.all_reduce(summary, group=self.world.group, async_op=True)
        if window.terms == (WHOLE_LOSS,):
            closed.scale = self._future_scale(closed)

    def _future_scale(self, closed: _Closed) -> Future[Any]:
        """Return the future of what every bucket is multiplied by, for all buckets computed once."""

        def scale(_: Any = None) -> Any:
            return self._factor(closed, 0) * self._summands

        if closed.work is not None:
            # On an accelerator the future notes the stream, and whoever waits for it waits on his own stream for that.
            return closed.work.get_future().then(scale)
        future: Future[Any] = Future() if self.device.type == "cpu" else Future(devices=[self.device])
        future.set_result(scale())
        return future

    def _constants_of(self, window: Window) -> tuple[float, float]:
        """Return Z of a rule that uses no weight, and the ratio of its multipliers, for a window of this length."""
        length = len(window.micro_batches)
        if length not in self._constants:
            if self.rule.uses_weight:
                # No number where there is no such ratio, which is then found in the totals.
                self._constants[length] = 0.0, window.ratio
            else:
                ratio = window_ratio(self.rule, self.places, length)
                self._constants[length] = constant_normalizer(self.rule, self.places, length), ratio
        return self._constants[length]

    def _factor(self, closed: _Closed, index: int) -> Any:
        """Return what the sum of one term's gradients is multiplied by, once the totals are there."""
        normalizer: Any = closed.constant
        if self.rule.uses_weight:
            assert closed.totals is not None
            totals = closed.totals
            if self.device.type == "cpu":
                # Read once: every operator costs more than all of this arithmetic.
                totals = closed.window.totals(totals.values.tolist())
            normalizer = totals.normalizer(index)
        return after_sum(normalizer=normalizer, divided_by=closed.divided_by)

    def term_factors(self) -> dict[str, Any]:
        """Return each loss term's factor of the closed window, waiting for the totals; buckets are then only summed.

        Different normalizers cannot be applied to a bucket that holds the gradients of all terms.
        """
        closed = self._require_closed()
        if closed.work is not None:
            closed.work.wait()
        return {term: self._factor(closed, index) for index, term in enumerate(closed.window.terms)}

    def hook(self, state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        """Sum a bucket over the ranks, and scale the sum: a DDP communication hook."""
        del state
        if not profiling():
            return self._reduce(bucket)
        # So that a trace names the bucket, from here until it is reduced.
        with record_function(f"gradavg::bucket {bucket.index()}") as label:
            return until_done(label, self._reduce(bucket))

    def _reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        if self.accumulating:
            return done(buffer)
        closed = self._require_closed()
        closed.reached, scale = True, closed.scale
        if self.discarded is not None:
            # A product of 0 and NaN is NaN: a gradient is discarded by selection.
            stored(buffer).masked_fill_(self.discarded, 0)

        def scaled(future: Future[Tensor]) -> Tensor:
            total: Tensor = future.value()
            factor = self._summands if scale is None else scale.wait()
            if not (isinstance(factor, (int, float)) and factor == 1):
                as_real(stored(total)).mul_(factor)
            if total.dtype == buffer.dtype:
                return total
            return total.to(buffer.dtype) if total.is_sparse else buffer.copy_(total)

        summed: Future[Tensor] = self._bucket_sum(bucket).then(scaled)
        return summed

    def reduce_apart(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        """Reduce gradients that are in no bucket as buckets are, after the last backward of a window.

        Args:
            parameters: Those that DDP does not know, the same on all ranks.
            group: The process group that DDP reduces over.

        Raises:
            ValueError: If the ranks' parameters differ.
        """
        closed = self._require_closed()
        if self.discarded is not None:
            for numbers in _gradients(parameters):
                numbers.masked_fill_(self.discarded, 0)
        # The mean, and not the sum: in half precision a sum may overflow where the result does not.
        average_gradients(parameters, group=group)
        if closed.work is not None:
            closed.work.wait()
        factor = 1.0 if closed.scale is None else self._factor(closed, 0)
        for numbers in _gradients(parameters):
            as_real(numbers).mul_(factor * len(self.places))

    @property
    def reached(self) -> bool:
        """Whether DDP has handed over a bucket of the window that is being reduced; from `close` to `finish`."""
        return self._require_closed().reached

    def finish(self) -> None:
        """End the window and raise, on all ranks, what is wrong with it.

        Raises:
            ValueError: If a rank had an unusable weight or share, or some micro-batches had a weight and some had not;
                on an accelerator one optimizer step later, because the totals are not waited for. A faulty window
                leaves gradients of zero.
        """
        closed, self._closed = self._require_closed(), None
        self.check()
        if closed.totals is None:
            return
        if closed.work is not None:
            closed.work.wait()
        self._unchecked = closed.window, HostCopy(closed.totals.values)
        if self.device.type == "cpu":
            self.check()
        if self._unit is not None and self._read is not None:
            # Here and nowhere else, so that the ranks do it alike: `check` is also called between steps.
            self._unit = self._read.unit_after(self._unit)

    def check(self) -> None:
        """Raise what `finish` would raise with the next window: when training ends, or before it is saved."""
        unchecked, self._unchecked = self._unchecked, None
        if unchecked is None:
            return
        window, copy = unchecked
        totals = self._read = window.totals(copy.read())
        problem = totals.problem
        if problem is None and self._depends_on_window and totals.uneven:
            problem = f"the ranks accumulated different numbers of micro-batches, which {self.rule.name!r} depends on"
        if problem is None:
            return
        found = self.world.gather_objects(window.problems())
        culprits = "".join(f"\n  rank {rank}: {text}" for rank, problems in enumerate(found) for text in problems)
        raise ValueError(f"reduction {self.rule.name!r}: {problem}.{culprits}")

    @property
    def closed(self) -> tuple[Window, float]:
        """The window that is being reduced, and what its gradients were divided by; from `close` to `finish`. Waits."""
        closed = self._require_closed()
        return closed.window, float(closed.divided_by)

    def _require_closed(self) -> _Closed:
        if self._closed is None:
            raise RuntimeError(
                f"a gradient reached the reduction {self.rule.name!r} by a backward that the strategy was not told of."
                " In manual optimization call self.manual_backward(loss, weight=...) instead of loss.backward(), and in"
                " a loop of your own GradAvgReducer.weigh(loss, weight=...).backward()."
            )
        return self._closed


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [stored(parameter.grad) for parameter in parameters if parameter.grad is not None]
