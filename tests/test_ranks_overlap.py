"""No bucket waits for the totals of a weighted rule: it is summed as it comes, and scaled when they are there."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import make_trainer
from torch import nn
from torch.futures import Future
from toys import Toy, loader, same_everywhere

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.reduction.reducer import Reducer

LAYERS = 6
WIDTH = 16


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
    """Body: train where the totals arrive late on some ranks, a thread having worked in the meantime."""
    torch.manual_seed(0)
    model, original = Deep(talks), Reducer._future_scale
    late: list[threading.Thread] = []

    def future_scale(self: Reducer, closed: Any) -> Future[Any]:
        arrived = original(self, closed)
        if dist.get_rank() not in late_ranks:
            return arrived
        scale: Future[Any] = Future()

        def arrive() -> None:
            for _ in range(10):
                torch.linalg.svd(torch.ones(100, 100))
            scale.set_result(arrived.wait())

        late.append(threading.Thread(target=arrive))
        late[-1].start()
        return scale

    trainer = make_trainer(
        GradAvgStrategy(reduction="weighted_mean", bucket_cap_mb=0.0005, **options),
        max_epochs=1,
        use_distributed_sampler=False,
    )
    with mock.patch.object(Reducer, "_future_scale", future_scale):
        trainer.fit(model, loader([[1.0]] * 3))
    for thread in late:
        thread.join()
    return model.seen, len(late)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("talks", [False, True], ids=["quiet", "collectives in the backward"])
@pytest.mark.parametrize("late_ranks", [(0,), (1,), (0, 1)], ids=str)
def test_late_totals_change_nothing(world, late_ranks, talks, options):
    """Wherever the totals come late, gradients have the same bits, and no collective meets another one."""
    on_time = same_everywhere([seen for seen, _ in world(2).run(train_late, (), talks, options)])
    ranks = world(2).run(train_late, late_ranks, talks, options)
    assert [3 if rank in late_ranks else 0 for rank in range(2)] == [count for _, count in ranks]
    late = same_everywhere([seen for seen, _ in ranks])
    assert 3 == len(late.gradients)
    for mine, theirs in zip(late.gradients, on_time.gradients, strict=True):
        assert torch.equal(mine, theirs)
