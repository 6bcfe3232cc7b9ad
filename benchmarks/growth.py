"""How the cost of a rule grows with ranks, delay, windows and model size: `python -m benchmarks.growth`.

Each rank sleeps instead of computing, so that sixteen ranks fit on two cores: a micro-batch sleeps in the forward and
in the backward of each layer, and only the communication is real (gloo). The times are drawn for every rank and
micro-batch. In every round all strategies run with the same times, in a random order. The cost of a strategy is its
mean time of an optimizer step minus that of Lightning's `DDPStrategy` in the same round.

One command starts the ranks by forking, for every number of ranks and every delay. With a delay, each rank is a node of
its own (`benchmarks.nodes`, which needs root and Linux), and every packet between two of them takes that long. Started
by `torchrun`, also through `benchmarks.nodes`, a process is a rank, and the world is what it finds. Each world first
times one exchange of six numbers, as a rule with weights makes it, and Lightning's broadcast of its flag.

`--draw FILE` measures nothing: it draws the pictures of docs/growth.md from what was saved.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import platform
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.nodes import Network, network, obstacle
from benchmarks.report import Spread
from benchmarks.trainer import make_quiet_trainer
from benchmarks.world import is_rank, joined, slowest
from lightning_gradavg import GradAvgStrategy

__all__ = ["STREAMS", "draw_times", "main"]

WARMUP = 2
"""Optimizer steps before the timed ones. DDP rebuilds its buckets after the first."""

LAYERS = 8
"""Each sleeps its part of a micro-batch, so that DDP's buckets travel while the backward goes on."""

EXCHANGES = 30
"""Of six numbers, and of the flag, to time one."""

STOCK = "Lightning DDPStrategy"
WEIGHTED = "GradAvg weighted_mean"
STRATEGIES: Mapping[str, Callable[[], Strategy]] = {
    STOCK: DDPStrategy,
    "GradAvg mean": GradAvgStrategy,
    WEIGHTED: lambda: GradAvgStrategy(reduction="weighted_mean"),
}

STREAMS = ("equal", "together", "independent")
"""How the times are drawn: the same for all; per rank, the backward twice the forward; per rank, each by itself."""


class MicroBatchTime(NamedTuple):
    """How long a rank sleeps in a micro-batch."""

    forward: float  # seconds
    backward: float  # seconds


class Case(NamedTuple):
    """One setting within a world of ranks."""

    parameters: int  # of the model
    window: int  # micro-batches of an optimizer step
    stream: str  # one of STREAMS


@dataclass(frozen=True)
class Result:
    """What a case has cost.

    Attributes:
        ranks: Size of the world.
        delay: Milliseconds that a packet takes.
        parameters: Those of the model.
        window: Micro-batches of an optimizer step.
        stream: How the times were drawn.
        milliseconds: Of each strategy, an optimizer step on the slowest rank, one per round.
    """

    ranks: int
    delay: float
    parameters: int
    window: int
    stream: str
    milliseconds: dict[str, list[float]]

    def cost(self, strategy: str) -> Spread:
        """Return the milliseconds beside stock DDP, round by round."""
        pairs = zip(self.milliseconds[strategy], self.milliseconds[STOCK], strict=True)
        return Spread.of([ours - stock for ours, stock in pairs])


@dataclass(frozen=True)
class Exchange:
    """What one exchange takes where no rank is late.

    Attributes:
        ranks: Size of the world.
        delay: Milliseconds that a packet takes.
        totals: Milliseconds of an all-to-all of six float64 numbers, from its begin to its end, on the slowest rank.
        flag: Milliseconds of Lightning's broadcast of one integer by rank 0.
        processor: Milliseconds of processor time that one exchange of totals takes of a rank, all its threads together.
    """

    ranks: int
    delay: float
    totals: list[float]
    flag: list[float]
    processor: float


