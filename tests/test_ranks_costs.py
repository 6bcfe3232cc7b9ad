"""The links between ranks, measured by live ranks; what they measure is not looked at."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from lightning_gradavg.costs.links import BYTES_PER_NUMBER, Links
from lightning_gradavg.costs.measure import measure_links, neighbors
from lightning_gradavg.place import places_on_nodes


def measured(nodes, repeats=1):
    return measure_links(places_on_nodes(nodes), torch.device("cpu"), repeats=repeats)


@pytest.mark.parametrize(
    ("nodes", "between"),
    [((0, 0), False), ((0, 1), True), ((0, 0, 1), True), ((0, 0, 1, 1), True)],
)
def test_links_are_measured(world, nodes, between):
    """All ranks return the same figures, above 0: of each wire type, and of links between nodes where there are two."""
    first, *others = world(len(nodes)).run(measured, nodes)
    assert all(first == other for other in others)
    assert isinstance(first, Links)
    assert between == (first.between is not None)
    for link in (first.within, first.between) if between else (first.within,):
        assert link.latency >= 0
        assert 0 < link.bandwidth < math.inf
    assert list(BYTES_PER_NUMBER) == list(first.stages)
    for stages in first.stages.values():
        assert min(stages.encode, stages.decode_sum, stages.decode) > 0
    assert first.sum > 0
    assert (len(nodes), len(set(nodes)), "gloo") == tuple(
        first.about[name] for name in ("world_size", "nodes", "backend")
    )


def test_ranks_stay_in_step(world):
    """After the measurement the process group is as before, also with ranks that were idle."""

    assert [6.0] * 3 == world(3).run(measured_then_summed)


def measured_then_summed():
    measured((0, 0, 1))
    total = torch.tensor(1.0 + dist.get_rank())
    dist.all_reduce(total)
    return total.item()


@pytest.mark.parametrize(
    ("nodes", "between", "expected", "sharing"),
    [
        ((0, 0, 0), False, [(1, 2), (2, 0), (0, 1)], 1),
        ((0, 0, 0), True, [None, None, None], 0),
        ((0, 1), False, [None, None], 0),
        ((0, 1), True, [(1, 1), (0, 0)], 1),
        ((0, 0, 1, 1), False, [(1, 1), (0, 0), (3, 3), (2, 2)], 1),
        ((0, 0, 1, 1), True, [(2, 2), (3, 3), (0, 0), (1, 1)], 2),
        # The third rank of node 0 has no partner, and the order of nodes is not that of ranks.
        ((0, 1, 0, 1, 0), True, [(1, 1), (0, 0), (3, 3), (2, 2), None], 2),
    ],
)
def test_who_sends_to_whom(nodes, between, expected, sharing):
    """Within nodes a ring per node; between nodes a ring per position that every node has, all over the same links."""
    places = places_on_nodes(nodes)
    found = [neighbors(places, rank, between=between) for rank in range(len(nodes))]
    assert [(peers, sharing) for peers in expected] == found


@pytest.mark.parametrize(
    ("nodes", "repeats", "message"),
    [((0, 0), 0, "repeats must be an integer >= 1, got 0"), ((0,), 1, "between two ranks or more, and there is 1")],
)
def test_nothing_to_measure(nodes, repeats, message):
    """No repeats and no second rank are errors, before anything is sent."""
    with pytest.raises(ValueError, match=message):
        measured(nodes, repeats)
