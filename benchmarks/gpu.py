"""What reductions cost on one GPU: `python -m benchmarks.gpu`; with `--all`, after the checks of `tests/test_gpu.py`.

One process for each rank, all on the one GPU, each a host of its own to NCCL, which otherwise refuses them; buckets
then take the network transport, as between nodes. All variants live in the same processes. A round runs each of them
twice, in an order drawn anew: once between CUDA events, and once under `torch.profiler` for its kernels. Nothing waits
for the device within a block. In the first round, which does not count, the implicit waits of each variant are counted
instead (`torch.cuda.set_sync_debug_mode("warn")`).

Processes take turns on a GPU, so a step of two ranks says how much work there is, and not how fast two GPUs were. The
number of kernels and their time without NCCL's are what our code adds. `--backend gloo` runs on the CPU what can be.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from benchmarks.block import WARMUP, Clock, Setting, Variant
from benchmarks.models import MODELS
from benchmarks.report import Spread
from benchmarks.step import World, make_setting, quiet, slowest
from benchmarks.termination import KINDS, _Blocks
from benchmarks.variants import BASELINE, LIGHTNING, variants
from lightning_gradavg.rules import RULES

__all__ = ["DeviceClock", "Timings", "kernels_of", "main"]

ROOT = Path(__file__).parent.parent

MEASURED = (
    BASELINE,
    LIGHTNING,
    f"{LIGHTNING}, no termination flag",
    *(f"GradAvg {rule}" for rule in RULES),
    "GradAvg weighted_mean, * on the wire",
    "GradAvg mean, PowerSGD rank 1",
)

WAIT = "synchronizing CUDA operation"
"""What torch's warning of an implicit wait says."""

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

TIMEOUT = timedelta(minutes=3)


@dataclass
class Timings:
    """The rounds of one model on one number of ranks.

    Attributes:
        model: Its name.
        title: Its description.
        world_size: Number of ranks.
        steps: Timed steps of a block.
        order: The variants in the order of the table.
        step_ms: Of each variant, the median time of a step between events, one per round; the slower rank's.
        kernel_ms: Likewise the time of all kernels and copies of a step but NCCL's.
        nccl_ms: Likewise the time of NCCL's kernels.
        kernels: Likewise their number, NCCL's included.
        waits: Of each variant, the implicit waits of a step.
        skipped: Why a variant was not measured.
        termination: Milliseconds of a step in each triple of blocks, by the way in which ranks agree on termination.
    """

    model: str
    title: str
    world_size: int
    steps: int
    order: list[str] = field(default_factory=list)
    step_ms: dict[str, list[float]] = field(default_factory=dict)
    kernel_ms: dict[str, list[float]] = field(default_factory=dict)
    nccl_ms: dict[str, list[float]] = field(default_factory=dict)
    kernels: dict[str, list[float]] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    termination: dict[str, list[float]] = field(default_factory=dict)


def kernels_of(trace: dict[str, Any]) -> tuple[float, float, int]:
    """Return the milliseconds of what ran on the device without NCCL's kernels, of those, and the number of both.

    Args:
        trace: A Chrome trace of `torch.profiler`. Annotations, which span kernels, are not counted.
    """
    own, nccl, count = 0.0, 0.0, 0
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in _ON_DEVICE:
            count += 1
            if event["name"].startswith("nccl"):
                nccl += event["dur"] / 1e3
            else:
                own += event["dur"] / 1e3
    return own, nccl, count


