"""What a comparison found: the verdict, why, what to do, and what was compared; as text, as JSON and as a picture.

There are three verdicts. A run is *equal* only if everything was compared and nothing differs; it is *different* if
something does; and where something could not be compared it is *not shown*, and the report says what. Causes carry
their text with them.
"""

from __future__ import annotations

import importlib
import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_gradavg.tree import mapped

__all__ = [
    "CAUSES",
    "EXIT_CODES",
    "STAGES",
    "Cause",
    "Finding",
    "Report",
    "Stage",
    "explanation",
    "plot_report",
    "plotting",
    "times",
]

SCHEMA = 2
"""Version of the JSON output; raised when a field changes its name or its meaning, not when one is added."""

EXIT_CODES: Mapping[str, int] = {"equal": 0, "different": 1, "not shown": 3}
"""Of the console command, by verdict; 2 is wrong usage or a run that failed."""

STAGES = (
    "initial weights",
    "samples",
    "reduced gradient",
    "clipped gradient",
    "optimizer options",
    "weights",
    "buffers",
    "logged values",
)
"""In the order in which a step goes through them."""

_MOST_ROWS = 60  # of the picture
_WIDTH = 120


@dataclass(frozen=True)
class Cause:
    """Why a run on several processes parts from one process.

    Attributes:
        name: What reports call it.
        plain: What it means, for a reader who does not know the name.
        advice: What to do, in one line.
        text: More about it, for `gradavg verify --explain`.
        option: An option of `GradAvgStrategy` that mends it, as `name=value`, or "".
        code: The change to the user's module, or "".
        otherwise: What to do where that option is set already.
        ours: Whether `GradAvgStrategy` mends it by itself.
    """

    name: str
    plain: str
    advice: str
    text: str
    option: str = ""
    code: str = ""
    otherwise: str = ""
    ours: bool = False

    def remedy(self, strategy: str, rule: str, used: Mapping[str, bool]) -> dict[str, str]:
        """Return what to do in a run, as advice and diff, in which the options in use are `...`.

        Args:
            strategy: The class of the run's strategy.
            rule: Its reduction.
            used: Which options are set already, by their names, and "GradAvgStrategy" for the strategy itself.
        """
        name, _, value = self.option.partition("=")
        has = used.get(name, False) or (name == "reduction" and value.strip('"') == rule)
        lines = [self.code] if self.code else []
        if (self.option and not has) or (self.ours and not used.get("GradAvgStrategy", False)):
            old = (
                f'..., reduction="{rule}"'
                if name == "reduction" and used.get("GradAvgStrategy") and rule != "mean"
                else "..."
            )
            new = f"..., {self.option}" if self.option else "..."
            lines += ["+from lightning_gradavg import GradAvgStrategy"] * (not used.get("GradAvgStrategy", False))
            lines.append(f"-trainer = Trainer(strategy={strategy}({old}), ...)")
            lines.append(f"+trainer = Trainer(strategy=GradAvgStrategy({new}), ...)")
        return {"advice": self.otherwise if has and self.otherwise else self.advice, "diff": "\n".join(lines)}


_WEIGHT = (
    " def training_step(self, batch, batch_idx):\n"
    "     ...\n"
    "-    return loss\n"
    '+    return {"loss": loss, "weight": n}  # n: the terms of the mean, such as (targets != -100).sum()'
)

