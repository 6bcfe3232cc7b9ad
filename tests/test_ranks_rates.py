"""Learning rates inside real Trainers: the scale follows the global batch, whatever scheduler there is."""

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from ranks import make_trainer
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader
from toys import Memory, Toy, approx, loader, train

from lightning_gradavg import GradAvgMonitor, GradAvgStrategy

TRAINER = {"max_epochs": 1, "use_distributed_sampler": False}


SCHEDULERS: dict[str, Any] = {
    "none": None,
    "StepLR": lambda o, _: lr_scheduler.StepLR(o, 2, 0.1),
    "OneCycleLR": lambda o, trainer: lr_scheduler.OneCycleLR(o, 0.3, total_steps=trainer.estimated_stepping_batches),
    "ReduceLROnPlateau": lambda o, _: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
}
"""By what stands in the group, by a closed form that moves the betas of Adam, too, and by a metric."""


class Scheduled(Toy):
    """Toy-Lin with two parameter groups and a scheduler; notes what the groups hold in every step."""

    def __init__(self, scheduler: str = "none", batch: int = 2, size: int = 24, adam: bool = False) -> None:
        super().__init__(lr=0.1)
        self.v = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.scheduler, self.batch, self.size, self.adam = scheduler, batch, size, adam
        self.held: list[list[dict[str, Any]]] = []

    def losses(self, batch: torch.Tensor) -> torch.Tensor:
        return super().losses(batch) + self.v * 0

    def train_dataloader(self) -> Any:
        data: Any = torch.ones(self.size, dtype=torch.float64)
        return DataLoader(data, batch_size=self.batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        groups, names = optimizer.param_groups, ("lr", "betas", "eps")
        self.held.append([{name: group[name] for name in names if name in group} for group in groups])

    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.w]}, {"params": [self.v], "lr": 0.01}]
        optimizer: Any = torch.optim.Adam(groups, 0.1) if self.adam else torch.optim.SGD(groups, 0.1, momentum=0.5)
        if self.scheduler == "none":
            return optimizer
        scheduler = SCHEDULERS[self.scheduler](optimizer, self.trainer)
        monitor = {"monitor": "metric", "strict": False} if self.scheduler == "ReduceLROnPlateau" else {}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", **monitor}}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.log("metric", float(batch_idx))
        return super().training_step(batch, batch_idx)


def run(model: dict[str, Any], strategy: dict[str, Any], **options: Any) -> Any:
    module = Scheduled(**model)
    chosen = GradAvgStrategy(**strategy)
    make_trainer(chosen, **{**TRAINER, **options}).fit(module)
    rates = [tuple(float(group["lr"]) for group in groups) for groups in module.held]
    return rates, chosen.global_batch_size, chosen.lr_scale, module.held


