"""The runs of a verification: the processes that it takes, and `verify`.

A process per rank, with the variables that a launcher sets, records; then one more is the reference. Each builds
module and data anew, in the same way, and leads a session of its own, which is ended with all that it started. None
imports the main module of the script that asks: if a class of it is needed, the script is run up to where it trains.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console
from typing_extensions import override

from lightning_gradavg.verify.compare import Tolerance
from lightning_gradavg.verify.judge import judge, not_shown
from lightning_gradavg.verify.record import Recorder, Tape
from lightning_gradavg.verify.reference import Enough, Stream, read_stream, record_reference
from lightning_gradavg.verify.report import Report, print_report
from lightning_gradavg.verify.target import (
    MainModule,
    Settings,
    Target,
    TrainsOnImport,
    is_refused,
    resolve_strategy,
)

__all__ = [
    "Progress",
    "estimate",
    "in_processes",
    "print_to_console",
    "record_run",
    "reference_report",
    "verify",
    "verify_target",
]

_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "PL_", "LT_")
_PIPE_WIDTH = 120  # rich assumes 80 columns where there is no terminal
_PATIENCE = 5.0  # seconds without a word
_ON_GPUS = (
    "sync_batchnorm=True runs on GPUs only: verify with --accelerator cuda, or use"
    ' GradAvgStrategy(equivalent_to="single_device"), which synchronizes batch norm on any device'
)


class Progress:
    """Says on standard error what is done, where nothing was said for some seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        """Say `text` if it is time."""
        if time.monotonic() - self._last > _PATIENCE:
            self._last = time.monotonic()
            print(f"verify: {text}", file=sys.stderr, flush=True)  # noqa: T201  # progress is for people


def estimate(module: LightningModule, steps: int, folder: Path) -> None:
    """Say how much memory and disk a verification takes, where that is much.

    Raises:
        OSError: If there is not so much space in the folder.
    """
    size = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    disk, free = 2 * size * steps, shutil.disk_usage(folder).free
    # Weights, gradients, DDP's buckets, and two numbers of an optimizer such as Adam.
    needs = (
        f"about {5 * size / 1e9:.2g} GB of memory in each process, beside activations, and {disk / 1e9:.2g} GB of disk"
    )
    if disk > free:
        raise OSError(
            f"{steps} steps take {needs}; {folder} has {free / 1e9:.1f} GB: set TMPDIR, or verify fewer steps"
        )
    if size > 1e8:  # noqa: PLR2004  # bytes; anything less is a matter of seconds
        print(f"verify: {steps} steps take {needs} in {folder}", file=sys.stderr, flush=True)  # noqa: T201  # likewise


