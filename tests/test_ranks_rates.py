"""Learning rates inside real Trainers: the scale follows the global batch, whatever scheduler there is."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partialmethod
from typing import Any, cast

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from ranks import ON_EXCEPTION, make_trainer
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader
from toys import MemoryLogger, Toy, approx, make_loader, train

from lightning_gradavg import GradAvgMonitor, GradAvgStrategy

TRAINER: dict[str, Any] = {"max_epochs": 1, "use_distributed_sampler": False}
OFTEN: dict[str, Any] = {"every_n_train_steps": 1, "save_top_k": -1}


def schedulers(optimizer: Any, trainer: Any, noting: Noting) -> dict[str, Any]:
    """By what stands in the group, by a closed form that moves the betas of Adam, too, and by a metric."""

    def same(_: int) -> float:
        noting.note("schedule", optimizer)
        return 1.0

    return {
        "StepLR": lambda: lr_scheduler.StepLR(optimizer, 2, 0.1),
        "OneCycleLR": lambda: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=trainer.estimated_stepping_batches),
        "ReduceLROnPlateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
        "same": lambda: lr_scheduler.MultiplicativeLR(optimizer, same),
    }


class Noting(Callback):
    """Notes what the groups of the first optimizer hold: as `step`, the values that a step used."""

    def __init__(self) -> None:
        self.held: dict[str, list[list[dict[str, Any]]]] = {}
        self.watched: list[Any] = []

    def watch(self, optimizer: Any) -> None:
        """Note the values of each step. A hook from before training is called before the strategy's own."""
        if optimizer not in self.watched:
            self.watched.append(optimizer)
            optimizer.register_step_post_hook(lambda optimizer, *_: self.note("step", optimizer))

    def note(self, moment: str, optimizer: Any) -> None:
        names = ("lr", "betas", "eps")
        groups = [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]
        self.held.setdefault(moment, []).append(groups)

    def reach(self, moment: str, trainer: Any, *args: Any) -> None:
        if moment == "on_train_start":
            self.watch(trainer.optimizers[0])
        self.note(moment, trainer.optimizers[0])


STEP = ("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_before_optimizer_step")
REST = ("train_start", "train_epoch_start", "train_batch_end", "validation_batch_start", "train_epoch_end", "train_end")
for each in (*STEP, *(f"on_{name}" for name in REST), "on_exception"):
    setattr(Noting, each, partialmethod(Noting.reach, each))


class Scheduled(Toy):
    """Toy-Lin with two parameter groups, at 0.1 and 0.01, and a scheduler; `how` says how its optimizer steps."""

    def __init__(
        self, how: str = "sgd", scheduler: str = "", batch: int = 2, size: int = 12, noting: Noting | None = None
    ) -> None:
        super().__init__()
        self.v = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.how = how
        self.scheduler = scheduler
        self.batch = batch
        self.size = size
        self.automatic_optimization = how not in ("manual", "raw")
        self.noting = noting or Noting()

    def _loader(self) -> Any:
        data: Any = torch.ones(self.size, dtype=torch.float64)
        return DataLoader(data, batch_size=self.batch)

    train_dataloader = val_dataloader = _loader

    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.w]}, {"params": [self.v], "lr": 0.01}]
        optimizer: Any
        if self.how == "lbfgs":
            optimizer = torch.optim.LBFGS(self.parameters(), lr=0.1)
        else:
            optimizer = torch.optim.Adam(groups, 0.1) if self.how == "adam" else torch.optim.SGD(groups, 0.1, 0.5)
        if not self.scheduler:
            return optimizer
        scheduler = schedulers(optimizer, self.trainer, self.noting)[self.scheduler]()
        monitor = {"monitor": "metric", "strict": False} if self.scheduler == "ReduceLROnPlateau" else {}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", **monitor}}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        optimizer = cast(Any, self.optimizers())
        loss = self.losses(batch).mean() + self.v * 0
        self.noting.note("training_step", optimizer)
        self.trainer.strategy.batch_to_device(batch)  # as a callback may do at any time
        if self.how == "raises" and batch_idx == 1:
            raise KeyError(self.how)
        if self.automatic_optimization:
            self.log_dict({"metric": float(batch_idx), "logged": optimizer.param_groups[0]["lr"]})
            return loss
        optimizer.zero_grad()
        self.manual_backward(loss)
        if self.how == "raw":
            optimizer.optimizer.step()
        else:
            optimizer.step(lambda: self.noting.note("closure", optimizer))
        if scheduler := cast(Any, self.lr_schedulers()):
            scheduler.step()
        return None

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.how == "skips" and batch_idx % 2:
            optimizer_closure()
            return
        self.noting.note("optimizer_step", optimizer)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.noting.note("stepped", optimizer)

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


