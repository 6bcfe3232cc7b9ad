"""The processes of a verification, and `verify`.

One process per rank, with the variables that a launcher sets, records; then one more is the twin. Each builds module
and data anew, and leads a session of its own, which ends with everything that it started.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import sysconfig
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer

from lightning_gradavg.arguments import nearest
from lightning_gradavg.verify.explain import judge
from lightning_gradavg.verify.record import Recorder, Tape
from lightning_gradavg.verify.report import CAUSES, Report
from lightning_gradavg.verify.target import (
    Settings,
    Target,
    of_values,
    quiet_options,
    resolve_strategy,
)

__all__ = ["in_processes", "record_run", "require_memory", "verify", "verify_target"]

_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "PL_", "LT_")
_ON_GPUS = (
    "sync_batchnorm=True runs on GPUs only: verify with --accelerator cuda, or use"
    ' GradAvgStrategy(equivalent_to="single_device"), which synchronizes batch norm on any device'
)
_UNSAID = 'see standard error, and call verify under `if __name__ == "__main__":` in a script'
_COPIES = 5  # weights, gradients, DDP's buckets, and two numbers of an optimizer such as Adam


def require_memory(module: LightningModule, processes: int, *, double: bool) -> None:
    """Check that there is as much memory as the processes need, activations aside.

    Raises:
        ValueError: If not.
    """
    numbers = sum(parameter.numel() for parameter in module.parameters())
    needs = numbers * (8 if double else 4) * _COPIES * processes
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needs > has:
        how = "float64; --single computes in float32, in half of that" if double else "float32"
        raise ValueError(
            f"{processes} processes need {needs / 1e9:.3g} GB of memory for {numbers / 1e6:.4g} million parameters in"
            f" {how}; this machine has {has / 1e9:.3g} GB. Verify a smaller model of the same kind"
        )


def record_run(
    strategy: Any, options: Mapping[str, Any], module: LightningModule, data: Mapping[str, Any], settings: Settings
) -> Tape:
    """Train until all steps are recorded, and return the record of this rank."""
    recorder = Recorder(settings.steps, double=not settings.single)
    kept = {name: value for name, value in options.items() if name != "precision"}
    kept["plugins"] = [*kept.get("plugins", ()), recorder.plugin]
    kept["callbacks"] = [*(kept.get("callbacks") or ()), recorder]
    trainer = Trainer(strategy=strategy, **kept)
    with recorder.watching(module):
        trainer.fit(module, **data)
    return recorder.tape


def verify_target(target: Target, settings: Settings, ignore: Sequence[str] = ()) -> Report:
    """Run a target on several processes and on one, and return how the two differ.

    Raises:
        RuntimeError: If one of the processes failed, with the last line of the user's code.
        ValueError: If the target or a setting is wrong.
    """
    for cause in sorted(set(ignore) - set(CAUSES)):
        raise ValueError(f"{cause!r} is not a cause{nearest(cause, list(CAUSES))}")
    quiet_options(target.options, settings.accelerator)  # a wrong one is refused before any process starts
    with tempfile.TemporaryDirectory(prefix="gradavg-verify-") as name:
        tapes = in_processes([(_rank, (target, rank, settings, Path(name))) for rank in range(settings.devices)])
        (report,) = in_processes([(_alone, (target, tapes, settings))])
    return Report.without(report, ignore)


def verify(
    module: LightningModule | Callable[..., LightningModule] | str,
    data: Any = None,
    *,
    strategy: Any = "ddp",
    devices: int = 2,
    steps: int = 3,
    accelerator: str = "cpu",
    single: bool = False,
    tolerance: float | None = None,
    ignore: Sequence[str] = (),
    seed: int = 0,
    **trainer_options: Any,
) -> Report:
    """Train a few steps on `devices` processes and on one, and say whether the results are equal.

    Arguments are pickled to send them to the processes.

    Args:
        module: A module, or a function without arguments that returns one, such as its class, or `file.py:Name`.
        data: A data module, a training loader, or a function that returns one of them, or `file.py:Name`.
        strategy: The strategy to verify: a name or an instance, `DDPStrategy` or a subclass such as `GradAvgStrategy`.
        devices: The number of processes.
        steps: The number of global batches.
        accelerator: "cpu", or a type of device such as "cuda", with one for each process.
        single: True to compute in float32, for models that cannot compute in float64, and to compare at 1e-4.
        tolerance: The largest relative difference that counts as equal; default: 1e-8, in float32 1e-4.
        ignore: Causes that you accept: they are notes in the report.
        seed: The seed that every process sets before it builds the model.
        **trainer_options: Further options of the Trainer.

    Returns:
        The report; `print` shows what the command prints. `report.verdict` is "equal", "different" or "not shown", and
        `report.first` is the first cause.

    Raises:
        ValueError: If an option is out of range.
        RuntimeError: If one of the processes failed, with the last line of the user's code.
    """
    settings = Settings(devices, steps, accelerator, single, tolerance)
    target = Target(partial(of_values, module, data), {**trainer_options, "strategy": strategy}, seed)
    return verify_target(target, settings, ignore)


def _rank(target: Target, rank: int, settings: Settings, folder: Path) -> Tape:
    """Return what one rank records."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.devices))
    store = dist.FileStore(str(folder / "store"), settings.devices)
    # Without a backend the group would serve the machine's accelerator alone, and a run on its CPU not.
    backend = dist.Backend.default_device_backend_map[settings.accelerator]
    of_rank: dict[str, Any] = {"rank": rank, "world_size": settings.devices, "timeout": timedelta(seconds=300)}
    dist.init_process_group(backend, store=store, **of_rank)
    try:
        module, data, options = target.build(settings.accelerator)
        strategy = resolve_strategy(options.pop("strategy", None) or "ddp")
        require_memory(module, settings.devices, double=not settings.single)
        return record_run(strategy, {**options, "devices": settings.devices}, module, data, settings)
    except ValueError as error:
        if "SyncBatchNorm" in str(error):
            return Tape(problem=_ON_GPUS)
        raise
    finally:
        dist.destroy_process_group()


