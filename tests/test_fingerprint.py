"""A fingerprint stands for every bit of a state."""

from __future__ import annotations

from copy import deepcopy

import torch

from lightning_gradavg.fingerprint import combined, state_digests


class Net(torch.nn.Module):
    """Has a parameter of each sort and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.narrow = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.wave = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.empty = torch.nn.Parameter(torch.empty(0))
        self.register_buffer("count", torch.tensor(3), persistent=False)


def trained() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.AdamW([{"params": net.linear.parameters()}, {"params": [net.narrow, net.wave], "lr": 0.5}])
    sum(parameter.abs().float().square().sum() for parameter in net.parameters()).backward()
    optimizer.step()
    return net, optimizer


def test_one_bit_changes_the_fingerprint():
    """The least change of any tensor or number of the state changes its own digest, and with it the fingerprint."""
    net, optimizer = trained()
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


def test_equal_states_have_equal_fingerprints():
    """A copy of a state has the fingerprint of the state, which does not read where a tensor lies."""
    net, optimizer = trained()
    twin, other = deepcopy((net, optimizer))
    twin.linear.weight.data = twin.linear.weight.data.t().contiguous().t()
    expected = state_digests(net, [optimizer])
    assert expected == state_digests(twin, [other])
    assert 16 == len(combined(expected))
