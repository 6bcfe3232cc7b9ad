"""`equivalent_to=` on any number of ranks is DataParallel with R replicas, or one, on one process; or it is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from data_parallel import (
    MODELS,
    ByHand,
    Model,
    Normed,
    Options,
    Run,
    Terms,
    assert_same_run,
    fit,
    parallel,
    single,
    train,
)
from ranks import grid
from torch import Tensor, nn
from torch.utils.data import default_collate
from torchmetrics import MeanMetric
from toys import Toy, approx, same_everywhere
from toys import train as train_toy

from lightning_gradavg import gather, global_mean

# Fewer replicas than ranks is what some of these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:num_replicas=. leaves . of . ranks without a replica")

# Of one step, and of 8: batch norm amplifies a rounding, in the reference as here.
TOLERANCES = {torch.float32: (1e-6, 2e-5), torch.float64: (1e-12, 1e-11)}


class Place(NamedTuple):
    num_replicas: int
    world_size: int


@cache
def reference(name: str, dtype: torch.dtype, num_replicas: int, accumulate: int) -> Run:
    model = MODELS[name](dtype)
    return train(model, model.loader(), num_replicas, accumulate)


WINDOWS = [1, 3]  # of 8 loader batches, so that the last window of 3 is a short one
SINGLE: dict[str, Any] = {"equivalent_to": "single_device", "num_replicas": None}
FLOAT32 = {"dtype": torch.float32}
SPLIT = {"equivalent_to": None, "split_batches": True}
RUNS = [
    # The model, replicas on ranks, the window, and options.
    *grid(["cnn", "masked", "sparse"], [Place(4, 1), Place(4, 3), Place(4, 4), Place(3, 4)], WINDOWS, [{}]),
    # Where steps are taken by hand: one replica per rank.
    *(("byhand", Place(size, size), 1, {}) for size in (2, 3)),
    *((name, Place(4, 3), 1, FLOAT32) for name in ("cnn", "masked")),
    ("cnn", Place(4, 3), 1, SPLIT),
    ("cnn", Place(3, 3), 1, {"num_replicas": None}),
    ("cnn", Place(4, 2), 3, {"reproducible": True}),
    ("masked", Place(3, 1), 2, {"reproducible": True}),
    # One replica, of all ranks together.
    *grid(["masked", "sparse", "rows"], [Place(1, size) for size in (3, 4, 2, 1)], [1, 2], [SINGLE], strength=1),
]


@pytest.mark.parametrize(("name", "place", "accumulate", "options"), RUNS, ids=str)
def test_equals_data_parallel(world, name, place, accumulate, options):
    """8 loader batches give the gradients, weights, buffers and losses of DataParallel by hand; ranks are equal."""
    options = {"dtype": torch.float64, **options}
    dtype = options.pop("dtype")
    windows = {"accumulate_grad_batches": accumulate} if accumulate > 1 else {}
    ranks = world(place.world_size).run(fit, MODELS[name], parallel(place.num_replicas) | options, dtype, **windows)
    assert place.world_size == len(ranks)
    assert_same_run(ranks, reference(name, dtype, place.num_replicas, accumulate), *TOLERANCES[dtype])


class Variance(Toy):
    """The loss is the variance of the predictions on the whole batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return gather(self.w * batch).var(correction=0)


@pytest.mark.parametrize(
    ("kind", "xs", "replicas", "sizes", "gradient"),
    [
        (Toy, 5, 2, (1, 2, 3), 55 / 5),
        (Toy, 1, 2, (1, 2, 3), 1.0),
        (Variance, 4, None, (1, 2, 4), 2.5),
        (Variance, 5, None, (2, 3), 4.0),
    ],
)
def test_gradient_by_hand(world, kind, xs, replicas, sizes, gradient):
    """Cases 26 and 27, of the batch 1, 2, ... xs."""
    batches = [[float(x) for x in range(1, xs + 1)]]
    toy = {"kind": "s", "lr": 0.0}
    for size in sizes:
        seen = world(size).run(train_toy, [batches] * size, toy, parallel(replicas), module=kind)
        assert [approx(gradient)] == [one.item() for one in same_everywhere(seen).gradients]


class Ignored(Model):
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
    "takes a global mean": lambda module, x: global_mean(module.net(x).sum(), len(x)),
    "all-gathers": lambda module, x: module.all_gather(module.net(x), sync_grads=True),
    "reduces a metric": lambda module, x: module.metric(x),
    "normalizes": lambda module, x: nn.functional.batch_norm(module.net(x), None, None, training=True),
}