class _Layer(torch.autograd.Function):
    """Sleeps in the forward and in the backward. The gradient of its parameter is made of ones."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, parameter: Tensor, times: MicroBatchTime) -> Tensor:
        ctx.times = times
        ctx.save_for_backward(parameter)
        time.sleep(times.forward / LAYERS)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (parameter,) = ctx.saved_tensors
        time.sleep(ctx.times.backward / LAYERS)
        return grads[0], torch.ones_like(parameter), None


class _Sleeper(LightningModule):
    """Its batches are times. Its weight, if it has one, is the time: longer micro-batches have more terms."""

    def __init__(self, parameters: int, *, weighted: bool) -> None:
        super().__init__()
        self.weighted = weighted
        size = max(1, parameters // LAYERS)
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(size)) for _ in range(LAYERS)])

    def training_step(self, batch: Tensor) -> Any:
        forward, backward = batch.tolist()
        times = MicroBatchTime(forward, backward)
        hidden = torch.ones((), requires_grad=True)
        for parameter in self.layers:
            hidden = _Layer.apply(hidden, parameter, times)
        if not self.weighted:
            return hidden
        return {"loss": hidden, "weight": forward + backward}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Not foreach: it would allocate another model size of memory.
        return torch.optim.SGD(self.parameters(), lr=1e-6, foreach=False)


class _Clock(Callback):
    """Takes the time between the begins of two batches: the end of a run is left out, where strategies differ."""

    def __init__(self, first_batch: int, last_batch: int) -> None:
        self._batches = (first_batch, last_batch)
        self._times: list[float] = []

    def on_train_batch_start(self, *arguments: Any) -> None:
        """Note the time if the batch is the first one that counts, or the first one that does no more."""
        batch_idx = arguments[-1]
        if batch_idx in self._batches:
            self._times.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """The time that was taken."""
        started, ended = self._times
        return ended - started


def draw_times(stream: str, seconds: float, count: int, generator: random.Random) -> list[MicroBatchTime]:
    """Return the times of some micro-batches of one rank.

    Args:
        stream: One of `STREAMS`.
        seconds: The median of a whole micro-batch, of which the forward is a third.
        count: Number of micro-batches.
        generator: Of this rank.
    """
    times = []
    for _ in range(count):
        forward_factor = 1.0
        if stream != "equal":
            forward_factor = generator.lognormvariate(0, 0.5)
        backward_factor = forward_factor
        if stream == "independent":
            backward_factor = generator.lognormvariate(0, 0.5)
        times.append(MicroBatchTime(seconds / 3 * forward_factor, 2 * seconds / 3 * backward_factor))
    return times


def _seconds(name: str, times: Sequence[MicroBatchTime], case: Case) -> float:
    """Return the mean time of an optimizer step on this rank under a strategy."""
    steps = len(times) // case.window - WARMUP - 1
    clock = _Clock(WARMUP * case.window, (WARMUP + steps) * case.window)
    trainer = make_quiet_trainer(
        STRATEGIES[name](),
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=dist.get_world_size() // int(os.environ["LOCAL_WORLD_SIZE"]),
        accumulate_grad_batches=case.window,
        callbacks=[clock],
    )
    batches: Any = list(torch.tensor(times, dtype=torch.float64))
    trainer.fit(_Sleeper(case.parameters, weighted=name == WEIGHTED), DataLoader(batches, batch_size=None))
    return clock.seconds / steps


def _measure(case: Case, arguments: argparse.Namespace, delay: float) -> Result:
    """Measure the rounds of a case."""
    milliseconds: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    # With the same seed, all ranks draw the same order; times have another seed on every rank.
    generator_of_order = random.Random(0)
    for number in range(arguments.rounds):
        generator = random.Random(f"{number} {case} {dist.get_rank()}")
        # One step more, whose begin ends the one before.
        count = (WARMUP + arguments.steps + 1) * case.window
        times = draw_times(case.stream, arguments.seconds, count, generator)
        for name in generator_of_order.sample(list(STRATEGIES), len(STRATEGIES)):
            # A trainer and its model are a cycle, in stock as well: of 100 M parameters, two ranks ran out of 23 GB.
            gc.collect()
            seconds = _seconds(name, times, case)
            (slowest_seconds,) = slowest([seconds], torch.device("cpu"))
            milliseconds[name].append(1000 * slowest_seconds)
    return Result(dist.get_world_size(), delay, case.parameters, case.window, case.stream, milliseconds)


def _exchange_totals() -> None:
    # What `reduction.rows.RowExchange` does on a CPU.
    sent = torch.zeros(6 * dist.get_world_size(), dtype=torch.float64)
    dist.all_to_all_single(torch.empty_like(sent), sent)


def _broadcast_flag() -> None:
    # What `_TrainingEpochLoop._broadcast_sigterm_tensor` of Lightning 2.6 does before every batch.
    dist.broadcast(torch.tensor([0]), src=0)


def _time_exchange(exchange: Callable[[], None]) -> list[float]:
    """Return the milliseconds of an exchange on the slowest rank, one number for each time that it was made."""
    milliseconds = []
    for _ in range(EXCHANGES):
        dist.barrier()
        started = time.perf_counter()
        exchange()
        (slowest_seconds,) = slowest([time.perf_counter() - started], torch.device("cpu"))
        milliseconds.append(1000 * slowest_seconds)
    return milliseconds


def _processor_of_totals() -> float:
    """Return the processor milliseconds of one exchange of totals, the most of all ranks."""
    dist.barrier()
    started = time.process_time()
    for _ in range(EXCHANGES):
        _exchange_totals()
    (most,) = slowest([time.process_time() - started], torch.device("cpu"))
    return 1000 * most / EXCHANGES


def _run_rank(arguments: argparse.Namespace, delay: float) -> None:
    """Measure all cases in this world; rank 0 prints and adds them to the file."""
    with joined():
        exchange = Exchange(
            ranks=dist.get_world_size(),
            delay=delay,
            totals=_time_exchange(_exchange_totals),
            flag=_time_exchange(_broadcast_flag),
            processor=_processor_of_totals(),
        )
        if dist.get_rank() == 0:
            _print_exchange(exchange)
            _save(arguments.output, exchanges=[exchange])
        for parameters in arguments.parameters:
            for window in arguments.windows:
                for stream in arguments.streams:
                    result = _measure(Case(int(parameters), window, stream), arguments, delay)
                    if dist.get_rank() == 0:
                        _print(result)
                        # After each case, so that an interrupt loses no more than one.
                        _save(arguments.output, results=[result])


def _print_exchange(exchange: Exchange) -> None:
    sys.stdout.write(
        f"{exchange.ranks} ranks, {exchange.delay:g} ms: totals {statistics.median(exchange.totals):.2f} ms,"
        f" flag {statistics.median(exchange.flag):.2f} ms, processor {exchange.processor:.2f} ms\n"
    )
    sys.stdout.flush()


def _print(result: Result) -> None:
    costs = []
    for name in STRATEGIES:
        if name != STOCK:
            cost = result.cost(name)
            costs.append(f"{name} {cost.median:+.2f} [{cost.low:+.2f}, {cost.high:+.2f}] ms")
    sys.stdout.write(
        f"{result.ranks} ranks, {result.delay:g} ms, {result.parameters / 1e6:g} M, windows of {result.window},"
        f" {result.stream}: stock {statistics.median(result.milliseconds[STOCK]):.1f} ms; {'; '.join(costs)}\n"
    )
    sys.stdout.flush()


def _save(output: Path, *, results: Sequence[Result] = (), exchanges: Sequence[Exchange] = ()) -> None:
    """Add results to a file, which several worlds and commands may share."""
    saved: dict[str, Any] = {"about": [], "exchanges": [], "results": []}
    if output.exists():
        saved = json.loads(output.read_text())
    about = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "command": sys.argv[1:],
    }
    if about not in saved["about"]:
        saved["about"].append(about)
    saved["exchanges"] += [asdict(exchange) for exchange in exchanges]
    saved["results"] += [asdict(result) for result in results]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(saved) + "\n")


def _enter(namespace: str) -> None:
    """Move this process to a network namespace, as `setns` does (Python has it from 3.12 on)."""
    new_network = 0x40000000  # CLONE_NEWNET
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(descriptor, new_network) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    finally:
        os.close(descriptor)


def _forked(
    rank: int, ranks: int, port: int, nodes: Network | None, arguments: argparse.Namespace, delay: float
) -> None:
    """Be a rank in a process of its own, on a node of its own if there are nodes."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(ranks),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        TORCHELASTIC_RUN_ID="growth",  # by which Lightning sees that it need not start processes
    )
    if nodes is not None:
        _enter(nodes.namespaces[rank])
        os.environ.update(
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1",
            GROUP_RANK=str(rank),
            MASTER_ADDR=nodes.addresses[0],
            GLOO_SOCKET_IFNAME=nodes.interface,
        )
    _run_rank(arguments, delay)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def _start_world(ranks: int, nodes: Network | None, arguments: argparse.Namespace, delay: float) -> None:
    """Fork the ranks of a world, and wait for them. All die if one fails."""
    # Forked, so that torch and Lightning are imported once, and not by every rank.
    torch.multiprocessing.start_processes(
        _forked, (ranks, _free_port(), nodes, arguments, delay), nprocs=ranks, start_method="fork"
    )


