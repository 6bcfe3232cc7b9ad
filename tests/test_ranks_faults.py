"""Every row of FAULTS: no wait without end, no difference in silence; and ranks that drift apart, or are signalled."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import FAULTS
from faulty_runs import run_ranks, train_sharded
from lightning.pytorch import Callback, Trainer
from ranks import NEEDS_SHARDS_ON_CPU, covering, make_trainer, on_ranks
from torch import Tensor
from toys import Toy, make_loader

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg._support.collectives import World
from lightning_gradavg.faults import failure_reports
from lightning_gradavg.faults.drift import drifted

ONE_EPOCH: dict[str, Any] = {"max_epochs": 1, "use_distributed_sampler": False}


class Drifts(Toy):
    """Changes something on rank 1 after a batch."""

    mean: Tensor

    def __init__(self, what: str, batch: int) -> None:
        super().__init__(start=[1.0, 2.0])
        self.register_buffer("mean", torch.zeros(3))
        self.what, self.batch = what, batch

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        if dist.get_rank() == 1 and self.trainer.global_step == self.batch:
            getattr(self, self.what).data[1] += 1e-3


def train_drifting(what: str, batch: int, every: int | None = 1, **strategy: Any) -> int:
    options: dict[str, Any] = {"max_epochs": 2, "use_distributed_sampler": False}
    trainer = make_trainer(GradAvgStrategy(check_replicas_every_n_steps=every, **strategy), **options)
    trainer.fit(Drifts(what, batch), make_loader([[1.0, 2.0]] * 4))
    return trainer.global_step


@pytest.mark.parametrize(("every", "batch", "found"), [(1, 2, 2), (3, 2, 3), (1000, 2, 4), (1000, 6, 8), (1, 8, 8)])
def test_a_changed_weight(world, every, batch, found):
    """Case 52: 1e-3 on one weight of rank 1 is found at the next comparison: by steps, or at the end of the epoch."""
    for raised in world(2).run_expecting_errors(train_drifting, "w", batch, every):
        assert raised.type_name == "RuntimeError"
        assert raised.message.startswith(f"the ranks drifted apart: after {found} optimizer steps parameter 'w' is not")


@pytest.mark.parametrize(
    ("size", "what", "options", "found"),
    [
        (2, "w", {"every": None}, None),
        # Buffers may differ where DDP broadcasts them before the next forward.
        (2, "mean", {}, None),
        (
            2,
            "mean",
            {"equivalent_to": "data_parallel"},
            "buffer 'mean' is not the same on all of them: another one is on rank 1. Each rank computed it",
        ),
        (3, "w", {}, "another one is on rank 1."),
    ],
)
def test_what_is_compared(world, size, what, options, found):
    for ended in world(size).run_expecting_errors(train_drifting, what, 2, **options):
        assert ended == 8 if found is None else found in ended.message


class Suspicious(Toy):
    """Two weights; on rank 1, something happens to the first one that other ranks do not see."""

    def __init__(self, how: str) -> None:
        super().__init__(start=[1.0, 2.0])
        self.how, self.automatic_optimization = how, how != "loss.backward()"
        self.v = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        if how == "frozen":
            self.w.requires_grad_(False)

    def losses(self, batch: Tensor) -> Tensor:
        return super().losses(batch) + (0.0 if self.how == "unused" else self.v * batch.sum())

    def on_train_start(self) -> None:
        if self.how == "new":
            self.late = torch.nn.Parameter(torch.tensor(float(dist.get_rank())))
        if self.how == "set" and dist.get_rank() == 1:
            self.w.data += 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        loss.backward()
        self.optimizers().step()
        self.optimizers().zero_grad()
        return None

    def on_train_batch_end(self, *args: Any) -> None:
        if self.how in ("assigned", "frozen", "unused") and dist.get_rank() == 1:
            self.w.data += 1.0
        if self.how == "rates" and dist.get_rank() == 1:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.05


def train_suspiciously(how: str) -> None:
    trainer = make_trainer(GradAvgStrategy(check_replicas_every_n_steps=1), max_epochs=1, use_distributed_sampler=False)
    trainer.fit(Suspicious(how), make_loader([[1.0 + dist.get_rank()]] * 2))


CAUSES = {
    "loss.backward()": "In manual optimization, call self.manual_backward(loss) instead of loss.backward(). End every",
    "unused": "There is no gradient of parameter 'v'. If a backward leaves out parameters, as in a GAN, pass",
    "assigned": "Step, and assign to parameters, on all ranks or on none.",
    "rates": "The ranks have other learning rates, in rank order 0.01; 0.05. Let all ranks set the same",
    "frozen": "It does not require a gradient, so no backward changes it",
    "set": "The run has not trained yet: a hook set it",
    "new": "DDP does not know it: the module got it after the strategy's setup",
}


@pytest.mark.parametrize("how", CAUSES)
def test_the_error_begins_with_what_the_run_shows(world, how):
    """What the run rules out is not in the error."""
    for raised in world(2).run_expecting_errors(train_suspiciously, how):
        found = re.search(r"another one is on rank 1\. (.*)", raised.message)
        assert found is not None, raised.message
        assert found[1].startswith(CAUSES[how])
        others = [text for cause, text in CAUSES.items() if cause not in (how, "assigned")]
        assert not any(text in found[1] for text in others)


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)


@on_ranks(3)
def test_one_bit_is_found():
    """Case 52: one bit of one element of a parameter of any dtype is found on all ranks, and equal ones are not."""
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(4, 3, dtype=dtype).T) for dtype in DTYPES])
    assert drifted(module.named_parameters()) is None
    for index, parameter in enumerate(module):
        element = torch.view_as_real(parameter.data) if parameter.is_complex() else parameter.data
        bits = element.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[element.element_size()])
        bits[1, -1] ^= int(dist.get_rank() == 2)
        assert (str(index), [2]) == drifted(module.named_parameters())
        bits[1, -1] ^= int(dist.get_rank() == 2)


GLOO = re.compile(r"gloo/transport\S*\.cc:\d+\]")
LOGGED = re.compile(r"^GradAvgStrategy: (?:rank \d failed with|nothing was heard)", re.MULTILINE)


def make_parameters_of_faults() -> list[Any]:
    """Return a parameter of pytest for every row of FAULTS."""
    parameters = []
    for name, fault in FAULTS.items():
        marks = []
        if fault.is_full:
            marks.append(pytest.mark.full)
        if fault.body is train_sharded:
            marks.append(NEEDS_SHARDS_ON_CPU)
        parameters.append(pytest.param(name, marks=marks))
    return parameters


@pytest.mark.parametrize("name", make_parameters_of_faults())
def test_every_rank_ends_and_names_what_happened(name, tmp_path):
    """So does the line that one rank logs before any traceback."""
    fault = FAULTS[name]
    # The rank that is stopped, and never ends.
    stuck = fault.exit_codes.index(None) if None in fault.exit_codes else None
    ends = run_ranks(fault.body, timeout=fault.timeout, stuck=stuck, folder=str(tmp_path), **fault.options)
    assert fault.exit_codes == tuple(end.exit_code for end in ends), ends
    for error, end in zip(fault.errors, ends, strict=True):
        if error:
            assert error in end.said, ends
            # The cause is the last line, where a user looks first.
            last = end.said.splitlines()[-1]
            assert "my own peer" in last or not GLOO.search(last), ends
        else:
            assert not end.said, ends
    # What each rank that logged the line had printed before it.
    printed_before = [LOGGED.split(end.printed)[0] for end in ends if LOGGED.search(end.printed)]
    assert fault.is_logged == len(printed_before), ends
    for text in printed_before:
        assert "Traceback" not in text, ends
        assert "gloo/transport" not in text, ends


@on_ranks(3)
def test_uneven_nodes_of_torchrun():
    """1 and 2 processes, each told the number of its own node's devices, are two nodes and three ranks."""
    rank, node_of = dist.get_rank(), [0, 1, 1]
    devices, nodes, place = node_of.count(node_of[rank]), len({*node_of}), node_of[:rank].count(node_of[rank])
    told = {"RANK": rank, "WORLD_SIZE": 3, "GROUP_RANK": node_of[rank], "GROUP_WORLD_SIZE": nodes}
    told |= {"LOCAL_RANK": place, "LOCAL_WORLD_SIZE": devices, "TORCHELASTIC_RUN_ID": 1}
    os.environ.update({name: str(value) for name, value in told.items()})
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    strategy = GradAvgStrategy()
    trainer = Trainer(strategy=strategy, devices=devices, num_nodes=nodes, accelerator="cpu", max_epochs=1, **quiet)
    trainer.fit(Toy(), make_loader([[1.0]]))
    assert [rank, 3, node_of[rank]] == [trainer.global_rank, trainer.world_size, trainer.node_rank]
    assert node_of == [place.node for place in strategy._run.places]


