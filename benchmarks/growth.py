"""What a rule costs with many ranks, on a slow network, and where ranks differ: `python -m benchmarks.growth`.

Each rank sleeps instead of computing, so that sixteen ranks fit on two cores: a micro-batch sleeps in the forward and
in the backward of each layer, and only the communication is real (gloo). In every round all strategies run with the
same times, in a random order. The cost of a strategy is its mean time of an optimizer step minus that of Lightning's
`DDPStrategy` in the same round.

One command starts the ranks, for every number of ranks and every delay. With a delay, each rank is a node of its own
(`benchmarks.nodes`, which needs root and Linux), and every packet between two of them takes that long. Started by
`torchrun`, also through `benchmarks.nodes`, a process is a rank, and the world is what it finds. Each world first times
one exchange of rows, as a rule makes it, and Lightning's broadcast of its flag.

It prints the costs, and what the exchanges say of 1,024 ranks. `--draw FILE` measures nothing: it draws the pictures of
docs/growth.md from what was saved.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.nodes import network, obstacle
from benchmarks.report import RESULTS, STOCK, Row, Spread, begin_file, load, print_table, save
from benchmarks.world import World, in_rounds, is_rank, joined, progress, quiet_trainer, run, slowest, start
from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.reduction.rows import RowExchange

__all__ = ["TIMES", "draw_times", "main", "print_growth"]

WARM_UP = 2
"""Optimizer steps before the timed ones. DDP rebuilds its buckets after the first."""

LAYERS = 8
"""Each sleeps its part of a micro-batch, so that DDP's buckets travel while the backward goes on."""

EXCHANGES = 30
"""Of rows, and of the flag, to time one."""

NUMBERS = 6
"""Of a row."""

SLOW = 2.0
"""How many times longer the slow rank takes."""

MANY = 1024
"""Ranks for which the exchange is computed, as no machine here can run them."""

WEIGHTED = "weighted_mean"
STRATEGIES: Mapping[str, Callable[[], Strategy]] = {
    STOCK: DDPStrategy,
    "mean": GradAvgStrategy,
    WEIGHTED: lambda: GradAvgStrategy(reduction="weighted_mean"),
}

TIMES: Mapping[str, str] = {
    "equal": "all ranks take the same time",
    "in turn": "one rank after the other is slow, in the forward and in the backward of its micro-batch",
    "crossed": "one rank after the other is slow in the forward, and the next rank in the backward",
    "together": "each rank draws its time, and the backward takes twice the forward, as of texts of different lengths",
}
"""How long micro-batches take, by the name of it."""


class MicroBatchTime(NamedTuple):
    """How long a rank sleeps in a micro-batch."""

    forward: float  # seconds
    backward: float  # seconds


class Case(NamedTuple):
    """One setting within a world of ranks."""

    ranks: int
    delay: float  # milliseconds that a packet takes
    parameters: int  # of the model
    window: int  # micro-batches of an optimizer step
    times: str  # one of TIMES


def _sizes(parameters: int) -> list[int]:
    """Return the parameters of each layer. The last one is the largest, as where classes or words are many."""
    last = 2 * parameters // 5
    others = (parameters - last) // (LAYERS - 1)
    return [*[others] * (LAYERS - 1), last]


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
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in _sizes(parameters)])

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


def draw_times(times: str, seconds: float, count: int, rank: int, ranks: int) -> list[MicroBatchTime]:
    """Return the times of some micro-batches of one rank.

    Args:
        times: One of `TIMES`.
        seconds: The median of a whole micro-batch, of which the forward is a third.
        count: Number of micro-batches.
        rank: The rank.
        ranks: The number of ranks.
    """
    generator = random.Random(rank)
    drawn = []
    for number in range(count):
        forward_factor = 1.0
        backward_factor = 1.0
        is_slow = number % ranks == rank
        is_next = (number + 1) % ranks == rank
        if times == "together":
            forward_factor = generator.lognormvariate(0, 0.5)
            backward_factor = forward_factor
        if times in ("in turn", "crossed") and is_slow:
            forward_factor = SLOW
        if times == "in turn" and is_slow:
            backward_factor = SLOW
        if times == "crossed" and is_next:
            backward_factor = SLOW
        drawn.append(MicroBatchTime(seconds / 3 * forward_factor, 2 * seconds / 3 * backward_factor))
    return drawn


