"""Exact evaluation in real Trainers: what one process sees and computes, on every rank of worlds of 2 to 4."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, product
from statistics import fmean
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from faulty_runs import run_ranks
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.apply_func import apply_to_collection
from orders import Sized
from ranks import covering, grid, group_of, make_trainer, on_ranks
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset
from torchmetrics import CatMetric, MeanMetric, Metric, RunningMean, SumMetric
from torchmetrics.utilities import dim_zero_cat
from torchmetrics.wrappers import MinMaxMetric
from toys import Toy, approx, make_loader

from lightning_gradavg import GradAvgModelParallelStrategy, GradAvgStrategy, gather, global_mean
from lightning_gradavg import fabric as of_fabric
from lightning_gradavg._support.means import averages

# Lightning's advice; several loggers and loops say it, and it is not what is tested.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        "You called `self.log.*logger=True.*no logger configured",
        ".*sampler has shuffling enabled",
        "It is recommended to use `self.log",
        "Your `IterableDataset` has `__len__` defined",
        "torch.distributed.nn.functional.all_gather is deprecated:FutureWarning",
    )
]


def data(size: int, start: int = 0) -> Any:
    return torch.arange(start, start + size, dtype=torch.float64)


class Stream(IterableDataset[Any]):
    def __init__(self, values: Any, *, sharded: bool = False) -> None:
        self.values = values
        self.sharded_by_rank = sharded

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)


def shuffled(size: int, batch: int) -> Any:
    torch.manual_seed(dist.get_rank())  # as after a training step that draws random numbers
    return DataLoader(data(size), batch_size=batch, shuffle=True)


def sampled(size: int, replicas: int | None) -> Any:
    replicas = replicas or dist.get_world_size()
    sampler: Any = DistributedSampler(data(size), num_replicas=replicas, rank=dist.get_rank() % replicas, shuffle=False)
    return DataLoader(data(size), sampler=sampler)


def dropping(size: int, batch: int) -> Any:
    sampler: Any = DistributedSampler(data(size), shuffle=False, drop_last=True)
    return DataLoader(data(size), batch_sampler=BatchSampler(sampler, batch, drop_last=False))


def several(size: int, batch: int) -> list[Any]:
    sets = (data(size), batch), (data(1, 100), batch), (data(size, 200), 1)
    return [DataLoader(values, batch_size=length) for values, length in sets]


def of_rank(values: Any) -> Any:
    return values[dist.get_rank() :: dist.get_world_size()]


LOADERS: dict[str, Callable[..., Any]] = {
    "indexed": lambda size, batch: DataLoader(data(size), batch_size=batch),
    "shuffled": shuffled,
    # A batch sampler of the user's own, which Lightning could not build anew.
    "custom": lambda size, batch: DataLoader(
        data(size), batch_sampler=[part.tolist() for part in torch.arange(size).split(batch)][::-1]
    ),
    "unbatched": lambda size, batch: DataLoader(data(size).split(batch), batch_size=None),
    "workers": lambda size, batch: DataLoader(data(size), batch_size=batch, num_workers=1, persistent_workers=True),
    # Of a stated length, and no DataLoader; a list would be several loaders.
    "plain": lambda size, batch: Sized(lambda: data(size).split(batch), -(-size // batch)),
    "short": lambda size, batch: Sized(lambda: data(size).split(batch), 6),
    "stream": lambda size, batch: DataLoader(Stream(data(size)), batch_size=batch),
    "sharded": lambda size, batch: DataLoader(Stream(of_rank(data(size).split(batch)), sharded=True), batch_size=None),
    "differing": lambda size, batch: DataLoader(Stream(data(size, 100 * dist.get_rank())), batch_size=batch),
    "longer": lambda size, batch: DataLoader(data(size + dist.get_rank()), batch_size=batch),
    "sampled": sampled,
    "dropping": dropping,
    "several": several,
    "together": lambda size, batch: CombinedLoader(several(size, batch), "min_size"),
    # Each rank is told its batches.
    "told": lambda of_ranks: make_loader(chain.from_iterable(of_rank(of_ranks))),
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


EXCHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "all_gather": lambda module, batch: module.all_gather(batch),
    "gather": lambda module, batch: gather(batch),
    "global_mean": lambda module, batch: global_mean(batch.sum(), len(batch)),
    "reduce": lambda module, batch: module.trainer.strategy.reduce(batch.mean()),
    "compute": lambda module, batch: (module.mean.update(batch), module.mean.compute()),
    "a metric that exchanges": lambda module, batch: SumMetric(dist_sync_on_step=True)(batch),
    "a wrapper that computes": lambda module, batch: MinMaxMetric(MeanMetric())(batch),
    "a running mean": lambda module, batch: RunningMean().update(batch),
}
"""What a step cannot do, as other ranks may have no batch."""

OF_RANK = {"own", "of_rank_0", "of_group_0"}
"""What is logged for the rank alone."""


class Net(LightningModule):
    """A normalised weight; logs everything that can be logged of the samples that it sees."""

    def __init__(self, kind: str, sizes: tuple[Any, ...], logs: str = "all") -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, dtype=torch.float64)
        self.kind = kind
        self.sizes = sizes
        self.logs = logs
        self.group_0 = group_of((0,))
        self.total = SumMetric().set_dtype(torch.float64)
        self.mean, self.cat = (kind().set_dtype(torch.float64) for kind in (MeanMetric, CatMetric))
        self.lists = Lists()
        self.seen: list[float] = []
        self.steps: list[float] = []
        self.statistics: set[float] = set()

    def _loader(self) -> Any:
        return LOADERS[self.kind](*self.sizes)

    val_dataloader = test_dataloader = predict_dataloader = _loader

    def train_dataloader(self) -> Any:
        return DataLoader(data(24), batch_size=8)

    def training_step(self, batch, batch_idx):
        return self.norm(batch.reshape(-1, 1)).sum() + (batch**2).mean() * self.norm.weight.sum()

    def validation_step(self, batch, batch_idx, dataloader_idx=None):
        self.seen += batch.tolist()
        self.statistics.add(self.norm.running_mean.item())
        if self.logs in EXCHANGES:
            EXCHANGES[self.logs](self, batch)
        batch = batch + 0 * self.norm(batch.reshape(-1, 1)).sum()
        value = batch.mean()
        of_all = {"sync_dist": True, "batch_size": len(batch)}
        self.log("value", value, **of_all)
        if dataloader_idx is not None:
            return
        for name in ("first", "second") if batch[0] % 2 else ("second", "first"):
            self.log(name, value, **of_all)
        if 0 in batch:
            self.log("seldom", value, **of_all)
        self.log("own", value, batch_size=len(batch))
        if dist.get_rank() == 0:
            self.log("of_rank_0", 4.0, sync_dist=True, rank_zero_only=True)
            self.log("of_group_0", 4.0, sync_dist=True, sync_dist_group=self.group_0)
        self.log("count", float(len(batch)), sync_dist=True, reduce_fx="sum")
        self.log("largest", value, sync_dist=True, reduce_fx="max")
        self.log("smallest", value, sync_dist=True, reduce_fx=min)
        self.log("stepped", value, on_step=self.logs == "steps", on_epoch=True, **of_all)
        for metric in (self.mean, self.total, self.cat, self.lists):
            metric(batch)
        self.log("metric", self.mean)
        self.log("sum", self.total, on_step=True, on_epoch=True)
        self.log("lists", self.lists)

    def on_validation_batch_end(self, *args):
        if self.logs == "steps":
            self.steps.append(self.trainer.logged_metrics["stepped_step"].item())
        if self.logs == "after a step":
            self.all_gather(torch.ones(()))

    def on_validation_epoch_start(self):
        assert dist.get_world_size() == self.all_gather(torch.ones(())).numel()

    def on_validation_epoch_end(self):
        if self.kind != "several":
            self.log("of_all", self.cat.compute().sum().double(), sync_dist=True)
            if self.logs != "kept":
                self.cat.reset()

    test_step = validation_step
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        self.seen += batch.tolist()
        return batch * 10

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Writer(BasePredictionWriter):
    """Compares predictions with the indices that it is told."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.indices: list[Any] = []

    def write_on_batch_end(self, trainer, module, prediction, indices, *args):
        assert [10.0 * index for index in indices] == prediction.tolist()
        self.indices.append(indices)

    def write_on_epoch_end(self, trainer, module, predictions, indices):
        assert [self.indices] == indices


