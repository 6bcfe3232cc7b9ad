"""How far the reduced gradients are from the definition of their rule: `python -m benchmarks.exactness`.

Every rank computes the gradients of its own batches, and all are gathered. `combine` makes of them, in float64, what a
rule defines. Then a real `Trainer.fit` reduces the same gradients: its loss is linear in the parameters, with the local
gradients as coefficients, so that what differs is the reduction. Windows have two micro-batches, the weights are
uneven, and the last rank's second micro-batch has the weight 0.

A rule that is sent in float32 is to be exact up to 1e-6, relative to the norm of each parameter's gradient; else the
exit code is 1, as where the ranks hold different bits. Of the narrower types, and of PowerSGD, the error is only told.
On emulated nodes: `python -m benchmarks.nodes --nodes 2 --ranks 2 --module benchmarks.exactness`.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.given import STEPS, WINDOW, Given, Gradients, Look, average, fit, give
from benchmarks.models import MODELS
from benchmarks.plain import POWER_SGD_RANKS
from benchmarks.trained import hooked
from benchmarks.ways import FLAT, NODE_BY_NODE, WIRE_TYPES, live_places, ways
from benchmarks.world import World, is_rank, joined, slowest, start
from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.rules import RULES

__all__ = ["LIMIT", "Errors", "Result", "errors_of", "main"]

LIMIT = 1e-6
"""Of rules that are sent in float32, unless the command line says otherwise."""


@dataclass(frozen=True)
class Errors:
    """How far the gradients of a step are from what they should be, on the worst rank.

    Attributes:
        parameter: The largest of the parameters' relative L2 errors.
        whole: The relative L2 error of all gradients as one vector.
    """

    parameter: float
    whole: float


@dataclass(frozen=True)
class Result:
    """What was found of one way to reduce.

    Attributes:
        model: Whose gradients were reduced.
        name: Of the rule, and of how its buckets are sent.
        errors: The largest ones over the steps.
        limit: What the error of every parameter is not to exceed; None for a way that rounds.
        same_bits: Whether all ranks got the same bits in every step.
    """

    model: str
    name: str
    errors: Errors
    limit: float | None
    same_bits: bool

    @property
    def missed(self) -> bool:
        """Whether it is not what was promised; NaN never is."""
        return not self.same_bits or (self.limit is not None and not self.errors.parameter <= self.limit)


def errors_of(found: Sequence[Tensor], expected: Sequence[Tensor]) -> Errors:
    """Return the errors of gradients; infinite where one is NaN, or should be 0 and is not.

    Args:
        found: One per parameter.
        expected: Likewise, in float64.
    """
    off = [float((mine.double() - exact).norm()) for mine, exact in zip(found, expected, strict=True)]
    size = [float(exact.norm()) for exact in expected]
    of_parameters = [_relative(*pair) for pair in zip(off, size, strict=True)]
    return Errors(max(of_parameters), _relative(math.hypot(*off), math.hypot(*size)))


def _relative(off: float, size: float) -> float:
    if off == 0:
        return 0.0
    # A maximum would lose NaN.
    return off / size if size > 0 and not math.isnan(off) else math.inf


@dataclass(frozen=True)
class _Case:
    """One way to reduce by a rule."""

    name: str
    reduction: str
    run: Callable[[nn.Module, Given, Look], None]
    exact: bool = True
    window: int = WINDOW


def _cases() -> Iterator[_Case]:
    """Yield all that can be had on the live process group, rule by rule."""
    possible = list(ways(live_places(), nccl=dist.get_backend() == "nccl"))
    for reduction in RULES:
        if reduction == "mean":
            yield _Case("Lightning DDPStrategy", reduction, partial(fit, DDPStrategy))
        yield _ours(reduction)
        yield _ours(reduction, "bucket views", gradient_as_bucket_view=True)
        # The plain mean is summed flat unless told otherwise, all others node by node where that can be.
        its_own = FLAT if reduction == "mean" else NODE_BY_NODE
        for way in possible:
            if way.name != its_own and (way.exact or reduction in ("mean", "weighted_mean")):
                yield _ours(reduction, way.name, exact=way.exact, **way.options)
        if reduction in ("mean", "weighted_mean"):
            for rank in POWER_SGD_RANKS:
                run = partial(fit, partial(hooked, rank, reduction))
                yield _Case(f"GradAvg {reduction}, PowerSGD rank {rank}", reduction, run, exact=False)
        function = partial(average, reduction=reduction)
        yield _Case(f"average_gradients, {reduction}", reduction, function, window=1)
        if reduction in ("mean", "weighted_mean"):
            for dtype in WIRE_TYPES:
                name = f"average_gradients, {reduction}, {dtype} on the wire"
                yield _Case(name, reduction, partial(function, wire_dtype=dtype), exact=False, window=1)


def _ours(reduction: str, name: str = "", *, exact: bool = True, **options: Any) -> _Case:
    strategy = partial(GradAvgStrategy, reduction=reduction, **options)  # type: ignore[arg-type]  # a name of a rule
    return _Case(
        f"GradAvg {reduction}, {name}" if name else f"GradAvg {reduction}", reduction, partial(fit, strategy), exact
    )


class _Worst:
    """What is found of the steps of one case, on this rank and then on all."""

    def __init__(self, expected: Sequence[Gradients]) -> None:
        self._expected = expected
        self._errors: list[Errors] = []
        self._digests: list[str] = []

    def look(self, step: int, gradients: Gradients) -> None:
        self._errors.append(errors_of(gradients, self._expected[step]))
        self._digests.append(_digest(gradients))

    def over_ranks(self, device: torch.device) -> tuple[Errors, bool]:
        """Return the largest errors, and whether all ranks had the same bits."""
        if len(self._errors) != STEPS:
            raise RuntimeError(f"{STEPS} steps were to be made, and {len(self._errors)} were")
        everyone: list[list[str]] = [self._digests] * dist.get_world_size()
        dist.all_gather_object(everyone, self._digests)
        largest = [max(values) for values in zip(*map(astuple, self._errors), strict=True)]
        parameter, whole = slowest(largest, device)
        return Errors(parameter, whole), all(other == self._digests for other in everyone)


def _compare(model: str, world: World, options: argparse.Namespace) -> Iterator[Result]:
    network, given = give(model, world.device)
    of: tuple[str, int] | None = None
    expected: list[Gradients] = []
    cases = list(_cases())
    chosen = [case for case in cases if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in options.only)]
    if not chosen:
        raise ValueError(f"--only={options.only} matches none of {[case.name for case in cases]}")
    for case in chosen:
        if of != (case.reduction, case.window):
            # Two rules' gradients in float64 would be much for a large model.
            expected.clear()
            expected.extend(given.expected(RULES[case.reduction], case.window))
            of = case.reduction, case.window
        worst = _Worst(expected)
        case.run(network, given, worst.look)
        errors, same_bits = worst.over_ranks(world.device)
        yield Result(model, case.name, errors, options.limit if case.exact else None, same_bits)


def _digest(gradients: Gradients) -> str:
    digest = hashlib.sha256()
    for gradient in gradients:
        digest.update(gradient.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _print(results: Sequence[Result], world: World) -> None:
    table = Table(
        title=f"{dist.get_world_size()} ranks on {world.nodes} nodes ({world.device.type}, {dist.get_backend()}):"
        f" reduced gradients against `combine` in float64, {STEPS} steps of {WINDOW} micro-batches",
        caption="relative L2 errors, the largest over ranks and steps",
    )
    table.add_column("model, variant", no_wrap=True)
    for column in ("worst parameter", "all gradients", "same bits on all ranks", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            f"{result.model}, {result.name}",
            f"{result.errors.parameter:.1e}",
            f"{result.errors.whole:.1e}",
            "yes" if result.same_bits else "no",
            "MISSED" if result.missed else "exact" if result.limit is not None else "",
        )
    Console(width=140, markup=False).print(table)


def _save(results: Sequence[Result], world: World, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    about = {
        "world_size": dist.get_world_size(),
        "nodes": world.nodes,
        "backend": dist.get_backend(),
        "torch": torch.__version__,
        "results": [{**asdict(result), "missed": result.missed} for result in results],
    }
    path = output.with_suffix(".json")
    path.write_text(json.dumps(about, indent=1) + "\n")
    Console(markup=False).print(f"saved {path}")


def _rank(given: argparse.Namespace) -> bool:
    """Return whether nothing was missed, the same on all ranks."""
    results = []
    with joined() as world:
        for model in given.models:
            for result in _compare(model, world, given):
                results.append(result)
                if dist.get_rank() == 0:
                    sys.stderr.write(f"{model}: {result.name}\n")
        if dist.get_rank() == 0:
            _print(results, world)
            _save(results, world, given.output)
    return not any(result.missed for result in results)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare as a rank, or start the ranks."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exactness",
        description="Compare reduced gradients with the definition of their rule.",
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=list(MODELS), default=["mlp", "resnet18"], help="(default: mlp resnet18)")
    add("--only", nargs="+", default=["*"], metavar="NAME", help="variants to compare, with wildcards (default: all)")
    add("--limit", type=float, default=LIMIT, help=f"of rules that are sent in float32 (default: {LIMIT:g})")
    add("--ranks", type=int, default=2, help="ranks on this machine, where torchrun did not start them (default: 2)")
    add("--output", type=Path, default=Path("benchmarks/results/exactness"), help="file to write, without its ending")
    given = parser.parse_args(arguments)
    if given.ranks < 1:
        parser.error(f"--ranks is 1 or more; got {given.ranks}")
    if not is_rank():
        start("benchmarks.exactness", given.ranks, sys.argv[1:] if arguments is None else arguments)
    elif not _rank(given):
        sys.exit(1)


if __name__ == "__main__":
    main()