def run(model: dict[str, Any], strategy: dict[str, Any], callbacks: Sequence[Callback] = (), **options: Any) -> Any:
    """Body: train, and return what the groups held at every moment, and the strategy."""
    noting = Noting()
    chosen = GradAvgStrategy(**strategy)
    trainer = make_trainer(chosen, callbacks=[noting, *callbacks], **{**TRAINER, **options})
    with suppress(KeyError):
        trainer.fit(Scheduled(**model, noting=noting))
    noting.note("left", trainer.optimizers[0])
    return noting.held, chosen.global_batch_size, chosen.lr_scale, chosen._start_line()


def scaled(group: dict[str, Any], factor: float, scale: float) -> dict[str, Any]:
    found = {"lr": approx(group["lr"] * factor)}
    if "betas" in group:
        moved = tuple(approx(1 - scale * (1 - beta)) for beta in group["betas"])
        found |= {"betas": moved, "eps": group["eps"] / math.sqrt(scale)}
    return found


AVERAGING = [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1)]
LONGER, SHORTER = ([GradientAccumulationScheduler(schedule)] for schedule in ({0: 1, 1: 2}, {0: 2, 1: 1}))
# The model, the scaling, the base batch, steps of warm-up, options of the Trainer, and the scale of each step.
RATES: list[tuple[Any, ...]] = [
    # Case 20: local batches of 512 on two ranks.
    *(({"batch": 512, "size": 1024}, rule, 256, 0, {}, [4] * 2) for rule in ("linear", "sqrt", "none")),
    ({"batch": 512, "size": 1024}, "linear", 256, 0, {"accumulate_grad_batches": 2}, [8]),
    ({}, "linear", 1, 0, {}, [4] * 6),
    # Case 22.
    ({"scheduler": "StepLR"}, "linear", 1, 0, {}, [4] * 6),
    ({"scheduler": "OneCycleLR"}, "linear", 1, 5, {}, [4] * 6),
    ({"scheduler": "ReduceLROnPlateau"}, "sqrt", 1, 5, {}, [4] * 6),
    ({"how": "adam", "scheduler": "StepLR"}, "adam_sde", 1, 0, {}, [4] * 6),
    ({"how": "adam", "scheduler": "OneCycleLR"}, "adam_sde", 1, 5, {}, [4] * 6),
    # An epoch at 0.1, and two of averaging at 0.05, which is a base rate.
    ({"size": 8}, "linear", 2, 0, {"max_epochs": 3, "callbacks": AVERAGING}, [2] * 12),
    ({"size": 8}, "linear", 4, 0, {"max_epochs": 2, "callbacks": LONGER}, [1] * 4 + [2] * 2),
    ({"size": 8}, "linear", 4, 0, {"max_epochs": 2, "callbacks": SHORTER}, [2] * 2 + [1] * 4),
]


@pytest.mark.filterwarnings("ignore:Swapping scheduler")
@pytest.mark.filterwarnings("ignore:When using `Trainer.accumulate_grad_batches")
@pytest.mark.parametrize(("model", "rule", "base", "warmup", "options", "scales"), RATES)
def test_effective_rate_is_factor_times_schedule(world, model, rule, base, warmup, options, scales):
    stock = world(2).run(run, model, {}, **options)
    strategy = {"lr_scaling": rule, "base_batch_size": base, "lr_warmup_steps": warmup}
    for (held, size, lr_scale, _), (plain, *_) in zip(
        world(2).run(run, model, strategy, **options), stock, strict=True
    ):
        steps = zip(held["step"], plain["step"], scales, strict=True)
        for step, (mine, theirs, scale) in enumerate(steps):
            full = {"none": 1, "linear": scale}.get(rule, math.sqrt(scale))
            factor = 1 + (full - 1) * min(1, step / warmup) if warmup else full
            assert [scaled(group, factor, scale) for group in theirs] == mine
        assert (base * scale, approx(full)) == (size, lr_scale)


