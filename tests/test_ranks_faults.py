"""Every row of the table of faults: no wait without end, no difference in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import ROWS, inject

PAGE = Path(__file__).parent.parent / "docs" / "faults.md"


def id_of(row):
    return f"{row.fault}, {row.moment}"


@pytest.mark.parametrize("row", [pytest.param(row, marks=[pytest.mark.full] * row.full, id=id_of(row)) for row in ROWS])
def test_a_fault(row, tmp_path):
    """Every rank ends, with the exit code that says how, and with a text that names what happened and where."""
    ended = inject(row, tmp_path)
    assert row.codes == tuple(one.exit_code for one in ended), [one.said for one in ended]
    for part, one in zip(row.said, ended, strict=True):
        assert part in one.said


def test_the_page_is_this_table():
    """docs/faults.md says of every fault when it is injected and what is expected, and that this was seen."""
    rows = [line.split("|")[1:-1] for line in PAGE.read_text("utf-8").splitlines() if line.endswith(" |")]
    shown = [[cell.strip() for cell in cells][:4] for cells in rows if len(cells) == 5]
    assert [[row.fault, row.moment, row.expected, "as expected"] for row in ROWS] == shown[2:]
