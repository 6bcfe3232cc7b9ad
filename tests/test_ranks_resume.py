"""RESUMES: how runs end, in which batch, on how many ranks; and on how many ranks the next run resumes.

To add a row, append a `Resume` to one of the groups. There is no expected value to write: the expected run is one
process that nobody ends (`undisturbed`). Runs train on two epochs of 5 batches, in windows of 2, 2 and 1 of them. The
test starts a run for each of `ends`, which resumes the one before from its newest checkpoint, and ends in its batch. A
last run resumes on the last number of ranks and trains to the end. After each run, the journal of what ranks trained
on must go on as that of the undisturbed run does; in the end the steps, the effective rates and the weights are those
of the undisturbed run, and where runs are reproducible, all bits. A row that no pair of values needs is `is_full`: it
runs before a release only.

Below, other tests save a checkpoint at any moment, with any loader. A kill while a checkpoint is written leaves the
one before in its place, if temporary files are on its file system.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from inspect import getattr_static
from itertools import count, product
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from faulty_runs import fail, interrupt, run_ranks, train_quickly
from fsspec import transaction
from fsspec.implementations import local
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from noted import Act, Noted, Order, drawn_numbers, fit, join_ranks, read_journal, step_of_checkpoint
from orders import ORDERS, WHOLE
from ranks import RankError, covering, grid, make_trainer
from torch import Tensor
from torch.utils.data import DataLoader
from toys import Stream, Toy, approx

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.batches.joined import JoinedLoader, StatefulJoinedLoader
from lightning_gradavg.rates import part as rates_part

pytestmark = [
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    # Python 3.12 and later, of the workers that are forked from a rank.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]


class Computed(NamedTuple):
    """How ranks compute a step: options of the strategy."""

    # Of the runs that end, and of the undisturbed one.
    first: dict[str, Any]
    # Of the last run.
    last: dict[str, Any]


REPRODUCIBLE = {"num_replicas": 4, "reproducible": True}
COMPUTED = {
    "at once": Computed({}, {}),
    "in pieces": Computed({}, {"max_device_batch_size": 1}),
    "reproducibly": Computed(REPRODUCIBLE, REPRODUCIBLE),
}


@dataclass(frozen=True)
class Resume:
    """A row of RESUMES."""

    # How each run ends: "error", "interrupt" (Ctrl-C), "SIGTERM" or "SIGKILL". SIGKILL reaches one rank, SIGTERM all
    # in one place: Lightning's handlers exchange on each rank where it stands.
    ends: tuple[str, ...]
    # In which batch of 10 each run ends.
    batches: tuple[int, ...]
    # The number of ranks of each run, and of the last one, which nobody ends.
    world_sizes: tuple[int, ...]
    # How ranks compute a step: a name of COMPUTED.
    computed: str
    # Whether the row takes too long for every run of the tests.
    is_full: bool = False

    def __str__(self) -> str:
        return f"{self.ends}-{self.batches}-{self.world_sizes}-{self.computed}"


ENDS = [("error",), ("interrupt",), ("SIGTERM",), ("SIGKILL",)]


def make_resumes_after_one_end() -> list[Resume]:
    """Return a row for each end, batch, numbers of ranks and way to compute; the rows not full hold all pairs."""
    factors = (ENDS, [(0,), (1,), (2,), (3,)], [(4, 1), (1, 2), (2, 4), (4, 2)], [*COMPUTED])
    in_every_run = covering(*factors)
    rows = []
    for combination in product(*factors):
        rows.append(Resume(*combination, is_full=combination not in in_every_run))
    return rows


def make_further_resumes_after_one_end() -> list[Resume]:
    """Return rows for further numbers of ranks."""
    rows = []
    for ends, batch, world_sizes, computed in product(ENDS, range(4), [(2, 1), (1, 4)], COMPUTED):
        rows.append(Resume(ends, (batch,), world_sizes, computed, is_full=True))
    return rows


RESUMES = [
    *make_resumes_after_one_end(),
    *make_further_resumes_after_one_end(),
    # Runs that end one after another.
    Resume(("SIGKILL", "interrupt", "SIGKILL"), (1, 4, 7), (4, 1, 2, 4), "reproducibly"),
]


SCALED = {"lr_scaling": "linear", "base_batch_size": 2, "lr_warmup_steps": 4}
# Killed after an epoch, a run resumes at its last batch, and Lightning without its validation and what that draws.
WINDOWS: dict[str, Any] = {
    "accumulate_grad_batches": 2,
    "max_epochs": 2,
    "limit_val_batches": 0,
    "model_checkpoint": {},
}
# Of an epoch: 20 samples in batches of 4, in windows of 2, 2 and 1 of them.
BATCHES = 5
STEPS = 3
SHUFFLED = [Order("shuffle")]
KILLED_IN = {0: "backward", 1: "step", 2: "batch start", 3: "saving"}
"""In which hook a rank is killed, by the batch modulo 4; in that of saving, a part of the checkpoint is written."""


@pytest.fixture(scope="module")
def undisturbed(world, tmp_path_factory):
    """Return a function of how steps are computed. It returns what a run on one process noted, and its journal."""

    @cache
    def run(computed: str) -> tuple[Noted, list[Any]]:
        folder = tmp_path_factory.mktemp("undisturbed")
        strategy = SCALED | COMPUTED[computed].first
        (noted,) = world(1).run(fit, SHUFFLED, strategy, (), str(folder), **WINDOWS)
        return noted, read_journal(folder)

    return run


def newest(folder: Path) -> tuple[str | None, int]:
    """Return the newest checkpoint, and its step: before the first step Lightning saves none."""
    paths = sorted(folder.glob("*.ckpt"), key=step_of_checkpoint)
    if not paths:
        return None, 0
    return str(paths[-1]), step_of_checkpoint(paths[-1])


def make_act(end: str, batch: int, world_size: int) -> Act:
    """Return what ends a run in a batch. SIGKILL reaches one rank: in saving rank 0, which writes the checkpoint."""
    epoch, batch_of_epoch = divmod(batch, BATCHES)
    if end == "SIGKILL":
        hook = KILLED_IN[batch % 4]
        if hook == "saving":
            return Act("SIGKILL in saving", hook, epoch, batch_of_epoch, rank=0)
        return Act(end, hook, epoch, batch_of_epoch, rank=batch % world_size)
    return Act(end, "backward", epoch, batch_of_epoch)


def make_parameters_of_resumes() -> list[Any]:
    """Return a parameter of pytest for every row of RESUMES."""
    parameters = []
    for row in RESUMES:
        marks = []
        if row.is_full:
            marks.append(pytest.mark.full)
        parameters.append(pytest.param(row, id=str(row), marks=marks))
    return parameters


@pytest.mark.parametrize("row", make_parameters_of_resumes())
def test_a_resumed_run_goes_on_after_the_last_whole_window(world, tmp_path, undisturbed, row):
    """However and wherever a run ends, resumed on another number of ranks it trains on what it has not stepped on.

    Samples that are trained and stepped on, effective rates and weights are those of the undisturbed run, also in
    pieces of one sample; where runs are reproducible, all bits are.
    """
    expected, events = undisturbed(row.computed)
    # The event of the journal with which training goes on after so many steps.
    event_after = [0]
    for number, event in enumerate(events, start=1):
        if event == "step":
            event_after.append(number)
    options = dict(WINDOWS)
    if "SIGKILL" in row.ends:
        options["model_checkpoint"] = {"every_n_train_steps": 1}
    strategy = SCALED | COMPUTED[row.computed].first
    # The newest checkpoint, and its step.
    checkpoint: str | None = None
    step = 0
    *world_sizes, last_world_size = row.world_sizes
    for number, (end, batch, world_size) in enumerate(zip(row.ends, row.batches, world_sizes, strict=True)):
        folder = tmp_path / str(number)
        act = make_act(end, batch, world_size)
        expected_error: Any = contextlib.nullcontext()
        if end == "SIGKILL":
            expected_error = pytest.raises(RankError, match="exit code -9")
        with expected_error:
            world(world_size).run(fit, SHUFFLED, strategy, [act], str(folder), checkpoint, **options)
        trained = read_journal(folder)
        first_event = event_after[step]
        if list(folder.glob("*.ckpt")):
            checkpoint, step = newest(folder)
        steps_before_batch = batch // BATCHES * STEPS + batch % BATCHES // 2
        if end == "SIGTERM":
            # Ranks train on the batches at hand before they end.
            assert steps_before_batch <= step
        else:
            assert steps_before_batch == step
        assert events[first_event : first_event + len(trained)] == trained
        assert event_after[step] - first_event <= len(trained)
    last_folder = tmp_path / "last"
    last_strategy = SCALED | COMPUTED[row.computed].last
    ranks = world(last_world_size).run(fit, SHUFFLED, last_strategy, (), str(last_folder), checkpoint, **options)

    assert join_ranks([expected])[step:] == join_ranks(ranks)
    assert events[event_after[step] :] == read_journal(last_folder)
    assert expected.weight == pytest.approx(ranks[0].weight, rel=1e-12)
    if row.computed == "reproducibly":
        assert [expected.state] * len(ranks) == [noted.state for noted in ranks]


def assert_resumes(
    pools: list[Any], folder: Any, save: Act, loaders: Sequence[Order], strategies: list[dict[str, Any]], **options: Any
) -> None:
    """Save in the first pool; resume in the second, which saves again at once, and from there in the others.

    Assert that each resumed run takes the steps, and draws the numbers, of the first one after its checkpoint.
    """
    # From the last batch of an epoch Lightning resumes without its validation, and without what that draws.
    options["limit_val_batches"] = 0 if save.hook == "batch" else 1
    acts = [Act("save", "start"), *options.pop("looks", [])]
    first = pools[0].run(fit, loaders, strategies[0], [save], f"{folder}/0", **options)
    expected_steps = join_ranks(first)
    expected_numbers = drawn_numbers(first[0])
    for number, pool in enumerate(pools[1:], start=1):
        (checkpoint,) = folder.glob(f"{number - 1}/*.ckpt")
        ranks = pool.run(fit, loaders, strategies[number], acts, f"{folder}/{number}", str(checkpoint), **options)
        assert expected_steps[step_of_checkpoint(checkpoint) :] == join_ranks(ranks)
        assert first[0].weight == pytest.approx(ranks[0].weight, rel=1e-12)
        for noted in ranks:
            numbers = drawn_numbers(noted)
            assert expected_numbers[-len(numbers) :] == numbers


HOOKS = st.sampled_from([*["batch"] * 3, "validation", "end"])
SAVES = st.builds(lambda *place: Act("save", *place), HOOKS, st.integers(0, 1), st.integers(0, 15))


@settings(max_examples=6, phases=[Phase.explicit, Phase.generate])
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
    order=Order("shuffle", 9, 2),
    worlds=[1, 2],
    limits=(None, None),
    place=Act("save", "validation", 0),  # the first of two: their seeds come between the orders of two epochs
    whole=False,
    options={"accumulate_grad_batches": 1, "val_check_interval": 2},
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
    strategies: list[dict[str, Any]] = []
    for limit in (*limits, None):
        if whole or order.kind in WHOLE:
            strategies.append({"num_replicas": 3})
        else:
            strategies.append({"max_device_batch_size": limit})
    pools = [world(size) for size in worlds]
    assert_resumes(pools, tmp_path_factory.mktemp("run"), place, [order], strategies, **options)


READ_TOGETHER = ["shuffle", "generator", "lazy", "stream", "own stream", "unsized"]


@settings(max_examples=5, phases=[Phase.explicit, Phase.generate])
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
@example(
    read=(Order("stream", 12, 4), Order("generator", 4, 4)),  # likewise; its generator goes on
    mode="max_size_cycle",
    worlds=(1, 1),
    epoch=0,
    window=1,
)
def test_several_loaders_go_on_from_the_end_of_an_epoch(world, tmp_path_factory, read, mode, worlds, epoch, window):
    """Of two loaders, cycled, exhausted or cut off, each has the samples that the uninterrupted run goes on with."""
    pools = [world(size) for size in worlds]
    options = {"mode": mode, "accumulate_grad_batches": window}
    assert_resumes(pools, tmp_path_factory.mktemp("run"), Act("save", "end", epoch), read, [{}, {}], **options)


@pytest.mark.parametrize(("kind", "epoch"), [("persistent workers", 1), ("augmented stream, workers", 0)])
def test_workers_that_fetch_ahead_change_nothing(world, tmp_path, kind, epoch):
    """With worker processes, the rest and the next epochs are those of the first run."""
    strategy = {"num_replicas": 3} if "augmented" in kind else {}
    pools = [world(2), world(1)]
    assert_resumes(pools, tmp_path, Act("save", "batch", epoch, 2), [Order(kind, 24)], [strategy] * 2)


TRANSFERS = ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]


@pytest.mark.parametrize(("transfer", "kind"), grid(TRANSFERS, ["shuffle", "unsized"], strength=1))
def test_hooks_that_move_batches_may_draw(world, tmp_path, transfer, kind):
    """Saved within a window, which is repeated; what a replica draws when it is moved names no rank."""
    options = {"accumulate_grad_batches": 2, "drawing_hook": transfer}
    pools = [world(2), world(1), world(2)]
    replicas = {"num_replicas": 2}
    assert_resumes(pools, tmp_path, Act("save", "batch", 0, 2), [Order(kind)], [replicas] * 3, **options)


@pytest.mark.parametrize(("transfer", "window"), grid(TRANSFERS, [1, 2], strength=1))
def test_a_batch_that_could_not_be_moved_is_repeated(world, tmp_path, transfer, window):
    """A checkpoint that the error in its hook writes counts the batches before it."""
    options: dict[str, Any] = {"limit_val_batches": 0, "accumulate_grad_batches": window, "drawing_hook": transfer}
    (expected,) = world(1).run(fit, SHUFFLED, {}, (), str(tmp_path / "whole"), **options)
    options["model_checkpoint"] = {}
    error = Act("error", "transfer", 0, 2)
    world(2).run(fit, SHUFFLED, {}, [error], str(tmp_path / "first"), **options)
    checkpoint, step = newest(tmp_path / "first")
    ranks = world(1).run(fit, SHUFFLED, {}, (), str(tmp_path / "rest"), checkpoint, **options)
    assert step == 2 // window
    assert join_ranks([expected])[step:] == join_ranks(ranks)


def cube_root(scale: float) -> float:
    return scale ** (1 / 3)


def square(scale: float) -> float:
    return scale**2


def train_recipe(strategy: dict[str, Any], folder: str, resume: str | None, window: Any) -> Any:
    """Body: train one epoch of 2 steps, or go on with a second one; return steps, and what is said of the recipe."""
    said: list[str] = []
    callbacks = [GradientAccumulationScheduler(window)] if isinstance(window, dict) else []
    trainer = make_trainer(
        GradAvgStrategy(**strategy),
        max_epochs=1 if resume is None else 2,
        accumulate_grad_batches=1 if isinstance(window, dict) else window,
        callbacks=callbacks,
        use_distributed_sampler=False,
    )
    with mock.patch.object(rates_part, "rank_zero_info", said.append), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with mock.patch.object(rates_part, "rank_zero_warn", said.append):
            trainer.fit(Toy(), DataLoader(torch.ones(4, dtype=torch.float64), batch_size=1), ckpt_path=resume)
    if resume is None:
        trainer.save_checkpoint(f"{folder}/recipe.ckpt")
    return trainer.global_step, "\n".join(said)


LINEAR = {"lr_scaling": "linear", "base_batch_size": 2}
GROWING = {0: 2, 1: 4}  # accumulated batches by epoch


class Recipes(NamedTuple):
    """A row of RECIPES."""

    # Options of the strategy, and the accumulation, of the first run.
    before: dict[str, Any]
    window: Any
    # Those of the resumed one.
    after: dict[str, Any]
    window_after: Any
    # Steps of both runs; None where the resumed one is refused.
    steps: int | None
    # What the resumed run says or raises.
    said: str = ""


RECIPES: dict[str, Recipes] = {
    "the same": Recipes(LINEAR, 2, LINEAR, 2, 4),
    "another window": Recipes(LINEAR, 2, LINEAR, 1, 6),
    "a window that grows": Recipes(LINEAR, GROWING, LINEAR, GROWING, 3),
    "a window that grows, without a base batch": Recipes(
        {"lr_scaling": "linear"}, GROWING, {"lr_scaling": "linear"}, GROWING, 3
    ),
    "another scaling": Recipes(
        LINEAR, 2, {**LINEAR, "lr_scaling": "sqrt"}, 2, None, "lr_scaling: 'linear' in the checkpoint, now 'sqrt'"
    ),
    "another base": Recipes(
        LINEAR,
        2,
        {**LINEAR, "base_batch_size": 4},
        2,
        None,
        "base: 'base_batch_size=2' in the checkpoint, now 'base_batch_size=4'",
    ),
    "another rule": Recipes(
        LINEAR, 2, {**LINEAR, "reduction": "sum"}, 2, None, "reduction: 'mean' in the checkpoint, now 'sum'"
    ),
    "another rule that is meant": Recipes(
        LINEAR,
        2,
        {**LINEAR, "reduction": "weighted_mean", "allow_recipe_change": True},
        2,
        4,
        "reduction: 'mean' in the checkpoint, now 'weighted_mean'",
    ),
    "the plain strategy drops a scale": Recipes(
        LINEAR, 2, {}, 2, 4, "lr_scaling: 'linear' in the checkpoint, now 'none'"
    ),
    "the plain strategy drops a rule": Recipes(
        {"reduction": "sum"}, 2, {}, 2, 4, "reduction: 'sum' in the checkpoint, now 'mean'"
    ),
    "a scale is added": Recipes({}, 2, LINEAR, 2, None, "lr_scaling: 'none' in the checkpoint, now 'linear'"),
    "a function of the same name": Recipes({"lr_scaling": cube_root}, 2, {"lr_scaling": cube_root}, 2, 4),
    "a function of another name": Recipes(
        {"lr_scaling": cube_root},
        2,
        {"lr_scaling": square},
        2,
        None,
        "lr_scaling: 'cube_root' in the checkpoint, now 'square'",
    ),
    "functions without a name": Recipes(
        {"lr_scaling": partial(cube_root)},
        2,
        {"lr_scaling": partial(square)},
        2,
        4,
        "lr_scaling is a function without a name, so it is not compared with the checkpoint's",
    ),
    "a function without a name for a scaling": Recipes(
        LINEAR,
        2,
        {**LINEAR, "lr_scaling": partial(square)},
        2,
        None,
        "lr_scaling: 'linear' in the checkpoint, now 'a function without a name'",
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_rule_base_and_replicas(world, tmp_path, name):
    """A resume under another one is refused or says what differs, on all ranks; the batch of the moment may change."""
    row = RECIPES[name]
    checkpoint = f"{tmp_path}/recipe.ckpt"
    assert [(2, "")] * 2 == world(2).run(train_recipe, row.before, str(tmp_path), None, row.window)
    again = train_recipe, row.after, str(tmp_path), checkpoint, row.window_after
    if row.steps is None:
        for error in world(2).run_expecting_errors(*again):
            assert "ValueError" == error.type_name
            assert row.said in error.message
            assert "pass allow_recipe_change=True" in error.message
        return
    for steps, said in world(2).run(*again):
        assert row.steps == steps
        assert row.said in said
        assert bool(row.said) == bool(said)


def test_a_checkpoint_written_after_training_counts_as_one_within_it(world, tmp_path):
    """5 loader batches are 5, in parts of a sample and whole; resumed for another epoch, they are 5 of 10."""
    acts = [Act("save", "after")]
    first = world(2).run(fit, SHUFFLED, {"max_device_batch_size": 1}, acts, str(tmp_path), max_epochs=1)
    assert [BATCHES] * 2 == [noted.batches for noted in first]
    resumed = world(2).run(fit, SHUFFLED, {}, (), "", f"{tmp_path}/step={BATCHES}.ckpt", max_epochs=2)
    assert [2 * BATCHES] * 2 == [noted.batches for noted in resumed]


def test_what_was_taken_is_not_loaded_again(world, tmp_path):
    """Of a map-style dataset only indices are passed over; each rank loads its chunks of what remains."""
    loaders = [Order("logged", 24)]
    world(2).run(fit, loaders, {}, [Act("save", "batch", 0, 3)], str(tmp_path), max_epochs=1)
    ranks = world(2).run(fit, loaders, {}, (), "", f"{tmp_path}/step=4.ckpt", max_epochs=1)
    compared = [16] * 5  # all ranks load this sample five times first, and compare it
    assert [[[*compared, 16, 17, 20, 21]], [[*compared, 18, 19, 22, 23]]] == [noted.loaded for noted in ranks]


MISSING = "saved after 3 batches of its epoch.*first 3 batches of the train loader are missing, it ends after 2"


class Unresumable(NamedTuple):
    """A checkpoint within an epoch that other loaders cannot resume."""

    # The loaders before the checkpoint, and after.
    before: list[Order]
    after: list[Order]
    # What the errors of all ranks match.
    message: str


UNRESUMABLE = {
    "order": Unresumable(
        [Order("shuffle", 24)],
        [Order("sequential", 24)],
        "saved after 3 batches.*batches of the train loader are not those of the checkpoint.*`generator=`",
    ),
    "sequential": Unresumable([Order("sequential", 24)], [Order("sequential", 8)], MISSING),
    "list": Unresumable([Order("list", 24)], [Order("list", 8)], MISSING),
    "several": Unresumable(
        [Order("list", 16), Order("list", 80)],
        [Order("list", 16), Order("list", 80)],
        "within an epoch, after 3 batches of one of 2 train loaders",
    ),
}


@pytest.mark.parametrize("name", UNRESUMABLE)
def test_what_cannot_go_on_is_an_error_on_all_ranks(world, tmp_path, name):
    """It is found out before a batch is trained on, with advice; what ends too early is no finished epoch."""
    row = UNRESUMABLE[name]
    world(2).run(fit, row.before, {}, [Act("save", "batch", 1, 2)], str(tmp_path))
    (path,) = tmp_path.glob("*.ckpt")
    for raised in world(2).run_expecting_errors(fit, row.after, {}, (), "", str(path), limit_train_batches=6):
        assert raised.type_name in ("RuntimeError", "ValueError")
        assert re.search(row.message, raised.message)


CONTENT = torch.arange(1000.0)
WRITERS = {Path(module.__file__ or "").name for module in (local, transaction, shutil, tempfile)}


def save_and_be_killed(path: Path, call: int) -> None:
    """Save step 2 in this process, and kill it before this call of a C function of those that write files."""
    calls = count()

    def before(frame: FrameType, event: str, argument: Any) -> None:
        if event != "c_call" or Path(frame.f_code.co_filename).name not in WRITERS:
            return
        if next(calls) == call:
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
    assert 1 == found[0]
    assert 2 == found[-1]
    assert len(found) > 10
    assert torn == (None in found)


LINKED = {"every_n_train_steps": 2, "save_top_k": -1, "save_last": "link"}


@pytest.mark.parametrize(
    ("act", "rank", "named", "keep", "kept"),
    [
        (fail, 0, "ValueError", {}, []),
        (interrupt, 1, "KeyboardInterrupt", {}, []),
        # Rank 0 would have replaced the link by one to a file that is not there.
        (fail, 0, "ValueError", LINKED, ["last.ckpt", "step=2.ckpt"]),
        (fail, 1, "ValueError", LINKED, ["last.ckpt", "step=2.ckpt"]),
        # And it would have removed the last checkpoint, whose name is that of the step.
        (fail, 0, "ValueError", {**LINKED, "save_top_k": 1, "save_last": None}, ["step=2.ckpt"]),
    ],
)
def test_a_rank_that_ends_alone_saves_nothing(tmp_path, act, rank, named, keep, kept):
    """It would wait for the others until the timeout, which name it. The checkpoints of before stay."""
    options = {"model_checkpoint": {"filename": "{step}", "save_on_exception": True, **keep}, "toy": {"after": 3}}
    ends = run_ranks(train_quickly, timeout=300, act=act, rank=rank, folder=str(tmp_path), **options)
    assert [1, 1] == [end.exit_code for end in ends]
    assert kept == sorted(path.name for path in tmp_path.iterdir())
    for path in tmp_path.iterdir():
        assert 2 == torch.load(path, weights_only=True)["global_step"]
    assert f"rank {rank} failed with {named}" in ends[1 - rank].said
    assert "failed with" not in ends[rank].said


class StatefulStream:
    """A loader without samplers that keeps its place: Lightning fetches a batch ahead, as it has no length."""

    dataset = Stream([])

    def __init__(self, batches: Sequence[float]) -> None:
        self.batches = batches
        self.place = {"batches": 0}

    def __iter__(self) -> Iterator[Tensor]:
        while self.place["batches"] < len(self.batches):
            self.place["batches"] += 1
            yield torch.tensor([self.batches[self.place["batches"] - 1]], dtype=torch.float64)
        self.place["batches"] = 0

    def state_dict(self) -> dict[str, int]:
        return self.place

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = dict(state)


class SizedStream(StatefulStream):
    """The same with a length, as litData's `StreamingDataLoader` has."""

    def __len__(self) -> int:
        return len(self.batches)


