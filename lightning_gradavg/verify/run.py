"""The user's run: what it is made of, by value or by name, how it is verified, and in which processes.

One process per rank, with the variables that a launcher sets, records; then one more is the twin. Each builds module
and data anew, and leads a session of its own, which ends with everything that it started.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import logging
import math
import multiprocessing
import operator
import os
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
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias
from unittest import mock

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, callbacks, seed_everything
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_gradavg._lightning.internals import start_no_processes
from lightning_gradavg._support.arguments import nearest, raise_first
from lightning_gradavg.verify.explain import judge
from lightning_gradavg.verify.record import Recorder, Tape
from lightning_gradavg.verify.report import CAUSES, Report

_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "PL_", "LT_")
_COPIES = 5  # weights, gradients, DDP's buckets, and two numbers of an optimizer such as Adam
_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    *(str(Path(__file__).parents[1]), "<"),
)

# Plugins of the cluster and of precision are ours; the callbacks search, stop, write or watch, and need a longer run.
_LEFT_OUT: Mapping[str, tuple[type, ...]] = {
    "plugins": (str, ClusterEnvironment, Precision),
    "callbacks": (
        *(callbacks.BatchSizeFinder, callbacks.LearningRateFinder, callbacks.EarlyStopping, callbacks.Timer),
        *(callbacks.Checkpoint, callbacks.DeviceStatsMonitor, callbacks.LearningRateMonitor, callbacks.ModelSummary),
        callbacks.ProgressBar,
    ),
}
_QUIET: Mapping[str, Any] = {
    **dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    **dict.fromkeys(("precision", "profiler", "min_epochs", "min_steps", "max_time"), None),
    **dict.fromkeys(("num_nodes", "log_every_n_steps"), 1),
    **dict.fromkeys(("limit_val_batches", "num_sanity_val_steps", "fast_dev_run"), 0),
}


def _refuse(*_: Any, **__: Any) -> None:
    """Stand for `Trainer.fit`, and `verify`, while a module is imported."""
    raise ImportError('it trains when it is imported: put that under `if __name__ == "__main__":`')


def imported(path: str) -> Any:
    """Return what `package.module:Name` or `folder/file.py:Name` names."""
    module, _, name = path.rpartition(":")
    if not module or not name:
        raise ValueError(f"{path!r} must be written package.module:Name or file.py:Name")
    try:
        with mock.patch.object(Trainer, "fit", _refuse):
            found: Any = _module_of_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
        return operator.attrgetter(name)(found)
    except (ImportError, AttributeError, OSError) as error:
        raise ValueError(f"{path!r} cannot be imported: {error}") from error


def _module_of_file(file: Path) -> ModuleType:
    if not file.exists():
        raise ImportError(f"there is no file {str(file)!r}")
    spec: Any = importlib.util.spec_from_file_location(file.stem, file.resolve())
    if getattr(sys.modules.get(file.stem), "__file__", None) != spec.origin:
        sys.path.insert(0, str(file.resolve().parent))  # as Python does for a script
        module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[file.stem]


def resolve_strategy(strategy: Any) -> DDPStrategy:
    """Return a strategy that runs in processes which are there already."""
    if isinstance(strategy, str) and ":" in strategy:
        strategy = imported(strategy)()
    if isinstance(strategy, str):
        name = "ddp" if strategy == "auto" else strategy.lower()  # as the Trainer does
        if name not in StrategyRegistry:
            raise ValueError(f"strategy={strategy!r} is not registered{nearest(name, sorted(StrategyRegistry))}")
        strategy = StrategyRegistry.get(name)
    if not isinstance(strategy, DDPStrategy):
        raise ValueError(  # noqa: TRY004  # a wrong choice, not a wrong type: strategies come by name, too
            "verify compares gradients of whole models, as DDPStrategy and GradAvgStrategy reduce them; got"
            f" {type(strategy).__name__}"
        )
    start_no_processes(strategy)
    return strategy


def quiet_options(options: Mapping[str, Any], accelerator: str) -> dict[str, Any]:
    """Return the options of a Trainer that trains like the user's, but does not log, save or validate."""
    known = list(inspect.signature(Trainer.__init__).parameters)[1:]
    for name in sorted(options.keys() - set(known)):
        raise ValueError(f"Trainer has no option {name!r}{nearest(name, known)}")
    kept = {
        name: [one for one in as_list(options.get(name)) if not isinstance(one, types)]
        for name, types in _LEFT_OUT.items()
    }
    # Modules may write to `self.logger.experiment`.
    return {**options, **_QUIET, "logger": DummyLogger(), "accelerator": accelerator, **kept}