def _seconds(name: str, times: Sequence[MicroBatchTime], case: Case, world: World) -> float:
    """Return the mean time of an optimizer step on this rank under a strategy."""
    steps = len(times) // case.window - WARM_UP - 1
    clock = _Clock(WARM_UP * case.window, (WARM_UP + steps) * case.window)
    trainer = quiet_trainer(STRATEGIES[name](), world, accumulate_grad_batches=case.window, callbacks=[clock])
    batches: Any = list(torch.tensor(times, dtype=torch.float64))
    trainer.fit(_Sleeper(case.parameters, weighted=name == WEIGHTED), DataLoader(batches, batch_size=None))
    return clock.seconds / steps


def _measure(case: Case, arguments: argparse.Namespace, world: World) -> list[Row]:
    """Measure the rounds of a case."""
    # One step more, whose begin ends the one before.
    count = (WARM_UP + arguments.steps + 1) * case.window
    times = draw_times(case.times, arguments.seconds, count, dist.get_rank(), case.ranks)
    seconds: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    for name, _ in in_rounds(list(STRATEGIES), arguments.rounds, warm_up=0):
        seconds[name].extend(slowest([_seconds(name, times, case, world)], world))
    progress(f"{case}: measured")
    more = {"seconds": arguments.seconds, "steps": arguments.steps}
    return [Row(case._asdict(), name, of_rounds, more) for name, of_rounds in seconds.items()]


def _exchange_rows(world: World) -> None:
    RowExchange([0.0] * NUMBERS, world.device, dist.group.WORLD).read()


def _broadcast_flag(world: World) -> None:
    # What `_TrainingEpochLoop._broadcast_sigterm_tensor` of Lightning 2.6 does before every batch.
    dist.broadcast(torch.tensor([0], device=world.device), src=0)


def _time_exchange(exchange: Callable[[World], None], delay: float, name: str, world: World) -> Row:
    """Return the time of an exchange that all ranks begin at once, on the slowest rank, and its processor time."""
    seconds: list[float] = []
    processor: list[float] = []
    for _ in range(EXCHANGES):
        dist.barrier()
        started = time.perf_counter()
        processor_before = time.process_time()
        exchange(world)
        taken = [time.perf_counter() - started, time.process_time() - processor_before]
        slowest_seconds, most_processor = slowest(taken, world)
        seconds.append(slowest_seconds)
        processor.append(most_processor)
    case = {"ranks": dist.get_world_size(), "delay": delay}
    return Row(case, name, seconds, {"processor": processor})


_ROWS = "exchange of rows"
_FLAG = "stock's flag"


def _run_rank(arguments: argparse.Namespace, delay: float = 0.0) -> None:
    """Measure all cases in this world; rank 0 saves them."""
    with joined() as world:
        rows = [
            _time_exchange(_exchange_rows, delay, _ROWS, world),
            _time_exchange(_broadcast_flag, delay, _FLAG, world),
        ]
        if dist.get_rank() == 0:
            save(arguments.output, rows)
        for text in arguments.cases:
            times, _, window = text.rpartition(":")
            for parameters in arguments.parameters:
                case = Case(dist.get_world_size(), delay, int(parameters), int(window), times)
                rows = _measure(case, arguments, world)
                if dist.get_rank() == 0:
                    save(arguments.output, rows)


def _of_case(row: Row) -> Case | None:
    """Return the case of a row; None of an exchange."""
    if row.variant in (_ROWS, _FLAG):
        return None
    return Case(**row.case)


def _cost(row: Row, rows: Sequence[Row]) -> Spread:
    """Return the milliseconds beside stock, round by round."""
    for other in rows:
        if other.variant == STOCK and other.case == row.case:
            pairs = zip(row.seconds, other.seconds, strict=True)
            return Spread.of([1000 * (ours - stock) for ours, stock in pairs])
    raise LookupError(f"{row.case} was measured without stock")


def _exchanges(rows: Sequence[Row], name: str) -> dict[tuple[int, float], Row]:
    """Return the rows of an exchange, by ranks and delay."""
    return {(row.case["ranks"], row.case["delay"]): row for row in rows if row.variant == name}


