"""What cannot be reproduced is refused on all ranks by name, and what only differs is remarked once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from replicas import (
    Classifier,
    ClassifierEnd,
    Normed,
    Options,
    Regression,
    fit,
    outcome,
    parallel,
    single,
)
from torch import Tensor, nn

from lightning_gradavg import gather


class ManualClassifier(Classifier):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__(**parts)
        self.automatic_optimization = False


class ManualStepEnd(ManualClassifier, ClassifierEnd):
    """Has both."""


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
    "buffer": OwnBuffer,
    "sync": lambda: nn.SyncBatchNorm(3),
}


def run(module: type[LightningModule], strategy: Options, *parts: str) -> None:
    fit(module(**{part: PARTS[part]() for part in parts}), strategy)


class Gathers(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return gather(self(batch[0])).square().mean()


class AllGathers(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.all_gather(self(batch[0]), sync_grads=True).square().mean()


class Terms(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        error = self(batch[0]) - batch[1]
        terms = {"a": error.square().mean(), "b": error.abs().mean()}
        return {"loss": terms, "weight": {"a": len(error), "b": 2 * len(error)}, "names": ["x"] * len(error)}


class Assigns(Regression):
    """Assigns a new tensor to its buffer, or makes one in its first step, of None or without a name."""

    first: Any = 0.0

    def build(self) -> None:
        if self.first is not False:
            self.register_buffer("center", None if self.first is None else torch.tensor(self.first))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        center = batch[0].mean(0)
        if self.first is False:
            self.register_buffer("center", center)
        self.center = center
        return super().training_step(batch, batch_idx)


class Lazy(Assigns):
    first = None


class Late(Assigns):
    first = False


class Teaches(Regression):
    """Moves a teacher in its training step."""

    def build(self) -> None:
        self.teacher = nn.Linear(4, 5).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.a.weight, 0.1)
        return super().training_step(batch, batch_idx)


PER_RANK = {"equivalent_to": "data_parallel"}

BITS = {"reproducible": True}

REFUSED: list[tuple[str, type[LightningModule], Options, str]] = [
    ("ValueError", ManualClassifier, parallel(), "manual optimization with num_replicas=4 on 2"),
    ("ValueError", ManualStepEnd, PER_RANK, "training_step_end with manual optimization"),
    ("ValueError", Classifier, parallel(static_graph=True), "static_graph=True with num_rep"),
    ("ValueError", ClassifierEnd, parallel(2, reduction="sum"), "reduction='sum' with training_step_end"),
    ("ValueError", ClassifierEnd, parallel(), "training_step_end with num_replicas=4 on 2 ranks"),
    ("ValueError", ClassifierEnd, parallel(1), "training_step_end with num_replicas=1 on 2 ranks"),
    ("ValueError", Classifier, parallel(), "SyncBatchNorm in parts.sync: with equivalent_to='data_parallel'"),
    ("ValueError", Classifier, single(max_device_batch_size=2), "max_device_batch_size=2 with batch norm in norm"),
    ("RuntimeError", Classifier, single(), "buffer 'parts.buffer.seen' is not the same on all of them"),
    (
        "ValueError",
        Classifier,
        parallel(3, **BITS),
        "num_replicas=3 on 2 ranks, as the number of processes",
    ),
    ("ValueError", Classifier, parallel(5, **BITS), "Use 1, 5 of them, or another num_replicas"),
    ("ValueError", ManualClassifier, parallel(2, **BITS), "reproducible=True cannot hold:\n  manual optimization"),
    ("ValueError", ClassifierEnd, parallel(2, **BITS), "training_step_end: the gradient of one loss"),
    ("ValueError", Terms, parallel(2, **BITS), "serves one weight for the whole loss, got one for each of 'a', 'b'"),
    ("ValueError", Terms, parallel(), "named loss terms need the global weight of each"),
    ("RuntimeError", Gathers, parallel(), "training_step gathers over the ranks"),
    ("RuntimeError", AllGathers, parallel(), "training_step gathers over the ranks"),
    ("RuntimeError", Assigns, single(), "assigned or made the buffers center"),
    ("RuntimeError", Lazy, parallel(), "assigned or made the buffers center"),
    ("RuntimeError", Late, parallel(), "assigned or made the buffers center"),
    ("RuntimeError", Teaches, parallel(), "training_step has written the parameters teacher.weight"),
    ("ValueError", Normed, single(), "Expected more than 1 value per channel"),
]


def refused(module: type[LightningModule], strategy: Options, text: str) -> None:
    """Body: train a module, with the part that the text names."""
    if issubclass(module, Regression):
        samples = {"gathers over": 9, "more than 1 value": 1}
        size = next((size for words, size in samples.items() if words in text), 8)
        outcome(module, strategy, size, size)
    else:
        run(module, strategy, *(part for part in PARTS if f"parts.{part}" in text))


@pytest.mark.parametrize(("error", "module", "strategy", "text"), REFUSED)
def test_what_cannot_be_reproduced_is_an_error_on_all_ranks(world, error, module, strategy, text):
    for raised in world(2).run_expecting_errors(refused, module, strategy, text):
        assert raised.type_name == error
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
        (Whole, {"split_batches": True}, (), "training_step_end of Lightning 1.x is not called", 1),
    ],
)
def test_what_only_differs_is_remarked_once(world, module, strategy, parts, text, times):
    assert [times, 0] == world(2).run(remarked, module, strategy, text, *parts)
