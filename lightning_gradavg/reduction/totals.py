"""The exchange of totals: what the micro-batches of a window add up to over all ranks.

Every rank sends one row of six numbers, and every rank gets the rows of all. So a fault on one rank is seen by all in
the same exchange, and all raise the same error. The host reads the rows once per window. `KnownWeights` says where
ranks do without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, NoReturn
from zlib import crc32

import torch
import torch.distributed as dist

from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.device import beside, on_device
from lightning_gradavg._support.text import by_value, on_ranks
from lightning_gradavg.reduction.loss import ALWAYS_OR_NEVER, MicroBatch
from lightning_gradavg.rules import Rule

__all__ = [
    "STOPPED_TRAINING",
    "GatheredRows",
    "KnownWeights",
    "Totals",
    "TotalsExchange",
    "exact_sum",
    "must_agree",
    "raise_together",
]


_NO_WEIGHT = "no weight given"

STOPPED_TRAINING = (
    "a parameter stopped training within a window, so nothing reduces the gradient that it has. Freeze parameters"
    " between two optimizer steps"
)


class Totals(NamedTuple):
    """The totals of a window. One rank's row has the same fields."""

    faults: float  # micro-batches with a problem
    without_loss: float  # ranks whose `training_step` returned no loss
    pairs: float  # pairs of rank and micro-batch that are not absent
    lowest_digest: float  # of what must be the same on all ranks; infinity if nothing counts
    highest_digest: float  # of the same; minus infinity if nothing counts
    normalizer: float  # Z

    @classmethod
    def of_rank(cls, *, faults: int, without_loss: bool, pairs: int, agreement: str, normalizer: float) -> Totals:
        """Return the row of one rank; `agreement` is the text that must be the same on all ranks with a pair."""
        # The smallest and the largest of all ranks are compared: the variance of digests, which sums would give, is
        # rounded where windows are long or ranks are many.
        lowest = highest = _digest(agreement)
        if pairs == 0:
            # A rank without a micro-batch that counts agrees with all.
            lowest = math.inf
            highest = -math.inf
        return cls(
            faults=faults,
            without_loss=without_loss,
            pairs=pairs,
            lowest_digest=lowest,
            highest_digest=highest,
            normalizer=normalizer,
        )

    @classmethod
    def over(cls, rows: Sequence[Sequence[float]]) -> Totals:
        """Return the totals of all ranks' rows."""
        row_of_rank = [cls(*row) for row in rows]
        return cls(
            faults=sum(row.faults for row in row_of_rank),
            without_loss=sum(row.without_loss for row in row_of_rank),
            pairs=sum(row.pairs for row in row_of_rank),
            lowest_digest=min(row.lowest_digest for row in row_of_rank),
            highest_digest=max(row.highest_digest for row in row_of_rank),
            # The same on all ranks to the last bit, whatever order the backend gathers in: replicas stay replicas.
            normalizer=exact_sum([row.normalizer for row in row_of_rank]),
        )

    @property
    def agree(self) -> bool:
        """Whether what must be the same on all ranks is the same."""
        return self.highest_digest <= self.lowest_digest

    @property
    def is_usable(self) -> bool:
        """Whether the gradients can be reduced."""
        return self.faults == 0 and self.agree and math.isfinite(self.normalizer)

    @property
    def without_weights(self) -> bool:
        """Whether the user gave no micro-batch of usable totals a weight."""
        return self.highest_digest == _digest(_NO_WEIGHT)


def _digest(text: str) -> float:
    """Return 32 bits that stand for a text; they are exact in float64."""
    return float(crc32(text.encode()))


class TotalsExchange:
    """One exchange of totals that is under way. A collective operation; `read` waits for the other ranks."""

    def __init__(self, row: Totals, world: World, device: torch.device) -> None:
        """Begin to exchange this rank's row, while the rank goes on."""
        with torch.profiler.record_function("GradAvg: exchange totals"):
            self._rows = GatheredRows(row, device, world.group)

    def read(self) -> Totals:
        """Return the totals of all ranks."""
        with torch.profiler.record_function("GradAvg: wait for totals"):
            return Totals.over(self._rows.read())


class KnownWeights:
    """Whether every rank knows the weights of all ranks; one for all windows of a run.

    Ranks that share each loader batch do, if nobody gives a weight: the samples of the batch are the weights. That
    nobody gives one is what the totals of a window say, to all ranks alike:

        | the ranks share the loader batch | totals of a window said     | the weights are                         |
        |----------------------------------|-----------------------------|-----------------------------------------|
        | no                               |                             | not known                               |
        | yes                              | nothing: it is the first    | not known                               |
        | yes                              | that all losses have one    | not known                               |
        | yes                              | that no loss has one        | known, for the rest of the run          |

    A rank whose weight cannot be used later, such as a misspelt one, raises without the others. They hear of it as of
    any exception in `training_step` (`tests/faults.py`: "a misspelt weight in a later step").
    """

    def __init__(self, rule: Rule, *, shares_batches: bool) -> None:
        """Know nothing yet, of a rule and of ranks that share each loader batch or not."""
        self._rule = rule
        # Of a rule of the user's, or per node, Z is another sum.
        self._can_be_known = shares_batches and rule.normalizes_by_weights
        self._nobody_gives_a_weight = False

    def note(self, totals: Totals) -> None:
        """Note the totals of a window, which are usable."""
        if totals.without_weights:
            self._nobody_gives_a_weight = True

    def of_ranks(self, micro_batch: MicroBatch) -> float | None:
        """Return the sum of all ranks' weights of a micro-batch, None if they are not known; alike on all ranks."""
        if not self._can_be_known or not self._nobody_gives_a_weight:
            return None
        return micro_batch.samples_of_ranks

    def require_as_known(self, micro_batch: MicroBatch) -> None:
        """Raise a ValueError about a micro-batch that is not as the ranks know it. This rank alone may raise."""
        problem = micro_batch.problem
        # A rank that stood in so far may have given a weight every time, which the totals left out.
        if problem is None and micro_batch.explicit and not micro_batch.absent:
            problem = f"a weight is given, and no rank has given one in the first step: {ALWAYS_OR_NEVER}"
        if problem is not None:
            raise ValueError(f"reduction {self._rule.name!r}: {problem}.")


