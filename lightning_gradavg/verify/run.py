"""The user's run: what it is made of, by value or by name, how it is verified, and in which processes.

`verify_target` goes through these steps:

1. One process for each rank, with the variables that a launcher sets, trains and records (`_rank`).
2. One more process trains alone, and compares (`judge`).

Each process builds module and data anew. It leads a session of its own, which ends with everything that it started.
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
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, callbacks, seed_everything
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_gradavg._lightning.internals import (
    set_data_parallel_size,
    start_no_processes,
    tensor_parallel_size,
)
from lightning_gradavg._support.arguments import nearest
from lightning_gradavg.verify.explain import judge
from lightning_gradavg.verify.precision import judge_precision
from lightning_gradavg.verify.record import Record, Recorder
from lightning_gradavg.verify.report import CAUSES, Report
from lightning_gradavg.verify.rounding import plugin_of, require_precision
from lightning_gradavg.verify.trace import is_library
from lightning_gradavg.verify.twin import Built

__all__ = [
    "Call",
    "Settings",
    "Target",
    "UserRun",
    "as_list",
    "imported",
    "in_processes",
    "quiet_options",
    "record_run",
    "require_memory",
    "resolve_strategy",
    "shard_over",
    "user_run_of",
    "verify_target",
]

_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "PL_", "LT_")
"""How the environment variables begin by which Lightning would find another launcher."""

_NUMBERS_PER_PARAMETER = 5
"""Weight, gradient, its copy in DDP's bucket, and two numbers of an optimizer such as Adam."""

_WHOLE_NUMBERS_PER_PARAMETER = 2
"""Of a sharded model on each process: the weight before it is sharded, or while it computes with its gradient."""

_REPLACED_PLUGINS = (str, ClusterEnvironment)
"""The plugin of the cluster is that of `verify`, and `record_run` replaces that of precision. A string names one."""

_REMOVED_CALLBACKS = (
    # They search or stop, and need a longer run.
    callbacks.BatchSizeFinder,
    callbacks.LearningRateFinder,
    callbacks.EarlyStopping,
    callbacks.Timer,
    # They write or watch.
    callbacks.Checkpoint,
    callbacks.DeviceStatsMonitor,
    callbacks.LearningRateMonitor,
    callbacks.ModelSummary,
    callbacks.ProgressBar,
)

_QUIET: Mapping[str, Any] = {
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "precision": None,
    "profiler": None,
    "min_epochs": None,
    "min_steps": None,
    "max_time": None,
    "num_nodes": 1,
    "log_every_n_steps": 1,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "fast_dev_run": 0,
}
"""Options of the Trainer that replace the user's."""


def _refuse(*_: object, **__: object) -> None:
    """Stand for `Trainer.fit` while a module is imported; `Settings` calls it for `verify`."""
    raise ImportError('it trains when it is imported: put that under `if __name__ == "__main__":`')


def imported(path: str) -> Any:
    """Return what `package.module:Name` or `folder/file.py:Name` names."""
    module, _, name = path.rpartition(":")
    if not module or not name:
        raise ValueError(f"{path!r} must be written package.module:Name or file.py:Name")
    try:
        with mock.patch.object(Trainer, "fit", _refuse):
            if module.endswith(".py"):
                found = _module_of_file(Path(module))
            else:
                found = importlib.import_module(module)
        return operator.attrgetter(name)(found)
    except (ImportError, AttributeError, OSError) as error:
        raise ValueError(f"{path!r} cannot be imported: {error}") from error


def _module_of_file(file: Path) -> ModuleType:
    """Import a file, unless it is imported already, under its own name, so that pickles of its classes are found."""
    if not file.exists():
        raise ImportError(f"there is no file {str(file)!r}")
    spec: Any = importlib.util.spec_from_file_location(file.stem, file.resolve())
    if getattr(sys.modules.get(file.stem), "__file__", None) != spec.origin:
        sys.path.insert(0, str(file.resolve().parent))  # as Python does for a script
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        spec.loader.exec_module(module)
    return sys.modules[file.stem]


def resolve_strategy(strategy: object) -> DDPStrategy | ModelParallelStrategy:
    """Return a strategy that runs in processes which are there already."""
    if isinstance(strategy, str) and ":" in strategy:
        made_by = imported(strategy)
        if not callable(made_by):
            raise ValueError(
                f"strategy={strategy!r} is {made_by!r}; name the class, or a function that makes one, as every process"
                " needs its own"
            )
        strategy = made_by()
    if isinstance(strategy, str):
        name = strategy.lower()
        if strategy == "auto":
            name = "ddp"  # as the Trainer chooses for several devices
        if name not in StrategyRegistry:
            raise ValueError(f"strategy={strategy!r} is not registered{nearest(name, sorted(StrategyRegistry))}")
        strategy = StrategyRegistry.get(name)
    if isinstance(strategy, DDPStrategy):
        start_no_processes(strategy)
        return strategy
    if isinstance(strategy, ModelParallelStrategy):
        _require_no_tensor_parallelism(strategy)
        return strategy
    raise ValueError(
        "verify compares gradients as DDPStrategy and ModelParallelStrategy (FSDP2) reduce them, and those of this"
        f" package; got {type(strategy).__name__}"
    )


