"""Why does the same script train a different model on two devices, and which line fixes it?

`python examples/swap_in_one_line.py` trains twice on two processes, with Lightning's DDP and with the line swapped, and
compares the weights with those of a plain PyTorch loop over the same loader on one process.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradavg import GradAvgStrategy

EPOCHS = 3
QUIET: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[tuple[Tensor, ...]]:
    """Return 37 samples in batches of 8, of which the last has 5."""
    inputs = torch.randn(37, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.sin().sum(1, keepdim=True)), batch_size=8)


def on_one_process() -> Net:
    net = Net()
    optimizer: torch.optim.Optimizer = net.configure_optimizers()
    for _ in range(EPOCHS):
        for index, batch in enumerate(loader()):
            optimizer.zero_grad()
            net.training_step(batch, index).backward()
            optimizer.step()
    return net


def main() -> None:
    for strategy in (
        "ddp",  # before
        GradAvgStrategy(equivalent_to="single_device"),  # after: batch_size counts the samples of all processes
    ):
        net = Net()
        trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=EPOCHS, **QUIET)
        trainer.fit(net, loader())
        if trainer.is_global_zero:
            pairs = zip(net.parameters(), on_one_process().parameters(), strict=True)
            difference = max((parameter - expected).abs().max().item() for parameter, expected in pairs)
            name = strategy if isinstance(strategy, str) else "GradAvgStrategy"
            print(f"{name}, {trainer.world_size} processes: largest difference to one process {difference:.1e}")


if __name__ == "__main__":
    main()
