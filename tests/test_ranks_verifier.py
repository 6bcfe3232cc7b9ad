"""The callback on real ranks: whatever it sees and whatever fails, the run trains the same bits as without it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from ranks import make_trainer
from torch import Tensor, nn
from verify_runs import Net, batches, dropped, gradavg, normed

from lightning_gradavg import GradAvgVerifier
from lightning_gradavg.verify import callback, record
from lightning_gradavg.verify.judge import not_shown
from lightning_gradavg.verify.report import Finding, Report

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
    "L-BFGS": lambda parameters: torch.optim.LBFGS(
        parameters, lr=0.1, max_iter=2, tolerance_grad=0, tolerance_change=0
    ),
}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "DDP": DDPStrategy,
    "static graph": lambda: DDPStrategy(static_graph=True),
    "bucket views": lambda: DDPStrategy(gradient_as_bucket_view=True),
    "static graph, bucket views": lambda: DDPStrategy(static_graph=True, gradient_as_bucket_view=True),
    "unused parameters, small buckets": lambda: DDPStrategy(find_unused_parameters=True, bucket_cap_mb=1e-4),
    "weighted mean": gradavg(reduction="weighted_mean"),
    "static sum": gradavg(reduction="sum", static_graph=True),
}


class Watched(Net):
    """Dropout, batch norm, and hooks that count how often gradients are computed."""

    def __init__(self, optimizer: str = "SGD") -> None:
        super().__init__("mean", nn.BatchNorm1d(8), nn.Dropout(0.3))
        self.optimizer, self.calls = optimizer, 0
        for parameter in self.parameters():
            parameter.register_hook(self.count)

    def count(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient * (1 + 0.001 * self.calls)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


class Copies(Callback):
    """Copies and pickles the module in training, as an average of weights does."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        copied = copy.deepcopy(pl_module)
        assert type(copied).training_step.__name__ == "training_step"
        assert "training_step" not in vars(copied)


def trained(strategy: str, verifier: Callback | None, build: Callable[[], Any]) -> tuple[list[Tensor], Report | None]:
    torch.manual_seed(3)
    callbacks = [] if verifier is None else [verifier]
    trainer = make_trainer(STRATEGIES[strategy](), max_epochs=2, callbacks=[*callbacks, Copies()])
    module = build()
    data: Any = batches((4, 4, 4), seed=dist.get_rank())
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    weights = [tensor.detach().clone() for tensor in (*module.parameters(), *module.buffers(), torch.get_rng_state())]
    return weights, getattr(verifier, "report", None)


@contextmanager
def answering(answer: Any) -> Iterator[None]:
    """Have the reference answer at once, or fail."""

    def answered(calls: Any) -> list[Report]:
        if isinstance(answer, Exception):
            raise answer
        return [answer]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callback, "in_processes", answered)
        yield


def without_and_with(strategy: str, answer: Any, build: Callable[[], Any]) -> tuple[bool, str | None, list[str]]:
    """Return whether training is the same bits with the callback, its verdict, and what was warned of."""
    with answering(answer), warnings.catch_warnings(record=True) as caught:
        alone, _ = trained(strategy, None, build)
        warnings.simplefilter("always")
        watched, report = trained(strategy, GradAvgVerifier(2), build)
    same = len(alone) == len(watched) and all(map(torch.equal, alone, watched))
    return same, None if report is None else report.verdict, [str(each.message) for each in caught]


EQUAL = not_shown("nothing was asked")
DIFFERENT = Report("", "", 2, 1, "", 1e-5, [], [Finding("sum loss", "loss", "as planted", 0, advice="look")])


def all_optimizers(strategy: str) -> dict[str, bool]:
    """Body: train with every optimizer."""
    return {name: without_and_with(strategy, EQUAL, lambda: Watched(name))[0] for name in OPTIMIZERS}  # noqa: B023  # called at once


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_run_is_the_same_bits(world, strategy):
    """Weights, buffers and random numbers after training are those without the callback, with every optimizer."""
    assert [dict.fromkeys(OPTIMIZERS, True)] * 2 == world(2).run(all_optimizers, strategy)


class Unpicklable(Net):
    def __init__(self) -> None:
        super().__init__()
        self.own = lambda: None


class Odd(Net):
    """Gets batches that cannot be copied."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return (*batch, iter(()).__next__)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[:2], batch_idx)


FAILING: dict[str, tuple[str, Any, Callable[[], Any]]] = {
    "the reference": ("static graph", RuntimeError("as planted"), dropped),
    "the module": ("DDP", EQUAL, Unpicklable),
    "the batch": ("DDP", EQUAL, Odd),
    "the recorder": ("DDP", EQUAL, normed),
    "what is asked first": ("DDP", EQUAL, normed),
    "a difference": ("weighted mean", DIFFERENT, dropped),
}


def failing(what: str) -> Any:
    """Body: train beside a comparison that fails in one way."""
    with pytest.MonkeyPatch.context() as patch:
        broken = {"the recorder": "sketch", "what is asked first": "facts_of"}
        for name in [broken[what]] if what in broken else []:
            patch.setattr(record, name, None)
        return without_and_with(*FAILING[what])


@pytest.mark.parametrize(
    ("what", "verdict"),
    [
        *(("the reference", "not shown"), ("the recorder", "not shown"), ("the module", "not shown")),
        *(("the batch", "not shown"), ("what is asked first", "not shown"), ("a difference", "different")),
    ],
)
def test_no_failure_ends_the_run(world, what, verdict):
    """A reference, a recorder or a pickle that fails leaves the run as it is, and a difference is a warning."""
    answers = world(2).run(failing, what)
    assert [(True, verdict)] * 2 == [answer[:2] for answer in answers]
    assert (what == "a difference") == any("sum loss (as planted). Look." in text for text in answers[0][2])


def raising() -> str:
    """Body: train with a callback that is to end the run."""
    with answering(DIFFERENT), pytest.raises(RuntimeError) as raised:
        trained("DDP", GradAvgVerifier(1, on_difference="raise"), Net)
    return str(raised.value)


def test_a_difference_can_end_the_run(world):
    """`on_difference="raise"` ends training on all ranks, with the cause."""
    assert [True] * 2 == ["sum loss (as planted)" in answer for answer in world(2).run(raising)]


def left_behind() -> Any:
    """Body: what the callback leaves behind."""
    before, verifier = Net.training_step, GradAvgVerifier(2)
    with answering(EQUAL):
        trained("DDP", verifier, Net)
    return Net.training_step is before, verifier.folder.name != "" and verifier.folder.exists()


def test_nothing_is_left_behind(world):
    """After the last recorded step the class is as before, and the files are gone."""
    assert [(True, False)] * 2 == world(2).run(left_behind)
