"""Writes docs/causes.md from the causes that `gradavg verify` names: `python docs/causes.py`."""

from __future__ import annotations

import textwrap
from pathlib import Path

from lightning_gradavg.verify.report import CAUSES

PAGE = Path(__file__).with_name("causes.md")

HEAD = """# Causes

Why a run on several processes differs from one process, as [`gradavg verify`](verify.md) names it, and what to do.
`gradavg verify --explain CAUSE` prints the same, with the change to your script.
"""


def page() -> str:
    """Return the page."""
    sections = [
        f"\n## {name}\n\n{_filled(f'**{cause.plain[:1].upper()}{cause.plain[1:]}.** {cause.text}')}\n\n"
        f"{_filled(f'*Do*: {cause.advice}.')}\n"
        for name, cause in CAUSES.items()
    ]
    return HEAD + "".join(sections)


def _filled(text: str) -> str:
    return textwrap.fill(text, 150, break_on_hyphens=False, break_long_words=False)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
