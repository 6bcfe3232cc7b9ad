"""Sharded models: FSDP2, HSDP and FSDP2 with tensor parallelism train as one process does.

Rules, windows and faults on two ranks of FSDP2 are rows of `cases.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from ranks import SHARDS_ON_CPU, grid, make_trainer, on_ranks
from torch import Tensor, nn
from torch.distributed import device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from toys import (
    COUNTS,
    IGNORE_UNUSED_PARAMETERS,
    MLP,
    WEIGHTED,
    TrainerLoop,
    approx,
    flat,
    make_batches_of_ranks,
    make_loader,
    same_everywhere,
    train,
    train_in_one_process,
)

from lightning_gradavg import GradAvgModelParallelStrategy, global_mean

if not SHARDS_ON_CPU:
    pytest.skip("FSDP2 of a torch before 2.7 needs CUDA", allow_module_level=True)
from torch.distributed.fsdp import fully_shard

pytestmark = IGNORE_UNUSED_PARAMETERS

CLIP = 0.5
"""Of the norm of gradients, which are larger."""


def without_root(net: Any, mesh: Any) -> None:
    fully_shard(net[0], mesh=mesh["data_parallel"])


def fsdp(net: Any, mesh: Any) -> Any:
    without_root(net, mesh)
    return fully_shard(net, mesh=mesh["data_parallel"])


def fsdp_gathered(net: Any, mesh: Any) -> Any:
    """All parameters in the root's group, which shows unsharded ones until its backward."""
    return fully_shard(net, mesh=mesh["data_parallel"], reshard_after_forward=False)


def hsdp(net: Any, mesh: Any) -> Any:
    names = ("replicate", "shard")
    return fsdp(net, {"data_parallel": device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)})


