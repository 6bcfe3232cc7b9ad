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
from collections import Counter
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

__all__ = [
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
GLOO_TIMEOUT = timedelta(seconds=20)
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
    """One rank's answer."""

    answered_at: float
    result: Any = None
    raised: Raised | None = None
    details: str = ""


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Put back, after the block, every process-wide setting that Lightning, torch or a test body may change."""
    environ, directory, search_path = dict(os.environ), Path.cwd(), list(sys.path)
    lightning_rank = vars(rank_zero_only)["rank"]
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    # The global NumPy generator is the one that Lightning and users' code seed and draw from.
    random_states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    dtype, grad, threads = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
    matmul = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        if dict(os.environ) != environ:
            os.environ.clear()
            os.environ.update(environ)
        os.chdir(directory)
        sys.path[:] = search_path
        vars(rank_zero_only)["rank"] = lightning_rank
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        random.setstate(random_states[0])
        np.random.set_state(random_states[1])  # noqa: NPY002
        torch.set_rng_state(random_states[2])
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        torch.set_float32_matmul_precision(matmul)
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


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
    """

    def __init__(
        self,
        world_size: int,
        *,
        timeout: float = CALL_TIMEOUT,
        backend: str = "gloo",
        prepare: Callable[[], Any] | None = None,
    ) -> None:
        self.world_size, self.timeout = world_size, timeout
        self.backend, self.prepare = backend, prepare
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []
        self._folder: Path | None = None

    def run(self, body: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Return `body(*args, **kwargs)` of every rank, in rank order.

        The warning filters in force in the calling test apply on the ranks.

        Raises:
            RankError: For the first rank that raised, died or did not answer in time.
        """
        replies = self._call(body, args, kwargs, stop_at_first_failure=True)
        return [reply.result for reply in replies]

    def run_expecting_errors(self, body: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Return, per rank, what `body` raised as a `Raised`, or its result where it raised nothing.

        Unlike in `run`, the processes survive. A collective proves it: errors that leave a collective open between
        ranks are a failure of this call, not of the next test.

        Raises:
            RankError: If a rank died, did not answer in time, or the ranks are out of step afterwards.
        """
        replies = self._call(body, args, kwargs, stop_at_first_failure=False)
        self._call(_in_step, (), {}, stop_at_first_failure=True)
        return [reply.raised or reply.result for reply in replies]

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

    def _call(
        self, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, stop_at_first_failure: bool
    ) -> list[_Reply]:
        request = self._request(body, args, kwargs)
        if not self._processes:
            self._start()
        offsets = [self._log(rank).stat().st_size for rank in range(self.world_size)]
        try:
            for rank, pipe in enumerate(self._pipes):
                try:
                    pipe.send_bytes(request)
                except OSError:  # the rank died between two calls
                    raise self._death(rank, 0) from None
            return self._collect(self.timeout, offsets, stop_at_first_failure=stop_at_first_failure)
        except BaseException:
            self.close()
            raise

    def _request(self, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        name = f"{getattr(body, '__module__', '?')}.{getattr(body, '__qualname__', repr(body))}"
        if name.startswith("__main__.") or "<" in name:
            raise TypeError(
                f"a rank body must be a module-level function of a test module, got {name};"
                " move it to the top level of the module and pass what it needs as arguments."
            )
        filters = [
            (action, _pattern(message), category, _pattern(module), line)
            for action, message, category, module, line in warnings.filters
        ]
        # The call is pickled within the request so that a rank reports what it cannot import instead of dying of it.
        return pickle.dumps((self.timeout, filters, pickle.dumps((body, args, kwargs))))

    def _collect(self, timeout: float, offsets: Sequence[int], *, stop_at_first_failure: bool) -> list[_Reply]:
        replies: dict[int, _Reply] = {}
        dead: list[int] = []
        deadline = time.monotonic() + timeout + BACKSTOP
        while len(replies) + len(dead) < self.world_size:
            waiting = {rank: self._pipes[rank] for rank in range(self.world_size) if rank not in {*replies, *dead}}
            ready = connection.wait(waiting.values(), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank, pipe in waiting.items():
                if pipe in ready:
                    try:
                        replies[rank] = pickle.loads(pipe.recv_bytes())
                    except (EOFError, OSError):
                        dead.append(rank)
            if dead or (stop_at_first_failure and any(reply.raised for reply in replies.values())):
                deadline = min(deadline, time.monotonic() + ROOT_CAUSE_WINDOW)
        failed = sorted((reply.answered_at, rank, reply.raised) for rank, reply in replies.items() if reply.raised)
        others = "".join(f"rank {rank} raised {': '.join(raised)}\n" for _, rank, raised in failed)
        if dead:
            raise self._death(dead[0], offsets[dead[0]], others)
        if failed and stop_at_first_failure:
            _, first, raised = failed[0]
            details = replies[first].details + self._output(first, offsets[first])
            raise RankError(first, raised.type_name, raised.message, details)
        silent = sorted(set(range(self.world_size)) - set(replies))
        if silent:
            raise RankError(silent[0], "Timeout", f"ranks {silent} neither answered nor ended", others)
        return [replies[rank] for rank in range(self.world_size)]

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
                args=(rank, self.world_size, self._folder, theirs, _rank_environ(), self.backend, self.prepare),
                name=f"rank {rank} of {self.world_size}",
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        try:
            self._collect(CALL_TIMEOUT, [0] * self.world_size, stop_at_first_failure=True)
        except BaseException:
            self.close()
            raise

    def _death(self, rank: int, offset: int, others: str = "") -> RankError:
        self._processes[rank].join(BACKSTOP)
        code = self._processes[rank].exitcode
        output = self._output(rank, offset)
        if code == 1 and "Timeout (" in output:  # what faulthandler writes before it ends the process
            return RankError(rank, "Timeout", f"the body did not return within {self.timeout:g} s", others + output)
        return RankError(rank, "ProcessDied", f"the process ended with exit code {code}", others + output)

    def _log(self, rank: int) -> Path:
        assert self._folder is not None
        return self._folder / f"rank{rank}.log"

    def _output(self, rank: int, offset: int) -> str:
        with self._log(rank).open("rb") as log:
            log.seek(offset)
            text = log.read().decode(errors="replace")
        return f"\noutput of rank {rank}:\n{text[-8000:]}" if text.strip() else ""


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
) -> None:
    """Answer calls until the pipe closes."""
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(environ)
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
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=GLOO_TIMEOUT)

    pipe.send_bytes(_answer(connect))
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            os._exit(0)  # without the exit handlers, which would wait for the other ranks
        pipe.send_bytes(_answer(_perform, request))


def _perform(request: bytes) -> Any:
    timeout, filters, call = pickle.loads(request)
    with warnings.catch_warnings(), isolated():
        warnings.resetwarnings()
        for action, message, category, module, line in filters:
            warnings.filterwarnings(action, message, category, module, line, append=True)
        body, args, kwargs = pickle.loads(call)
        faulthandler.dump_traceback_later(timeout, exit=True)
        try:
            return body(*args, **kwargs)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _answer(call: Callable[..., Any], *args: Any) -> bytes:
    def reply(**outcome: Any) -> bytes:
        return pickle.dumps(_Reply(time.monotonic(), **outcome))

    try:
        result = call(*args)
    except BaseException as error:  # noqa: BLE001  # whatever it is, the parent reports it
        raised = Raised(type(error).__name__, str(error))
        return reply(raised=raised, details="".join(traceback.format_exception(error)))
    try:
        return reply(result=result)
    except Exception as error:  # noqa: BLE001  # pickle raises nearly anything
        return reply(raised=Raised("PicklingError", f"the body returned {result!r}, which cannot be sent: {error}"))


def _in_step() -> None:
    """Check that this collective meets itself on the other ranks."""
    seen = torch.zeros(dist.get_world_size())
    seen[dist.get_rank()] = 1.0
    dist.all_reduce(seen)
    if not torch.equal(seen, torch.ones_like(seen)):
        raise RuntimeError(f"the ranks are out of step: a collective of this check returned {seen.tolist()}")


class RankEnvironment(ClusterEnvironment):
    """Lightning's view of the ranks that run already.

    Args:
        nodes: `nodes[r]` is the node of rank `r`, as a launcher would count it; uneven nodes and any order are
            allowed. Default: one node.
    """

    def __init__(self, nodes: Sequence[int] | None = None) -> None:
        world_size = dist.get_world_size()
        self.nodes = tuple(nodes) if nodes is not None else (0,) * world_size
        assert len(self.nodes) == world_size

    @property
    def num_nodes(self) -> int:
        return len(set(self.nodes))

    @property
    def ranks_on_node(self) -> int:
        return Counter(self.nodes)[self.node_rank()]

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        raise AssertionError("the process group is initialized already: nothing may ask for an address")

    @property
    def main_port(self) -> int:
        raise AssertionError("the process group is initialized already: nothing may ask for a port")

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


def rank_environment(nodes: Sequence[int] | None = None) -> RankEnvironment:
    """Return the Lightning environment of the live process group. Call it in a rank body."""
    return RankEnvironment(nodes)


def make_trainer(strategy: Strategy | str, *, nodes: Sequence[int] | None = None, **options: Any) -> Trainer:
    """Return a quiet `Trainer` on the CPU that runs in the ranks of a pool, on `nodes`. Call it in a rank body."""
    environment = rank_environment(nodes)
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
