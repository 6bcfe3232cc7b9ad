"""Whether the ranks of a run know each other's weights, and so need not exchange them."""

from __future__ import annotations

from lightning_gradavg.reduction.loss import ALWAYS_OR_NEVER, MicroBatch
from lightning_gradavg.reduction.totals import Totals
from lightning_gradavg.rules import Rule

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
