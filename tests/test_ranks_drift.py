"""Replicas that drift apart are an error on all ranks, at the next comparison."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import make_trainer
from torch import Tensor
from toys import Toy, loader

from lightning_gradavg import GradAvgMonitor, GradAvgStrategy
from lightning_gradavg.faults.drift import drifted


class Drifts(Toy):
    """Changes something on rank 1 after a batch."""

    mean: Tensor

    def __init__(self, what: str, batch: int) -> None:
        super().__init__(start=[1.0, 2.0])
        self.register_buffer("mean", torch.zeros(3))
        self.what, self.batch = what, batch

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.calls += 1
        if dist.get_rank() == 1 and self.seen.calls == self.batch:
            changed = {"w": self.w.data, "mean": self.mean}[self.what]
            changed[1] += 1e-3


def train_drifting(strategy: dict[str, Any], what: str, batch: int, monitor: int | None = None) -> int:
    """Body: train two epochs of four batches; return how many were trained on."""
    model = Drifts(what, batch)
    callbacks = [GradAvgMonitor(check_parameters_every_n_steps=monitor)] if monitor is not None else []
    options: dict[str, Any] = {"max_epochs": 2, "use_distributed_sampler": False, "callbacks": callbacks}
    try:
        make_trainer(GradAvgStrategy(**strategy), **options).fit(model, loader([[1.0, 2.0]] * 4))
    except RuntimeError as error:
        raise RuntimeError(f"after batch {model.seen.calls}: {error}") from None
    return model.seen.calls


@pytest.mark.parametrize(
    ("every", "monitor", "batch", "found"),
    [
        *((1, None, 2, 2), (3, None, 2, 3), (1000, None, 2, 4), (1000, None, 6, 8), (1, None, 8, 8)),
        *((None, 1, 2, 3), (None, 4, 2, 4)),
    ],
)
def test_a_changed_weight(world, every, monitor, batch, found):
    """Case 52: 1e-3 on one weight of rank 1 is found at the next comparison: by steps, or at the end of the epoch.

    A monitor compares before the module's own `on_train_batch_end`.
    """
    seen = found if monitor is None else found - 1
    strategy = {"check_replicas_every_n_steps": every}
    raised = world(2).run_expecting_errors(train_drifting, strategy, "w", batch, monitor)
    assert ["RuntimeError"] * 2 == [one.type_name for one in raised]
    for one in raised:
        assert one.message.startswith(f"after batch {seen}: the ranks drifted apart: after {found} optimizer steps")
        assert "parameter 'w' is not the same on all of them: another one is on rank 1" in one.message


def test_what_is_compared(world):
    """None compares nothing; of three ranks the one in the minority is named.

    Buffers are compared where ranks hold the same after every step, and may differ where DDP broadcasts them.
    """
    every = {"check_replicas_every_n_steps": 1}
    assert [8, 8] == world(2).run(train_drifting, {"check_replicas_every_n_steps": None}, "w", 2)
    assert [8, 8] == world(2).run(train_drifting, every, "mean", 2)
    raised = world(2).run_expecting_errors(train_drifting, {**every, "equivalent_to": "data_parallel"}, "mean", 2)
    assert all("buffer 'mean' is not the same" in one.message for one in raised)
    raised = world(3).run_expecting_errors(train_drifting, every, "w", 2)
    assert all("another one is on rank 1." in one.message for one in raised)


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)


def first_that_differs() -> list[str | None]:
    """Body: compare parameters of all dtypes, of which none, then each in turn is changed on the last rank by a bit."""
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(4, 3, dtype=dtype).T) for dtype in DTYPES])
    found = [drifted(module.named_parameters())]
    for parameter in module:
        element = torch.view_as_real(parameter.data) if parameter.is_complex() else parameter.data
        bits = element.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[element.element_size()])
        bits[1, -1] ^= int(dist.get_rank() == dist.get_world_size() - 1)
        found.append(drifted(module.named_parameters()))
        bits[1, -1] ^= int(dist.get_rank() == dist.get_world_size() - 1)
    return [None if one is None else one[0] for one in found]


def test_one_bit_is_found(world):
    """Case 52: one bit of one element of a parameter of any dtype is found on all ranks, and equal ones are not."""
    assert [[None, *map(str, range(len(DTYPES)))]] * 3 == world(3).run(first_that_differs)
