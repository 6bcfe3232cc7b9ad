"""`global_mean`: the mean of a loss term over all ranks, each term by its own count, under the plain mean of gradients.

Rank r has the total `t_r` of a term, a sum over `n_r` items, and `N` is the sum of all counts. The mean over all ranks
is `sum of t_r / N`, and its gradient is `sum of dt_r / N`. The plain mean over W ranks divides the sum of the ranks'
gradients by W, so each rank's gradient is `W / N` times that of its own total.

A rank without samples computes a *stand-in*, which does not count. It is no part of a plain mean: W counts the ranks
that have samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gradavg._support.collectives import Contribution
from lightning_gradavg._support.running import running_forward
from lightning_gradavg._support.tree import leaves, mapped
from lightning_gradavg.reduction.gather import exchanging_world, require_gather_allowed
from lightning_gradavg.rules import is_number

__all__ = ["SCOPE", "global_mean"]

T = TypeVar("T")

SCOPE = "GradAvg: global_mean"
"""How a profile shows the exchange."""


def global_mean(total: T, count: object, *, group: dist.ProcessGroup | None = None) -> T:
    """Return the mean of a loss term over all ranks, from each rank's sum and count. Call it on every rank.

    ::

        loss = global_mean(cross_entropy(scores, classes, reduction="sum"), len(classes))

    The value is `sum of totals / sum of counts`, the same on all ranks. Its gradient makes the plain mean over the
    ranks the gradient of that value: reduce by `reduction="mean"`, as stock DDP, Fabric, FSDP2 and `GradAvgStrategy()`
    do. Terms with different counts add up to one loss, also with terms that need no count, such as a penalty on
    parameters. Pass several terms at once, as dicts or tuples, for one exchange.

    - In an accumulation window each micro-batch is divided by its own count over all ranks, and the window takes the
      mean of its micro-batches. Where the window must be divided by its total, use `reduction="weighted_mean"`.
    - A total whose count is 0 is left out of the value, even if it is NaN, and gets a zero gradient. A derivative that
      is NaN or infinite still turns that zero into NaN, as it does for any loss: leave such rows out before the model
      (`x[mask]`), not after it. If the counts of all ranks are 0, value and gradient are 0.
    - Where `"mean"` weighs by samples, under `split_batches=True` and `equivalent_to`, return the loss with a weight of
      1, which makes it plain: `{"loss": loss, "weight": 1}`.
    - Counts have no gradient. Sums are in float64, so counts below 2**53 are exact.
    - The host reads totals and counts, and waits for those on an accelerator. The backward does not communicate.
    - Without an initialized process group, and in a group of one rank, the result is `total / count`.

    Args:
        total: The sum over this rank's items: a number or a tensor with one element, or nested dicts, tuples or lists
            of them.
        count: The number of items, or their total weight: numbers >= 0, or tensors with one element of any type, in
            the structure of `total`.
        group: The process group; the default group if None.

    Returns:
        Tensors in the structure of `total`, each of its tensor's shape, type and device; of a number or an integer, in
        the default type.

    Raises:
        ValueError: On all ranks, if an argument is invalid on some rank, or if the ranks' terms differ. On this process
            alone, if it is no member of `group`.
        RuntimeError: In a training step that ranks run different numbers of times.
    """
    require_gather_allowed()
    if torch.is_inference_mode_enabled():
        # Gloo of torch 2.4 cannot write into tensors that were made in inference mode, as Lightning validates.
        with torch.inference_mode(False), torch.no_grad():
            return global_mean(total, count, group=group)
    world = exchanging_world(group)
    with torch.profiler.record_function(SCOPE):
        contribution, agreed = world.agree("global_mean cannot proceed", lambda: _contribution(total, count))
    local_terms = _Terms.from_numbers(contribution.numbers)
    stand_ins = 0.0
    sum_of_totals = [0.0] * len(local_terms.totals)
    sum_of_counts = [0.0] * len(local_terms.counts)
    for numbers in agreed.numbers:  # of each rank, in rank order: so all ranks get the same bits
        terms_of_rank = _Terms.from_numbers(numbers)
        stand_ins += terms_of_rank.stands_in
        for index, total_of_rank in enumerate(terms_of_rank.totals):
            sum_of_totals[index] += total_of_rank
        for index, count_of_rank in enumerate(terms_of_rank.counts):
            sum_of_counts[index] += count_of_rank
    ranks_with_samples = world.size - stand_ins
    apply = cast("Callable[[Tensor, float, float], Tensor]", _GlobalMean.apply)
    means: dict[str, Tensor] = {}
    for index, (term, tensor) in enumerate(contribution.tensors.items()):
        value = 0.0
        scale = 0.0
        if sum_of_counts[index] > 0:
            value = sum_of_totals[index] / sum_of_counts[index]
            scale = ranks_with_samples / sum_of_counts[index]
        # Nothing of this rank is in the mean. Its total may be NaN, and so may be the gradient behind it.
        if local_terms.counts[index] == 0:
            scale = 0.0
        means[term] = apply(tensor, value, scale)
    # Terms travel in the order of their names, as dicts of two ranks may differ in order; here in that of `total`.
    in_order = iter([means[term] for term, _ in leaves(total)])
    result: T = mapped(total, lambda _: next(in_order))
    return result


class _Terms(NamedTuple):
    """The numbers that a rank sends: zeros for a term that does not count."""

    stands_in: float  # 1 if the rank has no samples, and computes a stand-in; else 0
    totals: list[float]  # of each term, in the order of their names
    counts: list[float]  # likewise

    def to_numbers(self) -> list[float]:
        """Return them as one row, as `Contribution.numbers` takes it."""
        return [self.stands_in, *self.totals, *self.counts]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> _Terms:
        """Return the terms that a row holds."""
        terms = (len(numbers) - 1) // 2
        return cls(numbers[0], list(numbers[1 : 1 + terms]), list(numbers[1 + terms :]))


def _contribution(total: object, count: object) -> Contribution:
    """Return this rank's terms, checked, in the order of their names; the numbers are those of `_Terms`."""
    totals: dict[str, object] = dict(leaves(total))
    counts: dict[str, object] = dict(leaves(count))
    if not totals:
        raise ValueError(f"there is no term in {total!r}: pass at least one")
    if totals.keys() != counts.keys():
        raise ValueError(f"total has {_named(totals)}, but count has {_named(counts)}: pass a count for each total")
    terms = sorted(totals)
    tensors = {term: _as_total(f"total{term}", totals[term]) for term in terms}
    for term in terms:
        _require_count(f"count{term}", counts[term])
    # Totals and counts at once: the host waits for the device once.
    numbers = _read([*tensors.values(), *[counts[term] for term in terms]])
    local_totals = numbers[: len(terms)]
    local_counts = numbers[len(terms) :]
    stands_in = running_forward().stands_in
    for index, term in enumerate(terms):
        if not is_number(local_counts[index]):
            raise ValueError(f"count{term} is {local_counts[index]!r}, not a finite number >= 0")
        # Selected here: 0 times NaN is NaN.
        if local_counts[index] == 0 or stands_in:
            local_totals[index] = 0.0
            local_counts[index] = 0.0
    return Contribution(
        [f"global_mean of {_named(totals)}"],
        tensors=tensors,
        numbers=_Terms(float(stands_in), local_totals, local_counts).to_numbers(),
    )


