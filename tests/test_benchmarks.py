"""The benchmark of a step runs as a rank of torchrun, to its file; what it measures is not looked at."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks import step
from benchmarks.world import World


def measure(*arguments: str) -> None:
    """Body: be a rank of the benchmark, in the process group that is there."""
    rank, size = dist.get_rank(), dist.get_world_size()
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in {**told, "TORCHELASTIC_RUN_ID": 1}.items()})
    with mock.patch.object(step, "joined", return_value=nullcontext(World(torch.device("cpu"), size))):
        step.main(arguments)


@pytest.mark.skipif(sys.platform != "linux", reason="the bytes are counted by Linux")
def test_step_saves_its_numbers(world, tmp_path):
    names, output = ["DDP", "GradAvg weighted_mean"], tmp_path / "found.json"
    options = ["--models", "mlp", "--rounds", "1", "--steps", "1", "--output", str(output), "--only", *names]
    world(2).run(measure, *options)
    (model,) = json.loads(output.read_text())["models"]
    assert (2, names) == (model["world_size"], sorted(model["seconds"]))
    # Half of a ring's traffic leaves each of two ranks, and both share the interface.
    assert model["sent"]["DDP"][0] > model["gradient_bytes"]
