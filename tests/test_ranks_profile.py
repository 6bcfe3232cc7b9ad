"""`GradAvgProfiler` in real Trainers on real ranks: what it records, that it changes nothing, and what it refuses."""

from __future__ import annotations

import gzip
import json
import sys
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy
from ranks import make_trainer
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.utils.data import DataLoader

from lightning_gradavg import GradAvgMonitor, GradAvgProfiler, GradAvgStrategy

WIDTH, DEPTH = 64, 6
CAP = 0.03  # MiB; a bucket is closed when it is full, after two layers
BUCKETS = [f"gradavg::bucket {index}" for index in range(DEPTH // 2)]
QUIET = {"trace": False}


class Net(LightningModule):
    """Layers of one size, so that buckets are known by hand."""

    def __init__(self, weighted=False, manual=False):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
        self.weighted = weighted
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        loss = self.layers(batch).tanh().pow(2).mean()
        if not self.automatic_optimization:
            for _ in range(2):
                self.optimizers().zero_grad()
                self.manual_backward(self.layers(batch).pow(2).mean())
                self.optimizers().step()
            return None
        return {"loss": loss, "weight": float(1 + dist.get_rank())} if self.weighted else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(count):
    generator = torch.Generator().manual_seed(dist.get_rank())
    data = [torch.randn(4, WIDTH, generator=generator) for _ in range(count)]
    return DataLoader(data, batch_size=None)


def fit(strategy, count=5, callbacks=(), model=None, module=Net, **options):
    """Train on `count` batches, and return the weights."""
    model = module(**(model or {}))
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False, callbacks=list(callbacks), **options)
    trainer.fit(model, batches(count))
    return [parameter.detach().clone() for parameter in model.parameters()]


def ours(**options):
    return GradAvgStrategy(bucket_cap_mb=CAP, **options)


def stock(**options):
    return DDPStrategy(bucket_cap_mb=CAP, **options)


def profiled(make, folder, profiler=None, beside=(), **options):
    """Body: train under a profiler of 2 steps after 3, and return what it saw, and the weights."""
    callback = GradAvgProfiler(folder=folder, **{"steps": 2, "skip": 3, **(profiler or {})})
    weights = fit(make(), callbacks=[callback, *(one() for one in beside)], **options)
    assert not torch.autograd._profiler_enabled()
    return callback.times, weights


def plain(make, **options):
    """Body: the same training without a profiler."""
    return fit(make(), **options)


def check(answers, steps=2):
    """Assert what is true of every profile, and return the times of all ranks and steps."""
    for times, _ in answers:
        assert steps == len(times)
        for one in times:
            assert one.seconds > 0
            for seen in (one.trace, one.timers):
                assert 0 <= seen.overlapped <= seen.total
                assert pytest.approx(seen.total) == seen.overlapped + seen.exposed
            assert one.trace.total <= one.seconds
    return [one for times, _ in answers for one in times]


def names_in(folder, rank):
    """Return how often each name is in the trace of a rank."""
    with gzip.open(folder / f"trace_rank{rank}.json.gz", "rt") as file:
        return Counter(event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X")


STRATEGIES = {
    "stock": stock,
    "stock, views": partial(stock, gradient_as_bucket_view=True),
    "ours": ours,
    "ours, sum": partial(ours, reduction="sum"),
    "ours, weighted": partial(ours, reduction="weighted_mean"),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_is_profiled(world, tmp_path, name):
    """Of each profiled step there is communication by both measures, and no collective is without its end.

    A rule's buckets are named; stock DDP, which `GradAvgStrategy()` is, has no hook that could name its own.
    """
    found = check(world(2).run(profiled, STRATEGIES[name], str(tmp_path)))

    assert all(one.trace.total > 0 and one.timers.total > 0 for one in found)
    assert {"trace_rank0.json.gz", "trace_rank1.json.gz"} == {path.name for path in tmp_path.iterdir()}
    named = [2] * len(BUCKETS) if name in ("ours, sum", "ours, weighted") else [0] * len(BUCKETS)
    for rank in range(2):
        names = names_in(tmp_path, rank)
        assert named == [names[bucket] for bucket in BUCKETS]
        assert 2 == names["gradavg::backward"]
        # What follows upon the last step, in which the ranks wait for each other, is a step to the profiler.
        assert [1, 1, 1, 0] == [names[f"ProfilerStep#{step}"] for step in (3, 4, 5, 6)]
        assert 2 * len(BUCKETS) <= names["gloo:all_reduce"] == names["c10d::allreduce_"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_any_number_of_ranks(world, tmp_path, ranks):
    """One rank and three are profiled like two."""
    answers = world(ranks).run(profiled, STRATEGIES["ours, weighted"], str(tmp_path), QUIET)

    assert 2 * ranks == len(check(answers))
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["stock", "ours, weighted"])
def test_training_has_the_same_bits(world, tmp_path, name):
    """With the profiler, weights are those of a run without it, bit by bit."""
    model = {"weighted": name == "ours, weighted"}
    options = {"model": model, "accumulate_grad_batches": 2, "count": 10}
    with_it = world(2).run(profiled, STRATEGIES[name], str(tmp_path), **options)
    without = world(2).run(plain, STRATEGIES[name], **options)

    for (_, weights), expected in zip(with_it, without, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))


def test_a_window_is_one_step(world, tmp_path):
    """With accumulation a step has a backward per micro-batch, of which the last one reduces."""
    options = {"model": {"weighted": True}, "count": 15, "accumulate_grad_batches": 3}
    check(world(2).run(profiled, STRATEGIES["ours, weighted"], str(tmp_path), **options))

    names = names_in(tmp_path, 0)
    assert [6, *[2] * len(BUCKETS)] == [names[name] for name in ("gradavg::backward", *BUCKETS)]


def test_manual_optimization(world, tmp_path):
    """In manual optimization a step ends with the batch, however often the optimizer stepped in it."""
    check(world(2).run(profiled, STRATEGIES["ours, sum"], str(tmp_path), model={"manual": True}))

    names = names_in(tmp_path, 0)
    assert [4] * (1 + len(BUCKETS)) == [names[name] for name in ("gradavg::backward", *BUCKETS)]


class Sparse(Net):
    """Has an embedding whose gradient is sparse."""

    def __init__(self, **options):
        super().__init__(**options)
        self.embedding = torch.nn.Embedding(10, WIDTH, sparse=True)

    def training_step(self, batch, batch_idx):
        return self.layers(batch + self.embedding(torch.arange(4))).pow(2).mean()


def in_halves(state, bucket):
    """A hook with two collectives per bucket."""
    buffer = bucket.buffer()
    futures = [dist.all_reduce(half, async_op=True).get_future() for half in buffer.chunk(2)]
    return torch.futures.collect_all(futures).then(lambda _: buffer.div_(dist.get_world_size()))


def power_sgd():
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    return GradAvgStrategy(ddp_comm_state=state, ddp_comm_hook=powerSGD_hook)


@pytest.mark.parametrize(
    ("make", "options", "buckets"),
    [
        (partial(ours, reduction="weighted_mean"), {"module": Sparse}, 4),
        (partial(ours, reduction="weighted_mean"), {"precision": "bf16-true"}, 2),
        (partial(ours, reduction="sum", wire_dtype="bfloat16"), {}, 3),
        (partial(ours, ddp_comm_hook=in_halves), {}, 3),
        (power_sgd, {}, 1),
    ],
    ids=["sparse", "half precision", "wire", "two collectives per bucket", "PowerSGD"],
)
def test_buckets_are_named_however_they_travel(world, tmp_path, make, options, buckets):
    """Each bucket has its label in every step, of whatever its exchange is made."""
    check(world(2).run(profiled, make, str(tmp_path), **options))

    names = names_in(tmp_path, 0)
    labels = {name: count for name, count in names.items() if name.startswith("gradavg::bucket")}
    assert {f"gradavg::bucket {index}": 2 for index in range(buckets)} == labels


def test_beside_the_monitor(world, tmp_path):
    """The monitor, which stops DDP's timers after each step that it logs, takes none from the profiler."""
    beside = [partial(GradAvgMonitor, 1)]
    found = check(
        world(2).run(profiled, STRATEGIES["ours, sum"], str(tmp_path), QUIET, beside, default_root_dir=tmp_path)
    )

    assert all(one.timers.total > 0 for one in found)


def printed(folder):
    """Body: profile, and return what was printed."""
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("rich.console.Console.print", lambda self, table: lines.append(table))
        times, _ = profiled(stock, folder, QUIET)
        return [[list(column.cells) for column in table.columns] for table in lines], times


def test_the_table_has_every_step_and_the_range_of_the_ranks(world, tmp_path):
    """Rank 0 prints its steps, their medians, and the smallest and largest median of any rank, in ms."""
    ((table,), times), (nothing, others) = world(2).run(printed, str(tmp_path))

    assert [] == nothing
    names, milliseconds, *_, exposed_by_ddp = table
    assert ["3", "4", "rank 0", "smallest", "largest"] == names
    medians = [sum(one.seconds for one in rank) / 2 for rank in (times, others)]
    seconds = [*(one.seconds for one in times), medians[0], min(medians), max(medians)]
    assert [f"{1e3 * value:.2f}" for value in seconds] == milliseconds
    assert f"{1e3 * times[0].timers.exposed:.2f}" == exposed_by_ddp[0]


def test_training_that_ends_early_reports_what_there_was(world, tmp_path):
    """Where fewer steps follow than were asked for, those are reported."""
    check(world(2).run(profiled, stock, str(tmp_path), {"steps": 50, **QUIET}, count=4), steps=1)


def too_short(folder):
    """Body: train for fewer steps than are skipped, and return the warnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        profiled(stock, folder, count=2)
    return [str(one.message) for one in seen if "GradAvgProfiler" in str(one.message)]


def test_training_that_ends_before_says_so(world, tmp_path):
    """Without a single profiled step, rank 0 warns and nothing is written."""
    first, second = world(2).run(too_short, str(tmp_path))

    assert [True] == ["training ended before the first step after skip=3" in text for text in first]
    assert [] == second
    assert [] == list(tmp_path.iterdir())


class Breaks(Net):
    """Raises in the forward of the fourth batch."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            raise RuntimeError("out of data")
        return super().training_step(batch, batch_idx)


def broken_then_profiled(folder):
    """Body: a run that fails while it is profiled, and another one after it."""
    callback = GradAvgProfiler(folder=folder, steps=2, skip=2)
    with pytest.raises(RuntimeError, match="out of data"):
        fit(stock(), callbacks=[callback], module=Breaks)
    return profiled(stock, folder, QUIET)


def test_a_failed_run_leaves_no_profiler_behind(world, tmp_path):
    """After an exception in a profiled step, the same process can profile another run."""
    check(world(2).run(broken_then_profiled, str(tmp_path)))


def test_other_strategies_are_refused():
    """A strategy without DistributedDataParallel is named."""
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, max_epochs=1, callbacks=[GradAvgProfiler()])
    with pytest.raises(TypeError, match="SingleDeviceStrategy does not use"):
        trainer.fit(BoringModel())


def two_profilers(folder):
    """Body: Lightning's own profiler beside this one."""
    with pytest.raises(ValueError, match=r"another profiler \(profiler=PyTorchProfiler, or one around"):
        fit(stock(), callbacks=[GradAvgProfiler(folder=folder)], profiler="pytorch", default_root_dir=folder)


def profiler_around(folder):
    """Body: a profiler of the user's own around the training."""
    with (
        pytest.raises(ValueError, match=r"another profiler \(profiler=PassThroughProfiler, or one around fit\(\)"),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    ):
        fit(stock(), callbacks=[GradAvgProfiler(folder=folder)])


@pytest.mark.parametrize("body", [two_profilers, profiler_around])
def test_a_second_profiler_is_refused(world, tmp_path, body):
    """Two recordings with torch.profiler in one process are an error that names both."""
    world(1).run(body, str(tmp_path))


def test_a_config_can_add_it(tmp_path, monkeypatch):
    """LightningCLI builds the callback from its class path and options."""
    options = ["--trainer.callbacks=lightning_gradavg.GradAvgProfiler", "--trainer.callbacks.steps=3"]
    options += [f"--trainer.callbacks.folder={tmp_path}", "--trainer.callbacks.trace=false"]
    quiet = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu", "devices": 1}
    monkeypatch.setattr(sys, "argv", ["gradavg"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of Lightning's calls

    cli = LightningCLI(BoringModel, args=options, run=False, seed_everything_default=1, trainer_defaults=quiet)

    (profiler,) = [callback for callback in cli.trainer.callbacks if isinstance(callback, GradAvgProfiler)]
    assert (3, 5, Path(tmp_path), False) == (profiler.steps, profiler.skip, Path(profiler.folder), profiler.trace)