def values_of(trainer: Any, returned: Any = None) -> dict[str, float]:
    found = dict(trainer.callback_metrics)
    found |= {f"{name}/returned": value for one in returned or () for name, value in one.items()}
    return {name: float(value) for name, value in found.items() if not name.split("/")[0].endswith("_step")}


def run(
    kind: str,
    sizes: tuple[Any, ...],
    what: str,
    logs: str = "all",
    *,
    alone: bool = False,
    call: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Body: evaluate or fit once, and return what the rank saw and got; `alone` as stock Lightning does on a device."""
    seed_everything(7, verbose=False)
    model = Net(kind, sizes, logs)
    chosen = {"exact_evaluation": True, **options.pop("strategy", {})}
    strategy = "auto" if alone else GradAvgStrategy(**chosen)
    callbacks = [Writer()] if what == "predict" and kind in ("indexed", "shuffled") else []
    defaults = {"max_epochs": 1, "limit_train_batches": 1, "num_sanity_val_steps": 0, "callbacks": callbacks}
    trainer: Any = make_trainer(strategy, **{**defaults, **options})

    def limits() -> Any:
        return trainer.limit_val_batches, trainer._accelerator_connector.use_distributed_sampler

    before = limits()
    returned = getattr(trainer, what)(model, **(call or {}))
    assert before == limits()
    values = values_of(trainer, None if what == "predict" else returned)
    return {
        "values": {name: value for name, value in values.items() if name.split("/")[0] not in OF_RANK},
        "own": {name: value for name, value in values.items() if name in OF_RANK},
        "predictions": apply_to_collection(returned, torch.Tensor, torch.Tensor.tolist) if what == "predict" else None,
        **{name: getattr(model, name) for name in ("seen", "steps", "statistics")},
        "parameters": [parameter.tolist() for parameter in model.parameters()],
    }


KINDS = ["indexed", "shuffled", "unbatched", "plain", "stream", "several"]
SIZES = [(5, 1), (10, 4), (1, 1), (12, 1)]  # samples, batch size; some with fewer batches than ranks
TWICE = {"max_epochs": 2}
SPLIT = {"strategy": {"split_batches": True}}
RELOADED = {**TWICE, **SPLIT, "reload_dataloaders_every_n_epochs": 1, "check_val_every_n_epoch": 2}
SHARED = {"use_distributed_sampler": False}
ROWS: list[Any] = [
    *grid(KINDS, SIZES, ["validate", "test", "fit", "predict"], [2, 3, 4], [{}]),
    # limit_val_batches=k evaluates the first k batches of the loader, and not k on each rank.
    *(("indexed", (10, 2), "validate", 2, {"limit_val_batches": limit}) for limit in (3, 99, 0.5)),
    ("stream", (10, 2), "validate", 2, {"limit_val_batches": 3}),
    ("custom", (10, 3), "fit", 3, {}),
    *(("sharded", sizes, "validate", 3, {}) for sizes in SIZES[:3]),
    ("workers", (7, 2), "fit", 2, TWICE),
    # In each epoch another rank logs "seldom".
    ("shuffled", (7, 2), "fit", 3, {"max_epochs": 4}),
    ("indexed", (5, 2), "fit", 2, RELOADED),
    ("sampled", (8, None), "test", 2, {}),
    *((kind, (7, 2), what, 1, {}) for kind in ("shuffled", "several") for what in ("test", "predict")),
    # With return_predictions=False nothing is gathered.
    ("indexed", (10, 1), "predict", 3, {"call": {"return_predictions": False}}),
    # The value of a step is that of its batch, with sync_dist=True, too.
    *(("indexed", (5, 1), "validate", world_size, {"logs": "steps"}) for world_size in (2, 3)),
    ("indexed", (5, 1), "validate", 2, {"logs": "steps", "strategy": {"equivalent_to": "single_device"}}),
    # A sanity check counts the batches of the run.
    *((kind, (10, 1), "fit", 2, {"num_sanity_val_steps": 3}) for kind in ("workers", "stream")),
    # Cases 35 and 36: ranks with data of their own, uneven or missing; sums are divided by sums of counts, once.
    *(
        ("told", (of_ranks,), "validate", len(of_ranks), SHARED)
        for of_ranks in (
            [[[3.0]], [[5.0] * 8]],
            [[[1.0] * 3], [[6.0] * 2]],
            [[[1.0] * 3], []],
            [[], [[6.0] * 2, [2.0] * 2]],
            [[[1.0]] * 4, [[6.0] * 2], [[2.0] * 2, [3.0] * 4]],
        )
    ),
]


@pytest.mark.parametrize(("kind", "sizes", "what", "world_size", "options"), ROWS)
def test_every_sample_once_and_every_value_that_of_one_process(world, kind, sizes, what, world_size, options):
    ranks = world(world_size).run(run, kind, sizes, what, **options)
    # A shuffled order is drawn from a stream of its own, which training cannot move: on one rank, too.
    is_stock = kind != "shuffled"
    (alone,) = world(1).run(run, kind, sizes, what, alone=is_stock, **options)
    assert sorted(alone["seen"]) == sorted(value for rank in ranks for value in rank["seen"])
    passes = options.get("max_epochs", 1) // options.get("check_val_every_n_epoch", 1)
    passes += "num_sanity_val_steps" in options
    names = {"metric", "stepped", "of_all"} & alone["values"].keys()
    if "num_sanity_val_steps" in options:
        names = set()  # what it saw is in `seen`, and in no value
    for name in names:
        by_hand = sum(alone["seen"]) / (passes if name == "of_all" else len(alone["seen"]))
        assert approx(by_hand, 1e-6) == alone["values"][name]
    for number, rank in enumerate(ranks):
        assert approx(alone["values"], 1e-6) == rank["values"]  # Lightning keeps some in float32
        assert ranks[0]["values"] == rank["values"]
        assert alone["predictions"] == rank["predictions"]
        assert approx(alone["steps"][number::world_size], 1e-6) == rank["steps"]
    # In each pass all evaluate rank 0's buffers, as DDP's forward has them.
    assert len(set().union(*(rank["statistics"] for rank in ranks))) <= passes


def test_padded_samples_are_not_counted(world):
    """Case 34: the mean is 4.5 and the count 10; what is logged for a rank alone is the rank's."""
    for world_size in (4, 3):
        ranks = world(world_size).run(run, "indexed", (10, 1), "validate")
        assert [(4.5, 10)] * world_size == [(rank["values"]["value"], rank["values"]["count"]) for rank in ranks]
        assert [fmean(range(number, 10, world_size)) for number in range(world_size)] == [
            rank["own"].pop("own") for rank in ranks
        ]
        assert [{"of_rank_0": 4.0, "of_group_0": 4.0}, *[{}] * (world_size - 1)] == [rank["own"] for rank in ranks]


REFUSED: list[tuple[Any, ...]] = [
    # Case 3: also where all ranks have a batch in each step, so that it does not depend on the data.
    *covering(
        ["indexed", "stream"],
        [(3, 1), (4, 1)],
        [2],
        [{"logs": logs} for logs in [*EXCHANGES, "after a step"] if logs != "a running mean"],
        ["RuntimeError"],
        ["are refused in an evaluation step"],
        strength=1,
    ),
    ("indexed", (3, 1), 2, {"logs": "a running mean"}, "RuntimeError", "RunningMean is updated in an evaluation step"),
    ("together", (4, 1), 2, {}, "ValueError", "Use 'sequential'"),
    ("indexed", (4, 2), 2, {"limit_val_batches": 0.1}, "MisconfigurationException", "limit_val_batches"),
    ("differing", (4, 1), 2, {}, "RuntimeError", "sharded_by_rank = True"),
    ("longer", (4, 1), 2, {}, "ValueError", "4, 5 batches"),
    ("sampled", (9, 2), 2, {}, "ValueError", "yields 10 of 9 samples, for 2 replicas on 2 ranks"),
    ("dropping", (9, 2), 2, {}, "ValueError", "yields 8 of 9 samples, for 2 replicas on 2 ranks"),
    ("sampled", (9, 3), 2, {}, "ValueError", "yields 9 of 9 samples, for 3 replicas on 2 ranks"),
]


@pytest.mark.parametrize(("kind", "sizes", "world_size", "options", "error", "message"), REFUSED)
def test_what_cannot_be_evaluated_exactly_is_an_error_on_all_ranks(
    world, kind, sizes, world_size, options, error, message
):
    raised = world(world_size).run_expecting_errors(run, kind, sizes, "validate", **options)
    assert [error] * world_size == [one.type_name for one in raised]
    assert all(message in one.message for one in raised)


def everything(kind: str, options: dict[str, Any] | None = None) -> Any:
    """Body: fit with a sanity check, then go on, with a metric that is not reset; return all values.

    Without options of the strategy, do so as stock Lightning does.
    """
    model: Any = Net(kind, (2, 1), "kept")
    strategy = "auto" if options is None else GradAvgStrategy(**options)
    trainer: Any = make_trainer(strategy, num_sanity_val_steps=2, max_epochs=2, limit_train_batches=2)
    values = []
    for what in ("fit", "validate", "test"):
        getattr(trainer, what)(model)
        values.append({name: value for name, value in values_of(trainer).items() if name not in OF_RANK})
    left = [name for loop in (trainer.validate_loop, trainer.test_loop) for name in vars(loop) if name == "on_run_end"]
    return values, left, model.cat.update_called


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("indexed", {"exact_evaluation": True}),
        ("several", {"exact_evaluation": True}),
        # In training, metrics merge in another way.
        ("indexed", {"equivalent_to": "single_device"}),
    ],
    ids=str,
)
def test_one_trainer_for_everything(world, kind, options):
    """Further runs of the same Trainer start afresh, on a rank without a batch, too, and leave nothing behind."""
    ((expected, *_),) = world(1).run(everything, kind)
    for number, (values, left, updated) in enumerate(world(4).run(everything, kind, options)):
        assert [approx(each, 1e-6) for each in expected] == values
        assert ([], number < 2 and kind == "indexed") == (left, updated)