@pytest.mark.parametrize(
    ("scaling", "window", "factor"), [("linear", 1, 4), ("sqrt", 1, 2), ("none", 1, 1), ("linear", 2, 8)]
)
def test_local_batch_of_512_on_two_ranks(world, scaling, window, factor):
    strategy = {"lr_scaling": scaling, "base_batch_size": 256}
    for rates, size, scale, _ in world(2).run(
        run, {"batch": 512, "size": 1024}, strategy, accumulate_grad_batches=window
    ):
        assert [(approx(0.1 * factor), approx(0.01 * factor))] * (2 // window) == rates
        assert (1024 * window, approx(factor)) == (size, scale)


def warnings_of(*arguments: Any) -> list[str]:
    """Body: train, and return the warnings about the recipe."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(*arguments)
    return [str(warning.message) for warning in caught if "lr_scaling" in str(warning.message)]


def test_sum_and_linear_scaling_warn(world):
    toy = {"kind": "s", "loss": "sum"}
    said = world(2).run(warnings_of, [[[1, 2]], [[3, 4]]], toy, {"reduction": "sum", "lr_scaling": "linear"})
    assert [1, 0] == [len(messages) for messages in said]
    assert "is 4 times the base step" in said[0][0]


def scaled(group: dict[str, Any], factor: float) -> dict[str, Any]:
    """Return by the published formulas what an unscaled run's group becomes at scale 4."""
    found = {"lr": approx(group["lr"] * factor)}
    if "betas" in group:
        found |= {"betas": tuple(approx(1 - 4 * (1 - beta)) for beta in group["betas"]), "eps": group["eps"] / 2}
    return found


@pytest.mark.parametrize(
    ("name", "lr_scaling", "warmup"),
    [
        *(
            ("none", "linear", 0),
            ("StepLR", "linear", 0),
            ("OneCycleLR", "linear", 5),
            ("ReduceLROnPlateau", "sqrt", 5),
        ),
        *(("StepLR", "adam_sde", 0), ("OneCycleLR", "adam_sde", 5)),
    ],
)
def test_effective_rate_is_factor_times_schedule(world, name, lr_scaling, warmup):
    model = {"scheduler": name, "adam": lr_scaling == "adam_sde"}
    stock = world(2).run(run, model, {})
    strategy = {"lr_scaling": lr_scaling, "base_batch_size": 1, "lr_warmup_steps": warmup}
    full = 4 if lr_scaling == "linear" else 2
    for (*_, held), (*_, plain) in zip(world(2).run(run, model, strategy), stock, strict=True):
        assert len(held) == 12
        for step, (mine, theirs) in enumerate(zip(held, plain, strict=True)):
            factor = 1 + (full - 1) * min(1, step / warmup) if warmup else full
            assert [scaled(group, factor) for group in theirs] == mine


def test_one_cycle_over_estimated_steps(world):
    one_cycle = {"scheduler": "OneCycleLR", "batch": 8, "size": 64}
    strategy = {"split_batches": True, "max_device_batch_size": 2}
    (expected,), *others = (world(ranks).run(run, one_cycle, strategy, max_epochs=2) for ranks in (1, 2, 4))
    assert [[expected] * 2, [expected] * 4] == others
    assert 16 == len(expected[0])


class Noting(Callback):
    """Notes the learning rate, in units of the base value, at every moment of a run."""

    def __init__(self) -> None:
        self.held: dict[str, set[float]] = {}

    def note(self, moment: str, trainer: Any) -> None:
        for optimizer in trainer.optimizers:
            self.held.setdefault(moment, set()).add(round(optimizer.param_groups[0]["lr"] / 0.5, 12))


def _noted(name: str) -> Any:
    def hook(self: Noting, trainer: Any, *args: Any) -> None:
        self.note(name, trainer)

    return hook


STEP = ("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_before_optimizer_step")
REST = ("train_start", "train_epoch_start", "train_batch_end", "validation_batch_start", "train_epoch_end", "train_end")
for each in (*STEP, *(f"on_{name}" for name in REST), "on_exception"):
    setattr(Noting, each, _noted(each))


class Moments(Toy):
    """Toy-Lin at 0.5, with a scheduler that ends at 0.5 again; `steps` says how its optimizer steps."""

    def __init__(self, how: str, noting: Noting) -> None:
        super().__init__(lr=0.5)
        self.noting = noting
        self.how, self.automatic_optimization = how, how != "manual"

    def configure_optimizers(self) -> Any:
        kind = torch.optim.LBFGS if self.how == "lbfgs" else torch.optim.SGD
        optimizer = kind(self.parameters(), lr=0.5)
        return [optimizer], [{"scheduler": Same(optimizer), "interval": "step"}]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        noting, optimizer = self.noting, cast(Any, self.optimizers())
        noting.note("training_step", self.trainer)
        self.trainer.strategy.batch_to_device(batch)  # as a callback may do at any time
        if self.how == "none":
            return None
        if self.how == "raises" and batch_idx == 1:
            raise KeyError(self.how)
        if self.how == "manual":
            optimizer.zero_grad()
            self.manual_backward(self.losses(batch).mean())
            optimizer.step(lambda: noting.note("step", self.trainer))
            self.lr_schedulers().step()
        return self.losses(batch).mean() if self.how != "manual" else None

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.how == "skips" and batch_idx % 2:
            optimizer_closure()
            return
        self.noting.note("optimizer_step", self.trainer)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.noting.note("stepped", self.trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        if self.how == "start raises" and batch_idx == 1:
            raise KeyError(self.how)
        return -1 if self.how == "ends the epoch" and batch_idx == 1 else None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Keep no gradient: there may be none."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.trainer.strategy.batch_to_device(args[1])

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """Compute nothing."""


class Same(lr_scheduler.LRScheduler):
    """Multiplies the rate in the group by 1, and notes what it found there."""

    seen: ClassVar[set[float]] = set()

    def get_lr(self) -> Any:
        Same.seen |= {group["lr"] for group in self.optimizer.param_groups}
        return [group["lr"] for group in self.optimizer.param_groups]


def moments(how: str, folder: str, **options: Any) -> Any:
    """Body: train, and return what the groups held at every moment, what the scheduler saw, and the saved rates."""
    Same.seen = set()
    noting, strategy = Noting(), GradAvgStrategy(lr_scaling="linear")
    saving = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, save_on_exception=True)
    trainer = make_trainer(
        strategy,
        **{**TRAINER, "max_epochs": 2, "val_check_interval": 2, "enable_checkpointing": True, **options},
        callbacks=[noting, saving],
    )
    data = loader([[1.0]] * 4)
    with suppress(KeyError):
        trainer.fit(Moments(how, noting), data, data)
    saved = [torch.load(file)["optimizer_states"][0]["param_groups"][0]["lr"] for file in Path(folder).glob("*.ckpt")]
    return noting.held, Same.seen, {*saved}, trainer.optimizers[0].param_groups[0]["lr"]


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
@pytest.mark.parametrize(
    ("how", "options", "further_at_rest"),
    [
        ("sgd", {}, set()),
        ("lbfgs", {}, set()),
        ("none", {}, set()),
        ("ends the epoch", {}, set()),
        ("raises", {}, {"on_exception"}),
        ("start raises", {}, set()),
        ("manual", {}, {"on_train_batch_start", "training_step", "on_before_zero_grad", "on_before_backward"}),
        ("sgd", {"accumulate_grad_batches": 2}, set()),
        ("skips", {}, set()),
    ],
)
def test_the_factor_is_in_force_from_a_batch_to_the_step(world, tmp_path, how, options, further_at_rest):
    at_rest = {f"on_{name}" for name in REST} | {"stepped"} | further_at_rest
    for held, seen, saved, left in world(2).run(moments, how, str(tmp_path), **options):
        assert {"on_train_start", "on_train_batch_start"} <= held.keys()
        for name, values in held.items():
            assert (1.0 if name in at_rest else 2.0) in values, name
            assert 1 == len(values), name
        assert {0.5} == seen
        assert {0.5} == saved
        assert 0.5 == left


class Logged(Toy):
    """Toy-Lin at 0.1 that logs its learning rate."""

    def __init__(self, manual: bool) -> None:
        super().__init__(lr=0.1)
        self.automatic_optimization = not manual

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if self.automatic_optimization:
            self.log("logged", self.optimizers().param_groups[0]["lr"])
            return super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.losses(batch).mean())
        optimizer.step()
        return None


