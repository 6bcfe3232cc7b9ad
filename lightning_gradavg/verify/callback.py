"""The callback that verifies a run which is under way."""

from __future__ import annotations

import pickle
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_gradavg.ranks import World
from lightning_gradavg.verify.judge import not_shown
from lightning_gradavg.verify.record import Recorder, Tape
from lightning_gradavg.verify.report import Report
from lightning_gradavg.verify.run import Progress, estimate, in_processes, print_to_console, reference_report
from lightning_gradavg.verify.target import quiet_options

__all__ = ["GradAvgVerifier"]

_SENT = ("max_epochs", "gradient_clip_val", "gradient_clip_algorithm", "precision", "callbacks")
"""Options of the Trainer that the reference needs, and that are attributes of it."""


class GradAvgVerifier(Recorder):
    """Verifies the first steps of a training run against one process, and lets it go on.

    After `steps` optimizer steps rank 0 starts a process that computes the same steps on the same global batches alone,
    compares, and prints the report. The run itself is only watched: its weights are the same bits as without this
    callback, and no failure of the comparison ends it. The module, as it was before training, is pickled for that
    process; where it cannot be, the report says so.

    The order of samples is not compared, for which one process would have to read the data, too; `verify` and
    `gradavg verify` do.

    Args:
        steps: Optimizer steps to verify.
        on_difference: "warn", or "raise" to end training on all ranks.
        tolerance: The largest relative difference that counts as equal; default: 1e-5, in float64 1e-10.
        ignore: Causes that are not to be reported.

    Attributes:
        report: The report, on every rank, once there is one.
    """

    def __init__(
        self,
        steps: int = 3,
        *,
        on_difference: Literal["warn", "raise"] = "warn",
        tolerance: float | None = None,
        ignore: Sequence[str] = (),
    ) -> None:
        super().__init__(steps, "")
        if on_difference not in ("warn", "raise"):
            raise ValueError(f"on_difference must be 'warn' or 'raise', got {on_difference!r}")
        not_shown("").without(ignore)  # a cause that is none is refused now, and not in the run
        self.on_difference, self.tolerance, self.ignore = on_difference, tolerance, tuple(ignore)
        self.report: Report | None = None
        self._unsent: str | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep the module as it is before training."""
        if stage != "fit" or trainer.global_rank != 0:
            return
        self.report, self._unsent, self.progress = None, None, Progress()
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="gradavg-verify-"))
            estimate(pl_module, self.steps, self.folder)
            torch.save(pl_module, self.folder / "module.pt")
        except Exception as error:  # noqa: BLE001  # of the user's module; the run is not to end with it
            self._unsent = f"the module cannot be sent to another process ({type(error).__name__}: {error})"

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to listen, unless there can be no reference: its files would only fill the disk."""
        super().on_train_start(trainer, pl_module)
        if self._unsent is not None:
            self.problem = self._unsent
            self.release()

    @override
    def on_complete(self, trainer: Trainer, module: LightningModule) -> None:
        """Verify, on all ranks."""
        world = World.of(None)
        mine = str(self.problem) if self.tape is None else _pickled(self.recorded)
        gathered: list[Any] = [mine] * world.size
        if world.group is not None:
            dist.gather_object(mine, gathered if world.rank == 0 else None)
        self.report = world.from_first(self._compare(gathered, trainer) if world.rank == 0 else None)
        self._answer(self.report)

    def _compare(self, gathered: Sequence[bytes | str], trainer: Trainer) -> Report:
        """Return the report of what the ranks recorded, or that of why there is none."""
        try:
            report = self._compared(gathered, trainer).without(self.ignore)
        except Exception as error:  # noqa: BLE001  # the run is not to end with it
            report = not_shown(str(error))
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # such as of a pipe that nobody reads any more
            print_to_console(report)
        return report

    def _compared(self, gathered: Sequence[bytes | str], trainer: Trainer) -> Report:
        problems = [each for each in (self._unsent, *gathered) if isinstance(each, str)]
        if problems:
            return not_shown(problems[0])
        tapes = [pickle.loads(each) for each in gathered]  # type: ignore[arg-type]  # none is a problem
        device = trainer.strategy.root_device.type
        options = quiet_options({name: getattr(trainer, name) for name in _SENT}, device)
        options["callbacks"] = [each for each in options["callbacks"] if isinstance(_pickled(each), bytes)]
        arguments = (self.folder / "module.pt", tapes, options, self.tolerance, device)
        report: Report = in_processes([(_handed_over, arguments)])[0]
        return report

    def _answer(self, report: Report) -> None:
        first = report.first
        if first is None:
            return
        message = (
            f"GradAvgVerifier: the run is not the one that one process would train: {first.cause} ({first.detail})."
            f" {first.advice[0].upper()}{first.advice[1:]}."
        )
        if self.on_difference == "raise":
            raise RuntimeError(message)
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # where warnings are errors, this one ends no run
            rank_zero_warn(message)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say so where training was too short."""
        super().on_train_end(trainer, pl_module)
        if not self.complete:
            done = 0 if self.tape is None else len(self.tape.steps)
            rank_zero_warn(f"GradAvgVerifier: training took {done} optimizer steps, {self.steps} were to be verified.")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove what is left."""
        if self.folder.name:  # on rank 0
            shutil.rmtree(self.folder, ignore_errors=True)


def _pickled(value: Any) -> bytes | str:
    """Return the value as bytes, or why it cannot be pickled."""
    try:
        return pickle.dumps(value)
    except Exception as error:  # noqa: BLE001  # of the user's objects
        return f"what was recorded cannot be sent to another process ({type(error).__name__}: {error})"


def _handed_over(
    file: Path, tapes: Sequence[Tape], options: dict[str, Any], tolerance: float | None, device: str
) -> Report:
    """Return the report of a run whose module was pickled before it trained."""
    module = torch.load(file, weights_only=False, map_location="cpu")
    return reference_report(tapes, module, options, tolerance, device=device, handed_over=True)
