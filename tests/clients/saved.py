"""What a run of a library leaves for the test that compares it with another: weights and logged values."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_gradavg import GradAvgStrategy

STRATEGIES: dict[str, dict[str, Any]] = {
    "single_device": {"equivalent_to": "single_device"},
    "weighted_mean": {"reduction": "weighted_mean", "split_batches": True},
}
"""The options of the strategy, by the name on the command line."""


class Run(NamedTuple):
    """What the command line asks for."""

    # Options of the Trainer. One process trains without a strategy: it is what the others are compared with.
    trainer_options: dict[str, Any]
    # Where rank 0 saves the result.
    output: str
    # Whether terms of the loss are missing, so that the model says how many there are.
    is_ragged: bool


def run_of_arguments() -> Run:
    """Read the command line, which Lightning's launcher repeats on every rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("devices", type=int)
    parser.add_argument("output")
    parser.add_argument("--strategy", choices=STRATEGIES, default="single_device")
    parser.add_argument("--ragged", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": arguments.devices,
        # Sums are added up in another order on several ranks. In float64 that stays far below what is compared, also
        # through Adam, which divides small gradients by their own size.
        "precision": "64-true",
        "max_epochs": 3,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    if arguments.devices > 1:
        options["strategy"] = GradAvgStrategy(**STRATEGIES[arguments.strategy])
    return Run(options, arguments.output, arguments.ragged)


def save(model: LightningModule, trainer: Trainer, output: str) -> None:
    """Save the weights, the logged values and the number of steps on rank 0."""
    if trainer.is_global_zero:
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        torch.save({"weights": model.state_dict(), "logged": logged, "steps": trainer.global_step}, output)
