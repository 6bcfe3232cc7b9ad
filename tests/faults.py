"""FAULTS: what goes wrong in a run of two ranks, and when; what the error of each rank contains, and how it ends.

To add a row, append a `Fault` to the group that it belongs to, under a text that says what happens: it is the row's id
in pytest. Write down what each rank must say: the rank that fails its own error, the other one which rank ended and
why. Texts and exit codes are what a user needs, not what a run printed. `test_ranks_faults.py` starts two ranks, runs
`body(**options)` in an empty folder until both have ended, and compares the error and the exit code of each. It also
checks that a rank logs one line about the fault before any traceback. Models, acts and bodies are in `faulty_runs.py`.
A row that takes long, or is like others, is `is_full`: it runs before a release only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from faulty_runs import (
    Begins,
    Exchanging,
    Grows,
    Headed,
    Logged,
    Other,
    add_parameter,
    be_late,
    exchange_other_shapes,
    fail,
    fail_like_gloo,
    fail_unreadably,
    fill_disk,
    interrupt,
    kill,
    return_none,
    stop,
    terminate,
    train,
    train_again,
    train_differently,
    train_quickly,
    train_sharded,
)
from lightning.pytorch.callbacks import EarlyStopping
from ranks import ON_EXCEPTION, RankEnvironment, covering

__all__ = ["FAULTS", "Fault"]


@dataclass(frozen=True)
class Fault:
    """A row of FAULTS."""

    # What the error of each rank contains: (of rank 0, of rank 1). "" if a rank ends without an error.
    errors: tuple[str, str]
    # Keyword arguments of the body. `train` takes the method that fails, what it does, and on which rank.
    options: Mapping[str, Any] = field(default_factory=dict)
    # Runs on both ranks, with `options` and an empty `folder`.
    body: Callable[..., Any] = train
    # The exit code of each rank. None: the process is stopped, and never ends.
    exit_codes: tuple[int | None, int | None] = (1, 1)
    # Whether a rank logs a line about the fault before any traceback. What all ranks agree on is nobody's fault.
    is_logged: bool = True
    # Seconds that a collective waits for the other rank. A run that must not wait has many.
    timeout: float = 5
    # Whether it takes too long for every run of the tests.
    is_full: bool = False


def on_both(error: str) -> tuple[str, str]:
    """Return the errors of two ranks that say the same."""
    return error, error


OWN_ERROR = "ValueError: the user's own error"
LOST = "nothing was heard from rank {rank}: lost, killed or stuck"


def errors_if_one_fails(rank: int) -> tuple[str, str]:
    """Return the errors if the user's code raises on one rank: its own, and what the other rank says about it."""
    error_of_other = f"rank {rank} failed with {OWN_ERROR}"
    if rank == 0:
        return OWN_ERROR, error_of_other
    return error_of_other, OWN_ERROR


# 1. One rank raises, is killed or is stopped, in each of five methods.


class End(NamedTuple):
    """How one rank ends."""

    # What the method does.
    act: Callable[[Any], Any]
    # What the error of the rank contains, and its exit code.
    error: str
    exit_code: int | None
    # What the error of the other rank contains, with the rank that ended as {rank}.
    error_of_other: str


ENDS = {
    "exception": End(fail, OWN_ERROR, 1, f"rank {{rank}} failed with {OWN_ERROR}"),
    "kill -9": End(kill, "", -9, LOST),
    "SIGSTOP": End(stop, "", None, LOST),
}
METHODS = ["configure_optimizers", "training_step", "validation_step", "on_train_epoch_end", "on_save_checkpoint"]


def make_faults_of_one_rank() -> dict[str, Fault]:
    """Return a row for each end, method and rank; in every run of the tests, each value once."""
    factors = (list(ENDS), METHODS, (0, 1))
    in_every_run = covering(*factors, strength=1)
    faults = {}
    for name, method, rank in product(*factors):
        end = ENDS[name]
        error_of_other = end.error_of_other.format(rank=rank)
        errors = (end.error, error_of_other)
        exit_codes: tuple[int | None, int | None] = (end.exit_code, 1)
        if rank == 1:
            errors = (error_of_other, end.error)
            exit_codes = (1, end.exit_code)
        faults[f"{name} in {method} on rank {rank}"] = Fault(
            errors,
            {"method": method, "act": end.act, "rank": rank},
            exit_codes=exit_codes,
            is_full=(name, method, rank) not in in_every_run,
        )
    return faults


ONE_RANK_ENDS = {
    **make_faults_of_one_rank(),
    "exception in one of several pieces of a step": Fault(
        errors_if_one_fails(rank=1),
        {"act": fail, "strategy": {"equivalent_to": "data_parallel", "num_replicas": 4}},
    ),
    "an exception with the text of gloo's": Fault(
        (
            "rank 1 failed with RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection",
            "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by my own peer",
        ),
        {"act": fail_like_gloo},
    ),
    "an exception whose text cannot be read": Fault(
        ("rank 1 failed with UnreadableError: <no text: its __str__ raised KeyError>", "UnreadableError"),
        {"act": fail_unreadably},
    ),
    "the disk is full while a checkpoint is written": Fault(
        ("No space left on device", "rank 0 failed with OSError: [Errno 28] No space left on device"),
        {"method": "on_save_checkpoint", "act": fill_disk, "rank": 0},
    ),
}