def print_growth(file: Path) -> None:
    """Print the costs in a file, and the exchanges."""
    rows = load(file)
    lines = []
    for row in rows:
        case = _of_case(row)
        if case is None or row.variant == STOCK:
            continue
        stock = next(other for other in rows if other.variant == STOCK and other.case == row.case)
        lines.append(
            (
                row.variant,
                case.times,
                str(case.ranks),
                f"{case.delay:g}",
                str(case.window),
                f"{case.parameters / 1e6:g}",
                f"{1000 * Spread.of(stock.seconds).median:,.0f}",
                _cost(row, rows).text(1, sign="+"),
            )
        )
    columns = ["option", "times", "ranks", "delay, ms", "window", "M parameters"]
    columns += ["stock, ms", "beside stock, ms"]
    caption = "An optimizer step on the slowest rank: median [quartiles] over the rounds."
    print_table(file, columns, lines, caption)
    _print_exchanges(rows, file)


def _print_exchanges(rows: Sequence[Row], file: Path) -> None:
    """Print what one exchange takes, and what follows for 1,024 ranks."""
    flags = _exchanges(rows, _FLAG)
    lines = []
    for (ranks, delay), row in _exchanges(rows, _ROWS).items():
        flag = flags[ranks, delay]
        processor = 1000 * Spread.of(row.more["processor"]).median
        milliseconds = Spread.of([1000 * value for value in row.seconds])
        milliseconds_of_flag = Spread.of([1000 * value for value in flag.seconds])
        # Every other rank is one message more.
        of_message = processor / max(1, ranks - 1)
        lines.append(
            (
                str(ranks),
                f"{delay:g}",
                milliseconds.text(2),
                milliseconds_of_flag.text(2),
                f"{processor:.2f}",
                f"{of_message:.3f}",
                f"{of_message * (MANY - 1):,.0f}",
            )
        )
    columns = ["ranks", "delay, ms", "rows, ms", "stock's flag, ms", "CPU ms of rows", "CPU ms per message"]
    columns += [f"so of {MANY:,} ranks, CPU ms"]
    print_table(file, columns, lines, f"One exchange that all ranks begin at once: median [quartiles] of {EXCHANGES}.")


def _draw(rows: Sequence[Row], folder: Path) -> None:
    """Draw the cost over the ranks, and over the delay, of the smallest model."""
    import matplotlib as mpl  # noqa: PLC0415  # no dependency of the measurement

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "growth"  # the same bytes from the same numbers
    cases = [case for case in map(_of_case, rows) if case is not None]
    smallest = min(case.parameters for case in cases)
    points = []
    for row in rows:
        case = _of_case(row)
        if case is not None and case.parameters == smallest and row.variant != STOCK:
            points.append((case, row.variant, _cost(row, rows)))
    _draw_costs(points, "ranks", "delay", folder / "growth_ranks.svg")
    _draw_costs(points, "delay", "ranks", folder / "growth_delay.svg")


