"""What a review of replicas found: each would have hung, or trained another model without a word."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from ranks import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradavg import GradAvgStrategy, gather

F64 = torch.float64


def parallel(replicas: int = 4, **options: Any) -> dict[str, Any]:
    return {"equivalent_to": "data_parallel", "num_replicas": replicas, **options}


def single(**options: Any) -> dict[str, Any]:
    return {"equivalent_to": "single_device", **options}


class Net(LightningModule):
    """A regression, with batch norm where `norm` is true."""

    norm = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 5)
        self.n = nn.BatchNorm1d(5) if self.norm else nn.Identity()
        self.b = nn.Linear(5, 2)
        self.build()
        self.double()

    def build(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(torch.tanh(self.n(self.a(x))))
        return result

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(kind: type[Net], strategy: Mapping[str, Any], batch_size: int = 8, samples: int = 22, **options: Any) -> Any:
    module = kind()
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(samples, size, dtype=F64, generator=generator) for size in (4, 2))
    torch.manual_seed(5)
    trainer = make_trainer(GradAvgStrategy(**strategy), **{"max_epochs": 2, **options})
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=batch_size))
    state = {name: value.clone() for name, value in module.state_dict().items()}
    return state, {name: float(value) for name, value in trainer.callback_metrics.items()}


def assert_same(world: Any, sizes: Any, *arguments: Any, **options: Any) -> None:
    """Assert that weights, buffers and logs are those of one rank."""
    state, metrics = world(1).run(fit, *arguments, **options)[0]
    for size in sizes:
        for other, logged in world(size).run(fit, *arguments, **options):
            torch.testing.assert_close(other, state, rtol=1e-12, atol=1e-12)
            assert logged == pytest.approx(metrics, rel=1e-12)


class Halved(Net):
    """The second half of every batch does not count: on two ranks, one rank's whole chunk."""

    norm = True
    named = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch[0], batch[1]
        kept = y[:, 1] > -90
        error = self(x) - y
        loss, weight = error[kept].square().mean() + error[kept].abs().mean(), kept.sum()
        if self.named:
            return {"loss": {"a": loss, "b": error.abs().mean()}, "weight": {"a": weight, "b": len(x)}}
        return {"loss": loss, "weight": weight}


class NamedHalved(Halved):
    named = True


def fit_halved(kind: type[Net], accumulate: int) -> Any:
    module = kind()
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(16, size, dtype=F64, generator=generator) for size in (4, 2))
    y[4:8, 1] = y[12:16, 1] = -99.0
    trainer = make_trainer(GradAvgStrategy(**single()), max_epochs=2, accumulate_grad_batches=accumulate)
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=8))
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.filterwarnings("ignore:rank . has a micro-batch of weight 0")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", [Halved, NamedHalved])
def test_samples_of_weight_zero_stay_in_the_statistics(world, kind, accumulate):
    """On one device, samples that do not count still shape batch norm, and so the gradient of those that do."""
    expected = world(1).run(fit_halved, kind, accumulate)[0]
    for size in (2, 3):
        for state in world(size).run(fit_halved, kind, accumulate):
            torch.testing.assert_close(state, expected, rtol=1e-12, atol=1e-12)


class Normed(Net):
    norm = True


class NormedEnd(Normed):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]), batch[1]

    def training_step_end(self, outputs: Any) -> Tensor:
        return nn.functional.mse_loss(*outputs)


class ManualNormed(Normed):
    def build(self) -> None:
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


@pytest.mark.parametrize("kind", [Normed, NormedEnd])
@pytest.mark.parametrize(("size", "replicas", "samples"), [(1, 2, 3), (2, 2, 3), (2, 4, 5), (4, 4, 5)])
def test_a_replica_of_one_sample_is_an_error_on_all_ranks(world, kind, size, replicas, samples):
    """Batch norm refuses one value per channel on the ranks that have it; no other rank may wait for them."""
    for raised in world(size).run_expecting_errors(fit, kind, parallel(replicas), samples, samples):
        assert raised.type_name == "ValueError"
        assert f"a batch of {samples} samples in {replicas} replicas gives one of them a single sample" in raised.message


@pytest.mark.parametrize("strategy", [parallel(1), single()], ids=str)
def test_manual_optimization_does_not_lose_the_error(world, strategy):
    """Without a loss to carry the news, the error of batch norm is raised at once."""
    for raised in world(1).run_expecting_errors(fit, ManualNormed, strategy, 1, 1):
        assert "single sample" in raised.message or "more than 1 value per channel" in raised.message