def train_streams(
    streams: Sequence[Sequence[float]], folder: str, *, kind: Any, resumes: bool
) -> tuple[list[float], list[float]]:
    """Body: train on a stream, save after the second step; return what the rank trained on, and the weights."""
    batches = streams[dist.get_rank()]
    stream: Any = DataLoader(
        Stream([torch.tensor([number], dtype=torch.float64) for number in batches]), batch_size=None
    )
    if kind is not None:
        stream = kind(batches)
    module = Toy(loss="sum")
    seen: list[float] = []
    weights: list[float] = []

    class Note(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Tensor, *_: Any) -> None:
            seen.append(float(batch))

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            weights.append(module.w.item())
            if trainer.global_step == 2 and not resumes:
                trainer.save_checkpoint(f"{folder}/two.ckpt")

    trainer = make_trainer(
        GradAvgStrategy(reduction="normalized_sum"), max_epochs=1, use_distributed_sampler=False, callbacks=[Note()]
    )
    trainer.fit(module, stream, ckpt_path=f"{folder}/two.ckpt" if resumes else None)
    return seen, weights


@pytest.mark.parametrize("kind", [StatefulStream, SizedStream])
@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
def test_a_stream_with_a_state_resumes_at_the_next_batch(world, tmp_path, kind):
    """Lightning may have fetched the third batch when the second is saved; the loader's own state leaves it out."""
    streams = [[1.0, 2.0, 3.0, 4.0, 5.0], [11.0, 12.0, 13.0, 14.0, 15.0]]
    options = {"streams": streams, "folder": str(tmp_path), "kind": kind}
    whole = world(2).run(train_streams, resumes=False, **options)
    resumed = world(2).run(train_streams, resumes=True, **options)
    assert streams == [seen for seen, _ in whole]
    # A checkpoint holds the state of rank 0's loader, which is that of all: each has read two batches.
    assert [stream[2:] for stream in streams] == [seen for seen, _ in resumed]
    assert [weights[2:] for _, weights in whole] == [weights for _, weights in resumed]


