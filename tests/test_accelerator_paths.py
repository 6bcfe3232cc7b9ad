"""Paths on the simulated accelerator: right values, no race, nothing freed early, waits and operators as stated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gpu
import pytest
import torch
from accelerator.seen import Seen, observed, seen
from accelerator_paths import COUNTED, PATHS, SIMULATED, Operators, Outcome, perform
from ranks import RankPool

from lightning_gradavg.reduction.weights import as_weight

Worlds = Callable[[int], RankPool]
PAGE = Path(__file__).parent.parent / "docs" / "accelerators.md"


def waits() -> int:
    return len(seen().waits_in("lightning_gradavg/"))


def on_sim(name: str) -> tuple[Outcome, dict[str, float]]:
    return perform(name, "sim", {"waits": waits})


@pytest.mark.parametrize("name", SIMULATED)
def test_a_path_on_the_accelerator(name: str, sim_world: Worlds, world: Worlds) -> None:
    """The numbers are those of the CPU."""
    path = PATHS[name]
    ranks = len(path.nodes)
    expected = [outcome for outcome, _ in world(ranks).run(perform, name, "cpu")]
    found: list[tuple[tuple[Outcome, dict[str, float]], Seen]] = sim_world(ranks).run(observed, on_sim, name)
    for ((outcome, counts), device), reference in zip(found, expected, strict=True):
        assert_close(outcome, reference, path.tolerance)
        assert [] == device.races
        assert [] == device.early_frees
        if path.waits is not None:
            assert path.waits == counts["waits"], device.waits_in("lightning_gradavg/")[-5:]


def assert_close(found: Outcome, expected: Outcome, tolerance: float) -> None:
    assert list(expected) == list(found)
    for name, values in expected.items():
        mine, its = torch.tensor(found[name]), torch.tensor(values)
        assert mine.shape == its.shape, name
        assert float((mine - its).norm()) <= tolerance * float(its.norm()) + 1e-12, name


def dispatched(name: str) -> dict[str, float]:
    """Body: return what torch dispatches for the device in an optimizer step."""
    with Operators() as operators:
        return perform(name, "sim", {what: operators.of(what) for what in operators.counts})[1]


def test_the_page_says_what_a_step_dispatches(sim_world: Worlds) -> None:
    """The table of docs/accelerators.md, counted on rank 0."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text("utf-8").splitlines()]
    stated = {row[0]: row[1:] for row in rows if row and row[0] in COUNTED}
    found = {name: sim_world(len(PATHS[name].nodes)).run(dispatched, name)[0] for name in COUNTED}
    assert {name: [f"{count:g}" for count in counts.values()] for name, counts in found.items()} == stated


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(1800)
def test_every_path_on_cuda() -> None:
    """On NCCL, too, the numbers are those of the CPU."""
    assert 0 == gpu.main([])


def test_the_script_for_gpus_works(capsys: pytest.CaptureFixture[str]) -> None:
    """Without one it runs the paths on gloo, and prints a table."""
    assert 0 == gpu.main(["--device", "cpu", "--only", "data_parallel", "hooks.bfloat16", "NaN*"])
    assert "NaN weight" in capsys.readouterr().out


def counted_on() -> float:
    """Body: go on counting in the tensor that was given as a weight."""
    count = torch.tensor(3.0, dtype=torch.float64, device="sim")
    weight = as_weight(count, count.device)
    count.add_(4)
    return float(weight)


def test_a_weight_is_what_it_was_when_it_was_given(sim_world: Worlds) -> None:
    """A user may count on in the same tensor, on an accelerator as on a CPU."""
    assert [3.0, 3.0] == sim_world(2).run(counted_on)
