"""Exact evaluation in real Trainers: what one process sees and computes, on every rank of worlds of 1 to 4."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from grids import grid
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import CombinedLoader
from ranks import make_trainer, on_ranks
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset
from torchmetrics import CatMetric, MeanMetric, Metric, SumMetric
from torchmetrics.utilities import dim_zero_cat
from toys import Toy, approx

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.ranks import World

WORLDS = [1, 2, 3, 4]
UNEVEN = [(10, 1), (10, 4), (10, 3), (3, 1), (1, 1), (12, 1)]  # samples, batch size; some with fewer batches than ranks

# Lightning's advice; several loggers and loops say it, and it is not what is tested.
pytestmark = [
    pytest.mark.filterwarnings("ignore:You called `self.log.*logger=True.*no logger configured"),
    pytest.mark.filterwarnings("ignore:.*sampler has shuffling enabled"),
    pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated:FutureWarning"),
]


def data(size: int, start: int = 0) -> Any:
    return torch.arange(start, start + size, dtype=torch.float64)


class Exact(GradAvgStrategy):
    """The strategy with exact evaluation."""

    def __init__(self, **options):
        super().__init__(exact_evaluation=True, **options)


OWN: Any = [[6, 7, 8, 9], [3, 4, 5], [1, 2], [0]]
"""A batch sampler of the user's own, which Lightning could not build anew: 10 samples in batches of 4 to 1."""


class Batches:
    """An iterable that is no DataLoader, of a stated length; a list would be several loaders."""

    def __init__(self, batches: Any, length: int) -> None:
        self.batches, self.length = batches, length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return self.length


class Stream(IterableDataset[Any]):
    def __init__(self, values: Any, *, sharded: bool = False) -> None:
        self.values, self.sharded_by_rank = values, sharded

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)


def shuffled(size: int, batch: int) -> Any:
    torch.manual_seed(dist.get_rank())  # as after a training step that draws random numbers
    return DataLoader(data(size), batch_size=batch, shuffle=True)


def sampled(size: int, batch: int) -> Any:
    """By a sampler for as many replicas as `batch` says."""
    sampler: Any = DistributedSampler(data(size), num_replicas=batch, rank=dist.get_rank() % batch, shuffle=False)
    return DataLoader(data(size), sampler=sampler)


def dropping(size: int, batch: int) -> Any:
    sampler: Any = DistributedSampler(data(size), shuffle=False, drop_last=True)
    return DataLoader(data(size), batch_sampler=BatchSampler(sampler, batch, drop_last=False))


def several(size: int, batch: int) -> list[Any]:
    sets = (data(size), batch), (data(1, 100), batch), (data(size, 200), 1)
    return [DataLoader(values, batch_size=length) for values, length in sets]


def of_rank(size: int) -> Any:
    return data(size)[dist.get_rank() :: dist.get_world_size()]


