"""Ranks for tests: worlds of real processes with gloo collectives, started once and reused by every test.

A *body* is a module-level function of a test module. `RankPool.run(body, ...)` calls it on every rank, with
`torch.distributed` initialized, and returns the ranks' results in rank order:

    def summed(value):
        total = torch.tensor(value + dist.get_rank())
        dist.all_reduce(total)
        return total.item()

    def test_every_rank_is_summed(world):
        assert [33, 33, 33] == world(3).run(summed, 10)

A test may be its own body, and assert on every rank what that rank sees:

    @on_ranks(3)
    def test_every_rank_sees_the_sum():
        assert summed(10) == 33
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import importlib
import inspect
import math
import os
import pickle
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver, get_context, set_start_method
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities import registry
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

from lightning_gradavg.lightning_internals import store_of_world

__all__ = [
    "Ended",
    "Raised",
    "RankEnvironment",
    "RankError",
    "RankPool",
    "ensure_forkserver",
    "isolated",
    "make_trainer",
    "on_ranks",
    "rank_environment",
]

# Each Trainer reads the metadata of every installed package in search of callbacks, as long as a short training takes.
vars(registry)["entry_points"] = functools.cache(registry.entry_points)

TESTS = Path(__file__).resolve().parent
GLOO_TIMEOUT = 20.0
CALL_TIMEOUT = 60.0
# A rank ends itself when its time is up; this much later the parent gives up on one that could not.
BACKSTOP = 30.0
# How long after the first failure a death may arrive that explains it; the peers of a dead rank raise, too.
ROOT_CAUSE_WINDOW = 0.1
PRELOAD = ("torch", "numpy", "pytest", "lightning.pytorch", "lightning_gradavg", "ranks")


class Raised(NamedTuple):
    """What a rank raised in `RankPool.run_expecting_errors`; equal to the pair of its two fields."""

    type_name: str
    message: str


class Ended(NamedTuple):
    """How a rank ended in `RankPool.end`: exit code, None for a stuck one; what it returned or raised; its output."""

    exit_code: int | None
    said: str
    printed: str


class RankError(Exception):
    """A rank failed, died or did not answer.

    Attributes:
        rank: The rank that failed first.
        type_name: Name of the exception's type; "ProcessDied" or "Timeout" where there was no exception.
        message: The exception's own message.
    """

    def __init__(self, rank: int, type_name: str, message: str, details: str = "") -> None:
        self.rank, self.type_name, self.message = rank, type_name, message
        super().__init__(f"rank {rank}: {type_name}: {message}" + (f"\n\n{details.rstrip()}" if details else ""))


@dataclass(frozen=True)
class _Reply:
    """One rank's answer, at -inf if it died, which explains what the others raise, and at inf if it is silent."""

    answered_at: float
    result: Any = None
    raised: Raised | None = None
    details: str = ""


def _set_environ(environ: dict[str, str]) -> None:
    if dict(os.environ) != environ:
        os.environ.clear()
        os.environ.update(environ)


