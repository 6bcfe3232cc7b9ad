"""What the backward hides of the communication of its buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

__all__ = ["FIRST_BUCKET_BYTES", "bucket_sizes", "step_seconds"]

FIRST_BUCKET_BYTES = 2**20
"""Of DDP's first bucket, which it keeps small to start early (`torch.distributed._DEFAULT_FIRST_BUCKET_BYTES`)."""


def bucket_sizes(total: float, cap: float, first: float = FIRST_BUCKET_BYTES) -> tuple[float, ...]:
    """Return the sizes of the buckets that gradients fill, in the order in which they are reduced.

    A parameter is taken to be small beside a bucket: DDP itself closes a bucket with the parameter that reaches the
    cap, and so has larger ones.

    Args:
        total: Size of all gradients, in bytes.
        cap: Largest size of a bucket, `bucket_cap_mb` of DDP in bytes.
        first: Largest size of the first one.

    Raises:
        ValueError: If a size is not above 0.
    """
    if not (total > 0 and cap > 0 and first > 0):
        raise ValueError(f"sizes of buckets must be > 0, got total={total!r}, cap={cap!r} and first={first!r}.")
    sizes = [min(first, cap, total)]
    while (rest := total - sum(sizes)) > 0:
        sizes.append(min(cap, rest))
    return tuple(sizes)


def step_seconds(
    forward: float, backward: float, sizes: Sequence[float], seconds_of: Callable[[float], float], *, overlap: bool
) -> float:
    """Return the time of an optimizer step whose buckets are summed while the backward goes on.

    Assumed is that a bucket is ready when the backward has computed its share of all bytes: bucket `i` at
    `forward + backward * (s_1 + ... + s_i) / (s_1 + ... + s_N)`; that the buckets are summed one after another, in that
    order; and that summing them does not slow the backward down. So bucket `i` ends at
    `max(ready_i, end_(i-1)) + seconds_of(s_i)`, and the step with the last of them.

    Args:
        forward: Seconds before the backward begins.
        backward: Seconds of the backward.
        sizes: Of the buckets, in the order in which they become ready.
        seconds_of: The time to sum a bucket of a size.
        overlap: Whether buckets are summed during the backward. If not, all are ready at its end.
    """
    total = sum(sizes)
    end = 0.0
    for done, size in zip(accumulate(sizes), sizes, strict=True):
        ready = forward + backward * (done / total if overlap else 1.0)
        end = max(ready, end) + seconds_of(size)
    return max(end, forward + backward)
