"""What cannot be reproduced is refused on all ranks by name, and what only differs is remarked once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from data_parallel import ByHand, Model, Normed, Numbers, Options, Rows, Terms, fit, parallel, single
from torch import Tensor, nn

from lightning_gradavg import gather


class RowsByHand(Rows):
    manual = True


class Ignored(Model):
    """Has a hook that only presets call."""

    def training_step_end(self, outputs: Any) -> Any:
        raise AssertionError


class Sums(Normed):
    """Keeps in a buffer what a rank saw."""

    def forward(self, x: Tensor) -> Any:
        self.seen.copy_(x.sum())
        return self.net(x)


class Dropped(Model):
    def build(self) -> nn.Module:
        return nn.Sequential(super().build(), nn.Dropout(0.5))


class Synchronized(Model):
    def build(self) -> nn.Module:
        return nn.Sequential(super().build(), nn.SyncBatchNorm(4))


class Gathers(Model):
    def forward(self, x: Tensor) -> Any:
        return gather(self.net(x)).mean(0)


class AllGathers(Model):
    def forward(self, x: Tensor) -> Any:
        return self.all_gather(self.net(x), sync_grads=True).mean((0, 1))


class Assigns(Model):
    """Assigns a new tensor to its buffer, or makes one in its first step, of None or without a name."""

    first: Any = 0.0

    def build(self) -> nn.Module:
        if self.first is not False:
            self.register_buffer("center", None if self.first is None else torch.tensor(self.first))
        return super().build()

    def forward(self, x: Tensor) -> Any:
        if self.first is False:
            self.register_buffer("center", x.mean(0))
        self.center = x.mean(0)
        return super().forward(x)


class Lazy(Assigns):
    first = None


class Late(Assigns):
    first = False


class Teaches(Model):
    """Moves a teacher in its training step."""

    def build(self) -> nn.Module:
        self.teacher = nn.Linear(13, 33).requires_grad_(False)
        return super().build()

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.net[0].weight, 0.1)
        return super().forward(x)


EACH, BITS = parallel(None), {"reproducible": True}
# On 2 ranks. Of the batch, the 4 replicas on them get 3, 3, 3 and 0 samples; one sample leaves a rank without.
ONE_BATCH, ONE_SAMPLE = ({"sizes": [size], "times": 1} for size in (9, 1))

REFUSED: list[tuple[str, type[Model], Options, str]] = [
    ("ValueError", ByHand, parallel(), "manual optimization with num_replicas=4 on 2"),
    ("ValueError", RowsByHand, EACH, "training_step_end with manual optimization"),
    ("ValueError", Model, parallel(static_graph=True), "static_graph=True with num_rep"),
    ("ValueError", Rows, parallel(2, reduction="sum"), "reduction='sum' with training_step_end"),
    ("ValueError", Rows, parallel(), "training_step_end with num_replicas=4 on 2 ranks"),
    ("ValueError", Rows, parallel(1), "training_step_end with num_replicas=1 on 2 ranks"),
    ("ValueError", Synchronized, parallel(), "SyncBatchNorm in net.1: with equivalent_to='data_parallel'"),
    ("ValueError", Normed, single(max_device_batch_size=2), "max_device_batch_size=2 with batch norm in net.2,"),
    ("RuntimeError", Sums, single(), "buffer 'seen' is not the same on all of them"),
    ("ValueError", Model, parallel(3, **BITS), "num_replicas=3 on 2 ranks, as the number of processes"),
    ("ValueError", Model, parallel(5, **BITS), "Use 1, 5 of them, or another num_replicas"),
    ("ValueError", ByHand, parallel(2, **BITS), "reproducible=True cannot hold:\n  manual optimization"),
    ("ValueError", Rows, parallel(2, **BITS), "training_step_end: the gradient of one loss"),
    ("TypeError", Numbers, single(), "output['loss'] of training_step is one number"),
    ("ValueError", Terms, parallel(2, **BITS), "serves one weight for the whole loss, got one for each of 'a', 'b'"),
    ("ValueError", Terms, parallel(), "named loss terms need the global weight of each"),
    ("RuntimeError", Gathers, parallel(), "training_step gathers over the ranks"),
    ("RuntimeError", AllGathers, parallel(), "training_step gathers over the ranks"),
    ("RuntimeError", AllGathers, single(), "calls self.all_gather, but 1 of 2 ranks have no samples"),
    ("RuntimeError", Assigns, single(), "assigned or made the buffers center"),
    ("RuntimeError", Lazy, parallel(), "assigned or made the buffers center"),
    ("RuntimeError", Late, parallel(), "assigned or made the buffers center"),
    ("RuntimeError", Teaches, parallel(), "training_step has written the parameters teacher.weight"),
]


@pytest.mark.parametrize(("error", "kind", "strategy", "text"), REFUSED)
def test_what_cannot_be_reproduced_is_an_error_on_all_ranks(world, error, kind, strategy, text):
    load = ONE_SAMPLE if "no samples" in text else ONE_BATCH
    for raised in world(2).run_expecting_errors(fit, kind, strategy, load=load):
        assert raised.type_name == error
        assert text in raised.message


def remarked(kind: type[Model], strategy: Options, text: str) -> int:
    """Body: return how many warnings contain a text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(kind, strategy, load=ONE_BATCH)
    return sum(text in str(warning.message) for warning in caught)


@pytest.mark.parametrize(
    ("kind", "strategy", "text", "times"),
    [
        (Dropped, single(), "random numbers drawn in net.1 differ between ranks", 1),
        (Model, single(), "random numbers", 0),
        (Ignored, {"split_batches": True}, "training_step_end of Lightning 1.x is not called", 1),
    ],
)
def test_what_only_differs_is_remarked_once(world, kind, strategy, text, times):
    assert [times, 0] == world(2).run(remarked, kind, strategy, text)
