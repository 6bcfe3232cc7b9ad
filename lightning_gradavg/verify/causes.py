"""The causes that a report may name, and what to do about each; `causes.yaml` has the texts."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

__all__ = ["CAUSES", "Cause", "explanation"]


class Cause(NamedTuple):
    """Why a run on several processes differs from one process; `causes.yaml` says what the fields mean."""

    plain: str
    text: str
    advice: str
    code: str = ""


def _read_causes() -> dict[str, Cause]:
    content = yaml.safe_load(Path(__file__).with_name("causes.yaml").read_text("utf-8"))
    return {name: Cause(**fields) for name, fields in content.items()}


CAUSES: Mapping[str, Cause] = _read_causes()


def explanation(name: str) -> str:
    """Return what `--explain` prints about a cause."""
    cause = CAUSES[name]
    parts = [f"{name}: {cause.plain}.", cause.text.strip(), f"Do: {cause.advice}."]
    if cause.code:
        parts.append(textwrap.indent(cause.code, "    "))
    return "\n\n".join(parts)
