"""The causes that a report may name, and what to do about each; `causes.yaml` has the texts."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

from lightning_gradavg._lightning.options import trainer_in_diff

__all__ = ["CAUSES", "explanation"]


class Cause(NamedTuple):
    """Why a run on several processes differs from one process; `causes.yaml` says what the fields mean."""

    plain: str
    text: str
    advice: str
    code: str = ""
    strategy: Mapping[str, str] | None = None

    def change(self, given: Mapping[str, str], *, weighs: bool = False) -> str:
        """Return what to change in a script, as lines of a diff.

        Args:
            given: The options of the user's strategy, as a script has them. They stay.
            weighs: Whether that strategy weighs losses by what `training_step` returns.
        """
        if self.strategy is None or (weighs and "weighted_mean" in str(self.strategy)):
            return self.code
        return self.code + trainer_in_diff({**given, **self.strategy})


_TEXTS = Path(__file__).with_name("causes.yaml").read_text("utf-8")

CAUSES: Mapping[str, Cause] = {name: Cause(**fields) for name, fields in yaml.safe_load(_TEXTS).items()}


def explanation(name: str) -> str:
    """Return what `--explain` prints about a cause."""
    cause = CAUSES[name]
    parts = [f"{name}: {cause.plain}.", cause.text.strip(), f"Do: {cause.advice}."]
    change = cause.change({})
    if change:
        parts.append(textwrap.indent(change, "    "))
    return "\n\n".join(parts)