def _alone(target: Target, tapes: Sequence[Tape], settings: Settings) -> Report:
    """Return the report of a recorded run of a target."""
    return judge(tapes, lambda: target.build(settings.accelerator), settings)


def in_processes(calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Return what the calls return, each made in a process of its own, all at once: the ranks of a world.

    Raises:
        RuntimeError: If one of them failed: the others are ended, and the last line of the user's code is the message.
        ValueError: If what it was given is wrong.
    """
    context: Any = multiprocessing.get_context("forkserver")
    # One import instead of one per process. What a process inherits is the same as with spawn.
    context.set_forkserver_preload(["lightning.pytorch", "lightning_gradavg"])
    with tempfile.TemporaryDirectory(prefix="gradavg-verify-") as name, ExitStack() as ending:
        waiting = dict[Any, tuple[int, Any]]()
        for rank, call in enumerate(calls):
            # As a process argument each tensor would be a shared piece of memory with a file descriptor of its own.
            torch.save(call, Path(name, f"{rank}.in"))
            process = context.Process(target=_call, args=(Path(name), rank, _environ(rank, len(calls))))
            process.start()
            ending.callback(_end, process)
            waiting[process.sentinel] = rank, process
        while waiting:
            for rank, process in map(waiting.pop, connection.wait(list(waiting))):
                process.join()
                if process.exitcode != 0:
                    told = Path(name, f"{rank}.error")
                    unknown = RuntimeError(f"exit code {process.exitcode}: {_UNSAID}")
                    error = pickle.loads(told.read_bytes()) if told.exists() else unknown
                    who = f"rank {rank}" if len(calls) > 1 else "the twin"
                    raise RuntimeError(f"{who} failed: {error}") if isinstance(error, RuntimeError) else error
        return [torch.load(Path(name, f"{rank}.out"), weights_only=False) for rank in range(len(calls))]


def _end(process: Any) -> None:
    """End a process, with the workers of its loaders; it may have ended, and they not."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


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


def _call(folder: Path, rank: int, environ: Mapping[str, str]) -> None:
    """Make one call in this process, whose result or failure is written to a file."""
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
    # Who failed first is the report's to say: a run that has shown enough steps ends by an exception, too.
    logging.getLogger("lightning_gradavg.faults.part").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module="lightning")  # advice for a longer run
    try:
        function, arguments = torch.load(Path(folder, f"{rank}.in"), weights_only=False)
        torch.save(function(*arguments), Path(folder, f"{rank}.out"))
    except BaseException as error:  # noqa: BLE001  # whatever it is, the parent reports it
        Path(folder, f"{rank}.error").write_bytes(pickle.dumps(_told(error)))
        sys.exit(1)


def _told(error: BaseException) -> Exception:
    """Return a question of usage as a `ValueError`, and a failure with the last line of the user's own code."""
    libraries = (
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        str(Path(__file__).parents[1]),
        "<",
    )
    of_user = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(libraries)]
    message = f"{type(error).__name__}: {error}"
    for last in of_user[-1:]:
        return RuntimeError(f"{message}\n  {last.filename}, line {last.lineno}, in {last.name}\n    {last.line}")
    usage = isinstance(error, (ValueError, TypeError, OSError)) or "Misconfiguration" in message
    return ValueError(str(error)) if usage else RuntimeError(message)
