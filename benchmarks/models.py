"""The models that are measured, with one batch of random data each; written out, so that nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import Dataset
from typing_extensions import override

__all__ = ["MODELS", "Measured", "Samples", "Workload"]

LEARNING_RATE = 1e-5
"""Small: the weights are to change in every step, and the losses to stay finite over thousands of them."""


@dataclass(frozen=True)
class Workload:
    """A model and its batch.

    Attributes:
        title: What the report calls it.
        model: Builds the network; called with the same seed on every rank.
        batch: Makes the batch of a rank: the input and the target.
        steps: Timed steps of a round, unless the command line says otherwise: less than a second on two slow cores.
    """

    title: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    steps: int


class Measured(LightningModule):
    """A network with its loss and plain SGD, which adds little to a step.

    Args:
        network: Maps the input to logits, the classes in the last dimension.
        weight: What the training step returns as its weight; None for none.
        changing: Whether the weight grows by 1 in each step.
    """

    def __init__(self, network: nn.Module, weight: float | Tensor | None = None, *, changing: bool = False) -> None:
        super().__init__()
        self.network = network
        self.weight = weight
        self.changing = changing

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        inputs, target = batch
        loss = nn.functional.cross_entropy(self.network(inputs).flatten(0, -2), target.flatten())
        if self.weight is None:
            return loss
        weight = self.weight
        if self.changing:
            weight = weight + batch_idx
        return {"loss": loss, "weight": weight}

    @override
    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=LEARNING_RATE)


class Samples(Dataset[tuple[Tensor, ...]]):
    """The samples of a few batches, over and over again.

    Args:
        batch: Makes a batch.
        batches: How many are made.
        length: How many samples there are.
    """

    def __init__(self, batch: Callable[[], tuple[Tensor, Tensor]], batches: int, length: int) -> None:
        made = [batch() for _ in range(batches)]
        self._samples: list[tuple[Tensor, ...]] = []
        for inputs, targets in made:
            self._samples.extend(zip(inputs, targets, strict=True))
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self._samples[index % len(self._samples)]


class _ResidualLinear(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        # Without the identity the gradients of 64 layers would shrink to denormal numbers, which CPUs are slow at.
        return x + 0.1 * self.linear(x).relu()


def _mlp() -> nn.Module:
    return nn.Sequential(*(_ResidualLinear(128) for _ in range(64)))


def _mlp_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 128), torch.randint(128, (16,))


class _Block(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al. 2016, arXiv:1512.03385)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    @override
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.body(x) + self.shortcut(x))


def _layer() -> nn.Module:
    return nn.Linear(16, 16)


def _layer_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 16), torch.randint(16, (16,))


def _resnet18() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    channels_in = 64
    for channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [_Block(channels_in, channels, stride), _Block(channels, channels, 1)]
        channels_in = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def _resnet_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 32, 32), torch.randint(10, (2,))


class _LanguageModel(nn.Module):
    VOCABULARY = 24_000
    TOKENS = 32

    def __init__(self, width: int = 512, layers: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(self.TOKENS, width))
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.encoder(self.embedding(tokens) + self.position, mask=mask, is_causal=True)
        return nn.functional.linear(hidden, self.embedding.weight)


def _tokens() -> tuple[Tensor, Tensor]:
    text = torch.randint(_LanguageModel.VOCABULARY, (1, _LanguageModel.TOKENS + 1))
    return text[:, :-1], text[:, 1:]


MODELS: Mapping[str, Workload] = MappingProxyType(
    {
        # So small that a step shows what each variant costs beside the model.
        "layer": Workload("one small layer", _layer, _layer_batch, 150),
        "mlp": Workload("MLP, 64 small layers", _mlp, _mlp_batch, 20),
        "resnet18": Workload("ResNet-18, CIFAR stem, batch 2", _resnet18, _resnet_batch, 4),
        "transformer": Workload("Transformer, 32 tokens", _LanguageModel, _tokens, 3),
    }
)
"""What `--models` names."""