def warnings_of(*arguments: Any) -> tuple[float, list[str]]:
    """Body: train, and return the last weight, and the warnings about the recipe."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = train(*arguments)
    return seen.weights[-1].item(), [str(one.message) for one in caught if "lr_scaling" in str(one.message)]


def test_sum_and_linear_scaling_warn(world):
    """Case 21."""
    for strategy, weight, expected in (({}, 0.7, [0, 0]), ({"lr_scaling": "linear"}, 0.4, [1, 0])):
        toy = {"kind": "s", "loss": "sum"}
        said = world(2).run(warnings_of, [[[1, 2]], [[3, 4]]], toy, {"reduction": "sum", **strategy})
        assert [(approx(weight), count) for count in expected] == [(found, len(texts)) for found, texts in said]
        quoted = ("reduction='sum' and lr_scaling='linear'", "at scale 2", "is 4 times the base step")
        assert all(part in text for text in said[0][1] for part in quoted)


def factors(held: dict[str, Any]) -> dict[str, set[float]]:
    """Return by which factors the base rates are multiplied at each moment; LBFGS has one group."""
    return {
        moment: {
            round(group["lr"] / lr, 12) for groups in of_moment for lr, group in zip((0.1, 0.01), groups, strict=False)
        }
        for moment, of_moment in held.items()
    }


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
@pytest.mark.parametrize(
    ("how", "options"),
    [
        *((how, {}) for how in ("sgd", "lbfgs", "ends the epoch", "start raises", "skips", "raises")),
        ("sgd", {"accumulate_grad_batches": 2}),
        ("manual", {}),
        ("raw", {}),
    ],
)
def test_the_factor_is_in_force_within_the_step_alone(world, tmp_path, how, options):
    """Hooks, closures, schedulers, checkpoints and the trainer that is left see base rates."""
    model = {"how": how, "scheduler": "same", "size": 8}
    saving = ModelCheckpoint(tmp_path, **ON_EXCEPTION, **OFTEN)
    options = {"max_epochs": 2, "val_check_interval": 2, "enable_checkpointing": True, **options}
    ranks = world(2).run(run, model, {"lr_scaling": "linear"}, [saving], **options)
    for held in (factors(held) for held, *_ in ranks):
        assert {"on_train_start", "on_train_batch_start", "schedule", "step", "left"} <= held.keys()
        assert {name: {2.0 if name == "step" else 1.0} for name in held} == held
    saved = [torch.load(file)["optimizer_states"][0]["param_groups"] for file in tmp_path.glob("*.ckpt")]
    # Lightning counts no step of a raw optimizer, and saves none.
    assert {"saved": set() if how == "raw" else {1.0}} == factors({"saved": saved})


def logged(how: str) -> Any:
    """Body: what Lightning's monitor, ours, the module and the line at the start show of a warm-up to 3 * 0.1."""
    memory = MemoryLogger()
    strategy = {"lr_scaling": "linear", "base_batch_size": 2, "lr_warmup_steps": 2}
    if how == "manual":
        strategy["global_batch_size"] = 6
    options: dict[str, Any] = {"max_epochs": 2, "log_every_n_steps": 1, "logger": memory}
    *_, line = run({"how": how, "batch": 3, "size": 6}, strategy, [LearningRateMonitor(), GradAvgMonitor(1)], **options)
    return [row for _, row in memory.rows], line


