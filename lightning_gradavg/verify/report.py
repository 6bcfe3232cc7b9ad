"""What a comparison found: the verdict, the findings, the stages; as text, as JSON and as a picture.

There are three verdicts. A run is *equal* only if every stage was compared and none differs; it is *different* if one
does; and where something was taken for granted instead of compared it is *not shown*, and the report says what.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_gradavg.tree import mapped
from lightning_gradavg.verify.causes import CAUSES
from lightning_gradavg.verify.compare import Difference

__all__ = ["EXIT_CODES", "SCHEMA", "STAGES", "Finding", "Report", "Stage", "plot_report", "print_report", "times"]

SCHEMA = 1
"""Version of the JSON output; raised when a field changes its name or its meaning, not when one is added."""

EXIT_CODES: Mapping[str, int] = {"equal": 0, "different": 1, "not shown": 3}
"""Of the console command, by verdict; 2 is wrong usage or a run that failed."""

STAGES = (
    "initial weights",
    "samples",
    "outputs",
    "loss",
    "local gradients",
    "reduced gradient",
    "clipped gradient",
    "optimizer update",
    "buffers",
    "random state",
)
"""In the order in which a step goes through them."""

_MOST_ROWS = 60  # of the picture


@dataclass(frozen=True)
class Stage:
    """One stage, over all recorded steps.

    Attributes:
        name: One of `STAGES`.
        status: "equal"; "differs"; "note" where what differs does not count; "not needed" where a later stage tells as
            much; "not compared".
        step: The first step that differs, from 0, or None.
        difference: Of that step, the first tensor that differs; of an equal stage, the largest of all; or None.
        note: What there is to say in words.
    """

    name: str
    status: str
    step: int | None = None
    difference: Difference | None = None
    note: str = ""


@dataclass(frozen=True)
class Finding:
    """A named cause.

    Attributes:
        cause: A key of `CAUSES`.
        stage: The stage in which it shows first.
        detail: What was found, with numbers.
        step: The first optimizer step in which it shows, from 0; None where it concerns the run.
        difference: The first tensor that differs there, or None.
        advice: What to do about it.
        diff: The same as a change to the script, or "".
        note: Whether it is only to be known.
    """

    cause: str
    stage: str
    detail: str
    step: int | None = None
    difference: Difference | None = None
    advice: str = ""
    diff: str = ""
    note: bool = False

    @property
    def is_difference(self) -> bool:
        """Whether it makes the run another than the reference; if not, it is a note."""
        return CAUSES[self.cause].is_difference and not self.note

    @property
    def factor(self) -> float | None:
        """Run / reference where that is one number."""
        return None if self.difference is None else self.difference.factor


@dataclass(frozen=True)
class Report:
    """The result of a comparison.

    Attributes:
        strategy: The strategy of the run.
        reduction: Its rule.
        world_size: Its number of ranks.
        steps: The number of optimizer steps compared.
        reference: What the run was compared with, in words.
        tolerance: The largest relative difference that counts as equal.
        stages: All stages, in order.
        findings: The causes, the first to part first.
        gradients: For every parameter, the relative difference of the reduced gradient in every step.
        remarks: What could not be compared, and why; and what is known of steps beyond those compared.
    """

    strategy: str
    reduction: str
    world_size: int
    steps: int
    reference: str
    tolerance: float
    stages: Sequence[Stage]
    findings: Sequence[Finding]
    gradients: Mapping[str, Sequence[float]] = field(default_factory=dict)
    remarks: Sequence[str] = ()

    @property
    def verdict(self) -> str:
        """One of "equal", "different" and "not shown"."""
        if self.first is not None:
            return "different"
        open_ = self.remarks or any(stage.status in ("differs", "not compared") for stage in self.stages)
        return "not shown" if open_ or self.steps == 0 else "equal"

    @property
    def equal(self) -> bool:
        """Whether the run was shown to be the reference, within the tolerance."""
        return self.verdict == "equal"

    @property
    def first(self) -> Finding | None:
        """The finding that leads: the first step and stage in which the run parts from the reference."""
        return next((finding for finding in self.findings if finding.is_difference), None)

    def without(self, causes: Sequence[str]) -> Report:
        """Return the report without the findings of some causes, whose stages are notes then.

        Raises:
            ValueError: If a cause is unknown.
        """
        for cause in sorted(set(causes) - set(CAUSES)):
            raise ValueError(f"{cause!r} is not a cause; use some of {', '.join(map(repr, CAUSES))}")
        kept = [finding for finding in self.findings if finding.cause not in causes]
        meant = {finding.stage for finding in self.findings} - {finding.stage for finding in kept}
        # What leads to an ignored difference differs, too.
        meant |= set(STAGES[2:5]) if meant & set(STAGES[2:6]) else set()
        stages = [
            replace(stage, status="note") if stage.name in meant and stage.status == "differs" else stage
            for stage in self.stages
        ]
        return replace(self, findings=kept, stages=stages)

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints: numbers that JSON has not, such as infinity, as None."""
        findings = [
            {
                **asdict(finding),
                "is_difference": finding.is_difference,
                "factor": finding.factor,
                "plain": CAUSES[finding.cause].plain,
                "page": CAUSES[finding.cause].page,
            }
            for finding in self.findings
        ]
        own = {"schema": SCHEMA, "equal": self.equal, "verdict": self.verdict}
        plain: dict[str, Any] = mapped({**own, **asdict(self), "findings": findings}, _plain)
        return plain


