"""The quick start of the README is true as printed, also with the wheel in an empty folder."""

from __future__ import annotations

import re

import pytest
from newcomer import CURVES, FIXED, PROGRAM, ROOT, STEPS, WAYS, check, install, walk, write
from scripts import run_script


def test_the_quick_start_is_short():
    """It is a whole program of less than 30 lines; its fix adds an import, and changes two places."""
    assert len(PROGRAM.splitlines()) < 30
    assert 4 == len(set(FIXED.splitlines()) - set(PROGRAM.splitlines()))
    assert [4, 4] == [len(curve) for curve in CURVES]
    assert CURVES[0] != CURVES[1]


def test_the_pages_say_what_a_newcomer_writes():
    """Every command, and what the walk writes of this package, is in the README or docs/select.md, word for word."""
    said = " ".join((ROOT / page).read_text("utf-8") for page in ("README.md", "docs/select.md"))
    words = [*(step.command for step in [*STEPS, *WAYS[:1]]), *(part for step in WAYS for part in step.said)]
    assert [] == [each for each in words if " ".join(each.split()) not in re.sub(r"\s+", " ", said)]


@pytest.mark.parametrize("step", [*STEPS[:3], STEPS[4]], ids=["one", "stock DDP", "verdict", "fixed"])
def test_the_quick_start(step, tmp_path):
    """In a process that has imported torch and Lightning, which is quicker than the command."""
    write(step, tmp_path)
    command = "from lightning_gradavg.cli import main\nif __name__ == '__main__':\n    raise SystemExit(main())\n"
    (tmp_path / "gradavg.py").write_text(command)
    program, *arguments = step.command.split()
    script, *arguments = arguments if program == "python" else ["gradavg.py", *arguments]
    code, printed = run_script(tmp_path / script, *arguments)
    assert step.code == code, printed
    check(step, printed)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_way_trains(tmp_path):
    """From the installed wheel, the quick start is true, and every way to select the strategy prints its curve."""
    programs = install(tmp_path)
    for step in [*STEPS, *WAYS]:
        walk(step, tmp_path, programs)
