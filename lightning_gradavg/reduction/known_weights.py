"""Whether the ranks of a run know each other's weights, and so need not exchange them."""

from __future__ import annotations

from lightning_gradavg.reduction.lift import WindowOptions
from lightning_gradavg.reduction.loss import ALWAYS_OR_NEVER, MicroBatch
from lightning_gradavg.reduction.totals import Totals

__all__ = ["KnownWeights"]


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

    def __init__(self, options: WindowOptions) -> None:
        """Know nothing yet."""
        # Of a rule of the user's, or per node, Z is another sum.
        self._can_be_known = options.shares_batches and options.rule.normalizes_by_weights and not options.judges
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

    def problem(self, micro_batch: MicroBatch) -> str | None:
        """Return what is wrong with the weight of a micro-batch for which the weights of all ranks are known."""
        if micro_batch.problem is not None:
            return micro_batch.problem
        # A rank that stood in so far may have given a weight every time, which the totals left out.
        if micro_batch.explicit and not micro_batch.absent:
            return f"a weight is given, and no rank has given one in the first step: {ALWAYS_OR_NEVER}"
        return None
