"""Replicas on real ranks: what is refused or remarked at setup, what is logged, and what a run leaves behind."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from ranks import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_gradavg import GradAvgStrategy, gather

Options = Mapping[str, Any]

DATA_PARALLEL = {"equivalent_to": "data_parallel", "num_replicas": 4}


class Net(LightningModule):
    """Batch norm and a linear layer; the loss of each replica, in float64."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)
        self.parts = nn.ModuleDict(parts)
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.rows = SumMetric()
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.norm(inputs))
        for part in self.parts.values():
            outputs = part(outputs)
        return outputs

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self(inputs), labels)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def data(samples: int = 24, batch_size: int = 8, *, shuffle: bool = False) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (samples,), generator=generator)
    return DataLoader(TensorDataset(inputs, labels), batch_size=batch_size, shuffle=shuffle)


def fit(module: LightningModule, strategy: Options, loader: Any = None, **options: Any) -> Any:
    trainer = make_trainer(GradAvgStrategy(**strategy), **{"max_epochs": 1, **options})
    trainer.fit(module, data() if loader is None else loader)
    return trainer


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


class Manual(Net):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        inputs, labels = batch
        optimizer.zero_grad()  # type: ignore[union-attr]  # there is one
        self.manual_backward(nn.functional.cross_entropy(self(inputs), labels))
        optimizer.step()  # type: ignore[union-attr]  # there is one


class ManualStepEnd(Manual):
    def training_step_end(self, outputs: Any) -> None:
        raise AssertionError("never called")


class StepEnd(Net):
    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        return {"logits": self(batch[0]), "labels": batch[1]}

    def training_step_end(self, outputs: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs["logits"], outputs["labels"])


class OwnNorm(nn.BatchNorm1d):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * 2


class Gathering(Net):
    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        return gather(self(batch[0])).square().mean()


