"""The backward does not stop for the totals of a weighted rule: buckets that come before them wait, and go in order."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import make_trainer
from torch import nn
from toys import Toy, loader, same_everywhere

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.reduction.window import MOST_TERMS, Totals

SUMMARY = Totals.NORMALIZERS + MOST_TERMS
LAYERS = 6
WIDTH = 16


class Late:
    """A sum under way of which nobody learns that it is complete, but by waiting."""

    def __init__(self, work: Any, events: list[str]) -> None:
        self._work = work
        self._events = events

    def is_completed(self) -> bool:
        self._events.append("asked")
        return False

    def wait(self) -> Any:
        self._events.append("waited")
        return self._work.wait()


class Deep(Toy):
    """Several layers, each of them a bucket under a small cap, and a collective of its own in the backward of each."""

    def __init__(self, talks: bool) -> None:
        super().__init__(start=[1.0], dtype=torch.float32)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.talks = talks

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        generator = torch.Generator().manual_seed(10 * batch_idx + dist.get_rank())
        x = torch.randn(4, WIDTH, generator=generator) * self.w
        for layer in self.layers:
            x = layer(x).tanh()
            if self.talks:
                x.register_hook(self.average)
        return {"loss": x.square().mean(), "weight": 1.5 + 2 * dist.get_rank() + batch_idx}

    def average(self, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.detach().clone()
        dist.all_reduce(total)
        return gradient + 0 * total

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.gradients.append(torch.cat([p.grad.flatten() for p in self.parameters()]))


def train_late(late_ranks: tuple[int, ...], talks: bool, options: dict[str, Any]) -> Any:
    """Body: train where the totals come late on some ranks; return what was seen and the events of this rank."""
    torch.manual_seed(0)
    model, original = Deep(talks), dist.all_reduce
    events: list[str] = []

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = original(tensor, *args, **kwargs)
        if tensor.numel() == SUMMARY and tensor.dtype == torch.float64:
            return Late(work, events) if dist.get_rank() in late_ranks else work
        # The flag of termination is an integer.
        events.append("sum" if kwargs.get("async_op") and tensor.is_floating_point() else "other")
        return work

    trainer = make_trainer(
        GradAvgStrategy(reduction="weighted_mean", bucket_cap_mb=0.0005, **options),
        max_epochs=1,
        use_distributed_sampler=False,
    )
    dist.all_reduce = all_reduce  # type: ignore[assignment]  # for this body only
    try:
        trainer.fit(model, loader([[1.0]] * 3))
    finally:
        dist.all_reduce = original
    return model.seen, events


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("talks", [False, True], ids=["quiet", "collectives in the backward"])
@pytest.mark.parametrize("late_ranks", [(0,), (1,), (0, 1)], ids=str)
def test_late_totals_change_nothing(world, late_ranks, talks, options):
    """Wherever the totals come late, gradients have the same bits, and no collective meets another one."""
    on_time = same_everywhere([seen for seen, _ in world(2).run(train_late, (), talks, options)])
    late = same_everywhere([seen for seen, _ in world(2).run(train_late, late_ranks, talks, options)])
    assert 3 == len(late.gradients)
    for mine, theirs in zip(late.gradients, on_time.gradients, strict=True):
        assert torch.equal(mine, theirs)


def test_backward_goes_on_without_the_totals(world):
    """All hooks but that of the last bucket return without a wait, and then all buckets are summed."""
    for _, events in world(2).run(train_late, (0, 1), False, {}):
        steps = re.findall(r"((?:asked )*)waited ((?:sum )+)", "".join(f"{e} " for e in events if e != "other"))
        asked, sums = zip(*((a.split(), b.split()) for a, b in steps), strict=True)
        # Before the first step ends, DDP has not cut its buckets yet.
        assert 3 == len(sums)
        assert all(len(one) >= LAYERS for one in sums[1:])
        assert [len(one) - 1 for one in sums] == [len(one) for one in asked]