class Assigns(Net):
    """Assigns new tensors to its buffers."""

    steps: Tensor

    def build(self) -> None:
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps = self.steps + 1
        return super().training_step(batch, batch_idx) * (1 + 0.01 * self.steps)


def test_one_device_keeps_assigned_buffers(world):
    """Under single_device a tensor that is assigned in place of a buffer stays, as it does on one process."""
    state, _ = world(1).run(fit, Assigns, single())[0]
    assert state["steps"] == 6
    assert_same(world, (2, 3), Assigns, single())


def fit_caught() -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state, _ = fit(Assigns, parallel())
    return state["steps"], [str(one.message) for one in caught if "assigns a new tensor" in str(one.message)]


def test_replicas_drop_assigned_buffers_with_a_word(world):
    """Under data_parallel it is dropped, as nn.DataParallel does, and rank zero says so once."""
    (steps, messages), *others = world(2).run(fit_caught)
    assert steps == 0
    assert len(messages) == 1
    assert "to the buffer steps" in messages[0]
    assert all(messages == [] for _, messages in others)


class Lazy(Net):
    """Makes a buffer in its first step: of None, or one that was not registered."""

    registered = True

    def build(self) -> None:
        if self.registered:
            self.register_buffer("center", None)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if getattr(self, "center", None) is None:
            center = batch[0].mean(0)
            if self.registered:
                self.center = center
            else:
                self.register_buffer("center", center)
        return super().training_step(batch, batch_idx)


class Late(Lazy):
    registered = False


@pytest.mark.parametrize("kind", [Lazy, Late])
def test_buffers_that_come_to_be_in_a_step_are_refused_by_name(world, kind):
    """Each rank would have its own."""
    for raised in world(2).run_expecting_errors(fit, kind, parallel()):
        assert raised.type_name == "RuntimeError"
        assert "center" in raised.message


class Counts(Net):
    """A buffer that counts samples: alike on all ranks while chunks are even."""

    seen: Tensor

    def build(self) -> None:
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += len(batch[0])
        return super().training_step(batch, batch_idx)


def test_buffers_are_compared_after_an_uneven_batch(world):
    """A buffer that counts the rank's samples is found out when the ranks have different numbers of them."""
    for raised in world(3).run_expecting_errors(fit, Counts, single(), 9, 17):
        assert "into the buffers seen on different ranks" in raised.message


class LogsOften(Net):
    """Logs a name three times, one only on rank zero, and one in the replicas whose first sample says so."""

    @property
    def num_replicas(self) -> int:
        strategy: Any = self.trainer.strategy
        return strategy._options.num_replicas or 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for factor in (1, 2, 3):
            self.log("often", factor * loss, on_step=True, on_epoch=True)
        if self.trainer.is_global_zero:
            self.log("rank_zero", 0.5, on_step=False, on_epoch=True)
        if self.num_replicas > 1 and batch[0][0, 0] > 0:  # of some replicas, and so on some ranks
            self.log("sometimes", loss, on_step=False, on_epoch=True)
        return loss


@pytest.mark.parametrize("strategy", [parallel(), single(), single(max_device_batch_size=3)], ids=str)
def test_ranks_may_log_different_names_and_often(world, strategy):
    """A value logged several times, or on some ranks only, is that of those who logged it, and nobody waits."""
    if "max_device_batch_size" in strategy:
        _, metrics = world(2).run(fit, LogsOften, strategy)[0]
        _, expected = world(1).run(fit, LogsOften, single())[0]
        assert metrics["often_epoch"] == pytest.approx(expected["often_epoch"], rel=1e-12)
        return
    assert_same(world, (2, 3), LogsOften, strategy)
    if "num_replicas" in strategy:
        assert "sometimes" in world(4).run(fit, LogsOften, strategy)[3][1]


class LogsDict(NormedEnd):
    norm = False

    def training_step_end(self, outputs: Any) -> Tensor:
        loss = super().training_step_end(outputs)
        self.log_dict({"a": loss, "b": 2 * loss}, on_step=True, on_epoch=True)
        self.log("infinite", torch.tensor(torch.inf), reduce_fx="sum", on_step=False, on_epoch=True)
        return loss


def test_log_dict_of_the_whole_batch(world):
    """`log_dict` weighs by the whole batch, too, and what is summed over ranks is counted once, if infinite."""
    assert_same(world, (2, 3, 4), LogsDict, parallel())


