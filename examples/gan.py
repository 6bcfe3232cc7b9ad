"""How does a GAN, with its two optimizers in manual optimization, get the gradients of the global batch?

`python examples/gan.py` trains on two processes, and compares the weights of both networks with those of a plain
PyTorch loop over the same global batches on one process. The noise is part of the data: if the step drew it, it
would depend on the number of processes.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradavg import GradAvgStrategy

EPOCHS = 3
QUIET: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class GAN(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.GELU(), nn.Linear(16, 1))

    def loss_of_critic(self, real: Tensor, noise: Tensor) -> Tensor:
        return (softplus(-self.critic(real)) + softplus(self.critic(self.generator(noise).detach()))).mean()

    def loss_of_generator(self, real: Tensor, noise: Tensor) -> Tensor:
        return softplus(-self.critic(self.generator(noise))).mean()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer, loss in zip(optimizers, (self.loss_of_critic, self.loss_of_generator), strict=True):
            self.toggle_optimizer(optimizer)  # the others' parameters get no gradient
            optimizer.zero_grad()
            self.manual_backward(loss(*batch), weight=len(batch[0]))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(network.parameters(), lr=0.2) for network in (self.critic, self.generator)]


def loader() -> DataLoader[tuple[Tensor, ...]]:
    """Return 37 samples, each with its noise, in global batches of 8, of which the last has 5."""
    generator = torch.Generator().manual_seed(1)
    real = torch.randn(37, 2, generator=generator) + 2
    noise = torch.randn(37, 4, generator=generator)
    return DataLoader(TensorDataset(real, noise), batch_size=8)


def on_one_process() -> GAN:
    gan = GAN()
    optimizers = gan.configure_optimizers()
    for batch in EPOCHS * list(loader()):
        for optimizer, loss in zip(optimizers, (gan.loss_of_critic, gan.loss_of_generator), strict=True):
            gan.zero_grad()
            loss(*batch).backward()
            optimizer.step()
    return gan


def main() -> None:
    gan = GAN()
    strategy = GradAvgStrategy(reduction="weighted_mean", split_batches=True, find_unused_parameters=True)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=EPOCHS, **QUIET)
    trainer.fit(gan, loader())
    if trainer.is_global_zero:
        pairs = zip(gan.parameters(), on_one_process().parameters(), strict=True)
        difference = max((parameter - expected).abs().max().item() for parameter, expected in pairs)
        print(f"{trainer.world_size} processes: largest difference to one process {difference:.1e}")


if __name__ == "__main__":
    main()
