"""The reference of `equivalent_to="data_parallel"` against torch's own DataParallel, Lightning, and numbers by hand."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from data_parallel import BATCH_SIZES, MODELS, Labels, Point, gather, loader, num_samples, replicate, scatter, train
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn


def approx(value, tolerance=1e-12):
    return pytest.approx(value, rel=tolerance, abs=tolerance)


class Scatter:
    """What `torch.nn.parallel._functions.Scatter` computes, without devices."""

    @staticmethod
    def apply(devices: Any, _sizes: Any, dim: int, tensor: Tensor) -> tuple[Tensor, ...]:
        return tensor.chunk(len(devices), dim)


class Gather:
    """What `torch.nn.parallel._functions.Gather` computes, without devices."""

    @staticmethod
    def apply(_device: Any, dim: int, *tensors: Tensor) -> Tensor:
        return torch.cat([one.view(1) if one.ndim == 0 else one for one in tensors], dim)


def broadcast(tensors: Any, devices: Any, detach: bool = False) -> list[list[Tensor]]:
    """What `Broadcast` gives each device: the tensors themselves for the first if detached, and otherwise copies."""
    return [[one if detach and device == 0 else one.clone() for one in tensors] for device in devices]


@pytest.fixture
def on_cpu(monkeypatch):
    """Let torch's scatter, gather and replicate run on the CPU: what moves between devices stays."""
    moving = importlib.import_module("torch.nn.parallel.scatter_gather")
    monkeypatch.setattr(moving, "Scatter", Scatter)
    monkeypatch.setattr(moving, "Gather", Gather)
    # Imported by its name, because in its package a function of the same name hides it.
    replicating = importlib.import_module("torch.nn.parallel.replicate")
    monkeypatch.setattr(replicating, "_broadcast_coalesced_reshape", broadcast)


def flat(value: Any) -> list[Any]:
    """Return types and leaves in order, tensors as lists."""
    if isinstance(value, Tensor):
        return [value.dtype, value.tolist()]
    if isinstance(value, dict):
        return [dict, *(leaf for key, item in value.items() for leaf in [key, *flat(item)])]
    if isinstance(value, (list, tuple)):
        return [type(value), *(leaf for item in value for leaf in flat(item))]
    return [value]


SHARED = object()


def nested(size: int) -> dict[str, Any]:
    x = torch.arange(size * 2.0).reshape(size, 2)
    return {"a": [x, Point(x[:, 0], (x.long(), SHARED))], "b": {"c": (x,), "d": None, "e": []}, "f": 1.5, "g": "text"}


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 5])
def test_scatter_is_that_of_torch(on_cpu, num_replicas):
    """Nested batches of 1 to 9 samples are cut into the parts that torch's scatter returns, of the same types."""
    for size in range(1, 10):
        parts = scatter(nested(size), num_replicas)
        expected = torch.nn.parallel.scatter(nested(size), list(range(num_replicas)))
        assert [flat(one) for one in expected] == [flat(one) for one in parts]
        assert sum(map(num_samples, parts)) == size


def test_scatter_cuts_dataclasses():
    """A dataclass, which torch's scatter would share, is cut field by field, and what is no tensor in it is shared."""
    parts = scatter([Labels(torch.arange(5), "metre")], 4)
    assert [([0, 1], "metre"), ([2, 3], "metre"), ([4], "metre")] == [
        (one.target.tolist(), one.unit) for (one,) in parts
    ]


def test_gather_is_that_of_torch(on_cpu):
    """Nested outputs become what torch's gather makes of them, tensors without dimension one entry per replica."""
    outputs = [
        {"a": [torch.full((rows, 2), float(rows)), Point(torch.tensor(rows), (torch.ones(rows),))], "none": None}
        for rows in (2, 2, 1)
    ]
    assert flat(torch.nn.parallel.gather(outputs, "cpu")) == flat(gather(outputs))
    assert [2, 2, 1] == gather(outputs)["a"][1].x.tolist()


def test_gather_makes_numbers_tensors():
    """Python numbers, which torch's gather refuses, become one entry per replica, as Lightning 1.x made them."""
    assert flat({"n": torch.tensor([4, 1]), "x": torch.tensor([0.5, 2.0])}) == flat(
        gather([{"n": 4, "x": 0.5}, {"n": 1, "x": 2.0}])
    )