def _start(arguments: argparse.Namespace) -> None:
    """Start a world for each delay and each number of ranks, one after the other."""
    for delay in arguments.delays:
        for ranks in arguments.ranks:
            if delay == 0:
                _start_world(ranks, None, arguments, delay)
            else:
                with network(ranks, None, delay) as nodes:
                    _start_world(ranks, nodes, arguments, delay)


def _load(files: Sequence[Path]) -> tuple[list[Result], list[Exchange]]:
    results: list[Result] = []
    exchanges: list[Exchange] = []
    for file in files:
        saved = json.loads(file.read_text())
        results += [Result(**result) for result in saved["results"]]
        exchanges += [Exchange(**exchange) for exchange in saved["exchanges"]]
    return results, exchanges


def _draw(files: Sequence[Path], folder: Path) -> None:
    """Draw the cost over the ranks, and over the delay, of the smallest model with times that were drawn together."""
    import matplotlib as mpl  # noqa: PLC0415  # no dependency of the measurement

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "growth"  # the same bytes from the same numbers
    results, _ = _load(files)
    smallest = min(result.parameters for result in results)
    chosen = [result for result in results if result.parameters == smallest and result.stream == "together"]
    _draw_costs(chosen, "ranks", "delay", folder / "growth_ranks.svg")
    _draw_costs(chosen, "delay", "ranks", folder / "growth_delay.svg")