LOADERS: dict[str, Callable[[int, int], Any]] = {
    "indexed": lambda size, batch: DataLoader(data(size), batch_size=batch),
    "shuffled": shuffled,
    "custom": lambda size, batch: DataLoader(data(10), batch_sampler=OWN),
    "unbatched": lambda size, batch: DataLoader(data(size).split(batch), batch_size=None),
    "workers": lambda size, batch: DataLoader(data(size), batch_size=batch, num_workers=1, persistent_workers=True),
    "plain": lambda size, batch: Batches(data(size).split(batch), -(-size // batch)),
    "short": lambda size, batch: Batches(data(size).split(batch), 6),
    "stream": lambda size, batch: DataLoader(Stream(data(size)), batch_size=batch),
    "sharded": lambda size, batch: DataLoader(Stream(of_rank(size), sharded=True), batch_size=batch),
    "differing": lambda size, batch: DataLoader(Stream(data(size, 100 * dist.get_rank())), batch_size=batch),
    "longer": lambda size, batch: DataLoader(data(size + dist.get_rank()), batch_size=batch),
    "sampled": sampled,
    "dropping": dropping,
    "several": several,
    "together": lambda size, batch: CombinedLoader(several(size, batch), "min_size"),
}


class Lists(Metric):
    """A metric with list states, of integers and without concatenation: what rank 0 has must reach one without rows."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", default=[], dist_reduce_fx="cat")
        self.add_state("objects", default=[], dist_reduce_fx=None)  # one per sample, as detection metrics have

    def update(self, values):
        self.rows.append(torch.stack([values, values**2], 1).long())
        self.objects.extend(value.repeat(int(value) + 1) for value in values)

    def compute(self):
        return dim_zero_cat(self.rows)[:, 1].sum() + torch.stack([one.sum() for one in self.objects]).sum()


class Net(LightningModule):
    """A normalised weight; logs everything that can be logged about the samples that it sees."""

    def __init__(self, size: int = 10, batch: int = 1, logs: str = "all", kind: str = "indexed") -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, dtype=torch.float64)
        self.logs, self.make = logs, partial(LOADERS[kind], size, batch)
        self.total = SumMetric(dist_sync_on_step=logs == "metric steps").set_dtype(torch.float64)
        self.mean, self.cat = (kind().set_dtype(torch.float64) for kind in (MeanMetric, CatMetric))
        self.lists = Lists()
        self.seen: list[float] = []
        self.steps: list[float] = []
        self.statistics: list[float] = []

    def _loader(self) -> Any:
        return self.make()

    val_dataloader = test_dataloader = predict_dataloader = _loader

    def train_dataloader(self) -> Any:
        return DataLoader(data(24), batch_size=8)

    def training_step(self, batch, batch_idx):
        return self.norm(batch.reshape(-1, 1)).sum() + (batch**2).mean() * self.norm.weight.sum()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        batches = [part for part in batch if part is not None] if isinstance(batch, (list, tuple)) else [batch]
        batch = torch.cat(batches)
        self.seen += batch.tolist()
        self.statistics.append(self.norm.running_mean.item())
        batch = batch + 0 * self.norm(batch.reshape(-1, 1)).sum()
        self.log("value", batch.mean(), sync_dist=True, batch_size=len(batch))
        if self.logs == "value":
            return
        self.log("count", float(len(batch)), sync_dist=True, reduce_fx="sum")
        self.log("largest", batch.mean(), sync_dist=True, reduce_fx="max")
        self.log("smallest", batch.mean(), sync_dist=True, reduce_fx=min)
        self.log(
            "stepped", batch.mean(), on_step=self.logs == "steps", on_epoch=True, sync_dist=True, batch_size=len(batch)
        )
        if batch_idx == 0:
            self.log("seldom", batch.mean(), sync_dist=True, batch_size=len(batch))
        for metric in (self.mean, self.total, self.cat, self.lists):
            metric(batch)
        self.log("metric", self.mean)
        self.log("sum", self.total, on_step=True, on_epoch=True)
        self.log("lists", self.lists)

    def on_validation_batch_end(self, *args):
        if self.logs == "steps":
            self.steps.append(self.trainer.logged_metrics["stepped_step"].item())
        if self.logs in ("steps", "gather"):
            assert dist.get_world_size() == self.all_gather(torch.ones(())).numel()

    def on_validation_epoch_end(self):
        if self.logs != "value":
            self.log("of_all", self.cat.compute().sum().double(), sync_dist=True)
            if self.logs != "kept":
                self.cat.reset()

    test_step, on_test_batch_end, on_test_epoch_end = validation_step, on_validation_batch_end, on_validation_epoch_end

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        self.seen += batch.tolist()
        return batch * 10

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def run(what: str, net: dict[str, Any], strategy: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    seed_everything(7, verbose=False)
    model = Net(**net)
    trainer = make_trainer(Exact(**(strategy or {})), **{"max_epochs": 1, "num_sanity_val_steps": 0, **options})
    returned = getattr(trainer, what)(model)
    return {
        "seen": model.seen,
        "steps": model.steps,
        "statistics": model.statistics,
        "returned": returned,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "limits": (trainer.limit_val_batches, trainer._accelerator_connector.use_distributed_sampler),
    }


def seen_once(ranks: list[dict[str, Any]], values: Any) -> None:
    assert sorted(values) == sorted(value for rank in ranks for value in rank["seen"])


@pytest.mark.parametrize(("world_size", "what", "sizes"), grid([2, 3, 4], ["validate", "test", "fit"], UNEVEN))
def test_every_sample_once_and_every_value_that_of_one_process(world, world_size, what, sizes):
    """Case 34: 10 samples on 4 ranks have mean 4.5 and count 10; so for any size, alone and in fit, for all logs."""
    size, batch = sizes
    options = {"limit_train_batches": 1} if what == "fit" else {}
    ranks = world(world_size).run(run, what, {"size": size, "batch": batch}, **options)
    (alone,) = world(1).run(run, what, {"size": size, "batch": batch, "logs": "most"}, **options)
    seen_once(ranks, range(size))
    metrics = ranks[0]["metrics"]
    for rank in ranks:
        assert metrics == rank["metrics"]
        assert (1.0, True) == rank["limits"]
    assert set(alone["metrics"]) <= set(metrics)
    compared = [name for name in alone["metrics"] if name not in ("seldom", "stepped_step", "sum_step")]
    # Lightning keeps some values in float32.
    assert [approx(alone["metrics"][name], 1e-6) for name in compared] == [metrics[name] for name in compared]
    assert approx((size - 1) / 2, 1e-6) == metrics["value"] == metrics["metric"] == metrics["stepped"]
    assert size == metrics["count"]
    assert approx(sum(range(size)), 1e-6) == metrics["of_all"] == metrics["sum"]
    assert approx(sum(value * value + value * (value + 1) for value in range(size))) == metrics["lists"]
    assert 1 == len({statistic for rank in ranks for statistic in rank["statistics"]})


def test_step_values_of_full_rounds_are_those_of_all_ranks(world):
    """A value logged with on_step=True and sync_dist=True is the mean of its round, where each has a batch per rank."""
    for world_size in (2, 3):
        rounds = [range(start, start + world_size) for start in range(0, 6, world_size)]
        for result in world(world_size).run(run, "validate", {"size": 6, "batch": 1, "logs": "steps"}):
            assert [approx(sum(one) / len(one), 1e-6) for one in rounds] == result["steps"]


SHORT_ROUNDS: list[tuple[int, str, dict[str, Any]]] = [
    # Samples, kind of loader, options of the Trainer.
    (5, "indexed", {}),
    (1, "short", {}),
    (3, "stream", {"limit_val_batches": 4}),
    (4, "stream", {}),
]


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize(("world_size", "logs", "row"), grid([2, 4], ["steps", "gather", "metric steps"], SHORT_ROUNDS))
def test_reductions_in_uneven_rounds_are_refused_on_all_ranks(world, world_size, logs, row):
    """Case 3: batches that may not fill the last round, known before or found in a stream that ends early."""
    size, kind, options = row
    net = {"size": size, "batch": 1, "kind": kind, "logs": logs}
    raised = world(world_size).run_expecting_errors(run, "validate", net, **options)
    assert ["RuntimeError"] * world_size == [one.type_name for one in raised]
    assert all("on_step=False, on_epoch=True, which is reduced once" in one.message for one in raised)


@pytest.mark.parametrize(("size", "what", "world_size"), grid([1, 2, 5, 8], ["validate", "fit"], [2, 3, 4], strength=1))
def test_several_loaders_of_which_a_rank_may_lack_some(world, world_size, what, size):
    """Every loader has its own values on every rank, equal to those of one process, where some ranks have no batch."""
    net = {"size": size, "batch": 3, "kind": "several", "logs": "value"}
    ranks = world(world_size).run(run, what, net, num_sanity_val_steps=2)
    (alone,) = world(1).run(run, what, net)
    for rank in ranks:
        assert approx(alone["metrics"], 1e-6) == rank["metrics"]
        assert len(rank["metrics"]) == 3
        if what == "validate":
            assert [approx(one, 1e-6) for one in alone["returned"]] == rank["returned"]
    if what == "validate":
        seen_once(ranks, [*range(size), 100, *range(200, 200 + size)])


class Indices(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.of_batches: list[Any] = []
        self.of_epoch: Any = None

    def write_on_batch_end(self, trainer, module, prediction, indices, *args):
        assert [10.0 * index for index in indices] == prediction.tolist()
        self.of_batches.append(indices)

    def write_on_epoch_end(self, trainer, module, predictions, indices):
        self.of_epoch = indices


def predict(net: dict[str, Any], **options: Any) -> Any:
    model, writer = Net(**net), Indices()
    trainer = make_trainer(Exact(), callbacks=[] if "kind" in net else [writer])
    predictions = trainer.predict(model, **options)
    return predictions, writer.of_batches, writer.of_epoch, model.seen


@pytest.mark.parametrize(("sizes", "world_size"), grid(UNEVEN, WORLDS, strength=1))
def test_predictions_are_in_dataset_order(world, world_size, sizes):
    """Case 34: predict returns exactly one prediction per sample, in dataset order, on every rank."""
    size, batch = sizes
    ranks = world(world_size).run(predict, {"size": size, "batch": batch})
    for predictions, of_batches, of_epoch, _ in ranks:
        assert [10.0 * value for value in range(size)] == torch.cat(predictions).tolist()
        assert [batch] * (size // batch) == [len(part) for part in predictions[: size // batch]]
        assert [of_batches] == of_epoch
    written = [index for _, of_batches, _, _ in ranks for indices in of_batches for index in indices]
    assert list(range(size)) == sorted(written)


def test_predictions_of_several_loaders(world):
    for predictions, *_ in world(4).run(predict, {"size": 5, "batch": 2, "kind": "several"}):
        found = [torch.cat(of_loader).tolist() for of_loader in predictions]
        assert [[0, 10, 20, 30, 40], [1000], [2000, 2010, 2020, 2030, 2040]] == found


def gathered_predictions(options: dict[str, Any]) -> list[int]:
    """Body: return how many predictions each gathering had."""
    seen, original = [], World.gather_objects

    def gather_objects(self: World, value: Any) -> list[Any]:
        seen.append(sum(len(each) for each in value if isinstance(each, torch.Tensor)))
        return original(self, value)

    with mock.patch.object(World, "gather_objects", gather_objects):
        predict(options)
    return list(filter(None, seen))


def test_predictions_are_gathered_batch_by_batch(world):
    """Each is sent once, in gatherings of one batch of each rank: they go through the memory of the device."""
    assert [[2, 2], [2, 1]] == world(2).run(gathered_predictions, {"size": 7, "batch": 2})


def test_predictions_may_be_left_where_they_are(world):
    """With return_predictions=False nothing is gathered, and every rank has written its own part."""
    ranks = world(3).run(predict, {"size": 10, "batch": 1}, return_predictions=False)
    assert [None] * 3 == [rank[0] for rank in ranks]
    assert list(range(10)) == sorted(value for rank in ranks for value in rank[3])


class Tokens(LightningModule):
    """Logs what each rank is told to, batch by batch, as a mean over a number of tokens."""

    def __init__(self, of_ranks: Any, on_step: bool) -> None:
        super().__init__()
        self.batches, self.on_step = of_ranks[dist.get_rank()], on_step

    def val_dataloader(self):
        return DataLoader(self.batches, batch_size=None)

    def validation_step(self, batch, batch_idx):
        value, count = batch
        self.log("loss", value, on_step=self.on_step, on_epoch=True, sync_dist=True, batch_size=int(count))


def tokens(of_ranks: Any, on_step: bool) -> Any:
    trainer = make_trainer(Exact(), use_distributed_sampler=False)
    (returned,) = trainer.validate(Tokens(of_ranks, on_step))
    return returned["loss_epoch" if on_step else "loss"]


@pytest.mark.parametrize(
    ("of_ranks", "expected"),
    [
        pytest.param([[(3.0, 1)], [(5.0, 8)]], 43 / 9, id="case 35"),
        pytest.param([[(1.0, 3)], [(6.0, 2)]], 3.0, id="case 36"),
        pytest.param([[(1.0, 3)], []], 1.0, id="second without data"),
        pytest.param([[], [(6.0, 2), (2.0, 2)]], 4.0, id="first without data"),
        pytest.param([[(1.0, 1)] * 4, [(6.0, 2)], [(2.0, 2), (3.0, 4)]], 32 / 12, id="three"),
    ],
)
def test_values_are_weighted_by_what_they_count(world, of_ranks, expected):
    """Cases 35 and 36: ranks with data of their own, uneven or missing; sums are divided by sums of counts, once."""
    for on_step in (False, True) if len(set(map(len, of_ranks))) == 1 else (False,):
        assert [approx(expected, 1e-6)] * len(of_ranks) == world(len(of_ranks)).run(tokens, of_ranks, on_step)


@on_ranks(2)
def test_integers_are_not_floored():
    """Case 36: the mean of the integers 3 and 2 is 2.5."""
    strategy = make_trainer(Exact()).strategy
    assert 2.5 == strategy.reduce(torch.tensor(3 - dist.get_rank()), reduce_op="mean").item()


TWICE = {"max_epochs": 2, "limit_train_batches": 1}
RELOADED = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1, "check_val_every_n_epoch": 2}
KINDS = [
    (kind, size, batch)
    for kind in ("shuffled", "unbatched", "plain", "stream", "sharded")
    for size, batch in ((10, 1), (10, 4), (1, 1))
]
EVALUATED: list[tuple[Any, ...]] = [
    # The loader, samples, batch size, options of the Trainer and the strategy, and the samples that are evaluated:
    # limit_val_batches=k evaluates the first k batches of the loader, and not k on each rank.
    *(
        ("indexed", 10, 2, {"limit_val_batches": limit}, {}, range(seen))
        for limit, seen in ((1, 2), (3, 6), (99, 10), (0.5, 4), (1.0, 10))
    ),
    *((kind, size, batch, {}, {}, range(size)) for kind, size, batch in KINDS),
    *(("custom", 10, 1, {}, {}, range(10)) for _ in (2, 3, 4)),
    *(("workers", 7, 2, TWICE, {}, [*range(7)] * 2), ("shuffled", 7, 2, TWICE, {}, [*range(7)] * 2)),
    ("indexed", 5, 2, RELOADED, {"split_batches": True}, range(5)),
]


@pytest.mark.parametrize(("world_size", "row"), [(2 + n % 3, row) for n, row in enumerate(EVALUATED)])
def test_every_loader_is_evaluated_once(world, world_size, row):
    kind, size, batch, options, strategy, seen = row
    net = {"size": size, "batch": batch, "kind": kind, "logs": "value"}
    ranks = world(world_size).run(run, "fit" if "max_epochs" in options else "validate", net, strategy, **options)
    seen_once(ranks, seen)
    assert {sum(seen) / len(seen)} == {rank["metrics"]["value"] for rank in ranks}
    assert {(options.get("limit_val_batches", 1.0), True)} == {rank["limits"] for rank in ranks}


def test_a_distributed_sampler_that_yields_each_sample_once_is_kept(world):
    ranks = world(2).run(run, "validate", {"size": 8, "batch": 2, "kind": "sampled", "logs": "value"})
    assert [[0, 2, 4, 6], [1, 3, 5, 7]] == [rank["seen"] for rank in ranks]
    assert [3.5, 3.5] == [rank["metrics"]["value"] for rank in ranks]


REFUSED: dict[str, tuple[str, int, int, dict[str, Any], str, str]] = {
    # The loader, samples, batch size, options of the Trainer, and the error.
    "read together": ("together", 4, 1, {}, "ValueError", "Use 'sequential'"),
    "limit": ("indexed", 4, 2, {"limit_val_batches": 0.1}, "MisconfigurationException", "limit_val_batches"),
    "differing stream": ("differing", 4, 1, {}, "RuntimeError", "sharded_by_rank = True"),
    "differing lengths": ("longer", 4, 1, {}, "ValueError", "4, 5 batches"),
    "repeating": ("sampled", 9, 2, {}, "ValueError", "yields 10 of 9 samples, for 2 replicas on 2 ranks"),
    "dropping": ("dropping", 9, 2, {}, "ValueError", "yields 8 of 9 samples, for 2 replicas on 2 ranks"),
    "other replicas": ("sampled", 9, 3, {}, "ValueError", "yields 9 of 9 samples, for 3 replicas on 2 ranks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_evaluated_exactly_is_an_error_on_all_ranks(world, name):
    loader, size, batch, options, kind, message = REFUSED[name]
    net = {"size": size, "batch": batch, "kind": loader, "logs": "value"}
    raised = world(2).run_expecting_errors(run, "validate", net, **options)
    assert [kind] * 2 == [one.type_name for one in raised]
    assert all(message in one.message for one in raised)


class Seldom(Net):
    """Logs some keys on some ranks only, in different orders, and in another evaluation on other ranks."""

    def __init__(self) -> None:
        super().__init__(10, 1, "value")
        self.rank_0, self.own = dist.new_group([0]), 7

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        value = batch.item()
        for name in ("first", "second") if int(value) % 2 else ("second", "first"):
            self.log(name, value, sync_dist=True)
        if value == self.own:
            self.log("seldom", value, sync_dist=True, reduce_fx="sum")
            self.log("own", value)
        if value == 4:  # on rank 0
            self.log("of rank 0", value, sync_dist=True, rank_zero_only=True)
            self.log("of a group", value, sync_dist=True, sync_dist_group=self.rank_0)


def seldom() -> Any:
    model, trainer, found = Seldom(), make_trainer(Exact()), []
    for own in (7, 6):
        model.own = own
        found += trainer.validate(model, verbose=False)
    return found


@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
def test_keys_that_not_every_rank_logs(world):
    """A key that only some ranks log, or in another order, is reduced over all; without sync_dist it is the rank's."""
    all_ranks, rank_0 = {"first": 4.5, "second": 4.5}, {"of rank 0": 4.0, "of a group": 4.0}
    first, second = all_ranks | {"seldom": 7.0}, all_ranks | {"seldom": 6.0}
    found = world(2).run(seldom)
    assert [[first | rank_0, second | rank_0 | {"own": 6.0}], [first | {"own": 7.0}, second]] == found


def trained(validates: bool) -> Any:
    seed_everything(7, verbose=False)
    model = Net(5, 1, "value")
    options = {} if validates else {"limit_val_batches": 0}
    trainer = make_trainer(Exact(), max_epochs=2, num_sanity_val_steps=0, val_check_interval=2, **options)
    trainer.fit(model)
    return [value.tolist() for value in model.parameters()], model.statistics


def test_training_goes_on_as_if_not_evaluated(world):
    """Evaluation leaves parameters as they are, and all ranks evaluate rank 0's buffers, as DDP's forward has them."""
    with_validation, without = (world(2).run(trained, validates) for validates in (True, False))
    assert [parameters for parameters, _ in without] == [parameters for parameters, _ in with_validation]
    of_ranks = [statistics for _, statistics in with_validation]
    # Batches 0, 2, 4 and 1, 3: in the rounds that both ranks have, both evaluate rank 0's statistics.
    assert len(of_ranks[0]) // 3 == len(of_ranks[1]) // 2 > 1
    assert {*of_ranks[1]} <= {*of_ranks[0]}


def twice() -> Any:
    model = Net(3, 1)
    trainer = make_trainer(Exact(), num_sanity_val_steps=2, max_epochs=2, limit_train_batches=2)
    trainer.fit(model)
    first = dict(trainer.callback_metrics)
    returned = [trainer.validate(model, verbose=False), trainer.test(model, verbose=False)]
    left = [name for loop in (trainer.validate_loop, trainer.test_loop) for name in vars(loop) if name == "on_run_end"]
    return float(first["value"]), [float(one[0]["value"]) for one in returned], left


def test_one_trainer_for_everything(world):
    """Sanity check, epochs, and further runs of the same Trainer each start afresh and leave nothing behind."""
    assert [(1.0, [1.0, 1.0], [])] * 4 == world(4).run(twice)


def not_reset() -> Any:
    model = Net(3, 1, "kept")
    return [
        make_trainer(Exact()).validate(model, verbose=False)[0]["of_all"] for _ in range(2)
    ], model.cat.update_called


def test_a_metric_that_is_not_reset_goes_on(world):
    """Also on a rank without a batch, which has computed it before, each rank keeps its own rows only."""
    assert [([3.0, 6.0], rank < 3) for rank in range(4)] == world(4).run(not_reset)


def reduced_in_all_ways(stock: bool) -> Any:
    """Body: return what `strategy.reduce` makes of values of all types, and what a step and an epoch log."""

    class Logs(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            rank = dist.get_rank()
            for kind, value in {"int": 3 + rank, "float": 0.5 + rank, "tensor": torch.tensor(2.0 + rank)}.items():
                self.log(kind, value, sync_dist=True, on_step=True, on_epoch=True, batch_size=1)
            return super().training_step(batch, batch_idx)

    strategy = DDPStrategy() if stock else GradAvgStrategy()
    trainer = make_trainer(strategy, max_epochs=1, logger=False)
    trainer.fit(Logs(), DataLoader(torch.arange(4.0), 2))
    types = (torch.int64, torch.int32, torch.float32, torch.float64, torch.float16, torch.bool)
    values = [(kind, how) for kind in types for how in ("mean", "sum", "max") if (kind, how) != (torch.bool, "mean")]
    found = [strategy.reduce(torch.tensor(3 - dist.get_rank()).to(kind), reduce_op=how) for kind, how in values]
    found += [value for _, value in sorted(trainer.callback_metrics.items())]
    return [(str(one.dtype), one.item()) for one in found], strategy.reduce("text")


def test_values_are_reduced_as_in_stock(world):
    """Without options, what is reduced and logged has stock's value and type, cut integers too."""
    assert world(2).run(reduced_in_all_ways, True) == world(2).run(reduced_in_all_ways, False)
