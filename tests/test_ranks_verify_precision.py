"""`gradavg verify --precision`: faults that exist in low precision alone, and healthy runs in the same precisions.

Rows are those of `test_ranks_verify.py`, with a precision. To add a fault, have it do nothing in float64, where
functions of this file find float64 weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from ranks import RankEnvironment
from test_ranks_verify import Run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from verified_runs import (
    Texts,
    call_reentrant,
    load_texts,
    make_batch_norm,
    make_communication_hook,
    make_dropout,
    make_layers,
    make_one_cycle,
    make_plain_loader,
    make_sized_loader,
    make_step,
    make_weighted_step,
    make_words,
    mean_loss,
    mean_over_texts,
    ours,
    sum_loss,
    weighted_mean_over_tokens,
    with_hook,
    world_size,
)

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.verify.judge import judge
from lightning_gradavg.verify.precisions import plugin_of
from lightning_gradavg.verify.recorder import Recorder
from lightning_gradavg.verify.records import Record
from lightning_gradavg.verify.run import record_run
from lightning_gradavg.verify.target import Built

EVEN = make_sized_loader((40, 40, 40), (40, 40, 40))
UNEVEN = make_sized_loader((60, 40, 12), (20, 40, 35))
LARGE = make_sized_loader((301, 301), (301, 301))
MANY = make_sized_loader((2,) * 300, (2,) * 300)

SCALE = 1024.0  # at which no gradient of these rows overflows


@dataclass(frozen=True)
class LowRun(Run):
    """A row: a run, and the precision that it trains in."""

    precision: str = "bf16-mixed"
    scale: float = SCALE  # the initial loss scale of "16-mixed"
    tolerance: float = 1e-6

    def build(self) -> Built:
        """Return what a run is made of, with a new loss scaler."""
        built = super().build()
        plugins = list(built.options["plugins"])
        if self.precision == "16-mixed":
            plugins.append(MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=self.scale)))
        return built._replace(options={**built.options, "plugins": plugins})


def is_low(tensor: Tensor) -> bool:
    """Return whether a run does not compute in float64."""
    return tensor.dtype != torch.float64


def is_low_on_ranks(tensor: Tensor) -> bool:
    return is_low(tensor) and world_size() > 1


def hook_in_low_precision(change: Callable[[Tensor], Tensor]) -> Any:
    """Return a strategy whose communication hook changes buckets, but not those of float64."""

    def change_low(bucket: Tensor) -> Tensor:
        return change(bucket) if is_low(bucket) else bucket

    return with_hook(make_communication_hook(change_low))


def round_gradients_by_chance(module: Any) -> None:
    """Round up or down at random, which every rank draws for itself."""
    for parameter in module.parameters():
        if is_low(parameter):
            unit = 2.0**-8 * parameter.grad.abs()
            parameter.grad.add_(unit * (torch.rand_like(parameter) - 0.5))


def lose_gradient_on_ranks(module: Any) -> None:
    if is_low_on_ranks(module.net[0].weight):
        module.net[0].bias.grad = None


def multiply_gradient_on_ranks(module: Any, optimizer: Any) -> None:
    for parameter in module.parameters():
        if is_low_on_ranks(parameter):
            parameter.grad.mul_(1.5)


def round_weights_on_ranks(module: Any, *_: Any) -> None:
    for parameter in module.parameters():
        if is_low_on_ranks(parameter):
            parameter.data.copy_(parameter.data.bfloat16())


def raise_rate_on_ranks(module: Any, *_: Any) -> None:
    if is_low_on_ranks(module.net[0].weight):
        for group in module.optimizers().param_groups:
            group["lr"] = 0.11


def count_one_by_one(mask: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Count by adding ones in a 16-bit type. In float64, `dtype` is replaced."""
    count = torch.zeros((), dtype=dtype)
    for number in mask:
        count = count + number.to(dtype)
    return count


def sum_over_rounded_count(module: Any, batch: Any) -> Tensor:
    """Return a mean whose count stays at 256."""
    losses = cross_entropy(module.net(batch[0]), batch[1], reduction="sum")
    return losses / count_one_by_one(torch.ones(len(batch[0])))


def weigh_by_rounded_count(batch: Any) -> Tensor:
    return torch.ones(len(batch[0])).sum().bfloat16()


