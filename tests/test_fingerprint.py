"""A fingerprint stands for every bit of a state."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from lightning_gradavg.fingerprint import combined, state_digests


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