class OwnBuffer(nn.Module):
    """Keeps the mean of what it saw in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen.copy_(inputs.detach().mean())
        return inputs


class ScalarEnd(StepEnd):
    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        return {**super().training_step(batch, batch_idx), "size": batch[0].mean()}


def refused(module: type[LightningModule], strategy: Options, parts: Sequence[str] = (), **options: Any) -> None:
    made = {"drop": lambda: nn.Dropout(0.5), "own": lambda: OwnNorm(3), "buffer": OwnBuffer, "sync": _sync}
    fit(module(**{part: made[part]() for part in parts}), strategy, **options)


def _sync() -> nn.Module:
    return nn.SyncBatchNorm(3)


REFUSED = {
    "manual optimization": (Manual, DATA_PARALLEL, (), "ValueError", "manual optimization with num_replicas=4 on 2"),
    "manual step end": (
        ManualStepEnd,
        {"equivalent_to": "data_parallel"},
        (),
        "ValueError",
        "training_step_end with manual optimization",
    ),
    "static graph": (Net, {**DATA_PARALLEL, "static_graph": True}, (), "ValueError", "static_graph=True with num_rep"),
    "summed whole batch": (
        StepEnd,
        {**DATA_PARALLEL, "reduction": "sum"},
        (),
        "ValueError",
        "reduction='sum' with training_step_end",
    ),
    "legacy mean of a whole batch": (
        StepEnd,
        {**DATA_PARALLEL, "reduction": "mean_of_replica_losses"},
        (),
        "ValueError",
        "'mean_of_replica_losses' with training_step_end",
    ),
    "synchronized norm on a CPU": (
        Net,
        {"equivalent_to": "single_device"},
        ("sync",),
        "ValueError",
        "SyncBatchNorm in parts.sync: torch has it on accelerators only",
    ),
    "synchronized norm in a replica": (Net, DATA_PARALLEL, ("sync",), "ValueError", "SyncBatchNorm in parts.sync"),
    "unknown norm on one device": (
        Net,
        {"equivalent_to": "single_device"},
        ("own",),
        "ValueError",
        "batch norm with a forward of its own in parts.own",
    ),
    "norm in micro-batches": (
        Net,
        {"equivalent_to": "single_device", "max_device_batch_size": 2},
        (),
        "ValueError",
        "max_device_batch_size=2 with batch norm in norm",
    ),
    "gather of one replica": (Gathering, DATA_PARALLEL, (), "RuntimeError", "compute the loss in training_step_end"),
    "buffer of one rank": (
        Net,
        {"equivalent_to": "single_device"},
        ("buffer",),
        "ValueError",
        "into the buffers parts.buffer.seen on different ranks",
    ),
    "number of one rank": (
        ScalarEnd,
        {"equivalent_to": "single_device"},
        (),
        "TypeError",
        "output['size'] of training_step is one number",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_reproduced_is_an_error_on_all_ranks(world, case):
    """Where the promise would be false, every rank raises, and names the module or the option."""
    module, strategy, parts, kind, text = REFUSED[case]
    for raised in world(2).run_expecting_errors(refused, module, strategy, parts):
        assert raised.type_name == kind
        assert text in raised.message


def remarked(module: type[LightningModule], strategy: Options, parts: Sequence[str] = ()) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        refused(module, strategy, parts)
    return [str(warning.message) for warning in caught]


def test_random_numbers_of_one_device_are_remarked_once(world):
    """Dropout on one device would draw other numbers: rank zero says where, and the run goes on."""
    first, *others = world(3).run(remarked, Net, {"equivalent_to": "single_device"}, ("drop",))
    assert sum("random numbers drawn in parts.drop are those of each rank" in message for message in first) == 1
    assert not any("random numbers" in message for messages in others for message in messages)


def test_dropout_of_rate_zero_is_no_remark(world):
    """A layer that draws nothing is not named."""
    messages = world(2).run(remarked, Net, {"equivalent_to": "single_device"}, ())[0]
    assert not any("random numbers" in message for message in messages)


class Whole(StepEnd):
    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return {**output, "loss": nn.functional.cross_entropy(output["logits"], output["labels"])}


def hook_is_remarked() -> list[str]:
    return remarked(Whole, {"split_batches": True})


def test_the_hook_that_lightning_ignores_is_remarked(world):
    """Without a preset, `training_step_end` is not called, as ever since Lightning 2.0; now somebody says so."""
    messages = world(2).run(hook_is_remarked)[0]
    assert sum("training_step_end is not called" in message for message in messages) == 1


class Logging(Net):
    """Logs a mean, a sum, extremes and metrics in every replica; `end` logs them of the whole batch instead."""

    def __init__(self, *, end: bool) -> None:
        super().__init__()
        self.end = end

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        inputs, labels = batch
        logits = self(inputs)
        if self.end:
            return {"logits": logits, "labels": labels}
        return self.logged(logits, labels)

    def __getattr__(self, name: str) -> Any:
        if name == "training_step_end" and self.__dict__.get("end"):
            return lambda outputs: self.logged(outputs["logits"], outputs["labels"])
        return super().__getattr__(name)

    def logged(self, logits: Tensor, labels: Tensor) -> Tensor:
        each = nn.functional.cross_entropy(logits, labels, reduction="none")
        options: dict[str, Any] = {"on_step": True, "on_epoch": True, "sync_dist": True}
        self.log("mean", each.mean(), **options)
        self.log("sum", each.sum(), reduce_fx="sum", **options)
        self.log("largest", each.max(), reduce_fx="max", **options)
        self.log("smallest", each.min(), reduce_fx="min", **options)
        self.log("of_epoch", each.mean(), on_step=False, on_epoch=True, sync_dist=True)
        self.accuracy(logits, labels)
        self.rows.update(len(labels))
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("rows", self.rows, on_step=False, on_epoch=True)
        return each.mean()


class Steps(Callback):
    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.logged_metrics.items()})


def logged(end: bool, strategy: Options, batch_size: int) -> tuple[list[dict[str, float]], dict[str, float]]:
    steps = Steps()
    trainer = fit(Logging(end=end), strategy, data(30, batch_size), callbacks=[steps], log_every_n_steps=1, logger=False)
    return steps.metrics, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize("strategy", [DATA_PARALLEL, {"equivalent_to": "single_device"}], ids=str)
def test_logged_values_do_not_depend_on_the_world_size(world, end, strategy):
    """Means, sums, extremes and metrics, of steps and epochs, are those of one process, also in a batch of 6."""
    for steps, epoch in (reference := world(1).run(logged, end, strategy, 12)):
        assert len(steps) == 3
        assert epoch["rows"] == 30
        assert set(epoch) >= {"mean_epoch", "sum_epoch", "largest_epoch", "smallest_epoch", "of_epoch", "accuracy"}
    (steps, epoch), *_ = reference
    for size in (2, 3, 4):
        for of_rank in world(size).run(logged, end, strategy, 12):
            assert of_rank[0] == [pytest.approx(step, rel=1e-12) for step in steps]
            assert of_rank[1] == pytest.approx(epoch, rel=1e-12)


class Save(Callback):
    """Writes a checkpoint when the run has made so many steps, within an epoch."""

    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def saved(folder: str, strategy: Options, stop: int, resume: str | None) -> tuple[str, dict[str, Tensor]]:
    module = Net(drop=nn.Dropout(0.3))
    torch.manual_seed(7)
    path = str(Path(folder) / f"{stop}.ckpt")
    trainer = make_trainer(GradAvgStrategy(**strategy), max_steps=stop, max_epochs=10, callbacks=[Save(path, stop)])
    trainer.fit(module, data(22, shuffle=True), ckpt_path=resume)
    return path, state_of(module)


@pytest.mark.parametrize("sizes", [(4, 1, 2), (1, 3, 4)])
def test_a_run_goes_on_at_another_world_size(world, tmp_path, sizes):
    """With R fixed, batches, dropout masks and batch norm of a run that moves twice are those of one that stays."""
    _, expected = world(1).run(saved, str(tmp_path / "whole"), DATA_PARALLEL, 8, None)[0]
    path = None
    for size, stop in zip(sizes, (2, 5, 8), strict=True):
        runs = world(size).run(saved, str(tmp_path / "parts"), DATA_PARALLEL, stop, path)
        path, state = runs[0]
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


def resumed_with_other_replicas(folder: str, path: str) -> None:
    saved(folder, {**DATA_PARALLEL, "num_replicas": 2}, 8, path)


def test_other_replicas_are_another_recipe(world, tmp_path):
    """A checkpoint of 4 replicas is not continued with 2 without a word: batch norm would see other chunks."""
    path, _ = world(2).run(saved, str(tmp_path), DATA_PARALLEL, 2, None)[0]
    for raised in world(2).run_expecting_errors(resumed_with_other_replicas, str(tmp_path / "more"), path):
        assert "num_replicas: 4 in the checkpoint, now 2" in raised.message


class Tracked(nn.Module):
    """Counts the activations that it has saved for a backward and that are alive."""

    alive = 0
    most = 0

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = _Held.apply(inputs)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return result


def _free() -> None:
    Tracked.alive -= 1


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        held = inputs * 2
        Tracked.alive += 1
        Tracked.most = max(Tracked.most, Tracked.alive)
        weakref.finalize(held, _free)
        ctx.save_for_backward(held)
        return inputs * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        _ = ctx.saved_tensors
        return grads[0] * 2


class StepEndTracked(StepEnd):
    pass


def activations(kind: type[Net], recompute: bool, replicas: int) -> tuple[int, dict[str, Tensor]]:
    module = kind(held=Tracked(), wide=nn.Sequential(nn.Linear(3, 3), Tracked(), nn.Tanh(), nn.Linear(3, 3)))
    module.double()
    Tracked.alive = Tracked.most = 0
    strategy = {"equivalent_to": "data_parallel", "num_replicas": replicas, "recompute_replicas": recompute}
    fit(module, strategy, data(16, 16))
    return Tracked.most, state_of(module)


@pytest.mark.parametrize("kind", [Net, StepEndTracked])
def test_recomputed_replicas_keep_the_activations_of_one(world, kind):
    """With recompute_replicas a rank's memory does not grow with its replicas, and weights and buffers are the same."""
    (kept, expected), *_ = world(1).run(activations, kind, False, 8)
    (few, _), *_ = world(1).run(activations, kind, True, 2)
    (many, state), *_ = world(1).run(activations, kind, True, 8)
    assert kept == 16
    assert many == few < kept
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