class OwnLog(Net):
    def log(self, name: str, value: Any, **options: Any) -> None:  # type: ignore[override]  # as users narrow it
        super().log(f"mine/{name}", value, **options)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss


def test_a_modules_own_log_is_called(world):
    """A `log` of the user's own may take what it likes."""
    assert set(world(2).run(fit, OwnLog, parallel())[0][1]) == {"mine/loss"}
    assert_same(world, (2,), OwnLog, parallel())


class Gathers(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return gather(self(batch[0])).square().mean()


class AllGathers(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.all_gather(self(batch[0]), sync_grads=True).square().mean()


@pytest.mark.parametrize(("kind", "strategy"), [(Gathers, parallel(2, recompute_replicas=True)), (AllGathers, parallel(4))])
def test_gathering_in_a_step_that_ranks_run_unequally_often_is_refused(world, kind, strategy):
    """Recomputed or several, replicas would gather past each other."""
    for raised in world(2).run_expecting_errors(fit, kind, strategy, 8, 9):
        assert "training_step gathers over the ranks" in raised.message


class Hooks(Net):
    """Clamps gradients in a hook, and counts its calls."""

    def build(self) -> None:
        self.calls = [0, 0]

    def on_before_backward(self, loss: Tensor) -> None:
        self.calls[0] += 1

    def on_after_backward(self) -> None:
        self.calls[1] += 1
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.clamp_(-0.01, 0.01)

    def on_train_end(self) -> None:
        assert self.calls == [6, 6]


def test_hooks_see_one_backward(world):
    """`on_before_backward` and `on_after_backward` are called once per batch, with the reduced gradient."""
    assert_same(world, (2, 4), Hooks, parallel())


class Teaches(Net):
    """Moves a teacher in its training step."""

    def build(self) -> None:
        self.teacher = nn.Linear(4, 5).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.a.weight, 0.1)
        return super().training_step(batch, batch_idx)


def test_parameters_written_in_a_replica_are_refused_by_name(world):
    """A teacher that a rank moves once per replica would drift from that of other world sizes."""
    for raised in world(2).run_expecting_errors(fit, Teaches, parallel()):
        assert "training_step has written the parameters teacher.weight" in raised.message
    assert_same(world, (2,), Teaches, single())


class Terms(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        error = self(batch[0]) - batch[1]
        terms = {"a": error.square().mean(), "b": error.abs().mean()}
        return {"loss": terms, "weight": {"a": len(error), "b": 2 * len(error)}, "names": ["x"] * len(error)}


def test_named_terms_of_recomputed_replicas(world):
    """A replica is computed again in every backward through it; outputs that are no tensors are left as lists."""
    expected, _ = world(1).run(fit, Terms, parallel())[0]
    state, _ = world(1).run(fit, Terms, parallel(recompute_replicas=True))[0]
    torch.testing.assert_close(state, expected, rtol=1e-12, atol=1e-12)
    assert_same(world, (2, 3), Terms, parallel(recompute_replicas=True))


class Defaults(NormedEnd):
    norm = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return defaultdict(list, outputs=self(batch[0]), targets=batch[1])

    def training_step_end(self, outputs: Any) -> Tensor:
        assert isinstance(outputs, defaultdict)
        return nn.functional.mse_loss(outputs["outputs"], outputs["targets"])


def test_outputs_keep_their_type(world):
    """Gathered outputs are of the mapping's own type."""
    assert_same(world, (2,), Defaults, parallel())


class Evaluated(NormedEnd):
    """Uses a layer in the hook after its validation step."""

    norm = False

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.a(batch[0])

    def validation_step_end(self, outputs: Tensor) -> None:
        self.log("value", self.b(outputs).float().mean())


def validate_mixed(strategy: Mapping[str, Any]) -> float:
    module = Evaluated().float()
    x = torch.linspace(-1, 1, 40).reshape(10, 4)
    trainer = make_trainer(GradAvgStrategy(**strategy), precision="bf16-mixed")
    trainer.validate(module, DataLoader(TensorDataset(x), batch_size=4), verbose=False)
    return float(trainer.callback_metrics["value"])


@pytest.mark.parametrize("strategy", [parallel(), single()], ids=str)
def test_hooks_of_evaluation_run_in_the_precision_of_the_step(world, strategy):
    """`validation_step_end` runs under the autocast of `validation_step`."""
    expected = world(1).run(validate_mixed, strategy)[0]
    assert world(2).run(validate_mixed, strategy) == pytest.approx([expected] * 2, rel=1e-6)
