"""A fingerprint stands for every bit of a state, and two runs' logs tell the first step and tensor where they part."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import make_trainer
from toys import Toy, loader

from lightning_gradavg import GradAvgMonitor, GradAvgStrategy
from lightning_gradavg.cli import main
from lightning_gradavg.fingerprint import StateLog, combined, parting_of, state_digests


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


def flip_a_bit(tensor: torch.Tensor) -> None:
    """Change the last bit of the first number, in place."""
    plain = tensor.untyped_storage()
    plain[tensor.storage_offset() * tensor.element_size()] = plain[0] ^ 1


NAMES = ("linear.weight", "narrow", "wave", "count", "optimizer 0, narrow['exp_avg']", "optimizer 0, group 1['lr']")


@pytest.mark.parametrize("name", NAMES)
def test_one_bit_changes_the_fingerprint(name):
    """The least change of any tensor or number of the state changes its own digest, and with it the fingerprint."""
    net, optimizer = trained()
    before = state_digests(net, [optimizer])
    tensors: dict[str, Any] = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    tensors["optimizer 0, narrow['exp_avg']"] = optimizer.state[net.narrow]["exp_avg"]
    if name in tensors:
        flip_a_bit(tensors[name].detach())
    else:
        optimizer.param_groups[1]["lr"] = 0.5000000001
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
    assert {*NAMES} < expected.keys()


def log_of(path: Any, **states: dict[str, str]) -> StateLog:
    log = StateLog(path)
    for step, digests in states.items():
        log.add(int(step.removeprefix("step")), digests)
    return log


def test_where_two_runs_part(tmp_path, capsys):
    """The first step that differs is named with its first tensor, by exit code 1; equal runs end with 0."""
    same = {"w": "a", "v": "b"}
    first = log_of(tmp_path / "a", step1=same, step2=same, step3={"w": "a", "v": "c"}, step4={"w": "d", "v": "c"})
    second = log_of(tmp_path / "b", step2=same, step3={"w": "a", "v": "d"}, step4={"w": "e", "v": "e"})
    assert 1 == main(["verify", "--until-differs", str(first.path), str(second.path)])
    text = capsys.readouterr().out
    assert "part in step 3:\n  first in 'v'; 1 of 2 tensors and numbers differ\n" in text
    assert "the last step that both logged with the same bits: 2" in text
    assert 1 == main(["verify", "--json", "--until-differs", str(first.path), str(second.path)])
    found = json.loads(capsys.readouterr().out)
    assert {"compared": [2, 3, 4], "step": 3, "names": ["v"], "total": 2} == found
    assert 0 == main(["verify", "--until-differs", str(first.path), str(first.path)])
    assert "the same bits in the 4 steps that both runs logged, 1 to 4" in capsys.readouterr().out


def test_a_tensor_that_one_run_lacks(tmp_path):
    """A tensor that only one of the runs has is a difference."""
    first, second = log_of(tmp_path / "a", step1={"w": "a"}), log_of(tmp_path / "b", step1={"w": "a", "v": "b"})
    assert ("v",) == parting_of(first, second).names


def test_logs_that_cannot_be_compared(tmp_path, capsys):
    """Logs without a common step, that are not there or hold something else are errors, and no verdict."""
    first, second = log_of(tmp_path / "a", step1={}), log_of(tmp_path / "b", step2={})
    assert 2 == main(["verify", "--until-differs", str(first.path), str(second.path)])
    assert "no step is in both logs" in capsys.readouterr().err
    assert 2 == main(["verify", "--until-differs", str(first.path), str(tmp_path / "c")])
    assert "there is no file" in capsys.readouterr().err
    (tmp_path / "d").write_text("nothing\n" + first.path.read_text())
    assert 2 == main(["verify", "--until-differs", str(first.path), str(tmp_path / "d")])
    assert "line 1 is no state of a run: 'nothing'" in capsys.readouterr().err


def test_a_log_of_a_killed_run_is_read(tmp_path):
    """A last line that was not written whole is left out, and of a step that was taken again the later state counts."""
    log = log_of(tmp_path / "a", step1={"w": "a"}, step2={"w": "b"})
    log.add(2, {"w": "c"})
    with log.path.open("a") as file:
        file.write('{"step": 3, "fing')
    assert {1: {"w": "a"}, 2: {"w": "c"}} == log.read()


def train(path: str, start: float) -> None:
    """Body: train three steps on two ranks, and log the state after every one."""
    monitor = GradAvgMonitor(every_n_steps=1, state_log=path)
    trainer = make_trainer(GradAvgStrategy(), max_epochs=1, use_distributed_sampler=False, callbacks=[monitor])
    trainer.fit(Toy(kind="s", start=start), loader([[1.0 + dist.get_rank()]] * 3))


def test_the_monitor_logs_the_state(world, tmp_path):
    """The monitor adds one line per logged step, once for all ranks; another start differs from the first step on."""
    for name, start in (("a", 1.0), ("b", 1.0), ("c", 1.5)):
        world(2).run(train, str(tmp_path / name), start)
    logs = {name: StateLog(tmp_path / name) for name in "abc"}
    assert (1, 2, 3) == parting_of(logs["a"], logs["b"]).compared
    assert None is parting_of(logs["a"], logs["b"]).step
    assert (1, ("w",)) == (parting_of(logs["a"], logs["c"]).step, parting_of(logs["a"], logs["c"]).names)
    assert 3 == len(logs["a"].path.read_text().splitlines())