def manual(size: int) -> dict[str, Tensor]:
    module = Manual()
    fit(module, {"equivalent_to": "data_parallel", "num_replicas": size})
    return state_of(module)


def automatic(size: int) -> dict[str, Tensor]:
    module = Net()
    fit(module, {"equivalent_to": "data_parallel", "num_replicas": size})
    return state_of(module)


@pytest.mark.parametrize("size", [2, 3])
def test_manual_optimization_runs_one_replica_per_rank(world, size):
    """With as many ranks as replicas manual optimization gives what automatic optimization gives on one rank."""
    (expected, *_) = world(1).run(automatic, size)
    for state in world(size).run(manual, size):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


def replicas_without_preset(replicas: int) -> dict[str, Tensor]:
    module = Net()
    fit(module, {"split_batches": True, "num_replicas": replicas})
    return state_of(module)


def test_replicas_do_without_a_preset(world):
    """`split_batches` with `num_replicas` fixes what batch norm sees, on any number of ranks."""
    (expected, *_) = world(1).run(replicas_without_preset, 4)
    for size in (2, 3, 4):
        for state in world(size).run(replicas_without_preset, 4):
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


class Drifting(Net):
    """Evaluates in training mode, as Monte Carlo dropout does."""

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.train()
        self.log("value", self(batch[0]).mean(), sync_dist=True)
        self.eval()


