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


@given(loader=COUNTS, ranks=COUNTS, base_ranks=COUNTS, window=COUNTS)
def test_scale_without_a_base_batch_is_the_ratio_of_the_ranks(
    loader: int, ranks: int, base_ranks: int, window: int
) -> None:
    batch = batch_scale([loader] * 2, window, world_size=ranks, base_world_size=base_ranks)
    assert batch == BatchScale(loader * window * ranks, loader * window * base_ranks)
    unknown = batch_scale([loader, None], window, world_size=ranks, base_world_size=base_ranks)
    assert (batch.scale, False) == (unknown.scale, unknown.known)
    shared = batch_scale([loader], window, world_size=ranks, split_batches=True)
    assert shared == BatchScale(loader * window, loader * window)


@given(factors=st.tuples(COUNTS, COUNTS, COUNTS), base=st.integers(1, 10**6))
def test_scale_depends_on_the_global_batch_alone(factors: tuple[int, int, int], base: int) -> None:
    total = math.prod(factors)
    made = {
        batch_scale([loader], window, world_size=ranks, base_batch_size=base, base_world_size=2)
        for loader, ranks, window in itertools.permutations(factors)
    }
    made.add(batch_scale([total], world_size=factors[1], split_batches=True, base_batch_size=base))
    assert made == {BatchScale(total, base)}
    assert next(iter(made)).scale == total / base


def test_a_base_batch_needs_the_size_of_a_batch() -> None:
    with pytest.raises(ValueError, match=r"base_batch_size=64 needs .* batch sizes \[8, 4\]. Give the loader"):
        batch_scale([8, 4], world_size=2, base_batch_size=64)


def gradient_of(rule: str, size: int) -> float:
    """Return the reduced gradient of a batch of equal samples with the gradient 1, each on a rank of its own."""
    pairs = [RULES[rule].share(Place(rank, size, 0, size), 1.0) for rank in range(size)]
    return sum(float(w) for w, _ in pairs) / sum(float(z) for _, z in pairs)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lr_scaling", SCALINGS)
def test_multipliers_of_a_step_are_those_of_a_toy(rule: str, lr_scaling: str) -> None:
    """The multiplier is the step of equal samples over the base step, computed by the rule itself on one node."""
    for size in (8, 16, 32, 128):
        growth, factor = gradient_of(rule, size) / gradient_of(rule, 16), SCALINGS[lr_scaling].factor(size / 16)
        message = counted_twice(rule, SCALINGS[lr_scaling], size / 16)
        assert bool(message) == (factor != 1 and growth != pytest.approx(1))
        assert not message or f"an SGD step is {growth * factor:.6g} times the base step" in message


@pytest.mark.parametrize(("rule", "twice"), [("mean_of_node_sums", False), ("sum_of_node_means", True), ("sum", True)])
def test_growth_of_node_rules_follows_the_nodes(rule: str, twice: bool) -> None:
    assert bool(counted_twice(rule, SCALINGS["linear"], 2.0, nodes=2)) == twice
