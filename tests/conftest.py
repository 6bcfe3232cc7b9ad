"""Where tests run, load what they need: the process that hands them out to others starts 5 seconds sooner without."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("worlds")
