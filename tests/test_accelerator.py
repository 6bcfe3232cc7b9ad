"""On a device that is not the CPU: values equal those of the CPU, and waits of the host and operators are as stated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import gpu
import pytest
import torch
from accelerator import Wait, counts, waits
from accelerator_paths import COUNTED, PATHS, SIMULATED, Outcome, perform
from ranks import RankPool

import lightning_gradavg
from lightning_gradavg.reduction.weights import as_weight

Worlds = Callable[[int], RankPool]
PACKAGE = str(Path(lightning_gradavg.__file__).parent)
ASKED = ("collectives", "operators", "copies to the host")
PAGE = Path(__file__).parent.parent / "docs" / "accelerators.md"


def on_sim(name: str) -> tuple[Outcome, float | None]:
    """Body: run a path; return what came of it, and the waits per step at lines of the package."""
    with waits() as found:

        def of_package() -> int:
            return sum(wait.where.startswith(PACKAGE) for wait in found)

        outcome, counts = perform(name, "sim", {"waits": of_package})
    return outcome, counts.get("waits")


@pytest.mark.parametrize("name", SIMULATED)
def test_a_path_equals_that_on_the_cpu_and_waits_as_stated(name: str, sim_world: Worlds, world: Worlds) -> None:
    path = PATHS[name]
    ranks = len(path.nodes)
    expected = [outcome for outcome, _ in world(ranks).run(perform, name, "cpu")]
    for (outcome, waited), reference in zip(sim_world(ranks).run(on_sim, name), expected, strict=True):
        assert gpu.error_of(outcome, reference) <= path.tolerance
        assert path.waits in (None, waited)


def asked(name: str) -> dict[str, float]:
    """Body: return what the device is asked for in an optimizer step."""
    return perform(name, "sim", {what: partial(counts.__getitem__, what) for what in ASKED})[1]


def test_the_page_says_what_a_step_asks_for(sim_world: Worlds) -> None:
    """The table of docs/accelerators.md, counted on rank 0."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text("utf-8").splitlines()]
    stated = {row[0]: row[1:] for row in rows if row and row[0] in COUNTED}
    found = {name: sim_world(len(PATHS[name].nodes)).run(asked, name)[0] for name in COUNTED}
    assert {name: [f"{count:g}" for count in counts.values()] for name, counts in found.items()} == stated


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(1800)
def test_every_path_on_cuda_and_nccl() -> None:
    assert 0 == gpu.main([])


def test_the_script_for_gpus_runs_on_gloo_and_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == gpu.main(["--device", "cpu", "--only", "weights on the host", "n*=skip_step"])
    assert "weights on the host" in capsys.readouterr().out


def counted_on() -> float:
    count = torch.tensor(3.0, dtype=torch.float64, device="sim")
    weight = as_weight(count, count.device)
    count.add_(4)
    return float(weight)


def test_a_weight_is_what_it_was_when_it_was_given(sim_world: Worlds) -> None:
    assert [3.0, 3.0] == sim_world(2).run(counted_on)


def waiting_operators() -> list[Wait]:
    ones = torch.ones(4, device="sim")
    with waits() as found:
        ones.nonzero()
        ones[ones > 0]
        ones[ones > 0] = 1.0
        ones.tolist()
        torch.empty(4, pin_memory=True).copy_(ones, non_blocking=True)  # not waited for
        torch.empty(4).copy_(ones, non_blocking=True)  # not pinned
        torch.tensor(1.0, device="sim")
        torch.ones(4).to("sim", non_blocking=True)
        torch.equal(ones, ones)
    return list(found)


def test_each_wait_of_the_host_is_told_with_its_line(sim_world: Worlds) -> None:
    [found] = sim_world(1).run(waiting_operators)
    first = waiting_operators.__code__.co_firstlineno + 2
    assert [
        ("aten::nonzero", 1),
        ("aten::nonzero", 2),
        ("aten::_index_put_impl_", 3),
        ("copy to the host", 4),
        ("copy to the host", 6),
        ("copy to the device", 7),
        ("aten::equal", 9),
    ] == [(wait.what, int(wait.where.rpartition(":")[2]) - first) for wait in found]


def mixed() -> None:
    torch.ones(2, device="sim") + torch.ones(2)


def test_tensors_of_two_devices_are_refused_as_on_cuda(sim_world: Worlds) -> None:
    [raised] = sim_world(1).run_expecting_errors(mixed)
    assert "Expected all tensors to be on the same device" in raised.message
