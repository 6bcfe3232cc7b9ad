"""Train under an MLflow run, and go on with it on another number of ranks: `mlflow_resume.py DEVICES OUTPUT [RUN]`.

The run is in the folder of OUTPUT. Without RUN a new one begins, and its id is written to OUTPUT.
"""

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import MLFlowLogger
from torch.utils.data import DataLoader

from lightning_gradavg import GradAvgMonitor, GradAvgStrategy


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = (self.w * batch).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(devices: int, output: Path, run: str | None) -> None:
    folder = output.parent
    logger = MLFlowLogger("resumes", tracking_uri=f"file://{folder}/mlruns", run_id=run)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        max_epochs=1 if run is None else 2,
        strategy=GradAvgStrategy(equivalent_to="data_parallel", num_replicas=2, lr_scaling="linear", base_batch_size=4),
        logger=logger,
        log_every_n_steps=1,
        callbacks=[ModelCheckpoint(folder / "checkpoints", save_last=True), GradAvgMonitor(1)],
        enable_progress_bar=False,
    )
    trainer.fit(Net(), DataLoader(torch.arange(8.0), batch_size=8), ckpt_path=None if run is None else "last")
    if trainer.is_global_zero and run is None:
        output.write_text(str(logger.run_id))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]).resolve(), sys.argv[3] if len(sys.argv) > 3 else None)
