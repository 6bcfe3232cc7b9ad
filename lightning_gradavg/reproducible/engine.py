"""The engine of a run whose bits do not depend on the number of ranks.

Every backward stays on its rank. A replica's gradient is what its own micro-batches of the window add up to, one after
another; its weight multiplies the loss as it is, as a power of two would follow from weights that a resumed run has not
seen. After the last backward of a window all replicas are added up by the tree. Their normalizers travel in one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from lightning_gradavg._lightning.part import Run
from lightning_gradavg.reduction.engine import Engine, StepFacts
from lightning_gradavg.reduction.factor import factor_after
from lightning_gradavg.reduction.loss import MicroBatch, WeighedLoss
from lightning_gradavg.reduction.set_aside import take_gradients
from lightning_gradavg.reduction.totals import (
    STOPPED_TRAINING,
    GatheredRows,
    Totals,
    exact_sum,
    must_agree,
    raise_together,
)
from lightning_gradavg.reduction.window import WindowRecord
from lightning_gradavg.reproducible.sum import Gradients, TreeSum
from lightning_gradavg.rules import Rule, Share, share_of

__all__ = ["Tree"]


class Tree(Engine):
    """Reduces the gradients of the replicas of each loader batch, in one order on any number of ranks.

    The pieces of a rank's step are its replicas, in their order. A replica is *complete* when no further micro-batch of
    the window can add to it. Then its gradient goes to the tree, and its memory is free.
    """

    def __init__(self, run: Run, rule: Rule, replicas: int) -> None:
        """Number this rank's replicas."""
        self._run = run
        self._rule = rule
        self._replicas = replicas
        count = replicas // run.world.size
        self._replicas_of_rank = range(run.world.rank * count, (run.world.rank + 1) * count)
        self._place = run.places[run.world.rank]
        self._parameters = list(run.ddp.module.parameters())
        self._trained: list[nn.Parameter] = []
        self._sum: TreeSum | None = None
        self._facts = StepFacts(begins_window=True, divisor=1, missing=0)
        self._position = 0  # of the next replica in the running step
        self._begin_window()

    def _begin_window(self) -> None:
        self._gradients: dict[int, Gradients] = {}  # of the replicas that are not complete
        self._normalizers = [0.0] * self._replicas
        self._micro_batches: list[MicroBatch] = []
        self._shares: list[Share] = []
        self._trained_in_window: set[nn.Parameter] = set()
        self._ends = False
        self._exchange: GatheredRows | None = None

    def begin_step(self, facts: StepFacts) -> None:
        """Begin with the rank's first replica."""
        self._facts = facts
        self._position = 0
        if facts.begins_window:
            self._begin_window()

    def add(self, loss: WeighedLoss, *, ends_window: bool) -> None:  # noqa: ARG002  # `backward` says it
        """Multiply the loss by its share; a problem of its weight is raised with those of other ranks."""
        micro_batch = self._checked(loss.micro_batch)
        share = Share(0.0, 0.0)
        if micro_batch.problem is None and not micro_batch.absent:
            try:
                share = share_of(self._rule, self._place, micro_batch.weight)
            except ValueError as error:
                micro_batch = micro_batch._replace(problem=str(error))
        loss.micro_batch = micro_batch
        loss.factor = float(share.multiplier)
        self._micro_batches.append(micro_batch)
        self._shares.append(share)

    def _checked(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch, with a problem if a parameter has stopped training within the window."""
        stopped = self._trained_in_window
        self._trained_in_window = {parameter for parameter in self._parameters if parameter.requires_grad}
        if micro_batch.problem is None and stopped - self._trained_in_window:
            # The tree has no place for its gradient, which would be lost in silence.
            return micro_batch._replace(problem=STOPPED_TRAINING)
        return micro_batch

    def backward(
        self, loss: WeighedLoss, run: Callable[[], None], *, is_last_piece: bool, window_continues: bool
    ) -> None:
        """Run the backward of the rank's next replica, and keep its gradients apart."""
        replica = self._replicas_of_rank[self._position]
        self._position += 1
        self._ends = is_last_piece and not window_continues
        outside = self._taken()
        if loss.micro_batch.counts:
            self._put(self._gradients.get(replica, {}))
        try:
            run()
            if loss.micro_batch.counts:
                self._gradients[replica] = self._taken()
                self._normalizers[replica] += float(self._shares[-1].normalizer)
        finally:
            self._put(outside)
        if not window_continues:
            self._add_to_tree(replica)
        if self._ends and self._rule.uses_weight:
            self._begin_exchange()

    def _add_to_tree(self, replica: int) -> None:
        """Add a complete replica to the tree; after the last backward, those behind it, too.

        The loader batch at the end of the window may have no samples of those.
        """
        if replica == self._replicas_of_rank.start:
            self._make_tree()
        assert self._sum is not None
        complete = range(replica, self._replicas_of_rank.stop) if self._ends else range(replica, replica + 1)
        for index in complete:
            with torch.profiler.record_function("GradAvg: add replica"):
                self._sum.add(index, self._gradients.pop(index, {}))

    def _make_tree(self) -> None:
        """Make a tree for the parameters that train now, unless there is one."""
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        is_same = len(trained) == len(self._trained)
        if is_same:
            is_same = all(now is before for now, before in zip(trained, self._trained, strict=True))
        if not is_same or self._sum is None:
            self._trained = trained
            self._sum = TreeSum(trained, replicas=self._replicas, world=self._run.world)

    def _begin_exchange(self) -> None:
        row = Totals.of_rank(
            faults=sum(micro_batch.problem is not None for micro_batch in self._micro_batches),
            without_loss=False,
            pairs=sum(not micro_batch.absent for micro_batch in self._micro_batches),
            agreement=must_agree(self._rule, self._micro_batches),
            normalizer=0.0,  # that of each replica follows
        )
        with torch.profiler.record_function("GradAvg: exchange totals"):
            self._exchange = GatheredRows([*row, *self._normalizers], self._run.device, self._run.world.group)

    def _normalizer(self) -> float:
        """Return `Z`, exactly rounded, so that no order of the replicas shows."""
        if not self._rule.uses_weight:
            return 1.0
        assert self._exchange is not None
        with torch.profiler.record_function("GradAvg: wait for totals"):
            rows = self._exchange.read()
        length = len(Totals._fields)
        totals = Totals.over([row[:length] for row in rows])
        normalizers = [number for row in rows for number in row[length:]]
        totals = totals._replace(normalizer=exact_sum(normalizers))
        if not totals.is_usable:
            raise_together(totals, self._rule, self._run.world, self._micro_batches)
        return totals.normalizer

    def reduce(self) -> bool:
        """Add up all replicas, and add the sum to the gradients from before the window."""
        if not self._ends:
            return False
        assert self._sum is not None
        with torch.profiler.record_function("GradAvg: sum of replicas"):
            sums = self._sum.gradients(factor_after(self._facts.divisor, 1, self._normalizer(), lift=1.0))
        kept = self._taken()
        for key in kept.keys() & sums.keys():
            sums[key].add_(kept[key])
        self._put({**kept, **sums})
        return True

    def record(self) -> WindowRecord:
        """Return what a report says of the window that was reduced."""
        return WindowRecord(self._micro_batches, self._shares, self._facts.divisor)

    def close(self, *, skipped: bool) -> None:  # noqa: ARG002  # a step that is skipped keeps no gradients here
        """Begin a window."""
        self._begin_window()

    @property
    def is_empty(self) -> bool:
        """Whether the next micro-batch begins a window."""
        return not self._micro_batches

    def _taken(self) -> Gradients:
        """Return the parameters' gradients by `id`; the parameters have none afterwards."""
        return {id(parameter): gradient for parameter, gradient in take_gradients(self._parameters).items()}

    def _put(self, gradients: Mapping[int, Tensor]) -> None:
        for parameter in self._parameters:
            parameter.grad = gradients.get(id(parameter))
