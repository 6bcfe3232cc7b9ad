"""What the README says about selecting the strategy is enough: with the built wheel, in an empty folder."""

from __future__ import annotations

import re

import pytest
from newcomer import ROOT, WAYS, install, walk


def test_the_readme_says_what_a_newcomer_writes():
    """Whatever the walk writes of this package stands in the README, word for word."""
    said = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    assert [] == [words for way in WAYS for words in way.said if words not in said]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_every_way_trains(tmp_path):
    """By each of the six ways two processes train one model, with the rule that was named, from the installed wheel."""
    programs = install(tmp_path)
    for way in WAYS:
        ranks = walk(way, tmp_path / way.name.replace(" ", "_"), programs)
        assert [[0, 2], [1, 2]] == [rank["place"] for rank in ranks], way.name
        assert {way.rule} == {rank["rule"] for rank in ranks}, way.name
        assert 1 == len({rank["weights"] for rank in ranks}), way.name
        assert all(rank["package"].startswith(str(tmp_path)) for rank in ranks), way.name
        assert all(last < 0.5 * first for first, last in (rank["losses"] for rank in ranks)), way.name
