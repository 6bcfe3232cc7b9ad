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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_gradavg._support.tree import mapped
from lightning_gradavg.report.start_line import Baseline
from lightning_gradavg.verify.causes import CAUSES
from lightning_gradavg.verify.sketches import Difference

__all__ = ["EXIT_CODES", "STAGES", "Baseline", "Finding", "Report"]

SCHEMA = 4
"""Version of the JSON output; raised when a field changes its name or its meaning, not when one is added."""

EXIT_CODES: Mapping[str, int] = {"equal": 0, "different": 1, "not shown": 3}
"""Of the console command, by verdict; 2 is wrong usage or a run that failed."""

STAGES: Mapping[str, str] = {
    "initial weights": "parameter `{}`: initial value",
    "samples": "`{}`:",
    "reduced gradient": "parameter `{}`: gradient",
    "clipped gradient": "parameter `{}`: clipped gradient",
    "optimizer options": "option `{}` of the optimizer:",
    "weights": "parameter `{}`: change in this step",
    "buffers": "buffer `{}`:",
    "logged values": "`{}`:",
}
"""The stages in the order in which a step goes through them, and what a number at each is; the number follows."""

_BESIDE_TRAINING = ("samples", "logged values")
"""Stages of which all steps are compared. A difference in any other ends the comparison of training."""


@dataclass(frozen=True)
class Finding:
    """A named cause.

    Attributes:
        cause: A key of `CAUSES`.
        stage: The stage in which it shows first.
        detail: What was found, with numbers, and the line of your code if it is known.
        step: The first global batch in which it shows, from 0.
        difference: What the tensor that differs most differs by, or None.
        note: Whether it does not make the run different.
    """

    cause: str
    stage: str
    detail: str
    step: int = 0
    difference: Difference | None = None
    note: bool = False

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
        cause = CAUSES[self.cause]
        if self.note:
            return f"note: {cause.plain} ({self.cause})\n{self.detail}"
        lines = [self.detail]
        difference = self.difference
        # Numbers say nothing where they are NaN, as for tensors of different sizes.
        if difference is not None and math.isfinite(difference.found) and math.isfinite(difference.expected):
            value = STAGES[self.stage].format(difference.name)
            lines.append(f"{value} {difference.found:.6g} here, {difference.expected:.6g} on one process")
        lines.append(f"Do: {cause.advice}.")
        return "\n".join(lines)


UNKNOWN_BASELINE = Baseline()
"""That of a run without a step."""

_NOT_COVERED = (
    "Not covered: seeds of your script, shared or missing (here verify seeds, and every sample draws its own numbers),"
    " a number of steps that you compute by hand, what goes wrong in 16 bits alone, and later steps."
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
        gaps: The stages that were not compared ("not compared"), of which the run has nothing ("none"), or that differ
            beside the first finding ("differs").
        options: The options that the strategy was given, as a script has them.
        weighs: Whether the strategy weighs losses by what `training_step` returns.
    """

    strategy: str
    reduction: str
    world_size: int
    steps: int
    tolerance: float
    findings: Sequence[Finding] = ()
    remarks: Sequence[str] = ()
    precision: str = "64-true"
    baseline: Baseline = UNKNOWN_BASELINE
    gaps: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    weighs: bool = False

    def __bool__(self) -> bool:
        """Return whether the verdict is "equal", so that a test may `assert verify(Net, data)`."""
        return self.equal

    def __repr__(self) -> str:
        """Return the text, which pytest shows if the assertion fails."""
        return str(self)

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
        statuses = dict.fromkeys(STAGES, "equal")
        if self.steps == 0:
            return dict.fromkeys(STAGES, "not compared")
        statuses.update(self.gaps)
        found = {finding.stage: finding for finding in reversed(self.findings)}
        is_compared = True
        for stage in STAGES:
            finding = found.get(stage)
            if finding is not None:
                statuses[stage] = "differs"
                if finding.note:
                    statuses[stage] = "note"
            if stage in _BESIDE_TRAINING:
                continue
            if not is_compared and finding is None:
                statuses[stage] = "not compared"
            # Training is compared up to its first difference. One of a later step had all stages equal in step 0.
            if statuses[stage] == "differs" and (finding is None or finding.step == 0):
                is_compared = False
        return statuses

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints: `schema`, `equal`, `verdict`, `stages` and the fields above that a run shows.

        Infinity and NaN are None.
        """
        # `asdict` knows the fields, and not the properties.
        properties = {"schema": SCHEMA, "equal": self.equal, "verdict": self.verdict, "stages": self.stages}
        content = {**properties, **asdict(self), "baseline": self.baseline._asdict()}
        for name in ("options", "weighs"):  # what the advice is written by
            del content[name]
        return dict(mapped(content, _none_if_not_finite))

    def __str__(self) -> str:
        lines = self._headlines()
        for finding in self.findings:
            lines.append(textwrap.indent(str(finding), "  "))
            # Two findings could ask for two strategies that contradict each other.
            if finding is self.first:
                change = CAUSES[finding.cause].change(self.options, weighs=self.weighs)
                lines += textwrap.indent(change, "    ").splitlines()
        for remark in self.remarks:
            lines.append(f"  not shown: {remark}")
        lines.append("")
        for stage, status in self.stages.items():
            lines.append(f"  {stage:18} {status}")
        lines.append(
            f"\n{self.strategy}, reduction {self.reduction!r}, ranks: {self.world_size}, optimizer steps: {self.steps},"
            f" both runs in precision {self.precision}; values count as equal if their relative difference is at most"
            f" {self.tolerance:g}."
        )
        if self.equal:
            lines.append(_NOT_COVERED)
        text = "\n".join(lines)
        if "ModelParallel" in self.strategy:
            # Advice names the strategy for models that are not sharded. That for sharded ones takes the same options.
            text = text.replace("GradAvgStrategy", "GradAvgModelParallelStrategy")
        return text

    def _headlines(self) -> list[str]:
        """Return the verdict with the run that it is about, and on a line of its own where and why that is so."""
        first = self.first
        if first is not None:
            place = f"{first.place}: {CAUSES[first.cause].plain} ({first.cause})."
            return [f"DIFFERENT from {self.baseline}", place]
        if not self.equal:
            return [f"NOT SHOWN to equal {self.baseline}"]
        return [f"EQUAL to {self.baseline}"]


def _none_if_not_finite(value: Any) -> Any:
    """Return a leaf of the report as JSON has it, which knows no infinity and no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