def validated_within() -> float:
    module = Drifting()
    trainer = make_trainer(GradAvgStrategy(equivalent_to="single_device"), max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(module, data(), data(20, 4))
    return float(trainer.callback_metrics["value"])


def test_a_model_evaluated_in_training_mode_does_not_hang(world):
    """Ranks have different numbers of evaluation batches, so batch norm is not synchronized in evaluation."""
    expected = world(1).run(validated_within)[0]
    assert world(2).run(validated_within) == pytest.approx([expected] * 2, rel=1e-12)
    assert world(3).run(validated_within) == pytest.approx([expected] * 3, rel=1e-12)


class OwnStep(Net):
    """Counts the calls of a training step that a user has put on the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        usual = self.training_step

        def counted(batch: Any, batch_idx: int) -> Any:
            self.calls += 1
            return usual(batch, batch_idx)

        self.training_step = counted  # type: ignore[method-assign]  # as users patch modules


def patched() -> tuple[int, bool]:
    module = OwnStep()
    before = module.training_step
    fit(module, DATA_PARALLEL)
    return module.calls, module.training_step is before and "log" not in vars(module)


def test_a_patched_training_step_is_run_and_put_back(world):
    """The module is left as it was; each rank has run its two replicas of the three batches."""
    assert world(2).run(patched) == [(6, True), (6, True)]


def outputs_seen(folder: str) -> list[Any]:
    seen: list[Any] = []

    class Extra(Net):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx), "rows": batch[1], "size": len(batch[1])}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append({name: value.tolist() for name, value in outputs.items()})

    fit(Extra(), DATA_PARALLEL, data(11, 11), logger=CSVLogger(folder), log_every_n_steps=1)
    return seen


def test_outputs_of_a_ranks_replicas_are_joined(world, tmp_path):
    """`on_train_batch_end` gets one loss, the mean over the rank's samples, and the other outputs one after another."""
    (whole,), *_ = world(1).run(outputs_seen, str(tmp_path))
    assert whole["rows"] == next(iter(data(11, 11)))[1].tolist()
    assert whole["size"] == [3, 3, 3, 2]
    halves = [seen for (seen,) in world(2).run(outputs_seen, str(tmp_path))]
    assert halves[0]["rows"] + halves[1]["rows"] == whole["rows"]
    assert halves[0]["size"] + halves[1]["size"] == whole["size"]
    mean = (6 * halves[0]["loss"] + 5 * halves[1]["loss"]) / 11
    assert mean == pytest.approx(whole["loss"], rel=1e-12)


class KeptMetric(StepEnd):
    """Updates a metric of the whole batch on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step_end(self, outputs: Any) -> Tensor:
        self.mean.update(outputs["logits"].detach().mean())
        self.rows.update(len(outputs["labels"]))
        return super().training_step_end(outputs)

    def on_train_epoch_end(self) -> None:
        self.found = float(self.rows.compute()), float(self.mean.compute())


def whole_metrics() -> tuple[tuple[float, float], int]:
    module = KeptMetric()
    fit(module, DATA_PARALLEL)
    return module.found, dist.get_world_size()


def test_a_metric_of_the_whole_batch_counts_it_once(world):
    """`training_step_end` runs on every rank, but its metrics hold each sample once when they are summed over ranks."""
    expected = world(1).run(whole_metrics)[0][0]
    assert expected[0] == 24
    for size in (2, 3):
        for found, ranks in world(size).run(whole_metrics):
            assert ranks == size
            assert found == pytest.approx(expected, rel=1e-12)