class LogsSeldom(LightningModule):
    """Updates a metric with each batch, and logs it with the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.total = SumMetric()

    def validation_step(self, batch, batch_idx):
        self.total.update(batch)
        if 4 in batch:
            self.log("total", self.total)


def totals_of_passes() -> list[float]:
    """Body: validate three times; return the metric of each pass."""
    trainer, module = make_trainer(GradAvgStrategy(exact_evaluation=True)), LogsSeldom()
    loader = DataLoader(data(5), batch_size=1)
    return [trainer.validate(module, loader, verbose=False)[0]["total"] for _ in range(3)]


def test_a_metric_is_reset_on_ranks_that_have_not_logged_it(world):
    """Lightning resets what it has logged. Without the reset, the samples of other ranks would count in each pass."""
    assert [[10.0] * 3] * 3 == world(3).run(totals_of_passes)


class LogsBehindACheck(LightningModule):
    """Logs at the end of a pass, in three ways, if its steps have left something."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[Any] = []
        self.mean = MeanMetric()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.left.append(batch.mean())

    def on_validation_epoch_end(self):
        if self.left:
            value = torch.stack(self.left).mean()
            self.mean.update(value)
            self.log("value", value)
            self.log("largest", value, reduce_fx="max", sync_dist=True)
            self.log("metric", self.mean)
        self.left.clear()