def test_a_stream_that_has_ended_does_not_begin_anew(world, tmp_path):
    """Rank 0, whose loader's state is saved, has no second batch. All resume after its first one, and it stands in.

    1 - 0.01 * (1 + 11) / 2 - 0.01 * 12 = 0.82 is saved, and rank 1's samples alone count from there.
    """
    options = {"streams": [[1.0], [11.0, 12.0, 13.0, 14.0]], "folder": str(tmp_path), "kind": StatefulStream}
    world(2).run(train_streams, resumes=False, **options)
    of_rank_0, of_rank_1 = world(2).run(train_streams, resumes=True, **options)
    assert [12.0, 13.0, 14.0] == of_rank_1[0]
    for _, weights in (of_rank_0, of_rank_1):
        assert approx([0.70, 0.57, 0.43]) == weights


def test_lightning_sees_the_state_of_a_joined_loader():
    """From Python 3.12 on, `isinstance` of a protocol looks up attributes statically, as `getattr_static` does."""
    for name in ("state_dict", "load_state_dict"):
        assert getattr_static(StatefulJoinedLoader, name, None) is not None
        assert getattr_static(JoinedLoader, name, None) is None


def test_a_resumed_stream_counts_no_stand_in(world, tmp_path):
    """A stream without a state begins anew after a resume; rank 1's second batch is its last, and then it stands in."""
    options = {"streams": [[1.0] * 4, [5.0, 5.0]], "folder": str(tmp_path), "kind": None}
    world(2).run(train_streams, resumes=False, **options)
    for seen, weights in world(2).run(train_streams, resumes=True, **options):
        assert len(seen) == 4
        steps = [before - after for before, after in itertools.pairwise(weights)]
        # At a rate of 0.01: (1 + 5) / 2 of both ranks' samples, and then 1 of rank 0's alone.
        assert approx([0.03, 0.01, 0.01]) == steps
