"""States: a fingerprint stands for every bit, and random streams of replicas disturb nothing else."""

from __future__ import annotations

import random
from collections import defaultdict
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg._support.fingerprint import combined, state_digests
from lightning_gradavg._support.random_state import drawing_from, random_state, restore_random_state, stream_key

CPU = torch.device("cpu")


def draws() -> tuple[Any, ...]:
    """One draw from every generator; NumPy's is of the kind that keeps a second number back."""
    return torch.rand(()).item(), random.random(), np.random.randn(), np.random.rand()  # noqa: NPY002  # the global generator


def drawn(seed: int, step: int, replica: int) -> tuple[Any, ...]:
    with drawing_from(stream_key(seed, step, replica), CPU):
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
    with drawing_from(stream_key(0, 0, 0), CPU):
        python, numpy = [random.random() for _ in range(64)], np.random.rand(64)  # noqa: NPY002  # the global generator
        assert 3 * 64 == len({*python, *numpy.tolist(), *torch.rand(64, dtype=torch.float64).tolist()})


@pytest.mark.parametrize("fails", [False, True])
def test_all_generators_are_put_back(fails):
    draws()  # an odd number of draws from NumPy's normal distribution leaves one for the next
    state = random_state()
    expected = draws()
    restore_random_state(state)

    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), drawing_from(stream_key(3, 1, 2), CPU):
        draws()
        assert 1 / (not fails)

    assert expected == draws()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")  # torch 2.11, where it is set
def test_the_device_draws_from_the_stream_without_a_wait() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.get_rng_state(device)
    mode = torch.cuda.get_sync_debug_mode()
    seen = defaultdict[tuple[int, int], list[Tensor]](list)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step, replica in [(0, 0), (0, 1), (1, 0)] * 2:
            with drawing_from(stream_key(0, step, replica), device):
                seen[step, replica].append(torch.rand(8, device=device))
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert torch.equal(before, torch.cuda.get_rng_state(device))
    assert all(torch.equal(first, again) for first, again in seen.values())
    assert 3 == len({tuple(first.tolist()) for first, _ in seen.values()})


def test_a_fingerprint_stands_for_every_bit():
    """The least change of any tensor or number changes its own digest; equal states have equal ones, however stored."""
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    net.narrow, net.wave = (nn.Parameter(torch.ones(3, dtype=each)) for each in (torch.bfloat16, torch.complex64))
    net.empty = nn.Parameter(torch.empty(0))
    net.register_buffer("unsaved", torch.tensor(3), persistent=False)
    optimizer = torch.optim.AdamW([{"params": net[0].parameters()}, {"params": [net.narrow, net.wave], "lr": 0.5}])
    sum(parameter.abs().float().square().sum() for parameter in net.parameters()).backward()
    optimizer.step()
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    tensors["optimizer 0['state'][2]['exp_avg']"] = optimizer.state[net.narrow]["exp_avg"]
    number = "optimizer 0['param_groups'][1]['lr']"
    for name in {*tensors, number} - {"empty"}:
        before = state_digests(net, [optimizer])
        if name == number:
            optimizer.param_groups[1]["lr"] += 1e-10
        else:
            tensors[name].detach().untyped_storage()[0] ^= 1
        after = state_digests(net, [optimizer])
        assert [name] == [key for key in before if before[key] != after[key]]
        assert combined(before) != combined(after)

    twin, other = deepcopy((net, optimizer))
    twin[0].weight.data = twin[0].weight.data.t().contiguous().t()
    assert after == state_digests(twin, [other])
    assert 16 == len(combined(after))


def test_a_process_that_has_not_trained_saves_what_stock_saves(tmp_path):
    """After a fit of forked ranks, `trainer.save_checkpoint` runs in the process that forked them. It raised."""
    trainer = Trainer(accelerator="cpu", devices=2, strategy=GradAvgStrategy(start_method="fork"), logger=False)
    trainer.strategy.save_checkpoint({"global_step": 3}, tmp_path / "forked.ckpt")
    assert {"global_step": 3} == torch.load(tmp_path / "forked.ckpt", weights_only=True)
