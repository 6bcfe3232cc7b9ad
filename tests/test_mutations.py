"""The planted defects can still be planted; `python -m tests.mutations` shows that each is caught."""

from pathlib import Path

import pytest
from mutations.__main__ import ROOT, mutations


@pytest.mark.parametrize("mutation", [*mutations([])], ids=lambda mutation: mutation.breaks)
def test_defect_can_be_planted(mutation):
    assert mutation.planted(ROOT) != (ROOT / mutation.file).read_text()
    assert all((ROOT / test.partition("::")[0]).exists() for test in mutation.tests if Path(test).suffix or "/" in test)
