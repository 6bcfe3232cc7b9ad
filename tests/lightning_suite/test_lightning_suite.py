"""Lightning's own tests of DDP, unedited, with GradAvgStrategy in DDPStrategy's place: see `swapped.py`.

They are not in the wheel. Where a checkout is at hand, of the release that is installed or near it:

    git clone --depth 1 --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning
    LIGHTNING_CHECKOUT=pytorch-lightning make test PYTEST_ARGS=tests/lightning_suite

Tried with 2.6.5 against lightning 2.6.6 on 2026-11-26. Tests that need GPUs are skipped without them; some need
`tensorboardX`, too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CHECKOUT = os.environ.get("LIGHTNING_CHECKOUT")
REFUSALS = {line.split("  ")[0] for line in (HERE / "refusals.txt").read_text("utf-8").splitlines()}
FILES = [
    "strategies/test_ddp.py",
    "strategies/test_ddp_integration.py",
    "strategies/test_ddp_integration_comm_hook.py",
    "strategies/test_registry.py",
    "strategies/test_common.py",
    "strategies/launchers/test_subprocess_script.py",
    "strategies/launchers/test_multiprocessing.py",
    "overrides/test_distributed.py",
    "trainer/logging_/test_distributed_logging.py",
    "models/test_ddp_fork_amp.py",
    "models/test_hooks.py",
    "trainer/test_ddp_sigterm_handling.py",
    "trainer/connectors/test_accelerator_connector.py",
    "trainer/optimization/test_manual_optimization.py",
    "callbacks/test_stochastic_weight_avg.py",
    "callbacks/test_weight_averaging.py",
    "checkpointing/test_checkpoint_callback_frequency.py",
    "core/test_metric_result_integration.py",
    "utilities/test_all_gather_grad.py",
]

pytestmark = [
    pytest.mark.skipif(
        CHECKOUT is None, reason="set LIGHTNING_CHECKOUT to a checkout of Lightning, which has the tests"
    ),
    pytest.mark.timeout(1200),
]


def failures(*tests: str, plugins: tuple[str, ...] = ()) -> set[str]:
    """Run tests of Lightning and return the names of those that fail, after asserting that they were run."""
    folder = Path(str(CHECKOUT)).resolve() / "tests"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rfE", "--color=no", "--timeout=180"),
            *("-o", "addopts=", *plugins, *tests),  # Lightning's own options collect doctests, too
        ],
        cwd=folder / "tests_pytorch",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, HERE, HERE.parents[1])))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return set(re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE))


@pytest.mark.parametrize("file", FILES)
def test_what_stock_passes_passes(file):
    """Whatever fails with our class either fails with stock DDP, too, or stands in the list of refusals."""
    failed = failures(file, plugins=("-p", "swapped")) - REFUSALS
    assert set() == failed - (failures(*failed) if failed else set())
