"""Scalings: the published formulas, the global batch, and groups that hold base values between steps; and plans."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, Adam, AdamW, NAdam, RMSprop
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.place import Place
from lightning_gradavg.batches.chunks import Split
from lightning_gradavg.cli.plan import main
from lightning_gradavg.plan import Recipe, make_plan
from lightning_gradavg.rates.part import Rates
from lightning_gradavg.rates.scaling import (
    SCALINGS,
    BatchScale,
    batch_scale,
    counted_twice,
    resolve_scaling,
    scale_limit,
    scaled_steps,
    warmup_factor,
)
from lightning_gradavg.rules import RULES, share_of

COUNTS = st.integers(1, 64)
ADAM: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}


def param_group(optimizer: Any, **options: Any) -> dict[str, Any]:
    group: dict[str, Any]
    (group,) = optimizer(
        [torch.nn.Parameter(torch.zeros(1))], **{"lr": 0.1, "weight_decay": 0.1, **options}
    ).param_groups
    return group


def cube_root(scale: float) -> float:
    return math.pow(scale, 1 / 3)


@pytest.mark.parametrize(
    ("lr_scaling", "optimizer", "scale", "expected"),
    [
        ("none", SGD, 8, {"lr": 0.1}),
        *(("linear", optimizer, 8, {"lr": 0.8}) for optimizer in (SGD, Adam)),
        *(("sqrt", optimizer, 4, {"lr": 0.2}) for optimizer in (SGD, Adam)),
        (cube_root, SGD, 8, {"lr": 0.2}),
        *(
            ("adam_sde", optimizer, 4, {"lr": 0.2, "betas": (0.6, 0.996), "eps": 5e-9})
            for optimizer in (Adam, AdamW, NAdam)
        ),
        ("adam_sde", RMSprop, 4, {"lr": 0.2, "alpha": 0.96, "eps": 5e-9}),
        ("adam_sde", partial(RMSprop, alpha=1.0), 4, {"lr": 0.2, "alpha": 1.0, "eps": 5e-9}),
    ],
)
def test_groups_of_torch_are_scaled(lr_scaling: Any, optimizer: Any, scale: float, expected: dict[str, Any]) -> None:
    scaling = resolve_scaling(lr_scaling)
    assert scaling.hyperparameters(scale, param_group(optimizer)) == expected
    assert scaling.name == getattr(lr_scaling, "__name__", lr_scaling)


@pytest.mark.parametrize(
    ("group", "limit"),
    [
        (ADAM, 10),
        ({**ADAM, "betas": (0.95, 0.9)}, 10),
        ({**ADAM, "betas": (0.975, 0.999)}, 40),
        ({"lr": 0.1, "alpha": 0.99, "eps": 1e-8}, 100),
    ],
)
def test_an_infeasible_scale_is_refused_with_the_largest_feasible_one(group: dict[str, Any], limit: int) -> None:
    assert scale_limit(group) == limit
    with pytest.raises(ValueError, match=rf"not feasible at scale {limit} .* must stay below {limit}\. Use a smaller"):
        SCALINGS["adam_sde"].hyperparameters(limit, group)
    below = SCALINGS["adam_sde"].hyperparameters(math.nextafter(limit, 0), group)
    assert min(below.get("betas", (below.get("alpha"),))) > 0


FACTOR, SCALE, NUMBER = (
    "at scale 8 must be finite and > 0, got",
    "scale must be finite and > 0, got",
    "must be a number",
)
OTHER = "is meant for Adam (betas, eps) and RMSprop (alpha, eps); this optimizer has"


@pytest.mark.parametrize(
    ("lr_scaling", "group", "scale", "error", "said"),
    [
        *(
            ("adam_sde", param_group(kind), 2, ValueError, OTHER)
            for kind in (SGD, torch.optim.ASGD, torch.optim.Adagrad)
        ),
        ("adam_sde", {"lr": 0.1, "betas": (0.9, 0.99)}, 2, ValueError, OTHER),  # Lion
        ("adam_sde", {"lr": 0.1, "momentum": 0.95, "eps": 1e-7, "ns_steps": 5}, 2, ValueError, OTHER),  # Muon
        *(("linear", group, 2, ValueError, "without one: its `lr` is missing or None") for group in ({}, {"lr": None})),
        *((lambda _, value=value: value, ADAM, 8, ValueError, FACTOR) for value in (0.0, math.inf, math.nan)),
        *(
            (lambda _, value=value: value, ADAM, 8, TypeError, f"{NUMBER}, got {value!r}")
            for value in ("2", None, True)
        ),
        *(("linear", ADAM, scale, ValueError, SCALE) for scale in (0.0, -4.0, math.inf, math.nan)),
    ],
)
def test_what_cannot_be_scaled_is_refused(lr_scaling: Any, group: Any, scale: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        resolve_scaling(lr_scaling).hyperparameters(scale, group)


def test_warmup_and_steps() -> None:
    assert [warmup_factor(4.0, step, 3) for step in range(5)] == [1.0, 2.0, 3.0, 4.0, 4.0]
    assert [warmup_factor(0.5, step, 2) for step in range(4)] == [1.0, 0.75, 0.5, 0.5]
    assert warmup_factor(4.0, 0, 0) == 4.0
    lengths: list[tuple[int, Any, int]] = [
        (1000, 4, 250),
        (5, 2, 3),
        (1, 64, 1),
        (0, 4, 0),
        (100, Fraction(1, 4), 400),
        (5, Fraction(96, 320), 17),
        (5, 96 / 320, 17),
        (5, Fraction(10, 3), 2),
        (5, 10 / 3, 2),
    ]
    assert [length for *_, length in lengths] == [scaled_steps(steps, scale) for steps, scale, _ in lengths]


BASE = 1000
"""The base batch."""
SCALES = (4.0, 3.0, 0.7, 9.0, 1.0)


class Calls(SGD):
    """Calls the step of its base class, so that torch calls hooks twice."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Makes(SGD):
    """Gives its base class a closure of its own."""

    note: Callable[[float], Any]

    def step(self, closure: Any = None) -> Any:
        return super().step(lambda: self.note(self.param_groups[0]["lr"]))


