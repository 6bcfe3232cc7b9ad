"""What cannot be reproduced is refused on all ranks by name, and what only differs is remarked once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from replicas import Manual, Normed, Options, Regression, RegressionEnd, data, fit, parallel, single
from torch import Tensor, nn

from lightning_gradavg import gather


class ManualEnd(RegressionEnd):
    """Has both."""

    def build(self) -> None:
        self.automatic_optimization = False


class Numbers(RegressionEnd):
    """Returns one number of its samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"errors": self(batch[0]) - batch[1], "penalty": self(batch[0]).mean()}


class Ignored(Regression):
    """Has a hook that only presets call."""

    def training_step_end(self, outputs: Any) -> Any:
        raise AssertionError


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
    "sync": lambda: nn.SyncBatchNorm(2),
}


def run(module: type[Regression], strategy: Options, text: str) -> None:
    """Train a module with the parts that the text names."""
    parts = {part: make() for part, make in PARTS.items() if f"parts.{part}" in text}
    samples = {"gathers over": 9, "more than 1 value": 1, "no samples": 1}
    size = next((size for words, size in samples.items() if words in text), 8)
    fit(module(**parts), strategy, data(size, size))


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

REFUSED: list[tuple[str, type[Regression], Options, str]] = [
    ("ValueError", Manual, parallel(), "manual optimization with num_replicas=4 on 2"),
    ("ValueError", ManualEnd, PER_RANK, "training_step_end with manual optimization"),
    ("ValueError", Regression, parallel(static_graph=True), "static_graph=True with num_rep"),
    ("ValueError", RegressionEnd, parallel(2, reduction="sum"), "reduction='sum' with training_step_end"),
    ("ValueError", RegressionEnd, parallel(), "training_step_end with num_replicas=4 on 2 ranks"),
    ("ValueError", RegressionEnd, parallel(1), "training_step_end with num_replicas=1 on 2 ranks"),
    ("ValueError", Regression, parallel(), "SyncBatchNorm in parts.sync: with equivalent_to='data_parallel'"),
    ("ValueError", Normed, single(max_device_batch_size=2), "max_device_batch_size=2 with batch norm in n,"),
    ("RuntimeError", Regression, single(), "buffer 'parts.buffer.seen' is not the same on all of them"),
    ("ValueError", Regression, parallel(3, **BITS), "num_replicas=3 on 2 ranks, as the number of processes"),
    ("ValueError", Regression, parallel(5, **BITS), "Use 1, 5 of them, or another num_replicas"),
    ("ValueError", Manual, parallel(2, **BITS), "reproducible=True cannot hold:\n  manual optimization"),
    ("ValueError", RegressionEnd, parallel(2, **BITS), "training_step_end: the gradient of one loss"),
    ("TypeError", Numbers, single(), "output['penalty'] of training_step is one number"),
    ("ValueError", Terms, parallel(2, **BITS), "serves one weight for the whole loss, got one for each of 'a', 'b'"),
    ("ValueError", Terms, parallel(), "named loss terms need the global weight of each"),
    ("RuntimeError", Gathers, parallel(), "training_step gathers over the ranks"),
    ("RuntimeError", AllGathers, parallel(), "training_step gathers over the ranks"),
    ("RuntimeError", AllGathers, single(), "calls self.all_gather, but 1 of 2 ranks have no samples"),
    ("RuntimeError", Assigns, single(), "assigned or made the buffers center"),
    ("RuntimeError", Lazy, parallel(), "assigned or made the buffers center"),
    ("RuntimeError", Late, parallel(), "assigned or made the buffers center"),
    ("RuntimeError", Teaches, parallel(), "training_step has written the parameters teacher.weight"),
    ("ValueError", Normed, single(), "Expected more than 1 value per channel"),
]


@pytest.mark.parametrize(("error", "module", "strategy", "text"), REFUSED)
def test_what_cannot_be_reproduced_is_an_error_on_all_ranks(world, error, module, strategy, text):
    for raised in world(2).run_expecting_errors(run, module, strategy, text):
        assert raised.type_name == error
        assert text in raised.message


def remarked(module: type[Regression], strategy: Options, text: str) -> int:
    """Body: return how many warnings contain a text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(module, strategy, text)
    return sum(text in str(warning.message) for warning in caught)


@pytest.mark.parametrize(
    ("module", "strategy", "text", "times"),
    [
        (Regression, single(), "random numbers drawn in parts.drop differ between ranks", 1),
        (Regression, single(), "random numbers", 0),
        (Ignored, {"split_batches": True}, "training_step_end of Lightning 1.x is not called", 1),
    ],
)
def test_what_only_differs_is_remarked_once(world, module, strategy, text, times):
    assert [times, 0] == world(2).run(remarked, module, strategy, text)
