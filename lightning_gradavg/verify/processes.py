"""The processes of a verification, `verify`, and the command `gradavg verify`.

One process per rank, with the variables that a launcher sets, records; then one more is the twin. Each builds module
and data anew, and leads a session of its own, which ends with everything that it started.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
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
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_gradavg.cli import OneLineParser
from lightning_gradavg.verify.explain import judge
from lightning_gradavg.verify.record import Recorder, Tape
from lightning_gradavg.verify.report import CAUSES, EXIT_CODES, Report, explanation
from lightning_gradavg.verify.target import Settings, Target, of_values, quiet_options, resolve_strategy

__all__ = ["in_processes", "main", "record_run", "require_memory", "verify", "verify_target"]

DESCRIPTION = (
    "Trains a few optimizer steps on several processes, then on one with the same samples, both in float64, and"
    " compares the two until they differ. Exit code 0: equal; 1: different; 2: wrong usage, or the run failed; 3: not"
    " shown, because not everything could be compared."
)
_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "PL_", "LT_")
_COPIES = 5  # weights, gradients, DDP's buckets, and two numbers of an optimizer such as Adam
_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    *(str(Path(__file__).parents[1]), "<"),
)


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
    """Run a target on several processes and on one, and return how the two differ."""
    if unknown := sorted(set(ignore) - set(CAUSES)):
        raise ValueError(f"{unknown[0]!r} is not a cause; choose from {', '.join(CAUSES)}")
    quiet_options(target.options, settings.accelerator)  # a wrong one is refused before any process starts
    with tempfile.TemporaryDirectory(prefix="gradavg-verify-") as name:
        tapes = in_processes([(_rank, (target, rank, settings, name)) for rank in range(settings.devices)])
    (report,) = in_processes([(judge, (tapes, partial(target.build, settings.accelerator), settings))])
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
        return record_run(strategy, {**options, "devices": settings.devices}, module, data, settings)
    finally:
        dist.destroy_process_group()


def in_processes(calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Return what the calls return, each made in a process of its own, all at once: the ranks of a world.

    The error of the first that fails is raised, and the others end.
    """
    context: Any = multiprocessing.get_context("forkserver")
    # One import instead of one per process. What a process inherits is the same as with spawn.
    context.set_forkserver_preload(["lightning.pytorch", "lightning_gradavg"])
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


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="gradavg verify", description=DESCRIPTION)
    several: dict[str, Any] = {"action": "append", "default": []}
    what = parser.add_argument_group("what to verify: a config file of LightningCLI, or a module").add_argument
    what("module", nargs="?", metavar="NAME", help="the model, a class or function: package.module:Net or train.py:Net")
    what("--model", metavar="NAME", help="the same, together with --config")
    what("--data", metavar="NAME", help="the data, a data module or a function that returns a loader")
    what("--init", **several, type=_assignment, metavar="NAME=VALUE", help="an argument of the module; repeatable")
    what("--config", **several, metavar="FILE", help="a config file of `fit`; repeatable")
    what("--strategy", metavar="NAME", help="a registered name, or train.py:Class (default: the config's, else ddp)")
    of_trainer = "an option of the Trainer, its value as JSON or a plain string; repeatable"
    what("--trainer", **several, type=_assignment, metavar="NAME=VALUE", help=of_trainer)
    how = parser.add_argument_group("how").add_argument
    how("--devices", type=int, default=2, metavar="N", help="processes (default: 2)")
    how("--steps", type=int, default=3, metavar="N", help="global batches (default: 3)")
    how("--accelerator", default="cpu", metavar="TYPE", help="a type of device: cpu, cuda (default: cpu)")
    how("--single", action="store_true", help="compute in float32, for models that cannot compute in float64")
    equal = "largest relative difference that counts as equal (default: 1e-8, or 1e-4 with --single)"
    how("--tolerance", type=float, metavar="X", help=equal)
    how("--seed", type=int, default=0, metavar="N", help="the seed if the config has none (default: 0)")
    accepted = "a cause that you accept, such as 'data order'; repeatable"
    how("--ignore", **several, choices=tuple(CAUSES), metavar="CAUSE", help=accepted)
    how("--json", action="store_true", help="print the report as JSON")
    explain = "print only what a cause means, and what to do about it"
    how("--explain", choices=tuple(CAUSES), metavar="CAUSE", help=explain)
    return parser


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    with suppress(json.JSONDecodeError):
        return name, json.loads(value)
    return name, value


def _target(args: argparse.Namespace, further: Sequence[str]) -> Target:
    from lightning_gradavg.cli.lightning import read_config, read_names  # noqa: PLC0415  # it imports this package

    module = args.model or args.module
    missing = [file for file in args.config if not Path(file).is_file()]
    refused = {
        "nothing to verify: give --config FILE, or module:LightningModule": not (args.config or module),
        "--init is for a module without --config; beside it write --model.NAME=VALUE": args.config and args.init,
        f"--config {''.join(missing[:1])!r}: there is no such file": missing,
        f"{''.join(further[:1])!r} is not an option; further options of LightningCLI need --config": further
        and not args.config,
    }
    for message in (message for message, wrong in refused.items() if wrong):
        raise ValueError(message)
    options = {} if args.config else {"strategy": "ddp"}
    options |= dict(args.trainer) | ({"strategy": args.strategy} if args.strategy else {})
    if ":" not in options.get("strategy", ":"):
        resolve_strategy(options["strategy"])
    read = partial(read_names, module, args.data, dict(args.init))
    if args.config:
        arguments = [f"--config={file}" for file in args.config] + [f"--model={module}"] * bool(module)
        read = partial(read_config, [*arguments, *further], args.data)
    return Target(read, options, args.seed)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `gradavg verify`, whose unknown options are those of LightningCLI, and return its exit code."""
    args, further = _parser().parse_known_args(argv)
    if args.explain is not None:
        print(explanation(args.explain))
        return 0
    try:
        settings = Settings(args.devices, args.steps, args.accelerator, args.single, args.tolerance)
        report = verify_target(_target(args, further), settings, args.ignore)
    except Exception as error:  # noqa: BLE001  # no failure may look like a verdict
        print(f"gradavg verify: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report.as_dict(), indent=2) if args.json else report)
    return EXIT_CODES[report.verdict]
