"""Data-parallel groups of some of the ranks, as beside model parallelism: each trains as a run of its own would."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.exceptions import SIGTERMException
from ranks import Raised, make_trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader
from toys import Toy, loader, train

from lightning_gradavg import GradAvgMonitor, GradAvgStrategy, average_gradients, gather
from lightning_gradavg.rules import RULES

Members = Sequence[Sequence[int]]

# Ranks of W=4, group by group.
GROUPS: dict[str, Members] = {"neighbours": [[0, 1], [2, 3]], "columns": [[0, 2], [1, 3]], "mesh": [[0, 2], [1, 3]]}

pytestmark = [
    pytest.mark.filterwarnings("ignore:node_aware=True has no effect:UserWarning"),
    pytest.mark.filterwarnings('ignore:a "weight" was given:UserWarning'),
    # Lightning 2.6 calls it.
    pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated:FutureWarning"),
]


@cache
def mesh_of_four() -> DeviceMesh:
    """Return the mesh of a rank, once and for all: torch keeps what it knows of a mesh when its groups are gone."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@contextmanager
def group_options(kind: str | None, members: Members | None = None) -> Iterator[dict[str, Any]]:
    """Yield what tells the strategy its group: a process group, a dimension of a mesh, or nothing for all ranks."""
    if kind is None:
        yield {}
        return
    if kind == "mesh":
        yield {"device_mesh": mesh_of_four()["dp"]}
        return
    made = [dist.new_group(list(ranks)) for ranks in members or GROUPS[kind]]
    (mine,) = (group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER)
    try:
        yield {"process_group": mine}
    finally:
        dist.destroy_process_group(mine)