# 2. One rank raises, and then callbacks run collectives: ModelCheckpoint exchanges decisions, `Exchanging` runs all.
#    The strategy answers locally. With a timeout of 40 seconds, a rank that waited for another one would show.


def make_checkpoint_fault(
    model_checkpoint: dict[str, Any], method: str, rank: int, *, is_full: bool = True, **toy: Any
) -> Fault:
    """Return a row of a rank that raises under these options of ModelCheckpoint."""
    options = {
        "act": fail,
        "method": method,
        "rank": rank,
        "model": Logged,
        "toy": toy,
        "model_checkpoint": {**ON_EXCEPTION, **model_checkpoint},
        "callbacks": [EarlyStopping("monitored", patience=9, check_on_train_epoch_end=False)],
    }
    return Fault(errors_if_one_fails(rank), options, body=train_quickly, timeout=40, is_full=is_full)


def make_checkpoint_faults() -> dict[str, Fault]:
    """Return rows that hold all pairs of options of ModelCheckpoint, methods that fail, and ranks."""
    factors: list[list[dict[str, Any]]] = [
        [{"save_last": True}, {"save_last": "link"}, {"save_last": None}],
        [
            {"save_top_k": 1},
            {"save_top_k": -1},
            {"save_top_k": 0},
            {"save_top_k": 1, "monitor": "monitored"},
            {"save_top_k": 1, "monitor": "metric"},
            {"save_top_k": 2, "monitor": "monitored"},
            {"save_top_k": 2, "monitor": "metric"},
        ],
        [{}, {"every_n_train_steps": 1}, {"every_n_train_steps": 5}],
        [{}, {"save_weights_only": True}],
        [{}, {"enable_version_counter": False}],
    ]
    methods = ("training_step", "validation_step", "on_validation_epoch_end", "on_train_epoch_end")
    faults = {}
    for *parts, sync_dist, method, rank in covering(*factors, (True, False), methods, (0, 1)):
        model_checkpoint: dict[str, Any] = {}
        for part in parts:
            model_checkpoint.update(part)
        # Without the names of the options: pytest cuts long ids.
        values = ", ".join(map(str, (sync_dist, *model_checkpoint.values())))
        faults[f"checkpoints, {method} on rank {rank}, {values}"] = make_checkpoint_fault(
            model_checkpoint, method, rank, sync_dist=sync_dist
        )
    return faults


def make_exchanging_fault(method: str, rank: int, *, is_full: bool = False) -> Fault:
    """Return a row of a rank that raises under a callback that then runs every collective of the strategy."""
    options = {"act": fail, "method": method, "rank": rank, "model": Logged, "callbacks": [Exchanging()]}
    return Fault(errors_if_one_fails(rank), options, body=train_quickly, timeout=40, is_full=is_full)


COLLECTIVES_AFTER_AN_EXCEPTION = {
    **make_checkpoint_faults(),
    "exception, ModelCheckpoint(save_last=True, save_on_exception=True)": make_checkpoint_fault(
        {"save_last": True}, "training_step", 1, is_full=False
    ),
    "exception on rank 0, ModelCheckpoint(save_last='link', monitor, save_on_exception=True)": make_checkpoint_fault(
        {"save_last": "link", "monitor": "metric"}, "on_validation_epoch_end", 0, is_full=False
    ),
    "exception in training_step, and a callback that exchanges": make_exchanging_fault("training_step", 1),
    "exception in setup, and a callback that exchanges": make_exchanging_fault("setup", 1),
    "exception in training_step on rank 0, and a callback that exchanges": make_exchanging_fault(
        "training_step", 0, is_full=True
    ),
    "exception at the end of validation, and a callback that exchanges": make_exchanging_fault(
        "on_validation_epoch_end", 1, is_full=True
    ),
    "exception in a sharded run": Fault(errors_if_one_fails(rank=1), {"rank": 1}, body=train_sharded, timeout=40),
    "exception in a sharded run on rank 0, and a callback that exchanges": Fault(
        errors_if_one_fails(rank=0), {"rank": 0, "callbacks": [Exchanging()]}, body=train_sharded, timeout=40
    ),
}


# 3. Signals, and ranks that come too late.

SIGNALS = {
    # Lightning's handlers exchange on each rank where it stands: here both stand at one place. That is nobody's fault.
    "SIGTERM to both ranks in one step": Fault(
        on_both("SIGTERMException"), {"act": terminate, "rank": None}, is_logged=False
    ),
    "Ctrl-C": Fault(("rank 1 failed with KeyboardInterrupt", "SystemExit: 1"), {"act": interrupt}),
    "a rank comes after the timeout": Fault(
        (LOST.format(rank=1), "all ranks say the same"), {"act": be_late}, is_full=True
    ),
}


# 4. A step that one rank cannot take as the other does.

