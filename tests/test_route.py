"""The way of a bucket: what is asked for, which ranks it goes between, and how many bytes leave a node."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.place import places_on_nodes
from lightning_gradavg.wire.route import Route, WireOptions, bytes_leaving_a_node, route_of


def way(options: WireOptions, nodes: list[int], rank: int = 0, *, nccl: bool = False) -> Route:
    return route_of(options, places_on_nodes(nodes), rank, lays_own_ways=nccl)


def hops(*args: Any, **kwargs: Any) -> list[tuple[tuple[int, ...], int, bool]]:
    return [(hop.ranks, hop.index, hop.narrow) for hop in way(*args, **kwargs).hops]


@pytest.mark.parametrize("nodes", [[0], [0, 0, 0], [0, 1], [0, 0, 1]])
def test_no_wire_type_is_one_all_reduce(nodes):
    """On one node, on nodes of one rank and on uneven ones, gradients in their own type need no other way."""
    assert Route() == way(WireOptions(), nodes)


def test_one_rank_sends_nothing():
    """A rank that is alone has no way, whatever is asked for."""
    assert Route() == way(WireOptions("bfloat16", node_aware=True), [0])


@pytest.mark.parametrize("nccl", [False, True], ids=["gloo", "nccl"])
def test_even_nodes_are_summed_first(nccl):
    """On nodes of two ranks each a bucket goes through the node, and then across to the rank of equal position."""
    for rank, expected in (
        (0, [((0, 2), 0, False), ((0, 1), 0, True)]),
        (1, [((1, 3), 0, False), ((0, 1), 1, True)]),
        (3, [((1, 3), 1, False), ((2, 3), 1, True)]),
    ):
        assert expected == hops(WireOptions("bfloat16"), [0, 1, 0, 1], rank, nccl=nccl)


def test_ranks_between_nodes_are_those_of_equal_position():
    """Also where nodes' ranks lie in each other, a hop counts its members in increasing order, as their group does."""
    ways = [hops(WireOptions(), [0, 1, 1, 0], rank) for rank in range(4)]
    assert [((0, 3), 0, False), ((0, 1), 0, False)] == ways[0]
    assert [((1, 2), 0, False), ((0, 1), 1, False)] == ways[1]
    assert [((1, 2), 1, False), ((2, 3), 0, False)] == ways[2]
    assert [((0, 3), 1, False), ((2, 3), 1, False)] == ways[3]


def test_nccl_lays_its_own_ways_in_full_precision():
    """In the gradients' own type nodes are summed first on gloo; on NCCL, whose all-reduce knows them, if asked for."""
    exact = [((0, 1), 0, False), ((0, 2), 0, False)]
    assert exact == hops(WireOptions(), [0, 0, 1, 1])
    assert [] == hops(WireOptions(), [0, 0, 1, 1], nccl=True)
    assert exact == hops(WireOptions(node_aware=True), [0, 0, 1, 1], nccl=True)
    assert [] == hops(WireOptions(node_aware=False), [0, 0, 1, 1])


@pytest.mark.parametrize("nodes", [[0, 0, 1], [0, 0, 0], [0, 1]])
def test_everything_else_goes_between_all_ranks(nodes):
    """Uneven nodes, one node, or nodes of one rank send in the wire type between all ranks."""
    assert [(tuple(range(len(nodes))), 1, True)] == hops(WireOptions("bfloat16"), nodes, 1)


def test_scope_of_nodes_leaves_one_node_alone():
    """Between nodes only, one node sends in full precision, and nodes of one rank are all there is."""
    assert [] == hops(WireOptions("bfloat16", "nodes"), [0, 0])
    assert [((0, 1), 0, True)] == hops(WireOptions("bfloat16", "nodes"), [0, 1])


@pytest.mark.parametrize(
    ("options", "nodes", "reason"),
    [
        (WireOptions(node_aware=True), [0, 0, 1], "node_aware=True has no effect: the nodes have 2, 1 ranks"),
        (WireOptions(node_aware=True), [0, 0], "node_aware=True has no effect: all ranks are on one node"),
        (WireOptions(node_aware=True), [0, 1], "node_aware=True has no effect: each node has one rank"),
        (WireOptions("bfloat16", "nodes"), [0, 0, 1], "all ranks send in bfloat16: the nodes have 2, 1 ranks"),
        (
            WireOptions("bfloat16", "nodes", node_aware=False),
            [0, 0, 1, 1],
            "all ranks send in bfloat16: node_aware=False",
        ),
        (WireOptions(), [0, 0, 1], None),
        (WireOptions("bfloat16", "nodes"), [0, 1], None),
    ],
)
def test_reason_why_a_wish_has_no_effect(options, nodes, reason):
    """What cannot be done as asked is said."""
    found = way(options, nodes).reason
    assert (reason is None) == (found is None)
    assert reason is None or reason in found