def _draw_costs(points: Sequence[tuple[Case, str, Spread]], across: str, panels: str, file: Path) -> None:
    """Draw one panel for each value of the field `panels`; `across` is the field of the horizontal axis."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    values = []
    for value in sorted({getattr(case, panels) for case, _, _ in points}):
        # A panel with a single point shows no growth.
        if len({getattr(case, across) for case, _, _ in points if getattr(case, panels) == value}) > 1:
            values.append(value)
    if not values:
        return
    kinds = sorted({(case.times, case.window) for case, _, _ in points})
    figure = Figure(figsize=(max(5.2, 3.4 * len(values)), 3.6), layout="constrained", facecolor="white")
    axes = figure.subplots(1, len(values), sharey=True, squeeze=False)[0]
    colors = {"mean": "#2f6fb0", WEIGHTED: "#c8500a"}
    markers = "osD^v<>ph"
    for axis, value in zip(axes, values, strict=True):
        axis.axhline(0, color="#7b8794", linewidth=1)
        for strategy, color in colors.items():
            for number, kind in enumerate(kinds):
                line = []
                for case, variant, cost in points:
                    if variant == strategy and getattr(case, panels) == value and (case.times, case.window) == kind:
                        line.append((getattr(case, across), cost))
                line.sort()
                medians = [cost.median for _, cost in line]
                below = [cost.median - cost.low for _, cost in line]
                above = [cost.high - cost.median for _, cost in line]
                times, window = kind
                axis.errorbar(
                    [position for position, _ in line],
                    medians,
                    yerr=[below, above],
                    color=color,
                    marker=markers[number],
                    markersize=4,
                    linewidth=1.2,
                    alpha=1 - 0.15 * number,
                    capsize=2,
                    label=f"{strategy}, {times}, window of {window}",
                )
        if panels == "delay":
            axis.set_title(f"delay {value:g} ms", fontsize=10)
        else:
            axis.set_title(f"{value} ranks", fontsize=10)
        positions = sorted({getattr(case, across) for case, _, _ in points})
        if across == "ranks":
            axis.set_xscale("log", base=2)
            axis.set_xlabel("ranks")
        else:
            axis.set_xscale("symlog", linthresh=1)
            axis.set_xlabel("delay, ms")
        axis.set_xticks(positions, [f"{position:g}" for position in positions])
    axes[0].set_ylabel("ms per step beside stock DDP")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    figure.savefig(file, metadata={"Date": None})


def _start(arguments: argparse.Namespace) -> None:
    """Start a world for each delay and each number of ranks, one after the other."""
    begin_file(arguments.output)
    for delay in arguments.delays:
        for ranks in arguments.ranks:
            if delay == 0:
                start(_run_rank, ranks, arguments, delay)
            else:
                with network(ranks, None, delay) as nodes:
                    start(_run_rank, ranks, arguments, delay, nodes=nodes)
    print_growth(arguments.output)


def _case(text: str) -> str:
    """Return a case of the command line.

    Raises:
        argparse.ArgumentTypeError: If it is none.
    """
    times, _, window = text.rpartition(":")
    if times not in TIMES or not window.isdecimal() or int(window) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no case; give times and the micro-batches of a window, such as 'in turn:1'; times are"
            f" {[*TIMES]}"
        )
    return text


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 8, 16], help="sizes of the worlds, one after the other")
    add("--delays", type=float, nargs="+", default=[0.0], metavar="MS", help="milliseconds that a packet takes")
    default = ["equal:1", "in turn:1", "crossed:1", "in turn:4"]
    add("--cases", type=_case, nargs="*", default=default, help="TIMES:WINDOW; none: exchanges only")
    add("--parameters", type=float, nargs="+", default=[1e6], help="of the model")
    add("--rounds", type=int, default=3)
    add("--steps", type=int, default=4, help="timed optimizer steps of a round")
    add("--seconds", type=float, default=0.15, help="median of a micro-batch")
    add("--output", type=Path, default=RESULTS / "growth.json", help="file to write (default: %(default)s)")
    add("--table", type=Path, metavar="FILE", help="measure nothing, and print the tables of a file")
    add("--draw", type=Path, metavar="FILE", help="measure nothing, and draw the pictures of a file")
    add("--images", type=Path, default=Path("docs/images"), help="folder of the pictures")
    parsed = parser.parse_args(arguments)
    if min(*parsed.ranks, parsed.rounds, parsed.steps) < 1:
        parser.error(
            f"--ranks, --rounds and --steps are 1 or more; got {min(*parsed.ranks, parsed.rounds, parsed.steps)}"
        )
    if not all(math.isfinite(delay) and delay >= 0 for delay in parsed.delays):
        parser.error(f"--delays are 0 or more; got {parsed.delays}")
    if max(parsed.delays) > 0 and not is_rank() and not parsed.draw and not parsed.table:
        reason = obstacle("ip", "tc", "cc")
        if reason is not None:
            parser.error(f"--delays of more than 0: {reason}")
    return parsed


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or show what was measured."""
    parsed = _parse(arguments)
    if parsed.table is not None:
        print_growth(parsed.table)
    elif parsed.draw is not None:
        _draw(load(parsed.draw), parsed.images)
    elif is_rank():
        # The launcher made the network, of whose delay the rows know nothing.
        run(_run_rank, parsed, print_growth)
    else:
        _start(parsed)


if __name__ == "__main__":
    main(sys.argv[1:])