def test_the_rank_that_holds_the_store_leaves_last(monkeypatch):
    """Of three ranks two hear of the third's end; rank 0, however much earlier it has heard, waits for the other."""
    store = dist.HashStore()
    monkeypatch.setattr(failure_reports, "store_of_world", lambda: store)
    monkeypatch.setattr(failure_reports, "_WAIT_SECONDS", 0.1)
    first, second, _ = (failure_reports.FailureReports(World(None, rank, 3), 0) for rank in range(3))
    for rank in (first, second):
        rank.report(dist.DistError("connection closed by peer"), 0)
    with ThreadPoolExecutor() as pool:
        heard = pool.submit(first.read)
        assert {heard} == wait([heard], timeout=0.5).not_done
        assert "nothing was heard from rank 2: lost, killed or stuck" == second.read() == heard.result(1)


def test_a_report_is_one_line(monkeypatch):
    """It is the last line of the other ranks, by which a user finds the cause: the first line of an error is not it."""
    store = dist.HashStore()
    monkeypatch.setattr(failure_reports, "store_of_world", lambda: store)
    first, second = (failure_reports.FailureReports(World(None, rank, 2), 0) for rank in range(2))
    first.report(ValueError("size mismatch:\n\tcopying 3 into 2"), 7)
    second.report(dist.DistError("connection closed by peer"), 7)
    assert "rank 0 failed with ValueError: size mismatch: copying 3 into 2" == second.read()