UNUSED_HEAD = (
    "rank 1 failed with RuntimeError: Expected to have finished reduction in the prior iteration",
    "find_unused_parameters=True",
)
STEPS = {
    "a rank begins to log where no other does": Fault(
        (
            "rank 1 failed with RuntimeError: rank 1 begins to log",
            "in which nothing is logged on rank 0, and nobody",
        ),
        {"model": Begins, "strategy": {"equivalent_to": "single_device"}},
    ),
    "None from the loader": Fault(
        ("rank 1 failed with RuntimeError: the train loader yielded None on rank 1", "on rank 1. Lightning skips"),
        {"method": "on_before_batch_transfer", "act": return_none},
    ),
    "None from the last transfer hook": Fault(
        ("rank 1 failed with RuntimeError: the train loader yielded None on rank 1", "on rank 1. Lightning skips"),
        {
            "method": "on_after_batch_transfer",
            "act": return_none,
            "strategy": {"reduction": "weighted_mean"},
            "accumulate_grad_batches": 2,
        },
    ),
    "a rank has more parameters than the other when they are compared": Fault(
        on_both("nothing on rank 0; parameter 'more' of shape (1,) on rank 1"), {"model": Grows}
    ),
    # No forward follows, with which stock DDP says so.
    "a head that the last step of one rank does not use, under the plain mean": Fault(
        UNUSED_HEAD, {"model": Headed, "limit_val_batches": 0}, timeout=40
    ),
    "the same in the only step": Fault(
        UNUSED_HEAD,
        {"model": Headed, "toy": {"unused_in": 0}, "limit_train_batches": 1, "limit_val_batches": 0},
        timeout=40,
    ),
    "the same in the first step, before an evaluation": Fault(
        UNUSED_HEAD, {"model": Headed, "toy": {"unused_in": 0}, "val_check_interval": 1}, timeout=40
    ),
    "the same under a rule": Fault(
        UNUSED_HEAD, {"model": Headed, "strategy": {"equivalent_to": "single_device"}}, timeout=40
    ),
    "the same under a rule that exchanges after the backward": Fault(
        UNUSED_HEAD, {"model": Headed, "strategy": {"equivalent_to": "data_parallel"}}, timeout=40
    ),
    "the same in a window": Fault(
        UNUSED_HEAD,
        {"model": Headed, "strategy": {"reduction": "weighted_mean"}, "accumulate_grad_batches": 5},
        timeout=40,
        is_full=True,
    ),
    # Gloo aborts the rank that receives more than it expects, in a thread of its own.
    "ranks that exchange other shapes": Fault(
        ("", LOST.format(rank=0)), {"act": exchange_other_shapes, "rank": None}, exit_codes=(-6, 1)
    ),
}


# 5. Ranks that differ when the run begins.

STARTS = {
    "another torch": Fault(
        on_both("torch 1.0 on rank 1"), {"patch": ("torch.__version__", "1.0")}, body=train_differently
    ),
    "another script": Fault(
        on_both("class faulty_runs.Injected on rank 0; a module of the class faulty_runs.Other on rank 1"),
        {"model": Other},
        body=train_differently,
        is_full=True,
    ),
    "another number of parameters": Fault(
        on_both("nothing on rank 0; the parameter more of shape (1,) and torch.float32 on rank 1"),
        {"patch": ("faulty_runs.Injected.configure_model", add_parameter)},
        body=train_differently,
        is_full=True,
    ),
    "another shape of a parameter": Fault(
        on_both("w of shape () and torch.float64 on rank 0; the parameter w of shape (1,)"),
        {"toy": {"start": [1.0]}},
        body=train_differently,
    ),
    "another max_steps": Fault(
        on_both("Trainer(max_steps=-1) on rank 0; Trainer(max_steps=3) on rank 1"),
        {"max_steps": 3},
        body=train_differently,
        is_full=True,
    ),
    "another reduction": Fault(
        on_both("(reduction='mean') on rank 0; GradAvgStrategy(reduction='sum') on rank 1"),
        {"strategy": {"reduction": "sum"}},
        body=train_differently,
    ),
    "another reference run, with an option that has no default": Fault(
        on_both("nothing on rank 0; GradAvgStrategy(equivalent_to='single_device') on rank 1"),
        {"strategy": {"equivalent_to": "single_device"}},
        body=train_differently,
    ),
    "LOCAL_RANK twice on a node": Fault(
        on_both("(node, rank on the node) is (0, 0) on ranks 0, 1"),
        {"patch": ("ranks.RankEnvironment.local_rank", RankEnvironment.node_rank)},
        body=train_differently,
    ),
    "a torn checkpoint": Fault(
        on_both("PytorchStreamReader failed reading zip archive: failed finding central directory"),
        {"is_torn": True},
        body=train_again,
    ),
    "an older checkpoint on rank 1": Fault(
        on_both("after 10 steps and 2 epochs on rank 0; training begins after 5 steps and 1 epochs on rank 1"),
        {"is_torn": False},
        body=train_again,
    ),
}


FAULTS: dict[str, Fault] = {
    **ONE_RANK_ENDS,
    **COLLECTIVES_AFTER_AN_EXCEPTION,
    **SIGNALS,
    **STEPS,
    **STARTS,
}
