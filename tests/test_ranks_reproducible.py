"""Training with `reproducible=True`: the same bits on any number of ranks, whatever else is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from ranks import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradavg import GradAvgStrategy


class Net(LightningModule):
    """What the nets have in common; `adamw` or SGD with momentum."""

    adamw = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = self.make()

    def make(self) -> nn.Module:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.net(inputs), labels)

    def configure_optimizers(self) -> Any:
        if self.adamw:
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class MLP(Net):
    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(13, 31), nn.ReLU(), nn.Linear(31, 17), nn.Tanh(), nn.Linear(17, 5))

    @staticmethod
    def data(samples: int) -> Any:
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(
            torch.randn(samples, 13, generator=generator), torch.randint(5, (samples,), generator=generator)
        )


class CNN(Net):
    """Convolutions with batch norm and dropout."""

    def make(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 7, 3),
            nn.BatchNorm2d(7),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Conv2d(7, 9, 3),
            nn.BatchNorm2d(9),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(9 * 16, 5),
        )

    @staticmethod
    def data(samples: int) -> Any:
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(
            torch.randn(samples, 3, 8, 8, generator=generator), torch.randint(5, (samples,), generator=generator)
        )


class Transformer(Net):
    """A small language model whose weight is the number of tokens, some replicas having none."""

    def make(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 2, 33, dropout=0.1, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        return nn.Sequential(nn.Embedding(11, 16), encoder, nn.Linear(16, 11))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs).flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "weight": (labels != -100).sum()}

    @staticmethod
    def data(samples: int) -> Any:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(11, (samples, 8), generator=generator)
        lengths = torch.randint(8, (samples, 1), generator=generator)
        return TensorDataset(tokens[:, :-1], torch.where(torch.arange(7) < lengths, tokens[:, 1:], -100))


def trained(
    kind: type[Net],
    replicas: int,
    nodes: Any = None,
    *,
    adamw: bool = False,
    batch_size: int = 32,
    batches: int = 30,
    workers: int = 0,
    strategy: Any = None,
    **options: Any,
) -> Any:
    """Body: train with a short last batch, and return all that is left."""
    module = kind()
    module.adamw = adamw
    loader: Any = DataLoader(
        module.data(batch_size * batches - batch_size // 2 - 3), batch_size=batch_size, shuffle=True, num_workers=workers
    )
    torch.manual_seed(5)
    ours = GradAvgStrategy(num_replicas=replicas, reproducible=True, **(strategy or {}))
    trainer = make_trainer(ours, nodes=nodes, **{"max_epochs": 1, **options})
    trainer.fit(module, loader)
    state = {**module.state_dict()}
    for index, values in ours.optimizers[0].state_dict()["state"].items():
        state |= {f"{index} {name}": value for name, value in values.items()}
    return ours.fingerprint(), {name: value.clone() for name, value in state.items()}


def assert_same_bits(world: Any, sizes: Any, *arguments: Any, **options: Any) -> None:
    """Assert that all that is left of a run on several ranks has the bits of that on one."""
    ((fingerprint, expected),) = world(1).run(trained, *arguments, **options)
    for size, nodes in sizes:
        for found, state in world(size).run(trained, *arguments, nodes=nodes, **options):
            assert list(expected) == list(state)
            for name, value in expected.items():
                assert torch.equal(value, state[name]), (size, name, (value - state[name]).abs().max())
            assert fingerprint == found


@pytest.mark.parametrize("kind", [MLP, CNN, Transformer])
@pytest.mark.parametrize("replicas", [4, 8])
@pytest.mark.filterwarnings("ignore:rank . has a micro-batch of weight 0:UserWarning")
def test_same_bits(world, kind, replicas):
    """30 steps leave the same bits on 1, 2 and 4 ranks, on one node and on two."""
    assert_same_bits(world, [(2, None), (4, None), (4, [0, 0, 1, 1])], kind, replicas)


VARIANTS: dict[str, dict[str, Any]] = {
    "AdamW, clipped": {"adamw": True, "gradient_clip_val": 0.05},
    "windows of 3": {"accumulate_grad_batches": 3},
    "workers": {"workers": 2, "batches": 8},
    "recomputed": {"strategy": {"recompute_replicas": True}},
    "small buckets": {"strategy": {"bucket_cap_mb": 0.0005}},
    "bucket views": {"strategy": {"gradient_as_bucket_view": True}},
    "bf16": {"precision": "bf16-true"},
    "mixed": {"precision": "bf16-mixed"},
    "float64": {"precision": "64-true"},
    "replica losses": {"strategy": {"reduction": "mean_of_replica_losses"}},
    "sum": {"strategy": {"reduction": "sum"}, "gradient_clip_val": 0.5},
    "normalized_sum": {"strategy": {"reduction": "normalized_sum"}},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("kind", [MLP, CNN, Transformer])
@pytest.mark.filterwarnings("ignore:rank . has a micro-batch of weight 0:UserWarning")
@pytest.mark.filterwarnings("ignore:a .weight. was given:UserWarning")
def test_variants(world, name, kind):
    """With six replicas, of which neither 2 nor 4 ranks can have whole subtrees."""
    if name.startswith("repl") and kind is Transformer:
        return
    assert_same_bits(world, [(2, None), (3, [0, 0, 1])], kind, 6, **{"batches": 12, **VARIANTS[name]})