class CallsAlone(Callback):
    """Calls a method of the strategy on rank 0 alone, in a hook, and counts its calls."""

    def __init__(self, hook: str, call: Callable[[Any, str], Any], folder: str) -> None:
        self.calls = 0

        def reach(trainer: Trainer, *_: Any) -> None:
            if trainer.global_rank == 0:
                self.calls += 1
                with torch.no_grad():
                    call(trainer.strategy, folder)

        setattr(self, hook, reach)


def save_and_load(strategy: Any, folder: str) -> None:
    checkpoint = strategy.lightning_module.trainer._checkpoint_connector.dump_checkpoint()
    assert {} == checkpoint["callbacks"]
    strategy.save_checkpoint(checkpoint, f"{folder}/alone.ckpt")
    strategy.load_checkpoint(f"{folder}/alone.ckpt")


def hold_back(strategy: Any, folder: str) -> None:
    with strategy.block_backward_sync():
        pass


BATCH = torch.tensor([7.0], dtype=torch.float64)
CALLS: dict[str, Callable[[Any, str], Any]] = {
    "batch_to_device": lambda strategy, _: strategy.batch_to_device(BATCH),
    "batch_to_device(None)": lambda strategy, _: strategy.batch_to_device(None),
    "process_dataloader": lambda strategy, _: strategy.process_dataloader(make_loader([[7.0]] * 3)),
    "training_step": lambda strategy, _: strategy.training_step(BATCH, 0),
    "validation_step": lambda strategy, _: strategy.validation_step(BATCH, 0),
    "optimizer_state": lambda strategy, _: strategy.optimizer_state(strategy.optimizers[0]),
    "model_to_device": lambda strategy, _: strategy.model_to_device(),
    "facts": lambda strategy, _: (strategy.facts(), strategy.num_replicas, strategy.global_batch_size, repr(strategy)),
    "save_checkpoint, load_checkpoint": save_and_load,
    "block_backward_sync": hold_back,
}
# Not "on_train_start": until the first batch arrives, every loader that is processed is one of the run's.
HOOKS = ["on_train_batch_start", "on_train_batch_end", "on_train_epoch_end", "on_validation_end"]
ALONE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mean": ({}, {}),
    "weighted_mean, scaled, in windows": (
        {"reduction": "weighted_mean", "lr_scaling": "linear"},
        {"accumulate_grad_batches": 2},
    ),
    "data_parallel": ({"equivalent_to": "data_parallel"}, {"reload_dataloaders_every_n_epochs": 1}),
}
# Calls that were taken for Lightning's: of a loader of the run before its first batch, and of a run that is resumed,
# whose loaders are replaced in each epoch.
IN_EVERY_RUN = [
    ("data_parallel", "process_dataloader", "on_train_batch_start"),
    ("data_parallel", "save_checkpoint, load_checkpoint", "on_train_batch_start"),
]


