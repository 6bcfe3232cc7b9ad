"""Sharded models: the gradients of FSDP2, HSDP and FSDP2 with tensor parallelism are those of one process.

Rules, windows and faults on two ranks of FSDP2 are rows of `cases.py`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from loops import OfFabric
from ranks import make_trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader
from toys import AWARE, WEIGHTED

from lightning_gradavg import GradAvgModelParallelStrategy
from lightning_gradavg.fabric import GradAvgModelParallelStrategy as OfFabricSharded
from lightning_gradavg.verify.run import resolve_strategy

pytestmark = AWARE

NAN = float("nan")
ROOT = Path(__file__).parent.parent
Batch = tuple[Tensor, Tensor, float]
Weights = Callable[[int, int], float]
Grads = list[list[Tensor]]


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
    return fsdp(net, {"data_parallel": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))})


def tp(net: Any, mesh: Any) -> Any:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(net, mesh["tensor_parallel"], plan)


def fsdp_tp(net: Any, mesh: Any) -> Any:
    return fsdp(tp(net, mesh), mesh)


def on_all_ranks(net: Any, mesh: Any) -> Any:
    """Whatever the mesh says."""
    return fully_shard(net)


def uneven(rank: int, index: int) -> float:
    return 1.0 + 7 * rank + 3 * index


def first_absent(rank: int, index: int) -> float:
    """Weight 0, with a loss that is NaN, on rank 0."""
    return 5.0 + index if rank else 0.0


def absent(rank: int, index: int) -> float:
    return 0.0


def batches_of(rank: int, count: int, weights: Weights) -> list[Batch]:
    torch.manual_seed(100 + rank)
    made = []
    for n in (weights(rank, index) for index in range(count)):
        x = torch.randn(3 + rank, 4, dtype=torch.float64)
        made.append((x, x.sum(-1, keepdim=True).sin() * (NAN if n == 0 else 1.0), n))
    return made


def loss_of(net: Any, batch: Batch) -> Tensor:
    return (net(batch[0]) - batch[1]).square().mean()


def optimizer_of(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Sharded(LightningModule):
    """`kind` names a set-up that cannot be served."""

    def __init__(self, shard: Callable[..., Any], manual: int = 0, weighs: bool = True, kind: str = "") -> None:
        super().__init__()
        self.net: Any = new_net()
        self.shard, self.weighs, self.manual, self.kind = shard, weighs, manual, kind
        self.automatic_optimization = manual == 0 and kind != "unweighed"
        self.gradients: Grads = []
        if kind in ("outside", "later"):
            self.extra = nn.Linear(2, 2).double().requires_grad_(kind == "outside")

    def configure_model(self) -> None:
        self.stale = [nn.Parameter(p.detach().clone()) for p in self.net.parameters()]
        self.net = self.shard(self.net, self.device_mesh)
        if self.kind == "divisor":
            self.net[2].set_gradient_divide_factor(1.0)

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.stale if self.kind == "stale" else self.parameters())

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        if self.kind == "later":
            self.extra.requires_grad_(True)
        loss, n = loss_of(self.net, batch), batch[2]
        if self.kind == "unweighed":
            loss.backward()
        if self.automatic_optimization:
            special: dict[str, Any] = {
                "none": None,
                "graphless": {"loss": torch.zeros(()), "weight": 0},
                "term": {"loss": {"a": loss, "b": loss * NAN}, "weight": {"a": 1, "b": 0}},
                "peers": {"loss": loss, "weight": dist.get_rank()},
            }
            return special.get(self.kind, {"loss": loss, "weight": n} if self.weighs else loss)
        optimizer: Any = self.optimizers()
        last = (batch_idx + 1) % self.manual == 0 or self.trainer.is_last_batch
        with optimizer.toggle_model(sync_grad=last):
            self.manual_backward(loss, weight=n)
        if last:
            self.configure_gradient_clipping(optimizer, 0.05, "norm")
            optimizer.step()
            optimizer.zero_grad()
        return None

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **values: Any) -> None:
        self.clip_gradients(optimizer, *args, **values)
        self.gradients.append([full(p.grad) for p in self.net.parameters()])


class Case(NamedTuple):
    shard: Callable[..., Any]
    ranks: int
    tensor: int = 1
    rule: str = "weighted_mean"
    length: int = 5
    window: int = 3
    clip: float | None = 0.05
    weights: Weights = uneven
    manual: bool = False

    def __str__(self) -> str:
        return "-".join(str(getattr(value, "__name__", value)) for value in self)

    @property
    def sizes(self) -> Any:
        return {"data_parallel_size": self.ranks // self.tensor, "tensor_parallel_size": self.tensor}

    def batches(self) -> Any:
        """Return this rank's batches."""
        return batches_of(dist.get_rank() // self.tensor, self.length, self.weights)


def expected(case: Case) -> Grads:
    """Return the gradients of one process on all ranks' batches."""
    net, found = new_net(), []
    per_rank = [batches_of(rank, case.length, case.weights) for rank in range(case.ranks // case.tensor)]
    optimizer = optimizer_of(net.parameters())
    for start in range(0, case.length, case.window):
        batches = [batch for one in per_rank for batch in one[start : start + case.window]]
        total = sum(n for *_, n in batches)
        scale = {"sum": 1, "weighted_mean": total, "normalized_sum": total}[case.rule]
        optimizer.zero_grad()
        for batch in batches:
            factor = batch[2] if case.rule == "weighted_mean" else float(batch[2] > 0)
            if factor:
                (loss_of(net, batch) * factor / scale).backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), case.clip)
        found.append([torch.zeros_like(p) if p.grad is None else full(p.grad) for p in net.parameters()])
        optimizer.step()
    return found


def trained(case: Case, strategy: Any = GradAvgModelParallelStrategy) -> Grads:
    weighs = case.rule not in ("mean", "sum")
    model = Sharded(case.shard, manual=case.window if case.manual else 0, weighs=weighs)
    options: Any = {"accumulate_grad_batches": case.window, "gradient_clip_val": case.clip}
    trainer = make_trainer(
        strategy(**case.sizes), max_epochs=1, use_distributed_sampler=False, **({} if case.manual else options)
    )
    trainer.fit(model, DataLoader(case.batches(), batch_size=None))
    return model.gradients


def gap(found: Grads, wanted: Grads) -> float:
    assert len(found) == len(wanted) > 0
    pairs = [pair for fs, ws in zip(found, wanted, strict=True) for pair in zip(fs, ws, strict=True)]
    assert all(f.isfinite().all() for f, _ in pairs)
    largest = max(w.abs().max().item() for _, w in pairs)
    if largest == 0:
        assert all(bool((f == 0).all()) for f, _ in pairs)
        return 0.0
    return max((f - w).abs().max().item() for f, w in pairs) / largest


def trainer_gap(case: Case) -> float:
    """Body."""
    return gap(trained(case, partial(GradAvgModelParallelStrategy, reduction=case.rule)), expected(case))


def fabric_gap(case: Case, register: bool = True) -> float:
    """Body: the same in a loop of one's own."""
    loop = OfFabric(OfFabricSharded(case.shard, **WEIGHTED, **case.sizes))
    model = loop.fabric.setup_module(new_net())
    optimizer = optimizer_of(model.parameters())
    optimizer = loop.fabric.setup_optimizers(optimizer) if register else optimizer
    found = []
    for index, batch in enumerate(case.batches(), start=1):
        last = index % case.window == 0 or index == case.length
        with loop.no_sync(model, enabled=not last):
            loop.backward(loss_of(model, batch), weight=batch[2])
        if last:
            found.append([full(p.grad) for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    return gap(found, expected(case))


@pytest.mark.parametrize(
    ("of_loop", "case"),
    [
        (trainer_gap, Case(fsdp, 2, manual=True)),
        (trainer_gap, Case(fsdp_gathered, 2, weights=first_absent)),
        (trainer_gap, Case(fsdp, 4)),
        (trainer_gap, Case(hsdp, 4, length=2, window=1)),
        (trainer_gap, Case(hsdp, 4, weights=first_absent)),
        (trainer_gap, Case(hsdp, 4, weights=absent)),
        (trainer_gap, Case(fsdp_tp, 4, 2, length=2, window=1, weights=first_absent)),
        (trainer_gap, Case(fsdp_tp, 4, 2, length=2, window=1, weights=absent)),
        (trainer_gap, Case(fsdp_tp, 4, 2)),
        (trainer_gap, Case(fsdp_tp, 4, 2, "sum")),
        (trainer_gap, Case(fsdp_tp, 4, 2, "normalized_sum", 2, 1)),
        (trainer_gap, Case(tp, 2, 2)),
        (fabric_gap, Case(fsdp_gathered, 2, clip=None, weights=first_absent)),
        (fabric_gap, Case(hsdp, 4, clip=None)),
        (fabric_gap, Case(fsdp_tp, 4, 2, clip=None, weights=first_absent)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_gradients_are_those_of_one_process(world, of_loop, case):
    """After clipping, over windows the last of which is short, with batches of weight 0 whose loss is NaN.

    Where nothing counts they are exactly 0.
    """
    assert max(world(case.ranks).run(of_loop, case)) <= 1e-12


def mean_and_stock() -> tuple[Grads, Grads]:
    """Body."""
    case = Case(fsdp, 2, rule="mean", length=4, window=2)
    return trained(case), trained(case, ModelParallelStrategy)


def test_mean_has_the_bits_of_stock_in_full_windows(world):
    for ours, stock in world(2).run(mean_and_stock):
        assert len(ours) == 2
        assert gap(ours, stock) == 0


def steps(epochs: int, resume: str | None = None, save: str | None = None) -> Grads:
    """Body: on any number of ranks steps of one global batch, in which every sample counts the same."""
    model, case = Sharded(fsdp), Case(fsdp, dist.get_world_size())
    strategy = GradAvgModelParallelStrategy(**WEIGHTED, **case.sizes)
    trainer = make_trainer(strategy, max_epochs=epochs, use_distributed_sampler=False)
    rows = torch.cat([x for x, *_ in batches_of(3, 3, uneven)])[dist.get_rank() :: case.ranks]
    data: Any = [(rows, rows.sum(-1, keepdim=True).sin(), len(rows))]
    trainer.fit(model, DataLoader(data, batch_size=None), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return model.gradients


def test_a_checkpoint_of_four_ranks_resumes_on_two(world, tmp_path):
    path = str(tmp_path / "checkpoint")
    before = world(4).run(steps, 2, save=path)[0]
    for after, whole in zip(world(2).run(steps, 4, path), world(2).run(steps, 4), strict=True):
        assert gap([*before, *after], whole) <= 1e-12


def refused(kind: str) -> None:
    """Body."""
    if kind == "fabric":
        fabric_gap(Case(fsdp, 2, clip=None), register=False)
    case = Case(fsdp, dist.get_world_size(), 1 + (kind == "peers"), length=2)
    strategy = GradAvgModelParallelStrategy(**WEIGHTED, **({} if kind == "auto" else case.sizes))
    model = Sharded({"peers": fsdp_tp, "auto": on_all_ranks}.get(kind, fsdp), kind=kind)
    options: Any = {"accumulate_grad_batches": 1 + (kind == "stale"), "use_distributed_sampler": False}
    make_trainer(strategy, max_epochs=1, **options).fit(model, DataLoader(case.batches(), batch_size=None))


@pytest.mark.parametrize(
    ("kind", "ranks", "text"),
    [
        ("outside", 2, "'extra.weight' trains outside of fully_shard: nothing averages"),
        ("later", 2, "'extra.weight' trains outside of fully_shard: nothing averages"),
        ("divisor", 2, "over 2 ranks and divides them by 1; both must be"),
        ("auto", 2, "both must be data_parallel_size=1"),
        ("stale", 2, "the optimizers' parameter groups show no gradients"),
        ("none", 2, "training_step returned no loss"),
        ("graphless", 2, "a loss without a graph"),
        ("term", 2, "loss term 'b' of weight 0 is not finite"),
        ("unweighed", 2, "reached the model by a backward that bypassed reduction='weighted_mean'"),
        ("peers", 4, "tensor-parallel group weigh one batch differently, here by {'weight'"),
        ("fabric", 2, "fabric.setup_optimizers"),
    ],
)
def test_refused_on_all_ranks(world, kind, ranks, text):
    for raised in world(ranks).run_expecting_errors(refused, kind):
        assert text in raised.message


@pytest.mark.parametrize("make", [GradAvgModelParallelStrategy, partial(OfFabricSharded, fsdp)])
def test_options_that_cannot_be_served(make):
    for options, error, text in (
        ({"lr_scaling": "linear"}, TypeError, "is not an option of GradAvgModelParallelStrategy"),
        ({"tensor_paralel_size": 2}, TypeError, "Did you mean 'tensor_parallel_size'?"),
        ({"reduction": "mean_of_node_means"}, ValueError, "Use one of 'mean', 'sum', 'weighted_mean'"),
    ):
        with pytest.raises(error, match=re.escape(text)):
            make(**options)


def test_verify_refuses_by_name():
    with pytest.raises(ValueError, match=r"whole models.* got GradAvgModelParallelStrategy"):
        resolve_strategy("gradavg_model_parallel")


ENDING = """
import atexit, sys
import torch.distributed as dist
atexit.register(lambda: print("open at the end:", dist.is_initialized(), flush=True))  # after those registered later
sys.path.insert(0, {!r})
from examples.sharded import main
main()
"""


def test_the_process_group_ends_before_the_interpreter(tmp_path):
    (tmp_path / "script.py").write_text(ENDING.format(str(ROOT)))
    ran = subprocess.run(
        [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=200, check=True
    )
    assert "largest difference to one process" in ran.stdout
    # The second process ends on its own, and may outlive the first: it holds the pipe, which is read to its end.
    assert re.findall(r"open at the end: (\w+)", ran.stdout) == ["False"] * 2
