"""How do you train a model that outgrows one device, with a loss averaged over tokens?

`python examples/sharded.py` shards a small transformer over two processes (FSDP2), trains it on padded sequences, and
compares the weights with those of one process, in plain PyTorch.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradavg import GradAvgModelParallelStrategy

SAMPLES = 24
STEPS = 3
LENGTH = 12
TOKENS = 16
WIDTH = 32


def data() -> TensorDataset:
    torch.manual_seed(1)
    inputs = torch.randint(TOKENS, (SAMPLES, LENGTH))
    lengths = torch.randint(2, LENGTH + 1, (SAMPLES, 1))
    targets = inputs.cumsum(1).remainder(TOKENS)
    return TensorDataset(inputs, targets.masked_fill(torch.arange(LENGTH) >= lengths, -100))


class Transformer(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)
        layers = (nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2))
        self.blocks = nn.ModuleList(layers)

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        for part in (*self.blocks, self):
            fully_shard(part, mesh=mesh["data_parallel"])

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embedding(inputs)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)  # type: ignore[no-any-return]  # of a module

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        loss = cross_entropy(self(inputs).flatten(0, 1), targets.flatten())
        return {"loss": loss, "weight": (targets != -100).sum()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def on_one_process() -> nn.Module:
    model = Transformer()
    optimizer = model.configure_optimizers()
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.training_step(data()[:], 0)["loss"].backward()
        optimizer.step()
    return model


def main() -> None:
    strategy = GradAvgModelParallelStrategy(reduction="weighted_mean", data_parallel_size=2, tensor_parallel_size=1)
    quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=STEPS, **quiet)
    model = Transformer()
    trainer.fit(model, DataLoader(data(), batch_size=SAMPLES // 2))  # one global batch
    whole = [parameter.full_tensor() for parameter in model.parameters() if isinstance(parameter, DTensor)]
    pairs = zip(whole, on_one_process().parameters(), strict=True)
    difference = max((parameter - expected).abs().max().item() for parameter, expected in pairs)
    if trainer.is_global_zero:
        print(f"2 processes: largest difference to one process {difference:.1e}")


if __name__ == "__main__":
    main()
