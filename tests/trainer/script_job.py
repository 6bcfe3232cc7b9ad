"""Usage: script_job.py OUT STRATEGY NODES DEVICES: train with `Trainer(strategy=NAME)`, or with an instance.

The strategy is a registered name, or a rule; "instance" is "weighted_mean".
"""

import sys

from cli_job import Job
from lightning.pytorch import Trainer

from examples.demo.training import close_process_group
from lightning_gradavg import GradAvgStrategy

if __name__ == "__main__":
    out, name, nodes, devices = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    rule = "weighted_mean" if name == "instance" else name
    strategy = name if name.startswith("gradavg") else GradAvgStrategy(reduction=rule)
    Trainer(
        strategy=strategy,
        accelerator="cpu",
        num_nodes=nodes,
        devices=devices,
        max_epochs=1,
        logger=False,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Job(out, loss="sum" if name == "gradavg_sum" else "mean"))
    close_process_group()