def logged(manual: bool) -> Any:
    """Body: what Lightning's monitor, ours, the module and the line at the start show of a warm-up from 0.1 to 0.3."""
    memory, strategy = Memory(), GradAvgStrategy(lr_scaling="linear", base_batch_size=2, lr_warmup_steps=2)
    options = {**TRAINER, "max_epochs": 2, "log_every_n_steps": 1, "logger": memory}
    trainer = make_trainer(strategy, **options, callbacks=[LearningRateMonitor(), GradAvgMonitor(1)])
    trainer.fit(Logged(manual), DataLoader(torch.ones(6, dtype=torch.float64), batch_size=3))
    return [row for _, row in memory.rows], strategy._start_line()


@pytest.mark.parametrize("manual", [False, True])
def test_monitors_and_the_start_line_show_the_effective_rate(world, manual):
    for rows, line in world(2).run(logged, manual):
        for name in ("lr-SGD", "gradavg/lr/group_0", *([] if manual else ["logged"])):
            expected = [0.1, 0.1, 0.2, 0.3, 0.3, 0.3] if name == "lr-SGD" else [0.1, 0.2, 0.3, 0.3]
            assert [approx(lr, 1e-6) for lr in expected] == [row[name] for row in rows if name in row], name
        assert line.endswith("; scale 3, learning rate x 3, at first 0.3"), line


