"""A world of ranks, and the small exchanges by which all of them see the same, or the same error."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_gradavg._support.place import Place, node_from_environment, places_on_nodes

__all__ = ["Agreed", "Contribution", "World", "by_value", "digest", "on_ranks", "ranks_by_value"]

_EXACT = 2**53  # integers below are float64
_RANKS_SHOWN = 8
_NUMBERS = 13  # of a contribution, that travel with its head: the rows of all calls have one length
_POLL_SECONDS = 0.001
_SETTLE_SECONDS = 0.1  # a thread needs microseconds; on a crowded machine its turn


@lru_cache
def _end_in_order() -> None:
    """Have gloo's threads free their tensors, and the process group end, before the interpreter does.

    A thread that still waits for the interpreter then aborts the process: "terminate called without an active
    exception", exit code 134, in 2 of 25 short runs on torch 2.13.
    """
    atexit.register(_end)


def _end() -> None:
    time.sleep(_SETTLE_SECONDS)
    if dist.is_initialized() and "nccl" not in dist.get_backend_config():  # whose end may wait for the other ranks
        dist.destroy_process_group()


class Contribution(NamedTuple):
    """What a rank brings to a collective call.

    Attributes:
        equal: What must be equal on all ranks, line by line.
        details: Integers that may differ, the same number on all ranks.
        weight: The weight of its loss.
        node: Its node; 0 where nobody counts nodes.
        tensors: Its tensors, which no other rank reads, by what messages call them.
        numbers: Numbers that may differ, as many on all ranks where `equal` is.
    """

    equal: Sequence[str] = ()
    details: Sequence[int] = ()
    weight: float = 1.0
    node: int = 0
    tensors: Mapping[str, torch.Tensor] = MappingProxyType({})
    numbers: Sequence[float] = ()


class Agreed(NamedTuple):
    """What every rank brings, in rank order."""

    nodes: list[int]
    weights: list[float]
    details: Sequence[Sequence[int]]
    numbers: Sequence[Sequence[float]]


@dataclass(frozen=True)
class World:
    """The ranks that do something together. The group of a rank that is alone is None."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> World:
        """Return the world of a process group (None: the default one), or raise a ValueError about `group`."""
        if group is None and not dist.is_initialized():
            return cls()
        left_out: object = dist.GroupMember.NON_GROUP_MEMBER  # what new_group returns to processes that it leaves out
        if group is left_out:
            raise ValueError(
                f"the process of global rank {dist.get_rank()} is not a member of the group: only members may reduce"
                " over it. Pass a group that this process belongs to."
            )
        group = group or dist.group.WORLD
        size = dist.get_world_size(group)
        if size > 1:
            _end_in_order()
        return cls(group if size > 1 else None, dist.get_rank(group), size)

    def gather_integers(self, row: Sequence[int]) -> list[list[int]]:
        """Return every rank's row in rank order. All rows are of one length."""
        return self._gather(torch.tensor(row, dtype=torch.int64))

    def gather_floats(self, row: Sequence[float]) -> list[list[float]]:
        """Return every rank's row of float64 in rank order. All rows are of one length."""
        return self._gather(torch.tensor(row, dtype=torch.float64))

    def gather_row(self, row: torch.Tensor, meanwhile: Callable[[], None] | None = None) -> list[list[float]]:
        """Return every rank's row of float64, from any device, in rank order. All rows are of one length.

        While other ranks have not come yet, call `meanwhile`, which may raise if they never will.
        """
        return self._gather(row, meanwhile)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's value in rank order. Slow: for setup and messages."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        with torch.profiler.record_function("GradAvg: exchange objects"):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(
        self, refusal: str, contribute: Callable[[], Contribution], error_type: type[Exception] = ValueError
    ) -> tuple[Contribution, Agreed]:
        """Return what this rank and all others bring to a collective call.

        If `contribute` raises on any rank, or what must be equal differs, all ranks raise one error with a refusal.
        """
        mine, error, row = Contribution(), None, [True, 0.0, 0.0, 0.0, 0.0, *_padded(())]
        try:
            mine = contribute()
            row = [
                False,
                *(digest(repr(each)) % _EXACT for each in (mine.equal, mine.details)),
                mine.node,
                mine.weight,
                *_padded(mine.numbers[:_NUMBERS]),
            ]
        except Exception as failure:  # noqa: BLE001  # the other ranks wait for this one
            error = failure
        failed, calls, details, nodes, weights, *columns = map(list, zip(*self.gather_floats(row), strict=True))
        if any(failed):
            texts = ranks_by_value(self.gather_objects(error and _text(error))).items()
            told = "; ".join(f"{on_ranks(ranks)}: {text}" for text, ranks in texts if text is not None)
            raise error_type(f"{refusal}, {told.rstrip('.')}.") from error
        if len(set(calls)) > 1:
            lines = zip_longest(*self.gather_objects(mine.equal), fillvalue="nothing")
            first = next(of_ranks for of_ranks in lines if len(set(of_ranks)) > 1)
            raise error_type(f"{refusal}: {by_value(first)}. Pass the same, in the same order, on all ranks.")
        of_ranks = [mine.details] * self.size if len(set(details)) == 1 else self.gather_integers(mine.details)
        count = len(mine.numbers)
        numbers = [list(of_rank[:count]) for of_rank in zip(*columns, strict=True)]
        if count > _NUMBERS:  # on all ranks, as they agree
            more = self.gather_floats(mine.numbers[_NUMBERS:])
            numbers = [[*first, *rest] for first, rest in zip(numbers, more, strict=True)]
        return mine, Agreed([int(node) for node in nodes], weights, of_ranks, numbers)

    def from_first(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        if self.group is None:
            return value
        values = [value]
        with torch.profiler.record_function("GradAvg: exchange objects"):
            dist.broadcast_object_list(values, dist.get_global_rank(self.group, 0), group=self.group)
        return values[0]

    def nodes(self, why: str) -> list[int]:
        """Return the node of every rank, as the launcher counts them."""
        return self.agree(f"{why}, but cannot", lambda: Contribution(node=node_from_environment()))[1].nodes

    def places(self, node: int) -> tuple[Place, ...]:
        """Return the places of all ranks, each bringing the node that it runs on."""
        return places_on_nodes(self.gather_objects(node))

    def _gather(self, row: torch.Tensor, meanwhile: Callable[[], None] | None = None) -> list[Any]:
        if self.group is None:
            return [row.tolist()]
        # By the group, which all ranks share: their parameters may differ.
        types = [entry.split(":")[0] for entry in dist.get_backend_config(self.group).split(",")]
        mine = row.to("cpu" if "cpu" in types else types[0])
        rows = mine.new_empty(self.size, len(row))
        with torch.profiler.record_function("GradAvg: exchange numbers"):
            work = dist.all_gather(list(rows.unbind()), mine, group=self.group, async_op=True)
            while meanwhile is not None and not work.is_completed():
                meanwhile()
                time.sleep(_POLL_SECONDS)
            work.wait()
            return rows.tolist()


def _padded(numbers: Sequence[float]) -> list[float]:
    return [*numbers, *[0.0] * (_NUMBERS - len(numbers))]


def ranks_by_value(values: Iterable[object]) -> dict[object, list[int]]:
    """Return the ranks that hold each value: {a: [0], b: [1, 2]} for the values a, b, b of three ranks."""
    ranks: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def by_value(values: Iterable[object]) -> str:
    """Return "a on rank 0; b on ranks 1, 2" for the values a, b, b of three ranks."""
    return "; ".join(f"{value} {on_ranks(ranks)}" for value, ranks in ranks_by_value(values).items())


def on_ranks(ranks: Sequence[int]) -> str:
    """Return "on rank 0" or "on ranks 1, 2"; a long list is shortened."""
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
    more = f" and {len(ranks) - _RANKS_SHOWN} more" if len(ranks) > _RANKS_SHOWN else ""
    return f"on rank{'s' * (len(ranks) > 1)} {shown}{more}"


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, (TypeError, ValueError)) else f"{type(error).__name__}: {error}"


def digest(text: str) -> int:
    """Return 64 bits that stand for a text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
