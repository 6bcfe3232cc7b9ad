"""What a sum may be off by that travels in narrow types, and by how much one is."""

from __future__ import annotations

import torch

__all__ = ["LARGEST_ERROR", "relative_error"]

# Relative L2 error of a sum: rounded once by all ranks but the one that sums, and once after it. A rounding to p bits
# has about 0.41 * 2**-p of error on average.
LARGEST_ERROR = {"bfloat16": 2.5e-3, "float16": 3.2e-4, None: 1e-6}


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the L2 norm of the difference, relative to that of the exact numbers."""
    wide = torch.promote_types(exact.dtype, torch.float64)
    return float((found.to(wide) - exact.to(wide)).norm() / exact.to(wide).norm())
