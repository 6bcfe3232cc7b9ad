"""Replicas that drift apart are an error on all ranks, at the next comparison."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import make_trainer, on_ranks
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

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        if dist.get_rank() == 1 and self.trainer.global_step == self.batch:
            getattr(self, self.what).data[1] += 1e-3


def train_drifting(what: str, batch: int, every: int | None = 1, monitor: int | None = None, **strategy: Any) -> int:
    """Body: train two epochs of four batches, and return the steps."""
    callbacks = [GradAvgMonitor(check_parameters_every_n_steps=monitor)] if monitor is not None else []
    options: dict[str, Any] = {"max_epochs": 2, "use_distributed_sampler": False, "callbacks": callbacks}
    trainer = make_trainer(GradAvgStrategy(check_replicas_every_n_steps=every, **strategy), **options)
    trainer.fit(Drifts(what, batch), loader([[1.0, 2.0]] * 4))
    return trainer.global_step


@pytest.mark.parametrize(
    ("every", "monitor", "batch", "found"),
    [
        *((1, None, 2, 2), (3, None, 2, 3), (1000, None, 2, 4), (1000, None, 6, 8), (1, None, 8, 8)),
        # A monitor compares before the module's own `on_train_batch_end`.
        *((None, 1, 2, 3), (None, 4, 2, 4)),
    ],
)
def test_a_changed_weight(world, every, monitor, batch, found):
    """Case 52: 1e-3 on one weight of rank 1 is found at the next comparison: by steps, or at the end of the epoch."""
    for raised in world(2).run_expecting_errors(train_drifting, "w", batch, every, monitor):
        assert raised.type_name == "RuntimeError"
        assert raised.message.startswith(f"the ranks drifted apart: after {found} optimizer steps parameter 'w' is not")


@pytest.mark.parametrize(
    ("size", "what", "options", "found"),
    [
        (2, "w", {"every": None}, None),
        # Buffers may differ where DDP broadcasts them before the next forward.
        (2, "mean", {}, None),
        (2, "mean", {"equivalent_to": "data_parallel"}, "buffer 'mean' is not the same on all of them"),
        (3, "w", {}, "another one is on rank 1."),
    ],
)
def test_what_is_compared(world, size, what, options, found):
    for ended in world(size).run_expecting_errors(train_drifting, what, 2, **options):
        assert ended == 8 if found is None else found in ended.message


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)


@on_ranks(3)
def test_one_bit_is_found():
    """Case 52: one bit of one element of a parameter of any dtype is found on all ranks, and equal ones are not."""
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(4, 3, dtype=dtype).T) for dtype in DTYPES])
    assert drifted(module.named_parameters()) is None
    for index, parameter in enumerate(module):
        element = torch.view_as_real(parameter.data) if parameter.is_complex() else parameter.data
        bits = element.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[element.element_size()])
        bits[1, -1] ^= int(dist.get_rank() == 2)
        assert (str(index), [2]) == drifted(module.named_parameters())
        bits[1, -1] ^= int(dist.get_rank() == 2)
