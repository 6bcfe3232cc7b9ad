"""The global batch: its size, its scale, and what contradicts it."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse.typing import PositiveInt

from lightning_gradavg.place import Place
from lightning_gradavg.rates.scaling import SCALINGS, BatchScale, batch_scale, contradictions
from lightning_gradavg.rules import RULES

COUNTS = st.integers(1, 64)


def test_one_global_batch_size() -> None:
    """Case 23: a shared loader batch of 12 is 12 on any number of ranks; 3 on each of 4, accumulated twice, is 24."""
    shared = [batch_scale(12, world_size=ranks, split_batches=True).global_batch_size for ranks in (1, 4, 5)]
    assert shared == [12, 12, 12]
    assert batch_scale(3, world_size=4, accumulate_grad_batches=2).global_batch_size == 24


@given(loader=COUNTS, ranks=COUNTS, base_ranks=COUNTS, window=COUNTS)
def test_scale_of_loaders_per_rank_is_the_ratio_of_the_ranks(
    loader: int, ranks: int, base_ranks: int, window: int
) -> None:
    batch = batch_scale(loader, world_size=ranks, accumulate_grad_batches=window, base_world_size=base_ranks)
    assert batch.scale == pytest.approx(ranks / base_ranks, rel=1e-15)
    assert batch.base_batch_size == loader * window * base_ranks


@given(loader=COUNTS, ranks=COUNTS, window=COUNTS)
def test_shared_loader_batches_keep_the_scale_on_any_number_of_ranks(loader: int, ranks: int, window: int) -> None:
    batch = batch_scale(loader, world_size=ranks, accumulate_grad_batches=window, split_batches=True)
    assert batch == BatchScale(loader * window, loader * window)
    assert batch.scale == 1


@given(factors=st.tuples(COUNTS, COUNTS, COUNTS), base=st.integers(1, 10**6))
def test_scale_depends_on_the_global_batch_alone(factors: tuple[int, int, int], base: int) -> None:
    total = math.prod(factors)
    made = {
        batch_scale(loader, world_size=ranks, accumulate_grad_batches=window, base_batch_size=base)
        for loader, ranks, window in itertools.permutations(factors)
    }
    made.add(batch_scale(total, world_size=factors[1], split_batches=True, base_batch_size=base))
    assert made == {BatchScale(total, base)}
    assert next(iter(made)).scale == total / base


def test_base_batch_wins_over_base_world_size() -> None:
    assert batch_scale(8, world_size=4, base_batch_size=64, base_world_size=2).scale == 0.5


def test_base_world_size_of_a_shared_batch_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"base_world_size=4 says nothing .* split_batches=True.* Give base_batch_size"
    ):
        batch_scale(16, world_size=2, split_batches=True, base_world_size=4)


@pytest.mark.parametrize("name", ["world_size", "accumulate_grad_batches", "base_world_size", "base_batch_size"])
@pytest.mark.parametrize(
    ("value", "error", "kind"),
    [(0, ValueError, ""), (-3, ValueError, ""), (2.5, TypeError, " of type float"), (True, TypeError, " of type bool")],
)
def test_counts_are_checked(name: str, value: object, error: type[Exception], kind: str) -> None:
    with pytest.raises(error, match=rf"{name} must be an integer >= 1, got {value}{kind}\."):
        batch_scale(8, **{"world_size": 2, name: value})


def test_integers_of_a_subclass_are_counts() -> None:
    assert 24 == batch_scale(PositiveInt(12), world_size=PositiveInt(2)).global_batch_size


def gradient_of(rule: str, size: int) -> float:
    """Return the reduced gradient of a batch of equal samples with the gradient 1, each on a rank of its own."""
    pairs = [RULES[rule].share(Place(rank, size, 0, size), 1.0) for rank in range(size)]
    return sum(float(w) for w, _ in pairs) / sum(float(z) for _, z in pairs)


def test_sum_with_linear_scaling_is_counted_twice() -> None:
    """Case 21: sum + linear at scale 2 steps 4 times the base step, and says so; sum alone says nothing."""
    batch = batch_scale(2, world_size=2)
    found = contradictions("sum", "linear", batch)
    assert {"counted_twice"} == found.keys()
    for fragment in ("reduction='sum'", "lr_scaling='linear'", "global batch 4, base batch 2", "4 times the base step"):
        assert fragment in found["counted_twice"]
    assert contradictions("sum", "none", batch) == {}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lr_scaling", SCALINGS)
def test_multipliers_of_a_step_are_those_of_a_toy(rule: str, lr_scaling: str) -> None:
    """The multiplier is the step of equal samples over the base step, computed by the rule itself on one node."""
    for size in (8, 16, 32, 128):
        growth, factor = gradient_of(rule, size) / gradient_of(rule, 16), SCALINGS[lr_scaling].factor(size / 16)
        message = contradictions(rule, lr_scaling, BatchScale(size, 16)).get("counted_twice", "")
        assert bool(message) == (factor != 1 and growth != pytest.approx(1))
        assert not message or f"an SGD step is {growth * factor:.6g} times the base step" in message


@pytest.mark.parametrize(("rule", "twice"), [("mean_of_node_sums", False), ("sum_of_node_means", True), ("sum", True)])
def test_growth_of_node_rules_follows_the_nodes(rule: str, twice: bool) -> None:
    assert ("counted_twice" in contradictions(rule, "linear", BatchScale(32, 16), nodes=2)) == twice


@pytest.mark.parametrize("lr_scaling", [name for name in SCALINGS if name != "none"])
def test_a_scaling_without_a_change_of_batch_is_named(lr_scaling: str) -> None:
    found = contradictions("weighted_mean", lr_scaling, BatchScale(16, 16))
    assert {"unchanged_batch"} == found.keys()
    assert f"lr_scaling={lr_scaling!r} changes nothing" in found["unchanged_batch"]
    assert "global batch 16, base batch 16" in found["unchanged_batch"]


def test_a_base_batch_above_the_global_batch_is_named() -> None:
    found = contradictions("mean", "linear", BatchScale(16, 256))
    assert {"base_above_global"} == found.keys()
    assert "global batch 16, base batch 256" in found["base_above_global"]
    assert "by 0.0625" in found["base_above_global"]


@pytest.mark.parametrize("rule", RULES)
def test_none_contradicts_nothing(rule: str) -> None:
    for total, base in ((16, 16), (64, 16), (16, 64)):
        assert contradictions(rule, "none", BatchScale(total, base), nodes=2) == {}
