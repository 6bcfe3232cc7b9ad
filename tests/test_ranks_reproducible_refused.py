"""What `reproducible=True` cannot serve is an error that says what to do, and fingerprints tell states apart."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from ranks import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gradavg import GradAvgMonitor, GradAvgStrategy, monitor


def of_replicas(replicas: int = 4, **options: Any) -> GradAvgStrategy:
    return GradAvgStrategy(**{"num_replicas": replicas, "reproducible": True, **options})


class Model(LightningModule):
    """A linear layer."""

    reduction = "mean"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = self.make()

    def make(self) -> nn.Module:
        return nn.Linear(3, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Manual(Model):
    """It steps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class StepEnd(Model):
    """A loss of all outputs."""

    def training_step_end(self, outputs: Any) -> Any:
        return outputs


class Sparse(Model):
    """A table with sparse gradients."""

    def make(self) -> nn.Module:
        return nn.EmbeddingBag(3, 2, sparse=True)


class Terms(Model):
    """Terms with a weight each."""

    reduction = "weighted_mean"

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": {"a": loss, "b": loss}, "weight": {"a": 1, "b": 2}}


class Undetermined(Model):
    """An operator that torch has in no deterministic form."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        torch.empty(2).put_(torch.tensor([0]), torch.ones(1))
        return super().training_step(batch, batch_idx)


def fit(
    kind: type[Model] = Model,
    replicas: int = 4,
    *,
    steps: int = 3,
    seed: int = 0,
    path: str | None = None,
    resumed: str | None = None,
    **trainer_options: Any,
) -> list[str]:
    """Body: train; return the fingerprints after all steps."""
    strategy, module, prints = of_replicas(replicas, reduction=kind.reduction), kind(), []

    class Fingerprints(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            prints.append(strategy.fingerprint())
            if path is not None and trainer.global_step == 2:
                trainer.save_checkpoint(path)

    torch.manual_seed(seed)
    callbacks = [Fingerprints(), *trainer_options.pop("callbacks", [])]
    options = {"max_epochs": 1, "limit_train_batches": steps, **trainer_options}
    trainer = make_trainer(strategy, callbacks=callbacks, **options)
    data: Any = torch.arange(72.0).view(24, 3) / 72
    trainer.fit(module, DataLoader(data, batch_size=8), ckpt_path=resumed)
    return prints


@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        ({"replicas": 4}, 3, r"num_replicas=4 on 3 ranks, .* Use 1, 2, 4 of them"),
        ({"replicas": 2}, 4, r"num_replicas=2 on 4 ranks, .* Use 1, 2 of them"),
        ({"kind": Manual}, 2, "reproducible=True cannot hold:\n  manual optimization"),
        ({"kind": StepEnd, "replicas": 2}, 2, "reproducible=True cannot hold:\n  training_step_end: "),
        ({"kind": Sparse}, 2, "sparse gradients in net"),
        ({"kind": Terms}, 2, "serves one weight for the whole loss, got one for each of 'a', 'b'"),
        ({"kind": Undetermined}, 2, "put_ does not have a deterministic implementation"),
    ],
    ids=str,
)
def test_runs_that_are_refused(world, options, ranks, message):
    for raised in world(ranks).run_expecting_errors(fit, **options):
        assert re.search(message, raised.message), raised


def test_a_fingerprint_tells_states_apart(world):
    ((first, *others),) = world(1).run(fit)
    assert [[first, *others]] * 2 == world(2).run(fit)
    assert 3 == len({first, *others})
    assert all(re.fullmatch("[0-9a-f]{16}", one) for one in (first, *others))
    ((of_other_seed, *_),) = world(1).run(fit, seed=1)
    assert first != of_other_seed


def test_a_fingerprint_of_nothing():
    with pytest.raises(RuntimeError, match="nothing to take a fingerprint of before the Trainer has begun a run"):
        of_replicas().fingerprint()


def monitored() -> tuple[list[str], list[str]]:
    """Body: return the fingerprints after all steps, and what the monitor says of them on rank 0."""
    said: list[str] = []
    with mock.patch.object(monitor, "rank_zero_info", said.append):
        prints = fit(callbacks=[GradAvgMonitor(every_n_steps=1, fingerprint_every_n_steps=2)], max_epochs=2)
    return prints, said


def test_the_monitor_writes_fingerprints(world):
    for prints, said in world(2).run(monitored):
        expected = [f"GradAvgMonitor: after step {step}, fingerprint {prints[step - 1]}" for step in (2, 4, 6)]
        assert expected == said


def test_a_resumed_run_computes_alike(world, tmp_path):
    path = str(tmp_path / "saved.ckpt")
    world(2).run(fit, path=path)
    (whole,) = world(1).run(fit, max_epochs=2)
    assert [whole[2:]] * 4 == world(4).run(fit, resumed=path, max_epochs=2)
