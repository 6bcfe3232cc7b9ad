"""What cannot be reproduced is refused on all ranks by name, and what only differs is remarked once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from replicas import Classifier, ClassifierEnd, Options, Regression, RegressionEnd, fit, outcome, parallel, single
from torch import Tensor, nn

from lightning_gradavg import gather


class Manual(Classifier):
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


def refused(module: type[LightningModule], strategy: Options, parts: Sequence[str] = (), **options: Any) -> None:
    made = {"drop": lambda: nn.Dropout(0.5), "own": lambda: OwnNorm(3), "buffer": OwnBuffer, "sync": _sync}
    fit(module(**{part: made[part]() for part in parts}), strategy, **options)


def _sync() -> nn.Module:
    return nn.SyncBatchNorm(3)


REFUSED = {
    "manual optimization": (Manual, parallel(), (), "ValueError", "manual optimization with num_replicas=4 on 2"),
    "manual step end": (
        ManualStepEnd,
        {"equivalent_to": "data_parallel"},
        (),
        "ValueError",
        "training_step_end with manual optimization",
    ),
    "static graph": (
        Classifier,
        {**parallel(), "static_graph": True},
        (),
        "ValueError",
        "static_graph=True with num_rep",
    ),
    "summed whole batch": (
        ClassifierEnd,
        {**parallel(2), "reduction": "sum"},
        (),
        "ValueError",
        "reduction='sum' with training_step_end",
    ),
    "whole batch of more replicas than ranks": (
        ClassifierEnd,
        parallel(),
        (),
        "ValueError",
        "training_step_end with num_replicas=4 on 2 ranks",
    ),
    "whole batch of fewer replicas than ranks": (
        ClassifierEnd,
        parallel(1),
        (),
        "ValueError",
        "training_step_end with num_replicas=1 on 2 ranks",
    ),
    "synchronized norm on a CPU": (
        Classifier,
        {"equivalent_to": "single_device"},
        ("sync",),
        "ValueError",
        "SyncBatchNorm in parts.sync: torch has it on accelerators only",
    ),
    "synchronized norm in a replica": (Classifier, parallel(), ("sync",), "ValueError", "SyncBatchNorm in parts.sync"),
    "unknown norm on one device": (
        Classifier,
        {"equivalent_to": "single_device"},
        ("own",),
        "ValueError",
        "batch norm with a forward of its own in parts.own",
    ),
    "norm in micro-batches": (
        Classifier,
        {"equivalent_to": "single_device", "max_device_batch_size": 2},
        (),
        "ValueError",
        "max_device_batch_size=2 with batch norm in norm",
    ),
    "buffer of one rank": (
        Classifier,
        {"equivalent_to": "single_device"},
        ("buffer",),
        "ValueError",
        "into the buffers parts.buffer.seen on different ranks",
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
    first, *others = world(3).run(remarked, Classifier, {"equivalent_to": "single_device"}, ("drop",))
    assert sum("random numbers drawn in parts.drop are those of each rank" in message for message in first) == 1
    assert not any("random numbers" in message for messages in others for message in messages)


def test_dropout_of_rate_zero_is_no_remark(world):
    """A layer that draws nothing is not named."""
    messages = world(2).run(remarked, Classifier, {"equivalent_to": "single_device"}, ())[0]
    assert not any("random numbers" in message for message in messages)


class Whole(ClassifierEnd):
    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return {**output, "loss": nn.functional.cross_entropy(output["logits"], output["labels"])}


def hook_is_remarked() -> list[str]:
    return remarked(Whole, {"split_batches": True})


def test_the_hook_that_lightning_ignores_is_remarked(world):
    """Without a preset, `training_step_end` is not called, as ever since Lightning 2.0; now somebody says so."""
    messages = world(2).run(hook_is_remarked)[0]
    assert sum("training_step_end is not called" in message for message in messages) == 1


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
        (Normed, 2, 2, 3),
        (Normed, 2, 4, 5),
        (Normed, 4, 4, 5),
        (NormedEnd, 2, 2, 3),
        (NormedEnd, 4, 4, 5),
    ],
)
def test_a_replica_of_one_sample_is_an_error_on_all_ranks(world, kind, size, replicas, samples):
    """Batch norm refuses one value per channel on the ranks that have it; no other rank may wait for them."""
    for raised in world(size).run_expecting_errors(outcome, kind, parallel(replicas), samples, samples):
        assert raised.type_name == "ValueError"
        assert (
            f"a batch of {samples} samples in {replicas} replicas gives one of them a single sample" in raised.message
        )


@pytest.mark.parametrize("strategy", [parallel(1), single()], ids=str)
def test_manual_optimization_does_not_lose_the_error(world, strategy):
    """Without a loss to carry the news, the error of batch norm is raised at once."""
    for raised in world(1).run_expecting_errors(outcome, ManualNormed, strategy, 1, 1):
        assert "single sample" in raised.message or "more than 1 value per channel" in raised.message


class Gathers(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return gather(self(batch[0])).square().mean()


class AllGathers(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.all_gather(self(batch[0]), sync_grads=True).square().mean()


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [(Gathers, parallel()), (AllGathers, parallel())],
)
def test_gathering_in_a_step_that_ranks_run_unequally_often_is_refused(world, kind, strategy):
    """Several replicas of a rank would gather past those of another."""
    for raised in world(2).run_expecting_errors(outcome, kind, strategy, 8, 9):
        assert "training_step gathers over the ranks" in raised.message
