"""Ranks simulated one after another in one process: what they would exchange is recorded, then replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import orders

from lightning_gradavg.batches.chunks import Chunk, Split
from lightning_gradavg.batches.loader import SplitLoader
from lightning_gradavg.ranks import World


@dataclass
class Rank:
    """One rank: how it splits batches, and with whom."""

    split: Split
    world: Any = field(default_factory=World)

    def load(self, loader: Any) -> SplitLoader:
        return SplitLoader(loader, self.split, self.world)


def in_one_world(loader: Any, **options: Any) -> SplitLoader:
    """Return a loader split for one rank that nobody compares with others."""
    return Rank(Split(**options)).load(loader)


Body = Callable[[Rank], Any]


class Taken(NamedTuple):
    """One micro-batch in training."""

    batch: Any
    chunk: Chunk


class _Exchange:
    """Runs a body on every rank: once to record all comparisons, and again where one of them fails."""

    def __init__(self, world_size: int, options: dict[str, Any], seeds: Sequence[int]) -> None:
        self.world_size, self.options, self.seeds = world_size, options, seeds
        self.sent: list[Any] = []
        self.compared: list[list[int]] = [[] for _ in range(world_size)]

    def rank(self, rank: int, verdicts: Sequence[bool] | None) -> Rank:
        received = iter(self.sent)
        count = iter(range(10**9))

        def from_first(value: Any) -> Any:
            if rank == 0:
                if verdicts is None:
                    self.sent.append(value)
                return value
            return next(received)

        def gather_integers(row: list[int]) -> list[list[int]]:
            if verdicts is not None:
                return [row, row if verdicts[next(count)] else []]
            self.compared[rank].append(row[0])
            return [row, row]

        world = SimpleNamespace(rank=rank, size=self.world_size, from_first=from_first, gather_integers=gather_integers)
        return Rank(Split(rank, self.world_size, **self.options), world)

    def run(self, body: Body, verdicts: Sequence[bool] | None = None) -> list[Any]:
        results = []
        for rank in range(self.world_size):
            orders.seed(self.seeds[rank])
            try:
                results.append(body(self.rank(rank, verdicts)))
            except Exception as error:  # noqa: BLE001  # the other ranks run, too
                results.append(error)
        return results


def on_ranks(
    world_size: int,
    body: Body,
    seeds: Sequence[int] | None = None,
    *,
    fails: bool = False,
    **options: Any,
) -> list[Any]:
    """Return what `body(rank)` returns, or how it fails, on every rank, each with its own random state.

    The test fails where the ranks would not come to every comparison together: real ones would wait forever.
    """
    exchange = _Exchange(world_size, options, seeds or [7 + rank for rank in range(world_size)])
    results = exchange.run(body)
    verdicts = []
    for met in range(max(map(len, exchange.compared))):
        values = {compared[met] if met < len(compared) else None for compared in exchange.compared}
        assert None not in values, f"only some ranks come to comparison {met}"
        verdicts.append(len(values) == 1)
        if not verdicts[-1]:
            results = exchange.run(body, verdicts)
            break
    for result in results:
        if isinstance(result, Exception) and not fails:
            raise result
    return results


def take_all(loader: SplitLoader) -> list[Taken]:
    """Return one epoch of micro-batches."""
    return [Taken(batch, behind.chunk) for batch, behind in loader.begin().items]
