"""Usage: script_job.py OUT NODES DEVICES STRATEGY: train once with the strategy, in a folder of its name.

A strategy is a registered name, or a rule for an instance.
"""

import sys

from cli_job import Job
from lightning.pytorch import Trainer

from examples.demo.training import close_process_group
from lightning_gradavg import GradAvgStrategy

if __name__ == "__main__":
    out, nodes, devices, name = sys.argv[1:]
    Trainer(
        strategy=name if name.startswith("gradavg") else GradAvgStrategy(reduction=name),
        accelerator="cpu",
        num_nodes=int(nodes),
        devices=int(devices),
        max_epochs=1,
        logger=False,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Job(f"{out}/{name}"))
    close_process_group()
