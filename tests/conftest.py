"""Where tests run, load what they need: the process that hands them out to others starts 5 seconds sooner without."""

from __future__ import annotations

import gc

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") == "no":
        # What is imported and collected stays, and collections go through it again and again; `worlds` enables them.
        gc.disable()
        config.pluginmanager.import_plugin("worlds")