class Raises(SGD):
    """Raises in its step if there is no gradient."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        raise KeyError


class Catches(SGD):
    """Steps even if its closure raises."""

    def step(self, closure: Any = None) -> Any:
        with suppress(KeyError):
            closure()
        return super().step()


class Halves(SGD):
    """Adapts its learning rate after every step, in place where it is a tensor."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.5


def optimizer_of(kind: Any, lr: Any = 0.1, **options: Any) -> Any:
    """Return an optimizer of one parameter at 0, whose gradient is 1."""
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = torch.ones_like(parameter)
    return kind([parameter], lr=lr, **options)


def tensor(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def add_group(optimizer: Any, lr: float = 0.01) -> None:
    late = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    late.grad = torch.ones_like(late)
    optimizer.add_param_group({"params": [late], "lr": lr})


def attached(*optimizers: Any, lr_scaling: Any = "linear", scale: float = 2, warmup: int = 0) -> Rates:
    """Return the part of a run that trains with these optimizers."""
    rates = Rates(GradAvgStrategy()._options, lr_scaling=lr_scaling, base_batch_size=BASE, lr_warmup_steps=warmup)
    trainer = SimpleNamespace(callbacks=[], optimizers=list(optimizers), precision_plugin=None)
    loop = SimpleNamespace(accumulation=1, skips_backward=False)
    module = SimpleNamespace(automatic_optimization=True)
    rates.setup(cast(Any, SimpleNamespace(world=World(), trainer=trainer, loop=loop, module=module, num_nodes=1)))
    follow(rates, scale)
    rates.on_train_start()
    return rates


def follow(rates: Rates, scale: float) -> None:
    rates.prepare_loaders("train")
    rates.add_loader(round(scale * BASE))


def counted_by(rates: Rates) -> Any:
    saved: dict[str, Any] = {}
    rates.save(saved, {})
    return saved["rates"]["steps"]


def values_of(optimizer: Any) -> Any:
    return [parameter.item() for group in optimizer.param_groups for parameter in group["params"]]


def rates_of(optimizer: Any) -> Any:
    return [float(group["lr"]) for group in optimizer.param_groups]


# The optimizer and its options, at scale 2; the sum of all gradients is that of a step, so a step goes down by 0.2.
# fmt: off
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (SGD, {}),
    "SGD, fused": (SGD, {"fused": True}),
    "SGD, foreach": (SGD, {"foreach": True}),
    "SGD, a tensor": (SGD, {"lr": 0.1, "tensor": True}),
    "SGD, fused, a tensor": (SGD, {"fused": True, "tensor": True}),
    "Adam": (Adam, {"eps": 0.0}),
    "Adam, fused": (Adam, {"eps": 0.0, "fused": True}),
    "Adam, foreach": (Adam, {"eps": 0.0, "foreach": True}),
    "Adam, a tensor": (Adam, {"eps": 0.0, "tensor": True}),
    "Adam, fused, a tensor": (Adam, {"eps": 0.0, "fused": True, "tensor": True}),
    "AdamW without decay": (AdamW, {"eps": 0.0, "weight_decay": 0.0}),
    "super().step()": (Calls, {}),
    "super().step(closure)": (Makes, {}),
}
# fmt: on


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("with_closure", [False, True])
def test_every_step_is_scaled_once_and_shows_base_values(name: str, with_closure: bool) -> None:
    """A raw step, with nothing of Lightning around it."""
    kind, options = KINDS[name]
    lr: Any = tensor(0.1) if options.get("tensor") else 0.1
    optimizer = optimizer_of(kind, lr, **{key: value for key, value in options.items() if key not in ("tensor", "lr")})
    seen: list[float] = []
    optimizer.note = seen.append
    rates = attached(optimizer)
    optimizer.step(lambda: seen.append(rates_of(optimizer)[0])) if with_closure else optimizer.step()
    assert [pytest.approx(-0.2, rel=1e-7)] == values_of(optimizer)
    assert optimizer.param_groups[0]["lr"] is lr
    assert rates_of(optimizer) == [0.1]
    assert {0.1} >= set(seen)
    assert seen or not (with_closure or kind is Makes)
    assert counted_by(rates) == [1]
    rates.teardown()
    optimizer.step()
    assert [pytest.approx(-0.3, rel=1e-7)] == values_of(optimizer)


