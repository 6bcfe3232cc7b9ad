"""What cannot be reproduced is refused on all ranks by name, and what only differs is remarked once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from data_parallel import ByHand, Model, Normed, Numbers, Options, Rows, Terms, fit, parallel, single
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_gradavg import gather


class RowsByHand(Rows):
    manual = True


class Ignored(Model):
    """Has a hook that only presets call."""

    def training_step_end(self, outputs: Any) -> Any:
        raise AssertionError


LAYERS = {"synchronizes": nn.SyncBatchNorm(4), "drops": nn.Dropout(0.5)}
DOES: dict[str, Callable[[Any, Tensor], Any]] = {
    "keeps what a rank saw": lambda module, x: module.center.copy_(x.sum()),
    "assigns a buffer": lambda module, x: setattr(module, "center", x.mean(0)),
    "assigns a buffer of None": lambda module, x: setattr(module, "center", x.mean(0)),
    "makes a buffer": lambda module, x: module.register_buffer("center", x.mean(0)),
    "moves a teacher": lambda module, x: module.teacher.detach().add_(1),
    "gathers": lambda module, x: gather(module.net(x)),
    "all-gathers": lambda module, x: module.all_gather(module.net(x), sync_grads=True),
    "reduces a metric": lambda module, x: module.metric(x),
}


class Odd(Model):
    """Ends with a layer, or does something in its forward."""

    def __init__(self, dtype: torch.dtype, how: str) -> None:
        super().__init__(dtype)
        self.how, self.metric = how, MeanMetric(dist_sync_on_step=True)
        self.teacher = nn.Parameter(torch.ones(3), requires_grad=False)
        if how != "makes a buffer":
            self.register_buffer("center", None if how == "assigns a buffer of None" else torch.zeros(()))
        if how in LAYERS:
            self.net = nn.Sequential(self.net, LAYERS[how])

    def forward(self, x: Tensor) -> Any:
        DOES.get(self.how, lambda *_: None)(self, x)
        return self.net(x)


Kind = type[Model] | str
EACH, BITS = parallel(None), {"reproducible": True}
PARTS = {"split_batches": True, "max_device_batch_size": 2}
# On 2 ranks. Of the batch, the 4 replicas on them get 3, 3, 3 and 0 samples; one sample leaves a rank without.
ONE_BATCH, ONE_SAMPLE = ({"sizes": [size], "times": 1} for size in (9, 1))

REFUSED: list[tuple[str, Kind, Options, str]] = [
    ("ValueError", ByHand, parallel(), "manual optimization with num_replicas=4 on 2"),
    ("ValueError", RowsByHand, EACH, "training_step_end with manual optimization"),
    ("ValueError", Model, parallel(static_graph=True), "static_graph=True with num_rep"),
    ("ValueError", Rows, parallel(2, reduction="sum"), "reduction='sum' with training_step_end"),
    ("ValueError", Rows, parallel(), "training_step_end with num_replicas=4 on 2 ranks"),
    ("ValueError", Rows, parallel(1), "training_step_end with num_replicas=1 on 2 ranks"),
    ("ValueError", "synchronizes", parallel(), "SyncBatchNorm in net.1: with equivalent_to='data_parallel'"),
    ("ValueError", Normed, single(max_device_batch_size=2), "max_device_batch_size=2 with batch norm in net.2,"),
    ("RuntimeError", "keeps what a rank saw", single(), "buffer 'center' is not the same on all of them"),
    ("ValueError", Model, parallel(3, **BITS), "num_replicas=3 on 2 ranks, as the number of processes"),
    ("ValueError", Model, parallel(5, **BITS), "Use 1, 5 of them, or another num_replicas"),
    ("ValueError", ByHand, parallel(2, **BITS), "reproducible=True cannot hold:\n  manual optimization"),
    ("ValueError", Rows, parallel(2, **BITS), "training_step_end: the gradient of one loss"),
    ("TypeError", Numbers, single(), "output['loss'] of training_step is one number"),
    ("ValueError", Terms, parallel(2, **BITS), "serves one weight for the whole loss, got one for each of 'a', 'b'"),
    ("ValueError", Terms, parallel(), "named loss terms need the global weight of each"),
    ("RuntimeError", "gathers", parallel(), "training_step gathers over the ranks"),
    ("RuntimeError", "all-gathers", PARTS, "training_step gathers over the ranks"),
    ("RuntimeError", "reduces a metric", parallel(), "training_step gathers over the ranks"),
    ("RuntimeError", "all-gathers", single(), "calls self.all_gather, but 1 of 2 ranks have no samples"),
    ("RuntimeError", "assigns a buffer", single(), "assigned or made the buffers center"),
    ("RuntimeError", "assigns a buffer of None", PARTS, "assigned or made the buffers center"),
    ("RuntimeError", "makes a buffer", parallel(), "assigned or made the buffers center"),
    ("RuntimeError", "moves a teacher", parallel(), "training_step has written the parameters teacher"),
]


def fitted(kind: Kind, strategy: Options, load: Options) -> None:
    """Body: train a model, or one of those that are odd."""
    fit(partial(Odd, how=kind) if isinstance(kind, str) else kind, strategy, load=load)


@pytest.mark.parametrize(("error", "kind", "strategy", "text"), REFUSED)
def test_what_cannot_be_reproduced_is_an_error_on_all_ranks(world, error, kind, strategy, text):
    load = ONE_SAMPLE if "no samples" in text else ONE_BATCH
    for raised in world(2).run_expecting_errors(fitted, kind, strategy, load):
        assert raised.type_name == error
        assert text in raised.message


def remarked(kind: Kind, strategy: Options, text: str) -> int:
    """Body: return how many warnings contain a text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted(kind, strategy, ONE_BATCH)
    return sum(text in str(warning.message) for warning in caught)


@pytest.mark.parametrize(
    ("kind", "strategy", "text", "times"),
    [
        ("drops", single(), "random numbers drawn in net.1 differ between ranks", 1),
        (Model, single(), "random numbers", 0),
        (Ignored, {"split_batches": True}, "training_step_end of Lightning 1.x is not called", 1),
    ],
)
def test_what_only_differs_is_remarked_once(world, kind, strategy, text, times):
    assert [times, 0] == world(2).run(remarked, kind, strategy, text)
