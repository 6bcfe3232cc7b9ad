"""The figures that `python -m tests.structure` prints are those that it says it prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from journeys import JOURNEYS, travelled
from structure import Size, size_of

SOURCE = '''"""A docstring
of two lines."""

LIMIT = 3  # a comment beside code
"""What a string that is a statement says of a name."""

# a comment of its own


def shown(values):
    """Another one."""
    text = """code
    of two lines"""
    for value in values:
        if value > 0 and value < LIMIT or value is None:
            print(text if value else "none")
        elif value:
            while value:
                value -= 1
    try:
        return [value for value in values if value if value != 1]
    except TypeError:
        pass
    match values:
        case []:
            return None
'''


def test_size_by_hand():
    """Docstrings, comments and blank lines are no code; each way to branch counts once, an `elif` as an `if`."""
    # for, if, and, or, conditional expression, elif, while, try, two conditions of a comprehension, case
    assert Size(files=1, lines=26, code=17, comments=2, branches=11) == size_of(SOURCE)
    assert Size(2, 29, 20, 2, 11) == Size.of_all([size_of(SOURCE), Size(1, 3, 3)])
    assert 50.0 == Size(code=4, branches=2).branches_per_100


def documented() -> dict[str, tuple[int, int]]:
    """Return files and calls between files of every journey, as docs/architecture.md says."""
    page = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text("utf-8")
    rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|"))
    return {row[0]: (int(row[1]), int(row[2])) for row in rows if row[0] in JOURNEYS}


@pytest.mark.parametrize("name", JOURNEYS)
def test_journeys_go_no_further_than_documented(world, name):
    """On both ranks a journey passes no more files than docs/architecture.md says, and goes hardly further.

    Which calls gloo's threads take over differs from run to run.
    """
    files, calls = documented()[name]
    for arrows in world(2).run(travelled, name):
        assert 0 < len({one.target for one in arrows}) <= files
        assert len(arrows) <= 1.1 * calls
