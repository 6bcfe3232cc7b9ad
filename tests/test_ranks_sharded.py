"""Sharded models: the gradients of FSDP2, HSDP and FSDP2 with tensor parallelism are those of one process."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from ranks import make_trainer, rank_environment
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader
from toys import AWARE

from lightning_gradavg import GradAvgModelParallelStrategy, GradAvgStrategy
from lightning_gradavg.fabric import GradAvgModelParallelStrategy as OfFabric

pytestmark = AWARE

WEIGHTED = {"reduction": "weighted_mean"}
NAN = float("nan")


def full(tensor: Any) -> Tensor:
    """Return what all shards of a tensor hold; pure tensor parallelism leaves some tensors whole."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def new_net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def fsdp(net: Any, mesh: Any) -> Any:
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(net, mesh=mesh["data_parallel"])


def fsdp_gathered(net: Any, mesh: Any) -> Any:
    """All parameters in the root's group, which shows unsharded ones until its backward."""
    return fully_shard(net, mesh=mesh["data_parallel"], reshard_after_forward=False)


def hsdp(net: Any, mesh: Any) -> Any:
    of_two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=of_two)
    return fully_shard(net, mesh=of_two)


def tp(net: Any, mesh: Any) -> Any:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(net, mesh["tensor_parallel"], plan)


def fsdp_tp(net: Any, mesh: Any) -> Any:
    return fsdp(tp(net, mesh), mesh)


Batch = tuple[Tensor, Tensor, float]


def batches_of(rank: int, count: int, weights: Callable[[int, int], float]) -> list[Batch]:
    torch.manual_seed(100 + rank)
    made = []
    for index in range(count):
        n = weights(rank, index)
        x = torch.randn(3 + rank, 4, dtype=torch.float64)
        made.append((x, x.sum(-1, keepdim=True).sin() * (NAN if n == 0 else 1.0), n))
    return made


def uneven(rank: int, index: int) -> float:
    return 1.0 + 7 * rank + 3 * index


def first_absent(rank: int, index: int) -> float:
    """Weight 0, with a loss that is NaN, on rank 0."""
    return 5.0 + index if rank else 0.0


def all_absent(rank: int, index: int) -> float:
    return 0.0


