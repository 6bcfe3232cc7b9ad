"""The benchmark for a GPU, as far as a CPU goes."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu


def event(name: str, category: str, microseconds: float) -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "dur": microseconds, "ts": 0.0}


def test_kernels_of_a_trace():
    """NCCL's kernels are told from the others, copies count, and annotations that span kernels do not."""
    events = [
        event("void at::native::vectorized_elementwise_kernel", "kernel", 250.0),
        event("ncclDevKernel_AllReduce_Sum_f32", "kernel", 1000.0),
        event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 125.0),
        event("Memset (Device)", "gpu_memset", 125.0),
        event("nccl:all_reduce", "gpu_user_annotation", 1000.0),
        event("cudaLaunchKernel", "cuda_runtime", 7.0),
        {"ph": "M", "name": "process_name"},
    ]
    assert (0.5, 1.0, 4) == gpu.kernels_of({"traceEvents": events})


def test_clock_without_a_device():
    """On a CPU a clock counts as many steps as it was told, and objects to any other number."""
    clock = gpu.DeviceClock(2, torch.device("cpu"), "time")
    for _ in range(gpu.WARMUP + 2):
        clock.tick()
    with pytest.raises(RuntimeError, match="a variant ticked 5 times instead of 6"):
        _ = clock.step_ms
    clock.tick()
    assert clock.step_ms >= 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda(capsys):
    """Without a GPU the command says so, names the way out, and has the exit code 2."""
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--all"])
    assert 2 == ended.value.code
    assert "there is no CUDA device here: run it on a machine with a GPU, or on the CPU by" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--rounds", "0"], "got [1, 2], 0, 10, 10 and 1.0"), (["--models", "vgg"], "invalid choice: 'vgg'")],
)
def test_bad_arguments(arguments, message, capsys):
    """A bad argument is quoted, before anything is started."""
    with pytest.raises(SystemExit):
        gpu.main(["--backend", "gloo", *arguments])
    assert message in capsys.readouterr().err


def test_summary_of_checks():
    """A check counts as failed if any rank failed, and is named."""
    checks = {"2": {"a": [["passed", "", 1.0]] * 2, "b": [["passed", "", 1.0], ["failed", "text", 0.0]]}}
    assert ["checks on 2 ranks: 1 passed, 0 skipped, 1 failed: b"] == gpu._summary(checks)