def test_capturable_rates_are_scaled() -> None:
    """Where the learning rate and the betas are tensors, as a captured graph needs them, they are written in place."""
    betas = (tensor(0.9), tensor(0.99))
    optimizer = optimizer_of(Adam, tensor(0.1), betas=betas, eps=0.0)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(None))
    rates = attached(optimizer, lr_scaling="adam_sde", scale=4)
    optimizer.register_step_pre_hook(lambda *_: seen.append([value.item() for value in betas]))
    optimizer.step()
    assert [None, pytest.approx([0.6, 0.96])] == seen
    assert [pytest.approx(-0.2)] == values_of(optimizer)
    assert [id(value) for value in betas] == [id(value) for value in optimizer.param_groups[0]["betas"]]
    assert [value.item() for value in betas] == [0.9, 0.99]
    assert rates.factors() == (2.0,)


def test_lbfgs_is_scaled() -> None:
    """It reads its rate before the closure; the first step is min(1, 1 / |g|) * lr * g."""
    optimizer = optimizer_of(torch.optim.LBFGS, max_iter=1)
    seen: list[float] = []

    def closure() -> torch.Tensor:
        seen.extend(rates_of(optimizer))
        return torch.zeros(())

    rates = attached(optimizer)
    optimizer.step(closure)
    assert ([pytest.approx(-0.2)], [0.1], [1]) == (values_of(optimizer), rates_of(optimizer), counted_by(rates))
    assert seen == [0.1]