class DeviceClock(Clock):
    """Takes the time between successive calls of `tick` on the device, without waiting for it in between.

    Args:
        steps: Intervals to time, after `WARMUP` others.
        device: The device.
        kind: `"time"`, `"kernels"` or `"waits"`: what to measure of the intervals.
    """

    def __init__(self, steps: int, device: torch.device, kind: str) -> None:
        super().__init__(steps, device, lambda: 0)
        self._kind = kind
        self._marks: list[Any] = []
        self._stack = ExitStack()
        self._profile: Any = None
        self._warned: list[warnings.WarningMessage] = []

    def tick(self) -> None:
        """A step begins, which ends the one before."""
        cuda = self._device.type == "cuda"
        if len(self._marks) == WARMUP + self._steps:
            self._mark(cuda)
            if cuda:
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize(self._device)
            self._stack.close()
            return
        if len(self._marks) == WARMUP and cuda:
            torch.cuda.synchronize(self._device)
            if self._kind == "kernels":
                self._profile = self._stack.enter_context(profile(activities=[ProfilerActivity.CUDA]))
            elif self._kind == "waits":
                self._warned = self._stack.enter_context(warnings.catch_warnings(record=True)) or []
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
        self._mark(cuda)

    def _mark(self, cuda: bool) -> None:
        if cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    @property
    def step_ms(self) -> float:
        """The median interval, in milliseconds."""
        ticks = WARMUP + self._steps + 1
        if len(self._marks) != ticks:
            raise RuntimeError(f"a variant ticked {len(self._marks)} times instead of {ticks}")
        pairs = pairwise(self._marks[WARMUP:])
        if self._device.type == "cuda":
            return statistics.median(before.elapsed_time(after) for before, after in pairs)
        return statistics.median(1e3 * (after - before) for before, after in pairs)

    @property
    def kernels(self) -> list[float]:
        """Per step: milliseconds of kernels without NCCL's, of NCCL's, and the number of both."""
        with tempfile.TemporaryDirectory(prefix="gradavg-gpu-") as folder:
            path = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(path))
            return [value / self._steps for value in kernels_of(json.loads(path.read_text()))]

    @property
    def waits(self) -> float:
        """Implicit waits per step."""
        return sum(WAIT in str(one.message) for one in self._warned) / self._steps


def _run(variant: Variant, setting: Setting, kind: str) -> DeviceClock:
    """Run one block, beginning on all ranks together."""
    clock = DeviceClock(setting.steps, setting.device, kind)
    dist.barrier(device_ids=[0] if setting.device.type == "cuda" else None)
    try:
        variant.run(setting, clock)
    finally:
        for parameter in setting.module.parameters():
            parameter.grad = None
        gc.collect()
    return clock


def _measure(model: str, world: World, given: argparse.Namespace) -> Timings:
    setting = make_setting(model, world, given.steps)
    chosen = [one for one in variants() if any(fnmatch.fnmatchcase(one.name, pattern) for pattern in given.only)]
    timings = Timings(model, MODELS[model].title, dist.get_world_size(), setting.steps)
    timings.skipped = {one.name: one.obstacle for one in chosen if one.obstacle is not None}
    runnable = [one for one in chosen if one.obstacle is None]
    timings.order = [one.name for one in runnable]
    cuda = setting.device.type == "cuda"
    order, begin = random.Random(0), time.monotonic()
    for number in range(given.rounds + 1):
        (elapsed,) = slowest([time.monotonic() - begin], setting.device)
        if number > 1 and elapsed > 60 * given.minutes:
            break
        for variant in order.sample(runnable, len(runnable)):
            if number == 0:
                (timings.waits[variant.name],) = slowest([_run(variant, setting, "waits").waits], setting.device)
                continue
            found = slowest([_run(variant, setting, "time").step_ms], setting.device)
            if cuda:
                found += slowest(_run(variant, setting, "kernels").kernels, setting.device)
            tables = (timings.step_ms, timings.kernel_ms, timings.nccl_ms, timings.kernels)
            for table, value in zip(tables, found, strict=False):
                table.setdefault(variant.name, []).append(value)
    if not cuda:
        timings.waits = {}
    return timings


def _termination(world: World, triples: int) -> dict[str, list[float]]:
    """Return the milliseconds of a step under each agreement on termination, one per triple of blocks."""
    setting, steps = make_setting("mlp", world, None), 12
    blocks = _Blocks(steps)
    trainer = Trainer(
        accelerator="cpu" if world.device.type == "cpu" else "gpu",
        devices=1,
        num_nodes=world.nodes,
        strategy=DDPStrategy(),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[blocks],
    )
    # One triple more, which warms up, and a batch that ends the last block.
    batches: Any = [setting.batch] * (len(KINDS) * steps * (triples + 1) + 1)
    trainer.fit(setting.module, DataLoader(batches, batch_size=None))
    medians = slowest([statistics.median(one) for one in blocks.seconds if one], world.device)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for block, median in enumerate(medians[: len(KINDS) * (triples + 1)]):
        if block >= len(KINDS):
            found[KINDS[blocks.kind(block)]].append(1e3 * median)
    return found


