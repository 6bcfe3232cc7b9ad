"""A model of 124 million parameters to verify.

The command and its figures are in docs/verify.md.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["Model", "data"]

_WORDS, _WIDTH, _LENGTH = 50_257, 768, 64


class Model(LightningModule):
    """A transformer as large as GPT-2: 12 layers of width 768, with tied embeddings, trained with AdamW."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(_WIDTH, 12, 4 * _WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.words, self.places = nn.Embedding(_WORDS, _WIDTH), nn.Embedding(1024, _WIDTH)
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(_WIDTH)

    def training_step(self, batch: Any, *_: Any) -> Tensor:
        """Return the mean loss of the next words."""
        (words,) = batch
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], device=words.device)
        rows = self.words(words) + self.places.weight[: words.shape[1]]
        rows = self.norm(self.layers(rows, mask=mask, is_causal=True))
        scores = rows[:, :-1] @ self.words.weight.T
        return nn.functional.cross_entropy(scores.transpose(1, 2), words[:, 1:])

    def configure_optimizers(self) -> Any:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def data() -> DataLoader[Any]:
    """Return random texts, two in a batch."""
    words = torch.randint(_WORDS, (16, _LENGTH), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(words), batch_size=2)