class _RunRecorder(Recorder):
    """Records, and ends the run."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for config in trainer.lr_scheduler_configs:
            config.strict = False  # nothing is validated, and a plateau may be watched on that
        super().on_train_start(trainer, pl_module)

    @override
    def on_complete(self, trainer: Trainer, module: LightningModule) -> None:
        raise Enough


def record_run(trainer: Trainer, module: LightningModule, data: Mapping[str, Any], **options: Any) -> Tape:
    """Train until all steps are recorded, and return the record of this rank; `options` are those of the recorder."""
    recorder = _RunRecorder(**options)
    trainer.callbacks.append(recorder)  # type: ignore[attr-defined]  # set by a connector
    with suppress(Enough):
        trainer.fit(module, **data)
    return recorder.recorded


def verify_target(target: Target, settings: Settings, ignore: Sequence[str] = ()) -> Report:
    """Run a target on several processes and on one, and return how the two differ.

    Raises:
        RuntimeError: If one of the processes failed, with the last line of the user's code.
        ValueError: If the target or a setting is wrong.
    """
    with tempfile.TemporaryDirectory(prefix="gradavg-verify-") as name:
        calls = [(_rank, (target, rank, settings, Path(name))) for rank in range(settings.devices)]
        tapes = in_processes(calls)
        if isinstance(tapes[0], str):
            return not_shown(tapes[0])
        (report,) = in_processes([(_reference, (target, tapes, settings))])
    result: Report = report.without(ignore)
    return result


def verify(
    module: LightningModule | Callable[..., LightningModule] | str,
    data: Any = None,
    *,
    strategy: Any = "ddp",
    devices: int = 2,
    steps: int = 3,
    accelerator: str = "cpu",
    double: bool = False,
    tolerance: float | None = None,
    ignore: Sequence[str] = (),
    compare_order: bool = True,
    seed: int = 0,
    **trainer_options: Any,
) -> Report:
    """Train a few steps on `devices` processes, and say whether one process would have taken the same.

    What is passed is sent to the processes by pickle.

    Args:
        module: A module, or a function without arguments that returns one, such as its class, or `file.py:Name`.
        data: A data module, a training loader, or a function that returns one of them, or `file.py:Name`.
        strategy: The strategy to verify: a name or an instance, `DDPStrategy` or a subclass such as `GradAvgStrategy`.
        devices: The number of processes.
        steps: The number of optimizer steps.
        accelerator: "cpu", or a type of device such as "cuda", with one for each process.
        double: True to compute in float64, which tells rounding from defects.
        tolerance: The largest relative difference that counts as equal; default: 1e-5, in float64 1e-10.
        ignore: Causes that are not to be reported.
        compare_order: Whether to compare the order of samples with that of one process, too.
        seed: What every process seeds before it builds.
        **trainer_options: Further options of the Trainer.

    Returns:
        The report. `report.verdict` is "equal", "different" or "not shown", `report.first` says why it is different.

    Raises:
        ValueError: If an option is out of range.
        RuntimeError: If one of the processes failed, with the last line of the user's code.
    """
    if is_refused():
        raise TrainsOnImport
    settings = Settings(devices, steps, accelerator, double, compare_order, tolerance)
    settings.options(trainer_options)  # a wrong one is refused before any process starts
    target = Target(module, data, {**trainer_options, "strategy": strategy}, seed)
    return verify_target(target, settings, ignore)


def _rank(target: Target, rank: int, settings: Settings, folder: Path) -> Tape | str:
    """Return what one rank records, or why nothing can be."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.devices))
    store = dist.FileStore(str(folder / "store"), settings.devices)
    # Without a backend the group would serve the machine's accelerator alone, and a run on its CPU not.
    backend = dist.Backend.default_device_backend_map[settings.accelerator]
    of_rank: dict[str, Any] = {"rank": rank, "world_size": settings.devices, "timeout": timedelta(seconds=300)}
    dist.init_process_group(backend, store=store, **of_rank)
    try:
        module, data, options = target.build()
        options = settings.options({**options, "strategy": resolve_strategy(options.get("strategy") or "ddp")})
        if rank == 0:
            estimate(module, settings.steps, folder)
        progress = {"progress": Progress()} if rank == 0 else {}
        trainer = Trainer(**{**options, "devices": settings.devices})
        return record_run(trainer, module, data, steps=settings.steps, folder=folder, **progress)
    except ValueError as error:
        if "SyncBatchNorm" in str(error):
            return _ON_GPUS
        raise
    finally:
        dist.destroy_process_group()


def _reference(target: Target, tapes: Sequence[Tape], settings: Settings) -> Report:
    """Return the report of a recorded run of a target."""
    told, stream = tapes[0].facts.told, None
    if settings.compare_order:
        module, data, options = target.build()
        here = len(tapes[0].batches)
        number = here // told.micro_batches if told.splits_batches else here * len(tapes)
        stream = read_stream(module, data, settings.options(options), number)
    module, data, options = target.build()
    return reference_report(
        tapes,
        module,
        settings.options(options),
        settings.tolerance,
        stream=stream,
        datamodule=data.get("datamodule"),
        device=settings.accelerator,
    )


def reference_report(
    tapes: Sequence[Tape],
    module: LightningModule,
    options: Mapping[str, Any],
    tolerance: float | None,
    *,
    stream: Stream | None = None,
    **of_reference: Any,
) -> Report:
    """Return the report of a recorded run, with the reference computed in this process.

    Args:
        tapes: What the ranks recorded, in rank order.
        module: As of `record_reference`, and so are the options.
        options: See there.
        tolerance: The largest relative difference that counts as equal; None for what the precision needs.
        stream: What one process reads; None where the order of samples is not asked for.
        of_reference: Further arguments of `record_reference`.
    """
    limits = Tolerance.of(tapes[0].facts, tolerance)
    if not all(tape.steps for tape in tapes):
        problems = [tape.problem for tape in tapes if tape.problem]
        return not_shown((*problems, "the run took no optimizer step")[0], tapes)
    reference = record_reference(tapes, module, options, tolerance=limits, progress=Progress(), **of_reference)
    return judge(tapes, reference, limits, stream)


