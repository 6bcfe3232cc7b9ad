"""Lightning's own tests of DDP, unedited, with GradAvgStrategy in DDPStrategy's place: see `swapped.py`.

They are not in the wheel. Where a checkout is at hand, of the release that is installed or near it:

    git clone --depth 1 --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning
    LIGHTNING_CHECKOUT=pytorch-lightning make test PYTEST_ARGS=tests/lightning_suite

Tried with 2.6.5 (be98784a) against lightning 2.6.6. Tests that need GPUs are run on CPU processes, as far as they can
be. Some need `tensorboardX`, too.
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


def run_tests(*tests: str, swapped: bool, on_cpu: bool = False) -> subprocess.CompletedProcess[str]:
    """Run pytest on tests of Lightning."""
    folder = Path(str(CHECKOUT)).resolve() / "tests"
    plugin = {"SWAPPED": str(int(swapped)), "RUN_ONLY_CUDA_TESTS": str(int(on_cpu))}
    path = {"PYTHONPATH": os.pathsep.join(map(str, (folder, HERE, HERE.parents[1])))}
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rfE", "--color=no", "--timeout=180"),
            *("-o", "addopts=", "-p", "swapped", *tests),  # Lightning's own options collect doctests, too
        ],
        cwd=folder / "tests_pytorch",
        env={**os.environ, **plugin, **path},
        capture_output=True,
        text=True,
        check=False,
    )


def failures(*tests: str, swapped: bool) -> set[str]:
    """Run tests of Lightning and return the names of those that fail, after asserting that they were run."""
    done = run_tests(*tests, swapped=swapped)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return set(re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE))


def passes_on_cpu(test: str, *, swapped: bool) -> bool:
    """Run a test that needs GPUs on CPU processes; a failure of one of them may end the one that reports, too."""
    name = test if swapped else test.replace("GradAvgStrategy", "DDPStrategy")
    return run_tests(name, swapped=swapped, on_cpu=True).returncode == 0


@pytest.mark.parametrize("file", FILES)
def test_what_stock_passes_passes(file):
    """Whatever fails with our class either fails with stock DDP, too, or stands in the list of refusals."""
    failed = failures(file, swapped=True) - REFUSALS
    assert set() == failed - (failures(*failed, swapped=False) if failed else set())


@pytest.mark.parametrize("file", FILES)
def test_what_stock_passes_on_two_processes_passes(file):
    """Likewise of the tests that need up to two GPUs, on as many CPU processes, and each in a process of its own."""
    listed = run_tests(file, "--collect-only", swapped=True, on_cpu=True).stdout
    tests = set(re.findall(rf"{re.escape(file)}::.+", listed)) - REFUSALS
    failed = {test for test in tests if not passes_on_cpu(test, swapped=True)}
    assert set() == {test for test in failed if passes_on_cpu(test, swapped=False)}
