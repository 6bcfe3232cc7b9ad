"""How do you train the same in a Ray Train job on any number of workers?

`python examples/ray_train.py` trains with Lightning in a TorchTrainer of two workers on this machine, and compares the
weights with those of a plain PyTorch loop over the same batches. With 21 samples in batches of 8, the
last batch gives the workers 3 and 2.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from ray.train import ScalingConfig
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchTrainer
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradavg import GradAvgStrategy

EPOCHS = 3
QUIET: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class RayGradAvgStrategy(GradAvgStrategy, RayDDPStrategy):
    """The device is that of Ray's worker, and `prepare_trainer` knows a strategy of Ray by its class."""


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        inputs = torch.linspace(-1, 1, 84).reshape(21, 4)
        return DataLoader(TensorDataset(inputs, inputs.prod(1, keepdim=True).exp()), batch_size=8)


def train_on_worker() -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices="auto",
        strategy=RayGradAvgStrategy(split_batches=True),
        plugins=[RayLightningEnvironment()],
        max_epochs=EPOCHS,
        **QUIET,
    )
    model = Model()
    prepare_trainer(trainer).fit(model)
    pairs = zip(model.parameters(), on_one_process().parameters(), strict=True)
    difference = max((parameter - expected).abs().max().item() for parameter, expected in pairs)
    if trainer.is_global_zero:  # Ray shows what workers print
        print(f"{trainer.world_size} processes: largest difference to one process {difference:.1e}")


def on_one_process() -> Model:
    model = Model()
    optimizer = model.configure_optimizers()
    for _ in range(EPOCHS):
        for index, batch in enumerate(model.train_dataloader()):
            optimizer.zero_grad()
            model.training_step(batch, index).backward()
            optimizer.step()
    return model


def main() -> None:
    TorchTrainer(train_on_worker, scaling_config=ScalingConfig(num_workers=2)).fit()


if __name__ == "__main__":
    main()