@pytest.mark.parametrize("how", ["sgd", "manual"])
def test_monitors_show_the_base_rate_and_the_factor(world, how):
    for rows, line in world(2).run(logged, how):
        shown = {"lr-SGD/pg1": {0.1}, "logged": {0.1}, "gradavg/lr_factor/optimizer_0": [1, 2, 3, 3]}
        if how == "manual":
            del shown["logged"]
        for name, expected in shown.items():
            values = [row[name] for row in rows if name in row]
            assert expected == (values if isinstance(expected, list) else {round(value, 6) for value in values}), name
        assert (
            " Global batch / base batch = 3, so every optimizer step multiplies its learning rate by 3 after 2 warm-up"
            " steps; schedulers, LearningRateMonitor and checkpoints show the base rate. "
        ) in line


def trained(strategy: dict[str, Any]) -> Any:
    """Body: train in manual optimization, by raw steps of batches of 3; return the weight and what is known."""
    chosen = GradAvgStrategy(**strategy)
    module = Scheduled("raw", batch=3, size=3)
    make_trainer(chosen, **TRAINER).fit(module)
    return module.w.item(), chosen.global_batch_size, chosen.lr_scale


# Two ranks, one step of -0.1 at the base rate. Of a window that is not known, only the ratio to another is.
MANUAL: list[tuple[dict[str, Any], float, int | None, float]] = [
    ({}, 0.9, None, 1),
    ({"lr_scaling": "linear"}, 0.8, None, 2),
    ({"lr_scaling": "linear", "base_world_size": 2}, 0.9, None, 1),
    ({"lr_scaling": "linear", "base_batch_size": 4, "global_batch_size": 12}, 0.7, 12, 3),
]


@pytest.mark.parametrize(("strategy", "weight", "global_batch", "factor"), MANUAL)
def test_raw_steps_are_scaled(world, strategy, weight, global_batch, factor):
    """Of a raw optimizer, without Lightning around its step; at the base rate that was -0.1 in silence."""
    ranks = world(2).run(trained, strategy)
    assert [(approx(weight), global_batch, approx(factor))] * 2 == ranks


def test_a_base_batch_needs_the_global_batch_in_manual_optimization(world):
    strategy = {"lr_scaling": "linear", "base_batch_size": 4}
    for error in world(2).run_expecting_errors(trained, strategy):
        assert "ValueError" == error.type_name
        assert "base_batch_size=4 needs the global batch, but in manual optimization" in error.message
        assert "GradAvgStrategy(global_batch_size=...)" in error.message


def find_then_fit(folder: str, tells: bool) -> Any:
    """Body: find a learning rate, and train with it; return it, those in use, and those tried."""
    numbers: Any = torch.arange(1, 65, dtype=torch.float64) / 64
    data = DataLoader(numbers, batch_size=4) if tells else make_loader(numbers.split(4))
    model = Toy(kind="s", lr=0.003)
    noting = Noting()
    options: dict[str, Any] = {**TRAINER, "default_root_dir": folder, "callbacks": [noting]}
    trainer = make_trainer(GradAvgStrategy(lr_scaling="linear"), **options)
    tried: dict[str, Any] = {"num_training": 12, "min_lr": 1e-4, "max_lr": 0.5, "early_stop_threshold": None}
    finder: Any = Tuner(trainer).lr_find(model, data, **tried)
    model.lr = finder.suggestion(skip_begin=1, skip_end=1)
    noting.held.clear()
    trainer.fit(model, data)
    used = {group["lr"] for (group,) in noting.held["step"]}
    return model.lr, used, finder.results["lr"]


@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.parametrize("tells", [True, False])
def test_learning_rate_finder(world, tmp_path, tells):
    """Case 24, also where no loader tells its batch size."""
    ranks = world(2).run(find_then_fit, str(tmp_path), tells)
    for suggestion, used, results in ranks:
        assert (ranks[0][0], {suggestion}, ranks[0][2]) == (suggestion, used, results)
        assert approx(1e-4) == results[0]