def _about(device: torch.device) -> dict[str, Any]:
    """Return what the figures depend on."""
    about: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {
            "gpu": f"{properties.name}, {properties.multi_processor_count} SMs, {properties.total_memory >> 30} GiB",
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return about


def _rank(rank: int, world_size: int, folder: str, given: argparse.Namespace) -> None:
    """Measure as one rank; rank 0 leaves what was found in a file, after each model anew."""
    os.environ.update(
        # Every rank is a node, to NCCL and to Lightning, which would ask for a GPU each on one.
        NCCL_HOSTID=f"gradavg-{rank}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        NCCL_P2P_DISABLE="1",
        NCCL_SHM_DISABLE="1",
        NCCL_MAX_CTAS="2",
        GLOO_SOCKET_IFNAME="lo",
        # As torchrun sets them, which is how Lightning knows that nothing is left to start.
        TORCHELASTIC_RUN_ID="gradavg",
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        GROUP_RANK=str(rank),
    )
    torch.set_num_threads(1)
    quiet()
    device = torch.device("cuda", 0) if given.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", world_size)  # type: ignore[attr-defined]  # not listed in __all__
    dist.init_process_group(given.backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    world, found = World(device, 1), []
    for model in given.models:
        found.append(_measure(model, world, given))
        if world_size > 1 and model == given.models[-1]:
            found[-1].termination = _termination(world, given.triples)
        if rank == 0:
            text = json.dumps({"about": _about(device), "timings": [asdict(one) for one in found]})
            Path(folder, "found.json").write_text(text)
    dist.barrier(device_ids=[0] if device.type == "cuda" else None)
    dist.destroy_process_group()


def _run_world(world_size: int, given: argparse.Namespace) -> tuple[dict[str, Any], list[Timings], bool]:
    """Return what the timings depend on, the timings, and whether all processes ended well."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="gradavg-gpu-") as folder:
        ranks = [context.Process(target=_rank, args=(rank, world_size, folder, given)) for rank in range(world_size)]
        for process in ranks:
            process.start()
        try:
            # One that fails leaves the others in a collective, which ends by the timeout of the group.
            for process in ranks:
                process.join()
        finally:
            for process in ranks:
                process.kill()
                process.join()
        path = Path(folder, "found.json")
        found = json.loads(path.read_text()) if path.exists() else {"about": {}, "timings": []}
    return found["about"], [Timings(**one) for one in found["timings"]], all(one.exitcode == 0 for one in ranks)


def _cell(values: Sequence[float] | None, form: str) -> str:
    if not values:
        return "-"
    low, median, high = (form.format(value) for value in Spread.of(values))
    return escape(f"{median} [{low}, {high}]")


def _ratios(table: dict[str, list[float]], name: str, to: str) -> list[float] | None:
    if name not in table or to not in table:
        return None
    return [mine / its for mine, its in zip(table[name], table[to], strict=True)]


def _tables(timings: Timings) -> list[Table]:
    rounds = max(map(len, timings.step_ms.values()), default=0)
    table = Table(
        title=f"{timings.title}, {timings.world_size} rank{'s' * (timings.world_size > 1)} on one device,"
        f" {rounds} rounds of {timings.steps} steps",
        caption=escape(f"median [quartiles] over the rounds; kernels without NCCL's, as ratio to {BASELINE}'s"),
    )
    table.add_column("variant", no_wrap=True)
    for column in ("step ms", f"of {LIGHTNING}", "kernel ms", f"of {BASELINE}", "NCCL ms", "kernels", "waits"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in (name for name in timings.order if name in timings.step_ms):
        table.add_row(
            name,
            _cell(timings.step_ms[name], "{:.2f}"),
            _cell(_ratios(timings.step_ms, name, LIGHTNING), "{:.3f}"),
            _cell(timings.kernel_ms.get(name), "{:.3f}"),
            _cell(_ratios(timings.kernel_ms, name, BASELINE), "{:.3f}"),
            _cell(timings.nccl_ms.get(name), "{:.2f}"),
            f"{statistics.median(timings.kernels[name]):.0f}" if name in timings.kernels else "-",
            f"{timings.waits[name]:g}" if name in timings.waits else "-",
        )
    for name, reason in timings.skipped.items():
        table.add_row(name, f"[dim]left out: {escape(reason)}[/dim]")
    if not timings.termination:
        return [table]
    agreement = Table(title=f"agreement on termination, {timings.world_size} ranks, MLP")
    for column in ("agreement", "step ms", f"of {KINDS[0]}"):
        agreement.add_column(column)
    for name, values in timings.termination.items():
        ratios = _ratios(timings.termination, name, KINDS[0])
        agreement.add_row(name, _cell(values, "{:.2f}"), _cell(ratios, "{:.3f}"))
    return [table, agreement]


def _run_checks(given: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Run the checks, which print their own table, and return their outcomes and exit code."""
    with tempfile.TemporaryDirectory(prefix="gradavg-gpu-") as folder:
        path = Path(folder, "checks.json")
        done = subprocess.run(
            [sys.executable, str(ROOT / "tests" / "test_gpu.py"), "--backend", given.backend, "--output", str(path)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            check=False,
        )
        return json.loads(path.read_text())["worlds"] if path.exists() else {}, done.returncode


def _summary(checks: dict[str, Any]) -> list[str]:
    """Return a line for each number of ranks: how many checks passed, and which did not."""
    lines = []
    for world_size, outcomes in checks.items():
        statuses = {
            name: "failed" if any(one[0] == "failed" for one in ranks) else ranks[0][0] for name, ranks in outcomes.items()
        }
        counts = ", ".join(f"{list(statuses.values()).count(one)} {one}" for one in ("passed", "skipped", "failed"))
        broken = [name for name, status in statuses.items() if status == "failed"]
        lines.append(f"checks on {world_size} ranks: {counts}{': ' if broken else ''}{', '.join(broken)}")
    return lines


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Measure reductions on one GPU.")
    add = parser.add_argument
    add("--all", action="store_true", help="run the checks of tests/test_gpu.py first")
    add("--backend", choices=["nccl", "gloo"], default="nccl", help="gloo runs on the CPU what can be (default: nccl)")
    add("--worlds", type=int, nargs="+", default=[1, 2], help="numbers of ranks to measure (default: 1 2)")
    add("--models", nargs="+", choices=list(MODELS), default=["mlp", "resnet18"], help="models to measure")
    add("--only", nargs="+", default=list(MEASURED), metavar="NAME", help="variants of benchmarks.step, with wildcards")
    add("--rounds", type=int, default=8, help="rounds that count; one more is dropped (default: 8)")
    add("--steps", type=int, default=10, help="timed steps of a block (default: 10)")
    add("--minutes", type=float, default=1.0, help="begin no further round of a model after this time (default: 1)")
    add("--triples", type=int, default=10, help="triples of blocks for the agreement on termination (default: 10)")
    add("--output", type=Path, default=Path("benchmarks/results/gpu.json"), help="file to write")
    given = parser.parse_args(arguments)
    numbers = (*given.worlds, given.rounds, given.steps, given.triples)
    if min(numbers) < 1 or not given.minutes > 0:
        parser.error(
            f"--worlds, --rounds, --steps and --triples are 1 or more and --minutes above 0; got {given.worlds},"
            f" {given.rounds}, {given.steps}, {given.triples} and {given.minutes}"
        )
    if given.backend == "nccl" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here: run it on a machine with a GPU, or on the CPU by --backend gloo")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Check if asked to, measure, print the tables last; the exit code is 1 if anything failed."""
    given = _arguments(arguments)
    console = Console(width=190)
    found: dict[str, Any] = {"command": " ".join(sys.argv[1:] if arguments is None else arguments)}
    failed = False
    if given.all:
        found["checks"], code = _run_checks(given)
        failed = code != 0
    tables: list[Table] = []
    found["timings"] = []
    for world_size in given.worlds:
        about, timings, ended_well = _run_world(world_size, given)
        failed |= not ended_well
        found |= about
        found["timings"] += [asdict(one) for one in timings]
        tables += [table for one in timings for table in _tables(one)]
        # After each number of ranks, so that an interrupt loses no more than one.
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(found, indent=1) + "\n")
    about = {name: value for name, value in found.items() if isinstance(value, str)}
    console.print("\n".join(f"{name}: {value}" for name, value in about.items()), markup=False)
    for table in tables:
        console.print(table)
    console.print("\n".join([*_summary(found.get("checks", {})), f"saved {given.output}"]), markup=False)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
