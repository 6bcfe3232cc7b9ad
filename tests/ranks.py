"""Ranks for tests: worlds of real processes with gloo collectives, started once and reused; and grids of parameters.

A *body* is a module-level function of a test module. `RankPool.run(body, ...)` calls it on every rank, with
`torch.distributed` initialized, and returns the ranks' results in rank order.

A test may be its own body, and assert on every rank what that rank sees:

    @on_ranks(3)
    def test_every_rank_sees_the_sum():
        assert summed(10) == 33
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import inspect
import os
import pickle
import random
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import combinations, product
from multiprocessing import connection, forkserver, get_context, resource_tracker, set_start_method
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities import registry
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import argparse
from torch.distributed import device_mesh

from lightning_gradavg._lightning.internals import store_of_world

# Each Trainer reads the metadata of every installed package in search of callbacks, as long as a short training takes.
vars(registry)["entry_points"] = functools.cache(registry.entry_points)
# And the signature of its class, in search of variables of the environment.
vars(argparse)["inspect"] = SimpleNamespace(signature=functools.cache(inspect.signature))
# `torch.manual_seed` notes the stack for each kind of device that may be initialized later, with the lines of code, and
# each worker of a data loader reads their files anew.
for kind_of_device in (torch.cuda, torch.xpu, torch.mtia):
    if not kind_of_device.is_available():
        vars(kind_of_device)["manual_seed_all"] = lambda seed: None
# A rank makes each group, and each mesh of groups, once: three threads of every group wake a hundred times a second.
group_of = functools.cache(dist.new_group)

TESTS = Path(__file__).resolve().parent
GLOO_TIMEOUT = 20.0
CALL_TIMEOUT = 60.0
# How long after the first failure a death may arrive that explains it; the peers of a dead rank raise, too.
ROOT_CAUSE_WINDOW = 0.1
PLAIN_DATA_ONLY: Any = {"weights_only": True}
ON_EXCEPTION: dict[str, Any] = {"save_on_exception": True}
SHARDS_ON_CPU = torch.__version__ >= "2.7"
"""Whether FSDP2 of this torch runs on the CPU: that of 2.6.0 asks for CUDA's streams."""
NEEDS_SHARDS_ON_CPU = pytest.mark.skipif(not SHARDS_ON_CPU, reason="FSDP2 of a torch before 2.7 needs CUDA")
PRELOAD = ("torch", "numpy", "pytest", "lightning.pytorch", "lightning_gradavg", "ranks")


class Raised(NamedTuple):
    """What a rank raised in `RankPool.run_expecting_errors`; equal to the pair of its two fields."""

    # The name of the exception's class.
    type_name: str
    message: str


class Ended(NamedTuple):
    """How a rank ended in `RankPool.end`."""

    # None: the process did not end.
    exit_code: int | None
    # Its output, up to the end of the body.
    printed: str
    # What the body returned, or the exception that it raised; "" if the process was killed or stopped.
    said: str


class RankError(Exception):
    """The first rank that failed or died ("ProcessDied"), with its output. One that hangs prints its stack and ends."""


class _Reply(NamedTuple):
    """A rank's answer to a call."""

    # What the body returned.
    result: Any = None
    # What it raised, and its traceback.
    raised: Raised | None = None
    trace: str = ""
    # Whether the process died.
    is_lost: bool = False