def _named(terms: Mapping[str, object]) -> str:
    """Return what messages call the terms: their places in the structure."""
    if "" in terms:  # a single value, in no structure
        return "one term"
    return f"the terms {', '.join(sorted(terms))}"


def _as_total(label: str, value: object) -> Tensor:
    """Return a total as a floating-point tensor, or raise a ValueError."""
    if isinstance(value, Tensor):
        _require_element(label, value)
        if value.is_floating_point():
            return value
        return value.to(torch.get_default_dtype())
    return torch.tensor(_as_float(label, value), dtype=torch.get_default_dtype())


def _require_count(label: str, value: object) -> None:
    """Raise a ValueError unless a value can be read as one number and has no gradient."""
    if not isinstance(value, Tensor):
        _as_float(label, value)
        return
    _require_element(label, value)
    if value.requires_grad:
        raise ValueError(f"{label} requires grad, but counts have no gradient: pass count.detach()")


def _require_element(label: str, tensor: Tensor) -> None:
    """Raise a ValueError unless a tensor holds one real number."""
    if hasattr(tensor, "device_mesh"):  # torch 2.4 has the class `DTensor` elsewhere
        raise ValueError(f"{label} is a DTensor: pass its full_tensor()")
    if tensor.numel() != 1:
        raise ValueError(f"{label} is one number, got a tensor of shape {tuple(tensor.shape)}: pass its sum")
    if tensor.is_complex():
        raise ValueError(f"{label} is a real number, got {tensor.dtype}")


def _as_float(label: str, value: object) -> float:
    """Return a number of any type as a float, or raise a ValueError."""
    try:
        if not isinstance(value, (str, bytes)):  # of which float("3") would read one
            return float(value)  # type: ignore[arg-type]  # whatever has __float__
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{label} is one number, got {value!r:.80} of type {type(value).__name__}")


def _read(values: Sequence[object]) -> list[float]:
    """Return numbers and one-element tensors as floats. The host waits once for all that are on one device."""
    numbers = [0.0] * len(values)
    indices_on_device: dict[torch.device, list[int]] = {}
    doubles_on_device: dict[torch.device, list[Tensor]] = {}
    for index, value in enumerate(values):
        if isinstance(value, Tensor):
            indices_on_device.setdefault(value.device, []).append(index)
            # Sums are of counts, which float32 rounds from 2**24 on.
            doubles_on_device.setdefault(value.device, []).append(value.detach().reshape(()).double())
        else:
            numbers[index] = _as_float("a number", value)
    for device, indices in indices_on_device.items():
        read = torch.stack(doubles_on_device[device]).tolist()
        for index, number in zip(indices, read, strict=True):
            numbers[index] = number
    return numbers


class _GlobalMean(torch.autograd.Function):
    """A mean that is known, as a function of this rank's total; in the backward, the total's gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, value: float, scale: float) -> Tensor:
        ctx.scale = scale
        return total.new_full(total.shape, value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        if ctx.scale == 0.0:
            # Not the product: the gradient may be NaN.
            return torch.zeros_like(gradient), None, None
        return gradient * ctx.scale, None, None
