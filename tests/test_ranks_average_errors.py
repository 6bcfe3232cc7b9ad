"""`average_gradients` used wrongly: one error on all ranks, no rank left waiting, no gradient changed."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from averaging import approx, reduce_given, same_everywhere
from ranks import Raised
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg.place import Place
from lightning_gradavg.reduction.average import average_gradients
from lightning_gradavg.rules import Share


def failing_rule(place: Place, weight: Any) -> Share:
    raise KeyError("no such place")


def reduce_in_groups(members: Sequence[Sequence[int]], outsider: bool) -> list[float]:
    """Body: every rank reduces in the first group that it is a member of, or in the first one at all if `outsider`."""
    groups = [dist.new_group(list(ranks)) for ranks in members]
    try:
        mine = 0 if outsider else next(index for index, ranks in enumerate(members) if dist.get_rank() in ranks)
        w = nn.Parameter(torch.zeros(()))
        w.grad = torch.tensor(float(dist.get_rank() + 1))
        average_gradients([w], reduction="weighted_mean", weight=dist.get_rank() + 1, group=groups[mine])
        assert w.grad is not None
        return [w.grad.item()]
    finally:
        for group in groups:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


def test_groups_smaller_than_the_world(world):
    """A group reduces over its members alone; a group of one rank communicates with nobody."""
    results = world(4).run(reduce_in_groups, [[1, 3], [0], [2]], False)
    assert [[1.0], approx([20 / 6], 1e-6), [3.0], approx([20 / 6], 1e-6)] == results


def test_a_rank_outside_the_group_is_told(world):
    """A rank that is not a member of the group gets an error at once, and the members reduce without it."""
    first, second, outsider = world(3).run_expecting_errors(reduce_in_groups, [[0, 1]], True)
    assert approx([5 / 3], 1e-6) == first
    assert first == second
    assert isinstance(outsider, Raised)
    assert "global rank 2 is not a member of the group" in outsider.message


class Misused:
    """The arguments of a call that only fails on some ranks, and the gradients that it must leave alone."""

    def __init__(self, rank: int) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, rank + 1.0)
        self.source: Any = self.model
        self.options: dict[str, Any] = {"reduction": "weighted_mean", "weight": rank + 1}


def set_weight(value: Any) -> Callable[[Misused], None]:
    return lambda call: call.options.update(weight=value)


def set_reduction(value: Any) -> Callable[[Misused], None]:
    return lambda call: call.options.update(reduction=value)


def set_source(make: Callable[[nn.Sequential], Any]) -> Callable[[Misused], None]:
    def change(call: Misused) -> None:
        call.source = make(call.model)

    return change


def with_gradient(make: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> Callable[[nn.Sequential], Any]:
    """Return a source with one more parameter, whose gradient is `make` of zeros."""

    def source(model: nn.Sequential) -> list[Tensor]:
        extra = nn.Parameter(torch.zeros(2, 2, dtype=dtype))
        extra.grad = make(torch.zeros(2, 2, dtype=dtype))
        return [*model.parameters(), extra]

    return source


def parallel(model: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(model)


def dtensor(model: nn.Sequential) -> list[Tensor]:
    from torch.distributed.tensor import DeviceMesh, distribute_tensor  # noqa: PLC0415  # slow to import

    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    return [nn.Parameter(distribute_tensor(torch.zeros(2), mesh))]


def lazy(model: nn.Sequential) -> nn.Module:
    return nn.LazyLinear(2)


def compressed_rows(model: nn.Sequential) -> list[Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the layout beta
        parameter = nn.Parameter(torch.eye(2).to_sparse_csr())
        parameter.grad = torch.eye(2).to_sparse_csr()
    return [parameter]


def broken_generator(model: nn.Sequential) -> Iterator[Tensor]:
    yield from model.parameters()
    raise RuntimeError("the generator broke")


# Name: the ranks of three that it concerns, what it does there, and what all ranks are told.
EVERYWHERE = (0, 1, 2)
MISUSES: dict[str, tuple[Sequence[int], Callable[[Misused], None], str]] = {
    "negative weight": ([1], set_weight(-1), r"on rank 1: weight -1\.0 is not a finite number >= 0"),
    "NaN weight": ([1], set_weight(torch.tensor(torch.nan)), r"on rank 1: weight nan is not a finite"),
    "infinite weight": ([0, 2], set_weight(np.inf), r"on ranks 0, 2: weight inf is not a finite"),
    "weight of text": ([2], set_weight("3"), r"on rank 2: a weight is one number, got '3' of type str"),
    "weight of a batch": ([2], set_weight(torch.ones(3)), r"on rank 2: a weight is one number.*shape \(3,\)"),
    "huge weight": ([2], set_weight(10**400), r"on rank 2: .*too large"),
    "two problems": (
        EVERYWHERE,
        lambda call: set_weight(-call.options["weight"])(call),
        r"on rank 0: weight -1\.0.*; on rank 2",
    ),
    "weight on some ranks": (
        [0, 2],
        set_weight(None),
        r"weight= was given on rank 1 but not on ranks 0, 2: pass it on all",
    ),
    "no weight": (
        EVERYWHERE,
        set_weight(None),
        r"reduction='weighted_mean', sum\(n \* g\) / sum\(n\), needs a weight: pass",
    ),
    "weights too large": (EVERYWHERE, set_weight(1.7e308), r"the normalizer inf\. Scale the weights"),
    "other reduction": (
        [1],
        set_reduction("mean"),
        r"reduction= differs.*'weighted_mean'.* on ranks 0, 2; 'mean'.* on rank 1",
    ),
    "unknown reduction": (
        [1],
        set_reduction("median"),
        r"on rank 1: reduction='median' is not a rule\. Use one of 'mean'",
    ),
    "reduction of no type": (EVERYWHERE, set_reduction(3), r"on ranks 0, 1, 2: reduction must be one of"),
    "failing rule": (
        EVERYWHERE,
        set_reduction(failing_rule),
        r"the reduction rule 'failing_rule' failed on.*no such place",
    ),
    "fewer parameters": (
        [2],
        set_source(lambda model: model[0]),
        r"different numbers of parameters: 4 parameters on ranks 0, 1; 2 parameters on rank 2",
    ),
    "no parameters": ([1], set_source(lambda model: []), r"4 parameters on ranks 0, 2; 0 parameters on rank 1"),
    "another shape": (
        [1],
        set_source(lambda model: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))),
        r"'1\.weight' of shape \(1, 2\), torch.float32 on cpu on ranks 0, 2;.*'1\.weight' of shape \(3, 2\).*on rank 1",
    ),
    "another dtype": (
        [0],
        set_source(lambda model: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double()),
        r"torch\.float64",
    ),
    "another order": (
        [0],
        set_source(lambda model: reversed(list(model.parameters()))),
        r"parameter 0 of shape \(1,\).* on rank 0",
    ),
    "sparse on one rank": (
        EVERYWHERE,
        set_source(with_gradient(lambda zeros: zeros.to_sparse() if dist.get_rank() == 1 else zeros)),
        r"4 differs between ranks: dense, torch\.float32 on ranks 0, 2; sparse with 2 .*, torch\.float32 on rank 1",
    ),
    "compressed rows": (
        [1],
        set_source(compressed_rows),
        r"on rank 1: the gradient of parameter 0 is torch\.sparse_csr; only torch\.strided and torch\.sparse_coo",
    ),
    "DDP module": (
        EVERYWHERE,
        set_source(parallel),
        r"on ranks 0, 1, 2: the module is a DistributedDataParallel, which has reduced",
    ),
    "DDP submodule": (
        EVERYWHERE,
        set_source(lambda model: nn.ModuleDict({"generator": parallel(model)})),
        r"the submodule 'generator' is a DistributedDataParallel",
    ),
    "DTensor": (EVERYWHERE, set_source(dtensor), r"parameter 0 is a DTensor, whose placements say how it is reduced"),
    "lazy module": (
        [1],
        set_source(lazy),
        r"on rank 1: parameter 'weight' has no shape yet: run the lazy module's first forward",
    ),
    "result": ([2], set_source(lambda model: [model[0].weight * 2]), r"on rank 2: parameter 0 is no leaf"),
    "named parameters": (
        [0],
        set_source(lambda model: model.named_parameters()),
        r"on rank 0: parameter 0 is \('0\.weight'",
    ),
    "number": ([0], set_source(lambda model: 5), r"on rank 0: pass a module or its parameters; got 5 of type int"),
    "broken generator": ([0], set_source(broken_generator), r"on rank 0: RuntimeError: the generator broke"),
}


def misuse(name: str) -> None:
    """Body: call with the misuse, and check that the gradients are what they were."""
    ranks, change, _ = MISUSES[name]
    call = Misused(dist.get_rank())
    if dist.get_rank() in ranks:
        change(call)
    try:
        average_gradients(call.source, **call.options)
    finally:
        for parameter in call.model.parameters():
            assert parameter.grad is not None
            assert torch.equal(torch.full_like(parameter, dist.get_rank() + 1.0), parameter.grad)


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_raises_the_same_error_on_all_ranks(world, name):
    """Case 32: what one rank does wrong is the same ValueError on all ranks, and no gradient has changed."""
    errors = world(3).run_expecting_errors(misuse, name)
    assert [errors[0]] * 3 == errors
    assert errors[0].type_name == "ValueError"
    assert re.search(MISUSES[name][2], errors[0].message), errors[0].message


def reduce_nothing(**options: Any) -> list[Tensor]:
    """Body: a call without parameters."""
    average_gradients([], **options)
    return []


def test_no_parameters(world):
    """Without parameters nothing is reduced, and a bad weight is an error all the same."""
    assert [[], []] == world(2).run(reduce_nothing)
    errors = world(2).run_expecting_errors(reduce_nothing, reduction="weighted_mean", weight=-2)
    assert [Raised("ValueError", errors[0].message)] * 2 == errors
    assert "on ranks 0, 1: weight -2.0 is not a finite number" in errors[0].message


def reduce_on_unknown_nodes(reduction: str) -> list[Tensor | None]:
    """Body: an MPI launcher's variables, which tell that there are more nodes and not which."""
    os.environ.update({"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "2"})
    return reduce_given([[torch.ones(2)], [torch.ones(2)]], reduction=reduction)


def test_unknown_nodes(world):
    """Where the launcher does not tell the node, rules without nodes work and those with nodes are refused."""
    (mean,) = same_everywhere(world(2).run(reduce_on_unknown_nodes, "mean"), 2)
    assert torch.equal(torch.ones(2), mean)
    errors = world(2).run_expecting_errors(reduce_on_unknown_nodes, "mean_of_node_sums")
    assert [errors[0]] * 2 == errors
    assert "tells the node on ranks 0, 1. Set NODE_RANK" in errors[0].message
