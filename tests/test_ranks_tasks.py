"""The demo's two tasks with split_batches and plain shuffled loaders, on any world, end as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from grids import grid
from lightning.pytorch import seed_everything
from ranks import make_trainer
from torch.utils.data import DataLoader

from examples import digits, text
from lightning_gradavg import GradAvgStrategy

pytestmark = pytest.mark.filterwarnings("ignore:rank . has a micro-batch of weight 0:UserWarning")

TASKS: dict[str, Any] = {
    "digits": (digits.DigitsClassifier, digits.DigitsData, digits.collate, 453, 64),
    "text": (text.ByteLanguageModel, lambda: text.DocstringData(num_train=105, max_bytes=96), text.collate, 105, 16),
}


def train_task(name: str, limit: int | None) -> tuple[int, int, dict[str, torch.Tensor]]:
    """Body: train on a plain shuffled loader whose batches are the global batches, the last one uneven."""
    model_class, data_class, collate, count, batch = TASKS[name]
    seed_everything(0, verbose=False)
    model, data = model_class(), data_class()
    data.setup("fit")
    loader: DataLoader[Any] = DataLoader(data.samples[:count], batch, shuffle=True, collate_fn=collate)
    strategy = GradAvgStrategy(reduction="weighted_mean", split_batches=True, max_device_batch_size=limit)
    trainer = make_trainer(strategy, max_epochs=2)
    trainer.fit(model, loader)
    assert strategy.global_batch_size == batch
    return dist.get_rank(), trainer.global_step, model.state_dict()


@pytest.fixture(scope="module")
def one_process(world: Any) -> Any:
    return {name: world(1).run(train_task, name, None)[0] for name in TASKS}


@pytest.mark.parametrize(("name", "world_size", "limit"), grid(list(TASKS), [1, 2, 3, 4], [None, 3]))
def test_weights_are_those_of_one_process(world, one_process, name, world_size, limit):
    """After two epochs every parameter is within 1e-5 of one process, relative to its norm."""
    _, steps, expected = one_process[name]
    ranks = world(world_size).run(train_task, name, limit)
    assert [(rank, steps) for rank in range(world_size)] == [(rank, taken) for rank, taken, _ in ranks]
    for key, value in expected.items():
        assert all(torch.equal(ranks[0][2][key], rank[2][key]) for rank in ranks)
        assert torch.linalg.norm(ranks[0][2][key] - value) <= 1e-5 * torch.linalg.norm(value)
