"""What a comparison found: the verdict, why, and what to do; as text, as JSON and as a picture.

A run is *equal* if everything was compared and nothing differs. It is *different* if something does. Where something
could not be compared it is *not shown*, and the report says what. `causes.yaml` holds the text of the causes.
"""

from __future__ import annotations

import heapq
import importlib
import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from lightning_gradavg.tree import mapped

__all__ = [
    "CAUSES",
    "EXIT_CODES",
    "STAGES",
    "Cause",
    "Difference",
    "Finding",
    "Report",
    "Stage",
    "explanation",
    "plot_report",
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
    """Why a run on several processes differs from one process; `causes.yaml` says what the fields mean."""

    name: str
    plain: str
    text: str
    advice: str
    option: str = ""
    otherwise: str = ""
    code: str = ""

    def remedy(self, strategy: str, rule: str, used: Collection[str]) -> tuple[str, str]:
        """Return what to do in a run, as advice and as a diff, in which `...` are the options that it keeps.

        Args:
            strategy: The class of the run's strategy.
            rule: Its reduction.
            used: The options that are set already, and "GradAvgStrategy" for the strategy itself.
        """
        name, _, value = self.option.partition("=")
        if name in used or value == f'"{rule}"':
            return self.otherwise or self.advice, self.code
        ours = "GradAvgStrategy" in used
        old = f'..., reduction="{rule}"' if ours and name == "reduction" and rule != "mean" else "..."
        switch = [
            *["+from lightning_gradavg import GradAvgStrategy"] * (not ours),
            f"-trainer = Trainer(strategy={strategy}({old}), ...)",
            f"+trainer = Trainer(strategy=GradAvgStrategy(..., {self.option}), ...)",
        ]
        return self.advice, "\n".join(filter(None, [self.code, *switch * bool(self.option)]))


CAUSES: Mapping[str, Cause] = {
    name: Cause(name, **texts)
    for name, texts in yaml.safe_load(Path(__file__).with_name("causes.yaml").read_text("utf-8")).items()
}


@dataclass(frozen=True)
class Difference:
    """Where a tensor of the run differs from that of one process.

    Attributes:
        name: Its parameter, buffer or value.
        relative: The largest absolute difference over the largest absolute value.
        found: The run's value where they differ most.
        expected: That of one process.
        factor: Run / one process where everything that differs is that multiple, or None.
    """

    name: str
    relative: float
    found: float
    expected: float
    factor: float | None = None


@dataclass(frozen=True)
class Stage:
    """One stage, over all compared steps.

    Attributes:
        name: One of `STAGES`.
        status: "equal", "differs", "note" where a difference does not count, or "not compared".
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
        difference: What the tensor that differs most differs by, or None.
        advice: What to do about it.
        diff: The same as a change to the script, or "".
        note: Whether it does not make the run different.
    """

    cause: str
    stage: str
    detail: str
    step: int = 0
    difference: Difference | None = None
    advice: str = ""
    diff: str = ""
    note: bool = False

    @property
    def is_difference(self) -> bool:
        """Whether it makes the run differ from one process; if not, it is a note."""
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
        """Whether the run was shown to equal one process, within the tolerance."""
        return self.verdict == "equal"

    @property
    def first(self) -> Finding | None:
        """The leading finding, of the first step and stage in which the run differs from one process."""
        return next((finding for finding in self.findings if finding.is_difference), None)

    def without(self, causes: Collection[str]) -> Report:
        """Return the report without the findings of some causes, whose stages are notes then."""
        kept = [finding for finding in self.findings if finding.cause not in causes]
        meant = {finding.stage for finding in self.findings} - {finding.stage for finding in kept}
        stages = [replace(stage, status="note") if stage.name in meant else stage for stage in self.stages]
        return replace(self, findings=kept, stages=stages)

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints, in which infinity and NaN are None.

        These are the fields above, `schema` (2), `equal` and `verdict`. Findings also have `is_difference`, `factor`,
        and the cause's `plain` and `text`.
        """
        of_causes = [{"plain": CAUSES[one.cause].plain, "text": CAUSES[one.cause].text} for one in self.findings]
        of_findings = [{"is_difference": one.is_difference, "factor": one.factor} for one in self.findings]
        given = {"schema": SCHEMA, "equal": self.equal, "verdict": self.verdict, **asdict(self)}
        given["findings"] = [a | b | c for a, b, c in zip(given["findings"], of_findings, of_causes, strict=True)]
        plain: dict[str, Any] = mapped(given, _finite)
        return plain

    def __str__(self) -> str:
        lines = [_headline(self), *(line for finding in self.findings for line in _lines_of(finding))]
        lines += [_filled(f"not shown: {remark}") for remark in self.remarks]
        rows = [("stage", "", "first in step", "what")]
        rows += [(one.name, one.status, "" if one.step is None else str(one.step), one.note) for one in self.stages]
        table = ["  {:18} {:13} {:14} {}".format(*row).rstrip() for row in rows]
        how = (
            f"{self.strategy}, reduction {self.reduction!r}, ranks: {self.world_size}, optimizer steps: {self.steps},"
            f" both runs in {self.precision}. Equal: a relative difference of up to {self.tolerance:g}."
        )
        return "\n".join([*lines, "", *table, "", how])


def _headline(report: Report) -> str:
    first = report.first
    if first is not None:
        where = f"from step {first.step} on, in the {first.stage}"
        return f"DIFFERENT, {where}: {CAUSES[first.cause].plain} ({first.cause})."
    if report.equal:
        return "EQUAL: every step matches one process."
    return "NOT SHOWN: no step differs from one process, but not everything could be compared."


def _lines_of(finding: Finding) -> list[str]:
    cause, each, values = CAUSES[finding.cause], finding.difference, list[str]()
    if each is not None and math.isfinite(each.found) and math.isfinite(each.expected):
        values = [f"{each.name} is {each.found:.6g}, but {each.expected:.6g} on one process"]
    if finding.note:
        return [_filled(text) for text in (f"note: {cause.plain} ({cause.name})", finding.detail, *values)]
    texts = (finding.detail, *values, f"Do: {finding.advice}.")
    return [*map(_filled, texts), *(f"    {line}" for line in finding.diff.splitlines())]


def _filled(text: str) -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent="  ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


_TIMES = {0.5: "half of", 1 / 3: "a third of", 0.25: "a quarter of", 2: "twice", 3: "three times", 4: "four times"}


def times(factor: float) -> str:
    """Return a factor in words: "half of", "twice", "0.875 x"."""
    return next(
        (words for value, words in _TIMES.items() if math.isclose(factor, value, rel_tol=1e-3)), f"{factor:.4g} x"
    )


def explanation(name: str) -> str:
    """Return what there is to say about a cause."""
    cause = CAUSES[name]
    _, diff = cause.remedy("DDPStrategy", "mean", ())
    texts = [f"{name}: {cause.plain}.", textwrap.fill(cause.text, _WIDTH), f"Do: {cause.advice}."]
    return "\n\n".join([*texts, *[textwrap.indent(diff, "    ")] * bool(diff)])


def plot_report(report: Report, path: str | Path) -> None:
    """Write a picture of the reduced gradient's relative difference per parameter and step.

    Of more than 60 parameters it shows those that differ most.

    Args:
        report: The report.
        path: The file, of a type that matplotlib writes; PNG without a suffix.
    """
    figures, colors = map(importlib.import_module, ("matplotlib.figure", "matplotlib.colors"))
    drawn = {name: [each if math.isfinite(each) else 1.0 for each in every] for name, every in report.gradients.items()}
    names = heapq.nlargest(_MOST_ROWS, drawn, key=lambda name: max(drawn[name], default=0.0))
    rows = list(zip(*zip_longest(*(drawn[name] for name in names), fillvalue=0.0), strict=True)) or [(0.0,)]
    figure = figures.Figure(figsize=(4 + 0.6 * len(rows[0]), 1.8 + 0.2 * len(rows)), layout="constrained")
    axes = figure.subplots()
    norm = colors.LogNorm(report.tolerance / 1e3, max(10 * report.tolerance, *map(max, rows)), clip=True)
    image = axes.imshow(rows, aspect="auto", norm=norm, cmap="magma", interpolation="nearest")
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_xlabel("optimizer step")
    axes.set_title(report.verdict if report.first is None else report.first.cause, fontsize=8)
    figure.colorbar(image, ax=axes, label="relative difference of the reduced gradient")
    figure.savefig(path, dpi=150)
