"""Whatever ends a run, on any number of ranks: resumed on another number, it trains as an undisturbed one.

A kill while a checkpoint is written leaves the one before in its place, if temporary files are on its file system.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
from functools import cache
from inspect import signature
from itertools import count, product
from multiprocessing import get_context
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import faults
import pytest
import torch
from fsspec import transaction
from fsspec.implementations import local
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from noted import Act, Order, done, draws, fit, journal, together
from orders import ORDERS, WHOLE
from ranks import RankError, grid
from torch.utils.data import DataLoader

from lightning_gradavg._support.collectives import World
from lightning_gradavg.batches.chunks import Split
from lightning_gradavg.batches.progress import TrainingLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    # Python 3.12 and later, of the workers that are forked from a rank.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]


def goes_on(
    pools: list[Any], folder: Any, place: Act, read: list[Order], strategies: list[dict[str, Any]], **options: Any
) -> None:
    """Save in the first pool; resume in the second, which saves again at once, and from there in the others."""
    # From the last batch of an epoch Lightning goes on without its validation, and without what that draws.
    options["limit_val_batches"] = 0 if place.hook == "batch" else 1
    acts = [Act("save", "start"), *options.pop("looks", [])]
    first = pools[0].run(fit, read, strategies[0], [place], f"{folder}/0", **options)
    expected = together(first)
    for number, pool in enumerate(pools[1:], start=1):
        (resume,) = folder.glob(f"{number - 1}/*.ckpt")
        ranks = pool.run(fit, read, strategies[number], acts, f"{folder}/{number}", str(resume), **options)
        assert expected[done(resume) :] == together(ranks)
        assert first[0].weight == pytest.approx(ranks[0].weight, rel=1e-12)
        for noted in ranks:
            assert draws(first[0])[-len(draws(noted)) :] == draws(noted)


HOOKS = st.sampled_from([*["batch"] * 3, "validation", "end"])
SAVES = st.builds(lambda *place: Act("save", *place), HOOKS, st.integers(0, 1), st.integers(0, 15))


@settings(max_examples=12, phases=[Phase.explicit, Phase.generate])
@given(
    order=st.builds(Order, st.sampled_from(sorted(ORDERS | WHOLE)), st.integers(6, 30), st.integers(2, 6)),
    worlds=st.lists(st.integers(1, 3), min_size=2, max_size=3),
    limits=st.tuples(st.none() | st.integers(1, 4), st.none() | st.integers(1, 4)),
    place=SAVES | st.just(Act("save", "start")),
    whole=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "accumulate_grad_batches": st.integers(1, 3),
            "limit_train_batches": st.just(1.0) | st.integers(1, 6),
            "looks": st.sampled_from([[], [Act("look", "start")]]),
        }
    ),
)
@example(
    order=Order("unsized", 9, 2),
    worlds=[1, 3],
    limits=(None, None),
    place=Act("save", "batch", 1, 15),  # the last, after which Lightning takes itself to be within the epoch
    whole=False,
    options={"accumulate_grad_batches": 3},
)
@example(
    order=Order("own stream", 10, 3),
    worlds=[1, 2],
    limits=(None, 2),
    place=Act("save", "validation", 1),  # which never comes: the stream ends before the limit
    whole=False,
    options={"accumulate_grad_batches": 3, "limit_train_batches": 5, "looks": [Act("look", "start")]},
)
@example(
    order=Order("shuffle", 9, 4),
    worlds=[1, 2],
    limits=(None, None),
    place=Act("save", "end", 0),  # where a look draws a new order from the random state that training goes on with
    whole=False,
    options={"accumulate_grad_batches": 1, "looks": [Act("look", "start")]},
)
@example(
    order=Order("augmented stream", 9, 4),
    worlds=[1, 1, 1],
    limits=(None, None),
    place=Act("save", "validation", 0),  # of the end of an epoch, which it still is where the resumed run saves at once
    whole=True,
    options={"accumulate_grad_batches": 1},
)
def test_what_remains_is_what_an_uninterrupted_run_trains_on(
    world, tmp_path_factory, order, worlds, limits, place, whole, options
):
    """Saved anywhere, the remaining batches and the next epochs are those of the run that goes on, in order.

    Read whole, samples that draw in the process that trains are the same, too, bit for bit.
    """
    whole |= order.kind in WHOLE
    strategies = [{"num_replicas": 3} if whole else {"max_device_batch_size": limit} for limit in (*limits, None)]
    goes_on([world(size) for size in worlds], tmp_path_factory.mktemp("run"), place, [order], strategies, **options)


READ_TOGETHER = ["shuffle", "generator", "lazy", "stream", "own stream", "unsized"]


@settings(max_examples=10, phases=[Phase.explicit, Phase.generate])
@given(
    read=st.tuples(
        *[st.builds(Order, st.sampled_from(READ_TOGETHER), st.sampled_from(range(4, 25, 4)), st.just(4))] * 2
    ),
    mode=st.sampled_from(["max_size_cycle", "max_size", "min_size"]),
    worlds=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    epoch=st.integers(0, 1),
    window=st.integers(1, 2),
)
@example(
    read=(Order("stream", 12, 4), Order("shuffle", 4, 4)),  # of which the other ends before anything is trained on
    mode="max_size_cycle",
    worlds=(1, 1),
    epoch=0,
    window=1,
)
def test_several_loaders_go_on_from_the_end_of_an_epoch(world, tmp_path_factory, read, mode, worlds, epoch, window):
    """Of two loaders, cycled, exhausted or cut off, each has the samples that the uninterrupted run goes on with."""
    pools, options = [world(size) for size in worlds], {"mode": mode, "accumulate_grad_batches": window}
    goes_on(pools, tmp_path_factory.mktemp("run"), Act("save", "end", epoch), read, [{}, {}], **options)


@pytest.mark.parametrize(("kind", "epoch"), [("persistent workers", 1), ("augmented stream, workers", 0)])
def test_workers_that_fetch_ahead_change_nothing(world, tmp_path, kind, epoch):
    """With worker processes, the rest and the next epochs are those of the first run."""
    strategies = [{"num_replicas": 3} if "augmented" in kind else {}] * 2
    goes_on([world(2), world(1)], tmp_path, Act("save", "batch", epoch, 2), [Order(kind, 24)], strategies)


REPRODUCIBLE = {"num_replicas": 4, "reproducible": True}
COMPUTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Options of the runs that end, and of the last one.
    "at once": ({}, {}),
    "in pieces": ({}, {"max_device_batch_size": 1}),
    "reproducibly": (REPRODUCIBLE, REPRODUCIBLE),
}
HOWS = [("error",), ("interrupt",), ("SIGTERM",), ("SIGKILL",)]
KILLED = {0: "backward", 1: "step", 2: "batch start", 3: "saving"}
"""In which hook a rank is killed, by the batch; in that of saving, a part of the checkpoint is written."""
WORLDS = [(4, 1), (1, 2), (2, 4), (4, 2)]
RESUMES = [
    # How runs end, in which batch of two epochs of 5, the ranks of each and of the last one, and how these compute.
    *grid(HOWS, [(0,), (1,), (2,), (3,)], WORLDS, [*COMPUTED]),
    *(
        pytest.param(how, (batch,), worlds, computed, marks=pytest.mark.full)
        for how, batch, worlds, computed in product(HOWS, range(4), [(2, 1), (1, 4)], COMPUTED)
    ),
    (("SIGKILL", "interrupt", "SIGKILL"), (1, 4, 7), (4, 1, 2, 4), "reproducibly"),
]
SCALED = {"lr_scaling": "linear", "base_batch_size": 2, "lr_warmup_steps": 4}
# Killed after an epoch, a run goes on from its last batch, and Lightning without its validation and what that draws.
WINDOWS: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 2, "limit_val_batches": 0, "keep": {}}
BATCHES, STEPS = 5, 3
"""Of an epoch: 20 samples in batches of 4, in windows of 2, 2 and 1 of them."""
SHUFFLED = [Order("shuffle")]


@pytest.fixture(scope="module")
def undisturbed(world, tmp_path_factory):
    """Return what gives the journal of a run on one process that nobody ends, and what it noted."""

    @cache
    def run(computed: str) -> Any:
        folder = tmp_path_factory.mktemp("undisturbed")
        return *world(1).run(fit, SHUFFLED, SCALED | COMPUTED[computed][0], (), str(folder), **WINDOWS), journal(folder)

    return run


def newest(folder: Any) -> tuple[str | None, int]:
    """Return the newest checkpoint, and its step: before the first step Lightning saves none."""
    kept = max(folder.glob("*.ckpt"), key=done, default=None)
    return (None, 0) if kept is None else (str(kept), done(kept))


@pytest.mark.parametrize(("hows", "batches", "worlds", "computed"), RESUMES, ids=str)
def test_a_resumed_run_goes_on_after_the_last_whole_window(
    world, tmp_path, undisturbed, hows, batches, worlds, computed
):
    """However and wherever a run ends, resumed on another number of ranks it trains on what it has not stepped on.

    Samples that are trained and stepped on, effective rates and weights are those of the undisturbed run, also in
    pieces of one sample; where runs are reproducible, all bits are.
    """
    expected, events = undisturbed(computed)
    # What is trained on after so many steps.
    after = [0, *(number for number, event in enumerate(events, start=1) if event == "step")]
    resume, at = None, 0
    options = {**WINDOWS, "keep": {"every_n_train_steps": 1} if "SIGKILL" in hows else {}}
    for number, (how, batch) in enumerate(zip(hows, batches, strict=True)):
        kills, folder = how == "SIGKILL", tmp_path / str(number)
        hook = KILLED[batch % 4] if kills else "backward"
        # A signal reaches one rank, and rank 0 writes the checkpoint.
        rank = (hook != "saving") * batch % worlds[number] if how.startswith("SIG") else None
        act = Act("SIGKILL in saving" if hook == "saving" else how, hook, *divmod(batch, BATCHES), rank)
        with pytest.raises(RankError, match="exit code -9") if kills else contextlib.nullcontext():
            strategy = SCALED | COMPUTED[computed][0]
            world(worlds[number]).run(fit, SHUFFLED, strategy, [act], str(folder), resume, **options)
        trained, first = journal(folder), after[at]
        resume, at = newest(folder) if [*folder.glob("*.ckpt")] else (resume, at)
        stepped = batch // BATCHES * STEPS + batch % BATCHES // 2
        assert stepped <= at if how == "SIGTERM" else stepped == at  # which has the batches at hand trained on
        assert events[first : first + len(trained)] == trained
        assert after[at] - first <= len(trained)
    last = tmp_path / "last"
    rest = world(worlds[-1]).run(fit, SHUFFLED, SCALED | COMPUTED[computed][1], (), str(last), resume, **options)

    assert together([expected])[at:] == together(rest)
    assert events[after[at] :] == journal(last)
    assert expected.weight == pytest.approx(rest[0].weight, rel=1e-12)
    assert computed != "reproducibly" or all(expected.state == noted.state for noted in rest)


TRANSFERS = ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]


@pytest.mark.parametrize("kind", ["shuffle", "unsized"])
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_hooks_that_move_batches_may_draw(world, tmp_path, transfer, kind):
    """Saved within a window, which is repeated, and in which the batch draws once more when it is moved."""
    options = {"accumulate_grad_batches": 2, "transfer": transfer}
    goes_on([world(2), world(1), world(2)], tmp_path, Act("save", "batch", 0, 2), [Order(kind)], [{}] * 3, **options)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_a_batch_that_could_not_be_moved_is_repeated(world, tmp_path, transfer, window):
    """A checkpoint that the error in its hook writes counts the batches before it."""
    options: dict[str, Any] = {"limit_val_batches": 0, "accumulate_grad_batches": window, "transfer": transfer}
    expected, *_ = world(1).run(fit, SHUFFLED, {}, (), str(tmp_path / "whole"), **options)
    world(2).run(fit, SHUFFLED, {}, [Act("error", "transfer", 0, 2)], str(tmp_path / "first"), keep={}, **options)
    resume, at = newest(tmp_path / "first")
    rest = world(1).run(fit, SHUFFLED, {}, (), str(tmp_path / "rest"), resume, keep={}, **options)
    assert at == 2 // window
    assert together([expected])[at:] == together(rest)


def test_another_recipe_is_refused_unless_it_is_meant(world, tmp_path):
    """A resume under another recipe lists the differences, on all ranks; or it goes on under the new one."""
    world(2).run(fit, SHUFFLED, SCALED, [Act("error", "backward", 0, 2)], str(tmp_path / "a"), **WINDOWS)
    changed = {**WINDOWS, "accumulate_grad_batches": 1, "resume": f"{tmp_path}/a/step=1.ckpt"}
    raised = world(2).run_expecting_errors(fit, SHUFFLED, SCALED, folder=str(tmp_path / "b"), **changed)
    assert ["ValueError"] * 2 == [one.type_name for one in raised]
    assert all("global_batch_size: 8 in the checkpoint, now 4" in one.message for one in raised)
    meant = {**SCALED, "allow_recipe_change": True}
    ranks = world(2).run(fit, SHUFFLED, meant, folder=str(tmp_path / "c"), **changed)
    assert [2 * BATCHES - 2] * 2 == [len(noted.steps) for noted in ranks]


def test_a_checkpoint_written_after_training_counts_as_one_within_it(world, tmp_path):
    """5 loader batches are 5, in parts of a sample and whole; resumed for another epoch, they are 5 of 10."""
    act, kept = Act("save", "after"), f"{tmp_path}/step={BATCHES}.ckpt"
    first = world(2).run(fit, SHUFFLED, {"max_device_batch_size": 1}, [act], str(tmp_path), max_epochs=1)
    again = world(2).run(fit, SHUFFLED, {}, (), "", kept, max_epochs=2)
    assert [BATCHES, BATCHES, 2 * BATCHES, 2 * BATCHES] == [noted.batches for noted in first + again]


def test_what_was_taken_is_not_loaded_again(world, tmp_path):
    """Of a map-style dataset only indices are passed over; each rank loads its chunks of what remains."""
    read = [Order("logged", 24)]
    world(2).run(fit, read, {}, [Act("save", "batch", 0, 3)], str(tmp_path), max_epochs=1)
    ranks = world(2).run(fit, read, {}, (), "", f"{tmp_path}/step=4.ckpt", max_epochs=1)
    assert [[[16, 17, 20, 21]], [[18, 19, 22, 23]]] == [noted.loaded for noted in ranks]


MISSING = "saved after 3 batches of its epoch.*first 3 batches of the train loader are missing, it ends after 2"
OTHERS: dict[str, tuple[list[Order], list[Order], str]] = {
    # What is read before a checkpoint of mid-epoch, and after; and what the errors of all ranks say.
    "order": (
        [Order("shuffle", 24)],
        [Order("sequential", 24)],
        "saved after 3 batches.*batches of the train loader are not those of the checkpoint.*`generator=`",
    ),
    **{kind: ([Order(kind, 24)], [Order(kind, 8)], MISSING) for kind in ("sequential", "list")},
    "several": ([Order("list", 16), Order("list", 80)],) * 2
    + ("within an epoch, after 3 batches of one of 2 train loaders",),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_cannot_go_on_is_an_error_on_all_ranks(world, tmp_path, name):
    """It is found out before a batch is trained on, with advice; what ends too early is no finished epoch."""
    before, after, message = OTHERS[name]
    world(2).run(fit, before, {}, [Act("save", "batch", 1, 2)], str(tmp_path))
    (path,) = tmp_path.glob("*.ckpt")
    for raised in world(2).run_expecting_errors(fit, after, {}, (), "", str(path), limit_train_batches=6):
        assert raised.type_name in ("RuntimeError", "ValueError")
        assert re.search(message, raised.message)


CONTENT = torch.arange(1000.0)
WRITERS = {Path(module.__file__ or "").name for module in (local, transaction, shutil, tempfile)}


def save_and_be_killed(path: Path, call: int) -> None:
    """Save step 2 in this process, and kill it before this call of a C function of those that write files."""
    calls = count()

    def before(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and Path(frame.f_code.co_filename).name in WRITERS and next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(before)
    TorchCheckpointIO().save_checkpoint({"global_step": 2, "weight": CONTENT}, path)
    os._exit(0)


def step_of(path: Path) -> int | None:
    """Return the step of a checkpoint, None of a torn one."""
    try:
        checkpoint = torch.load(path, weights_only=True)
    except (RuntimeError, EOFError):
        return None
    assert torch.equal(CONTENT, checkpoint["weight"])
    step: int = checkpoint["global_step"]
    return step


def found_after_kills(path: Path) -> list[int | None]:
    """Save step 2 over step 1, killed before one call, then before the next, ...: return the steps found."""
    found: list[int | None] = []
    code: int | None = None
    while code != 0:
        TorchCheckpointIO().save_checkpoint({"global_step": 1, "weight": CONTENT}, path)
        process = get_context("fork").Process(target=save_and_be_killed, args=(path, len(found)))
        process.start()
        process.join()
        code = process.exitcode
        assert code in (0, -signal.SIGKILL)
        found.append(step_of(path))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="it needs a fork, and a second file system")
@pytest.mark.parametrize(("temporary", "torn"), [(".", False), ("/dev/shm", True)])
def test_a_killed_save_leaves_no_torn_checkpoint(tmp_path, monkeypatch, temporary, torn):
    """Lightning moves a temporary file to the name of the checkpoint, which is safe on one file system only."""
    folder = tmp_path / temporary
    if torn and (not folder.is_dir() or folder.stat().st_dev == tmp_path.stat().st_dev):
        pytest.skip("there is no second file system")
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        monkeypatch.setattr(tempfile, "tempdir", unfinished)
        found = found_after_kills(tmp_path / "last.ckpt")
    # First the old one, in the end the new one: it was killed before and after the move.
    assert (1, 2) == (found[0], found[-1])
    assert len(found) > 10
    assert torn == (None in found)


LINKED = {"every_n_train_steps": 2, "save_top_k": -1, "save_last": "link"}


@pytest.mark.skipif("save_on_exception" not in signature(ModelCheckpoint).parameters, reason="Lightning 2.6 brought it")
@pytest.mark.parametrize(
    ("act", "rank", "named", "keep", "kept"),
    [
        (faults.fail, 0, "ValueError", {}, []),
        (faults.interrupt, 1, "KeyboardInterrupt", {}, []),
        # Rank 0 would have replaced the link by one to a file that is not there.
        (faults.fail, 0, "ValueError", LINKED, ["last.ckpt", "step=2.ckpt"]),
        (faults.fail, 1, "ValueError", LINKED, ["last.ckpt", "step=2.ckpt"]),
        # And it would have removed the last checkpoint, whose name is that of the step.
        (faults.fail, 0, "ValueError", {**LINKED, "save_top_k": 1, "save_last": None}, ["step=2.ckpt"]),
    ],
)
def test_a_rank_that_ends_alone_saves_nothing(tmp_path, act, rank, named, keep, kept):
    """It would wait for the others until the timeout, which name it. The checkpoints of before stay."""
    given = {"keep": {"filename": "{step}", "save_on_exception": True, **keep}, "toy": {"after": 3}}
    ended = faults.run_ranks(faults.train_quickly, timeout=300, act=act, rank=rank, folder=str(tmp_path), **given)
    assert ([1, 1], kept) == ([one.exit_code for one in ended], sorted(path.name for path in tmp_path.iterdir()))
    assert all(torch.load(path, weights_only=True)["global_step"] == 2 for path in tmp_path.iterdir())
    assert f"rank {rank} ended with {named}" in ended[1 - rank].said
    assert "ended with" not in ended[rank].said


def test_a_resumed_loader_that_saves_at_once_saves_what_it_has_loaded():
    """A pass notes what it draws from in a copy; in a checkpoint, the end of an epoch would be the begin of one."""
    progress: Any = SimpleNamespace(draws=SimpleNamespace(resume=lambda state: None))
    loader = TrainingLoader(DataLoader([1, 2]), Split(), World(), progress)
    loaded: Any = {"snapshots": {}, "samplers": [], "now": {"random": None}, "batches": 0, "digest": ""}
    loader.load_state_dict(loaded)
    assert loader.start is not None
    snapshots: Any = loader.start["snapshots"]
    snapshots["begin"] = "what a pass drew from"
    assert loader.state_dict() is loaded
    assert {} == loaded["snapshots"]
