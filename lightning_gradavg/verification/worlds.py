"""Processes that verify a target: the ranks of a run, and one for its reference. No port is chosen, none is guessed."""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_all_start_methods, get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import Trainer

from lightning_gradavg.verification.plain import record_stream
from lightning_gradavg.verification.recorder import Recorder
from lightning_gradavg.verification.records import Run
from lightning_gradavg.verification.reference import record_reference
from lightning_gradavg.verification.script import acts_of
from lightning_gradavg.verification.targets import Target, quiet_options, resolve_strategy

__all__ = [
    "Settings",
    "in_processes",
    "record_target",
    "reference_in_process",
    "reference_of_target",
    "run_and_reference",
]

_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "PL_", "LT_")
_LAUNCHER_NAMES = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)


_START_METHOD = "forkserver" if "forkserver" in get_all_start_methods() else "spawn"


@dataclass(frozen=True)
class Settings:
    """How to verify.

    Attributes:
        devices: The number of ranks.
        steps: The number of optimizer steps.
        accelerator: "cpu" or "cuda".
        double: Whether to compute in float64.
        compare_order: Whether to compare the order of samples with that of one process.
        timeout: Seconds that a rank waits for another.
    """

    devices: int = 2
    steps: int = 3
    accelerator: str = "cpu"
    double: bool = False
    compare_order: bool = True
    timeout: float = 300.0

    def __post_init__(self) -> None:
        for name in ("devices", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.accelerator not in ("cpu", "cuda"):
            raise ValueError(f"accelerator must be 'cpu' or 'cuda', got {self.accelerator!r}")
        if self.accelerator == "cuda" and torch.cuda.device_count() < self.devices:
            raise ValueError(
                f"{self.devices} ranks need as many GPUs, and there are {torch.cuda.device_count()}; use accelerator 'cpu'"
            )

    def options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a Trainer that verifies."""
        options = quiet_options(given, self.accelerator)
        return {**options, "precision": "64-true"} if self.double else options


class _RunningWorld(ClusterEnvironment):
    """Ranks of a process group that is there already."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        raise RuntimeError("the process group is initialized already: nothing may ask for a port")

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        """Keep that of the process group."""

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        """Keep that of the process group."""

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0


def record_target(target: Target, settings: Settings) -> Run:
    """Return what this rank of a live process group records of a target."""
    built = target.build()
    options = settings.options(built.options)
    strategy = resolve_strategy(options.pop("strategy", None) or "auto")
    recorder = Recorder(settings.steps)
    options["callbacks"] = [recorder, *options["callbacks"]]
    options["plugins"] = [_RunningWorld(), *options["plugins"]]
    options["devices"] = settings.devices
    Trainer(strategy=strategy, **options).fit(built.module, **built.data)
    if recorder.run is None:
        raise RuntimeError("training did not begin, so nothing was recorded")
    return recorder.run


def reference_of_target(target: Target, runs: Sequence[Run], settings: Settings) -> tuple[Run, Any]:
    """Return the reference of a recorded run, and what one process reads where that is to be compared."""
    stream = None
    if settings.compare_order:
        built = target.build()
        stream = record_stream(built.module, built.data, settings.options(built.options), _batches(runs))
    built = target.build()
    options = settings.options(built.options)
    return record_reference(runs, built.module, options, built.data.get("datamodule")), stream


def _batches(runs: Sequence[Run]) -> int:
    """Return how many batches one process has to read to see as many samples as the run did."""
    facts = runs[0].facts
    loaded = sum(len(runs[0].steps[act.steps[0]].micro_batches) for act in acts_of(runs))
    return loaded // facts.cuts if facts.splits else loaded * len(runs)


def run_and_reference(target: Target, settings: Settings) -> tuple[list[Run], Run, Any]:
    """Run a target on as many processes as asked for, then on one.

    Returns:
        What the ranks recorded, what the reference recorded, and what one process reads or None.

    Raises:
        RuntimeError: If a process failed; with its traceback.
    """
    with tempfile.TemporaryDirectory(prefix="gradavg-verify-") as name:
        folder = Path(name)
        world = [(_rank, (target, rank, settings, folder)) for rank in range(settings.devices)]
        runs = in_processes(world)
        ((reference, stream),) = in_processes([(reference_in_process, (target, runs, settings))])
    return runs, reference, stream


def in_processes(calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Return what the calls return, each made in a process of its own, all at once.

    Raises:
        RuntimeError: If one of them failed: the others are ended, and its traceback is the message.
    """
    context: Any = get_context(_START_METHOD)
    if _START_METHOD == "forkserver":
        # One import instead of one per process. What a process inherits is the same as with spawn.
        context.set_forkserver_preload(["lightning.pytorch", "lightning_gradavg"])
    with tempfile.TemporaryDirectory(prefix="gradavg-verify-") as name:
        files = [Path(name, f"{index}.pt") for index in range(len(calls))]
        processes = []
        for index, ((function, arguments), file) in enumerate(zip(calls, files, strict=True)):
            # As a process argument each tensor would be a shared piece of memory with a file descriptor of its own.
            torch.save(arguments, file.with_suffix(".in"))
            processes.append(context.Process(target=_call, args=(function, file), name=f"verify {index}"))
        try:
            with _without_launcher():
                for process in processes:
                    process.start()
            waiting: dict[Any, int] = {process.sentinel: index for index, process in enumerate(processes)}
            while waiting:
                for sentinel in connection.wait(list(waiting)):
                    index = waiting.pop(sentinel)
                    processes[index].join()
                    if processes[index].exitcode != 0:
                        raise RuntimeError(_failure(index, processes[index].exitcode, files[index]))
            return [torch.load(file, weights_only=False) for file in files]
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()


def _failure(index: int, code: int | None, file: Path) -> str:
    text = file.with_suffix(".error")
    silent = 'it left no traceback; a script that calls verify keeps the call under `if __name__ == "__main__":`'
    found = text.read_text("utf-8") if text.exists() else silent
    return f"process {index} of the comparison ended with exit code {code}:\n{found}"


@contextmanager
def _without_launcher() -> Iterator[None]:
    """Start processes that take no launcher of this one for theirs."""
    hidden = {
        name: os.environ.pop(name) for name in list(os.environ) if name in _LAUNCHER_NAMES or name.startswith(_LAUNCHERS)
    }
    try:
        yield
    finally:
        os.environ.update(hidden)


def _call(function: Callable[..., Any], file: Path) -> None:
    # What the user's code prints must not mix with the report.
    sys.stdout.flush()
    os.dup2(2, 1)
    for logger in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    try:
        arguments = torch.load(file.with_suffix(".in"), weights_only=False)
        torch.save(function(*arguments), file)
    except BaseException:  # noqa: BLE001  # whatever it is, the parent reports it
        file.with_suffix(".error").write_text(traceback.format_exc(), "utf-8")
        sys.exit(1)


def _use_loopback() -> None:
    loopback = next((name for _, name in socket.if_nameindex() if re.fullmatch(r"lo\d*", name)), None)
    if loopback is not None:
        # Gloo otherwise resolves the host name, which fails or waits where there is no working resolver.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _rank(target: Target, rank: int, settings: Settings, folder: Path) -> Run:
    _use_loopback()
    torch.set_num_threads(max(1, math.floor((os.cpu_count() or 1) / settings.devices)))
    if settings.accelerator == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), settings.devices)
    dist.init_process_group(
        "nccl" if settings.accelerator == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=settings.devices,
        timeout=timedelta(seconds=settings.timeout),
    )
    try:
        with warnings.catch_warnings():
            # Advice about speed, for a run of a few steps.
            warnings.filterwarnings("ignore", message=".*does not have many workers")
            return record_target(target, settings)
    finally:
        dist.destroy_process_group()


def reference_in_process(target: Target, runs: Sequence[Run], settings: Settings) -> tuple[Run, Any]:
    """Return what `reference_of_target` does, in a process that runs nothing else."""
    _use_loopback()
    return reference_of_target(target, runs, settings)