class Late(Toy):
    """Adds a parameter at 0.01 in one of its hooks or, of the name `callback ...`, in that of a callback."""

    def __init__(self, moment: str) -> None:
        super().__init__()
        self.v = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        hook = moment.removeprefix("callback ")
        self.callback = Callback()
        owner: Any = self.callback if hook != moment else self
        own = getattr(owner, hook)

        def adding(*args: Any, **kwargs: Any) -> Any:
            self.add()
            return own(*args, **kwargs)

        setattr(owner, hook, adding)

    def add(self) -> None:
        optimizer = self.trainer.optimizers[0]
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": [self.v], "lr": 0.01})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.w], lr=0.1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.losses(batch).mean() + self.v

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Keep no gradient: there may be none."""


def train_late(moment: str, options: dict[str, Any]) -> Any:
    """Body: return the parameter after one step, and the base rates at the end."""
    module = Late(moment)
    trainer = make_trainer(
        GradAvgStrategy(lr_scaling="linear", find_unused_parameters=True),
        callbacks=[module.callback],
        **{**TRAINER, "max_steps": 1, **options},
    )
    trainer.fit(module, make_loader([[1.0, 2.0]] * 4))
    return module.v.item(), [group["lr"] for group in trainer.optimizers[0].param_groups]


ADDED = ("on_train_epoch_start", "on_train_batch_start", "training_step", "on_after_backward")


@pytest.mark.parametrize("moment", [*ADDED, "on_before_optimizer_step", *(f"callback {ADDED[n]}" for n in (0, 1, 3))])
@pytest.mark.parametrize("window", [1, 2])
def test_a_group_that_is_added_is_scaled_in_its_first_step(world, moment, window):
    """Wherever between the start of the epoch and the step; one step goes down by 0.01 times the scale of 2."""
    for value, rates in world(2).run(train_late, moment, {"accumulate_grad_batches": window}):
        assert (approx(-0.02), [0.1, 0.01]) == (value, rates)


class Frozen(Scheduled):
    def __init__(self, noting: Noting) -> None:
        super().__init__(size=8, noting=noting)
        self.backbone = torch.nn.Linear(1, 1, dtype=torch.float64)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.w], lr=0.1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.losses(batch).mean() + self.backbone(batch[:, None]).mean() + self.v


def thaw(strategy: dict[str, Any]) -> Any:
    """Body: return what the groups held before each step."""
    noting = Noting()
    thawing = BackboneFinetuning(1, lambda epoch: 1.0, backbone_initial_ratio_lr=0.1)
    options = {**TRAINER, "max_epochs": 2, "callbacks": [noting, thawing]}
    make_trainer(GradAvgStrategy(**strategy, find_unused_parameters=True), **options).fit(Frozen(noting))
    return [[group["lr"] for group in groups] for groups in noting.held["step"]]


def test_a_backbone_that_is_thawed_is_scaled(world):
    """Its group comes at a tenth of the head's rate, which is at rest when the epoch starts."""
    for held in world(2).run(thaw, {"lr_scaling": "linear"}):
        assert [[approx(0.2)]] * 4 + [[approx(0.2), approx(0.02)]] * 4 == held


def replace_optimizers(how: str, moment: str) -> Any:
    """Body: train with another optimizer from the second batch on; return what groups held in the steps."""
    noting = Noting()
    module = Scheduled(how, size=8)
    replaced: list[Any] = []

    def replace(trainer: Any, *_: Any) -> None:
        if len(noting.held.get("step", [])) == 1 and not replaced:
            replaced.append(torch.optim.SGD(module.parameters(), lr=0.3))
            noting.watch(replaced[0])
            trainer.strategy.optimizers = replaced

    callback = Callback()
    setattr(callback, moment, replace)
    options = {**TRAINER, "callbacks": [callback, noting]}
    make_trainer(GradAvgStrategy(lr_scaling="linear"), **options).fit(module)
    held = [[group["lr"] for group in groups] for groups in noting.held["step"]]
    return held, replaced[0].param_groups


@pytest.mark.parametrize("moment", ["on_train_batch_end", "on_train_batch_start"])
@pytest.mark.parametrize("how", ["sgd", "raw"])
def test_an_optimizer_that_replaces_another_is_scaled(world, how, moment):
    """In the batch before which it comes."""
    for held, groups in world(2).run(replace_optimizers, how, moment):
        assert [approx([0.2, 0.02]), *[[approx(0.6)]] * 3] == held
        assert [0.3] == [group["lr"] for group in groups]
