"""How do you average a language model's loss over tokens if every process has a different number of them?

`python examples/token_weighted.py` trains on two processes, on sequences of very different lengths that are padded with
-100, and compares the weights with those of a plain PyTorch loop over the same global batches on one process.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_gradavg import GradAvgStrategy

EPOCHS = 3
QUIET: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class LanguageModel(LightningModule):
    def __init__(self, tokens: int = 11, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(tokens, width)
        self.head = nn.Linear(width, tokens)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        inputs, targets = batch
        logits = self.head(self.embed(inputs))
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        return {"loss": loss, "weight": (targets != -100).sum()}  # the terms that the mean is taken over

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        lengths = [2, 3, 4, 40] * 7
        data: Any = [torch.randint(11, (length,), generator=generator) for length in lengths]
        return DataLoader(data, batch_size=6, collate_fn=collate)


def collate(sequences: list[Tensor]) -> tuple[Tensor, Tensor]:
    inputs = pad_sequence([sequence[:-1] for sequence in sequences], batch_first=True)
    targets = pad_sequence([sequence[1:] for sequence in sequences], batch_first=True, padding_value=-100)
    return inputs, targets


def on_one_process() -> LanguageModel:
    model = LanguageModel()
    optimizer: torch.optim.Optimizer = model.configure_optimizers()
    for _ in range(EPOCHS):
        for index, batch in enumerate(model.train_dataloader()):
            optimizer.zero_grad()
            model.training_step(batch, index)["loss"].backward()
            optimizer.step()
    return model


def main() -> None:
    model = LanguageModel()
    strategy = GradAvgStrategy(reduction="weighted_mean", split_batches=True)  # batches of 6, not of 2 times 6
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=EPOCHS, **QUIET)
    trainer.fit(model)
    if trainer.is_global_zero:
        pairs = zip(model.parameters(), on_one_process().parameters(), strict=True)
        difference = max((parameter - expected).abs().max().item() for parameter, expected in pairs)
        print(f"{trainer.world_size} processes: largest difference to one process {difference:.1e}")


if __name__ == "__main__":
    main()