def in_processes(calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Return what the calls return, each made in a process of its own, all at once: the ranks of a world.

    Raises:
        RuntimeError: If one of them failed: the others are ended, and the last line of the user's code is the message.
        ValueError: If what it was given is wrong.
    """
    context: Any = multiprocessing.get_context("forkserver")
    # One import instead of one per process. What a process inherits is the same as with spawn.
    context.set_forkserver_preload(["lightning.pytorch", "lightning_gradavg"])
    main = getattr(sys.modules["__main__"], "__file__", None)
    # The main module may train when it is imported, which multiprocessing does in every process that it starts.
    no_main = mock.patch.dict(sys.modules, __main__=ModuleType("__main__"))
    with tempfile.TemporaryDirectory(prefix="gradavg-verify-") as name, ExitStack() as ending:
        files = [Path(name, f"{rank}.pt") for rank in range(len(calls))]
        waiting: dict[Any, tuple[str, Any, Path]] = {}
        for rank, (call, file) in enumerate(zip(calls, files, strict=True)):
            # As a process argument each tensor would be a shared piece of memory with a file descriptor of its own.
            torch.save(call, file.with_suffix(".in"))
            process = context.Process(target=_call, args=(file, _environ(rank, len(calls)), main))
            with no_main:
                process.start()
            ending.callback(_end, process)
            waiting[process.sentinel] = f"rank {rank}" if len(calls) > 1 else "the reference", process, file
        while waiting:
            for sentinel in connection.wait(list(waiting)):
                who, process, file = waiting.pop(sentinel)
                process.join()
                if process.exitcode != 0:
                    raise _failure(who, process, file)
        return [torch.load(file, weights_only=False) for file in files]


def _end(process: Any) -> None:
    """End a process, with the workers of its loaders; it may have ended, and they not."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _failure(who: str, process: Any, file: Path) -> Exception:
    text = file.with_suffix(".error")
    usage, message = pickle.loads(text.read_bytes()) if text.exists() else (False, f"exit code {process.exitcode}")
    return ValueError(message) if usage else RuntimeError(f"{who} failed: {message}")


def _environ(rank: int, world_size: int) -> dict[str, str]:
    """Return the environment of a rank, as a launcher sets it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    # Gloo otherwise resolves the host name, which fails or waits where there is no working resolver.
    loopback = filter(re.compile(r"lo\d*").fullmatch, (name for _, name in socket.if_nameindex()))
    of_rank = {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), rank),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), world_size),
        "NODE_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,  # the ranks meet in a file
    }
    gloo = dict(zip(["GLOO_SOCKET_IFNAME"], loopback, strict=False))
    return {**gloo, **kept, **{name: str(value) for name, value in of_rank.items()}}


def _call(file: Path, environ: Mapping[str, str], main: str | None) -> None:
    """Make one call in this process, whose result or failure is written beside the file."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environ)
    # Workers of loaders start by the platform's own method, as in a script, and not from the fork server.
    multiprocessing.set_start_method(None, force=True)
    # What the user's code prints must not mix with the report.
    sys.stdout.flush()
    os.dup2(2, 1)
    for logger in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")  # advice for a longer run
    sys.modules["__main__"] = sys.modules["__mp_main__"] = MainModule(main)
    try:
        function, arguments = torch.load(file.with_suffix(".in"), weights_only=False)
        torch.save(function(*arguments), file)
    except BaseException as error:  # noqa: BLE001  # whatever it is, the parent reports it
        file.with_suffix(".error").write_bytes(pickle.dumps(_told(error)))
        sys.exit(1)


def _told(error: BaseException) -> tuple[bool, str]:
    """Return whether it is a question of usage, and the message, with the last line of the user's own code."""
    libraries = (
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        str(Path(__file__).parents[1]),
        "<",
    )
    of_user = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(libraries)]
    message = f"{type(error).__name__}: {error}"
    for last in of_user[-1:]:
        return False, f"{message}\n  {last.filename}, line {last.lineno}, in {last.name}\n    {last.line}"
    usage = isinstance(error, (ValueError, TypeError, OSError)) or "Misconfiguration" in message
    return usage, str(error) if usage else message


def print_to_console(report: Report) -> None:
    """Print a report to standard output, as wide as it is."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    print_report(report, Console(width=_PIPE_WIDTH if piped else None, highlight=False))
