"""What does not change in a run, and what the losses of windows carry where their totals are not known yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from lightning_gradavg._support.collectives import ReducedRow, World
from lightning_gradavg._support.place import Place
from lightning_gradavg.reduction.factor import factor_before, inverse_power_of_two
from lightning_gradavg.rules import RULES, Rule, depends_on_length, share_of

__all__ = ["Lift", "WindowOptions"]


@dataclass(frozen=True)
class WindowOptions:
    """What does not change in a run.

    Attributes:
        rule: The reduction rule.
        places: The place of every rank, in rank order.
        world: The ranks that average.
        device: The device of the gradients.
        user_ends_windows: Whether the user says where a window ends, as in manual optimization and in your own loop. A
            rank then does not know whether another rank's window has one micro-batch, or several.
        in_pieces: Whether a step may have several backwards, of which all but the last run within `training_step`.
        has_float16: Whether parameters have gradients in float16, in which a loss times W may overflow.
        judges: Whether ranks judge every step together, and so exchange totals under every rule.
        shares_batches: Whether ranks share each loader batch.
    """

    rule: Rule
    places: Sequence[Place]
    world: World
    device: torch.device
    user_ends_windows: bool = False
    in_pieces: bool = False
    has_float16: bool = False
    judges: bool = False
    shares_batches: bool = False

    @property
    def place(self) -> Place:
        """The place of this rank."""
        return self.places[self.world.rank]

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange totals in every window."""
        # Where the user ends windows, those of the ranks may differ in length; and problems must reach all ranks.
        return self.rule.uses_weight or self.judges or self.user_ends_windows

    @property
    def may_wait_before_backward(self) -> bool:
        """Whether a window of one micro-batch exchanges its totals before the backward, on all ranks."""
        # If one rank waited before its backward and another one after, the first would wait for a row that the second
        # has not sent, and the second in DDP's all-reduce for the first. So this must follow from what ranks share:
        # where the user ends windows, a rank's window of one may be another's of two, which has sent no row yet.
        return not (self.user_ends_windows or self.in_pieces or self.has_float16)

    @cached_property
    def refuses_longer_windows(self) -> bool:
        """Whether the rule cannot serve a window of several micro-batches."""
        return depends_on_length(self.rule, self.places) and not self.rule.averages_window

    @property
    def leaves_out_missing_pairs(self) -> bool:
        """Whether `Z` counts pairs, and so must leave out those of ranks that have no micro-batch."""
        # Under rules with weights a missing pair has weight 0, and Z of a sum is 1 for any number of pairs. Node rules
        # would have to know which ranks lack a batch: `Reduction` refuses such steps.
        return self.rule == RULES["mean"]


class Lift:
    """What losses carry beside their multipliers where `Z` is known only after the backward; one for all windows.

    `reduction.factor` has the table. Under a rule without weights it is known at once. Under a rule with weights it is
    chosen by the first micro-batch of the run, in this order: a window asks `is_chosen`, then calls `choose` on all
    ranks, then uses `value`.
    """

    def __init__(self, options: WindowOptions) -> None:
        """Choose nothing yet."""
        self._options = options
        self._power_of_two: float | None = None

    @property
    def is_chosen(self) -> bool:
        """Whether it will not change any more."""
        return self._power_of_two is not None or not self._options.rule.uses_weight

    def choose(self, normalizer: float) -> None:
        """Choose it by the largest normalizer that the first micro-batch of any rank has. A collective operation.

        It is asked once in a run, also if no rank has any weight then: a rank that begins its first window anew, as
        after an exception, must not ask alone.
        """
        options = self._options
        # The largest, and not each rank's own: all losses of a window must carry the same, as it is divided out once.
        with torch.profiler.record_function("GradAvg: choose lift"):
            (largest,) = ReducedRow([normalizer], "max", options.device, options.world.group).read()
        lift = inverse_power_of_two(largest)
        self._power_of_two = 1.0 if lift is None else lift

    def value(self, divisor: float) -> float:
        """Return the lift of a window whose losses the training loop divides by `divisor`."""
        options = self._options
        if options.rule.uses_weight:
            assert self._power_of_two is not None, "the first micro-batch of a window that needs a lift chooses it"
            return self._power_of_two
        if options.has_float16:
            # N * W / Z is N * W under "sum", which overflows float16 where the result does not.
            return 1.0
        if options.rule.averages_window:
            # The window's length divides N, which is then left for after the reduction: N / length is 1 in full ones.
            return factor_before(1.0, 1.0, options.world.size, self.normalizer_without_weights)
        return factor_before(1.0, divisor, options.world.size, self.normalizer_without_weights)

    @cached_property
    def normalizer_without_weights(self) -> float:
        """`Z` of a window of one micro-batch, under a rule without weights."""
        shares = [share_of(self._options.rule, place, 1.0) for place in self._options.places]
        return float(sum(share.normalizer for share in shares))