def logged_behind_a_check(loaders: int) -> list[dict[str, float]]:
    """Body: validate two samples, twice; return what was logged each time."""
    trainer, module = make_trainer(GradAvgStrategy(equivalent_to="single_device")), LogsBehindACheck()
    of_passes = []
    for start in (1, 3):
        trainer.validate(module, [DataLoader(data(2, start), batch_size=1)] * loaders, verbose=False)
        of_passes.append({name: value.item() for name, value in trainer.callback_metrics.items()})
    return of_passes


@pytest.mark.parametrize("loaders", [1, 2])
def test_a_value_that_a_rank_without_a_batch_does_not_log_is_that_of_the_others(world, loaders):
    """Rank 0 logs 1 and then 3, rank 1 2 and then 4, and rank 2 has no batch."""
    expected = [{"value": low + 0.5, "largest": low + 1, "metric": low + 0.5} for low in (1.0, 3.0)]
    assert [expected] * 3 == world(3).run(logged_behind_a_check, loaders)


class Fetches(LightningModule):
    """Fetches its own batches."""

    def validation_step(self, dataloader_iter):
        next(dataloader_iter)

    def predict_step(self, dataloader_iter):
        next(dataloader_iter)


def fetch(what: str) -> None:
    """Body: evaluate three samples."""
    getattr(make_trainer(GradAvgStrategy(exact_evaluation=True)), what)(Fetches(), DataLoader(data(3)))


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument")
@pytest.mark.parametrize(("what", "step"), [("validate", "validation_step"), ("predict", "predict_step")])
def test_a_step_that_fetches_its_own_batches_is_an_error(world, what, step):
    for raised in world(2).run_expecting_errors(fetch, what):
        assert raised.type_name == "ValueError"
        assert raised.message.startswith(f"{step}(dataloader_iter) fetches its own batches")