def _set_handlers(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _set_num_threads(number: int) -> None:
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


# The global NumPy generator is the one that Lightning and users' code seed and draw from.
_SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (lambda: dict(os.environ), _set_environ),
    (Path.cwd, os.chdir),
    (lambda: list(sys.path), lambda value: sys.path.__setitem__(slice(None), value)),
    (lambda: vars(rank_zero_only)["rank"], lambda value: vars(rank_zero_only).update(rank=value)),
    (lambda: {number: signal.getsignal(number) for number in signal.valid_signals()}, _set_handlers),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_num_threads, _set_num_threads),
]
"""How to read and to set each process-wide setting that Lightning, torch or a test body may change."""


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Put every process-wide setting back after the block."""
    before = [read() for read, _ in _SETTINGS]
    try:
        yield
    finally:
        for (_, put_back), value in zip(_SETTINGS, before, strict=True):
            put_back(value)


def on_ranks(world_size: int = 2) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have a test run on every rank of a world. Its parameters are sent there, so fixtures cannot be among them."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def on_all(world: Callable[[int], RankPool], **given: Any) -> None:
            world(world_size).run(_on_rank, test.__module__, test.__name__, given)

        of_test, first = inspect.signature(test), inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        vars(on_all)["__signature__"] = of_test.replace(parameters=[first, *of_test.parameters.values()])
        return on_all

    return decorate


def _on_rank(module: str, name: str, given: dict[str, Any]) -> None:
    vars(importlib.import_module(module))[name].__wrapped__(**given)


class RankPool:
    """`world_size` processes, one rank and one pipe each, that stay up between calls.

    The processes start on the first call. A rank that fails takes the world with it, because a process group with a
    lost rank is unusable: the others are killed, the first failure is raised, the next call starts afresh.

    Args:
        world_size: Number of ranks.
        timeout: Seconds after which a rank that has not answered writes its stack and ends.
        backend: That of the process group.
        prepare: Called on every rank before its process group is made: a module-level function.
        patience: Seconds after which a collective operation gives up.
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
        self.world_size, self.timeout = world_size, timeout
        self._options = backend, prepare, patience
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []
        self._folder: Path | None = None

    def run(self, body: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Return `body(*args, **kwargs)` of every rank, in rank order.

        The warning filters in force in the calling test apply on the ranks.

        Raises:
            RankError: For the first rank that raised, died or did not answer in time.
        """
        return [reply.result for reply in self._call(body, args, kwargs, until_failure=True)]

    def run_expecting_errors(self, body: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Return, per rank, what `body` raised as a `Raised`, or its result where it raised nothing.

        Unlike in `run`, the processes survive. A collective proves it: errors that leave a collective open between
        ranks are a failure of this call, not of the next test.

        Raises:
            RankError: If a rank died, did not answer in time, or the ranks are out of step afterwards.
        """
        replies = self._call(body, args, kwargs, until_failure=False)
        self._call(_in_step, (), {}, until_failure=True)
        return [reply.raised or reply.result for reply in replies]

    def end(self, body: Callable[..., Any], *args: Any, stuck: int | None = None, **kwargs: Any) -> list[Ended]:
        """Return how each rank ended, whose process ends after `body`; `stuck` is one that never does."""
        self._send(body, args, kwargs, ends=True)
        ends = {process.sentinel for rank, process in enumerate(self._processes) if rank != stuck}
        deadline = time.monotonic() + self.timeout
        while ends and (ready := connection.wait(ends, max(0.0, deadline - time.monotonic()))):
            ends.difference_update(ready)  # type: ignore[arg-type]  # what was given
        codes = [process.exitcode for process in self._processes]
        said = [_received(pipe).result if pipe.poll() else "" for pipe in self._pipes]
        printed = [self._log(rank).read_text(errors="replace") for rank in range(self.world_size)]
        self.close()
        return list(map(Ended, codes, said, printed))

    def close(self) -> None:
        """End the processes and remove their folder. The next call starts new ones."""
        atexit.unregister(self.close)
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _call(self, body: Callable[..., Any], args: Any, kwargs: Any, *, until_failure: bool) -> list[_Reply]:
        try:
            return self._collect(self.timeout, self._send(body, args, kwargs), until_failure=until_failure)
        except BaseException:
            self.close()
            raise

    def _send(self, body: Callable[..., Any], args: Any, kwargs: Any, *, ends: bool = False) -> list[int]:
        """Send a call to all ranks, and return how much each of them has written before."""
        filters = [
            (action, _pattern(message), category, _pattern(module), line)
            for action, message, category, module, line in warnings.filters
        ]
        # The call is pickled within the request so that a rank reports what it cannot import instead of dying of it.
        request = pickle.dumps((ends, self.timeout, filters, pickle.dumps((body, args, kwargs))))
        if not self._processes:
            self._start()
        offsets = [self._log(rank).stat().st_size for rank in range(self.world_size)]
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # the rank died between two calls
                pipe.send_bytes(request)
        return offsets

    def _collect(self, timeout: float, offsets: Sequence[int], *, until_failure: bool) -> list[_Reply]:
        replies: dict[int, _Reply] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + timeout + BACKSTOP
        while waiting and (ready := connection.wait(waiting, max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                reply = replies[waiting.pop(pipe)] = _received(pipe)  # type: ignore[call-overload]  # what was given
                if reply.raised and (until_failure or math.isinf(reply.answered_at)):
                    deadline = min(deadline, time.monotonic() + ROOT_CAUSE_WINDOW)
        replies |= dict.fromkeys(waiting.values(), _SILENT)
        failed = sorted((one.answered_at, rank, one.raised) for rank, one in replies.items() if one.raised)
        if failed and (until_failure or any(math.isinf(answered_at) for answered_at, *_ in failed)):
            (_, first, raised), *others = failed
            written = "".join(f"rank {rank} raised {': '.join(also)}\n" for _, rank, also in others)
            raise self._error(first, raised, written + replies[first].details, offsets[first])
        return [replies[rank] for rank in range(self.world_size)]

    def _error(self, rank: int, raised: Raised, details: str, offset: int) -> RankError:
        process = self._processes[rank]
        if raised == _DEAD.raised:
            process.join(BACKSTOP)
            raised = Raised("ProcessDied", f"the process ended with exit code {process.exitcode}")
        with self._log(rank).open("rb") as log:
            log.seek(offset)
            output = log.read().decode(errors="replace")
        if process.exitcode == 1 and "Timeout (" in output:  # what faulthandler writes before it ends the process
            raised = Raised("Timeout", f"the body did not return within {self.timeout:g} s")
        return RankError(rank, *raised, f"{details}\noutput of rank {rank}:\n{output[-8000:]}")

    def _start(self) -> None:
        atexit.register(self.close)
        self._folder = Path(tempfile.mkdtemp(prefix="gradavg-ranks-"))
        context = get_context("forkserver")
        ensure_forkserver()
        for rank in range(self.world_size):
            self._log(rank).touch()
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.world_size, self._folder, theirs, _rank_environ(), *self._options),
                name=f"rank {rank} of {self.world_size}",
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._collect(CALL_TIMEOUT, [0] * self.world_size, until_failure=True)

    def _log(self, rank: int) -> Path:
        assert self._folder is not None
        return self._folder / f"rank{rank}.log"


_DEAD = _Reply(-math.inf, raised=Raised("ProcessDied", ""))
_SILENT = _Reply(math.inf, raised=Raised("Timeout", "it neither answered nor ended"))


def _received(pipe: connection.Connection) -> _Reply:
    try:
        reply: _Reply = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return _DEAD
    return reply


def _pattern(regex: Any) -> str:
    """Return the text of a warning filter's field: a compiled regex, a string, or None for anything."""
    return getattr(regex, "pattern", regex) or ""


def _rank_environ() -> dict[str, str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Gloo otherwise resolves the host name, which fails or waits on machines without a working resolver.
    loopback = next((name for _, name in socket.if_nameindex() if re.fullmatch(r"lo\d*", name)), None)
    if loopback is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    return environ


def ensure_forkserver() -> None:
    """Start the process that ranks are forked from, with everything heavy and the collected test modules imported."""
    for name in PRELOAD:  # a broken module fails here, with its traceback, and not as a dead fork server
        importlib.import_module(name)
    tests = [
        name
        for name, module in list(sys.modules.items())
        if name.startswith("test_") and Path(getattr(module, "__file__", None) or "/").is_relative_to(TESTS)
    ]
    forkserver.set_forkserver_preload([*PRELOAD, *tests])
    before = dict(os.environ)
    # Without the fix of python/cpython#117378 (3.12.8, 3.13.1) the fork server gets the environment but not sys.path.
    os.environ.update(_rank_environ(), PYTHONPATH=os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path))
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(
    rank: int,
    world_size: int,
    folder: Path,
    pipe: connection.Connection,
    environ: dict[str, str],
    backend: str,
    prepare: Callable[[], Any] | None,
    patience: float,
) -> None:
    """Answer calls until the pipe closes, or until one that ends the process."""
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    _set_environ(environ)
    faulthandler.enable()
    if sys.platform == "linux":
        # As outside of the fork server, of which each rank's data loaders would start one that imports everything anew.
        set_start_method("fork", force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends its ranks
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)

    def connect() -> None:
        if prepare is not None:
            prepare()
        store = dist.FileStore(str(folder / "store"), world_size)  # type: ignore[attr-defined]  # not listed in __all__
        limit = timedelta(seconds=patience)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)

    pipe.send_bytes(pickle.dumps(_answer(connect)))
    while True:
        try:
            ends, *request = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)  # without the exit handlers, which would wait for the other ranks
        reply = _answer(_perform, *request)
        if ends:
            sys.stderr.write(reply.details)
            sys.stderr.flush()
            reply = _Reply(0, ": ".join(reply.raised) if reply.raised else repr(reply.result), reply.raised)
        pipe.send_bytes(pickle.dumps(reply))
        if ends:
            store_of_world().set(f"ended/{rank}", "")
            os._exit(int(reply.raised is not None))


