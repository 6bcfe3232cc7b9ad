"""The factors that turn the average of DDP into the gradient of a rule: before the backward, and after the reduction.

A rule asks for

    g = sum(w * g_p) / Z ,        Z = sum(z)

over all pairs p of rank and micro-batch, with the share (w, z) of each pair. DDP and FSDP add up the gradients of a
window on every rank and average them over the W ranks, and the training loop has divided each loss by a constant N. If
the backward of each loss is multiplied by f, they give

    1 / W * sum(f * g_p / N)

which is g for f = w * N * W / Z. There are five cases. `lift` is what a loss carries beside its multiplier w; Z_1 is Z
of a window of one micro-batch:

    | rule                 | window                                     | lift                 | afterwards       |
    |----------------------|--------------------------------------------|----------------------|------------------|
    | without weights      | any; Z = Z_1 is known                      | N * W / Z_1          | 1                |
    | without weights,     | any; Z = Z_1 * length is known at its end  | W / Z_1              | N / length       |
    | divided by length    |                                            |                      |                  |
    | with weights         | of one micro-batch, which all ranks know   | N * W / Z            | nothing          |
    | with weights         | any other: Z is known after the last       | a power of two       | N * W / Z / lift |
    |                      | forward                                    |                      |                  |
    | any                  | of a model with parameters in float16      | 1, or a power of two | N * W / Z / lift |

The power of two is near the inverse of the first weights of the run, so that multiplying by it is exact, and losses
keep their magnitude: 4096 tokens times a loss overflow float16 activations where the result does not. A lift that is
chosen anew for every window would serve weights that grow by more than the range of a dtype; nobody has those.

In float16 the last row serves a window of one, too: a gradient times w * W / Z, which is at most W, overflows where the
result does not.
"""

from __future__ import annotations

import math

__all__ = ["factor_after", "factor_before", "inverse_power_of_two"]


def factor_before(multiplier: float, divisor: float, world_size: int, normalizer: float) -> float:
    """Return `w * N * W / Z`, what the backward of a loss is multiplied by where `Z` is known before it.

    Args:
        multiplier: `w`, the multiplier of the pair.
        divisor: `N`, what the training loop divided the loss by.
        world_size: `W`, the number of ranks that average.
        normalizer: `Z`. If it is 0, no pair has any weight, and the factor is 0.
    """
    if normalizer == 0:
        return 0.0
    # In this order equal weights give exactly 1, and so the bits of the mean.
    return multiplier * (divisor * world_size) / normalizer


def factor_after(divisor: float, world_size: int, normalizer: float, lift: float) -> float:
    """Return `N * W / Z / lift`, what the averaged gradient is multiplied by if each loss carried `w * lift`.

    Args:
        divisor: `N`, what the training loop divided every loss of the window by.
        world_size: `W`, the number of ranks that average.
        normalizer: `Z`. If it is 0, no pair has any weight, and the factor is 0; so may be the lift, only then.
        lift: What every loss carried beside its multiplier.
    """
    if normalizer == 0:
        return 0.0
    return divisor * world_size / normalizer / lift


def inverse_power_of_two(number: float) -> float | None:
    """Return the inverse of the power of two above `number`; None if `number` is 0 or not finite."""
    if number == 0 or not math.isfinite(number):
        return None
    _, exponent = math.frexp(number)
    # Within these bounds the power and its inverse are normal numbers of float64.
    exponent = min(max(exponent, -1022), 1022)
    return math.ldexp(1.0, -exponent)