def _plain(value: Any) -> Any:
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


def print_report(report: Report, console: Console) -> None:
    """Print a report: the verdict, why, what to do; then the stages."""
    lines = [line for finding in report.findings for line in _lines_of(finding)]
    lines += [f"  not shown: {remark}" for remark in report.remarks]
    lines.append(
        f"\n{report.strategy}, reduction {report.reduction!r}, {_counted('rank', report.world_size)}"
        f", {_counted('optimizer step', report.steps)}, against {report.reference}."
        f" Equal: up to a relative difference of {report.tolerance:g}."
    )
    console.print(_verdict(report), style="bold", markup=False, soft_wrap=True)
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    console.print(_stages(report))


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
    return f"DIFFERENT, from step {first.step} on: {CAUSES[first.cause].plain} ({first.cause})."


def _lines_of(finding: Finding) -> list[str]:
    cause, each = CAUSES[finding.cause], finding.difference
    values = [] if each is None else [f"{each.name} is {each.found:.6g}, on one process {each.expected:.6g}"]
    script = [f"  {line}" for line in finding.diff.splitlines()]
    lines = [finding.detail, *values, f"Do: {finding.advice}.", *script, f"See: {cause.page}"]
    note = "; this is a note" * (not finding.is_difference)
    return [f"\n{finding.cause}: {cause.plain}{note}", *(f"  {line}" for line in lines)]


def _stages(report: Report) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for heading in ("stage", "", "first in step", "what", "relative difference", "factor"):
        table.add_column(heading, overflow="fold")
    for stage in report.stages:
        table.add_row(stage.name, stage.status, _shown(stage.step), *_what(stage))
    return table


def _what(stage: Stage) -> tuple[str, str, str]:
    """Return what there is to say of a stage, how large the difference is, and its factor."""
    each = stage.difference
    if each is None or stage.note:
        return stage.note, "", ""
    if each.relative == 0:
        return "the same bits", "", ""
    return each.name, f"{each.relative:.1e}", _shown(each.factor, ".6g")


def _shown(number: float | None, form: str = "") -> str:
    return "" if number is None else format(number, form)


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
    rows = [[_drawn(value) for value in report.gradients[name]] for name in names]
    figure = figure_module.Figure(figsize=(4 + 0.6 * report.steps, 1.8 + 0.2 * len(names)), layout="constrained")
    axes = figure.subplots()
    most = max((value for row in rows for value in row), default=1.0)
    norm = colors.LogNorm(vmin=report.tolerance / 1e3, vmax=max(10 * report.tolerance, most), clip=True)
    image = axes.imshow(rows, aspect="auto", norm=norm, cmap="magma", interpolation="nearest")
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_xticks(range(report.steps))
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
