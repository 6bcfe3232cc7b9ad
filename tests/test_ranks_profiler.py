"""`GradAvgProfiler` in real Trainers on real ranks: what it records, that it changes nothing, and what it refuses."""

from __future__ import annotations

import json
import sys
import warnings
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
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.utils.data import DataLoader

from lightning_gradavg import GradAvgProfiler, GradAvgStrategy

WIDTH, DEPTH = 64, 6
LAYER = 4 * (WIDTH * WIDTH + WIDTH)
CAP = 0.03  # MiB; a bucket is closed when it is full, after two layers
DURATIONS = ("forward", "backward", "tail", "other", "communication", "overlap", "exposed", "copied_back")


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
    """Train on `count` batches, and return the weights and whether a hook was left on a parameter."""
    model = module(**(model or {}))
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False, callbacks=list(callbacks), **options)
    trainer.fit(model, batches(count))
    left = any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    return [parameter.detach().clone() for parameter in model.parameters()], left


def ours(**options):
    return GradAvgStrategy(bucket_cap_mb=CAP, **options)


def stock(**options):
    return DDPStrategy(bucket_cap_mb=CAP, **options)


def profiled(make, folder, profiler=None, **options):
    """Body: train under a profiler of 2 steps after 3."""
    profiler = {"steps": 2, "skip": 3, **(profiler or {})}
    return fit(make(), callbacks=[GradAvgProfiler(folder=folder, **profiler)], **options)


def plain(make, **options):
    """Body: the same training without a profiler."""
    return fit(make(), **options)


def power_sgd():
    """Return a strategy with a hook whose collectives are not those of the buckets."""
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    return GradAvgStrategy(ddp_comm_state=state, ddp_comm_hook=powerSGD_hook)


def read(folder):
    return json.loads((folder / "profile.json").read_text())


def check(profile, world_size, steps):
    """Assert what is true of every profile."""
    assert list(range(world_size)) == [rank["rank"] for rank in profile["ranks"]]
    bounds = profile["bounds"]
    assert bounds["sum_ms"] >= bounds["best_ms"] > 0
    for rank in profile["ranks"]:
        assert len(rank["steps"]) == steps
        assert rank["median"]["waiting_ms"] >= 0
        ends = [rank["steps"][0]["start_ms"]]
        for step in rank["steps"]:
            assert ends[-1] <= step["start_ms"] < step["end_ms"]
            ends.append(step["end_ms"])
            assert all(step[f"{name}_ms"] >= 0 for name in DURATIONS)
            assert pytest.approx(step["communication_ms"]) == step["overlap_ms"] + step["exposed_ms"]
            parts = sum(step[f"{name}_ms"] for name in ("forward", "backward", "tail", "other"))
            assert pytest.approx(step["step_ms"]) == parts == pytest.approx(step["end_ms"] - step["start_ms"])
            for backward in step["backwards"]:
                inside(backward, step)
                assert backward["start_ms"] <= backward["last_gradient_ms"] <= backward["end_ms"]
                for one in [*backward["reductions"], *backward["other_collectives"]]:
                    inside(one, backward)
                for bucket in backward["buckets"]:
                    assert backward["start_ms"] <= bucket["ready_ms"] <= backward["last_gradient_ms"]
                    if bucket["start_ms"] is not None:
                        inside(bucket, backward)
                        assert bucket["ready_ms"] <= bucket["end_ms"]


def inside(inner, outer):
    assert outer["start_ms"] <= inner["start_ms"] <= inner["end_ms"] <= outer["end_ms"]


def reducing(profile):
    """The backwards in which gradients were reduced, as lists of bucket indices, of every rank and step."""
    return [
        [bucket["index"] for bucket in backward["buckets"]]
        for rank in profile["ranks"]
        for step in rank["steps"]
        for backward in step["backwards"]
        if backward["reductions"]
    ]


