"""Chemprop's message passing network on molecules, as in its documentation: `python chemprop_mpnn.py 2 result.pt`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from chemprop.data import MoleculeDatapoint, MoleculeDataset, build_dataloader
from chemprop.models import MPNN
from chemprop.nn import BondMessagePassing, MeanAggregation, RegressionFFN
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from saved import run_of_arguments, save

MOLECULES = "CCO CCCC c1ccccc1 CC(=O)O CCN C1CCCCC1 CCOC CC(C)O c1ccncc1 CCCl CC#N OCCO CC(C)(C)O C=CC CCS C CC(=O)NC"


class Weighed(MPNN):
    """Chemprop's loss is the mean over the targets that are known, so their number is its weight."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": super().training_step(batch, batch_idx), "weight": batch.Y.isfinite().sum()}


class InFloat64(Callback):
    """Converts the graphs, which Lightning leaves in float32: they are no tensors, and collating makes them float32."""

    def convert(self, batch: Any) -> None:
        batch.bmg.V = batch.bmg.V.double()
        batch.bmg.E = batch.bmg.E.double()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.convert(batch)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.convert(batch)


def main() -> None:
    run = run_of_arguments()
    seed_everything(0)
    targets = np.random.default_rng(0).standard_normal((37, 2))
    if run.is_ragged:
        targets[::3, 1] = np.nan
        targets[5:14, 0] = np.nan
    kinds = MOLECULES.split()
    molecules = [kinds[index % len(kinds)] for index in range(len(targets))]
    data = MoleculeDataset([MoleculeDatapoint.from_smi(*pair) for pair in zip(molecules, targets, strict=True)])
    model_type = Weighed if run.is_ragged else MPNN
    model = model_type(
        BondMessagePassing(d_h=16),
        MeanAggregation(),
        RegressionFFN(input_dim=16, hidden_dim=16, n_tasks=2),
        batch_norm=True,
        warmup_epochs=1,
    )
    for metric in model.metrics:
        metric.set_dtype(torch.float64)  # torchmetrics keeps float32 where Lightning makes a module float64
    model.criterion.set_dtype(torch.float64)
    trainer = Trainer(callbacks=[InFloat64()], enable_checkpointing=False, **run.trainer_options)
    trainer.fit(
        model, build_dataloader(data, batch_size=8, seed=3), build_dataloader(data, batch_size=6, shuffle=False)
    )
    save(model, trainer, run.output)


if __name__ == "__main__":
    main()
