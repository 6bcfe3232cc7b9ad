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
_NOTHING = 1e-16  # a logarithm needs a number


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
        difference: `name`, `relative`, `found`, `expected` and `factor` of the tensor that differs most, or None.
        advice: What to do about it.
        diff: The same as a change to the script, or "".
        note: Whether it does not make the run different.
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
    cause, each = CAUSES[finding.cause], finding.difference
    known = each is not None and math.isfinite(each.found) and math.isfinite(each.expected)
    values = [f"{each.name} is {each.found:.6g}, but {each.expected:.6g} on one process"] if known else []
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

    Raises:
        RuntimeError: If matplotlib is not installed.
    """
    figure_module, colors = plotting()
    drawn = {name: [*map(_drawn, of_steps)] for name, of_steps in report.gradients.items()}
    names = heapq.nlargest(_MOST_ROWS, drawn, key=lambda name: max(drawn[name], default=0.0))
    columns = list(zip_longest(*(drawn[name] for name in names), fillvalue=_NOTHING)) or [(_NOTHING,)]
    figure = figure_module.Figure(figsize=(4 + 0.6 * len(columns), 1.8 + 0.2 * len(names)), layout="constrained")
    axes = figure.subplots()
    most = max(map(max, columns))
    norm = colors.LogNorm(vmin=report.tolerance / 1e3, vmax=max(10 * report.tolerance, most), clip=True)
    image = axes.imshow([*zip(*columns, strict=True)], aspect="auto", norm=norm, cmap="magma", interpolation="nearest")
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_xticks(range(len(columns)))
    axes.set_xlabel("optimizer step")
    shown = f" (the {len(names)} of {len(drawn)} parameters that differ most)" if len(names) < len(drawn) else ""
    axes.set_title((report.verdict if report.first is None else report.first.cause) + shown, fontsize=8)
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
    return max(value, _NOTHING) if math.isfinite(value) else 1.0
