"""Random streams of replicas: what is drawn depends on seed, step and replica, and nothing else is disturbed."""

from __future__ import annotations

import random
from collections import defaultdict
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gradavg.random_state import random_state, restore_random_state
from lightning_gradavg.replicas.part import replica_stream

CPU = torch.device("cpu")


def draws() -> tuple[Any, ...]:
    """One draw from every generator; NumPy's is of the kind that keeps a second number back."""
    return torch.rand(()).item(), random.random(), np.random.randn(), np.random.rand()  # noqa: NPY002  # the global generator


def drawn(seed: int, step: int, replica: int) -> tuple[Any, ...]:
    with replica_stream(seed, step, replica, CPU):
        return draws()


def test_draws_differ_between_replicas_and_steps_and_repeat():
    """Whatever the process draws, and before; and no two generators make the same stream."""
    triples = [(seed, step, replica) for seed in (0, 1, 2**40) for step in range(4) for replica in range(4)]
    first = [drawn(*triple) for triple in triples]
    draws()
    again = [drawn(*triple) for triple in reversed(triples)]
    assert first == again[::-1]
    for generator in zip(*first, strict=True):
        assert len(triples) == len(set(generator))
    with replica_stream(0, 0, 0, CPU):
        python, numpy = [random.random() for _ in range(64)], np.random.rand(64)  # noqa: NPY002  # the global generator
        assert 3 * 64 == len({*python, *numpy.tolist(), *torch.rand(64, dtype=torch.float64).tolist()})


@pytest.mark.parametrize("fails", [False, True])
def test_all_generators_are_put_back(fails):
    draws()  # an odd number of draws from NumPy's normal distribution leaves one for the next
    state = random_state()
    expected = draws()
    restore_random_state(state)

    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), replica_stream(3, 1, 2, CPU):
        draws()
        assert 1 / (not fails)

    assert expected == draws()


@pytest.mark.gpu
def test_the_device_draws_from_the_stream_without_a_wait() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    before, mode = torch.cuda.get_rng_state(device), torch.cuda.get_sync_debug_mode()
    seen = defaultdict[tuple[int, int], list[Tensor]](list)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step, replica in [(0, 0), (0, 1), (1, 0)] * 2:
            with replica_stream(0, step, replica, device):
                seen[step, replica].append(torch.rand(8, device=device))
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert torch.equal(before, torch.cuda.get_rng_state(device))
    assert all(torch.equal(first, again) for first, again in seen.values())
    assert 3 == len({tuple(first.tolist()) for first, _ in seen.values()})
