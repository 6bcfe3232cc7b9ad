"""How does every process compare its images with the texts of all processes, and get the gradient of one process?

`python examples/contrastive.py` trains two towers on two processes, and compares the weights with those of a plain
PyTorch loop over the same global batches on one process.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradavg import GradAvgStrategy, gather

EPOCHS = 3
QUIET: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class TwoTowers(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.images = nn.Linear(12, 8)
        self.texts = nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def encode(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        return normalize(self.images(images)), normalize(self.texts(texts))

    def loss(self, images: Tensor, texts: Tensor) -> Tensor:
        logits = self.scale.exp() * images @ texts.T
        pairs = torch.arange(len(logits), device=logits.device)
        return (cross_entropy(logits, pairs) + cross_entropy(logits.T, pairs)) / 2

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        rows = self.encode(*batch)  # of this process
        return self.loss(*gather(rows))  # of all processes: the same loss on each of them

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2)


def loader() -> DataLoader[tuple[Tensor, ...]]:
    """Return 39 pairs in global batches of 12, of which the last has 3."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(39, 12, generator=generator)
    return DataLoader(TensorDataset(images, images[:, ::2].tanh()), batch_size=12)


def on_one_process() -> TwoTowers:
    model = TwoTowers()
    optimizer: torch.optim.Optimizer = model.configure_optimizers()
    for _ in range(EPOCHS):
        for images, texts in loader():
            optimizer.zero_grad()
            model.loss(*model.encode(images, texts)).backward()
            optimizer.step()
    return model


def main() -> None:
    model = TwoTowers()
    strategy = GradAvgStrategy(split_batches=True)  # batches of 12, not of 2 times 12
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=EPOCHS, **QUIET)
    trainer.fit(model, loader())
    if trainer.is_global_zero:
        pairs = zip(model.parameters(), on_one_process().parameters(), strict=True)
        difference = max((parameter - expected).abs().max().item() for parameter, expected in pairs)
        print(f"{trainer.world_size} processes: largest difference to one process {difference:.1e}")


if __name__ == "__main__":
    main()
