"""The causes that a report may name, and what to do about each; `causes.yaml` has the texts."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

__all__ = ["CAUSES", "Cause", "Remedy", "explanation"]


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