class ParallelModule(nn.Module):
    """What Lightning 1.x wrapped into DataParallel: its forward is the training_step, its numbers are tensors."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any, batch_idx: int) -> Any:
        output: Any = self.module.training_step(batch, batch_idx)
        if isinstance(output, dict):
            return {key: torch.tensor([one]) if isinstance(one, int) else one for key, one in output.items()}
        return output


def of_torch(module: LightningModule, num_replicas: int) -> Any:
    """Return torch's own DataParallel around the module, which runs its replicas in turn."""
    parallel: Any = nn.DataParallel(ParallelModule(module))
    parallel.device_ids, parallel.output_device, parallel.dim = list(range(num_replicas)), 0, 0
    parallel.src_device_obj = torch.device("cpu")
    parallel.parallel_apply = lambda replicas, inputs, options: [
        replica(*args, **kwargs) for replica, args, kwargs in zip(replicas, inputs, options, strict=True)
    ]
    return parallel


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["cnn", "contrastive"])
def test_training_is_that_of_torch(on_cpu, name, num_replicas):
    """20 steps with torch's own DataParallel.forward end in the same bits of losses, gradients, weights and buffers."""
    model = MODELS[name](torch.float64)
    theirs: Any = copy.deepcopy(model)
    parallel, optimizer = of_torch(theirs, num_replicas), theirs.configure_optimizers()
    run = train(model, loader(model), num_replicas, mean_of_replicas=True)
    for step, batch in enumerate(loader(model)):
        output = parallel(batch, step)
        loss = theirs.training_step_end(output) if name == "contrastive" else output.mean()
        optimizer.zero_grad()
        loss.backward()
        assert run.losses[step] == loss.item()
        gradients = {key: one.grad for key, one in theirs.named_parameters()}
        torch.testing.assert_close(run.gradients[step], gradients, rtol=1e-13, atol=1e-14)
        optimizer.step()
        torch.testing.assert_close(run.buffers[step], dict(theirs.named_buffers()), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(run.weights, dict(theirs.state_dict()), rtol=1e-13, atol=1e-14)


def test_replicas_share_parameters_and_keep_the_first_ones_buffers():
    """A replica's gradient reaches the module's parameter; what later replicas do to their buffers is lost."""
    module = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    first, second = replicate(module, 2)
    first(torch.tensor([[0.0], [1.0]]))
    kept: Any = module[1]
    before = kept.running_mean.clone()
    second(torch.tensor([[5.0], [9.0]])).square().sum().backward()
    assert kept.num_batches_tracked == 1
    assert torch.equal(before, kept.running_mean)
    assert list(second.parameters()) == []
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", ["cnn", "contrastive", "nested rows"])
def test_one_replica_is_lightning_on_one_device(name, accumulate):
    """With one replica the weights are those of a stock Trainer on one device, whose step is both of 1.x's in one."""
    model: Any = MODELS[name](torch.float64)
    # A whole number of windows: in a short last one Lightning divides the loss by 2, too.
    batches = [batch for batch in loader(model) if num_samples(batch) == 16][:4]

    class Whole(type(model)):  # type: ignore[misc]  # a class of the test's parameter
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            return self.training_step_end(gather([output])) if hasattr(self, "training_step_end") else output

    stock = Whole(torch.float64)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(stock, torch.utils.data.DataLoader(batches, batch_size=None))
    run = train(model, batches, 1, accumulate=accumulate, epochs=2)
    torch.testing.assert_close(stock.state_dict(), run.weights, rtol=1e-13, atol=1e-14)


class Line(LightningModule):
    """Prediction w * x from w = 1, without an optimizer's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return 0.5 * (self.w * batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Variance(Line):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.w * batch

    def training_step_end(self, outputs: Tensor) -> Tensor:
        return outputs.var(correction=0)


def one_to(last: int) -> Tensor:
    return torch.arange(1, last + 1, dtype=torch.float64)


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
@pytest.mark.parametrize(("last", "gradient"), [(4, 2.5), (5, 4.0)])
def test_variance_over_the_gathered_outputs(last, gradient, num_replicas):
    """Case 26: the variance of 1..4 over all outputs has gradient 2.5, that of 1..5 has 4.0, for any replicas."""
    run = train(Variance(), [one_to(last)], num_replicas)
    assert approx(gradient) == run.gradients[0]["w"].item()


@pytest.mark.parametrize(
    ("xs", "mean_of_replicas", "gradient"),
    [(5, False, 11.0), (5, True, (14 / 3 + 41 / 2) / 2), (1, False, 1.0), (1, True, 1.0)],
)
def test_replicas_of_unequal_size(xs, mean_of_replicas, gradient):
    """Case 27: 1..5 on 2 replicas has gradient 11 by samples and 12.5833 as a mean of means; 1 alone has 1."""
    run = train(Line(), [one_to(xs)], 2, mean_of_replicas=mean_of_replicas)
    assert approx(gradient) == run.gradients[0]["w"].item()


def test_windows_are_averaged_by_their_samples():
    """A window of 3 samples and 1 has the mean over the 4, a last window of one batch that batch's own."""
    run = train(Line(), [one_to(4)[:3], one_to(4)[3:], one_to(2)], 2, accumulate=2, epochs=2)
    assert [approx(7.5), approx(2.5)] * 2 == [gradients["w"].item() for gradients in run.gradients]
    assert [approx(7 / 3), 8.0, 1.25] * 2 == run.losses
    assert [[1.25, 4.5], [8.0], [0.5, 2.0]] * 2 == run.replica_losses


class Normed(Line):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, dtype=torch.float64)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.norm(batch).sum()


@pytest.mark.parametrize(("num_replicas", "mean", "variance"), [(1, 0.3, 1.5666667), (2, 0.1, 1.1)])
def test_batch_norm_keeps_the_first_replica(num_replicas, mean, variance):
    """Case 42: of 0, 2, 4, 6 two replicas keep the statistics of 0 and 2, and one replica those of all."""
    run = train(Normed(), [torch.tensor([[0.0], [2.0], [4.0], [6.0]], dtype=torch.float64)], num_replicas)
    assert approx(mean) == run.weights["norm.running_mean"].item()
    assert approx(variance, 1e-7) == run.weights["norm.running_var"].item()


@pytest.mark.parametrize("name", MODELS)
def test_batches_of_all_sizes(name):
    """The batches of the models have the sizes 16, 15, 5 and 1 in turn, and all gradients of 20 steps are finite."""
    model = MODELS[name](torch.float64)
    assert list(BATCH_SIZES) * 5 == [num_samples(batch) for batch in loader(model)]
    run = train(model, loader(model), 4)
    assert len(run.gradients) == 20
    assert all(gradient.isfinite().all() for step in run.gradients for gradient in step.values())
    assert run.gradients[0].keys() == dict(model.named_parameters()).keys()
