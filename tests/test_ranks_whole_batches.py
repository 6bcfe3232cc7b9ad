"""Replicas of whole batches inside real Trainers: on any world, each replica gets the samples of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, seed_everything
from lockstep import Augmented, pad_and_mix
from ranks import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from toys import Toy

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.batches.part import SplitBatches

BATCH, EPOCHS = 8, 2


class Noting(Toy):
    """Notes in every step the replicas that the rank gets, with their samples."""

    def __init__(self, make: Any) -> None:
        super().__init__(kind="s", lr=0.001)
        self.make = make
        self.steps: list[list[tuple[int | None, int, Any]]] = []
        self.line = ""

    def train_dataloader(self) -> Any:
        return self.make()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        data: SplitBatches = strategy._batches
        slices = data.slices(batch)
        assert data.chunk is not None
        if data.chunk.stand_in:
            (whole,) = slices
            assert (None, 0) == whole[:2]
            assert plain(whole.batch) == plain(batch)
        self.steps.append([(one.replica, one.samples, plain(one.batch)) for one in slices if one.replica is not None])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.w.sum(), "weight": 1.0}  # no number of samples is common to several loaders


def plain(value: Any) -> Any:
    """Return a batch whose tensors are bytes: equal bits, and nothing else, are equal."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def single(**options: Any) -> Any:
    return DataLoader(Augmented(), BATCH, shuffle=True, collate_fn=pad_and_mix, **options)


def several(smaller: int = 7) -> Any:
    """Return loaders in a nested structure, two of batches of 8, and three of another size."""
    return {
        "a": single(drop_last=True),
        "b": [DataLoader(Augmented(), smaller, collate_fn=pad_and_mix, drop_last=True)],
    }


def changed(batch: Any, device: Any, index: int) -> Any:
    return {name: rows[1:] for name, rows in batch.items()}


def renamed(batch: Any, device: Any, index: int) -> Any:
    return {"c": batch["a"]}


def fit(make: Any, *args: Any, hook: Any = None) -> Any:
    """Body: train for two epochs in replicas of whole batches, every rank with a random state of its own."""
    seed_everything(11 + 100 * dist.get_rank(), verbose=False)
    model = Noting(lambda: make(*args))
    if hook is not None:
        vars(model)["transfer_batch_to_device"] = hook
    make_trainer(GradAvgStrategy(split_batches=True, num_replicas=4), max_epochs=EPOCHS).fit(model)
    return model.steps


def joined(ranks: list[Any]) -> list[Any]:
    """Return the replicas of every step over all ranks, in order."""
    return [[piece for rank in step for piece in rank] for step in zip(*ranks, strict=True)]


def test_batches_of_several_loaders_are_cut_alike(world):
    """Every replica gets its part of each loader's batch, in the structure of the loaders, on any world."""
    (expected,) = world(1).run(fit, several)

    assert [[(0, 2), (1, 2), (2, 2), (3, 2)]] * 6 == [[piece[:2] for piece in step] for step in expected]
    assert expected[:3] != expected[3:], "epochs differ"
    for step in expected:
        parts = [(batch["a"], *batch["b"]) for _, _, batch in step]
        assert [[(2,), (2,)]] * 3 + [[(2,), (1,)]] == [[part["index"][0] for part in both] for both in parts]
    for world_size in (2, 3, 4):
        assert expected == joined(world(world_size).run(fit, several))


REFUSED: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], str]] = {
    "several": (several, (5,), {}, "now 8 samples in 2 + 2 + 0 pieces and 5 samples in 2 + 1 + 0 pieces on the ranks"),
    "samples": (single, (), {"hook": changed}, "samples where the train loader yielded"),
    "structure": (several, (), {"hook": renamed}, "is not as the train loader yielded it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_an_error_on_all_ranks(world, name):
    """Data, loaders and hooks whose batches have no replicas are refused by all 3 ranks; one of them has no samples."""
    make, args, options, message = REFUSED[name]

    raised = world(3).run_expecting_errors(fit, make, *args, **options)

    assert 3 == len(raised)
    for one in raised:
        assert one.type_name in {"ValueError", "RuntimeError"}
        assert message in one.message


def fit_sequences() -> Any:
    data = [torch.full((6, 3), float(index)) for index in range(8)]
    model = nn.Linear(3, 1)

    class Sequences(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return torch.stack([self.model(one).mean() for one in batch]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    samples: Any = data
    loader: Any = DataLoader(samples, batch_size=4, collate_fn=list)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.25)
    make_trainer(GradAvgStrategy(equivalent_to="single_device"), max_epochs=1).fit(Sequences(), loader)
    return model.weight.tolist(), model.bias.item()


def test_a_list_of_samples_is_not_cut_along_their_own_dimension(world):
    """Every rank collates its own samples: d mean/d weight is 1.5, then 5.5, so 0.5 - 0.1 * 7 = -0.2."""
    for ranks in (1, 2, 3):
        for weight, bias in world(ranks).run(fit_sequences):
            assert [[pytest.approx(-0.2)] * 3] == weight
            assert pytest.approx(0.05) == bias
