"""What cannot be reproduced is refused on all ranks by name, and what only differs is remarked once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from replicas import Classifier, ClassifierEnd, Options, Regression, RegressionEnd, fit, outcome, parallel, single
from torch import Tensor, nn

from lightning_gradavg import gather


class Manual(Classifier):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__(**parts)
        self.automatic_optimization = False


class ManualStepEnd(Manual):
    def training_step_end(self, outputs: Any) -> None:
        raise AssertionError("never called")


class OwnNorm(nn.BatchNorm1d):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * 2


class OwnBuffer(nn.Module):
    """Keeps the mean of what it saw in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen.copy_(inputs.detach().mean())
        return inputs


PARTS: dict[str, Callable[[], nn.Module]] = {
    "drop": lambda: nn.Dropout(0.5),
    "own": lambda: OwnNorm(3),
    "buffer": OwnBuffer,
    "sync": lambda: nn.SyncBatchNorm(3),
}


def run(module: type[LightningModule], strategy: Options, *parts: str) -> None:
    fit(module(**{part: PARTS[part]() for part in parts}), strategy)


REFUSED: dict[str, tuple[type[LightningModule], Options, tuple[str, ...]]] = {
    "manual optimization with num_replicas=4 on 2": (Manual, parallel(), ()),
    "training_step_end with manual optimization": (ManualStepEnd, {"equivalent_to": "data_parallel"}, ()),
    "static_graph=True with num_rep": (Classifier, parallel(static_graph=True), ()),
    "reduction='sum' with training_step_end": (ClassifierEnd, parallel(2, reduction="sum"), ()),
    "training_step_end with num_replicas=4 on 2 ranks": (ClassifierEnd, parallel(), ()),
    "training_step_end with num_replicas=1 on 2 ranks": (ClassifierEnd, parallel(1), ()),
    "SyncBatchNorm in parts.sync: torch has it on accelerators only": (Classifier, single(), ("sync",)),
    "SyncBatchNorm in parts.sync: with equivalent_to='data_parallel'": (Classifier, parallel(), ("sync",)),
    "batch norm with a forward of its own in parts.own": (Classifier, single(), ("own",)),
    "max_device_batch_size=2 with batch norm in norm": (Classifier, single(max_device_batch_size=2), ()),
    "into the buffers parts.buffer.seen on different ranks": (Classifier, single(), ("buffer",)),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_reproduced_is_an_error_on_all_ranks(world, text):
    module, strategy, parts = REFUSED[text]
    for raised in world(2).run_expecting_errors(run, module, strategy, *parts):
        assert raised.type_name == "ValueError"
        assert text in raised.message


class Whole(ClassifierEnd):
    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return {**output, "loss": nn.functional.cross_entropy(output["logits"], output["labels"])}


def remarked(module: type[LightningModule], strategy: Options, text: str, *parts: str) -> int:
    """Body: return how many warnings contain a text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(module, strategy, *parts)
    return sum(text in str(warning.message) for warning in caught)


@pytest.mark.parametrize(
    ("module", "strategy", "parts", "text", "times"),
    [
        (Classifier, single(), ("drop",), "random numbers drawn in parts.drop differ between ranks", 1),
        (Classifier, single(), (), "random numbers", 0),
        (Whole, {"split_batches": True}, (), "training_step_end is not called", 1),
    ],
)
def test_what_only_differs_is_remarked_once(world, module, strategy, parts, text, times):
    assert [times, 0] == world(2).run(remarked, module, strategy, text, *parts)


class Normed(Regression):
    norm = True


class NormedEnd(RegressionEnd):
    norm = True


class ManualNormed(Normed):
    def build(self) -> None:
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "size", "replicas", "samples"),
    [
        (Normed, 1, 2, 3),
        (Normed, 4, 4, 5),
        (NormedEnd, 2, 2, 3),
    ],
)
def test_a_replica_of_one_sample_is_an_error_on_all_ranks(world, kind, size, replicas, samples):
    for raised in world(size).run_expecting_errors(outcome, kind, parallel(replicas), samples, samples):
        assert raised.type_name == "ValueError"
        assert (
            f"a batch of {samples} samples in {replicas} replicas gives one of them a single sample" in raised.message
        )


@pytest.mark.parametrize("strategy", [parallel(1), single()], ids=str)
def test_manual_optimization_does_not_lose_the_error(world, strategy):
    for raised in world(1).run_expecting_errors(outcome, ManualNormed, strategy, 1, 1):
        assert "single sample" in raised.message or "more than 1 value per channel" in raised.message


class Gathers(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return gather(self(batch[0])).square().mean()


class AllGathers(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.all_gather(self(batch[0]), sync_grads=True).square().mean()


@pytest.mark.parametrize("kind", [Gathers, AllGathers])
def test_gathering_in_a_step_that_ranks_run_unequally_often_is_refused(world, kind):
    for raised in world(2).run_expecting_errors(outcome, kind, parallel(), 8, 9):
        assert "training_step gathers over the ranks" in raised.message
