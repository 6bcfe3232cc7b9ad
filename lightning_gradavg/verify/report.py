"""What a comparison found: the verdict, why, and what to do; as text and as JSON.

A run is *equal* if everything was compared and nothing differs. It is *different* if something does. Where something
could not be compared it is *not shown*, and the report says what. `causes.yaml` holds the text of the causes.
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

__all__ = ["CAUSES", "EXIT_CODES", "STAGES", "Cause", "Difference", "Finding", "Report", "explanation"]

SCHEMA = 3
"""Version of the JSON output; raised when a field changes its name or its meaning, not when one is added."""

EXIT_CODES: Mapping[str, int] = {"equal": 0, "different": 1, "not shown": 3}
"""Of the console command, by verdict; 2 is wrong usage or a run that failed."""

STAGES = (
    *("initial weights", "samples", "reduced gradient", "clipped gradient"),
    *("optimizer options", "weights", "buffers", "logged values"),
)
"""In the order in which a step goes through them."""

_BESIDE_TRAINING = ("samples", "logged values")  # a difference there does not end the comparison


class Cause(NamedTuple):
    """Why a run on several processes differs from one process; `causes.yaml` says what the fields mean."""

    plain: str
    text: str
    advice: str
    option: str = ""
    otherwise: str = ""
    code: str = ""

    def remedy(self, strategy: str, rule: str, used: Collection[str]) -> dict[str, Any]:
        """Return advice and a diff for a run that uses some options already; `...` stands for those that it keeps."""
        name, _, value = self.option.partition("=")
        if name in used or value == f'"{rule}"':
            return {"advice": self.otherwise or self.advice, "diff": self.code}
        ours = "GradAvgStrategy" in used
        old = f'..., reduction="{rule}"' if ours and name == "reduction" and rule != "mean" else "..."
        switch = [
            *["+from lightning_gradavg import GradAvgStrategy"] * (not ours),
            f"-trainer = Trainer(strategy={strategy}({old}), ...)",
            f"+trainer = Trainer(strategy=GradAvgStrategy(..., {self.option}), ...)",
        ]
        return {"advice": self.advice, "diff": "\n".join(filter(None, [self.code, *switch * bool(self.option)]))}


CAUSES: Mapping[str, Cause] = {
    name: Cause(**texts)
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
    def factor(self) -> float | None:
        """Run / one process where that is one number."""
        return None if self.difference is None else self.difference.factor

    def __str__(self) -> str:
        each, lines = self.difference, [self.detail]
        if each is not None and math.isfinite(each.found) and math.isfinite(each.expected):
            lines.append(f"{each.name} is {each.found:.6g}, but {each.expected:.6g} on one process")
        if self.note:
            return "\n".join([f"note: {CAUSES[self.cause].plain} ({self.cause})", *lines])
        return "\n".join([*lines, f"Do: {self.advice}.", textwrap.indent(self.diff, "  ")])


@dataclass(frozen=True)
class Report:
    """The result of a comparison; `str()` of it is what the command prints.

    Attributes:
        strategy: The strategy of the run.
        reduction: Its rule.
        world_size: Its number of ranks.
        steps: The number of global batches compared.
        tolerance: The largest relative difference that counts as equal.
        findings: The causes, that of the first difference first.
        remarks: What could not be compared, and why; and what is known of steps beyond those compared.
        precision: What both runs computed in.
    """

    strategy: str
    reduction: str
    world_size: int
    steps: int
    tolerance: float
    findings: Sequence[Finding] = ()
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
        return next((finding for finding in self.findings if not finding.note), None)

    @property
    def stages(self) -> Mapping[str, str]:
        """All stages, in order: "equal", "differs", "note" where a difference does not count, or "not compared"."""
        of_training = (each for each in self.findings if each.stage not in _BESIDE_TRAINING)
        ended = next((STAGES.index(each.stage) for each in of_training if each.step == 0), len(STAGES))
        compared = {*_BESIDE_TRAINING, *STAGES[:ended]} if self.steps else {}
        found = {each.stage: "note" if each.note else "differs" for each in reversed(self.findings)}
        return {name: found.get(name, "equal" if name in compared else "not compared") for name in STAGES}

    def without(self, causes: Collection[str]) -> Report:
        """Return the report in which some causes are notes, which make no difference."""
        findings = [replace(one, note=one.note or one.cause in causes) for one in self.findings]
        return replace(self, findings=sorted(findings, key=lambda each: each.note))

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints: `schema` (3), `equal`, `verdict`, `stages` and the fields above.

        Infinity and NaN are None.
        """
        own = {name: getattr(self, name) for name in ("equal", "verdict", "stages")}
        given = {"schema": SCHEMA, **own, **asdict(self)}
        return dict(mapped(given, lambda one: None if isinstance(one, float) and not math.isfinite(one) else one))

    def __str__(self) -> str:
        head = "NOT SHOWN: no step differs from one process, but not everything could be compared."
        if self.equal:
            accepted = "not compared" in self.stages.values()
            head = f"EQUAL{', but for what you accept, and as far as that' * accepted}: every step matches one process."
        if (one := self.first) is not None:
            head = f"DIFFERENT, from step {one.step} on, in the {one.stage}: {CAUSES[one.cause].plain} ({one.cause})."
        told = [*map(str, self.findings), *(f"not shown: {remark}" for remark in self.remarks)]
        where = {each.stage: f"from step {each.step} on: {each.cause}" for each in reversed(self.findings)}
        table = [f"{name:18} {status:13} {where.get(name, '')}".rstrip() for name, status in self.stages.items()]
        how = (
            f"{self.strategy}, reduction {self.reduction!r}, ranks: {self.world_size}, optimizer steps: {self.steps},"
            f" both runs in {self.precision}. Equal: a relative difference of up to {self.tolerance:g}."
        )
        return "\n".join([head, *(textwrap.indent(text.rstrip(), "  ") for text in [*told, "", *table]), "", how])


def explanation(name: str) -> str:
    """Return what there is to say about a cause."""
    cause = CAUSES[name]
    diff = textwrap.indent(cause.remedy("DDPStrategy", "mean", ())["diff"], "    ")
    return "\n\n".join(filter(None, [f"{name}: {cause.plain}.", cause.text.strip(), f"Do: {cause.advice}.", diff]))