def must_agree(rule: Rule, micro_batches: Sequence[MicroBatch]) -> str:
    """Return what must be the same on all ranks with a micro-batch that is not absent, in words."""
    text = _NO_WEIGHT
    if any(micro_batch.explicit for micro_batch in micro_batches):
        text = "a weight given"
    length = len(micro_batches)
    # Rules with weights divide by Z, which counts all ranks' pairs; the mean's factor knows this rank's length alone.
    if length > 1 and rule.averages_window:
        text += f", in a window of {length}, which {rule.name!r} depends on"
    return text


def raise_together(totals: Totals, rule: Rule, world: World, micro_batches: Sequence[MicroBatch]) -> NoReturn:
    """Raise the same ValueError on all ranks about totals that are not usable. A collective operation.

    Its first line names the cause and the ranks that have it, since the log shows that line alone. Further lines name
    other causes. A cause that several ranks share is named once (`test_the_first_line_names_a_misspelt_weight_once`).

    Args:
        totals: The totals over all ranks.
        rule: The reduction rule.
        world: The ranks.
        micro_batches: Those of this rank.
    """
    # The cases of `Totals.is_usable`, the first that applies. All ranks have the same totals, and take the same branch.
    # The texts travel only now: six numbers per window are what a step without problems pays.
    reduction = f"reduction={rule.name!r}"
    if totals.faults > 0:
        raise ValueError(f"{reduction} cannot be applied{_problems_of_ranks(world, micro_batches)}")
    if not totals.agree:
        differing = by_value(world.gather_objects(must_agree(rule, micro_batches)))
        raise ValueError(f"{reduction}: the ranks' losses differ: {differing}. For weights: {ALWAYS_OR_NEVER}.")
    raise ValueError(
        f"{reduction}: the weights add up to {totals.normalizer!r}. Scale them so that their sum is finite."
    )


def _problems_of_ranks(world: World, micro_batches: Sequence[MicroBatch]) -> str:
    """Return the problems of all ranks, such as ": TEXT." or " on rank 1: TEXT.". A collective operation."""
    problems: list[str] = []
    for index, micro_batch in enumerate(micro_batches):
        if micro_batch.problem is None:
            continue
        problem = micro_batch.problem
        if len(micro_batches) > 1:
            problem = f"in micro-batch {index} of {len(micro_batches)}, {problem}"
        problems.append(problem)
    ranks_of_problem: dict[str, list[int]] = {}
    for rank, problems_of_rank in enumerate(world.gather_objects(problems)):
        for problem in problems_of_rank:
            ranks_of_problem.setdefault(problem, []).append(rank)
    lines = []
    for problem, ranks in ranks_of_problem.items():
        where = "" if len(ranks) == world.size else f" {on_ranks(ranks)}"
        lines.append(f"{where}: {problem.removesuffix('.')}.")
    return "\n ".join(lines)


class GatheredRows:
    """Every rank's row of numbers, exchanged while this rank goes on. A collective operation; `read` waits for it.

    On a CPU an all-to-all moves the rows: gloo's all-gather and all-reduce of a few numbers go round a ring, and this
    takes one step. On an accelerator the rows travel on a stream beside the model's, so that the host, which reads
    them, waits for the other ranks and not for the forward.
    """

    def __init__(self, row: Sequence[float], device: torch.device, group: dist.ProcessGroup | None) -> None:
        """Begin to exchange a row of float64, of the same length on all ranks; a `group` of None is this rank alone."""
        self._length = len(row)
        self._work: dist.Work | None = None  # on a CPU
        self._copied: torch.Event | None = None  # on an accelerator: the copy to the host
        sent = torch.tensor(row, dtype=torch.float64)
        if group is None:
            self._rows = sent
            return
        ranks = dist.get_world_size(group)
        if device.type == "cpu":
            self._rows = sent.new_empty(ranks * self._length)
            self._work = dist.all_to_all_single(self._rows, sent.repeat(ranks), group=group, async_op=True)
            return
        # The row comes from the host: nothing of the model's stream is needed for it, such as the forward
        # (`test_accelerator.py`: totals wait for no forward).
        with beside(device, waits=False) as stream:
            moved = on_device(sent, device)
            gathered = moved.new_empty(ranks * self._length)
            dist.all_gather(list(gathered.view(ranks, -1).unbind()), moved, group=group)
            self._rows = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
            self._rows.copy_(gathered, non_blocking=True)
            self._copied = stream.record_event()

    def read(self) -> list[list[float]]:
        """Return the rows of all ranks, in rank order."""
        if self._work is not None:
            self._work.wait()
        if self._copied is not None:
            self._copied.synchronize()
        rows: list[list[float]] = self._rows.view(-1, self._length).tolist()
        return rows


def exact_sum(numbers: Sequence[float]) -> float:
    """Return the correctly rounded sum, which no order of the ranks changes; infinity if it overflows."""
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # beyond float64, or inf - inf
        return math.inf