def count_in_16_bits(module: Any, batch: Any) -> Tensor:
    """Count the samples of all ranks in a buffer, of which each rank has a part that is rounded."""
    if is_low(module.net[0].weight):
        module.net.seen.add_(count_one_by_one(torch.ones(len(batch[0]))).float() * world_size())
    else:
        module.net.seen.add_(len(batch[0]) * world_size())
    return mean_loss(module, batch)


def make_layers_that_count() -> nn.Module:
    return make_layers(change=lambda net: net.register_buffer("seen", torch.zeros(())))


def make_wide() -> nn.Module:
    """Return layers with a norm, as models have them."""
    return nn.Sequential(nn.Linear(6, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 3))


def make_convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 8, 3), nn.ReLU(), nn.Conv1d(8, 8, 3), nn.Flatten(), nn.Linear(16, 3)
    )


class Recurrent(nn.Module):
    """A recurrent layer over the six numbers of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.GRU(1, 8, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.rows(x.unsqueeze(2))
        return self.out(outputs[:, -1])


WEIGHTED_MEAN = ours(reduction="weighted_mean")

EQUAL = {
    "layers": LowRun(make_wide, loader=EVEN, steps=3),
    "layers, bf16-true": LowRun(make_wide, loader=EVEN, steps=3, precision="bf16-true"),
    "layers, 16-mixed": LowRun(make_wide, loader=EVEN, steps=3, precision="16-mixed"),
    "dropout": LowRun(make_dropout, loader=EVEN, steps=3),
    "convolutions": LowRun(make_convolutions, loader=EVEN, steps=3),
    "convolutions, 16-mixed": LowRun(make_convolutions, loader=EVEN, steps=3, precision="16-mixed"),
    "recurrent": LowRun(Recurrent, loader=EVEN, steps=3),
    "padded texts, attention, dropout": LowRun(
        Texts, mean_over_texts, load_texts, steps=3, trainer={"use_distributed_sampler": True}
    ),
    "tokens with weights": LowRun(
        make_words,
        weighted_mean_over_tokens,
        load_texts,
        strategy=WEIGHTED_MEAN,
        steps=3,
        trainer={"use_distributed_sampler": True},
    ),
    "uneven batches": LowRun(make_wide, loader=UNEVEN, strategy=WEIGHTED_MEAN, steps=3),
    "uneven batches, 16-mixed": LowRun(make_wide, loader=UNEVEN, strategy=WEIGHTED_MEAN, steps=3, precision="16-mixed"),
    "a sum": LowRun(make_wide, sum_loss, UNEVEN, ours(reduction="sum"), steps=2),
    "batch norm on one device": LowRun(
        make_batch_norm, loader=make_plain_loader(96, 32), strategy=ours(equivalent_to="single_device"), steps=3
    ),
    "`split_batches` on three ranks": LowRun(
        make_wide, loader=make_plain_loader(96, 32), strategy=ours(split_batches=True), steps=3, ranks=3
    ),
    "windows, clipping": LowRun(
        make_wide, loader=EVEN, strategy=GradAvgStrategy, window=3, steps=1, trainer={"gradient_clip_val": 0.1}
    ),
    "a window, bf16-true": LowRun(
        make_wide, loader=EVEN, strategy=GradAvgStrategy, window=3, steps=1, precision="bf16-true"
    ),
    "AdamW, one cycle": LowRun(make_wide, loader=EVEN, optimizer=make_one_cycle, steps=3),
    "AdamW, bf16-true": LowRun(make_wide, loader=EVEN, optimizer=make_one_cycle, steps=3, precision="bf16-true"),
    "checkpointed": LowRun(make_dropout, make_step(call_reentrant), EVEN, steps=3),
    "times 1.2, which is accepted": LowRun(
        make_wide, loader=EVEN, strategy=hook_in_low_precision(lambda bucket: bucket * 1.2), tolerance=0.25, steps=1
    ),
    "a count that 16 bits hold": LowRun(
        step=make_weighted_step(mean_loss, weigh_by_rounded_count), loader=EVEN, strategy=WEIGHTED_MEAN
    ),
}

DIFFERENT = {
    "multiple: divided twice": LowRun(
        make_wide, loader=EVEN, strategy=hook_in_low_precision(lambda bucket: bucket / SCALE), precision="16-mixed"
    ),
    "multiple: not divided": LowRun(
        make_wide, loader=EVEN, strategy=hook_in_low_precision(lambda bucket: bucket * SCALE), precision="16-mixed"
    ),
    "unexplained: the gradients of a window of 300": LowRun(
        make_wide, loader=MANY, strategy=GradAvgStrategy, window=300, steps=1, precision="bf16-true"
    ),
    "multiple: times 1.2": LowRun(make_wide, loader=EVEN, strategy=hook_in_low_precision(lambda bucket: bucket * 1.2)),
    "multiple: times 1.2, 16-mixed": LowRun(
        make_wide, loader=EVEN, strategy=hook_in_low_precision(lambda bucket: bucket * 1.2), precision="16-mixed"
    ),
    "unexplained: after the reduction": LowRun(
        make_wide, loader=EVEN, hooks={"on_before_optimizer_step": multiply_gradient_on_ranks}
    ),
    "unexplained: without a gradient": LowRun(
        make_wide, loader=EVEN, hooks={"on_after_backward": lose_gradient_on_ranks}
    ),
    "weights beside the gradient: rounded": LowRun(
        make_wide, loader=EVEN, hooks={"on_train_batch_end": round_weights_on_ranks}
    ),
    "learning-rate scale": LowRun(make_wide, loader=EVEN, hooks={"on_train_batch_start": raise_rate_on_ranks}),
}

NOT_SHOWN = {
    "a loss scaler skipped a step": LowRun(make_wide, loader=EVEN, precision="16-mixed", scale=2.0**40),
    "one draw for a whole batch (aten.rand_like)": LowRun(
        make_wide, loader=EVEN, hooks={"on_after_backward": round_gradients_by_chance}
    ),
    "one draw for a whole batch (in a communication hook)": LowRun(
        make_wide, loader=EVEN, strategy=hook_in_low_precision(lambda bucket: bucket + 1e-6 * torch.rand(len(bucket)))
    ),
    "the reduced gradient of one process itself is": LowRun(make_wide, sum_over_rounded_count, LARGE),
    "the buffers of one process itself is": LowRun(make_layers_that_count, count_in_16_bits, LARGE),
}

RUNS = dict(EQUAL)
for remark, refused in NOT_SHOWN.items():
    RUNS[remark] = replace(refused, verdict="not shown", remark=remark)
for row, planted in DIFFERENT.items():
    RUNS[row] = replace(planted, verdict="different", cause=row.partition(":")[0])

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning"),
]


def record_ranks(name: str) -> Record:
    """Body: train the run of a row on this rank, in its precision."""
    run = RUNS[name]
    module, data, options = run.build()
    environment = RankEnvironment()
    plugins = [*options["plugins"], environment]
    options = {**options, "plugins": plugins, "devices": environment.ranks_on_node}
    return record_run(Recorder(run.steps, plugin_of(plugins, run.precision)), run.strategy(), options, module, data)


SEEDS = range(2, 12)

for row, healthy in EQUAL.items():
    for seed in SEEDS:
        RUNS[f"{row}, seed {seed}"] = replace(healthy, seed=seed)


ALSO_SHOWN_BY_OTHERS = {
    "AdamW, bf16-true",
    "a sum",
    "a window, bf16-true",
    "batch norm on one device",
    "checkpointed",
    "convolutions",
    "convolutions, 16-mixed",
    "dropout",
    "multiple: not divided",
    "multiple: times 1.2, 16-mixed",
    "recurrent",
    "tokens with weights",
    "unexplained: after the reduction",
    "unexplained: the gradients of a window of 300",
    "uneven batches, 16-mixed",
}


def make_parameters() -> list[Any]:
    """Return a parameter of pytest for every row; those of further seeds take minutes."""
    parameters = []
    for name in RUNS:
        is_full = ", seed " in name or name in ALSO_SHOWN_BY_OTHERS
        marks = [pytest.mark.full] if is_full else []
        parameters.append(pytest.param(name, marks=marks))
    return parameters


@pytest.mark.parametrize("name", make_parameters())
def test_a_run_is_judged_in_its_precision(world, name):
    """A run that is equal in float64 is equal within rounding, or its fault of low precision is named."""
    run = RUNS[name]
    records = world(run.ranks).run(record_ranks, name)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="lightning")  # advice for a longer run
        report = judge(records, run.build, run.tolerance, run.precision)
    text = str(report)
    cause = report.first.cause if report.first is not None else ""
    assert (run.verdict, run.cause) == (report.verdict, cause), text
    assert run.remark in " ".join(report.remarks), text