CAUSES: Mapping[str, Cause] = MappingProxyType(
    {
        cause.name: cause
        for cause in (
            Cause(
                "initial weights",
                "the run starts from other weights than one process",
                "seed before the module is built, and build the same module on all processes",
                "The module may not depend on the rank or the number of processes. `seed_everything` belongs"
                " before it is"
                " built.",
                code="+seed_everything(0)\n model = Net()",
            ),
            Cause(
                "unsynchronised replicas",
                "the ranks hold different weights or gradients",
                "let every backward go through the strategy, and every rank do the same",
                "A backward went past the strategy, a parameter was unfrozen after DDP had counted them, or"
                " one rank did"
                " something of its own. Call `self.manual_backward(loss)` and the module itself, not a part"
                " that DDP does"
                " not wrap; change weights on all ranks alike.",
                code="-    loss.backward()\n+    self.manual_backward(loss)",
            ),
            Cause(
                "different optimizers",
                "the ranks' optimizers have different options",
                "let configure_optimizers return the same on all ranks",
                "The ranks' optimizers, or their options, are not the same, so that their weights part.",
            ),
            Cause(
                "duplicated stream",
                "all ranks train on the same samples",
                "let every rank read its own part, or use GradAvgStrategy(split_batches=True)",
                "All ranks read the same samples, as of an `IterableDataset` that does not ask for its rank. Split the"
                " stream by rank, or let `GradAvgStrategy(split_batches=True)` share out each batch.",
                option="split_batches=True",
                otherwise="remove sharded_by_rank, or have every rank read its own part",
            ),
            Cause(
                "padding",
                "some samples are trained on twice, to fill the ranks",
                "use GradAvgStrategy(split_batches=True): no sample is repeated to fill a rank",
                "`DistributedSampler` repeats samples until all ranks have equally many: those count twice in"
                " the last step"
                " of every epoch.",
                option="split_batches=True",
                otherwise="look at the sampler: it repeats samples",
            ),
            Cause(
                "unread samples",
                "some samples are never trained on",
                "shard the data once: by hand, or by Lightning's sampler, not by both",
                "In an epoch the ranks together read fewer samples than one process, as where the data are"
                " sharded by hand"
                " and Lightning's `DistributedSampler` shards each part again.",
                code="+trainer = Trainer(use_distributed_sampler=False, ...)",
            ),
            Cause(
                "data order",
                "one process would train on these samples in another order",
                "use GradAvgStrategy(split_batches=True), which keeps the order of one process",
                "A global batch holds other samples than one process trains on at that place. For training"
                " Lightning replaces"
                " a sequential or random sampler by `DistributedSampler(shuffle=True)`. Where a sampler"
                " shuffles, or every"
                " rank reads its own part in order, it is a note.",
                option="split_batches=True",
                otherwise="have the ranks read in the order of one process",
            ),
            Cause(
                "batch norm",
                "batch norm sees only the samples of its own rank",
                'use GradAvgStrategy(equivalent_to="single_device"), or sync_batchnorm=True on GPUs',
                "Each rank normalizes by its own samples, and rank 0's running statistics are kept; so do accumulated"
                " micro-batches. Group norm has no such statistics. If those of a chunk are what you tuned with, use"
                ' `equivalent_to="data_parallel"`.',
                option='equivalent_to="single_device"',
                otherwise="compute the statistics over all ranks",
            ),
            Cause(
                "detached gather",
                "outputs were gathered from all ranks, and no gradient flows back to those of the other ranks",
                "gather with gradients: lightning_gradavg.gather, or self.all_gather(rows, sync_grads=True)",
                "`torch.distributed.all_gather` and `self.all_gather(rows)` detach: the loss is right, and its"
                " gradient lacks"
                " what each sample contributes as another's negative.",
                code="-    every = self.all_gather(rows)\n+    every = gather(rows)  # from lightning_gradavg"
                " import gather",
            ),
            Cause(
                "non-decomposable loss",
                "the loss compares samples with each other, and a rank has only its own",
                "compute it on all outputs: training_step_end or lightning_gradavg.gather",
                "The loss compares samples (contrastive, variances, ranking), or a hook on batches normalizes"
                " by those of a"
                " rank: the gradient over a batch is no combination of those over its parts.",
                code="+from lightning_gradavg import gather\n"
                " def training_step(self, batch, batch_idx):\n"
                "     rows = self(batch)\n"
                "-    return contrast(rows, rows)\n"
                "+    return contrast(rows, gather(rows))  # this rank's rows against those of all",
            ),
            Cause(
                "sum loss",
                "the loss is a sum over samples, but the ranks' gradients were averaged",
                'use GradAvgStrategy(reduction="sum"), or a mean in training_step',
                "Too small by the number of ranks and accumulated micro-batches. Adam hides the factor;"
                " clipping and weight"
                ' decay do not. `"normalized_sum"` with a weight is the mean of the sums.',
                option='reduction="sum"',
            ),
            Cause(
                "constant term",
                "a part of the loss that depends on no sample, such as a penalty, is added once by every rank",
                "leave it to the optimizer's weight_decay, or divide it by the ranks and micro-batches of a step",
                "A term of a sum loss that depends on no sample is added once per rank and micro-batch, on one"
                " process once.",
                code="-    return data_loss + penalty\n"
                "+    share = self.trainer.world_size * self.trainer.accumulate_grad_batches\n"
                "+    return data_loss + penalty / share",
            ),
            Cause(
                "mean of means",
                "means over different numbers of terms were averaged as if they were equal",
                'use GradAvgStrategy(reduction="weighted_mean"); where the mean is not over samples, return its weight',
                "The ranks' losses are means over different numbers of terms (last batch, padded tokens, class"
                " weights). Where"
                ' the mean is not over samples, `return {"loss": loss, "weight": n}`.',
                option='reduction="weighted_mean"',
                code=_WEIGHT,
            ),
            Cause(
                "counts",
                "the ranks are weighted, but not by the terms of their losses",
                'return {"loss": loss, "weight": n} with the number of terms that the loss is a mean of',
                "Weighted by samples where the loss is a mean over tokens, or means are added up. Terms with their own"
                " denominators are named.",
                option='reduction="weighted_mean"',
                code=_WEIGHT,
            ),
            Cause(
                "short window",
                "an accumulation window with fewer micro-batches is divided by the full number",
                "use GradAvgStrategy, which divides by the micro-batches that a window has",
                "The last accumulation window of an epoch has fewer micro-batches, and stock Lightning divides by"
                " `accumulate_grad_batches` all the same.",
                ours=True,
            ),
            Cause(
                "hand-compensated loss",
                "the ranks' losses carry a factor that the reduction does not undo",
                'remove the factor from the loss, or use reduction="mean" where the report says that it is right',
                "The same samples have another loss on a rank than on one process, as by `local_sum * world_size /"
                " global_count`. The factors of the ranks are shown.",
                code="-    return loss * factor\n+    return loss",
            ),
            Cause(
                "double division",
                "divided twice: by the run's own code, and by the reduction",
                "divide once: leave the division to the strategy",
                "Divided by hand, in loss, hook or gradient, and by the reduction. A `ddp_comm_hook` returns"
                " the mean over"
                " ranks; a loss is that of its own samples.",
                code="-    return loss / world_size\n+    return loss",
            ),
            Cause(
                "clipped before the reduction",
                "every rank clips its own gradient, and the clipped ones are reduced",
                "clip after the reduction: leave it to the Trainer",
                "The mean of clipped gradients is not the clipped mean. Clip by `gradient_clip_val` or, in manual"
                " optimization, between `manual_backward` and the step.",
                code="-    # clipping in a hook on parameters, or in a ddp_comm_hook\n"
                "+trainer = Trainer(gradient_clip_val=norm, ...)",
            ),
            Cause(
                "gradient hooks",
                "a hook changes every rank's gradient before it is reduced",
                "change the gradient after the reduction, in on_before_optimizer_step",
                "A hook on parameters changes each rank's gradient before the reduction, and not by a factor.",
                code="-    parameter.register_hook(change)\n"
                "+    def on_before_optimizer_step(self, optimizer):\n"
                "+        for parameter in self.parameters():\n"
                "+            parameter.grad = change(parameter.grad)",
            ),
            Cause(
                "bf16 wire",
                "gradients travel as bfloat16",
                "send gradients in their own type, if this matters; to accept it, --tolerance 0.02",
                "Gradients were rounded to bfloat16 on the way: 3 significant digits.",
            ),
            Cause(
                "fp16 wire",
                "gradients travel as float16",
                "send gradients in their own type, if this matters; to accept it, --tolerance 0.002",
                "Gradients were rounded to float16 on the way: 3 to 4 digits, nothing beyond 65504 or much"
                " below 6e-5. Prefer"
                " bfloat16 where gradients are large or small.",
            ),
            Cause(
                "learning-rate scale",
                "the learning rate depends on the number of processes",
                "leave the learning rate alone, or state it: GradAvgStrategy(lr_scaling=...)",
                "For the same global batch it should not. Say what it was tuned for by `lr_scaling` and"
                " `base_batch_size`,"
                " which is no finding.",
                code="-    return SGD(self.parameters(), lr=self.lr * self.trainer.world_size)\n"
                "+    return SGD(self.parameters(), lr=self.lr)",
            ),
            Cause(
                "optimizer options",
                "options of the optimizer depend on the number of processes",
                "let configure_optimizers not depend on the number of processes",
                "Another option of the optimizer, such as weight decay, depends on the number of processes."
                " Let it depend on"
                " the global batch, if on anything.",
            ),
            Cause(
                "weights beside the gradient",
                "gradient and options are those of one process, and the weights are not",
                "look at what changes weights beside the gradient: an average, a clamp, a hook such as"
                " on_train_batch_end",
                "An average of weights, a clamp, or an optimizer of your own does otherwise on several"
                " processes. Let it not"
                " depend on rank or number of processes.",
            ),
            Cause(
                "buffers of one rank",
                "buffers follow the samples of one rank",
                "gather over the ranks what training_step writes to the buffer",
                "A buffer (a count, a moving average, a queue of keys) follows the samples of rank 0, whose"
                " buffers DDP sends"
                " to all.",
            ),
            Cause(
                "logged value",
                "a logged value is not that of one process; the training is",
                "log the mean over the samples, or what belongs to it as weight",
                "What is trained is the same, and what is logged is not: a loss that is summed over ranks by"
                " hand, or a mean"
                " of means under `sync_dist=True`.",
            ),
            Cause(
                "unexplained",
                "there is a difference, and nothing that is known predicts it",
                "look at the first stage that differs, and verify with --steps 1",
                "The report says what is known: the stage, the tensor, and a factor.",
            ),
        )
    }
)
"""All causes."""