def in_groups_and_alone(world: Any, kind: str, body: Callable[..., Any], *args: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what each rank of four returned, and what a rank of its place returned in a run of its group alone.

    The body gets the kind of the groups, or None, and the ranks whose places in the run of four it has.
    """
    seen = world(4).run(body, kind, [0, 1, 2, 3], *args)
    assert 4 == len(seen)
    for ranks in GROUPS[kind]:
        alone = world(2).run(body, None, ranks, *args)
        yield from ((seen[rank], one) for rank, one in zip(ranks, alone, strict=True))


def assert_same(seen: Any, alone: Any) -> None:
    assert type(seen) is type(alone)
    if isinstance(alone, Tensor):
        assert torch.equal(alone, seen)
    elif isinstance(alone, dict):
        assert list(alone) == list(seen)
        for key, value in alone.items():
            assert_same(seen[key], value)
    elif isinstance(alone, (list, tuple)):
        assert len(alone) == len(seen)
        for mine, other in zip(seen, alone, strict=True):
            assert_same(mine, other)
    else:
        assert alone == seen


STEPS = 3


def train_rules(kind: str | None, ranks: Sequence[int], rules: Sequence[str]) -> list[Any]:
    """Body: three steps under each rule, on a batch of each rank's own; return the gradients and the weights."""
    seen = []
    with group_options(kind) as group:
        place = ranks[dist.get_rank()]
        draw = torch.Generator().manual_seed(place)
        batches = [torch.randn(place + 1, 30, 11, generator=draw).tolist() for _ in range(STEPS)]
        # Two nodes of two ranks in the run of four; a run alone counts its nodes from 0.
        nodes = [rank // 2 for rank in ranks]
        nodes = [node - min(nodes) for node in nodes]
        for rule in rules:
            strategy = {"reduction": rule, **group}
            toy = {"start": torch.ones(30, 11).tolist(), "dtype": torch.float32}
            one = train({dist.get_rank(): batches}, toy, strategy, nodes)
            assert STEPS == len(one.gradients)
            seen.append((rule, one.gradients, one.weights))
    return seen


@pytest.mark.parametrize("kind", GROUPS)
def test_every_rule(world, kind):
    """Under every rule a group of two of four ranks has the bits of a run of those two alone, however the groups lie,
    and whether they are process groups or a dimension of a mesh."""
    for seen, alone in in_groups_and_alone(world, kind, train_rules, tuple(RULES)):
        assert_same(seen, alone)


def test_no_groups_of_its_own(world):
    """What needs process groups of its own cannot be had beside a group of some ranks, and all ranks say so."""
    errors = world(4).run_expecting_errors(train_narrow, "neighbours")
    assert ["ValueError"] * 4 == [error.type_name for error in errors]
    expected = "wire_dtype='bfloat16' needs process groups of its own"
    assert all(error.message.startswith(expected) and "Leave one of them out" in error.message for error in errors)


def train_narrow(kind: str) -> None:
    """Body: a fit that sends gradients in a narrow type."""
    with group_options(kind) as group:
        train({dist.get_rank(): [[1.0]]}, {"dtype": torch.float32}, {"wire_dtype": "bfloat16", **group})


def reduce_rows(kind: str | None, ranks: Sequence[int]) -> Tensor:
    """Body: a loss over all rows of the group, and its gradient in a plain loop."""
    with group_options(kind) as group:
        mine = group["device_mesh"].get_group() if "device_mesh" in group else group.get("process_group")
        place = ranks[dist.get_rank()]
        w = nn.Parameter(torch.ones(3, dtype=torch.float64))
        rows = torch.randn(place + 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(place)) * w
        everyone = gather(rows, group=mine)
        (rows @ everyone.t()).exp().sum().backward()
        average_gradients([w], reduction="normalized_sum", weight=len(rows), group=mine)
        assert w.grad is not None
        return w.grad


@pytest.mark.parametrize("kind", GROUPS)
def test_gather_and_average_gradients(world, kind):
    """A contrastive loss over the rows of a group, reduced over the group, has the gradient of a run of it alone."""
    for seen, alone in in_groups_and_alone(world, kind, reduce_rows):
        assert_same(seen, alone)


def observe(kind: str | None, ranks: Sequence[int], reduction: str) -> dict[str, Any]:
    """Body: two monitored steps, with the parameters compared; return what the monitor logs, and a report."""
    with group_options(kind) as group:
        strategy = GradAvgStrategy(reduction=reduction, **group)
        monitor = GradAvgMonitor(1, noise_scale=True, check_parameters_every_n_steps=1)
        trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False, callbacks=[monitor])
        place = ranks[dist.get_rank()]
        trainer.fit(Toy(), loader([[1.0 + place, 2.0], [3.0 + place]]))
        report = strategy.report()
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        timed = ("communication", "samples_per_second")
        untimed = {name: value for name, value in metrics.items() if not any(one in name for one in timed)}
        return {"metrics": untimed, "report": (report.world_size, report.loss, report.local_gradient_norms)}


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
@pytest.mark.parametrize("kind", GROUPS)
def test_monitor(world, kind, reduction):
    """What the monitor logs is that of the group, as in a run of it alone; groups that hold other parameters have not
    drifted apart."""
    for seen, alone in in_groups_and_alone(world, kind, observe, reduction):
        assert_same(seen, alone)
        assert 2 == seen["report"][0]


def train_monitored(members: Members, batches: Sequence[Any]) -> Any:
    """Body: three monitored steps on the batches of this rank."""
    with group_options("given", members) as group:
        trainer = make_trainer(
            GradAvgStrategy(**group), max_epochs=1, use_distributed_sampler=False, callbacks=[GradAvgMonitor(1)]
        )
        with pytest.MonkeyPatch.context() as patch:
            warned: list[str] = []
            patch.setattr("warnings.warn", lambda message, *args, **rest: warned.append(str(message)))
            trainer.fit(Toy(), loader(batches[dist.get_rank()]))
        return dist.get_rank(), [text for text in warned if "all ranks read the same" in text]


def test_monitor_compares_the_data_of_a_group(world):
    """The first rank of a group whose ranks read the same batches is told so, and a group of one rank is not: it reads
    what it alone reads."""
    same = [[1.0], [2.0], [3.0]]
    seen = dict(world(4).run(train_monitored, [[0], [1, 3], [2]], [same, same, same, same]))
    assert [0, 1, 0, 0] == [len(seen[rank]) for rank in range(4)]


class Signalled(Toy):
    """Sends SIGTERM to its own process in the third step of rank 3."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if dist.get_rank() == 3 and self.trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def train_signalled(kind: str, reduction: str) -> tuple[int, bool]:
    with group_options(kind) as group:
        strategy = GradAvgStrategy(reduction=reduction, **group)
        trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False)
        try:
            trainer.fit(Signalled(), loader([[1.0 + dist.get_rank()]] * 8))
        except SIGTERMException:
            return trainer.global_step, True
        return trainer.global_step, False


@pytest.mark.skipif(
    not hasattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor"), reason="this lightning has no agreement on SIGTERM"
)
@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
def test_termination_is_of_all_ranks(world, reduction):
    """A SIGTERM to a rank of one group ends all ranks of the run at the same step."""
    steps = world(4).run(train_signalled, "columns", reduction)
    assert [(4, True)] * 4 == steps


class Sharded(LightningModule):
    """A network whose layers are cut over the second dimension of a mesh, where there is one."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        if mesh is not None:
            # Slow to import.
            from torch.distributed.tensor.parallel import (  # noqa: PLC0415
                ColwiseParallel,
                RowwiseParallel,
                parallelize_module,
            )

            parallelize_module(self.net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.net(batch).square().mean(), "weight": len(batch)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_sharded(sharded: bool, strategy: dict[str, Any]) -> Any:
    """Body: return the weights that were trained on what the user deals to two data-parallel ranks."""
    mesh = mesh_of_four() if sharded else None
    module = Sharded(mesh)
    options = {} if mesh is None else {"device_mesh": mesh["dp"]}
    part = dist.get_rank() if mesh is None else mesh.get_local_rank("dp")
    trainer = make_trainer(GradAvgStrategy(**strategy, **options), max_epochs=2, use_distributed_sampler=False)
    data: Any = torch.randn(11, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(data[part::2][:5], batch_size=3))
    return [one.detach() for one in trainer.optimizers[0].param_groups[0]["params"]]


# Torch cuts a weight into views, and remarks that their gradients lie otherwise in memory.
@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides:UserWarning")
@pytest.mark.parametrize("strategy", [{}, {"reduction": "weighted_mean"}], ids=["mean", "weighted_mean"])
def test_beside_tensor_parallelism(world, strategy):
    """Two data-parallel ranks, each of two tensor-parallel ones that hold half of every layer, train as two ranks that
    hold all of it."""
    weights = world(2).run(train_sharded, False, strategy)[0]
    assert 4 == len(weights)
    for rank, parts in enumerate(world(4).run(train_sharded, True, strategy)):
        # The first layer is cut by its outputs, the second by its inputs; its bias is whole.
        for part, whole, dimension in zip(parts, weights, (0, 0, 1, None), strict=True):
            expected = whole if dimension is None else whole.chunk(2, dimension)[rank % 2]
            torch.testing.assert_close(part, expected, rtol=1e-12, atol=1e-12)


def construct_with(kind: str) -> None:
    """Body: options that do not say over which ranks to reduce."""
    mesh = mesh_of_four()
    options: dict[str, Any] = {
        "two dimensions": {"device_mesh": mesh},
        "no names": {"device_mesh": DeviceMesh("cpu", [[0, 1], [2, 3]])},
        "both": {"device_mesh": mesh["dp"], "process_group": dist.group.WORLD},
    }
    GradAvgStrategy(**options[kind])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "two dimensions",
            "device_mesh has the dimensions 'dp', 'tp', and gradients are reduced over one. Pass that one, as in dev",
        ),
        ("no names", "device_mesh has 2 dimensions, and gradients are reduced over one."),
        ("both", "process_group and device_mesh both say over which ranks gradients are reduced. Leave one of them"),
    ],
)
def test_options_that_do_not_say_over_which_ranks(world, kind, message):
    """A mesh of two dimensions, or a mesh next to a group, is an error that says what to pass."""
    errors = world(4).run_expecting_errors(construct_with, kind)
    assert [Raised("ValueError", errors[0].message)] * 4 == errors
    assert errors[0].message.startswith(message)