def tp(net: Any, mesh: Any) -> Any:
    return parallelize_module(net, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


def fsdp_tp(net: Any, mesh: Any) -> Any:
    return fsdp(tp(net, mesh), mesh)


def frozen_root(net: Any, mesh: Any) -> None:
    net[2].requires_grad_(False)
    without_root(net, mesh)


def divided(net: Any, mesh: Any) -> None:
    fsdp(net, mesh)[0].set_gradient_divide_factor(1.0)


class Layout(NamedTuple):
    """How a model is sharded, the samples of each data-parallel rank, and the ranks of a tensor-parallel group.

    A rank without samples has one of NaN, and the weight 0.
    """

    shard: Callable[..., Any]
    counts: Sequence[int]
    tensor: int = 1

    @property
    def ranks(self) -> int:
        return len(self.counts) * self.tensor

    @property
    def sizes(self) -> Any:
        return {"data_parallel_size": len(self.counts), "tensor_parallel_size": self.tensor}

    def batches(self, steps: int, window: int = 0) -> list[list[Any]]:
        nothing = torch.full((1, 8), torch.nan, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
        of_counts = [
            batches if count else [nothing] * steps
            for count, batches in zip(
                self.counts, make_batches_of_ranks(steps, torch.float64, self.counts), strict=True
            )
        ]
        of_ranks = [batches for batches in of_counts for _ in range(self.tensor)]
        if not window:
            return of_ranks
        return [[tuple(one[start : start + window]) for start in range(0, steps, window)] for one in of_ranks]

    def __str__(self) -> str:
        return f"{self.shard.__name__} {self.counts}"


def weight_of(samples: Tensor) -> int:
    return 0 if bool(samples.isnan().any()) else len(samples)


def run_window(loop: Any, model: Any, optimizer: Any, window: Sequence[Any]) -> None:
    optimizer.zero_grad()
    for index, (x, y) in enumerate(window, 1):
        with loop.no_sync(model, enabled=index < len(window)):
            loop.backward(cross_entropy(model(x), y), weight=weight_of(x))
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()


class Sharded(MLP):
    """`kind` says how it trains, and names what cannot be served."""

    def __init__(self, shard: Callable[..., Any] | None = None, kind: str = "weighted_mean") -> None:
        super().__init__()
        self.double()
        self.shard = shard
        self.kind = kind
        self.automatic_optimization = kind not in ("manual", "plain backward", "interrupted")

    def configure_model(self) -> None:
        self.stale = [nn.Parameter(parameter.detach().clone()) for parameter in self.parameters()]
        if self.shard is not None:
            self.shard(self.body, self.device_mesh)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.stale, lr=0.1) if self.kind == "stale" else super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.kind == "manual":
            return run_window(TrainerLoop(self), self.body, self.optimizers(), batch)
        if self.kind == "unfrozen":
            self.second.requires_grad_(True)
        x, y = batch
        if self.kind == "interrupted":
            interrupting = self.body[1].register_forward_hook(lambda module, inputs, output: Raising.apply(output))
            with pytest.raises(ValueError, match="out of memory"):
                self.manual_backward(cross_entropy(self.body(x), y), weight=1)
            interrupting.remove()
            return self.manual_backward(cross_entropy(self.body(x), y), weight=1)
        loss = cross_entropy(self.body(x), y, reduction="sum" if self.kind == "sum" else "mean")
        if self.kind == "plain backward":
            return loss.backward()
        if self.kind == "global mean":
            return global_mean(loss * len(y), len(y))
        if self.kind in ("sum", "mean"):
            return loss / sum(COUNTS) if self.kind == "sum" else loss
        return {"loss": loss, "weight": self.weight(x)}

    def weight(self, x: Tensor) -> Any:
        if self.kind == "peers":
            return dist.get_rank()
        if self.kind == "no number" and dist.get_rank() == 1:
            return "three"
        return weight_of(x)


LAYOUTS = [
    Layout(fsdp_gathered, (0, 4)),
    Layout(fsdp, (1, 1, 1, 1)),
    Layout(hsdp, (0, 1, 2, 1)),
    Layout(tp, (4,), 2),
    Layout(fsdp_tp, (3, 1), 2),
    Layout(fsdp_tp, (0, 4), 2),
]


WAYS = [(kind, window) for window in (3, 1) for kind in ("weighted_mean", "manual")]


@pytest.mark.parametrize(
    ("layout", "way"), [*grid(LAYOUTS, WAYS, strength=1), (Layout(fsdp_tp, (3, 1), 2), ("sum", 1))], ids=str
)
def test_weights_are_those_of_one_process(world, layout, way):
    """With clipping, over windows the last of which is short."""
    (kind, window), ranks = way, world(layout.ranks)
    batches = layout.batches(5, window if kind == "manual" else 0)
    options = {}
    if kind != "manual":
        options = {"accumulate_grad_batches": window, "gradient_clip_val": CLIP}
    strategy = {"reduction": "sum" if kind == "sum" else "weighted_mean", **layout.sizes}
    toy = {"shard": layout.shard, "kind": kind}
    seen = ranks.run(train, batches, toy, strategy, None, Sharded, GradAvgModelParallelStrategy, **options)
    _, *expected = train_in_one_process(MLP().double(), make_batches_of_ranks(5, torch.float64), window, CLIP)
    torch.testing.assert_close(same_everywhere(seen).weights, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("of", [GradAvgModelParallelStrategy, ModelParallelStrategy])
@pytest.mark.parametrize(
    "layout", [Layout(fsdp, (3, 1)), Layout(hsdp, (1, 1, 1, 1)), Layout(fsdp_tp, (3, 1), 2)], ids=str
)
def test_a_global_mean_is_that_of_one_process(world, layout, of):
    """Under the plain mean, of stock, too: tensor-parallel ranks bring every total and count twice."""
    toy = {"shard": layout.shard, "kind": "global mean"}
    seen = world(layout.ranks).run(train, layout.batches(3), toy, layout.sizes, None, Sharded, of)
    _, *expected = train_in_one_process(MLP().double(), make_batches_of_ranks(3, torch.float64))
    torch.testing.assert_close(same_everywhere(seen).weights, expected, rtol=1e-12, atol=1e-12)


def test_mean_has_the_bits_of_stock_in_full_windows(world):
    layout = Layout(fsdp, (3, 1))
    given: Any = (train, layout.batches(4), {"shard": fsdp, "kind": "mean"}, layout.sizes, None, Sharded)
    ours, stock = (
        same_everywhere(world(2).run(*given, of, accumulate_grad_batches=2))
        for of in (GradAvgModelParallelStrategy, ModelParallelStrategy)
    )
    assert len(ours.gradients) == 2
    assert all(torch.equal(*pair) for pair in zip(ours.gradients, stock.gradients, strict=True))


def test_the_group_of_exchanges_has_the_timeout_of_the_run():
    strategy: Any = GradAvgModelParallelStrategy(timeout=timedelta(hours=2))
    assert timedelta(hours=2) == strategy._reduction._timeout


def start_line(batches: int) -> str:
    """Body: train in windows of 2 batches; return the start line."""
    layout = Layout(fsdp, (3, 1))
    strategy: Any = GradAvgModelParallelStrategy(**layout.sizes)
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False, accumulate_grad_batches=2)
    trainer.fit(Sharded(fsdp, "mean"), make_loader(layout.batches(batches)[dist.get_rank()]))
    return str(strategy._start_line())


@pytest.mark.parametrize(("batches", "is_short"), [(3, True), (4, False)])
def test_the_start_line_says_that_the_last_window_is_short(world, batches, is_short):
    said = (
        "Stock Lightning divides the last window of an epoch, which has 1 micro-batch, by 2; here it is divided by 1."
    )
    for line in world(2).run(start_line, batches):
        assert "2 data-parallel x 1 tensor-parallel ranks (gloo), " in line
        assert ", 2 micro-batches per optimizer step." in line
        assert is_short == (said in line)


def trained(counts: Sequence[int], epochs: int, resume: str | None = None, save: str | None = None) -> Any:
    model = Sharded(fsdp)
    layout = Layout(fsdp, counts)
    strategy = GradAvgModelParallelStrategy(**WEIGHTED, **layout.sizes)
    trainer = make_trainer(strategy, max_epochs=epochs, use_distributed_sampler=False)
    trainer.fit(model, make_loader(layout.batches(2)[dist.get_rank()]), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return model.seen.weights[-1]


def test_a_checkpoint_of_four_ranks_resumes_on_two(world, tmp_path):
    path = str(tmp_path / "checkpoint")
    world(4).run(trained, (1, 1, 1, 1), 2, save=path)
    for after, whole in zip(world(2).run(trained, (3, 1), 4, path), world(2).run(trained, (3, 1), 4), strict=True):
        torch.testing.assert_close(after, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("shard", "kind", "text"),
    [
        (without_root, "weighted_mean", "'second.weight' trains outside of fully_shard: nothing averages"),
        (frozen_root, "unfrozen", "'second.weight' trains outside of fully_shard: nothing averages"),
        (divided, "weighted_mean", "over 2 ranks and divides them by 1; both must be"),
        (fsdp, "stale", "the optimizers' parameter groups show no gradients"),
        (fsdp, "interrupted", "an exception came out of a backward before, and the loop went on: FSDP2"),
        (fsdp, "plain backward", "reached the model by a backward that bypassed reduction='weighted_mean'"),
        (fsdp_tp, "peers", "tensor-parallel group weigh one batch differently: weights [0.0] on rank 0"),
        (fsdp_tp, "no number", "on rank 1: a weight is one number, got 'three'"),
    ],
)
def test_refused_on_all_ranks(world, shard, kind, text):
    layout = Layout(shard, (3, 1), 1 + (shard is fsdp_tp))
    strategy = {**WEIGHTED, **layout.sizes}
    given: Any = (train, layout.batches(2), {"shard": shard, "kind": kind}, strategy, None, Sharded)
    options = {"accumulate_grad_batches": 2} if kind == "stale" else {}
    for raised in world(layout.ranks).run_expecting_errors(*given, GradAvgModelParallelStrategy, **options):
        assert text in raised.message


class Raising(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("out of memory")


class Interrupted(LightningModule):
    """Its first window ends by an exception, which it handles, and FSDP2 has not reduced what is in it."""

    def __init__(self, shard: Callable[..., Any]) -> None:
        super().__init__()
        self.shard = shard
        self.automatic_optimization = False
        self.body = nn.Sequential(nn.Linear(2, 1, bias=False)).double()
        self.gradient: Any = None

    def configure_model(self) -> None:
        self.shard(self.body, self.device_mesh)

    def training_step(self, rows: Tensor, batch_idx: int) -> None:
        root: Any = self.body
        root.set_requires_gradient_sync(False)
        with TrainerLoop(self).no_sync(self.body, enabled=True):
            self.manual_backward(self.body(100 * rows).mean(), weight=1)
            with pytest.raises(ValueError, match="out of memory"):
                self.manual_backward(Raising.apply(self.body(rows).mean()), weight=1)
        root.set_requires_gradient_sync(True)
        self.zero_grad()
        self.manual_backward(self.body((1 + dist.get_rank()) * rows).mean(), weight=1)
        (weight,) = root.parameters()
        self.gradient = flat([weight.grad]).flatten().tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@on_ranks()
def test_an_exception_leaves_nothing_of_its_window():
    """FSDP holds the gradients of a window apart until it reduces them; the loop goes on without those of this one."""
    model = Interrupted(fsdp)
    strategy = GradAvgModelParallelStrategy(**WEIGHTED, data_parallel_size=2, tensor_parallel_size=1)
    rows = torch.ones(1, 2, dtype=torch.float64)
    make_trainer(strategy, max_epochs=1, use_distributed_sampler=False).fit(model, make_loader([rows]))
    assert [approx(1.5)] * 2 == model.gradient
