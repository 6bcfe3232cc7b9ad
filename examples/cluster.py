"""A run that a cluster may stop at any time and restart with other ranks, started by SLURM, torchrun or Kubeflow.

The launcher sets the numbers of nodes and processes. The order of samples, the global batch and the gradient do not
depend on them, so the run continues in the middle of an epoch wherever you restart it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from examples.demo.text import ByteLanguageModel, DocstringData, collate
from examples.demo.training import close_process_group
from lightning_gradavg import GradAvgMonitor, GradAvgStrategy


class GlobalBatches(DocstringData):
    """Docstrings in global batches, which the strategy splits among the ranks."""

    def train_dataloader(self) -> DataLoader[bytes]:
        train = self.samples[: self.num_train]
        return DataLoader(train, self.global_batch_size, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]  # a list is a dataset


def launched() -> tuple[int, int]:
    """Return the number of nodes, and of processes on this one, that torchrun or SLURM says.

    torchrun comes first, as in Lightning: its agents may be the tasks of a SLURM job.
    """
    environ = os.environ
    nodes = environ.get("GROUP_WORLD_SIZE") or environ.get("SLURM_NNODES", "1")
    processes = environ.get("LOCAL_WORLD_SIZE") or environ.get("SLURM_NTASKS_PER_NODE", "1")
    return int(nodes), int(processes)


def newest_checkpoint(folder: str) -> Path | None:
    """Return the checkpoint that was written last, be it of `ModelCheckpoint` or of SLURM's signal (`hpc_ckpt_1.ckpt`).

    `ckpt_path="last"` does not find the latter, and without `ckpt_path` Lightning does not look for the former.
    """
    return max(Path(folder).glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns, default=None)


def main() -> None:
    """Train, from the last checkpoint if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accelerator", default="auto", help="cuda, cpu, ... (default: what is there)")
    parser.add_argument("--folder", default="run", help="checkpoints and logs; on a disk that all nodes share")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--num-train", type=int, default=969, help="docstrings of an epoch")
    args = parser.parse_args()

    nodes, processes = launched()
    seed_everything(0)
    keep = ModelCheckpoint(
        args.folder, "{step}", every_n_train_steps=10, save_top_k=2, monitor="step", mode="max", save_last=True
    )
    trainer = Trainer(
        strategy=GradAvgStrategy(equivalent_to="data_parallel", num_replicas=8, reduction="weighted_mean"),
        accelerator=args.accelerator,
        num_nodes=nodes,
        devices=processes,
        max_epochs=args.epochs,
        default_root_dir=args.folder,
        callbacks=[keep, GradAvgMonitor(fingerprint_every_n_steps=1)],
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(ByteLanguageModel(), GlobalBatches(args.num_train), ckpt_path=newest_checkpoint(args.folder))
    close_process_group()


if __name__ == "__main__":
    main()