def _draw_costs(results: Sequence[Result], across: str, panels: str, file: Path) -> None:
    """Draw one panel for each value of the field `panels`; `across` is the field of the horizontal axis."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    values = []
    for value in sorted({getattr(result, panels) for result in results}):
        # A panel with a single point shows no growth.
        if len({getattr(result, across) for result in results if getattr(result, panels) == value}) > 1:
            values.append(value)
    if not values:
        return
    windows = sorted({result.window for result in results})
    figure = Figure(figsize=(3.1 * len(values), 3.2), layout="constrained", facecolor="white")
    axes = figure.subplots(1, len(values), sharey=True, squeeze=False)[0]
    colors = {"GradAvg mean": "#2f6fb0", WEIGHTED: "#c8500a"}
    markers = "osD^v"
    for axis, value in zip(axes, values, strict=True):
        axis.axhline(0, color="#7b8794", linewidth=1)
        for strategy, color in colors.items():
            for number, window in enumerate(windows):
                line = []
                for result in results:
                    if getattr(result, panels) == value and result.window == window:
                        line.append((getattr(result, across), result.cost(strategy)))
                line.sort()
                positions = [position for position, _ in line]
                medians = [cost.median for _, cost in line]
                below = [cost.median - cost.low for _, cost in line]
                above = [cost.high - cost.median for _, cost in line]
                label = f"{strategy.removeprefix('GradAvg ')}, window of {window}"
                axis.errorbar(
                    positions,
                    medians,
                    yerr=[below, above],
                    color=color,
                    marker=markers[number % len(markers)],
                    markersize=4,
                    linewidth=1.2,
                    alpha=1 - 0.25 * number,
                    capsize=2,
                    label=label,
                )
        if panels == "delay":
            axis.set_title(f"delay {value:g} ms", fontsize=10)
        else:
            axis.set_title(f"{value} ranks", fontsize=10)
        if across == "ranks":
            axis.set_xscale("log", base=2)
            ticks = sorted({result.ranks for result in results})
            axis.set_xticks(ticks, [str(tick) for tick in ticks])
            axis.set_xlabel("ranks")
        else:
            axis.set_xscale("symlog", linthresh=1)
            delays = sorted({result.delay for result in results})
            axis.set_xticks(delays, [f"{tick:g}" for tick in delays])
            axis.set_xlabel("delay, ms")
    axes[0].set_ylabel("ms per step beside stock DDP")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    figure.savefig(file, metadata={"Date": None})


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4, 8, 16], help="sizes of the worlds, one after the other")
    add("--delays", type=float, nargs="+", default=[0.0], metavar="MS", help="milliseconds that a packet takes")
    add("--windows", type=int, nargs="+", default=[1, 4], help="micro-batches of an optimizer step")
    add("--streams", nargs="*", choices=STREAMS, default=["together"], help="how times are drawn; none: exchanges only")
    add("--parameters", type=float, nargs="+", default=[1e6], help="of the model")
    add("--rounds", type=int, default=5)
    add("--steps", type=int, default=8, help="timed optimizer steps of a round")
    add("--seconds", type=float, default=0.03, help="median of a micro-batch")
    add("--output", type=Path, default=Path("benchmarks/results/growth.json"), help="file to add the results to")
    add("--draw", type=Path, nargs="+", metavar="FILE", help="draw the pictures from these files")
    add("--images", type=Path, default=Path("docs/images"), help="folder of the pictures")
    parsed = parser.parse_args(arguments)
    counts = [*parsed.ranks, *parsed.windows, parsed.rounds, parsed.steps]
    if min(counts) < 1:
        parser.error(f"--ranks, --windows, --rounds and --steps are 1 or more; got {min(counts)}")
    if not all(math.isfinite(delay) and delay >= 0 for delay in parsed.delays):
        parser.error(f"--delays are 0 or more; got {parsed.delays}")
    if max(parsed.delays) > 0 and not is_rank() and not parsed.draw:
        reason = obstacle("ip", "tc", "cc")
        if reason is not None:
            parser.error(f"--delays of more than 0: {reason}")
    return parsed


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure as a rank, start the ranks, or draw."""
    parsed = _parse(arguments)
    if parsed.draw:
        _draw(parsed.draw, parsed.images)
        return
    if is_rank():
        # The launcher made the network; the first delay is what the results say of it.
        _run_rank(parsed, parsed.delays[0])
        return
    _start(parsed)


if __name__ == "__main__":
    main()
