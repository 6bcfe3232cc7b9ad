"""Fail where a step or an epoch has become slower beside stock: `make bench-check`, before a release.

It measures `benchmarks.step` and `benchmarks.epoch` on two ranks, and compares the ratios to stock of one run with
`BOUNDS`; no absolute time counts, so any machine will do that does nothing else. A row fails above its bound times
`MARGIN`, so a regression of a tenth does. Noise moves a median of few rounds by a few percent: rows that would fail are
measured again, for more rounds, and the median of all of them decides.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from benchmarks import epoch, step
from benchmarks.models import MODELS
from benchmarks.report import RESULTS, STOCK, Row, Spread, begin_file, load, print_table, save
from benchmarks.variants import VARIANTS
from benchmarks.world import World, joined, start

__all__ = ["BOUNDS", "Bound", "bound_of", "fails", "main"]

RANKS = 2

MARGIN = 1.05
"""Half of the regression that must be found, so that neither it nor the noise of a median decides by chance."""

ROUNDS = {"step": 5, "epoch": 2}
"""Rounds that count, at first."""

AGAIN = 2
"""How many times as many rounds rows are measured for that would fail."""

_LARGER = ("mlp", "resnet18", "transformer")
_EPOCHS = ("0 workers", "4 workers")


class Bound(NamedTuple):
    """What a row may take, relative to stock."""

    benchmark: str
    where: tuple[str, ...]  # models, or numbers of workers
    variants: tuple[str, ...]
    ratio: float
    reason: str


_WEIGHTED = ("weighted_mean", "weighted_mean, weights that change")

BOUNDS = (
    Bound("step", _LARGER, ("mean",), 1.0, "it does what stock does"),
    Bound("step", _LARGER, ("sum",), 0.97, "views of buckets save a copy, and nothing is exchanged"),
    Bound("step", ("mlp",), _WEIGHTED, 1.05, "small buckets are multiplied by Python on gloo's thread"),
    Bound("step", _LARGER[1:], _WEIGHTED, 1.0, "views of buckets save the copy that the factor costs"),
    Bound("step", ("mlp",), ("single_device", "data_parallel"), 1.11, "random states of each step: about 1 ms"),
    Bound("step", ("transformer",), ("single_device",), 1.0, "random states of each step, beside a large model"),
    Bound(
        "step", ("resnet18",), ("single_device",), 1.57, "batch norm over all ranks: two exchanges in each of 20 layers"
    ),
    Bound("step", _LARGER[1:], ("data_parallel",), 1.0, "random states of each step, beside a large model"),
    Bound("step", _LARGER, ("reproducible",), 1.25, "two exchanges after the backward, and none in it"),
    Bound("step", ("layer",), ("mean",), 1.1, "all is overhead here: 0.15 ms of Python"),
    Bound("step", ("layer",), ("sum",), 1.15, "an exchange of rows, which no backward hides"),
    Bound("step", ("layer",), _WEIGHTED, 1.6, "an exchange of rows, which no backward hides, and the weights"),
    Bound(
        "step", ("layer",), ("single_device", "data_parallel"), 2.15, "random states of three generators: about 1 ms"
    ),
    Bound("step", ("layer",), ("reproducible",), 2.4, "random states, and two exchanges after the backward"),
    Bound("epoch", _EPOCHS, ("weighted_mean",), 1.03, "each rank loads its own samples, as under stock"),
    Bound("epoch", _EPOCHS[:1], tuple(epoch.STRATEGIES)[2:], 1.04, "the same, and random states of each step"),
    Bound("epoch", _EPOCHS[1:], tuple(epoch.STRATEGIES)[2:], 1.14, "the same, where loading is a fifth of that"),
)
"""What each row has on an idle machine of two cores; a bound goes down when a row does."""


class _Finding(NamedTuple):
    """The ratios of one row to stock, one for each round."""

    benchmark: str
    where: str  # the model, or the number of workers
    variant: str
    ratios: list[float]


def bound_of(benchmark: str, where: str, variant: str) -> Bound:
    """Return the bound of a row.

    Raises:
        LookupError: If there is none, or more than one.
    """
    found = []
    for bound in BOUNDS:
        if bound.benchmark == benchmark and where in bound.where and variant in bound.variants:
            found.append(bound)
    if len(found) != 1:
        raise LookupError(f"{benchmark} of {where!r} under {variant!r} has {len(found)} bounds; BOUNDS must have one")
    return found[0]


def fails(ratios: Sequence[float], bound: Bound) -> bool:
    """Return whether a row is slower than its bound allows."""
    return Spread.of(ratios).median > MARGIN * bound.ratio


def _find(
    benchmark: str, where: str, names: Sequence[str], measure: Callable[[Sequence[str], int], list[Row]]
) -> list[_Finding]:
    """Measure rows, and those that would fail again. A collective operation: all ranks know the same times."""
    findings: dict[str, _Finding] = {}
    rounds = ROUNDS[benchmark]
    measured = list(names)
    for count in (rounds, AGAIN * rounds):
        rows = measure([STOCK, *measured], count)
        (stock,) = (row for row in rows if row.variant == STOCK)
        for row in rows:
            if row.variant == STOCK:
                continue
            finding = findings.setdefault(row.variant, _Finding(benchmark, where, row.variant, []))
            finding.ratios.extend(ours / theirs for ours, theirs in zip(row.seconds, stock.seconds, strict=True))
        measured = []
        for name, finding in findings.items():
            if fails(finding.ratios, bound_of(benchmark, where, name)):
                measured.append(name)
        if not measured:
            break
    return list(findings.values())


def _steps(model: str, world: World, names: Sequence[str], rounds: int) -> list[Row]:
    return step.measure_rounds(model, names, world, rounds=rounds)


def _epochs(where: str, world: World, names: Sequence[str], rounds: int) -> list[Row]:
    workers = int(where.partition(" ")[0])
    return epoch.measure_epochs(epoch.parse([f"--rounds={rounds}"]), workers, names, world)


def _measure_all(world: World) -> list[_Finding]:
    findings: list[_Finding] = []
    for model in MODELS:
        findings += _find("step", model, list(VARIANTS)[1:], partial(_steps, model, world))
    for where in _EPOCHS:
        findings += _find("epoch", where, list(epoch.STRATEGIES)[1:], partial(_epochs, where, world))
    return findings


def _run_rank(output: Path) -> None:
    """Measure all rows; rank 0 saves their ratios."""
    with joined() as world:
        findings = _measure_all(world)
        if dist.get_rank() == 0:
            rows = []
            for finding in findings:
                case = {"benchmark": finding.benchmark, "where": finding.where}
                rows.append(Row(case, finding.variant, finding.ratios))
            save(output, rows)


def _print(file: Path) -> list[str]:
    """Print all rows with their bounds; return those that fail."""
    failed = []
    lines = []
    for row in load(file):
        benchmark, where = row.case["benchmark"], row.case["where"]
        bound = bound_of(benchmark, where, row.variant)
        verdict = ""
        if fails(row.seconds, bound):
            verdict = "FAILS"
            failed.append(f"{benchmark} of {where} under {row.variant}")
        lines.append(
            (
                benchmark,
                where,
                row.variant,
                Spread.of(row.seconds).text(3),
                str(len(row.seconds)),
                f"{bound.ratio:.2f}",
                verdict,
                bound.reason,
            )
        )
    columns = ("benchmark", "where", "variant", "of stock", "rounds", "bound", "", "reason")
    caption = f"{RANKS} ranks, ratios to stock within a round. A row fails above {MARGIN:g} times its bound."
    print_table(file, columns, lines, caption)
    return failed


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and exit with 1 if a row fails."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.check",
        description="Fail where a step or an epoch is slower beside stock than before.",
    )
    add = parser.add_argument
    add("--output", type=Path, default=RESULTS / "check.json", help="file to write (default: %(default)s)")
    add("--table", type=Path, metavar="FILE", help="measure nothing, and judge a file")
    parsed = parser.parse_args(arguments)
    file = parsed.table
    if file is None:
        file = parsed.output
        begin_file(file)
        start(_run_rank, RANKS, file)
    failed = _print(file)
    if failed:
        sys.exit(f"slower than before: {'; '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
