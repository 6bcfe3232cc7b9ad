"""Calls in processes of their own, such as the ranks of a world.

Each process leads a session of its own, which ends with everything that it started: also if the command is terminated,
or loses its terminal.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import connection
from typing import Any, cast

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_gradavg._support.text import message_of
from lightning_gradavg.verify.lines import is_library

__all__ = ["folder_of_run", "in_processes", "reported_error"]

_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "PL_", "LT_")
"""How the environment variables begin by which Lightning would find another launcher."""

_PRELOADED = ["lightning_gradavg.verify.run", "lightning_gradavg.cli.lightning"]
"""What the processes need."""

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def _exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)  # as shells report it


@contextmanager
def _exiting_on_signals() -> Iterator[None]:
    """Have signals that end this process end it by an exception, so that it cleans up; in the main thread alone."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in _ENDING_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                before[number] = signal.signal(number, _exit)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def folder_of_run() -> Iterator[str]:
    """Give a temporary folder, which is removed also if a signal ends this process."""
    with _exiting_on_signals(), tempfile.TemporaryDirectory(prefix="gradavg-verify-") as folder:
        yield folder


def in_processes(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return what the calls return, each made in a process of its own, all at once: the ranks of a world.

    The error of the first that fails is raised, and the others end.
    """
    context: Any = multiprocessing.get_context("forkserver")
    # One import instead of one per process. What a process inherits is the same as with spawn.
    context.set_forkserver_preload(_PRELOADED)
    results: list[Any] = [None] * len(calls)
    processes: list[Any] = []
    running: dict[int, int] = {}  # ranks, by the handle that becomes ready when the process ends
    with folder_of_run() as folder, ExitStack() as ending:
        for rank, call in enumerate(calls):
            # As a process argument each tensor would be a shared piece of memory with a file descriptor of its own.
            torch.save(call, f"{folder}/{rank}.in")
            arguments = (folder, rank, _environ(rank, len(calls)))
            process = context.Process(target=_make_call, args=arguments, name=f"rank {rank} of {len(calls)}")
            process.start()
            ending.callback(_end, process)
            processes.append(process)
            running[process.sentinel] = rank
        while running:
            for sentinel in connection.wait(list(running)):
                rank = running.pop(cast("int", sentinel))
                results[rank] = _result_of(processes[rank], f"{folder}/{rank}.out")
    return results


def _result_of(process: Any, file: str) -> Any:
    """Return what the call of a process that ended returned, or raise its error."""
    process.join()
    if process.exitcode:  # `_make_call` did not reach its end
        raise RuntimeError(
            f"{process.name} failed: exit code {process.exitcode}: see standard error, and call verify under"
            ' `if __name__ == "__main__":` in a script. -9 is that of a process for which memory was too short'
        )
    result = torch.load(file, weights_only=False)
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
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    # Gloo otherwise resolves the host name, which fails or waits where there is no working resolver.
    for _, interface in socket.if_nameindex():
        if re.fullmatch(r"lo\d*", interface):
            environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return {
        **environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        # Lightning asks for an address. The ranks meet in a file.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        # All go on when all are connected. Otherwise they say of a rank that fails at once that it cannot be reached.
        "TORCH_DIST_INIT_BARRIER": "1",
    }


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
        result = torch.load(f"{folder}/{rank}.in", weights_only=False)()
    except BaseException as error:  # noqa: BLE001  # whatever it is, the parent reports it
        result = reported_error(error, f"rank {rank} of {environ['WORLD_SIZE']}")
    torch.save(result, f"{folder}/{rank}.out")


def reported_error(error: BaseException, who: str) -> Exception:
    """Return a question of usage as a `ValueError`, and a failure with the last line of the user's own code."""
    message = message_of(error)
    failure = f"{who} failed: {type(error).__name__}: {message}"
    if isinstance(error, RuntimeError) and re.search("(?i)double|float64|dtype", message):
        failure += " (verify computes in float64: try --precision 32-true)"
    of_user = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_library(frame.filename)]
    if of_user:
        last = of_user[-1]
        return RuntimeError(f"{failure}\n  {last.filename}, line {last.lineno}, in {last.name}\n    {last.line}")
    if isinstance(error, (ValueError, TypeError, OSError, MisconfigurationException)):
        return ValueError(message)
    return RuntimeError(failure)