@dataclass(frozen=True)
class Stage:
    """One stage, over all compared steps.

    Attributes:
        name: One of `STAGES`.
        status: "equal", "differs", "note" where what differs does not count, or "not compared".
        step: The first step that differs, from 0, or None.
        note: What there is to say in words.
    """

    name: str
    status: str
    step: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Finding:
    """A named cause.

    Attributes:
        cause: A key of `CAUSES`.
        stage: The stage in which it shows first.
        detail: What was found, with numbers.
        step: The first global batch in which it shows, from 0.
        difference: Where the tensor differs that differs most, or None: `name`, `relative`, `found`, `expected`,
            `factor`.
        advice: What to do about it.
        diff: The same as a change to the script, or "".
        note: Whether it is only to be known.
    """

    cause: str
    stage: str
    detail: str
    step: int = 0
    difference: Any = None
    advice: str = ""
    diff: str = ""
    note: bool = False

    @property
    def is_difference(self) -> bool:
        """Whether it makes the run another than that of one process; if not, it is a note."""
        return not self.note

    @property
    def factor(self) -> float | None:
        """Run / one process where that is one number."""
        return None if self.difference is None else self.difference.factor


@dataclass(frozen=True)
class Report:
    """The result of a comparison; `str()` of it is what the command prints.

    Attributes:
        strategy: The strategy of the run.
        reduction: Its rule.
        world_size: Its number of ranks.
        steps: The number of global batches compared.
        tolerance: The largest relative difference that counts as equal.
        stages: All stages, in order.
        findings: The causes, that of the first difference first.
        gradients: For every parameter, the relative difference of the reduced gradient in every step.
        remarks: What could not be compared, and why; and what is known of steps beyond those compared.
        precision: What both runs computed in.
    """

    strategy: str
    reduction: str
    world_size: int
    steps: int
    tolerance: float
    stages: Sequence[Stage]
    findings: Sequence[Finding] = ()
    gradients: Mapping[str, Sequence[float]] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    precision: str = "float64"

    @property
    def verdict(self) -> str:
        """One of "equal", "different" and "not shown"."""
        if self.first is not None:
            return "different"
        return "not shown" if self.remarks or self.steps == 0 else "equal"

    @property
    def equal(self) -> bool:
        """Whether the run was shown to be that of one process, within the tolerance."""
        return self.verdict == "equal"

    @property
    def first(self) -> Finding | None:
        """The finding that leads: the first step and stage in which the run parts from one process."""
        return next((finding for finding in self.findings if finding.is_difference), None)

    def without(self, causes: Sequence[str]) -> Report:
        """Return the report without the findings of some causes, whose stages are notes then."""
        kept = [finding for finding in self.findings if finding.cause not in causes]
        meant = {finding.stage for finding in self.findings} - {finding.stage for finding in kept}
        stages = [replace(stage, status="note") if stage.name in meant else stage for stage in self.stages]
        return replace(self, findings=kept, stages=stages)

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints: numbers that JSON has not, such as infinity, as None."""
        findings = [
            {
                **asdict(finding),
                "is_difference": finding.is_difference,
                "factor": finding.factor,
                "plain": CAUSES[finding.cause].plain,
                "text": CAUSES[finding.cause].text,
            }
            for finding in self.findings
        ]
        own = {"schema": SCHEMA, "equal": self.equal, "verdict": self.verdict}
        plain: dict[str, Any] = mapped({**own, **asdict(self), "findings": findings}, _finite)
        return plain

    def __str__(self) -> str:
        lines = [_verdict(self)]
        for finding in self.findings:
            lines += _lines_of(finding)
        lines += _wrapped(self.remarks, "not shown: ")
        console = Console(width=_WIDTH, file=io.StringIO(), highlight=False)
        console.print(_stages(self))
        lines.append(console.file.getvalue().rstrip())  # type: ignore[attr-defined]  # a StringIO
        ranks, steps = _counted("rank", self.world_size), _counted("optimizer step", self.steps)
        lines.append(
            f"{self.strategy}, reduction {self.reduction!r}, {ranks}, {steps}, both runs in {self.precision}."
            f" Equal: up to a relative difference of {self.tolerance:g}."
        )
        return "\n".join(line.rstrip() for line in "\n".join(lines).splitlines())


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


_NEAR = 1e-3
_TIMES = {
    0.5: "half of",
    1 / 3: "a third of",
    0.25: "a quarter of",
    2.0: "twice",
    3.0: "three times",
    4.0: "four times",
}


def times(factor: float) -> str:
    """Return a factor in words: "half of", "twice", "0.875 x"."""
    return next((word for value, word in _TIMES.items() if abs(factor / value - 1) < _NEAR), f"{factor:.4g} x")


def _counted(word: str, number: int) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


_WITHOUT_FINDING = {
    "equal": "EQUAL: every step is that of one process.",
    "not shown": "NOT SHOWN: no step was seen to differ from that of one process, but not all was compared.",
}


def _verdict(report: Report) -> str:
    first = report.first
    if first is None:
        return _WITHOUT_FINDING[report.verdict]
    return f"DIFFERENT, from step {first.step} on, in {first.stage}: {CAUSES[first.cause].plain} ({first.cause})."


def _wrapped(texts: Sequence[str], label: str = "") -> list[str]:
    return [
        line
        for text in texts
        for line in textwrap.wrap(label + text, _WIDTH, initial_indent="  ", subsequent_indent="    ")
    ]


def _lines_of(finding: Finding) -> list[str]:
    cause, each = CAUSES[finding.cause], finding.difference
    texts = [finding.detail]
    if each is not None and math.isfinite(each.found) and math.isfinite(each.expected):
        texts.append(f"{each.name} is {each.found:.6g}, on one process {each.expected:.6g}")
    head = [f"  {cause.name}: {cause.plain}; this is a note"] if finding.note else []
    script = [f"    {line}" for line in finding.diff.splitlines() if not finding.note]
    return [*head, *_wrapped(texts), *_wrapped([f"Do: {finding.advice}."] * (not finding.note)), *script]


def _stages(report: Report) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for heading in ("stage", "", "first in step", "what"):
        table.add_column(heading, overflow="fold")
    for stage in report.stages:
        table.add_row(stage.name, stage.status, "" if stage.step is None else str(stage.step), stage.note)
    return table


def explanation(name: str) -> str:
    """Return what there is to say about a cause."""
    cause = CAUSES[name]
    text = textwrap.fill(cause.text, _WIDTH - 2)
    remedy = cause.remedy("DDPStrategy", "mean", {})
    script = f"\n\n{textwrap.indent(remedy['diff'], '  ')}" if remedy["diff"] else ""
    return f"{name}: {cause.plain}.\n\n{text}\n\nDo: {cause.advice}.{script}"


def plot_report(report: Report, path: str | Path) -> None:
    """Write a picture of the reduced gradient's relative difference per parameter and step.

    Of more than 60 parameters those that differ most are drawn, in their order.

    Args:
        report: The report.
        path: The file, of a type that matplotlib writes; PNG without a suffix.

    Raises:
        RuntimeError: If matplotlib is not installed.
    """
    figure_module, colors = plotting()
    largest = {name: max(map(_drawn, values), default=0.0) for name, values in report.gradients.items()}
    names = sorted(sorted(largest, key=lambda name: -largest[name])[:_MOST_ROWS], key=list(largest).index)
    steps = max((len(report.gradients[name]) for name in names), default=1)
    rows = [[*map(_drawn, report.gradients[name]), *[1e-16] * steps][:steps] for name in names] or [[1e-16]]
    figure = figure_module.Figure(figsize=(4 + 0.6 * steps, 1.8 + 0.2 * len(names)), layout="constrained")
    axes = figure.subplots()
    most = max(value for row in rows for value in row)
    norm = colors.LogNorm(vmin=report.tolerance / 1e3, vmax=max(10 * report.tolerance, most), clip=True)
    image = axes.imshow(rows, aspect="auto", norm=norm, cmap="magma", interpolation="nearest")
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_xticks(range(steps))
    axes.set_xlabel("optimizer step")
    left_out = len(report.gradients) - len(names)
    more = f"; {left_out} parameters that differ less are left out" if left_out else ""
    axes.set_title((report.verdict if report.first is None else report.first.cause) + more, fontsize=8)
    bar = figure.colorbar(image, ax=axes)
    bar.set_label("relative difference of the reduced gradient", fontsize=7)
    bar.ax.axhline(report.tolerance, color="white")
    figure.savefig(path, dpi=150)


def plotting() -> tuple[Any, Any]:
    """Return the parts of matplotlib that a picture needs.

    Raises:
        RuntimeError: If matplotlib is not installed.
    """
    try:
        return importlib.import_module("matplotlib.figure"), importlib.import_module("matplotlib.colors")
    except ImportError as error:
        raise RuntimeError("the plot needs matplotlib, which is not installed: pip install matplotlib") from error


def _drawn(value: float) -> float:
    return max(value, 1e-16) if math.isfinite(value) else 1.0  # a logarithm needs a number