def shard_over(strategy: ModelParallelStrategy, processes: int, accelerator: str) -> None:
    """Have a strategy shard over the processes of verify, where the user's run may have more of them."""
    if accelerator != "cpu":
        raise ValueError(f"verify compares sharded models on the CPU, got accelerator {accelerator!r}: leave it out")
    set_data_parallel_size(strategy, processes)


def _require_no_tensor_parallelism(strategy: ModelParallelStrategy) -> None:
    """Raise a ValueError if several ranks compute a loss together."""
    size = tensor_parallel_size(strategy)
    if size != 1:
        raise ValueError(
            f"verify compares ranks that have a batch each, and no tensor parallelism; {type(strategy).__name__} has"
            f' tensor_parallel_size={size!r} ("auto" is all processes of a node). Set tensor_parallel_size=1, in the'
            " config, or in a function that makes the strategy: --strategy train.py:make_strategy"
        )


def quiet_options(options: Mapping[str, Any], accelerator: str) -> dict[str, Any]:
    """Return the options of a Trainer that trains like the user's, but does not log, save or validate."""
    known = [name for name in inspect.signature(Trainer.__init__).parameters if name != "self"]
    for name in sorted(options.keys() - set(known)):
        raise ValueError(f"Trainer has no option {name!r}{nearest(name, known)}")
    return {
        **options,
        **_QUIET,
        "logger": DummyLogger(),  # modules may write to `self.logger.experiment`
        "accelerator": accelerator,
        "plugins": _without_types(as_list(options.get("plugins")), _REPLACED_PLUGINS),
        "callbacks": _without_types(as_list(options.get("callbacks")), _REMOVED_CALLBACKS),
    }


def _without_types(values: list[object], types: tuple[type, ...]) -> list[object]:
    return [value for value in values if not isinstance(value, types)]


def as_list(value: object) -> list[object]:
    """Return what the Trainer takes as one, as several, or as None."""
    if isinstance(value, list):
        return value
    if not value:
        return []
    return [value]


class UserRun(NamedTuple):
    """What is trained."""

    module: Any  # a LightningModule; `Target.build` checks it
    data: Any  # a data module, a loader, or a function that returns one of them; None if the module has its own
    options: Mapping[str, Any]  # of the Trainer


def user_run_of(module: Any, data: Any = None) -> UserRun:
    """Return a new module and new data of what `verify` is given: values, what makes them, or names of one of these."""
    if isinstance(module, str):
        module = imported(module)
    if isinstance(data, str):
        data = imported(data)
    if isinstance(module, LightningModule):
        module = copy.deepcopy(module)
    else:
        module = module()
    if hasattr(data, "__iter__"):  # a loader; data modules and functions make new ones for each run
        data = copy.deepcopy(data)
    return UserRun(module, data, {})


@dataclass(frozen=True)
class Target:
    """What is to be verified; every process builds it anew."""

    read: Callable[[], UserRun]
    options: Mapping[str, Any] = field(default_factory=dict)  # of the Trainer, which override those that are read
    seed: int = 0

    def build(self, accelerator: str = "cpu") -> Built:
        """Seed, and return what a quiet run of the Trainer is made of."""
        seed_everything(self.seed, workers=True, verbose=False)
        with mock.patch.object(Trainer, "fit", _refuse):
            module, data, options = self.read()
        if callable(data) and not hasattr(data, "__iter__"):
            data = data()
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
        data_arguments = {}
        if isinstance(data, LightningDataModule):
            data_arguments["datamodule"] = data
        elif data is not None:
            data_arguments["train_dataloaders"] = data
        return Built(module, data_arguments, quiet_options({**options, **self.options}, accelerator))