STRATEGIES: dict[str, Callable[[], Any]] = {
    "no option": GradAvgStrategy,
    "exact evaluation": lambda: GradAvgStrategy(exact_evaluation=True),
    "of one device": lambda: GradAvgStrategy(equivalent_to="single_device"),
    "sharded": GradAvgModelParallelStrategy,
    "of Fabric": of_fabric.GradAvgStrategy,
}


def reduced_by(strategy: Any, value: Any, how: Any) -> Any:
    """Return the type and value that a strategy, of a Trainer or of Fabric, makes of a tensor."""
    if hasattr(strategy, "all_reduce"):
        reduced = strategy.all_reduce(value, reduce_op=how)
    else:
        reduced = make_trainer(strategy).strategy.reduce(value, reduce_op=how)
    return (reduced.dtype, reduced.item()) if isinstance(reduced, torch.Tensor) else reduced


@pytest.mark.parametrize("name", STRATEGIES)
@on_ranks(2)
def test_values_are_reduced_as_in_stock_and_means_of_integers_keep_decimals(name):
    """Case 36: the mean of the integers 3 and 2 is 2.5. That of 4 and 2 is 3 and an integer, as in stock."""
    strategy = STRATEGIES[name]
    first = dist.get_rank() == 0
    integers = (torch.int64, torch.int32, torch.uint8, torch.bool)
    for kind, how in product((*integers, torch.float16, torch.float32, torch.float64), ("mean", "avg", "sum", "max")):
        whole, other = (torch.tensor(value).to(kind) for value in ((4, 3) if first else (2, 2)))
        assert reduced_by(DDPStrategy(), whole.clone(), how) == reduced_by(strategy(), whole, how)
        if kind in integers and how in ("mean", "avg"):
            expected = (torch.bool, 1) if kind == torch.bool else (torch.float64, 2.5)
            assert expected == reduced_by(strategy(), other, how)
        else:
            assert reduced_by(DDPStrategy(), other.clone(), how) == reduced_by(strategy(), other, how)
    assert (torch.float64, 0.5) == reduced_by(strategy(), torch.tensor(first), "mean")
    assert reduced_by(strategy(), "text", "mean") == "text"


