"""A micro-batch's loss and weight: how a weight is read, and how the gradient of a loss is multiplied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gradavg._support.tree import batch_samples, leaves
from lightning_gradavg.reduction.uncounted import pass_no_nan
from lightning_gradavg.rules import Rule

__all__ = ["ALWAYS_OR_NEVER", "MicroBatch", "Weights", "as_weight", "require_loss", "weighed"]

ALWAYS_OR_NEVER = (
    'return "weight" from every training_step (or pass weight= to every manual_backward, or to what does the backward'
    " in your own loop), or never"
)


class MicroBatch(NamedTuple):
    """What a rank knows about one micro-batch before its backward.

    Attributes:
        weight: The number of loss terms behind the loss; 1 under a rule without weights.
        explicit: Whether the user gave the weight. If not, it is the number of samples.
        problem: Why the micro-batch cannot be used, or None. All ranks raise it together, when the window is reduced.
        absent: Whether the loss counts under no rule: its backward only keeps this rank in step with the others.
    """

    weight: float
    explicit: bool = False
    problem: str | None = None
    absent: bool = False

    @property
    def counts(self) -> bool:
        """Whether the gradient adds anything to the reduced one."""
        if self.absent or self.problem is not None:
            return False
        return self.weight != 0


class _Weighed(torch.autograd.Function):
    """The same loss; its gradient is multiplied by what a function returns when the backward begins.

    Of a loss that does not count, the function returns 0 (`reduction/uncounted.py`). No product with a tensor: the loss
    that the user logs would be another number.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: Callable[[], float]) -> Tensor:
        ctx.factor = factor
        # A copy: autograd takes what a function returns for a new tensor only if it is one.
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        factor = ctx.factor()
        if factor == 0:
            pass_no_nan(ctx)
            return torch.zeros_like(gradient), None  # none for `factor`
        # The product with a Python number keeps the dtype, also of a scaled loss.
        return gradient * factor, None


def weighed(loss: Tensor, factor: Callable[[], float]) -> Tensor:
    """Return a loss of equal value, whose gradient is multiplied by `factor()` at the root of its backward.

    The graph holds the function, which must not hold the loss: Python's garbage collector does not see a circle through
    a graph, and every step would keep its graph for ever (`test_window.py`: no step keeps its loss).
    """
    result: Tensor = _Weighed.apply(loss, factor)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return result


def as_weight(value: object) -> float:
    """Return a weight of any numeric type as a float. Waits for a tensor on an accelerator.

    Raises:
        TypeError: If it is not one real number.
    """
    if isinstance(value, Tensor):
        # Of bool and integers, too: `(targets != -100).sum()` is the usual one.
        if value.numel() != 1 or value.is_complex():
            raise TypeError(f"a weight is one number, got a tensor of shape {tuple(value.shape)} and {value.dtype}")
        return float(value.detach())
    if isinstance(value, Mapping):
        raise TypeError(
            f"a weight is one number, got a dict of {list(value)}. If each term of a loss has a count of its own, use"
            " reduction='mean', and return the sum of lightning_gradavg.global_mean(total, count) of all terms"
        )
    # `float("3")` is 3, but a text is no number of terms.
    if not isinstance(value, (str, bytes)):
        try:
            return float(value)  # type: ignore[arg-type]  # whatever has __float__: NumPy, Fraction, Decimal
        except (TypeError, ValueError, OverflowError):
            pass
    raise TypeError(f"a weight is one number, got {value!r:.80} of type {type(value).__name__}")


def require_loss(loss: object) -> Tensor:
    """Return a loss, or raise a TypeError unless it is a tensor."""
    if isinstance(loss, Mapping):
        raise TypeError(
            f"a loss is a tensor with a graph, got a dict of {list(loss)}. Add the terms up; if each has a count of its"
            " own, use reduction='mean' and lightning_gradavg.global_mean(total, count) for each"
        )
    if not isinstance(loss, Tensor):
        raise TypeError(f"a loss is a tensor with a graph, got {loss!r} of type {type(loss).__name__}")
    return loss


_IGNORE_INDEX = -100  # the default of torch's losses
_TARGETS = (torch.int16, torch.int32, torch.int64)
_BATCHES_SEARCHED = 8  # a search reads a whole batch on the host
_IGNORED = (
    "integer tensors of a batch hold -100, the targets that torch's losses ignore, and no weight is given: the loss"
    " is then weighted by its samples, including the ignored ones. If it is a mean over targets, return"
    ' {"loss": loss, "weight": (targets != -100).sum()} from training_step.'
)
_BY_SAMPLES = (
    "GradAvgStrategy: n = samples of the batch, as no weight is given. If the loss is a mean over tokens,"
    " or leaves targets out, give their number as weight; if it is a global_mean, give 1"
)


