"""Train the language model with `reproducible=True` on 1, 2 and 4 processes: `python -m examples.demo.same_bits`.

One line is printed: the SHA-256 of the trained weights, which must be the same on any number of processes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer, seed_everything

from examples.demo.global_batches import global_batch_loader
from examples.demo.runs import REPOSITORY, finish
from examples.demo.text import ByteLanguageModel, DocstringData, collate
from examples.demo.training import close_process_group
from lightning_gradavg import GradAvgStrategy

__all__ = ["line", "main", "sha_of_weights"]

REPLICAS = 4
BATCH_SIZE = 16


def sha_of_weights(module: LightningModule) -> str:
    """Return the SHA-256 of the bytes of all parameters, in hexadecimal digits."""
    digest = sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def train(devices: int, output: Path, *, samples: int) -> None:
    """Train on some processes, and write the SHA of the weights."""
    seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=GradAvgStrategy(reduction="weighted_mean", num_replicas=REPLICAS, reproducible=True),
        max_epochs=1,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    module = ByteLanguageModel()
    data = DocstringData(num_train=samples)
    data.setup("fit")
    # The global batches; the strategy gives each replica its part.
    trainer.fit(module, global_batch_loader(data.samples[:samples], BATCH_SIZE, collate, None, shuffle_seed=0))
    if trainer.is_global_zero:
        output.write_text(sha_of_weights(module))
    close_process_group()


def line(shas: Mapping[int, str]) -> str:
    """Return what is printed of the weights' SHA by number of processes."""
    short = ", ".join(f"{sha[:16]} on {devices}" for devices, sha in shas.items())
    verdict = "the same bits" if len(set(shas.values())) == 1 else "DIFFERENT BITS"
    return f"SHA-256 of the language model's weights with reproducible=True: {short}: {verdict}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the line, and return 0 if the bits are the same on any number of processes, else 1."""
    parser = argparse.ArgumentParser(description="Train to the same bits on several numbers of processes.")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4], help="processes (default: 1 2 4)")
    parser.add_argument("--samples", type=int, default=329, help="docstrings to train with (default: 329)")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "demo_output", help="default: demo_output/")
    parser.add_argument("--devices", type=int, help="train on so many processes, and write the file --output alone")
    options = parser.parse_args(arguments)
    if options.devices is not None:
        train(options.devices, options.output, samples=options.samples)
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    shas = {}
    for devices in options.worlds:
        path, log = (options.output.resolve() / f"same_bits_{devices}.{kind}" for kind in ("sha", "log"))
        command = [sys.executable, "-m", "examples.demo.same_bits", "--devices", str(devices)]
        finish([*command, "--samples", str(options.samples), "--output", str(path)], log, name=f"{devices} processes")
        shas[devices] = path.read_text()
    print(line(shas))
    return int(len(set(shas.values())) > 1)


if __name__ == "__main__":
    raise SystemExit(main())
