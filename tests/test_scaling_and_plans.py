"""Scalings: the published formulas, the global batch, and groups that hold base values between steps; and plans."""

from __future__ import annotations

import itertools
import json
import math
import re
from contextlib import nullcontext
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
    pairs = ((1000, 4.0), (5, 2.0), (1, 64.0), (0, 4.0), (100, 0.25))
    assert [scaled_steps(steps, scale) for steps, scale in pairs] == [250, 3, 1, 0, 400]


BASE = 1000
"""The base batch."""
SCALES = (4.0, 3.0, 0.7, 9.0, 1.0)
VALUES = (None, 0.007, 0.3)
"""Rates that a user writes. Divided by some factors and multiplied again, 0.007 has other bits, and vice versa 0.1."""


def make(kind: str) -> torch.optim.Optimizer:
    """Return an optimizer with one group at 0.1 and one at 0.01, or with tensors for rates, two or one in common."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.1, 0.01)]
    optimizer: torch.optim.Optimizer = torch.optim.Adam(groups) if kind == "adam" else torch.optim.SGD(groups)
    tensors = [torch.tensor(lr, dtype=torch.float64) for lr in (0.1, 0.01)]
    for group, tensor in zip(optimizer.param_groups, tensors, strict=True):
        group["lr"] = {"tensors": tensor, "shared": tensors[0]}.get(kind, group["lr"])
    return optimizer


def moving(groups: Any) -> list[dict[str, Any]]:
    held = [{name: group[name] for name in ("lr", "betas", "eps") if name in group} for group in groups]
    return [{**group, "lr": float(group["lr"])} for group in held]


def follow(rates: Rates, scale: float) -> None:
    rates.prepare_loaders("train")
    rates.add_loader(round(scale * BASE))


def attached(
    *optimizers: torch.optim.Optimizer, lr_scaling: str = "linear", scale: float = 4, warmup: int = 0
) -> Rates:
    rates = Rates(GradAvgStrategy()._options, lr_scaling=lr_scaling, base_batch_size=BASE, lr_warmup_steps=warmup)
    trainer = SimpleNamespace(callbacks=[], optimizers=list(optimizers))
    loop = SimpleNamespace(accumulation=1)
    rates.run = cast(Any, SimpleNamespace(world=World(), trainer=trainer, loop=loop))
    rates.setup_optimizers(optimizers)
    follow(rates, scale)
    return rates


def counted_by(rates: Rates) -> Any:
    saved: dict[str, Any] = {}
    rates.save(saved, {})
    return saved["rates"]["steps"]


@pytest.mark.parametrize("kind", ["sgd", "adam", "tensors", "shared"])
@given(
    batches=st.lists(
        st.tuples(st.sampled_from(SCALES), st.sampled_from(VALUES), st.booleans(), st.sampled_from([0, 1, 2])),
        max_size=6,
    ),
    warmup=st.sampled_from([0, 3]),
)
def test_groups_hold_scaled_values_in_a_step_and_base_values_between(kind: str, batches: Any, warmup: int) -> None:
    """Under any scale, with rates that are written, groups that are added, and steps that fail."""
    rule, steps, optimizer = "adam_sde" if kind == "adam" else "linear", 0, make(kind)
    rates, groups = attached(optimizer, lr_scaling=rule, warmup=warmup), optimizer.param_groups
    tensors = [group["lr"] for group in groups if isinstance(group["lr"], torch.Tensor)]

    def step(expected: Any, fails: bool) -> None:
        assert moving(groups) == expected
        if fails:
            raise KeyError

    for scale, written, fails, changed in batches:
        if changed == 2:
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.5})
        base = moving(groups)
        rates.scale_groups()
        follow(rates, scale)
        assert moving(groups) == base
        full, moments = SCALINGS[rule].factor(scale), SCALINGS[rule].moments
        factor = 1 + (full - 1) * steps / warmup if steps < warmup else full
        expected = [{**group, **moments(scale, group), "lr": group["lr"] * factor} for group in base]
        assert rates.learning_rates() == tuple(group["lr"] for group in expected)
        rates.scale_groups()
        assert moving(groups) == expected
        for group in [] if written is None else [0, 1] if kind == "shared" else [changed]:
            expected[group]["lr"], base[group]["lr"] = written, written / factor
            groups[group]["lr"] = tensors[group].fill_(written) if group < len(tensors) else written
        assert moving(rates.optimizer_state(optimizer, optimizer.state_dict())["param_groups"]) == base
        with pytest.raises(KeyError) if fails else nullcontext():
            rates.optimizer_step(optimizer, partial(step, expected, fails))
        steps += not fails
        assert moving(groups) == base
        assert all(group["lr"] is tensor for group, tensor in zip(groups, tensors, strict=False))
    assert counted_by(rates) == [steps]


def added(optimizer: Any, lr: Any = 0.5) -> None:
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr})


def added_twice(optimizer: Any) -> None:
    added(optimizer)
    added(optimizer, 0.3)


def added_by_default(optimizer: Any) -> None:
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


def saved_and_loaded(optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def written_saved_and_loaded(optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.8
    optimizer.load_state_dict(optimizer.state_dict())


def removed(optimizer: Any) -> None:
    del optimizer.param_groups[0]


def removed_and_back(optimizer: Any) -> None:
    group = optimizer.param_groups.pop(0)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.5})
    optimizer.param_groups.append(group)


# What a user does to the groups within a step, and the base rates from then on; by default there is one of 0.001.
CHANGES: dict[str, tuple[Any, list[float]]] = {
    "a group": (added, [0.1, 0.01, 0.5]),
    "a group at the default rate": (added_by_default, [0.1, 0.01, 0.001]),
    "a state of this step": (saved_and_loaded, [0.1, 0.01]),
    "a rate and a state of this step": (written_saved_and_loaded, [0.2, 0.01]),
    "a state of before": (lambda optimizer: optimizer.load_state_dict(make("sgd").state_dict()), [0.1, 0.01]),
    "no first group": (removed, [0.01]),
    "the first group as the last": (removed_and_back, [0.01, 0.5, 0.1]),
    "two groups": (added_twice, [0.1, 0.01, 0.5, 0.3]),
}


@pytest.mark.parametrize(("change", "base"), CHANGES.values(), ids=CHANGES)
def test_groups_that_change_within_a_step_are_scaled_in_it(change: Any, base: list[float]) -> None:
    """And they are at rest afterwards, in checkpoints, too."""
    optimizer = make("sgd")
    rates = attached(optimizer)
    rates.scale_groups()
    change(optimizer)
    assert pytest.approx([4 * lr for lr in base]) == [group["lr"] for group in optimizer.param_groups]
    assert pytest.approx([4 * lr for lr in base]) == list(rates.learning_rates())
    saved = rates.optimizer_state(optimizer, optimizer.state_dict())["param_groups"]
    assert base == [group["lr"] for group in saved]
    used = rates.optimizer_step(optimizer, lambda: [group["lr"] for group in optimizer.param_groups])
    assert pytest.approx([4 * lr for lr in base]) == used
    for _ in range(2):
        assert base == [group["lr"] for group in optimizer.param_groups]
        assert {"add_param_group", "load_state_dict"}.isdisjoint(vars(optimizer))
        rates.scale_groups()
        rates.restore_groups()


def test_a_group_past_the_method_of_torch_is_scaled_when_the_optimizer_steps() -> None:
    optimizer = make("sgd")
    rates = attached(optimizer)
    rates.scale_groups()
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [], "lr": 0.5})
    used = rates.optimizer_step(optimizer, lambda: [group["lr"] for group in optimizer.param_groups])
    assert pytest.approx([0.4, 0.04, 2]) == used
    assert [0.1, 0.01, 0.5] == [group["lr"] for group in optimizer.param_groups]


def test_a_new_group_may_share_a_tensor_with_one_that_is_scaled() -> None:
    """As where the rate of the constructor is a tensor, which all groups without a rate have in common."""
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate)
    rates = attached(optimizer)
    rates.scale_groups()
    added_by_default(optimizer)
    assert [rate, rate] == [group["lr"] for group in optimizer.param_groups]
    assert pytest.approx(0.4) == rate.item()
    rates.restore_groups()
    assert rate.item() == 0.1


def test_a_report_leaves_out_groups_without_a_rate() -> None:
    """As of Adafactor, which may compute its own."""
    optimizer = make("sgd")
    rates = attached(optimizer, lr_scaling="none")
    optimizer.param_groups[0]["lr"] = None
    assert rates.learning_rates() == (0.01,)


def test_optimizers_that_come_later() -> None:
    """One that was not returned is scaled in its steps; those of before go on counting."""
    before, late = make("sgd"), make("sgd")
    rates = attached(before)
    for _ in range(2):
        rates.optimizer_step(before, lambda: None)
    assert pytest.approx([0.4, 0.04]) == rates.optimizer_step(late, lambda: [one["lr"] for one in late.param_groups])
    assert [0.1, 0.01] == [one["lr"] for one in late.param_groups]
    assert counted_by(rates) == [2]
    rates.run.trainer.optimizers = [make("sgd"), before]
    assert counted_by(rates) == [0, 2]
    rates.scale_groups()
    assert [[0.4, 0.04]] * 2 == [[one["lr"] for one in each.param_groups] for each in rates.run.trainer.optimizers]
    rates.setup_optimizers(rates.run.trainer.optimizers)
    assert counted_by(rates) == [0, 2]


def test_infeasible_values_are_refused_before_any_group_changes() -> None:
    optimizer = make("adam")
    for beta, scale, limit in ((0.9, 10, 10), (0.5, 4, 2)):
        optimizer.param_groups[1]["betas"] = (beta, 0.999)  # as a schedule sets them
        rates, before = attached(optimizer, lr_scaling="adam_sde", scale=scale), moving(optimizer.param_groups)
        with pytest.raises(ValueError, match=rf"scale {scale} with beta1={beta}.*below {limit}\."):
            rates.scale_groups()
        assert before == moving(optimizer.param_groups)


def test_an_infeasible_group_that_is_added_leaves_the_others_at_rest() -> None:
    optimizer = make("adam")
    rates = attached(optimizer, lr_scaling="adam_sde", scale=4)
    rates.scale_groups()
    with pytest.raises(ValueError, match=r"scale 4 with beta1=0.5.*below 2\."):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.5, "betas": (0.5, 0.999)})
    rates.restore_groups()
    assert [0.1, 0.01, 0.5] == [group["lr"] for group in optimizer.param_groups]


@given(factors=st.tuples(COUNTS, COUNTS, COUNTS), base_ranks=COUNTS, base=st.integers(1, 10**6))
def test_scale_depends_on_the_global_batch_alone(factors: tuple[int, int, int], base_ranks: int, base: int) -> None:
    """Case 23. It is the ratio to the base batch; without one that of the ranks, also where no loader has a size."""
    total = math.prod(factors)
    for loader, ranks, window in itertools.permutations(factors):
        assert batch_scale([loader], window, world_size=ranks, base_batch_size=base) == BatchScale(total, base)
        batch = batch_scale([loader] * 2, window, world_size=ranks, base_world_size=base_ranks)
        assert batch == BatchScale(total, loader * window * base_ranks)
        unknown = batch_scale([loader, None], window, world_size=ranks, base_world_size=base_ranks)
        assert (batch.scale, False) == (unknown.scale, unknown.known)
        shared = batch_scale([loader * window], ranks, world_size=base_ranks, split_batches=True, base_batch_size=base)
        assert (shared, total / base) == (BatchScale(total, base), shared.scale)
        assert batch_scale([loader], world_size=ranks, split_batches=True) == BatchScale(loader, loader)


def test_a_base_batch_needs_the_size_of_a_batch() -> None:
    with pytest.raises(ValueError, match=r"base_batch_size=64 needs .* batch sizes \[8, 4\]. Give the loader"):
        batch_scale([8, 4], world_size=2, base_batch_size=64)


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


def test_the_question_of_the_threads() -> None:
    plan = planned(Recipe(16, 0.01), 2, nodes=2)
    assert [(chunk.samples, chunk.devices) for chunk in plan.gradavg.chunks] == [(4, 4)]
    assert (plan.gradavg.global_batch_size, plan.gradavg.scale, plan.gradavg.accumulate) == (16, 1.0, 1)
    assert lrs(plan.gradavg) == {"none": 0.01, "linear": 0.01, "sqrt": 0.01, "adam_sde": None}
    assert (plan.stock_ddp.global_batch_size, plan.stock_ddp.scale) == (64, 4.0)
    assert lrs(plan.stock_ddp) == {"none": 0.01, "linear": 0.04, "sqrt": 0.02, "adam_sde": None}
    assert plan.stock_ddp.mean_loss_gradient == "mean of 4 means"
    assert plan.stock_ddp.sum_loss_gradient == "sum over 64, 4 times too small"


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
