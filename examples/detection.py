"""How do you average two loss terms, one over images and one over the boxes in them?

`python examples/detection.py` trains on two processes, on images with 0 to 5 boxes, and compares the weights with those
of a plain PyTorch loop over the same global batches on one process.
"""

from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, smooth_l1_loss
from torch.utils.data import DataLoader

from lightning_gradavg import GradAvgStrategy, global_mean

EPOCHS = 3
QUIET: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
Batch = tuple[Tensor, Tensor, Tensor, Tensor]


class Detector(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 16)
        self.classify = nn.Linear(16, 3)
        self.locate = nn.Linear(16, 4)

    def sums(self, batch: Batch) -> tuple[Tensor, Tensor]:
        images, classes, boxes, image_of_box = batch
        features = self.body(images).tanh()
        of_classes = cross_entropy(self.classify(features), classes, reduction="sum")
        return of_classes, smooth_l1_loss(self.locate(features[image_of_box]), boxes, reduction="sum")

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        _, classes, boxes, _ = batch
        # Each term is divided by its own count over all ranks, of which some may have no box.
        by_class, by_box = global_mean(self.sums(batch), (len(classes), len(boxes)))
        return {"loss": by_class + by_box, "weight": 1}  # of every rank, whatever its part of the batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        rand = partial(torch.rand, generator=torch.Generator().manual_seed(1))
        data: Any = [(rand(8), index % 3, rand(index % 6, 4)) for index in range(22)]
        return DataLoader(data, batch_size=4, collate_fn=collate)


def collate(samples: list[tuple[Tensor, int, Tensor]]) -> Batch:
    images, classes, boxes = zip(*samples, strict=True)
    boxes_of_images = torch.tensor([len(boxes_of_image) for boxes_of_image in boxes])
    image_of_box = torch.arange(len(images)).repeat_interleave(boxes_of_images)
    return torch.stack(images), torch.tensor(classes), torch.cat(boxes), image_of_box


def on_one_process() -> Detector:
    model = Detector()
    optimizer: torch.optim.Optimizer = model.configure_optimizers()
    for _ in range(EPOCHS):
        for batch in model.train_dataloader():
            _, classes, boxes, _ = batch
            sum_of_classes, sum_of_boxes = model.sums(batch)
            optimizer.zero_grad()
            (sum_of_classes / len(classes) + sum_of_boxes / len(boxes)).backward()
            optimizer.step()
    return model


def main() -> None:
    model = Detector()
    strategy = GradAvgStrategy(split_batches=True)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=EPOCHS, **QUIET)
    trainer.fit(model)
    if trainer.is_global_zero:
        pairs = zip(model.parameters(), on_one_process().parameters(), strict=True)
        difference = max((parameter - expected).abs().max().item() for parameter, expected in pairs)
        print(f"{trainer.world_size} processes: largest difference to one process {difference:.1e}")


if __name__ == "__main__":
    main()
