"""What a comparison found: the verdict, the causes, and what to do about them, as text and as JSON.

| verdict | when |
|---|---|
| "equal" | everything was compared, and nothing differs |
| "different" | something differs; what could not be compared does not matter then |
| "not shown" | nothing differs, but something could not be compared; the remarks say what |

`causes.yaml` has the texts of the causes.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightning_gradavg._support.tree import mapped

__all__ = [
    "CAUSES",
    "EXIT_CODES",
    "STAGES",
    "Cause",
    "Difference",
    "Finding",
    "Remedy",
    "Report",
    "Rounding",
    "explanation",
    "value_in_words",
]

SCHEMA = 3
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

_BESIDE_TRAINING = ("samples", "logged values")
"""Stages of which all steps are compared. A difference in any other ends the comparison of training."""


_STAGES_OF_TENSORS = ("initial weights", "reduced gradient", "clipped gradient", "weights", "buffers")
"""Stages whose differences are those of one element of a tensor."""


def value_in_words(stage: str, name: str) -> str:
    """Return what a number at a stage is, as in "parameter `net.weight`: gradient"; the number follows."""
    if stage == "initial weights":
        return f"parameter `{name}`: initial value"
    if stage in ("reduced gradient", "clipped gradient"):
        return f"parameter `{name}`: {stage.replace('reduced ', '')}"
    if stage == "weights":
        return f"parameter `{name}`: change in this step"
    if stage == "buffers":
        return f"buffer `{name}`:"
    if stage == "optimizer options":
        return f"option `{name}` of the optimizer:"
    return f"`{name}`:"


class Remedy(NamedTuple):
    """What to do about a cause, as a sentence and as a change to the script."""

    advice: str
    diff: str  # "" if the advice is no change of code

    def for_shards(self) -> Remedy:
        """Return the remedy with the names of the strategies that shard a model."""
        return Remedy(_with_names_for_shards(self.advice), _with_names_for_shards(self.diff))


def _with_names_for_shards(text: str) -> str:
    if "lr_scaling" in text:  # only GradAvgStrategy has it
        return text
    text = text.replace("GradAvgStrategy", "GradAvgModelParallelStrategy")
    return text.replace("DDPStrategy", "ModelParallelStrategy")


class Cause(NamedTuple):
    """Why a run on several processes differs from one process; `causes.yaml` says what the fields mean."""

    plain: str
    text: str
    advice: str
    option: str = ""
    otherwise: str = ""
    code: str = ""

    def remedy(self, strategy: str, rule: str, used_options: Collection[str]) -> Remedy:
        """Return advice and a diff for a run with this strategy and rule.

        | the option that fixes the cause | advice | diff |
        |---|---|---|
        | the run has it already | `otherwise`, if there is one | `code` |
        | there is none | `advice` | `code` |
        | the run does not have it | `advice` | `code`, then the strategy with the option |

        Args:
            strategy: The name of the run's strategy.
            rule: The name of its reduction rule.
            used_options: Names of options that the run uses, or an option with its value, as in
                'reduction="weighted_mean"'; and "GradAvgStrategy" if its strategy is one.
        """
        option_name, _, option_value = self.option.partition("=")
        is_used = option_name in used_options or self.option in used_options
        if is_used or option_value == f'"{rule}"':
            return Remedy(self.otherwise or self.advice, self.code)
        if not self.option:
            return Remedy(self.advice, self.code)
        lines = []
        if self.code:
            lines.append(self.code)
        if "GradAvgStrategy" not in used_options:
            lines.append("+from lightning_gradavg import GradAvgStrategy")
        # `...` stands for the options that the user keeps. Here the old rule is replaced, so the diff shows it.
        old_options = "..."
        if "GradAvgStrategy" in used_options and option_name == "reduction" and rule != "mean":
            old_options = f'..., reduction="{rule}"'
        lines.append(f"-trainer = Trainer(strategy={strategy}({old_options}), ...)")
        lines.append(f"+trainer = Trainer(strategy=GradAvgStrategy(..., {self.option}), ...)")
        return Remedy(self.advice, "\n".join(lines))


def _read_causes() -> dict[str, Cause]:
    content = yaml.safe_load(Path(__file__).with_name("causes.yaml").read_text("utf-8"))
    return {name: Cause(**fields) for name, fields in content.items()}


CAUSES: Mapping[str, Cause] = _read_causes()


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
        module: The layer that it names, by its path, or the class of the LightningModule; "" if none is known.
        line: The line of your code, as in "train.py:31: x = self.norm(x)"; "" if none is known.
        where: How the report says this.
    """

    cause: str
    stage: str
    detail: str
    step: int = 0
    difference: Difference | None = None
    advice: str = ""
    diff: str = ""
    note: bool = False
    module: str = ""
    line: str = ""
    where: str = ""

    @property
    def factor(self) -> float | None:
        """Run / one process where that is one number."""
        if self.difference is None:
            return None
        return self.difference.factor

    def __str__(self) -> str:
        lines = []
        if self.note:
            lines.append(f"note: {CAUSES[self.cause].plain} ({self.cause})")
        lines.append(self.detail)
        if self.where:
            lines.append(self.where)
        difference = self.difference
        # Numbers say nothing where they are NaN, as for tensors of different sizes.
        if difference is not None and math.isfinite(difference.found) and math.isfinite(difference.expected):
            where = ""
            if self.stage in _STAGES_OF_TENSORS:
                where = " (the element that differs most)"
            lines.append(
                f"{value_in_words(self.stage, difference.name)} {difference.found:.6g} here,"
                f" {difference.expected:.6g} on one process{where}"
            )
        if not self.note:
            lines.append(f"Do: {self.advice}.")
            lines.append(textwrap.indent(self.diff, "  "))
        return "\n".join(lines)