@dataclass(frozen=True)
class Settings:
    """How to verify. `lightning_gradavg.verify` says what the options mean, and `gradavg verify --help`."""

    devices: int = 2
    steps: int = 3
    accelerator: str = "cpu"
    single: bool = False
    tolerance: float | None = None  # None for what the precision needs
    precision: str | None = None  # in which to compare, too, once float64 shows no difference

    def __post_init__(self) -> None:
        if Trainer.fit is _refuse:  # a module that is being imported calls `verify`
            _refuse()
        if self.devices < 1:
            raise ValueError(f"devices must be 1 or more, got {self.devices}")
        if self.steps < 1:
            raise ValueError(f"steps must be 1 or more, got {self.steps}")
        if self.tolerance is not None and not 0 < self.tolerance < math.inf:
            raise ValueError(f"tolerance is a relative difference > 0, got {self.tolerance}")
        if self.precision is not None:
            require_precision(self.precision)
            if self.single:
                raise ValueError(
                    f"precision={self.precision!r} comes after a comparison in float64, and single=True has none:"
                    " choose one of them"
                )
        if self.accelerator != "cpu":
            found = _device_count(self.accelerator)
            if found < self.devices:
                raise ValueError(
                    f"{self.devices} ranks need as many devices of type {self.accelerator!r}, and torch finds {found};"
                    " use accelerator 'cpu', or another type such as 'cuda'"
                )

    @property
    def double(self) -> bool:
        """Whether both runs compute in float64."""
        return not self.single

    @property
    def used_tolerance(self) -> float:
        """The largest relative difference that counts as equal."""
        if self.tolerance is not None:
            return self.tolerance
        if self.single:
            return 1e-4
        return 1e-8


def _device_count(accelerator: str) -> int:
    """Return how many devices of a type torch finds."""
    module: Any = getattr(torch, accelerator, None)  # such as `torch.cuda`
    if not hasattr(module, "device_count"):
        return 0
    return int(module.device_count())


def require_memory(module: LightningModule, processes: int, *, double: bool, sharded: bool = False) -> None:
    """Check that there is as much memory as the processes need, activations aside."""
    bytes_per_number, how = 4, "float32"
    if double:
        bytes_per_number, how = 8, "float64; --single computes in float32, in half of that"
    parameters = sum(parameter.numel() for parameter in module.parameters())
    numbers = _NUMBERS_PER_PARAMETER * processes
    if sharded:
        numbers = _NUMBERS_PER_PARAMETER + _WHOLE_NUMBERS_PER_PARAMETER * processes
    needed = parameters * bytes_per_number * numbers
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise ValueError(
            f"{processes} processes need {needed / 1e9:.3g} GB of memory for {parameters / 1e6:.4g} million parameters"
            f" in {how}; this machine has {available / 1e9:.3g} GB. Verify a smaller model of the same kind"
        )


def record_run(
    recorder: Recorder,
    strategy: DDPStrategy | ModelParallelStrategy,
    options: Mapping[str, Any],
    module: LightningModule,
    data: Mapping[str, Any],
) -> Record:
    """Train until all steps are recorded, and return the record of this rank."""
    changed = {
        "plugins": [*_without_types(options["plugins"], (Precision,)), recorder.plugin],
        "callbacks": [*options["callbacks"], recorder],
        "strategy": strategy,
    }
    trainer = Trainer(**{**options, **changed})
    with recorder.watching(module):
        trainer.fit(module, **data)
    return recorder.record


def verify_target(target: Target, settings: Settings, ignore: Sequence[str] = ()) -> Report:
    """Run a target on several processes and on one, and return how the two differ."""
    unknown = sorted(set(ignore) - set(CAUSES))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not a cause; choose from {', '.join(CAUSES)}")
    quiet_options(target.options, settings.accelerator)  # a wrong one is refused before any process starts
    build = partial(target.build, settings.accelerator)
    in_float64 = _records_of_ranks(target, settings, None)
    arguments = (in_float64, build, settings.used_tolerance, settings.double, settings.accelerator)
    (result,) = in_processes([Call(judge, arguments)])
    report: Report = result
    report = report.without(ignore)
    if settings.precision is None or not report.equal:
        return report
    records = _records_of_ranks(target, settings, settings.precision)
    of_precision = (records, in_float64, build, settings.precision, settings.accelerator, report)
    (result,) = in_processes([Call(judge_precision, of_precision)])
    report = result
    return report.without(ignore)


def _records_of_ranks(target: Target, settings: Settings, precision: str | None) -> list[Record]:
    """Return what the ranks record in a 16-bit precision, or else in float64 or float32."""
    with tempfile.TemporaryDirectory(prefix="gradavg-verify-") as folder:
        calls = [Call(_rank, (target, rank, settings, folder, precision)) for rank in range(settings.devices)]
        return in_processes(calls)


