"""The engine of a run whose bits do not depend on the number of ranks.

Every backward stays on its rank. A replica's gradient is what its own micro-batches of the window add up to, one after
another; its weight multiplies the loss as it is, as a power of two would follow from weights that a resumed run has not
seen. After the last backward of a window all replicas are added up by the tree. Their normalizers travel in one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_gradavg._lightning.part import Run
from lightning_gradavg.reduction.engine import Engine, StepFacts
from lightning_gradavg.reduction.factor import factor_after
from lightning_gradavg.reduction.loss import MicroBatch, WeighedLoss
from lightning_gradavg.reduction.totals import (
    STOPPED_TRAINING,
    GatheredRows,
    KnownWeights,
    Totals,
    exact_sum,
    must_agree,
    raise_together,
)
from lightning_gradavg.reduction.window import WindowRecord
from lightning_gradavg.reproducible.sum import Gradients, TreeSum
from lightning_gradavg.rules import Rule, Share, share_of

__all__ = ["Tree"]


@dataclass
class _ReplicaWindow:
    """The state of one window.

    Attributes:
        normalizers: What each replica's micro-batches add to `Z`; 0 of other ranks' replicas.
        gradients: The gradients of this rank's replicas that are not complete, by replica.
        micro_batches: All micro-batches of this rank.
        shares: Their shares, in the same order.
        trained: The parameters that trained in the last micro-batch, by `id`.
        ends: Whether the last backward ended the window.
        known_normalizer: `Z` as far as the ranks know it without an exchange.
        exchange: The exchange of totals, if it has begun.
    """

    normalizers: list[float]
    gradients: dict[int, Gradients] = field(default_factory=dict)
    micro_batches: list[MicroBatch] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)
    trained: set[int] = field(default_factory=set)
    ends: bool = False
    known_normalizer: float = 0.0
    exchange: GatheredRows | None = None


class Tree(Engine):
    """Reduces the gradients of the replicas of each loader batch, in one order on any number of ranks.

    The pieces of a rank's step are its replicas, in their order. A replica is *complete* when no further micro-batch of
    the window can add to it. Then its gradient goes to the tree, and its memory is free.

    The calls are those of `Engine`. In a window of N micro-batches on a rank with 2 replicas:

        begin_step                  the first one begins the window
            add, backward           of the first replica; complete in the window's last micro-batch
            add, backward           of the second replica; the window's last backward begins the exchange of totals,
                                    unless all ranks know the weights
        ...
        reduce                      waits for the totals, and adds up all replicas of all ranks
        close
    """

    def __init__(self, run: Run, rule: Rule, replicas: int) -> None:
        """Number this rank's replicas.

        Args:
            run: The run that trains.
            rule: The reduction rule.
            replicas: Number of replicas on all ranks, which the number of ranks divides.
        """
        self._run = run
        self._rule = rule
        self._replicas = replicas
        count = replicas // run.world.size
        self._replicas_of_rank = range(run.world.rank * count, (run.world.rank + 1) * count)
        self._place = run.places[run.world.rank]
        self._parameters = list(run.ddp.module.parameters())
        self._parameters_of_tree: list[nn.Parameter] = []
        self._tree: TreeSum | None = None
        self._known_weights = KnownWeights(rule, shares_batches=True)
        self._facts = StepFacts(begins_window=True, divisor=1, missing=0)
        self._position = 0  # of the next replica in the running step
        self._window = self._new_window()

    def _new_window(self) -> _ReplicaWindow:
        return _ReplicaWindow(normalizers=[0.0] * self._replicas)

    def begin_step(self, facts: StepFacts) -> None:
        """Begin with the rank's first replica."""
        self._facts = facts
        self._position = 0
        if facts.begins_window:
            self._window = self._new_window()

    def add(self, loss: WeighedLoss, *, ends_window: bool) -> None:  # noqa: ARG002  # `backward` says it
        """Multiply the loss by its share; a problem of its weight is raised when the ranks exchange totals, or here."""
        micro_batch = self._checked(loss.micro_batch)
        samples = self._known_weights.of_ranks(micro_batch)
        if samples is not None:
            self._known_weights.require_as_known(micro_batch)
            # All pieces of a step are of one loader batch.
            if self._position == 0:
                self._window.known_normalizer += samples
        share = Share(0.0, 0.0)
        if micro_batch.problem is None and not micro_batch.absent:
            try:
                share = share_of(self._rule, self._place, micro_batch.weight)
            except ValueError as error:
                micro_batch = micro_batch._replace(problem=str(error))
        loss.micro_batch = micro_batch
        loss.factor = float(share.multiplier)
        self._window.micro_batches.append(micro_batch)
        self._window.shares.append(share)

    def _checked(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch, with a problem if a parameter has stopped training within the window."""
        trained_before = self._window.trained
        self._window.trained = {id(parameter) for parameter in self._parameters if parameter.requires_grad}
        stopped = trained_before - self._window.trained
        if micro_batch.problem is None and stopped:
            # The tree has no place for its gradient, which would be lost in silence.
            return micro_batch._replace(problem=STOPPED_TRAINING)
        return micro_batch

    def backward(
        self, loss: WeighedLoss, run: Callable[[], None], *, is_last_piece: bool, window_continues: bool
    ) -> None:
        """Run the backward of the rank's next replica, and keep its gradients apart."""
        window = self._window
        replica = self._replicas_of_rank[self._position]
        is_first_of_window = self._facts.begins_window and self._position == 0
        self._position += 1
        window.ends = is_last_piece and not window_continues
        from_before = self._take_gradients()
        if is_first_of_window:
            # They may be those of the last window, in memory that this window writes to.
            from_before = {key: gradient.clone() for key, gradient in from_before.items()}
        if loss.micro_batch.counts:
            # Autograd adds to what earlier micro-batches of the window left for this replica.
            self._set_gradients(window.gradients.get(replica, {}))
        try:
            run()
        finally:
            computed = self._take_gradients()
            self._set_gradients(from_before)
        if loss.micro_batch.counts:
            window.gradients[replica] = computed
            window.normalizers[replica] += float(window.shares[-1].normalizer)
        if not window_continues:
            self._add_to_tree(replica)
        weights_are_known = self._known_weights.of_ranks(loss.micro_batch) is not None
        if window.ends and self._rule.uses_weight and not weights_are_known:
            self._begin_exchange()

    def _add_to_tree(self, replica: int) -> None:
        """Add a complete replica to the tree; after the last backward, those behind it, too.

        The loader batch at the end of the window may have no samples of those.
        """
        if replica == self._replicas_of_rank.start:
            self._make_tree()
        assert self._tree is not None
        stop = replica + 1
        if self._window.ends:
            stop = self._replicas_of_rank.stop
        for complete_replica in range(replica, stop):
            with torch.profiler.record_function("GradAvg: add replica"):
                self._tree.add(complete_replica, self._window.gradients.pop(complete_replica, {}))

    def _make_tree(self) -> None:
        """Make a tree for the parameters that train now, unless there is one."""
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        if self._tree is None or not _are_the_same(trained, self._parameters_of_tree):
            self._parameters_of_tree = trained
            self._tree = TreeSum(trained, replicas=self._replicas, world=self._run.world)

    def _begin_exchange(self) -> None:
        micro_batches = self._window.micro_batches
        row = Totals.of_rank(
            faults=sum(micro_batch.problem is not None for micro_batch in micro_batches),
            without_loss=False,
            pairs=sum(not micro_batch.absent for micro_batch in micro_batches),
            agreement=must_agree(self._rule, micro_batches),
            normalizer=0.0,  # that of each replica follows
        )
        with torch.profiler.record_function("GradAvg: exchange totals"):
            self._window.exchange = GatheredRows(
                [*row, *self._window.normalizers], self._run.device, self._run.world.group
            )

    def _normalizer(self) -> float:
        """Return `Z`, exactly rounded, so that no order of the replicas shows."""
        if not self._rule.uses_weight:
            return 1.0
        if self._window.exchange is None:
            return self._window.known_normalizer
        with torch.profiler.record_function("GradAvg: wait for totals"):
            rows = self._window.exchange.read()
        length = len(Totals._fields)
        totals = Totals.over([row[:length] for row in rows])
        normalizers: list[float] = []
        for row in rows:
            normalizers.extend(row[length:])
        totals = totals._replace(normalizer=exact_sum(normalizers))
        if not totals.is_usable:
            raise_together(totals, self._rule, self._run.world, self._window.micro_batches)
        self._known_weights.note(totals)
        return totals.normalizer

    def reduce(self) -> bool:
        """Add up all replicas, and add the sum to the gradients from before the window."""
        if not self._window.ends:
            return False
        assert self._tree is not None
        with torch.profiler.record_function("GradAvg: sum of replicas"):
            sums = self._tree.gradients(factor_after(self._facts.divisor, 1, self._normalizer(), lift=1.0))
        from_before = self._take_gradients()
        for key in from_before.keys() & sums.keys():
            sums[key].add_(from_before[key])
        self._set_gradients({**from_before, **sums})
        return True

    def record(self) -> WindowRecord:
        """Return what a report says of the window that was reduced."""
        return WindowRecord(self._window.micro_batches, self._window.shares, self._facts.divisor)

    def close(self, *, skipped: bool) -> None:  # noqa: ARG002  # a step that is skipped keeps no gradients here
        """Begin a window."""
        self._window = self._new_window()

    @property
    def is_empty(self) -> bool:
        """Whether the next micro-batch begins a window."""
        return not self._window.micro_batches

    def _take_gradients(self) -> Gradients:
        """Return the parameters' gradients by `id`; the parameters have none afterwards."""
        # By `id`: the hash of a parameter is a method in Python, called for each of them in each step.
        taken: Gradients = {}
        for parameter in self._parameters:
            if parameter.grad is not None:
                taken[id(parameter)] = parameter.grad
                parameter.grad = None
        return taken

    def _set_gradients(self, gradients: Mapping[int, Tensor]) -> None:
        """Give the parameters, which have none, these gradients."""
        if not gradients:
            return
        for parameter in self._parameters:
            gradient = gradients.get(id(parameter))
            if gradient is not None:
                parameter.grad = gradient


def _are_the_same(parameters: Sequence[nn.Parameter], others: Sequence[nn.Parameter]) -> bool:
    """Return whether two sequences hold the same objects; `==` of parameters compares their values."""
    if len(parameters) != len(others):
        return False
    return all(parameter is other for parameter, other in zip(parameters, others, strict=True))
