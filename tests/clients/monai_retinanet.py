"""MONAI's RetinaNet on lists of one dict per image, with 1 to 3 boxes: `python monai_retinanet.py 2 result.pt`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from monai.apps.detection.networks import retinanet_detector
from monai.apps.detection.networks.retinanet_detector import RetinaNetDetector
from monai.apps.detection.networks.retinanet_network import RetinaNet
from monai.apps.detection.utils.anchor_utils import AnchorGeneratorWithAnchorShape
from monai.data.utils import no_collation
from saved import run_of_arguments, save
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gradavg import global_mean

if find_spec("torchvision") is None:
    # MONAI asks whether its matcher is torchvision's, which fails without it. The one that is used here is MONAI's.
    retinanet_detector.Matcher = ()


class Features(nn.Sequential):
    """A feature extractor of one layer: MONAI's own needs torchvision."""

    out_channels = 8

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, self.out_channels, 3, padding=1), nn.ReLU())


class Detection(LightningModule):
    """Two terms with counts of their own: the classes are a mean over images, the boxes one over boxes."""

    def __init__(self) -> None:
        super().__init__()
        anchors = AnchorGeneratorWithAnchorShape(feature_map_scales=(1,), base_anchor_shapes=[[6, 6], [4, 8]])
        network = RetinaNet(2, 2, anchors.num_anchors_per_location()[0], Features())
        self.detector = RetinaNetDetector(network, anchors)
        self.detector.set_target_keys("box", "label")
        self.detector.set_atss_matcher(num_candidates=9)
        self.detector.set_cls_loss(nn.BCEWithLogitsLoss(reduction="sum"))
        self.detector.set_box_regression_loss(nn.SmoothL1Loss(reduction="sum"), encode_gt=True, decode_pred=False)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        sums = self.detector([sample["image"] for sample in batch], batch)
        boxes = sum(len(sample["box"]) for sample in batch)
        means = global_mean(
            {"class": sums[self.detector.cls_key], "box": sums[self.detector.box_reg_key]},
            {"class": len(batch), "box": boxes},
        )
        # The means are those of all ranks already, so each rank counts once.
        return {"loss": means["class"] + means["box"], "weight": 1}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def image(index: int) -> dict[str, Tensor]:
    """Return an image of 16 x 16 pixels whose boxes are brighter."""
    draw = torch.Generator().manual_seed(index)
    pixels = torch.rand(1, 16, 16, generator=draw, dtype=torch.float64)
    corners = torch.randint(0, 8, (1 + index % 3, 2), generator=draw)
    for x, y in corners.tolist():
        pixels[:, x : x + 6, y : y + 6] += 1
    boxes = torch.cat([corners, corners + 6], 1).double()
    return {"image": pixels, "box": boxes, "label": torch.arange(len(boxes)) % 2}


def main() -> None:
    run = run_of_arguments()
    seed_everything(0)
    model = Detection()
    trainer = Trainer(enable_checkpointing=False, **run.trainer_options)
    trainer.fit(model, DataLoader([image(index) for index in range(14)], batch_size=4, collate_fn=no_collation))
    save(model, trainer, run.output)


if __name__ == "__main__":
    main()