class Sharded(LightningModule):
    def __init__(self, shard: Callable[..., Any], manual: int = 0, plain: bool = False) -> None:
        super().__init__()
        self.net: Any = new_net()
        self.shard, self.plain = shard, plain
        self.manual, self.automatic_optimization = manual, manual == 0
        self.gradients: list[list[Tensor]] = []

    def configure_model(self) -> None:
        self.net = self.shard(self.net, self.device_mesh)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x, y, n = batch
        loss = (self.net(x) - y).square().mean()
        if self.automatic_optimization:
            return loss if self.plain else {"loss": loss, "weight": n}
        optimizer: Any = self.optimizers()
        last = (batch_idx + 1) % self.manual == 0 or self.trainer.is_last_batch
        with optimizer.toggle_model(sync_grad=last):
            self.manual_backward(loss, weight=n)
        if last:
            self.clip_gradients(optimizer, 0.05, "norm")
            self.keep()
            optimizer.step()
            optimizer.zero_grad()
        return None

    def keep(self) -> None:
        self.gradients.append([full(p.grad) for p in self.net.parameters()])

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, *args: Any, **values: Any
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val, *args, **values)
        self.keep()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def expected(rule: str, ranks: int, count: int, window: int, clip: float | None, weights: Any) -> list[list[Tensor]]:
    """Return the gradients of one process on all ranks' batches."""
    net, found = new_net(), []
    per_rank = [batches_of(rank, count, weights) for rank in range(ranks)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for start in range(0, count, window):
        batches = [batch for one in per_rank for batch in one[start : start + window]]
        total = sum(n for *_, n in batches)
        scale = {"mean": len(batches), "sum": 1, "weighted_mean": total, "normalized_sum": total}[rule] or 1
        optimizer.zero_grad()
        for x, y, n in batches:
            factor = n if rule == "weighted_mean" else float(n > 0)
            if factor:
                ((net(x) - y).square().mean() * factor / scale).backward()
        for p in net.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        found.append([p.grad.clone() for p in net.parameters()])
        optimizer.step()
    return found


def loader_of(batches: list[Batch]) -> Any:
    data: Any = batches
    return DataLoader(data, batch_size=None)


def trained(
    shard: Callable[..., Any],
    tensor: int = 1,
    count: int = 2,
    window: int = 1,
    weights: Any = uneven,
    strategy: Any = None,
    manual: bool = False,
    plain: bool = False,
    **options: Any,
) -> list[list[Tensor]]:
    model = Sharded(shard, manual=window if manual else 0, plain=plain)
    sizes = {"data_parallel_size": dist.get_world_size() // tensor, "tensor_parallel_size": tensor}
    cls = ModelParallelStrategy if strategy == "stock" else GradAvgModelParallelStrategy
    trainer = make_trainer(
        cls(**sizes, **({} if strategy == "stock" else strategy or WEIGHTED)),
        max_epochs=1,
        use_distributed_sampler=False,
        accumulate_grad_batches=1 if manual else window,
        **options,
    )
    trainer.fit(model, loader_of(batches_of(dist.get_rank() // tensor, count, weights)))
    return model.gradients


def gap(found: list[list[Tensor]], wanted: list[list[Tensor]]) -> float:
    assert len(found) == len(wanted) > 0
    pairs = [(f, w) for fs, ws in zip(found, wanted, strict=True) for f, w in zip(fs, ws, strict=True)]
    largest = max(w.abs().max().item() for _, w in pairs) or 1.0
    return (
        max((f - w).abs().max().item() for f, w in pairs) / largest
        if all(f.isfinite().all() for f, _ in pairs)
        else NAN
    )


class Case(NamedTuple):
    shard: Callable[..., Any]
    ranks: int
    tensor: int
    rule: str
    steps: int
    window: int
    clip: float | None
    weights: Callable[[int, int], float]
    manual: bool = False

    def __str__(self) -> str:
        return "-".join(str(getattr(value, "__name__", value)) for value in self)


def trainer_gap(case: Case) -> float:
    """Body."""
    shard, ranks, tensor, rule, count, window, clip, weights, manual = case
    clipping = {} if manual or clip is None else {"gradient_clip_val": clip}
    plain = rule in ("mean", "sum")
    found = trained(shard, tensor, count, window, weights, {"reduction": rule}, manual, plain=plain, **clipping)
    return gap(found, expected(rule, ranks // tensor, count, window, clip, weights))


CASES = [
    Case(fsdp, 2, 1, "weighted_mean", 2, 1, None, uneven),
    Case(fsdp, 2, 1, "weighted_mean", 5, 3, 0.05, uneven),
    Case(fsdp, 2, 1, "weighted_mean", 5, 3, 0.05, uneven, True),
    Case(fsdp_gathered, 2, 1, "weighted_mean", 5, 3, 0.05, uneven),
    Case(fsdp, 2, 1, "weighted_mean", 2, 1, None, first_absent),
    Case(fsdp_gathered, 2, 1, "weighted_mean", 4, 3, None, first_absent),
    Case(fsdp, 2, 1, "weighted_mean", 4, 2, None, all_absent),
    Case(fsdp, 2, 1, "mean", 4, 3, None, uneven),
    Case(fsdp, 2, 1, "sum", 4, 3, None, uneven),
    Case(fsdp, 2, 1, "normalized_sum", 4, 3, None, uneven),
    Case(fsdp, 4, 1, "weighted_mean", 4, 3, 0.05, uneven),
    Case(hsdp, 4, 1, "weighted_mean", 2, 1, None, uneven),
    Case(hsdp, 4, 1, "weighted_mean", 4, 3, 0.05, first_absent),
    Case(fsdp_tp, 4, 2, "weighted_mean", 2, 1, None, first_absent),
    Case(fsdp_tp, 4, 2, "weighted_mean", 4, 3, 0.05, uneven),
    Case(fsdp_tp, 4, 2, "sum", 4, 3, None, uneven),
    Case(fsdp_tp, 4, 2, "normalized_sum", 2, 1, None, uneven),
    Case(tp, 2, 2, "weighted_mean", 4, 3, None, uneven),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_one_process(world, case):
    """After clipping, over windows the last of which is short, with batches of weight 0 whose loss is NaN."""
    found = world(case.ranks).run(trainer_gap, case)
    assert [0.0] * case.ranks == found if case.weights is all_absent else max(found) <= 1e-12


def fabric_gap(shard: Any, tensor: int, count: int, window: int, weights: Any, register: bool = True) -> float:
    """Body."""
    ranks = dist.get_world_size() // tensor
    sizes = {"data_parallel_size": ranks, "tensor_parallel_size": tensor}
    fabric = Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        plugins=[rank_environment()],
        strategy=OfFabric(shard, reduction="weighted_mean", **sizes),
    )
    fabric.launch()
    model = fabric.setup_module(new_net())
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fabric.setup_optimizers(optimizer) if register else optimizer
    found = []
    for index, (x, y, n) in enumerate(batches_of(fabric.global_rank // tensor, count, weights), start=1):
        last = index % window == 0 or index == count
        with fabric.no_backward_sync(model, enabled=not last):
            fabric.backward((model(x) - y).square().mean(), weight=n)
        if last:
            found.append([full(p.grad) for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    return gap(found, expected("weighted_mean", ranks, count, window, None, weights))


@pytest.mark.parametrize(
    ("shard", "ranks", "tensor", "count", "window", "weights"),
    [
        (fsdp, 2, 1, 2, 1, uneven),
        (fsdp_gathered, 2, 1, 4, 3, first_absent),
        (hsdp, 4, 1, 4, 3, uneven),
        (fsdp_tp, 4, 2, 4, 3, first_absent),
    ],
)
def test_gradients_of_fabric(world, shard, ranks, tensor, count, window, weights):
    """The same in a loop of one's own."""
    assert max(world(ranks).run(fabric_gap, shard, tensor, count, window, weights)) <= 1e-12


def mean_has_stock_bits() -> bool:
    """Body."""
    runs = [
        trained(fsdp, 1, 4, 2, uneven, strategy, plain=True, gradient_clip_val=0.05)
        for strategy in ("stock", {"reduction": "mean"})
    ]
    return gap(*runs) == 0 and len(runs[0]) == 2


def test_mean_has_the_bits_of_stock(world):
    """In full windows."""
    assert [True, True] == world(2).run(mean_has_stock_bits)


def uneven_batches() -> float:
    """Body: rank 0 has two batches, and rank 1 has one."""
    model, rank = Sharded(fsdp), dist.get_rank()
    strategy = GradAvgModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, **WEIGHTED)
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(model, loader_of(batches_of(rank, 2 - rank, uneven)))
    return gap(model.gradients[:1], expected("weighted_mean", 2, 1, 1, None, uneven)) + (len(model.gradients) != 2)


def test_a_rank_that_runs_out_of_batches(world):
    """It goes on with weight 0 as long as another has some."""
    assert max(world(2).run(uneven_batches)) <= 1e-12


class Momentum(Sharded):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def steps(epochs: int, resume: str | None = None, save: str | None = None) -> list[list[Tensor]]:
    """Body: on any number of ranks steps of one global batch, in which every sample counts alike."""
    model, ranks = Momentum(fsdp), dist.get_world_size()
    strategy = GradAvgModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1, **WEIGHTED)
    trainer = make_trainer(strategy, max_epochs=epochs, use_distributed_sampler=False)
    whole = torch.cat([x for x, *_ in batches_of(3, 3, uneven)])[dist.get_rank() :: ranks]
    trainer.fit(model, loader_of([(whole, whole.sum(-1, keepdim=True).sin(), len(whole))]), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return model.gradients


def test_a_checkpoint_of_four_ranks_resumes_on_two(world, tmp_path):
    """With the gradients of a run that was never interrupted, up to rounding."""
    path = str(tmp_path / "checkpoint")
    before = world(4).run(steps, 2, save=path)[0]
    for after, whole in zip(world(2).run(steps, 4, path), world(2).run(steps, 4), strict=True):
        assert gap([*before, *after], whole) <= 1e-12


class Refused(Sharded):
    """Set-ups that cannot be served."""

    def __init__(self, kind: str) -> None:
        super().__init__(fsdp_tp if kind == "peers" else fsdp)
        self.kind = kind
        if kind == "outside":
            self.extra = nn.Linear(2, 2).double()
        if kind == "later":
            self.extra = nn.Linear(2, 2).double().requires_grad_(False)

    def configure_model(self) -> None:
        if self.kind == "fsdp1":
            self.net = FullyShardedDataParallel(self.net, device_id=torch.device("cpu"))
            return
        self.stale = [nn.Parameter(p.detach().clone()) for p in self.net.parameters()]
        super().configure_model()
        if self.kind == "divisor":
            self.net[2].set_gradient_divide_factor(1.0)

    def configure_optimizers(self) -> Any:
        parameters = self.stale if self.kind == "stale" else self.parameters()
        return torch.optim.SGD(parameters, lr=0.1)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x, y, n = batch
        if self.kind == "later":
            self.extra.requires_grad_(True)
        if self.kind == "none":
            return None
        if self.kind == "unweighed":
            self.automatic_optimization = False
            self.net(x).square().mean().backward()
        if self.kind == "graphless":
            return {"loss": torch.zeros(()), "weight": 0}
        if self.kind == "peers":
            n = float(dist.get_rank())
        if self.kind == "terms":
            a = self.net(x).square().mean()
            return {"loss": {"a": a, "b": a * NAN}, "weight": {"a": 1, "b": 1 - dist.get_rank()}}
        return super().training_step((x, y, n), batch_idx)


def refused(kind: str) -> None:
    """Body."""
    sizes = {"auto": {}, "peers": {"data_parallel_size": 2, "tensor_parallel_size": 2}}
    of_two = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    strategy = GradAvgModelParallelStrategy(**WEIGHTED, **sizes.get(kind, of_two))
    window = 2 if kind == "stale" else 1
    model = Refused(kind)
    if kind == "auto":
        model.shard = fully_shard_everything
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False, accumulate_grad_batches=window)
    trainer.fit(model, loader_of(batches_of(dist.get_rank() // (1 + (kind == "peers")), 2, uneven)))


def fully_shard_everything(net: Any, mesh: Any) -> Any:
    """On all ranks, whatever the mesh says."""
    return fully_shard(net)


@pytest.mark.parametrize(
    ("kind", "ranks", "error", "text"),
    [
        ("outside", 2, "ValueError", "'extra.weight' trains outside of fully_shard (2 such in all)"),
        ("later", 2, "ValueError", "'extra.weight' trains outside of fully_shard (2 such in all)"),
        ("divisor", 2, "ValueError", "set_gradient_divide_factor(1) has fully_shard divide"),
        ("auto", 2, "ValueError", "averages gradients over 2 ranks, and data_parallel_size is 1"),
        ("fsdp1", 2, "TypeError", "only supports the new FSDP2 APIs"),
        ("stale", 2, "RuntimeError", "cannot be seen in the optimizers' parameter groups"),
        ("none", 2, "RuntimeError", "training_step returned no loss"),
        ("unweighed", 2, "RuntimeError", "by a backward that reduction='weighted_mean' was not told of"),
        ("graphless", 2, "RuntimeError", "a loss without a graph"),
        ("terms", 2, "ValueError", "loss term 'b' is nan with weight 0, beside a term that counts"),
        (
            "peers",
            4,
            "ValueError",
            "ranks of one tensor-parallel group weigh one batch differently (on rank 0: {'weight'",
        ),
    ],
)
def test_refused(world, kind, ranks, error, text):
    """The same error on all ranks, which go on together."""
    for raised in world(ranks).run_expecting_errors(refused, kind):
        assert error == raised.type_name
        assert text in raised.message


def unseen() -> None:
    """Body."""
    fabric_gap(fsdp, 1, 2, 1, uneven, register=False)


def test_an_optimizer_that_fabric_does_not_know(world):
    """Its gradients would keep a wrong scale."""
    for raised in world(2).run_expecting_errors(unseen):
        assert "fabric.setup_optimizers" in raised.message


@pytest.mark.parametrize("make", [GradAvgModelParallelStrategy, lambda **options: OfFabric(fsdp, **options)])
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"split_batches": True}, TypeError, "split_batches=True cannot be served where the model is sharded: it cuts"),
        ({"equivalent_to": "data_parallel"}, TypeError, "needs the whole gradient of a rank"),
        ({"lr_scaling": "linear"}, TypeError, "gradavg plan"),
        ({"nonfinite": "skip_step"}, TypeError, "weight 0"),
        ({"ddp_comm_hook": None}, TypeError, "is an option of DistributedDataParallel"),
        ({"tensor_paralel_size": 2}, TypeError, "Did you mean 'tensor_parallel_size'?"),
        ({"reduction": "mean_of_node_means"}, ValueError, "Use one of 'mean', 'sum', 'weighted_mean'"),
        ({"reduction": "median"}, ValueError, "is not a rule"),
    ],
)
def test_options_that_cannot_be_served(make, options, error, text):
    """Each with its reason."""
    with pytest.raises(error, match=re.escape(text)):
        make(**options)


def test_every_option_of_ours_is_refused_with_its_reason():
    """What the strategy of whole models has, and Lightning's sharded one has not."""
    served = {"reduction", "process_group_backend", "timeout"}
    # Lightning hands these to any strategy, as attributes.
    of_lightning = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
    for name in set(inspect.signature(GradAvgStrategy).parameters) - served - of_lightning:
        with pytest.raises(TypeError, match=f"{name}=1 cannot be served where the model is sharded"):
            GradAvgModelParallelStrategy(**{name: 1})