class Weights:
    """Reads the weights of a run's micro-batches; under a rule without weights they are 1.

    The calls for each micro-batch: `search_targets` when its batch arrives, and `read` after the forward.
    """

    def __init__(self, rule: Rule, warn: Callable[[str], None], inform: Callable[[str], None]) -> None:
        """Begin a run.

        Args:
            rule: The rule, which says whether weights are read.
            warn: Gives the user a warning. It is called for each micro-batch, and decides whether it shows one again.
            inform: Gives the user a message that is no warning; likewise.
        """
        self._rule = rule
        self._warn = warn
        self._inform = inform
        self._was_given: bool | None = None  # whether the micro-batch before had a weight; None before the first
        self._batches_to_search = 0
        if rule.uses_weight:
            self._batches_to_search = _BATCHES_SEARCHED
        self._has_ignored_targets = False

    def search_targets(self, batch: object) -> None:
        """Note whether a batch holds ignored targets: one of the first batches, and on the host."""
        if self._batches_to_search == 0:
            return
        self._batches_to_search -= 1
        for _, leaf in leaves(batch):
            # On an accelerator the search would wait for the device.
            is_searched = isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.dtype in _TARGETS
            if is_searched and bool((leaf == _IGNORE_INDEX).any()):
                self._has_ignored_targets = True

    def read(
        self, weight: object, batch: object, samples: float | None = None, problem: str | None = None
    ) -> MicroBatch:
        """Return what is known of a micro-batch; what is wrong with its weight is a problem that all ranks will raise.

        Args:
            weight: What the user gave, or None.
            batch: The batch, whose samples are the default weight.
            samples: The number of samples if the batch does not tell it; 0 if they do not count.
            problem: A problem that is known already.
        """
        if not self._rule.uses_weight:
            return self._read_unused(weight, samples)
        is_given = weight is not None
        # Whatever is wrong becomes a problem of the micro-batch: raised here, it would leave the other ranks waiting.
        # The first one found is kept, as it is the cause.
        if problem is None:
            if is_given:
                self._batches_to_search = 0
            else:
                self._inform_of_samples()
            problem = self._problem_of_change(is_given=is_given)
        if samples == 0:
            return MicroBatch(0.0, is_given, problem, absent=True)
        if problem is None and samples is not None and not is_given:
            problem = _problem_of_dropped_samples(batch, samples)
        number = 0.0
        try:
            number = self._number(weight, batch, samples)
        except TypeError as error:
            if problem is None:
                problem = str(error)
        except ValueError:
            if problem is None:
                problem = (
                    f"the number of samples cannot be read from a batch of type {type(batch).__name__}:"
                    ' return {"loss": loss, "weight": n} from training_step'
                )
        return MicroBatch(number, is_given, problem)

    def _read_unused(self, weight: object, samples: float | None) -> MicroBatch:
        """Return what is known of a micro-batch under a rule without weights."""
        # Weights are neither read nor sent, so nothing about them can be wrong on one rank alone.
        if isinstance(weight, Mapping):
            # A dict of weights asks for a mean of each loss term, which this rule would silently not take.
            as_weight(weight)  # raises
        if weight is not None:
            self._warn(f'a "weight" was given, but reduction={self._rule.name!r} does not use weights: it is ignored.')
        if samples == 0:
            return MicroBatch(0.0, absent=True)
        return MicroBatch(1.0)

    @staticmethod
    def _number(weight: object, batch: object, samples: float | None) -> float:
        """Return the weight that is given, or else the number of samples; raise a TypeError or ValueError about it."""
        if weight is not None:
            return as_weight(weight)
        if samples is not None:
            return float(samples)
        return float(batch_samples(batch))

    def _inform_of_samples(self) -> None:
        """Tell the user what the default weight is, and warn where it seems wrong."""
        if self._has_ignored_targets:
            self._warn(_IGNORED)
        self._inform(_BY_SAMPLES)

    def _problem_of_change(self, *, is_given: bool) -> str | None:
        """Return a problem if only some steps of the run have weights; remember whether this one has."""
        # Weights and samples are of different sizes. Each rank compares its own steps here, and the rows of a window
        # compare the ranks.
        before = self._was_given
        self._was_given = is_given
        if before is None or before == is_given:
            return None
        if is_given:
            return f"a weight was not given in the steps before, but in this one: {ALWAYS_OR_NEVER}"
        return f"a weight was given in the steps before, but not in this one: {ALWAYS_OR_NEVER}"


def _problem_of_dropped_samples(batch: object, samples: float) -> str | None:
    """Return the problem that a batch has fewer rows than the samples that were loaded for it, if it tells its rows."""
    try:
        rows = batch_samples(batch)
    except ValueError:
        return None
    if rows >= samples:
        return None
    return (
        f"the batch has {rows} rows for {samples} samples of the dataset, and no weight is given. Return"
        ' {"loss": loss, "weight": n} from training_step, or drop samples in the dataset, not in collate_fn'
    )
