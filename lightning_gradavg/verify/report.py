"""What a comparison found: the verdict, the causes, and what to do about them, as text and as JSON.

| verdict | when |
|---|---|
| "equal" | everything was compared, and nothing differs |
| "different" | something differs; what could not be compared does not matter then |
| "not shown" | nothing differs, but something could not be compared; the remarks say what |
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from lightning_gradavg._support.tree import mapped
from lightning_gradavg.verify.causes import CAUSES
from lightning_gradavg.verify.sketches import Difference

__all__ = [
    "EXIT_CODES",
    "STAGES",
    "Baseline",
    "Finding",
    "Report",
    "Rounding",
    "value_in_words",
]

SCHEMA = 4
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
        line: The line of your code, as in "train.py:31: self.seen.add_(len(x))"; "" if none is known.
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
    line: str = ""
    where: str = ""

    @property
    def factor(self) -> float | None:
        """Run / one process where that is one number."""
        if self.difference is None:
            return None
        return self.difference.factor

    @property
    def place(self) -> str:
        """The step, the stage and what differs there, with its factor if it is a multiple."""
        place = f"From step {self.step} on, in the {self.stage}"
        if self.difference is not None:
            place += f" of `{self.difference.name}`"
        if self.factor is not None:
            place += f", {self.factor:.4g} x that of one process"
        return place

    def __str__(self) -> str:
        lines = []
        if self.note:
            lines.append(f"note: {CAUSES[self.cause].plain} ({self.cause})")
        lines.append(self.detail)
        if self.where:
            lines.append(f"{self.where} {self.line}".rstrip())
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


class Baseline(NamedTuple):
    """The run on one process that the ranks are compared with, beside that of the user's loader.

    Attributes:
        batch: The samples of all ranks in the first step, which one process takes as one batch.
        loader_batch: Those of a batch of the user's loader on one process; 0 if it is not known.
        window: The batches that the Trainer accumulates.
    """

    batch: int = 0
    loader_batch: int = 0
    window: int = 1

    def __str__(self) -> str:
        """Return the run in words, as in "one process with batch 12. Your loader's batch is 6, so ..."."""
        if self.batch == 0:
            return "one process."
        text = f"one process with batch {self.batch}."
        batch_of_user = self.loader_batch * self.window
        if batch_of_user in (0, self.batch):
            return text
        own = f"Your loader's batch is {self.loader_batch}"
        if self.window > 1:
            own += f", and {self.window} of them are accumulated"
        how_many = "another number of steps"
        times, rest = divmod(self.batch, batch_of_user)
        if rest == 0:
            how_many = f"{times} times as many steps"
            if times == 2:  # noqa: PLR2004  # in words
                how_many = "twice as many steps"
        return f"{text} {own}, so one process takes {how_many}: see which_run."


UNKNOWN_BASELINE = Baseline()
"""That of a run without a step."""

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
        baseline: Which run on one process this is.
        rounding: In a 16-bit precision, how the differences compare with those of rounding; else None.
        uncompared: The stages that could not be compared.
        absent: The stages of which the run has nothing, such as buffers.
    """

    strategy: str
    reduction: str
    world_size: int
    steps: int
    tolerance: float
    findings: Sequence[Finding] = ()
    remarks: Sequence[str] = ()
    precision: str = "float64"
    baseline: Baseline = UNKNOWN_BASELINE
    rounding: Rounding | None = None
    uncompared: Sequence[str] = ()
    absent: Sequence[str] = ()

    def __bool__(self) -> bool:
        """Return whether the verdict is "equal", so that a test may `assert verify(Net, data)`."""
        return self.equal

    def __repr__(self) -> str:
        """Return the first lines and the first finding, which pytest shows if the assertion fails."""
        lines = self._headlines()
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
        """All stages, in order.

        "equal", "differs", "note" where a difference does not count, "not compared", or "none" if the run has nothing.
        """
        compared = self._compared_stages()
        statuses = {}
        for stage in STAGES:
            finding = self._first_finding_of(stage)
            if finding is not None and finding.note:
                statuses[stage] = "note"
            elif finding is not None:
                statuses[stage] = "differs"
            elif stage not in compared or stage in self.uncompared:
                statuses[stage] = "not compared"
            elif stage in self.absent:
                statuses[stage] = "none"
            else:
                statuses[stage] = "equal"
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
        """Return what `--json` prints: `schema` (4), `equal`, `verdict`, `stages` and the fields above.

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
        content["baseline"] = self.baseline._asdict()
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
        lines = self._headlines()
        lines += [textwrap.indent(text, "  ") for text in body]
        lines += ["", self._footer()]
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

    def _headlines(self) -> list[str]:
        """Return the verdict with the run that it is about, and on a line of its own where and why that is so."""
        first = self.first
        if first is not None:
            return [
                f"DIFFERENT from {self.baseline}",
                f"{first.place}: {CAUSES[first.cause].plain} ({first.cause}).",
            ]
        if not self.equal:
            missing = [stage for stage, status in self.stages.items() if status == "not compared"]
            lines = [f"NOT SHOWN to equal {self.baseline}"]
            if missing:
                lines.append(f"Not compared: {', '.join(missing)}.")
            return lines
        how = "EQUAL to"
        if self.rounding is not None:
            how = "EQUAL within what rounding explains to"
        lines = [f"{how} {self.baseline}"]
        if any(finding.cause == "data order" for finding in self.findings):
            lines.append("It takes the samples that the ranks read, and would read others by itself.")
        # Only a cause that the user accepts ends the comparison without making the run different.
        if "not compared" in self.stages.values():
            lines.append("This is but for what you accept, and as far as that.")
        return lines


def _none_if_not_finite(value: Any) -> Any:
    """Return a leaf of the report as JSON has it, which knows no infinity and no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