def make_parameters_of_calls() -> list[Any]:
    """Return all combinations of `ALONE`, `CALLS` and `HOOKS`; those not full hold each value, and `IN_EVERY_RUN`."""
    factors = ([*ALONE], [*CALLS], HOOKS)
    in_every_run = [*covering(*factors, strength=1), *IN_EVERY_RUN]
    parameters = []
    for combination in product(*factors):
        marks = []
        if combination not in in_every_run:
            marks.append(pytest.mark.full)
        parameters.append(pytest.param(*combination, marks=marks))
    return parameters


class Evaluated(Toy):
    """Seven samples in batches of 4, or of 2 on rank 1."""

    def __init__(self, uneven: bool) -> None:
        super().__init__()
        self.uneven = uneven

    def train_dataloader(self) -> Any:
        samples: Any = torch.arange(7, dtype=torch.float64)
        return torch.utils.data.DataLoader(samples, batch_size=2 if self.uneven and dist.get_rank() else 4)

    val_dataloader = train_dataloader

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Compute nothing."""


def train_calling_alone(
    strategy: dict[str, Any], options: dict[str, Any], hook: str = "", call: str = "", folder: str = ""
) -> Any:
    """Body: return the weights after two fits, and in how many hooks the method was called."""
    callbacks = [CallsAlone(hook, CALLS[call], folder)] if call else []
    chosen = GradAvgStrategy(check_replicas_every_n_steps=1, **strategy)
    trainer: Any = make_trainer(chosen, **{**ONE_EPOCH, "max_epochs": 2, "callbacks": callbacks, **options})
    for epochs in (2, 3):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module := Evaluated(uneven=not chosen._options.split_batches))
        assert trainer.callbacks == callbacks
    return module.w.item(), len(module.seen.weights), sum(each.calls for each in callbacks)


@pytest.fixture(scope="module")
def undisturbed(world):
    """Return a function of a row of `ALONE`: what rank 0 finds where no rank calls a method."""
    return functools.cache(lambda how: world(2).run(train_calling_alone, *ALONE[how])[0])


@pytest.mark.parametrize(("how", "call", "hook"), make_parameters_of_calls())
def test_a_method_that_one_rank_calls_is_no_event(world, tmp_path, undisturbed, how, call, hook):
    """The run goes on as if the method had not been called: a public method tells the strategy nothing of training."""
    expected = undisturbed(how)
    called = world(2).run(train_calling_alone, *ALONE[how], hook, call, str(tmp_path))
    assert [expected[:2]] * 2 == [found[:2] for found in called]
    assert called[0][2] > 0
