"""The global batch: its size, its scale, and a change of it that is counted twice."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gradavg.place import Place
from lightning_gradavg.rates.scaling import SCALINGS, BatchScale, batch_scale, counted_twice
from lightning_gradavg.rules import RULES

COUNTS = st.integers(1, 64)


def test_one_global_batch_size() -> None:
    """Case 23: a shared loader batch of 12 is 12 on any number of ranks; 3 on each of 4, accumulated twice, is 24."""
    shared = [batch_scale([12], world_size=ranks, split_batches=True).global_batch_size for ranks in (1, 4, 5)]
    assert shared == [12, 12, 12]
    assert batch_scale([3], 2, world_size=4).global_batch_size == 24


@given(factors=st.tuples(COUNTS, COUNTS, COUNTS), base_ranks=COUNTS, base=st.integers(1, 10**6))
def test_scale_depends_on_the_global_batch_alone(factors: tuple[int, int, int], base_ranks: int, base: int) -> None:
    """It is the ratio to the base batch; without one that of the ranks, also where a loader has no batch size."""
    total = math.prod(factors)
    for loader, ranks, window in itertools.permutations(factors):
        assert batch_scale([loader], window, world_size=ranks, base_batch_size=base) == BatchScale(total, base)
        batch = batch_scale([loader] * 2, window, world_size=ranks, base_world_size=base_ranks)
        assert batch == BatchScale(total, loader * window * base_ranks)
        unknown = batch_scale([loader, None], window, world_size=ranks, base_world_size=base_ranks)
        assert (batch.scale, False) == (unknown.scale, unknown.known)
        shared = batch_scale([loader * window], ranks, world_size=base_ranks, split_batches=True, base_batch_size=base)
        assert (shared, total / base) == (BatchScale(total, base), shared.scale)
        assert batch_scale([loader], world_size=ranks, split_batches=True) == BatchScale(loader, loader)


def test_a_base_batch_needs_the_size_of_a_batch() -> None:
    with pytest.raises(ValueError, match=r"base_batch_size=64 needs .* batch sizes \[8, 4\]. Give the loader"):
        batch_scale([8, 4], world_size=2, base_batch_size=64)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lr_scaling", SCALINGS)
def test_multipliers_of_a_step_are_those_of_a_toy(rule: str, lr_scaling: str) -> None:
    """The multiplier is the step of equal samples over the base step on one node, computed by the rule itself."""

    def gradient(size: int, nodes: int) -> float:
        """Return the reduced gradient of samples with the gradient 1, each on a rank of its own."""
        pairs = [RULES[rule].share(Place(rank, size, 0, size // nodes), 1.0) for rank in range(size)]
        return sum(float(w) for w, _ in pairs) / sum(float(z) for _, z in pairs)

    for size, nodes in itertools.product((8, 16, 32, 128), (1, 2)):
        growth = gradient(size, nodes) / gradient(16, 1)
        factor = SCALINGS[lr_scaling].factor(size / 16)
        message = counted_twice(rule, SCALINGS[lr_scaling], size / 16, nodes=nodes)
        assert bool(message) == (factor != 1 and growth != pytest.approx(1))
        assert not message or f"an SGD step is {growth * factor:.6g} times the base step" in message
