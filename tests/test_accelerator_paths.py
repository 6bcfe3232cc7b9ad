"""Every path on the simulated accelerator: right values, no race, nothing freed early, waits as stated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import gpu
import pytest
import torch
from accelerator.seen import Seen, observed, seen
from accelerator_paths import PATHS, Outcome, perform, weighed_losses
from ranks import RankPool

from lightning_gradavg.reduction.window import as_weight

Worlds = Callable[[int], RankPool]
WIRE = {"wire_dtype": "bfloat16"}


def waits() -> int:
    return len(seen().waits_in("lightning_gradavg/"))


def launches() -> int:
    return len(seen().launches)


def on_sim(name: str) -> tuple[Outcome, dict[str, float]]:
    return perform(name, "sim", {"waits": waits, "launches": launches})


@pytest.mark.parametrize("name", PATHS)
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
        assert path.waits == counts.get("waits"), device.waits_in("lightning_gradavg/")[-5:]


@pytest.mark.parametrize(("window", "options", "tolerance"), [(1, {}, 1e-6), (2, {}, 1e-6), (1, WIRE, 1e-2)])
def test_losses_weighed_in_a_plain_loop(
    window: int, options: Any, tolerance: float, sim_world: Worlds, world: Worlds
) -> None:
    """A backward within that of the weighed loss races with nothing, and its numbers are those of the CPU."""
    expected = world(2).run(weighed_losses, "cpu", window, **options)
    found: list[tuple[Outcome, Seen]] = sim_world(2).run(observed, weighed_losses, "sim", window, **options)
    for (outcome, device), reference in zip(found, expected, strict=True):
        assert_close(outcome, reference, tolerance)
        assert [] == device.races
        assert [] == device.early_frees


def assert_close(found: Outcome, expected: Outcome, tolerance: float) -> None:
    assert list(expected) == list(found)
    for name, values in expected.items():
        mine, its = torch.tensor(found[name]), torch.tensor(values)
        assert mine.shape == its.shape, name
        assert float((mine - its).norm()) <= tolerance * float(its.norm()) + 1e-12, name


def test_the_page_has_every_path() -> None:
    """The table of docs/accelerators.md is that of `PATHS`, with ranks and waits."""
    lines = (Path(__file__).parent.parent / "docs" / "accelerators.md").read_text("utf-8").splitlines()
    stated = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines if line.count("|") == 4]
    waits = {name: "" if path.waits is None else f"{path.waits:g}" for name, path in PATHS.items()}
    expected = [(name, str(len(path.nodes)), waits[name]) for name, path in PATHS.items()]
    assert expected == [row for row in stated if row[0] in PATHS and row[1].isdigit()][: len(PATHS)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(1800)
def test_every_path_on_cuda() -> None:
    """On NCCL, too, the numbers are those of the CPU."""
    assert 0 == gpu.main([])


def test_the_script_for_gpus_works(capsys: pytest.CaptureFixture[str]) -> None:
    """Without one it runs the paths on gloo, and prints a table."""
    assert 0 == gpu.main(["--device", "cpu", "--only", "data_parallel", "NaN*"])
    assert "NaN weight" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["weighted_mean", "normalized_sum", "sum", "mean_of_node_means", "sum_of_node_means"])
def test_launches_do_not_grow_with_the_window(name: str, sim_world: Worlds) -> None:
    """Beyond stock a micro-batch costs at most 12 launches, whatever the window, and a step 30."""
    one, four = (launched(sim_world, path) for path in (name, f"{name}, windows of 4"))
    stock = launched(sim_world, "stock DDPStrategy"), launched(sim_world, "stock DDPStrategy, windows of 4")
    per_micro_batch = (four - stock[1] - one + stock[0]) / 3
    assert per_micro_batch <= 12
    assert one - stock[0] - per_micro_batch <= 30


def backwards(name: str) -> int:
    """Body: return how many backwards a path runs."""
    with mock.patch.object(torch.Tensor, "backward", autospec=True, side_effect=torch.Tensor.backward) as backward:
        perform(name, "sim")
    return int(backward.call_count)


def test_named_terms_take_one_backward(sim_world: Worlds) -> None:
    """Without accumulation all terms go through one backward, on an accelerator as on a CPU."""
    assert [PATHS["named terms"].steps] * 2 == sim_world(2).run(backwards, "named terms")


def counted_on() -> float:
    """Body: go on counting in the tensor that was given as a weight."""
    count = torch.tensor(3.0, dtype=torch.float64, device="sim")
    weight = as_weight(count, count.device)
    count.add_(4)
    return float(weight)


def test_a_weight_is_what_it_was_when_it_was_given(sim_world: Worlds) -> None:
    """A user may count on in the same tensor, on an accelerator as on a CPU."""
    assert [3.0, 3.0] == sim_world(2).run(counted_on)


def launched(sim_world: Worlds, name: str) -> float:
    """Return the launches of an optimizer step on rank 0."""
    ranks = sim_world(len(PATHS[name].nodes)).run(observed, on_sim, name)
    (_, counts), _ = ranks[0]
    return float(counts["launches"])