def test_every_way_to_ask_for_a_mean_is_seen():
    """Gloo has no operation for it, but other backends have."""
    means = "mean", "AVG", dist.ReduceOp.AVG, dist.ReduceOp(dist.ReduceOp.AVG)
    others = "sum", "max", dist.ReduceOp.SUM, dist.ReduceOp(dist.ReduceOp.MAX), None
    assert [True] * len(means) + [False] * len(others) == [averages(how) for how in (*means, *others)]


class Means(Toy):
    """Logs the mean of samples in training and validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train", batch.mean(), on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", batch.mean(), sync_dist=True, batch_size=len(batch))


@on_ranks(2)
def test_a_mean_over_ranks_of_different_batch_sizes_needs_no_option():
    """Three samples of 2.0 and two of 7.0 have the mean 4.0. Stock Lightning divides 20 / 2 by 2, and not 2.5."""
    samples = [[[2.0] * 3], [[7.0] * 2]][dist.get_rank()]

    def logged(strategy: Any) -> Any:
        trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False, num_sanity_val_steps=0)
        trainer.fit(Means(lr=0.0), make_loader(samples), make_loader(samples))
        return {name: float(value) for name, value in trainer.callback_metrics.items()}

    assert {"train": 5.0, "val": 5.0} == logged(DDPStrategy())
    assert {"train": 4.0, "val": 4.0} == logged(GradAvgStrategy())


class Stacks(Net):
    """Stacks at the end of a pass what its steps have left, of the first loader where there are several."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.left: list[Any] = []
        self.log_line: Any = None
        self.early = 0  # lines before the first step of the last pass

    def _start(self):
        self.early = self.log_line.call_count

    def _step(self, batch, batch_idx, dataloader_idx=0):
        if dataloader_idx == 0:
            self.left.append(batch)
        return batch

    def _stack(self):
        torch.stack(self.left)

    validation_step = test_step = predict_step = _step
    on_validation_epoch_start = on_test_epoch_start = on_predict_epoch_start = _start
    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = _stack