def _rank(target: Target, rank: int, settings: Settings, folder: str, precision: str | None) -> Record:
    """Return what one rank records. It runs in a process of its own."""
    cores = os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // settings.devices))
    dist.init_process_group(
        # Without a backend the group would serve the machine's accelerator alone, and a run on its CPU not.
        dist.Backend.default_device_backend_map[settings.accelerator],
        store=dist.FileStore(f"{folder}/store", settings.devices),
        rank=rank,
        world_size=settings.devices,
        timeout=timedelta(seconds=300),
    )
    try:
        module, data, options = target.build(settings.accelerator)
        strategy = resolve_strategy(options.get("strategy") or "ddp")
        if isinstance(strategy, ModelParallelStrategy):
            if settings.precision is not None:
                raise ValueError(
                    f"precision={settings.precision!r} is for models that are not sharded, got"
                    f" {type(strategy).__name__}: leave it out to compare in float64"
                )
            shard_over(strategy, settings.devices, settings.accelerator)
        is_sharded = isinstance(strategy, ModelParallelStrategy)
        require_memory(module, settings.devices, double=settings.double, sharded=is_sharded)
        recorder = Recorder(settings.steps, double=settings.double)
        if precision is not None:
            plugin = plugin_of(options["plugins"], precision, settings.accelerator)
            recorder = Recorder(settings.steps, double=False, reads=False, plugin=plugin, traced_steps=range(0))
        return record_run(recorder, strategy, {**options, "devices": settings.devices}, module, data)
    finally:
        dist.destroy_process_group()


class Call(NamedTuple):
    """A call that is made in a process of its own."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class _RankProcess(NamedTuple):
    rank: int
    process: Any  # of `multiprocessing`, whose contexts have classes of their own


def in_processes(calls: Sequence[Call]) -> list[Any]:
    """Return what the calls return, each made in a process of its own, all at once: the ranks of a world.

    The error of the first that fails is raised, and the others end.
    """
    context: Any = multiprocessing.get_context("forkserver")
    # One import instead of one per process. What a process inherits is the same as with spawn.
    context.set_forkserver_preload([__name__])
    results: dict[int, Any] = {}
    running: dict[Any, _RankProcess] = {}  # by the handle that becomes ready when the process ends
    with tempfile.TemporaryDirectory(prefix="gradavg-verify-") as folder, ExitStack() as ending:
        for rank, call in enumerate(calls):
            # As a process argument each tensor would be a shared piece of memory with a file descriptor of its own.
            torch.save(call, f"{folder}/{rank}.in")
            process = context.Process(target=_make_call, args=(folder, rank, _environ(rank, len(calls))))
            process.start()
            ending.callback(_end, process)
            running[process.sentinel] = _RankProcess(rank, process)
        while running:
            for sentinel in connection.wait(list(running)):
                ended = running.pop(sentinel)
                results[ended.rank] = _result_of(ended, len(calls), folder)
    return [results[rank] for rank in range(len(calls))]


def _result_of(ended: _RankProcess, world_size: int, folder: str) -> Any:
    """Return what the call of a process that ended returned, or raise its error."""
    ended.process.join()
    exit_code = ended.process.exitcode
    if exit_code:  # `_make_call` did not reach its end
        raise RuntimeError(
            f"rank {ended.rank} of {world_size} failed: exit code {exit_code}: see standard error, and call verify"
            ' under `if __name__ == "__main__":` in a script'
        )
    result = torch.load(f"{folder}/{ended.rank}.out", weights_only=False)
    if isinstance(result, Exception):
        raise result
    return result


def _end(process: Any) -> None:
    """End a process and the workers of its loaders, which may live on when it has ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _environ(rank: int, world_size: int) -> dict[str, str]:
    """Return the environment of a rank, as a launcher sets it."""
    environ = {}
    # Gloo otherwise resolves the host name, which fails or waits where there is no working resolver.
    for _, interface in socket.if_nameindex():
        if re.fullmatch(r"lo\d*", interface):
            environ["GLOO_SOCKET_IFNAME"] = interface
    environ.update({name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)})
    environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        # Lightning asks for an address. The ranks meet in a file.
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        # All go on when all are connected. Otherwise they say of a rank that fails at once that it cannot be reached.
        TORCH_DIST_INIT_BARRIER="1",
    )
    return environ


def _make_call(folder: str, rank: int, environ: Mapping[str, str]) -> None:
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
        call: Call = torch.load(f"{folder}/{rank}.in", weights_only=False)
        result = call.function(*call.arguments)
    except BaseException as error:  # noqa: BLE001  # whatever it is, the parent reports it
        result = _as_reported(error, f"rank {rank} of {environ['WORLD_SIZE']}")
    torch.save(result, f"{folder}/{rank}.out")


def _as_reported(error: BaseException, who: str) -> Exception:
    """Return a question of usage as a `ValueError`, and a failure with the last line of the user's own code."""
    of_user = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_library(frame.filename)]
    if of_user:
        last = of_user[-1]
        where = f"\n  {last.filename}, line {last.lineno}, in {last.name}\n    {last.line}"
        return RuntimeError(f"{who} failed: {type(error).__name__}: {error}{where}")
    if isinstance(error, (ValueError, TypeError, OSError, MisconfigurationException)):
        return ValueError(str(error))
    return RuntimeError(f"{who} failed: {type(error).__name__}: {error}")
