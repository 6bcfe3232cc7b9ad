"""Runs drawn at random train on the gradient of one process, or all ranks raise; none waits."""

from __future__ import annotations

import pytest
from fuzz import Config, judged, outcomes

IN_ONE_CALL = 10


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.full] * (first >= 50)) for first in range(0, 500, IN_ONE_CALL)]
)
def test_configurations(world, first):
    """Each trains two steps with the gradient that `combine` says, or raises on both ranks where there is a reason."""
    seeds = range(first, first + IN_ONE_CALL)
    of_ranks = world(2).run(outcomes, seeds)
    found = {seed: judged(seed, list(ranks)) for seed, *ranks in zip(seeds, *of_ranks, strict=True)}
    assert {} == {Config(seed): wrong for seed, wrong in found.items() if wrong is not None}
