"""LitGPT's model on its data for fine-tuning, texts of many lengths: `python litgpt_sft.py 2 result.pt`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from litgpt import GPT, Config
from litgpt.data import JSON
from litgpt.utils import chunked_cross_entropy
from saved import run_of_arguments, save


class Letters:
    """A tokenizer without a file: each letter is a token."""

    def encode(self, text: str, bos: bool = False, eos: bool = False, max_length: int = -1) -> torch.Tensor:
        numbers = list(text.encode("ascii"))
        if eos:
            numbers.append(0)
        if max_length > 0:
            numbers = numbers[:max_length]
        return torch.tensor(numbers)


class FineTuned(LightningModule):
    """LitGPT's steps, with the number of tokens as weight: its loss is the mean over the targets that are not -100."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(Config(n_layer=2, n_embd=16, n_head=2, block_size=256, padded_vocab_size=128))

    def loss(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        targets = batch["labels"][:, 1:]
        logits = self.gpt(batch["input_ids"])[:, :-1]
        return chunked_cross_entropy(logits, targets, chunk_size=0), (targets != -100).sum()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss, count = self.loss(batch)
        return {"loss": loss, "weight": count}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, count = self.loss(batch)
        self.log("val_loss", loss, batch_size=int(count), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    run = run_of_arguments()
    seed_everything(0)
    words = ["a", "network", "of", "small", "parts", "learns", "from", "what", "others", "have", "written", "down"]
    samples = [
        {"instruction": " ".join(words[: 1 + index % 5]), "output": " ".join(words[index % 7 :])} for index in range(22)
    ]
    # One file for each process: all write the same.
    file = Path(f"{run.output}.{os.getpid()}.json")
    file.write_text(json.dumps(samples))
    data = JSON(file, mask_prompt=True, val_split_fraction=0.25, num_workers=0)
    data.connect(Letters(), batch_size=4, max_seq_length=256)
    model = FineTuned()
    trainer = Trainer(enable_checkpointing=False, **run.trainer_options)
    trainer.fit(model, datamodule=data)
    save(model, trainer, run.output)


if __name__ == "__main__":
    main()