class Passes(Stacks):
    """Looks before it stacks."""

    def _stack(self):
        assert (dist.get_rank() == 2) == (not self.left)
        self.left.clear()

    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = _stack


def told(module: type[Stacks], kind: str, sizes: Any, what: str, **options: Any) -> tuple[int, list[str]]:
    """Body: evaluate with a hook; return how many lines about ranks without a batch came before it, and all of them."""
    seed_everything(7, verbose=False)
    defaults = {"max_epochs": 2, "limit_train_batches": 1, "num_sanity_val_steps": 0}
    trainer = make_trainer(GradAvgStrategy(exact_evaluation=True), **{**defaults, **options})
    evaluated = module(kind, sizes)
    with mock.patch("lightning_gradavg.evaluation.part.rank_zero_info") as evaluated.log_line:
        getattr(trainer, what)(evaluated)
    return evaluated.early, [line for ((line,), _) in evaluated.log_line.call_args_list]


class SanityChecked(Toy):
    """Counts the steps of the sanity check."""

    steps = 0

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.steps += self.trainer.sanity_checking

    def val_dataloader(self) -> Any:
        return make_loader([[1.0]] * 9)


@on_ranks(3)
def test_a_sanity_check_has_a_batch_for_each_rank():
    """Its two batches are fewer than the ranks, and a hook at its end may look at what the steps have left."""
    module = SanityChecked()
    options = {"max_epochs": 1, "limit_train_batches": 1, "num_sanity_val_steps": 2}
    make_trainer(GradAvgStrategy(exact_evaluation=True), **options).fit(module, make_loader([[1.0]] * 3))
    assert module.steps == 1


WITHOUT: list[Any] = [
    *(("indexed", (2, 1), what, {}) for what in ("validate", "test", "predict", "fit")),
    ("indexed", (2, 1), "fit", {"num_sanity_val_steps": 2}),
    ("indexed", (9, 1), "validate", {"limit_val_batches": 2}),
    ("several", (2, 1), "test", {}),
    ("stream", (2, 1), "validate", {}),
    ("sharded", (2, 1), "validate", {}),
    ("told", ([[[3.0]], [[5.0]], []],), "validate", SHARED),
]
STAGES = {"fit": "validation", "validate": "validation", "test": "test", "predict": "predict"}


@pytest.mark.parametrize(("kind", "sizes", "what", "options"), WITHOUT)
def test_a_rank_without_a_batch_is_named_once_and_by_the_error_of_its_hook(world, kind, sizes, what, options):
    """Of two batches, the third of three ranks has none. Ranks 0 and 1 may wait for it, and hear of its error."""
    stage = STAGES[what]
    number = " 0" * (kind == "several")
    said = f"exact evaluation has no batch of the {stage} loader{number} for rank 2. What steps leave for on_{stage}_"
    for early, lines in world(3).run(told, Passes, kind, sizes, what, **options):
        assert len(lines) == (3 if kind == "several" else 1)
        assert early == (0 if kind in ("stream", "sharded") else len(lines)), "what lengths tell is said at the start"
        assert [said in line for line in lines].count(True) == 1
    *others, last = run_ranks(told, world_size=3, module=Stacks, kind=kind, sizes=sizes, what=what, **options)
    assert "stack expects a non-empty TensorList" in last.said
    assert said in last.said
    assert all(said in rank.said or rank.exit_code == 0 for rank in others)
