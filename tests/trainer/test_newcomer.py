"""The quick start of the README is true as printed, and its words are enough: with the built wheel, in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from newcomer import CURVES, FIXED, PROGRAM, ROOT, STEPS, WAYS, install, patched, walk


def test_the_quick_start_is_short():
    """It is a whole program of less than 30 lines; its fix changes three, and adds the import."""
    assert len(PROGRAM.splitlines()) < 30
    assert 3 == len(set(FIXED.splitlines()) - set(PROGRAM.splitlines())) - 1
    assert [4, 4] == [len(curve) for curve in CURVES]
    assert CURVES[0] != CURVES[1]


def test_a_diff_that_does_not_fit_is_an_error():
    assert "a\nB\nc\n" == patched("a\nb\nc\n", " a\n-b\n+B\n")
    with pytest.raises(ValueError, match="not in list"):
        patched("a\nb\n", "-c\n")


def test_the_pages_say_what_a_newcomer_writes():
    """Every command, and whatever the walk writes of this package, is on the README or docs/select.md, word for word."""
    pages = (ROOT / "README.md").read_text("utf-8") + (ROOT / "docs" / "select.md").read_text("utf-8")
    said = re.sub(r"\s+", " ", pages)
    words = [step.command for step in STEPS] + [step.command for step in WAYS[:2]] + [w for s in WAYS for w in s.said]
    assert [] == [each for each in words if " ".join(each.split()) not in said]


def programs() -> Path:
    import sys

    return Path(sys.executable).parent


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.command)
def test_the_quick_start(step, tmp_path):
    """On one process and on two: stock DDP prints another curve, verify says why, and the fix prints the first."""
    for name in ("train.py",):
        (tmp_path / name).write_text(FIXED if STEPS.index(step) > 2 else PROGRAM)
    walk(step, tmp_path, programs())


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_way_trains(tmp_path):
    """From the installed wheel, each command prints the curve of one process."""
    programs = install(tmp_path)
    for step in [*STEPS, *WAYS]:
        walk(step, tmp_path, programs)