def as_list(given: Any) -> list[Any]:
    """Return what the Trainer takes as one, as several, or as None."""
    return given if isinstance(given, list) else list(filter(None, [given]))


Read: TypeAlias = tuple[Any, Any, Mapping[str, Any]]
"""A module, its data or None, and options of the Trainer."""


def of_values(module: Any, data: Any = None) -> Read:
    """Return a new module and new data of what `verify` is given: values, what makes them, or names of one of these."""
    given, of_data = (imported(each) if isinstance(each, str) else each for each in (module, data))
    made = copy.deepcopy(given) if isinstance(given, LightningModule) else given()
    return made, copy.deepcopy(of_data) if hasattr(of_data, "__iter__") else of_data, {}


@dataclass(frozen=True)
class Target:
    """What is to be verified; every process builds it anew."""

    read: Callable[[], Read]
    options: Mapping[str, Any] = field(default_factory=dict)  # of the Trainer, which override those that are read
    seed: int = 0

    def build(self, accelerator: str = "cpu") -> tuple[LightningModule, dict[str, Any], dict[str, Any]]:
        """Seed, and return the module, the data arguments of `Trainer.fit`, and the options of a quiet Trainer."""
        seed_everything(self.seed, workers=True, verbose=False)
        with mock.patch.object(Trainer, "fit", _refuse):
            module, data, options = self.read()
        data = data() if callable(data) and not hasattr(data, "__iter__") else data
        if not isinstance(module, LightningModule):
            raise TypeError(
                "verify needs a lightning.pytorch.LightningModule, or a function that returns one;"
                f" got {module!r} of type {type(module).__name__}"
            )
        if data is None and not is_overridden("train_dataloader", module):
            raise ValueError(
                f"there is no training data: give --data train.py:data, or let {type(module).__name__} have a"
                " train_dataloader()"
            )
        name = "datamodule" if isinstance(data, LightningDataModule) else "train_dataloaders"
        return module, {} if data is None else {name: data}, quiet_options({**options, **self.options}, accelerator)


@dataclass(frozen=True)
class Settings:
    """How to verify, as `verify` is told."""

    devices: int = 2
    steps: int = 3
    accelerator: str = "cpu"
    single: bool = False
    tolerance: float | None = None  # None for what the precision needs

    def __post_init__(self) -> None:
        if Trainer.fit is _refuse:
            _refuse()
        of_type: Any = getattr(torch, self.accelerator, None)
        found = of_type.device_count() if hasattr(of_type, "device_count") else 0
        refused = {
            f"devices must be 1 or more, got {self.devices}": self.devices < 1,
            f"steps must be 1 or more, got {self.steps}": self.steps < 1,
            f"tolerance is a relative difference > 0, got {self.tolerance}": self.tolerance is not None
            and not 0 < self.tolerance < math.inf,
            f"{self.devices} ranks need as many devices of type {self.accelerator!r}, and torch finds {found}; use"
            " accelerator 'cpu', or another type such as 'cuda'": self.accelerator != "cpu" and found < self.devices,
        }
        raise_first(ValueError, refused)


def require_memory(module: LightningModule, processes: int, *, double: bool) -> None:
    """Check that there is as much memory as the processes need, activations aside."""
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
    recorder: Recorder, strategy: Any, options: Mapping[str, Any], module: LightningModule, data: Mapping[str, Any]
) -> Tape:
    """Train until all steps are recorded, and return the record of this rank."""
    ours = {"plugins": [*options["plugins"], recorder.plugin], "callbacks": [*options["callbacks"], recorder]}
    trainer = Trainer(**{**options, **ours, "strategy": strategy})
    with recorder.watching(module):
        trainer.fit(module, **data)
    return recorder.tape


def verify_target(target: Target, settings: Settings, ignore: Sequence[str] = ()) -> Report:
    """Run a target on several processes and on one, and return how the two differ."""
    if unknown := sorted(set(ignore) - set(CAUSES)):
        raise ValueError(f"{unknown[0]!r} is not a cause; choose from {', '.join(CAUSES)}")
    quiet_options(target.options, settings.accelerator)  # a wrong one is refused before any process starts
    with tempfile.TemporaryDirectory(prefix="gradavg-verify-") as name:
        tapes = in_processes([(_rank, (target, rank, settings, name)) for rank in range(settings.devices)])
    how = settings.tolerance or (1e-4 if settings.single else 1e-8), not settings.single, settings.accelerator
    (report,) = in_processes([(judge, (tapes, partial(target.build, settings.accelerator), *how))])
    return Report.without(report, ignore)