def train_in(kind: str) -> None:
    """Body: groups that do not fit together."""
    rank = dist.get_rank()
    pair, triple, last = (dist.new_group(ranks) for ranks in ([0, 1], [0, 1, 2], [3]))
    try:
        if kind == "outside":
            options = {"process_group": pair}
        elif kind == "outside of a mesh":
            options = {"device_mesh": DeviceMesh("cpu", [0, 1])}
        else:
            options = {"process_group": last if rank == 3 else pair if rank == 0 else triple}
        trainer = make_trainer(GradAvgStrategy(**options), max_epochs=1)
        data: Any = torch.arange(12, dtype=torch.float64)
        trainer.fit(Toy(), DataLoader(data, batch_size=2))
    finally:
        for group in (pair, triple, last):
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("outside", "process_group does not contain the process on ranks 2, 3. Pass every rank of the run the group"),
        ("outside of a mesh", "device_mesh does not contain the process on ranks 2, 3."),
        (
            "differing",
            "process_group differs within a group: rank 0 is to reduce over the ranks [0, 1], and rank 1 over [0, 1",
        ),
    ],
)
def test_groups_that_do_not_fit(world, kind, message):
    """Ranks without a group, and members that do not agree on it, are the same error on all ranks of the run, and not a
    run that hangs."""
    errors = world(4).run_expecting_errors(train_in, kind)
    assert [Raised("ValueError", errors[0].message)] * 4 == errors
    assert errors[0].message.startswith(message)