class Odd(Model):
    """Ends with a layer, or does something in its forward."""

    def __init__(self, dtype: torch.dtype, how: str) -> None:
        super().__init__(dtype)
        self.how = how
        self.metric = MeanMetric(dist_sync_on_step=True)
        self.teacher = nn.Parameter(torch.ones(3), requires_grad=False)
        if how != "makes a buffer":
            self.register_buffer("center", None if how == "assigns a buffer of None" else torch.zeros(()))
        if how in LAYERS:
            self.net = nn.Sequential(self.net, LAYERS[how])

    def forward(self, x: Tensor) -> Any:
        DOES.get(self.how, lambda *_: None)(self, x)
        return self.net(x)


def without_last(samples: list[Any]) -> Any:
    return default_collate(samples[:-1]) if samples[1:] else None


class Dropping(Model):
    """Its `collate_fn` drops the last sample of what it gets, and has None of a single one."""

    def loader(self, *args: Any, **options: Any) -> Any:
        return super().loader(*args, collate_fn=without_last, **options)


Kind = type[Model] | str
EACH = parallel(None)
BITS = {"reproducible": True}
PARTS = {"split_batches": True, "max_device_batch_size": 2}
# On 2 ranks. Of the batch, the 4 replicas on them get 3, 3, 3 and 0 samples; one sample leaves a rank without.
ONE_BATCH, ONE_SAMPLE = ({"sizes": [size], "times": 1} for size in (9, 1))

REFUSED: list[tuple[str, Kind, Options, str]] = [
    ("ValueError", ByHand, parallel(), "manual optimization with num_replicas=4 on 2"),
    ("ValueError", Ignored, EACH, "training_step_end: Lightning 2 does not call it. Gather the outputs of all ranks"),
    ("ValueError", Model, parallel(static_graph=True), "static_graph=True with num_rep"),
    ("ValueError", "synchronizes", parallel(), "SyncBatchNorm in net.1: with equivalent_to='data_parallel'"),
    ("ValueError", Normed, single(max_device_batch_size=2), "max_device_batch_size=2 with batch norm in net.2,"),
    ("RuntimeError", "keeps what a rank saw", single(), "buffer 'center' is not the same on all of them"),
    ("ValueError", Model, parallel(3, **BITS), "num_replicas=3 on 2 ranks, as the number of processes"),
    ("ValueError", Model, parallel(5, **BITS), "Use 1, 5 of them, or another num_replicas"),
    ("ValueError", ByHand, parallel(2, **BITS), "reproducible=True cannot hold:\n  manual optimization"),
    ("TypeError", Terms, parallel(2, **BITS), "global_mean"),
    ("TypeError", Terms, parallel(), "global_mean"),
    ("TypeError", Terms, single(), "global_mean"),
    ("RuntimeError", "gathers", parallel(), "training_step exchanges values with the other ranks"),
    ("RuntimeError", "takes a global mean", PARTS, "training_step exchanges values with the other ranks"),
    ("RuntimeError", "all-gathers", PARTS, "training_step exchanges values with the other ranks"),
    ("RuntimeError", "reduces a metric", parallel(), "training_step exchanges values with the other ranks"),
    ("RuntimeError", "normalizes", single(max_device_batch_size=2), "training_step exchanges values with the other"),
    ("RuntimeError", "assigns a buffer", single(), "assigned or made the buffers center"),
    ("RuntimeError", "assigns a buffer of None", PARTS, "assigned or made the buffers center"),
    ("RuntimeError", "makes a buffer", parallel(), "assigned or made the buffers center"),
    ("RuntimeError", "moves a teacher", parallel(), "training_step has written the parameters teacher"),
    ("ValueError", Dropping, single(), "rows for 5 samples of the dataset, and no weight is given. Return"),
    ("ValueError", Dropping, parallel(2, **BITS), "rows for 5 samples of the dataset, and no weight is given. Return"),
]


def fitted(kind: Kind, strategy: Options, load: Options) -> None:
    fit(partial(Odd, how=kind) if isinstance(kind, str) else kind, strategy, load=load)


@pytest.mark.parametrize(("error", "kind", "strategy", "text"), REFUSED)
def test_what_cannot_be_reproduced_is_an_error_on_all_ranks(world, error, kind, strategy, text):
    load = ONE_SAMPLE if "no samples" in text else ONE_BATCH
    for raised in world(2).run_expecting_errors(fitted, kind, strategy, load):
        assert raised.type_name == error
        assert text in raised.message


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None", "ignore:It is recommended to use .*sync_dist=True")
def test_one_process_skips_a_batch_of_none(world):
    given: Any = {"load": {"sizes": [3, 1, 4]}, "use_distributed_sampler": False}
    (expected,), found = (world(1).run(fit, Dropping, strategy, **given) for strategy in (None, {}))
    assert len(expected.gradients) == 2
    assert_same_run(found, expected, 0)


def remarked(kind: Kind, strategy: Options, text: str) -> int:
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
