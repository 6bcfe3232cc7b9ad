"""A micro-batch's loss and weight: how a weight is read, and how the gradient of a loss is multiplied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gradavg._support.tree import batch_samples, leaves
from lightning_gradavg.rules import Rule

__all__ = ["ALWAYS_OR_NEVER", "MicroBatch", "WeighedLoss", "Weights", "as_weight", "require_loss"]

ALWAYS_OR_NEVER = (
    'return "weight" from every training_step (or pass weight= to every manual_backward, or to what does the backward'
    " in your own loop), or never"
)


class MicroBatch(NamedTuple):
    """What a rank knows about one micro-batch before its backward.

    Attributes:
        weight: The number of loss terms behind the loss; 1 under a rule without weights.
        explicit: Whether the user gave the weight. If not, it is the number of samples.
        problem: Why the weight cannot be used, or None. Where ranks exchange totals, all raise it together; else this
            rank raises it.
        absent: Whether the loss counts under no rule: its backward only keeps this rank in step with the others.
        without_loss: Whether it is absent because `training_step` returned no loss.
        samples_of_ranks: What the weights of all ranks add up to if no user gives one: the samples of a loader batch
            that the ranks share. None where no rank knows it. All ranks have the same, as ranks that know it exchange
            no totals.
        samples: The number of samples, if the step is observed and they are known.
        loss: The loss as the user computed it, without its graph, if the step is observed.
    """

    weight: float
    explicit: bool = False
    problem: str | None = None
    absent: bool = False
    without_loss: bool = False
    samples_of_ranks: float | None = None
    samples: float | None = None
    loss: Tensor | None = None

    @property
    def counts(self) -> bool:
        """Whether the gradient adds anything to the reduced one."""
        if self.absent or self.problem is not None:
            return False
        return self.weight != 0


class WeighedLoss:
    """A loss whose gradient is multiplied by `factor` at the root of its backward; its value stays as it is.

    Attributes:
        value: The loss to run the backward of.
        micro_batch: What is known of it.
    """

    def __init__(
        self,
        loss: Tensor,
        micro_batch: MicroBatch,
        *,
        multiplies: bool = True,
        on_backward: Callable[[WeighedLoss], None] | None = None,
    ) -> None:
        """Make a loss.

        Args:
            loss: What the user returned, with its graph.
            micro_batch: What is known of it.
            multiplies: Whether a factor may be set. If not, the user's graph stays as it is.
            on_backward: Called with this loss when its backward begins; it may set the factor.
        """
        self.micro_batch = micro_batch
        self._factor = _Factor()
        self.value = loss
        # The plain mean: stock's graph, and so stock's bits and memory (`test_ranks_stock.py`).
        if not multiplies:
            return
        # A node of its own: a hook on the node of the user's loss would also see other backwards through it.
        self.value = loss.clone()
        if on_backward is not None:
            # A loss without the graph: the graph holds the hook, and Python's garbage collector does not see a circle
            # through it. Every step then kept its graph for ever (`test_window.py`: no step keeps its loss).
            without_graph = WeighedLoss(loss.detach(), micro_batch, multiplies=False)
            without_graph._factor = self._factor  # of the same class
            self._factor.begin = partial(on_backward, without_graph)
        # Without a graph there is nothing to multiply: a loss of weight 0, or the copy above.
        if self.value.grad_fn is not None:
            # A bound method of `_Factor`, which holds no loss: see there.
            self.value.grad_fn.register_prehook(self._factor.multiply)

    @property
    def factor(self) -> float:
        """What the gradient is multiplied by; set before the backward, when the totals of the window are known."""
        return self._factor.value

    @factor.setter
    def factor(self, value: float) -> None:
        self._factor.value = value


class _Factor:
    """The factor of a loss, which the graph of the loss holds. It must not hold the loss.

    A hook, and not a product with a tensor: a tensor's value would have to be known in the forward, while the factor
    may be known only when the backward begins, and the loss that the user logs would be another number.
    """

    def __init__(self) -> None:
        self.value = 1.0
        self.begin: Callable[[], None] | None = None  # called when the backward begins

    def multiply(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Return the gradient at the root of a backward, multiplied."""
        (gradient,) = gradients
        if self.begin is not None:
            self.begin()
        # Equal weights leave the bits of the mean, and cost no kernel.
        if gradient is None or self.value == 1:
            return gradients
        # The product with a Python number keeps the dtype, also of a scaled loss.
        return (gradient * self.value,)


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
    " or leaves targets out, give their number as weight"
)


class Weights:
    """Reads the weights of a run's micro-batches; under a rule without weights they are 1.

    The calls for each micro-batch: `look_at` when its batch is loaded, and `read` after the forward.
    """

    def __init__(self, rule: Rule, warn: Callable[[str], None], inform: Callable[[str], None]) -> None:
        """Read the weights of a rule; `warn` and `inform` give the user a message, which may come again."""
        self._rule = rule
        self._warn = warn
        self._inform = inform
        self._explicit: bool | None = None  # whether the micro-batches before had weights; None before the first
        self._batches_to_search = 0
        if rule.uses_weight:
            self._batches_to_search = _BATCHES_SEARCHED
        self._has_ignored_targets = False

    def look_at(self, batch: object) -> None:
        """Search the first batches for ignored targets, where they are on the host."""
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
            problem = self._note(given=is_given)
        if samples == 0:
            return MicroBatch(0.0, is_given, problem, absent=True)
        if problem is None and samples is not None and not is_given:
            problem = _dropped_samples(batch, samples)
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

    def _note(self, *, given: bool) -> str | None:
        """Tell the user about the default weight; return a problem if only some steps of the run have weights."""
        # Weights and samples are of different sizes. All ranks compare their own steps here, and the digest of
        # `totals.must_agree` compares the ranks of one window.
        before = self._explicit
        self._explicit = given
        if given:
            self._batches_to_search = 0
        else:
            if self._has_ignored_targets:
                self._warn(_IGNORED)
            self._inform(_BY_SAMPLES)
        if before is None or before == given:
            return None
        if given:
            return f"a weight was not given in the steps before, but in this one: {ALWAYS_OR_NEVER}"
        return f"a weight was given in the steps before, but not in this one: {ALWAYS_OR_NEVER}"


def _dropped_samples(batch: object, samples: float) -> str | None:
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