STRATEGIES = {
    "stock": stock,
    "stock, views": partial(stock, gradient_as_bucket_view=True),
    "ours": ours,
    "ours, sum": partial(ours, reduction="sum"),
    "ours, weighted": partial(ours, reduction="weighted_mean"),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_buckets_are_found_under_every_strategy(world, tmp_path, name):
    """Three buckets of two layers each, reduced once per step on every rank, with a size and a rate each."""
    make = STRATEGIES[name]
    answers = world(2).run(profiled, make, str(tmp_path), {"picture": False, "trace": False})

    assert [False, False] == [left for _, left in answers]
    profile = read(tmp_path)
    check(profile, 2, steps=2)
    assert [list(range(DEPTH // 2))] * 4 == reducing(profile)
    assert [2 * LAYER] * (DEPTH // 2) == [bucket["bytes"] for bucket in profile["buckets"]]
    assert [2 * LAYER] * (DEPTH // 2) == [bucket["wire_bytes"] for bucket in profile["buckets"]]
    assert {"float32"} == {bucket["dtype"] for bucket in profile["buckets"]}
    expected = sorted(f"layers.{layer}.{kind}" for layer in range(DEPTH) for kind in ("weight", "bias"))
    assert expected == sorted(name for bucket in profile["buckets"] for name in bucket["parameters"])
    assert all(bucket["bandwidth_gb_per_s"] > 0 for bucket in profile["buckets"])
    assert (make().__class__.__name__, "gloo", "cpu", 3) == tuple(
        profile["run"][key] for key in ("strategy", "backend", "device", "first_step")
    )


@pytest.mark.parametrize("ranks", [1, 3])
def test_any_number_of_ranks(world, tmp_path, ranks):
    """One rank and three are profiled like two."""
    world(ranks).run(profiled, STRATEGIES["ours, weighted"], str(tmp_path), {"picture": False, "trace": False})

    profile = read(tmp_path)
    check(profile, ranks, steps=2)
    assert [[0, 1, 2]] * 2 * ranks == reducing(profile)


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified:UserWarning")
def test_buckets_that_are_never_formed_anew(world, tmp_path):
    """With unused parameters to find, DDP keeps its first buckets: from the first weight on, and reduced backwards."""
    make = partial(stock, find_unused_parameters=True)
    world(2).run(profiled, make, str(tmp_path), {"picture": False, "trace": False})

    profile = read(tmp_path)
    check(profile, 2, steps=2)
    bias, weight = 4 * WIDTH, 4 * WIDTH * WIDTH
    sizes = [bias, 2 * LAYER, 2 * LAYER, 2 * weight + bias]
    assert sizes == [bucket["bytes"] for bucket in profile["buckets"]]
    assert ["layers.5.bias"] == profile["buckets"][0]["parameters"]
    assert [[0, 1, 2, 3]] * 4 == reducing(profile)


@pytest.mark.parametrize("name", ["stock", "ours, weighted"])
def test_training_has_the_same_bits(world, tmp_path, name):
    """With the profiler, weights are those of a run without it, bit by bit."""
    model = {"weighted": name == "ours, weighted"}
    options = {"model": model, "accumulate_grad_batches": 2, "count": 10}
    with_it = world(2).run(profiled, STRATEGIES[name], str(tmp_path), {"picture": False}, **options)
    without = world(2).run(plain, STRATEGIES[name], **options)

    for (weights, _), (expected, _) in zip(with_it, without, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))


def test_a_window_is_one_step(world, tmp_path):
    """With accumulation a step has a backward per micro-batch, of which the last one reduces."""
    world(2).run(
        profiled,
        STRATEGIES["ours, weighted"],
        str(tmp_path),
        {"picture": False, "trace": False},
        model={"weighted": True},
        count=15,
        accumulate_grad_batches=3,
    )

    profile = read(tmp_path)
    check(profile, 2, steps=2)
    for rank in profile["ranks"]:
        for step in rank["steps"]:
            assert [0, 0, 3] == [len(backward["buckets"]) for backward in step["backwards"]]
            # The exchange of the window's weights.
            assert 1 == len(step["backwards"][-1]["other_collectives"])


def test_two_reductions_per_batch_in_manual_optimization(world, tmp_path):
    """In manual optimization a step ends with the batch, however often the optimizer stepped in it."""
    world(2).run(profiled, stock, str(tmp_path), {"picture": False, "trace": False}, model={"manual": True})

    profile = read(tmp_path)
    check(profile, 2, steps=2)
    assert [[0, 1, 2]] * 8 == reducing(profile)


def test_the_wire_may_be_narrower(world, tmp_path):
    """A hook that compresses halves the bytes that are reduced, not those of the gradients."""
    make = partial(ours, ddp_comm_hook=fp16_compress_hook)
    world(2).run(profiled, make, str(tmp_path), {"picture": False, "trace": False})

    profile = read(tmp_path)
    check(profile, 2, steps=2)
    assert [(2 * LAYER, LAYER)] * 3 == [(bucket["bytes"], bucket["wire_bytes"]) for bucket in profile["buckets"]]


def test_half_precision_is_summed_in_float32(world, tmp_path):
    """A rule sums bfloat16 in float32, so twice the bytes of the gradients are reduced."""
    make = partial(ours, reduction="weighted_mean")
    world(2).run(profiled, make, str(tmp_path), {"picture": False, "trace": False}, precision="bf16-true")

    profile = read(tmp_path)
    check(profile, 2, steps=2)
    assert [("bfloat16", 2 * LAYER, 4 * LAYER), ("bfloat16", LAYER, 2 * LAYER)] == [
        (bucket["dtype"], bucket["bytes"], bucket["wire_bytes"]) for bucket in profile["buckets"]
    ]


class Sparse(Net):
    """Has an embedding whose gradient is sparse."""

    def __init__(self, **options):
        super().__init__(**options)
        self.embedding = torch.nn.Embedding(10, WIDTH, sparse=True)

    def training_step(self, batch, batch_idx):
        return self.layers(batch + self.embedding(torch.arange(4))).pow(2).mean()


@pytest.mark.parametrize("name", ["stock", "ours, weighted"])
def test_sparse_gradients_have_no_bandwidth(world, tmp_path, name):
    """A sparse gradient is a bucket of its own, with moments but without the bytes that travel."""
    world(2).run(profiled, STRATEGIES[name], str(tmp_path), {"picture": False, "trace": False}, module=Sparse)

    profile = read(tmp_path)
    check(profile, 2, steps=2)
    assert [[0, 1, 2, 3]] * 4 == reducing(profile)
    (bucket,) = [bucket for bucket in profile["buckets"] if bucket["parameters"] == ["embedding.weight"]]
    assert (4 * 10 * WIDTH, None, None) == (bucket["bytes"], bucket["wire_bytes"], bucket["bandwidth_gb_per_s"])
    assert bucket["ready_ms"] <= bucket["end_ms"]


def in_halves(state, bucket):
    """A hook with two collectives per bucket."""
    buffer = bucket.buffer()
    futures = [dist.all_reduce(half, async_op=True).get_future() for half in buffer.chunk(2)]
    return torch.futures.collect_all(futures).then(lambda _: buffer.div_(dist.get_world_size()))


def test_a_hook_with_several_collectives_has_no_bucket_times(world, tmp_path):
    """Where collectives are not those of buckets, they are reductions of the step, and a note says so."""
    make = partial(ours, ddp_comm_hook=in_halves)
    world(2).run(profiled, make, str(tmp_path), {"picture": False, "trace": False})

    profile = read(tmp_path)
    check(profile, 2, steps=2)
    for rank in profile["ranks"]:
        for step in rank["steps"]:
            assert [6] == [len(backward["reductions"]) for backward in step["backwards"]]
            assert step["communication_ms"] > 0
    assert [None] * 3 == [bucket["bandwidth_gb_per_s"] for bucket in profile["buckets"]]
    assert any("Not every bucket has one collective of its size" in note for note in profile["notes"])


def test_collectives_of_other_threads_are_missed_and_said_to_be(world, tmp_path):
    """PowerSGD on gloo runs in a thread that the profiler does not see: no advice on buckets, but a note."""
    world(2).run(profiled, power_sgd, str(tmp_path), {"picture": False, "trace": False})

    profile = read(tmp_path)
    check(profile, 2, steps=2)
    assert [] == reducing(profile)
    assert any("The trace has no collective of some reductions" in note for note in profile["notes"])
    assert not any("bucket_cap_mb" in line for line in profile["advice"])


def test_files_of_every_rank(world, tmp_path):
    """Rank 0 writes a picture, every rank a Chrome trace with its collectives and the profiled backwards."""
    pytest.importorskip("matplotlib")
    world(2).run(profiled, stock, str(tmp_path))

    assert {"profile.json", "timeline.png", "trace_rank0.json", "trace_rank1.json"} == {
        path.name for path in tmp_path.iterdir()
    }
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    for rank in range(2):
        trace = json.loads((tmp_path / f"trace_rank{rank}.json").read_text())
        names = [event.get("name") for event in trace["traceEvents"]]
        # Three steps, because the one before the profiled ones is in the trace, too.
        assert 3 == names.count("gradavg: backward")
        assert 9 <= names.count("gloo:all_reduce") == names.count("c10d::allreduce_")


def test_training_that_ends_early_reports_what_there_was(world, tmp_path):
    """Where fewer steps follow than were asked for, those are reported."""
    world(2).run(profiled, stock, str(tmp_path), {"steps": 50, "picture": False, "trace": False}, count=4)

    check(read(tmp_path), 2, steps=1)


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


def without_matplotlib(folder):
    """Body: profile as if matplotlib were not installed, and return the warnings."""
    with warnings.catch_warnings(record=True) as seen, pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_gradavg.profiling.profiler.can_draw", lambda: False)
        warnings.simplefilter("always")
        profiled(stock, folder, {"trace": False})
    return [str(one.message) for one in seen if "matplotlib" in str(one.message)]


def test_without_matplotlib_there_is_no_picture(world, tmp_path):
    """Where matplotlib is missing, rank 0 says before training what to install, and all else is written."""
    first, second = world(2).run(without_matplotlib, str(tmp_path))

    assert [True] == ["pip install matplotlib" in text for text in first]
    assert [] == second
    assert ["profile.json"] == [path.name for path in tmp_path.iterdir()]


class Breaks(Net):
    """Raises in the forward of the fourth batch."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            raise RuntimeError("out of data")
        return super().training_step(batch, batch_idx)


def broken_then_profiled(folder):
    """Body: a run that fails while it is profiled, and another one after it."""
    callback = GradAvgProfiler(folder=folder, steps=2, skip=2)
    trainer = make_trainer(stock(), max_epochs=1, use_distributed_sampler=False, callbacks=[callback])
    model = Breaks()
    with pytest.raises(RuntimeError, match="out of data"):
        trainer.fit(model, batches(5))
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    return profiled(stock, folder, {"picture": False, "trace": False})


def test_a_failed_run_leaves_no_profiler_behind(world, tmp_path):
    """After an exception in a profiled step, the same process can profile another run."""
    world(2).run(broken_then_profiled, str(tmp_path))

    check(read(tmp_path), 2, steps=2)


def test_other_strategies_are_refused():
    """A strategy without DistributedDataParallel is named."""
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, max_epochs=1, callbacks=[GradAvgProfiler()])
    with pytest.raises(TypeError, match="SingleDeviceStrategy does not use"):
        trainer.fit(BoringModel())


def two_profilers(folder):
    """Body: Lightning's own profiler beside this one."""
    with pytest.raises(ValueError, match="GradAvgProfiler and profiler=PyTorchProfiler both record"):
        fit(stock(), callbacks=[GradAvgProfiler(folder=folder)], profiler="pytorch", default_root_dir=folder)


def profiler_around(folder):
    """Body: a profiler of the user's own around the training."""
    with (
        pytest.raises(ValueError, match="GradAvgProfiler and a profiler around fit"),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    ):
        fit(stock(), callbacks=[GradAvgProfiler(folder=folder)])


def test_a_profiler_around_is_refused(world, tmp_path):
    """A profiler that records already when training begins is an error."""
    world(1).run(profiler_around, str(tmp_path))


def test_a_second_profiler_is_refused(world, tmp_path):
    """Two recordings with torch.profiler in one process are an error that names both."""
    world(1).run(two_profilers, str(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"), [({"steps": 0}, "at least 1, got 0"), ({"skip": 1}, "skip=1 is too small")]
)
def test_too_few_steps_are_refused(options, message):
    """There is at least one step to profile, and two before it."""
    with pytest.raises(ValueError, match=message):
        GradAvgProfiler(**options)


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