def write(optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.3


def fail(optimizer: Any) -> None:
    raise KeyError


def step_again(optimizer: Any) -> None:
    optimizer.step()


def load(optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def add_and_fail(optimizer: Any) -> None:
    add_group(optimizer)
    raise KeyError


def fail_within(optimizer: Any) -> None:
    """Catch what a step within the closure raises."""
    with suppress(KeyError):
        optimizer.step(lambda: fail(optimizer))


def fail_before_within(optimizer: Any) -> None:
    """Catch what a hook raises in a step within the closure, whose groups are scaled by then."""
    hook = optimizer.register_step_pre_hook(lambda *_: fail(optimizer))
    with suppress(KeyError):
        optimizer.step()
    hook.remove()


# What the closure does; the parameters after that one step and after another one, and the base rates afterwards.
CLOSURES: dict[str, tuple[Any, list[float], list[float], list[float], list[int]]] = {
    "nothing": (lambda optimizer: None, [-0.2], [-0.4], [0.1], [2]),
    "writes a rate": (write, [-0.6], [-1.2], [0.3], [2]),
    "adds a group": (add_group, [-0.2, -0.02], [-0.4, -0.04], [0.1, 0.01], [2]),
    "loads a state": (load, [-0.2], [-0.4], [0.1], [2]),
    "raises": (fail, [0.0], [-0.2], [0.1], [1]),
    "adds a group and raises": (add_and_fail, [0.0, 0.0], [-0.2, -0.02], [0.1, 0.01], [1]),
    "steps": (step_again, [-0.4], [-0.6], [0.1], [3]),
    "catches a step that raises": (fail_within, [-0.2], [-0.4], [0.1], [2]),
    "catches a step that raises with scaled values": (fail_before_within, [-0.2], [-0.4], [0.1], [2]),
}


@pytest.mark.parametrize("kind", [SGD, Calls])
@pytest.mark.parametrize("name", CLOSURES)
def test_a_closure_sees_base_values_and_what_it_does_is_scaled(kind: Any, name: str) -> None:
    act, after_one, after_two, base, counted = CLOSURES[name]
    optimizer = optimizer_of(kind)
    rates = attached(optimizer)
    seen: list[float] = []

    def closure() -> None:
        seen.append(rates_of(optimizer)[0])
        act(optimizer)

    with suppress(KeyError):
        optimizer.step(closure)
    assert (pytest.approx(after_one), base, [0.1]) == (values_of(optimizer), rates_of(optimizer), seen)
    assert base == [group["lr"] for group in optimizer.state_dict()["param_groups"]]
    optimizer.step()
    assert (pytest.approx(after_two), base, counted) == (values_of(optimizer), rates_of(optimizer), counted_by(rates))


@pytest.mark.parametrize("lightning", [False, True])
def test_a_step_that_raises_leaves_base_values(lightning: bool) -> None:
    """Behind Lightning's step, and behind the training step in which a user took it."""
    optimizer = optimizer_of(Raises)
    rates = attached(optimizer)
    with suppress(KeyError):
        rates.optimizer_step(optimizer, optimizer.step) if lightning else optimizer.step()
    if not lightning:
        rates.end_failed_steps()
    assert ([0.1], [0]) == (rates_of(optimizer), counted_by(rates))
    with suppress(KeyError):
        optimizer.step()
    assert [pytest.approx(-0.4)] == values_of(optimizer)


def test_a_step_that_goes_on_without_its_closure_is_refused() -> None:
    optimizer = optimizer_of(Catches)
    rates = attached(optimizer)
    with pytest.raises(RuntimeError, match="the closure of a step of Catches raised, and the step went on"):
        optimizer.step(lambda: fail(optimizer))
    assert [0.1] == rates_of(optimizer)
    assert rates.factors() == (2.0,)


@pytest.mark.parametrize("lr", [0.1, tensor(0.1)])
def test_a_rate_that_the_optimizer_writes_is_a_scaled_one(lr: Any) -> None:
    optimizer = optimizer_of(Halves, lr)
    attached(optimizer)
    for value, base in ((-0.2, 0.05), (-0.3, 0.025)):
        optimizer.step()
        assert ([pytest.approx(value)], [pytest.approx(base)]) == (values_of(optimizer), rates_of(optimizer))


def test_groups_may_share_a_tensor() -> None:
    """As where the rate of the constructor is a tensor, which all groups without a rate have in common."""
    rate = tensor(0.1)
    optimizer = optimizer_of(SGD, rate)
    rates = attached(optimizer)
    late = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    late.grad = torch.ones_like(late)
    optimizer.add_param_group({"params": [late]})
    optimizer.step()
    assert ([pytest.approx(-0.2)] * 2, 0.1) == (values_of(optimizer), rate.item())
    assert {id(rate)} == {id(group["lr"]) for group in optimizer.param_groups}
    assert counted_by(rates) == [1]


@given(
    batches=st.lists(
        st.tuples(st.sampled_from(SCALES), st.sampled_from([None, 0.007, 0.3]), st.booleans()), max_size=6
    ),
    warmup=st.sampled_from([0, 3]),
    adam=st.booleans(),
)
def test_any_run_of_steps(batches: Any, warmup: int, adam: bool) -> None:
    """Under any scale, with rates that are written and steps that fail: bit by bit, base values between steps."""
    optimizer = optimizer_of(Adam if adam else SGD)
    rule = "adam_sde" if adam else "linear"
    rates = attached(optimizer, lr_scaling=rule, warmup=warmup)
    (group,) = optimizer.param_groups
    seen: list[dict[str, Any]] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(dict(group)))
    steps = 0
    for scale, written, fails in batches:
        follow(rates, scale)
        group["lr"] = group["lr"] if written is None else written
        base = dict(group)
        with suppress(KeyError):
            optimizer.step((lambda: fail(optimizer)) if fails else None)
        full, moments = SCALINGS[rule].factor(scale), SCALINGS[rule].moments
        factor = 1 + (full - 1) * steps / warmup if steps < warmup else full
        assert {**base, **moments(scale, base), "lr": base["lr"] * factor} == seen.pop()
        assert base == group
        steps += not fails
    assert counted_by(rates) == [steps]


class Forwards(torch.optim.Optimizer):
    """Wraps another optimizer, and never calls `Optimizer.__init__`."""

    def __init__(self, wrapped: torch.optim.Optimizer) -> None:
        self.wrapped = wrapped
        self.param_groups = wrapped.param_groups
        self.defaults = wrapped.defaults

    def step(self, closure: Any = None) -> Any:
        return self.wrapped.step(closure)


def test_an_optimizer_without_hooks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Forwards cannot be scaled: it never calls torch\.optim\.Optimizer\.__in"):
        attached(Forwards(optimizer_of(SGD)))


def test_a_step_past_the_hooks_is_an_error() -> None:
    """Unless a loss scaler, which skips steps, is there to skip it."""
    optimizer = optimizer_of(SGD)
    rates = attached(optimizer)
    with pytest.raises(
        RuntimeError, match=r"SGD took a step in which torch called no hook, so lr_scaling='linear' has"
    ):
        rates.optimizer_step(optimizer, lambda: None)
    cast(Any, rates.run.trainer).precision_plugin = SimpleNamespace(scaler=torch.amp.GradScaler("cpu"))
    rates.optimizer_step(optimizer, lambda: None)
    assert counted_by(rates) == [0]


def test_steps_that_a_loss_scaler_skips_do_not_count() -> None:
    optimizer = optimizer_of(SGD)
    (parameter,) = optimizer.param_groups[0]["params"]
    rates = attached(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for gradient, value, counted in ((math.inf, 0.0, 0), (0.5, -0.2, 1)):
        parameter.grad.fill_(gradient)
        scaler.scale(torch.ones(()))  # by 1, and after the step that is skipped by 0.5
        cast(Any, rates.run.trainer).precision_plugin = SimpleNamespace(scaler=scaler)
        rates.optimizer_step(optimizer, partial(scaler.step, optimizer))
        scaler.update()
        assert ([pytest.approx(value)], [0.1], [counted]) == (
            values_of(optimizer),
            rates_of(optimizer),
            counted_by(rates),
        )


def test_optimizers_that_come_later() -> None:
    """Those that replace others, and one that only Lightning's step knows; those of before go on counting."""
    before, late, unknown = (optimizer_of(SGD) for _ in range(3))
    rates = attached(before)
    before.step()
    rates.optimizer_step(unknown, unknown.step)
    rates.run.trainer.optimizers = [late, before]
    rates.attach([late, before])
    late.step()
    before.step()
    assert [pytest.approx(value) for value in (-0.2, -0.4, -0.2)] == [
        values_of(optimizer)[0] for optimizer in (late, before, unknown)
    ]
    assert counted_by(rates) == [1, 2]


def test_an_optimizer_in_the_list_of_the_trainer_is_scaled_from_the_next_batch() -> None:
    late = optimizer_of(SGD)
    rates = attached()
    rates.run.trainer.optimizers.append(late)
    rates.on_train_batch_start()
    late.step()
    assert [pytest.approx(-0.2)] == values_of(late)


def test_a_copy_of_an_optimizer_is_not_scaled() -> None:
    """As one that a callback makes to try a rate."""
    optimizer = optimizer_of(SGD)
    rates = attached(optimizer)
    copy = deepcopy(optimizer)
    copy.param_groups[0]["params"][0].grad = torch.ones(1, dtype=torch.float64)
    copy.step()
    assert ([pytest.approx(-0.1)], [0]) == (values_of(copy), counted_by(rates))


def test_infeasible_values_are_refused_before_any_group_changes() -> None:
    """When training begins, and in the step where a schedule has set them or a group brought them."""
    optimizer = optimizer_of(Adam)
    with pytest.raises(ValueError, match=r"scale 10 with beta1=0.9.*below 10\."):
        attached(optimizer, lr_scaling="adam_sde", scale=10)
    attached(optimizer, lr_scaling="adam_sde", scale=4)
    add_group(optimizer, lr=0.5)
    optimizer.param_groups[1]["betas"] = (0.5, 0.999)
    with pytest.raises(ValueError, match=r"scale 4 with beta1=0.5.*below 2\."):
        optimizer.step()
    assert ([0.1, 0.5], (0.9, 0.999)) == (rates_of(optimizer), optimizer.param_groups[0]["betas"])


@given(factors=st.tuples(COUNTS, COUNTS, COUNTS), base_ranks=COUNTS, base=st.integers(1, 10**6))
def test_scale_depends_on_the_global_batch_alone(factors: tuple[int, int, int], base_ranks: int, base: int) -> None:
    """Case 23. It is the ratio to the base batch; without one that of the ranks, also where no loader has a size."""
    total = math.prod(factors)
    for loader, ranks, window in itertools.permutations(factors):
        assert batch_scale([loader], window, world_size=ranks, base_batch_size=base) == BatchScale(total, base)
        batch = batch_scale([loader], window, world_size=ranks, base_world_size=base_ranks)
        assert batch == BatchScale(total, loader * window * base_ranks)
        unknown = batch_scale([loader, None], window, world_size=ranks, base_world_size=base_ranks)
        assert (batch.scale, False) == (unknown.scale, unknown.known)
        shared = batch_scale([loader * window], ranks, world_size=base_ranks, split_batches=True, base_batch_size=base)
        assert (shared, total / base) == (BatchScale(total, base), shared.scale)
        assert batch_scale([loader], world_size=ranks, split_batches=True) == BatchScale(loader, loader)


# The batch sizes of the loaders, the given global batch, and the batches on 2 ranks with 3 loader batches per step.
BATCHES: list[tuple[list[int | None], int | None, BatchScale]] = [
    ([8], None, BatchScale(48, 10)),
    ([8, 4], None, BatchScale(72, 10)),
    ([8, 8], None, BatchScale(96, 10)),
    ([8], 48, BatchScale(48, 10)),
    ([None], 100, BatchScale(100, 10)),
    ([8, None], 100, BatchScale(100, 10)),
]


@pytest.mark.parametrize(("sizes", "given_size", "expected"), BATCHES)
def test_all_loaders_of_a_step_count(sizes: Any, given_size: Any, expected: BatchScale) -> None:
    batch = batch_scale(sizes, 3, world_size=2, base_batch_size=10, global_batch_size=given_size)
    assert batch == expected


# fmt: off
UNKNOWN_BATCHES: list[tuple[list[int | None], dict[str, Any], str]] = [
    ([8, None], {"base_batch_size": 64},
     r"base_batch_size=64 needs .* batch sizes \[8, None\]. Give the loader.*or use base_world_size"),
    ([8], {"base_batch_size": 64, "global_batch_size": 17},
     r"global_batch_size=17, but the training loaders and the Trainer make 16 samples of one optimizer step"),
    ([8], {"global_batch_size": 16}, r"global_batch_size=16 is compared with base_batch_size, which is not given"),
    ([8], {"base_batch_size": 64, "global_batch_size": 0}, r"global_batch_size must be an integer >= 1, got 0"),
]
# fmt: on


@pytest.mark.parametrize(("sizes", "options", "message"), UNKNOWN_BATCHES)
def test_batches_that_are_not_known(sizes: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch_scale(sizes, world_size=2, **options)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lr_scaling", SCALINGS)
def test_multipliers_of_a_step_are_those_of_a_toy(rule: str, lr_scaling: str) -> None:
    """The multiplier is the step of equal samples over the base step on one node, computed by the rule itself."""

    def gradient(size: int, nodes: int) -> float:
        """Return the reduced gradient of samples with the gradient 1, each on a rank of its own."""
        pairs = [share_of(RULES[rule], Place(rank, size, 0, size // nodes), 1.0) for rank in range(size)]
        return sum(w for w, _ in pairs) / sum(z for _, z in pairs)

    for size, nodes in itertools.product((8, 16, 32, 128), (1, 2)):
        growth = gradient(size, nodes) / gradient(16, 1)
        factor = SCALINGS[lr_scaling].factor(size / 16)
        message = counted_twice(rule, SCALINGS[lr_scaling], size / 16, nodes=nodes)
        assert bool(message) == (factor != 1 and growth != pytest.approx(1))
        assert not message or f"an SGD step is {growth * factor:.6g} times the base step" in message


class Named(dict[str, Any]):
    """A JSON object, whose keys are attributes."""

    def __getattr__(self, key: str) -> Any:
        return self[key]


def planned(recipe: Recipe, devices: int, **options: Any) -> Named:
    made = make_plan(recipe, devices_per_node=devices, **options)
    plan: Named = json.loads(json.dumps(made), object_hook=Named)
    return plan


def lrs(run: Named) -> dict[str, float | None]:
    values = {outcome.lr_scaling: outcome.hyperparameters for outcome in run.scalings}
    return {rule: None if found is None else found["lr"] for rule, found in values.items()}


def outcome(run: Named, name: str) -> Named:
    (found,) = [outcome for outcome in run.scalings if outcome.lr_scaling == name]
    return found


# Base batch, global batch, and the lengths of 5 base steps and of a warm-up of 3.
LENGTHS = [(320, 96, 17, 10), (3, 10, 2, 1), (2, 4, 3, 2), (4, 2, 10, 6)]


@pytest.mark.parametrize(("base", "total", "steps", "warmup"), LENGTHS)
def test_lengths_of_a_plan_are_rounded_half_up(base: int, total: int, steps: int, warmup: int) -> None:
    """5 * 320 / 96 is 16.67 steps, and 5 * 3 / 10 is 1.5."""
    run = planned(Recipe(base, 0.01, steps=5, warmup_steps=3), 1, global_batch_size=total).gradavg
    assert (steps, warmup) == (run.steps, run.warmup_steps)


def test_a_plan_of_a_trillion_devices_is_made_at_once() -> None:
    """Their chunks are counted, not listed: one number too many on a command line must not hang it."""
    chunks = planned(Recipe(10**12 + 1, 0.1), 10**6, nodes=10**6).gradavg.chunks
    assert [(2, 1), (1, 10**12 - 1)] == [(chunk.samples, chunk.devices) for chunk in chunks]


def test_the_question_of_the_threads() -> None:
    plan = planned(Recipe(16, 0.01), 2, nodes=2)
    assert [(chunk.samples, chunk.devices) for chunk in plan.gradavg.chunks] == [(4, 4)]
    assert (plan.gradavg.global_batch_size, plan.gradavg.scale, plan.gradavg.accumulate) == (16, 1.0, 1)
    assert lrs(plan.gradavg) == {"none": 0.01, "linear": 0.01, "sqrt": 0.01, "adam_sde": None}
    assert (plan.stock_ddp.global_batch_size, plan.stock_ddp.scale) == (64, 4.0)
    assert lrs(plan.stock_ddp) == {"none": 0.01, "linear": 0.04, "sqrt": 0.02, "adam_sde": None}
    assert plan.stock_ddp.mean_loss_gradient == "mean of 4 means"
    assert plan.stock_ddp.sum_loss_gradient == "sum over 64, 4 times too small"


def test_a_plan_is_that_of_the_readme() -> None:
    """One process's curve takes the preset; pieces take its cut alone, as the preset refuses batch norm in pieces."""
    assert "GradAvgStrategy(equivalent_to='single_device'))" in planned(Recipe(16, 0.01), 2).code[1]
    pieces = planned(Recipe(16, 0.01), 2, max_device_batch_size=4).code[1]
    assert "GradAvgStrategy(split_batches=True, max_device_batch_size=4))" in pieces


def test_a_plan_says_what_becomes_of_accumulation() -> None:
    plan = planned(Recipe(8, 0.1, accumulate_grad_batches=3), 2)
    assert ["DataLoader(dataset, batch_size=24)"] == plan.code[:1]
    assert plan.notes[0].startswith("The 3 batches that the base run accumulates are one batch here")
    assert not any("accumulates" in note for note in planned(Recipe(8, 0.1), 2).notes)


def test_lines_of_a_plan_end_without_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--batch-size", "8", "--lr", "0.1", "--devices-per-node", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [line.rstrip() for line in lines]


@given(size=st.integers(1, 10**6), parts=COUNTS)
def test_nearest_even_batches_are_even_and_nearest(size: int, parts: int) -> None:
    plan = planned(Recipe(size, 0.1), parts)
    nearest = tuple(plan.nearest_even_batch_sizes)
    assert all(batch % parts == 0 and batch > 0 for batch in nearest)
    if size % parts == 0:
        assert nearest == (size,)
    else:
        assert nearest[-1] - parts < size < nearest[-1]
        assert nearest[:-1] == ((nearest[-1] - parts,) if size > parts else ())
    uneven = f"cannot be shared evenly by {parts} devices.* evenly: {' and '.join(map(str, nearest))}\\."
    assert bool(size % parts) == any(re.search(uneven, note) for note in plan.notes)


@given(size=st.integers(1, 500), devices=st.integers(1, 8), limit=st.none() | COUNTS)
def test_micro_batches_are_those_of_split_batches(size: int, devices: int, limit: int | None) -> None:
    run = planned(Recipe(size, 0.1), devices, max_device_batch_size=limit).gradavg
    chunks = [chunk for chunk in run.chunks for _ in range(chunk.devices)]
    for rank, chunk in enumerate(chunks):
        split = Split(rank, devices, max_samples=limit)
        own = [piece.samples for piece in split.cut(size).pieces]
        assert len(own) <= run.accumulate
        assert (sum(own), max(own, default=0)) == (chunk.samples, chunk.micro_batch_size)


@given(size=st.integers(1, 400), batch=st.integers(1, 40), ranks=st.integers(1, 8), window=st.integers(1, 4))
def test_steps_per_epoch_of_stock_ddp_are_those_of_its_sampler(size: int, batch: int, ranks: int, window: int) -> None:
    samples = TensorDataset(torch.arange(size))
    loader: DataLoader[Any] = DataLoader(
        samples, batch_size=batch, sampler=DistributedSampler(samples, num_replicas=ranks, rank=0)
    )
    recipe = Recipe(batch, 0.1, accumulate_grad_batches=window, dataset_size=size)
    plan = planned(recipe, ranks)
    assert plan.stock_ddp.steps_per_epoch == math.ceil(len(loader) / window)
    assert plan.gradavg.steps_per_epoch == math.ceil(size / (batch * window))


@given(batch=st.integers(2, 64), smoothing=st.sampled_from([0.5, 0.8, 0.9, 0.95, 0.97]))
def test_the_largest_feasible_batch_is_feasible_and_the_next_is_not(batch: int, smoothing: float) -> None:
    recipe = Recipe(batch, 1e-3, optimizer="adam", betas=(smoothing, 0.99))
    plan = planned(recipe, 1, global_batch_size=batch * 64)
    refused = outcome(plan.gradavg, "adam_sde")
    assert refused.hyperparameters is None
    assert f"not feasible at scale 64 with beta1={smoothing}" in refused.problem
    assert "lr_scaling='sqrt'" in plan.code[1]
    largest = refused.largest_global_batch_size
    for size, feasible in ((largest, True), (largest + 1, False)):
        fits = outcome(planned(recipe, 1, global_batch_size=size).gradavg, "adam_sde").problem is None
        assert fits is feasible


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"lr": math.nan}, "lr must be finite and > 0, got nan"),
        ({"optimizer": "lion"}, "optimizer 'lion' is not known. Use one of sgd, adam, adamw"),
        ({"optimizer": "adam", "betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
        ({"steps": 0}, "steps must be an integer >= 1, got 0"),
        ({"warmup_steps": -1}, "warmup_steps must be an integer >= 0, got -1"),
        ({"steps": 10, "warmup_steps": 11}, "warmup_steps=11 is longer than the recipe's 10 steps"),
    ],
)
def test_impossible_recipes_are_quoted(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**{"batch_size": 16, "lr": 0.1, **options})