@pytest.mark.filterwarnings("ignore:Swapping scheduler")
def test_the_rate_of_weight_averaging_is_a_base_rate(world):
    """An epoch at 0.1, and two of averaging at 0.05."""
    averaging = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1)
    for rates, *_ in world(2).run(run, {"size": 8}, {"lr_scaling": "linear"}, max_epochs=3, callbacks=[averaging]):
        assert [approx(0.2)] * 4 == [rate for rate, _ in rates[:4]]
        assert [approx(0.1)] * 4 == [rate for rate, _ in rates[-4:]]


@pytest.mark.parametrize(
    ("schedule", "rates", "size"), [({0: 1, 1: 2}, [0.1] * 4 + [0.2] * 2, 8), ({0: 2, 1: 1}, [0.2] * 2 + [0.1] * 4, 4)]
)
def test_scale_follows_a_scheduled_window(world, schedule, rates, size):
    strategy = {"lr_scaling": "linear", "base_batch_size": 4}
    callbacks = [GradientAccumulationScheduler(schedule)]
    for found, batch, *_ in world(2).run(run, {"size": 8}, strategy, max_epochs=2, callbacks=callbacks):
        assert (list(map(approx, rates)), size) == ([rate for rate, _ in found], batch)


class Found(Toy):
    def __init__(self, tells: bool) -> None:
        super().__init__(kind="s", lr=0.003)
        self.tells, self.rates = tells, list[float]()

    def train_dataloader(self) -> Any:
        data: Any = torch.arange(1, 65, dtype=torch.float64) / 64
        return DataLoader(data, batch_size=4) if self.tells else loader(data.split(4))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def on_train_batch_start(self, *args: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def find_then_fit(folder: str, tells: bool) -> Any:
    model = Found(tells)
    strategy = GradAvgStrategy(lr_scaling="linear")
    trainer = make_trainer(strategy, **TRAINER, default_root_dir=folder)
    finder = Tuner(trainer).lr_find(model, num_training=12, min_lr=1e-4, max_lr=0.5, early_stop_threshold=None)
    searched, model.rates = model.rates, []
    assert finder is not None
    suggestion = finder.suggestion(skip_begin=1, skip_end=1)
    assert suggestion is not None
    model.lr = suggestion
    trainer.fit(model)
    return dist.get_rank(), suggestion, set(model.rates), finder.results["lr"], searched


@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.parametrize("tells", [True, False])
def test_learning_rate_finder(world, tmp_path, tells):
    """Case 24, also where no loader tells its batch size."""
    ranks = world(2).run(find_then_fit, str(tmp_path), tells)
    assert [0, 1] == [rank[0] for rank in ranks]
    assert ranks[0][1] is not None
    for _, suggestion, used, results, _ in ranks:
        assert ranks[0][1] == suggestion
        assert {suggestion} == used
        assert ranks[0][3] == results
        assert approx(1e-4) == results[0]