def _perform(timeout: float, filters: Sequence[Any], call: bytes) -> Any:
    with warnings.catch_warnings(), isolated():
        warnings.resetwarnings()
        for action, message, category, module, line in filters:
            warnings.filterwarnings(action, message, category, module, line, append=True)
        body, args, kwargs = pickle.loads(call)
        faulthandler.dump_traceback_later(timeout, exit=True)
        try:
            result = body(*args, **kwargs)
        finally:
            faulthandler.cancel_dump_traceback_later()
        pickle.dumps(result)  # or it is this rank's error
        return result


def _answer(call: Callable[..., Any], *args: Any) -> _Reply:
    try:
        return _Reply(time.monotonic(), call(*args))
    except BaseException as error:  # noqa: BLE001  # whatever it is, the parent reports it
        raised, trace = Raised(type(error).__name__, str(error)), "".join(traceback.format_exception(error))
        return _Reply(time.monotonic(), raised=raised, details=trace)


def _in_step() -> None:
    """Check that this collective meets itself on the other ranks."""
    seen = torch.zeros(dist.get_world_size())
    seen[dist.get_rank()] = 1.0
    dist.all_reduce(seen)
    if not torch.equal(seen, torch.ones_like(seen)):
        raise RuntimeError(f"the ranks are out of step: a collective of this check returned {seen.tolist()}")


class RankEnvironment(ClusterEnvironment):
    """Lightning's view of the ranks that run already. Make it in a rank body.

    Args:
        nodes: `nodes[r]` is the node of rank `r`, as a launcher would count it; uneven nodes and any order are
            allowed. Default: one node.
    """

    creates_processes_externally = True
    main_address, main_port = "nowhere", 0  # the process group is there already

    def __init__(self, nodes: Sequence[int] | None = None) -> None:
        self.nodes = tuple(nodes) if nodes is not None else (0,) * dist.get_world_size()
        assert len(self.nodes) == dist.get_world_size()
        self.num_nodes, self.ranks_on_node = len(set(self.nodes)), self.nodes.count(self.node_rank())

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        """Ignore Lightning's product of devices and nodes: it is wrong for uneven nodes."""

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        """Ignore Lightning's arithmetic, for the same reason."""

    def local_rank(self) -> int:
        return self.nodes[: dist.get_rank()].count(self.node_rank())

    def node_rank(self) -> int:
        return self.nodes[dist.get_rank()]


rank_environment = RankEnvironment


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
