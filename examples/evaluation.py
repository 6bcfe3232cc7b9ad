"""How do you evaluate every sample once, so that a metric does not depend on the number of processes?

`python examples/evaluation.py` tests a classifier on 11 samples with two processes. Lightning's DDP repeats a sample,
so that both have the same number, and reports the accuracy of 12. The last line is computed without any Trainer.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_gradavg import GradAvgStrategy

QUIET: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.samples = SumMetric()

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        inputs, labels = batch
        self.accuracy.update(self.layer(inputs), labels)
        self.samples.update(len(inputs))
        self.log_dict({"accuracy": self.accuracy, "samples": self.samples})


def data() -> TensorDataset:
    inputs = torch.randn(11, 4, generator=torch.Generator().manual_seed(2))
    return TensorDataset(inputs, inputs[:, :3].argmax(dim=1))


def main() -> None:
    model = Classifier()
    for strategy in ("ddp", GradAvgStrategy(exact_evaluation=True)):
        trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, **QUIET)
        [metrics] = trainer.test(model, DataLoader(data(), batch_size=2), verbose=False)
        if trainer.is_global_zero:
            name = strategy if isinstance(strategy, str) else "GradAvgStrategy"
            result = f"accuracy {metrics['accuracy']:.6f} of {metrics['samples']:.0f} samples"
            print(f"{name}, {trainer.world_size} processes: {result}")
    if trainer.is_global_zero:
        inputs, labels = data().tensors
        hits = (model.layer(inputs).argmax(dim=1) == labels).float()
        print(f"without processes: accuracy {hits.mean():.6f} of {len(hits)} samples")


if __name__ == "__main__":
    main()