class Rounding(NamedTuple):
    """By how much the run and one process differ in a 16-bit precision, beside what rounding explains.

    Attributes:
        ratio: The largest difference of a tensor over what rounding explains of it.
        most: The largest ratio that counts as equal.
        relative: The relative difference of that tensor.
        explained: What rounding explains of it: the largest of `draws` runs from weights and inputs that are rounded
            otherwise.
        name: Of the tensor.
        draws: The number of these runs.
    """

    ratio: float
    most: float
    relative: float
    explained: float
    name: str
    draws: int


_NOT_COVERED = (
    "Not covered: a seed that all ranks share (here every sample draws its own numbers), a number of steps that you"
    " compute by hand, and later steps."
)
"""What a run of the same verdict may still get wrong."""


@dataclass(frozen=True, repr=False)
class Report:
    """The result of a comparison; `str()` of it is what the command prints. It is true if the verdict is "equal".

    Attributes:
        strategy: The strategy of the run.
        reduction: Its rule.
        world_size: Its number of ranks.
        steps: The number of global batches compared.
        tolerance: The largest relative difference that counts as equal.
        findings: The causes, that of the first difference first.
        remarks: What could not be compared, and why; and what is known of steps beyond those compared.
        precision: What both runs computed in.
        baseline: Which run on one process this is, and how to reproduce another one.
        rounding: In a 16-bit precision, how the differences compare with those of rounding; else None.
    """

    strategy: str
    reduction: str
    world_size: int
    steps: int
    tolerance: float
    findings: Sequence[Finding] = ()
    remarks: Sequence[str] = ()
    precision: str = "float64"
    baseline: str = ""
    rounding: Rounding | None = None

    def __bool__(self) -> bool:
        """Return whether the verdict is "equal", so that a test may `assert verify(Net, data)`."""
        return self.equal

    def __repr__(self) -> str:
        """Return the first line and the first finding, which pytest shows if the assertion fails."""
        lines = [self._headline()]
        if self.first is not None:
            lines.append(self.first.detail)
        lines += self.remarks
        return f"<Report: {' '.join(lines)}>"

    @property
    def verdict(self) -> str:
        """One of "equal", "different" and "not shown"."""
        if self.first is not None:
            return "different"
        if self.remarks or self.steps == 0:
            return "not shown"
        return "equal"

    @property
    def equal(self) -> bool:
        """Whether the run was shown to equal one process, within the tolerance."""
        return self.verdict == "equal"

    @property
    def first(self) -> Finding | None:
        """The leading finding, of the first step and stage in which the run differs from one process."""
        for finding in self.findings:
            if not finding.note:
                return finding
        return None

    @property
    def stages(self) -> Mapping[str, str]:
        """All stages, in order: "equal", "differs", "note" where a difference does not count, or "not compared"."""
        compared = self._compared_stages()
        statuses = {}
        for stage in STAGES:
            finding = self._first_finding_of(stage)
            if finding is not None and finding.note:
                statuses[stage] = "note"
            elif finding is not None:
                statuses[stage] = "differs"
            elif stage in compared:
                statuses[stage] = "equal"
            else:
                statuses[stage] = "not compared"
        return statuses

    def _first_finding_of(self, stage: str) -> Finding | None:
        for finding in self.findings:
            if finding.stage == stage:
                return finding
        return None

    def _compared_stages(self) -> Collection[str]:
        """Return the stages of which at least step 0 was compared."""
        if self.steps == 0:
            return ()
        # The comparison of training ends at its first finding. One of a later step had all stages equal in step 0.
        for finding in self.findings:
            if finding.step == 0 and finding.stage not in _BESIDE_TRAINING:
                before = STAGES[: STAGES.index(finding.stage)]
                return (*before, *_BESIDE_TRAINING)
        return STAGES

    def without(self, causes: Collection[str]) -> Report:
        """Return the report in which some causes are notes, which make no difference."""
        findings, notes = [], []
        for finding in self.findings:
            if finding.note or finding.cause in causes:
                notes.append(replace(finding, note=True))
            else:
                findings.append(finding)
        return replace(self, findings=[*findings, *notes])

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints: `schema` (3), `equal`, `verdict`, `stages` and the fields above.

        Infinity and NaN are None.
        """
        # `asdict` knows the fields, and not the properties.
        content = {
            "schema": SCHEMA,
            "equal": self.equal,
            "verdict": self.verdict,
            "stages": self.stages,
            **asdict(self),
        }
        return dict(mapped(content, _none_if_not_finite))

    def __str__(self) -> str:
        body = [str(finding).rstrip() for finding in self.findings]
        for remark in self.remarks:
            body.append(f"not shown: {remark}")
        body.append("")
        for stage, status in self.stages.items():
            finding = self._first_finding_of(stage)
            where = ""
            if finding is not None:
                where = f"from step {finding.step} on: {finding.cause}"
            body.append(f"{stage:18} {status:13} {where}".rstrip())
        lines = [self._headline()]
        lines += [textwrap.indent(text, "  ") for text in body]
        lines += ["", self._footer()]
        if self.baseline:
            lines.append(self.baseline)
        if self.equal:
            lines.append(_NOT_COVERED)
        return "\n".join(lines)

    def _footer(self) -> str:
        """Return what was compared, and what counts as equal."""
        compared = (
            f"{self.strategy}, reduction {self.reduction!r}, ranks: {self.world_size}, optimizer steps: {self.steps},"
            f" both runs in {self.precision}"
        )
        rounding = self.rounding
        if rounding is None:
            return f"{compared}; values count as equal if their relative difference is at most {self.tolerance:g}."
        return (
            f"{compared}, after no difference in float64; the largest difference, of {rounding.name}, is"
            f" {rounding.relative:.2g}, {rounding.ratio:.2g} x what rounding explains ({rounding.explained:.2g}, the"
            f" largest of {rounding.draws} runs that are rounded otherwise). Up to {rounding.most:g} x counts as equal."
        )

    def _headline(self) -> str:
        first = self.first
        if first is not None:
            plain = CAUSES[first.cause].plain
            return f"DIFFERENT, from step {first.step} on, in the {first.stage}: {plain} ({first.cause})."
        if not self.equal:
            return "NOT SHOWN: no step differs from one process, but not everything could be compared."
        # Only a cause that the user accepts ends the comparison without making the run different.
        if "not compared" in self.stages.values():
            return "EQUAL, but for what you accept, and as far as that: every step matches one process."
        if self.rounding is not None:
            return "EQUAL within what rounding explains: every step matches one process."
        return "EQUAL: every step matches one process."


def _none_if_not_finite(value: Any) -> Any:
    """Return a leaf of the report as JSON has it, which knows no infinity and no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def explanation(name: str) -> str:
    """Return what `--explain` prints about a cause."""
    cause = CAUSES[name]
    parts = [f"{name}: {cause.plain}."]
    if cause.text.strip():
        parts.append(cause.text.strip())
    parts.append(f"Do: {cause.advice}.")
    diff = cause.remedy("DDPStrategy", "mean", ()).diff
    if diff:
        parts.append(textwrap.indent(diff, "    "))
    return "\n\n".join(parts)