def _rank(target: Target, rank: int, settings: Settings, folder: str) -> Tape:
    """Return what one rank records."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.devices))
    store = dist.FileStore(f"{folder}/store", settings.devices)
    # Without a backend the group would serve the machine's accelerator alone, and a run on its CPU not.
    backend = dist.Backend.default_device_backend_map[settings.accelerator]
    of_rank: dict[str, Any] = {"rank": rank, "world_size": settings.devices, "timeout": timedelta(seconds=300)}
    dist.init_process_group(backend, store=store, **of_rank)
    try:
        module, data, options = target.build(settings.accelerator)
        strategy = resolve_strategy(options.pop("strategy", None) or "ddp")
        require_memory(module, settings.devices, double=not settings.single)
        recorder = Recorder(settings.steps, double=not settings.single)
        return record_run(recorder, strategy, {**options, "devices": settings.devices}, module, data)
    finally:
        dist.destroy_process_group()


def in_processes(calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Return what the calls return, each made in a process of its own, all at once: the ranks of a world.

    The error of the first that fails is raised, and the others end.
    """
    context: Any = multiprocessing.get_context("forkserver")
    # One import instead of one per process. What a process inherits is the same as with spawn.
    context.set_forkserver_preload([__name__])
    results, waiting = dict[int, Any](), dict[Any, tuple[int, Any]]()
    with tempfile.TemporaryDirectory(prefix="gradavg-verify-") as name, ExitStack() as ending:
        for rank, call in enumerate(calls):
            # As a process argument each tensor would be a shared piece of memory with a file descriptor of its own.
            torch.save(call, f"{name}/{rank}.in")
            process = context.Process(target=_call, args=(name, rank, _environ(rank, len(calls))))
            process.start()
            ending.callback(_end, process)
            waiting[process.sentinel] = rank, process
        while waiting:
            for rank, process in map(waiting.pop, connection.wait(list(waiting))):
                process.join()
                if process.exitcode:
                    guard = 'see standard error, and call verify under `if __name__ == "__main__":` in a script'
                    raise RuntimeError(f"rank {rank} of {len(calls)} failed: exit code {process.exitcode}: {guard}")
                results[rank] = torch.load(f"{name}/{rank}.out", weights_only=False)
                if isinstance(results[rank], Exception):
                    raise results[rank]
    return [results[rank] for rank in range(len(calls))]


def _end(process: Any) -> None:
    """End a process, with the workers of its loaders; it may have ended, and they not."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _environ(rank: int, world_size: int) -> dict[str, str]:
    """Return the environment of a rank, as a launcher sets it."""
    # Gloo otherwise resolves the host name, which fails or waits where there is no working resolver.
    loopback = [("GLOO_SOCKET_IFNAME", name) for _, name in socket.if_nameindex() if re.fullmatch(r"lo\d*", name)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    of_rank = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    of_world = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
    meeting = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # the ranks meet in a file
    # All go on when all are connected. Otherwise they say of a rank that fails at once that it cannot be reached.
    meeting["TORCH_DIST_INIT_BARRIER"] = "1"
    return {**dict(loopback), **kept, **of_rank, **of_world, **meeting}


def _call(folder: str, rank: int, environ: Mapping[str, str]) -> None:
    """Make one call in this process, whose result or failure is written to a file."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environ)
    # What the user's code prints must not mix with the report.
    sys.stdout.flush()
    os.dup2(2, 1)
    logging.disable(logging.ERROR)  # advice for a longer run; who failed first is the report's to say
    warnings.filterwarnings("ignore", module="lightning")
    try:
        function, arguments = torch.load(f"{folder}/{rank}.in", weights_only=False)
        result = function(*arguments)
    except BaseException as error:  # noqa: BLE001  # whatever it is, the parent reports it
        result = _told(error, f"rank {rank} of {environ['WORLD_SIZE']}")
    torch.save(result, f"{folder}/{rank}.out")


def _told(error: BaseException, who: str) -> Exception:
    """Return a question of usage as a `ValueError`, and a failure with the last line of the user's own code."""
    of_user = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(_LIBRARIES)]
    if not of_user and isinstance(error, (ValueError, TypeError, OSError, MisconfigurationException)):
        return ValueError(str(error))
    lines = (f"\n  {one.filename}, line {one.lineno}, in {one.name}\n    {one.line}" for one in of_user[-1:])
    return RuntimeError(f"{who} failed: {type(error).__name__}: {error}{''.join(lines)}")