@pytest.mark.parametrize(
    ("nodes", "options", "figures"),
    [
        ([0] * 8 + [1] * 8, WireOptions("float16", node_aware=False), ("8 ranks send 4 times", "sends 1.88 times")),
        (
            [0] * 4 + [1] * 4 + [2] * 2,
            WireOptions("float16"),
            ("4 ranks send 2.4 times", "sends 1.8 times", "of 2, 4 ranks"),
        ),
    ],
    ids=["16 between all", "4, 4 and 2"],
)
def test_wire_type_that_would_send_more_is_refused(nodes, options, figures):
    """Between all ranks, half the bytes may be more than those of one all-reduce: then the figures are an error."""
    with pytest.raises(ValueError, match="wire_dtype='float16' would have a node of") as raised:
        way(options, nodes)
    assert all(figure in str(raised.value) for figure in figures)
    assert "Leave wire_dtype out; or give all nodes equally many ranks" in str(raised.value)


def test_wire_type_that_sends_less_is_not_refused():
    """Nodes of 3 ranks and of 1 send 0.75 and 0.75 times the gradients, where the ring sends 1.5 times."""
    assert [((0, 1, 2, 3), 0, True)] == hops(WireOptions("bfloat16"), [0, 0, 0, 1])


def test_parts_that_a_rank_holds():
    """After a hop, ranks that it does not join hold different parts, and after the last one each a part of its own."""
    routes = [way(WireOptions(), [0, 1, 0, 1], rank) for rank in range(4)]
    assert [4] * 4 == [route.parts for route in routes]
    assert [slice(0, 4)] * 4 == [route.held(0) for route in routes]
    assert [slice(0, 2), slice(0, 2), slice(2, 4), slice(2, 4)] == [route.held(1) for route in routes]
    assert [slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 4)] == [route.held(2) for route in routes]


@pytest.mark.parametrize(
    ("options", "nodes", "sent"),
    [
        # 2 (W - 1) / W of 4 bytes; nothing on one node.
        (WireOptions(), [0, 1], 2 * 1 / 2 * 4),
        (WireOptions(), [0, 0], 0.0),
        # 2 (M - 1) / M of 4 bytes, and half of them in half the bytes.
        (WireOptions(), [0, 0, 1, 1], 2 * 1 / 2 * 4),
        (WireOptions("bfloat16"), [0, 0, 1, 1], 1 / 2 * 4),
        (WireOptions("float16"), [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], 3 / 4 * 4),
        # 2 (W - L) / W of L times 2 bytes.
        (WireOptions("float16", node_aware=False), [0, 0, 1, 1], 2 * 2 / 4 * 2 * 2),
    ],
    ids=str,
)
def test_bytes_that_leave_a_node(options, nodes, sent):
    """The figures of the module's table, for a bucket of 1000 numbers."""
    assert 1000 * sent == pytest.approx(bytes_leaving_a_node(way(options, nodes), places_on_nodes(nodes), 1000, 4))


def any_hook(state: Any, bucket: Any) -> Any:
    raise AssertionError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wire_dtype": "int8"}, r"wire_dtype='int8' is not one of 'bfloat16', 'float16'\. Choose one"),
        ({"wire_scope": "rack", "wire_dtype": "float16"}, r"wire_scope='rack' is not one of 'all', 'nodes'"),
        ({"wire_scope": "nodes"}, r"wire_scope='nodes' says where wire_dtype applies, which is not set"),
        ({"wire_dtype": "float16", "ddp_comm_hook": any_hook}, r"wire_dtype='float16' .* ddp_comm_hook"),
        ({"wire_dtype": "bfloat16", "ddp_comm_wrapper": any_hook}, r"wire_dtype='bfloat16' .* ddp_comm_wrapper"),
        ({"node_aware": True, "ddp_comm_wrapper": any_hook}, r"node_aware=True .* ddp_comm_wrapper"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    """Case 30: an unknown value is quoted with those that are known, and two that contradict each other are named."""
    with pytest.raises(ValueError, match=message):
        GradAvgStrategy(**options)