class _Setting(NamedTuple):
    """A process-wide setting that Lightning, torch or a test body may change."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _signal_handler(number: signal.Signals) -> _Setting:
    return _Setting(functools.partial(signal.getsignal, number), functools.partial(signal.signal, number))


_SETTINGS = [
    _Setting(Path.cwd, os.chdir),
    _Setting(torch.get_default_dtype, torch.set_default_dtype),
    _Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    _Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _Setting(torch.get_num_threads, torch.set_num_threads),
    _signal_handler(signal.SIGINT),
    _signal_handler(signal.SIGTERM),
    _signal_handler(signal.SIGUSR1),
    _signal_handler(signal.SIGUSR2),
]


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Begin with the same random state, and restore every process-wide setting after the block."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # the generator that Lightning and users' code draw from
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` notes the stack for each kind of device
    values = [setting.read() for setting in _SETTINGS]
    try:
        with (
            mock.patch.dict(os.environ),
            mock.patch.object(sys, "path", [*sys.path]),
            mock.patch.dict(vars(rank_zero_only)),
        ):
            yield
    finally:
        for setting, value in zip(_SETTINGS, values, strict=True):
            setting.write(value)


def on_ranks(world_size: int = 2) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have a test run on every rank of a world. Its parameters are sent there, so fixtures cannot be among them."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def on_all(world: Callable[[int], RankPool], **parameters: Any) -> None:
            world(world_size).run(_on_rank, test.__module__, test.__name__, parameters)

        # pytest reads from the signature that the test needs the fixture `world`, too.
        signature = inspect.signature(test)
        fixture = inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        vars(on_all)["__signature__"] = signature.replace(parameters=[fixture, *signature.parameters.values()])
        return on_all

    return decorate


def _on_rank(module: str, name: str, parameters: dict[str, Any]) -> None:
    """Body: run a test of a module, without the decorator."""
    vars(importlib.import_module(module))[name].__wrapped__(**parameters)


class RankPool:
    """`world_size` processes, one rank and one pipe each, that stay up between calls.

    The processes start on the first call. A rank that fails takes the world with it, because a process group with a
    lost rank is unusable: the others are killed, the first failure is raised, the next call starts afresh.

    A body may take `timeout` seconds, a collective operation `patience`. `prepare` is called on every rank before its
    process group is made.
    """

    def __init__(
        self,
        world_size: int,
        *,
        timeout: float = CALL_TIMEOUT,
        backend: str = "gloo",
        prepare: Callable[[], Any] | None = None,
        patience: float = GLOO_TIMEOUT,
    ) -> None:
        self.world_size = world_size
        self.timeout = timeout
        # The last arguments of `_serve`.
        self._options = (timeout, patience), backend, prepare
        # Of each rank that runs: its process, the pipe to it, and the file with its output.
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []
        self._logs: list[Path] = []

    def run(self, body: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Return `body(*args, **kwargs)` of every rank, in rank order, or raise the RankError of the first failure.

        The warning filters in force in the calling test apply on the ranks.
        """
        return [reply.result for reply in self._call(body, args, kwargs)]

    def run_expecting_errors(self, body: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Return, per rank, what `body` raised as a `Raised`, or its result where it raised nothing.

        Unlike in `run`, the processes survive. A collective proves it: errors that leave a collective open between
        ranks are a failure of this call, not of the next test.
        """
        replies = self._call(body, args, kwargs, expecting_errors=True)
        self.run(_in_step)
        return [reply.raised or reply.result for reply in replies]

    def end(self, body: Callable[..., Any], *args: Any, stuck: int | None = None, **kwargs: Any) -> list[Ended]:
        """Return how each rank ended, whose process ends after `body`; `stuck` is one that never does."""
        self._send(_end, (body, *args), kwargs)
        deadline = time.monotonic() + self.timeout
        for rank, process in enumerate(self._processes):
            if rank == stuck:
                process.join(0)
            else:
                process.join(max(0.0, deadline - time.monotonic()))
        ends = []
        for process, log in zip(self._processes, self._logs, strict=True):
            printed, _, said = log.read_text(errors="replace").partition(_SAID)
            ends.append(Ended(process.exitcode, printed, said))
        self.close()
        return ends

    def close(self) -> None:
        """End the processes and remove their folder. The next call starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        if self._logs:
            shutil.rmtree(self._logs[0].parent, ignore_errors=True)
        self._processes = []
        self._pipes = []
        self._logs = []

    def _call(self, body: Any, args: Any, kwargs: Any, *, expecting_errors: bool = False) -> list[_Reply]:
        try:
            self._send(body, args, kwargs)
            return self._collect(expecting_errors=expecting_errors)
        except BaseException:
            self.close()
            raise

    def _send(self, body: Any, args: Any, kwargs: Any) -> None:
        request = pickle.dumps((warnings.filters, body, args, kwargs))
        if not self._processes:
            self._start()
        for pipe, log in zip(self._pipes, self._logs, strict=True):
            os.truncate(log, 0)
            with contextlib.suppress(OSError):  # the rank died between two calls
                pipe.send_bytes(request)

    def _collect(self, *, expecting_errors: bool = False) -> list[_Reply]:
        """Return the replies in rank order, or raise what failed first. If a rank dies, others fail, too."""
        replies: dict[int, _Reply] = {}
        failed: list[int] = []
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            ready = connection.wait(waiting, ROOT_CAUSE_WINDOW if failed else None)
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                reply = _receive(pipe, self._processes[rank])
                replies[rank] = reply
                if reply.is_lost or (reply.raised and not expecting_errors):
                    failed.append(rank)
        if not failed:
            return [replies[rank] for rank in range(self.world_size)]
        # Ranks that died come first, the others in the order in which they failed.
        failed.sort(key=lambda rank: not replies[rank].is_lost)
        lines = [f"rank {rank}: {': '.join(replies[rank].raised or ())}" for rank in failed]
        lines += [f"rank {rank} had not answered" for rank in waiting.values()]
        first = failed[0]
        output = self._logs[first].read_text(errors="replace")
        raise RankError("\n".join([*lines, replies[first].trace, f"output of rank {first}:", output[-8000:]]))

    def _start(self) -> None:
        ensure_forkserver()
        folder = Path(tempfile.mkdtemp(prefix="gradavg-ranks-"))
        for rank in range(self.world_size):
            self._logs.append(folder / f"rank{rank}.log")
            self._logs[rank].touch()
            ours, theirs = get_context("forkserver").Pipe()
            process = get_context("forkserver").Process(
                target=_serve,
                args=(rank, self.world_size, self._logs[rank], theirs, _rank_environ(), *self._options),
                name=f"rank {rank} of {self.world_size}",
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._collect()


def _receive(pipe: Any, process: Any) -> _Reply:
    """Return the reply that is in a pipe, or that the process has died."""
    try:
        reply: _Reply = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        process.join(GLOO_TIMEOUT)
        died = Raised("ProcessDied", f"the process ended with exit code {process.exitcode}")
        return _Reply(raised=died, is_lost=True)
    return reply


def _rank_environ() -> dict[str, str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Gloo otherwise resolves the host name, which fails or waits on machines without a working resolver.
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return environ


def ensure_forkserver() -> None:
    """Start the process that ranks are forked from, with everything heavy and the collected test modules imported."""
    forkserver.set_forkserver_preload([*PRELOAD, *(name for name in sys.modules if name.startswith("test_"))])
    # Without the fix of python/cpython#117378 (3.12.8, 3.13.1) the fork server gets the environment but not sys.path.
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    start: Any = contextlib.nullcontext()
    if sys.platform == "linux" and not torch.cuda.is_available():  # CUDA cannot be used in a fork
        start = mock.patch("multiprocessing.util.spawnv_passfds", _fork)
    resource_tracker.ensure_running()
    with mock.patch.dict(os.environ, {**_rank_environ(), "PYTHONPATH": path}), start:
        forkserver.ensure_running()


def _fork(executable: bytes, arguments: list[str], descriptors: Sequence[int]) -> int:
    """Run what Python would be started with in a fork, where all is imported already, which takes seconds."""
    process = os.fork()
    if process:
        return process
    try:
        opened = {int(path.name) for path in Path("/dev/fd").iterdir()}
        for descriptor in opened - {0, 1, 2, *descriptors}:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(descriptor)
        warnings.resetwarnings()  # those of tests are errors
        forkserver._forkserver.__init__()  # type: ignore[misc]  # its lock is held, and processes may have their own
        exec(arguments[-1])  # the call of the fork server's `main`
    finally:
        os._exit(0)


def _serve(
    rank: int,
    world_size: int,
    log: Path,
    pipe: connection.Connection,
    environ: dict[str, str],
    timeouts: tuple[float, float],
    backend: str,
    prepare: Callable[[], Any] | None,
) -> None:
    """Answer calls until the pipe closes; `timeouts` are those of a body and of a collective, in seconds."""
    timeout, patience = timeouts
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environ)
    faulthandler.enable()
    if sys.platform == "linux":
        # As outside of the fork server, of which each rank's data loaders would start one that imports everything anew.
        set_start_method("fork", force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends its ranks
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    vars(device_mesh)["init_device_mesh"] = functools.cache(device_mesh.init_device_mesh)

    def connect() -> None:
        if prepare is not None:
            prepare()
        store = dist.FileStore(str(log.parent / "store"), world_size)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=patience)
        )

    # The first call makes the process group. The parent collects its reply in `_start`.
    call: Callable[[], Any] = connect
    limit = CALL_TIMEOUT
    with contextlib.suppress(EOFError):
        while True:
            faulthandler.dump_traceback_later(limit, exit=True)
            pipe.send_bytes(_answer(call))
            faulthandler.cancel_dump_traceback_later()
            call = functools.partial(_perform, pipe.recv_bytes())
            limit = timeout
    os._exit(0)  # without the exit handlers, which would wait for the other ranks


def _answer(call: Callable[[], Any]) -> bytes:
    try:
        return pickle.dumps(_Reply(call()))
    except BaseException as error:  # noqa: BLE001  # whatever it is, the parent reports it
        trace = "".join(traceback.format_exception(error))
        return pickle.dumps(_Reply(raised=Raised(type(error).__name__, str(error)), trace=trace))


def _perform(request: bytes) -> Any:
    with warnings.catch_warnings(), isolated():
        warnings.resetwarnings()
        warnings.filters, body, args, kwargs = pickle.loads(request)
        return body(*args, **kwargs)


_SAID = "\nin the end: "


def _end(body: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """End the process after a body, print what it returned or raised, and let the other ranks know."""
    try:
        said = repr(body(*args, **kwargs))
        code = 0
    except BaseException as error:  # noqa: BLE001  # whatever it is, the parent reads it
        traceback.print_exception(error)
        try:
            said = f"{type(error).__name__}: {error}"
        except Exception:  # noqa: BLE001  # whatever its `__str__` raises
            said = type(error).__name__
        code = 1
    sys.stderr.write(_SAID + said)
    sys.stderr.flush()
    store_of_world().set(f"ended/{dist.get_rank()}", "")
    os._exit(code)


def _in_step() -> None:
    seen = torch.zeros(dist.get_world_size())
    seen[dist.get_rank()] = 1.0
    dist.all_reduce(seen)
    if not torch.equal(seen, torch.ones_like(seen)):
        raise RuntimeError(f"the ranks are out of step: a collective of this check returned {seen.tolist()}")


class RankEnvironment(ClusterEnvironment):
    """Lightning's view of the ranks that run already, made in a rank body; rank `r` is on `nodes[r]`, in any order."""

    creates_processes_externally = True
    # The process group is there already.
    main_address = "nowhere"
    main_port = 0

    def __init__(self, nodes: Sequence[int] | None = None) -> None:
        if nodes is None:
            nodes = (0,) * dist.get_world_size()
        assert len(nodes) == dist.get_world_size()
        self.nodes = tuple(nodes)
        self.num_nodes = len(set(nodes))
        self.ranks_on_node = self.nodes.count(self.node_rank())

    @staticmethod
    def detect() -> bool:
        return False

    def set_world_size(self, number: int) -> None:
        """Ignore Lightning's product of devices and nodes: it is wrong for uneven nodes."""

    set_global_rank = set_world_size  # type: ignore[assignment]  # of another argument

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def local_rank(self) -> int:
        return self.nodes[: dist.get_rank()].count(self.node_rank())

    def node_rank(self) -> int:
        return self.nodes[dist.get_rank()]


def make_trainer(strategy: Strategy | str, *, nodes: Sequence[int] | None = None, **options: Any) -> Trainer:
    """Return a quiet `Trainer` on the CPU that runs in the ranks of a pool, on `nodes`. Call it in a rank body."""
    environment = RankEnvironment(nodes)
    plugins = [environment, *options.pop("plugins", ())]
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": environment.ranks_on_node,
        "num_nodes": environment.num_nodes,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(strategy=strategy, plugins=plugins, **(defaults | options))


def run_script(script: Path, *arguments: str) -> tuple[int | None, str]:
    """Run a script to its end in its folder, as if Python had been started with it; return its exit code and output."""
    ensure_forkserver()
    output = script.with_suffix(".out")
    process = get_context("forkserver").Process(target=_run_as_main, args=(script, arguments, output))
    process.start()
    process.join(110)
    process.kill()
    process.join()
    return process.exitcode, output.read_text("utf-8")


def _run_as_main(script: Path, arguments: tuple[str, ...], output: Path) -> None:
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(script.parent)
    os.environ.update({"MPLBACKEND": "agg", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS.parent)})
    sys.argv[:] = [str(script), *arguments]
    sys.path[0] = str(script.parent)
    # A CUDA build of torch 2.14 marks every fork of a process that asked for a GPU, also where there is none, and
    # Lightning refuses to fork such a process again. A user's script is no fork, as this process is.
    with mock.patch.object(torch.cuda, "_is_in_bad_fork", return_value=False):
        runpy.run_path(str(script), run_name="__main__")


def covering(*factors: Sequence[Any], strength: int = 2) -> list[tuple[Any, ...]]:
    """Return combinations of one value per factor that hold all pairs of values, or of `strength` 1 each value once.

    Greedy and without chance: each time the combination that holds most of what is missing, the first of several.
    """
    # Combinations are told apart by the indices of their values, as values need not be hashable. A combination holds,
    # for each pair of factors, the pair of its indices there.
    sets_of_factors = list(combinations(range(len(factors)), min(strength, len(factors))))
    held: dict[tuple[int, ...], set[Any]] = {}
    missing = set[Any]()
    for indices in product(*[range(len(values)) for values in factors]):
        held[indices] = {(chosen, *[indices[factor] for factor in chosen]) for chosen in sets_of_factors}
        missing |= held[indices]
    chosen_indices = []
    while missing:
        best = max(held, key=lambda indices: len(held[indices] & missing))
        missing -= held[best]
        chosen_indices.append(best)
    return [_values_at(factors, indices) for indices in sorted(chosen_indices)]


def _values_at(factors: Sequence[Sequence[Any]], indices: Sequence[int]) -> tuple[Any, ...]:
    """Return the value of each factor at its index."""
    return tuple(values[index] for values, index in zip(factors, indices, strict=True))


def grid(*factors: Sequence[Any], strength: int = 2) -> list[Any]:
    """Return all combinations for `pytest.mark.parametrize`, those that `covering` leaves out marked `full`."""
    indices_of_factors = [range(len(values)) for values in factors]
    in_every_run = covering(*indices_of_factors, strength=strength)
    parameters = []
    for indices in product(*indices_of_factors):
        marks = [] if indices in in_every_run else [pytest.mark.full]
        parameters.append(pytest.param(*_values_at(factors, indices), marks=marks))
    return parameters
