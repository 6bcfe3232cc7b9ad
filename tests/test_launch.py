"""Where the strategy cannot start its processes, or is none of the caller's, the message says what to do instead."""

from __future__ import annotations

import re

import pytest
from lightning.fabric import Fabric
from lightning.fabric.utilities import imports
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_gradavg import GradAvgStrategy

SCRIPT = "start_method='popen' starts the script again in every process, and a notebook is none."


@pytest.mark.parametrize("strategy", [GradAvgStrategy(), "gradavg_weighted"], ids=["instance", "name"])
def test_a_notebook_is_told_of_fork(monkeypatch, strategy):
    """An instance or a name that starts scripts is refused in a notebook, with the option and the name to use."""
    monkeypatch.setattr(imports, "_IS_INTERACTIVE", True)
    advice = f"{SCRIPT} Use GradAvgStrategy(start_method='fork'), or Trainer(strategy='gradavg_notebook')."
    with pytest.raises(MisconfigurationException, match="^" + re.escape(advice)):
        Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)


@pytest.mark.parametrize(
    "strategy", [GradAvgStrategy(start_method="fork"), "gradavg_notebook"], ids=["instance", "name"]
)
def test_a_notebook_may_fork(monkeypatch, strategy):
    """Processes that are forked need no script."""
    monkeypatch.setattr(imports, "_IS_INTERACTIVE", True)
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    assert trainer.strategy.launcher.is_interactive_compatible


def test_fabric_is_told_of_its_strategy():
    """Fabric cannot use a strategy of the Trainer; its error names its own, and what there is for other loops."""
    told = r"nor Fabric can use it.* lightning_gradavg\.fabric\.GradAvgS.* call lightning_gradavg\.average_gradients"
    with pytest.raises(ValueError, match=told):
        Fabric(strategy=GradAvgStrategy(), accelerator="cpu", devices=2)
