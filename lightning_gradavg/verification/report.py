"""What a comparison found: the stages, the findings, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_gradavg.verification.causes import CAUSES
from lightning_gradavg.verification.measure import Difference

__all__ = ["SCHEMA", "STAGES", "Finding", "Report", "Stage"]

SCHEMA = 1
"""Version of the JSON output; raised when a field changes its name or its meaning, not when one is added."""

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


@dataclass(frozen=True)
class Stage:
    """One stage, over all recorded steps.

    Attributes:
        name: One of `STAGES`.
        status: "equal", "differs", or "not compared".
        step: The first step that differs, from 0, or None.
        difference: Of that step, the first parameter that differs; of an equal stage, the largest of all; or None.
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
    """

    cause: str
    stage: str
    detail: str
    step: int | None = None
    difference: Difference | None = None
    advice: str = ""

    @property
    def is_difference(self) -> bool:
        """Whether it makes the run another than the reference; if not, it is a note."""
        return CAUSES[self.cause].is_difference

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
        remarks: What could not be compared, and why.
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
    def equal(self) -> bool:
        """Whether the run is the reference within the tolerance; notes do not count."""
        return not any(finding.is_difference for finding in self.findings)

    @property
    def first(self) -> Finding | None:
        """The finding that leads: the first stage in which the run parts from the reference."""
        return next((finding for finding in self.findings if finding.is_difference), None)

    def without(self, causes: Sequence[str]) -> Report:
        """Return the report without the findings of some causes.

        Raises:
            ValueError: If a cause is unknown.
        """
        unknown = [cause for cause in causes if cause not in CAUSES]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not a cause; use some of {', '.join(map(repr, CAUSES))}")
        kept = [finding for finding in self.findings if finding.cause not in causes]
        return Report(**{**vars(self), "findings": kept})

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints: numbers that JSON has not, such as infinity, as None."""
        findings = [
            {
                **asdict(finding),
                "is_difference": finding.is_difference,
                "factor": finding.factor,
                "page": CAUSES[finding.cause].page,
            }
            for finding in self.findings
        ]
        content = {"schema": SCHEMA, "equal": self.equal, **asdict(self), "findings": findings}
        plain: dict[str, Any] = _plain(content)
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
