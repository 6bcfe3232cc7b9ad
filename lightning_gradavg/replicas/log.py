"""What replicas log in a training step, as one: one value per name and batch, that of all replicas of all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from numbers import Number
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_gradavg._lightning.internals import store_of_world
from lightning_gradavg._lightning.methods import logged_as
from lightning_gradavg._lightning.stand_in import reduction_name
from lightning_gradavg._support.collectives import World, digest
from lightning_gradavg._support.device import on_device
from lightning_gradavg._support.text import on_ranks

__all__ = ["LogExchange", "ReplicaLog", "of_whole_run"]


def of_whole_run(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what `log` was given, for a value over all ranks even without `sync_dist=True`, as on one process."""
    changed = {**arguments, "sync_dist": not arguments.get("rank_zero_only", False)}
    if not arguments.get("sync_dist", False):
        changed.pop("sync_dist_group", None)  # which means nothing then
    return changed


_COMBINED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda values, sizes: (values * sizes).sum() / sizes.sum(),
    "sum": lambda values, _: values.sum(),
    "max": lambda values, _: values.max(),
    "min": lambda values, _: values.min(),
}
"""Several values as one, by how `log` puts values together, with how much each of them stands for."""


class Entry(NamedTuple):
    """How a name was logged. It is plain data that ranks can send: a process group cannot be pickled."""

    name: str
    reduction: str  # a name in `_COMBINED`
    dtype: torch.dtype  # the type that the value had
    shared: bool  # whether it is the value of several ranks
    ranks: tuple[int, ...] | None  # those that share it: of `sync_dist_group`, or None for all
    options: tuple[tuple[str, Any], ...]  # the other arguments of `log`


class Logged(NamedTuple):
    """What a name was logged with."""

    entry: Entry
    value: Tensor  # in float64
    size: float  # the samples, or the `batch_size`, that it stands for; 0 if it does not count


def _combined(parts: Sequence[Logged]) -> Logged:
    """Return parts that were logged under one name as one; those of size 0 do not count, be they NaN."""
    counted = [part for part in parts if part.size > 0]
    if not counted:
        return parts[0]
    if len(counted) == 1:
        return counted[0]
    values = torch.stack([part.value for part in counted])
    sizes = [part.size for part in counted]
    combine = _COMBINED[counted[0].entry.reduction]
    return counted[0]._replace(value=combine(values, values.new_tensor(sizes)), size=sum(sizes))


class ReplicaLog:
    """Collects what `self.log` is given in a step, and logs it once per batch.

    A mean is weighted by the replicas' samples, or the `batch_size` that was given. With `sync_dist=True`, or `whole`,
    a value is that of the replicas of all ranks (of `sync_dist_group`, if one is given), also on a rank that has not
    logged the name. What stands for no samples is not logged, be it NaN.
    """

    def __init__(self, module: LightningModule, world: World, *, whole: bool) -> None:
        self._module, self._world, self._whole = module, world, whole
        self._parts = defaultdict[str, list[Logged]](list)
        self._exchange = LogExchange(world) if world.size > 1 else None
        self.samples = 0  # of what is logged now; 0 if they do not count

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect within the context, and log what came at its end. A collective operation (see `LogExchange`)."""
        self._parts.clear()
        with logged_as(self._module, self._collect):
            yield
        logged = {name: _combined(parts) for name, parts in self._parts.items()}
        if self._exchange is not None:
            shared = [part for part in logged.values() if part.entry.shared]
            logged.update(self._exchange.of_all_ranks(shared, self._module.device))
        for part in logged.values():
            if part.size > 0:
                self._log(part)

    def _collect(self, arguments: dict[str, Any]) -> dict[str, Any] | None:
        if self._whole:
            arguments = of_whole_run(arguments)
        value, reduction = arguments["value"], reduction_name(arguments)
        if reduction is None or not isinstance(value, (Tensor, Number)):
            return arguments  # a metric, which is reduced by itself, or what Lightning refuses
        value = torch.as_tensor(value, device=self._module.device).detach()
        if value.numel() != 1:
            return arguments
        entry = self._entry(arguments, reduction, value.dtype)
        self._parts[entry.name].append(Logged(entry, value.double().reshape(()), self._size(arguments, reduction)))
        return None

    def _entry(self, arguments: Mapping[str, Any], reduction: str, dtype: torch.dtype) -> Entry:
        shared = arguments.get("sync_dist", False) and not arguments.get("rank_zero_only", False)
        group = arguments.get("sync_dist_group")
        ranks = None if group is None or not shared else self._ranks_of(group)
        apart = {"name", "value", "reduce_fx", "batch_size", "sync_dist_group"}
        options = tuple(sorted((name, option) for name, option in arguments.items() if name not in apart))
        kept = dtype if dtype.is_floating_point else torch.get_default_dtype()
        return Entry(arguments["name"], reduction, kept, bool(shared), ranks, options)

    def _ranks_of(self, group: Any) -> tuple[int, ...]:
        # What `new_group` returns to processes that it leaves out; they have no value but their own.
        if group is dist.GroupMember.NON_GROUP_MEMBER or self._world.size == 1:
            return (self._world.rank,)
        return tuple(dist.get_process_group_ranks(group))

    def _size(self, arguments: Mapping[str, Any], reduction: str) -> float:
        """Return how much a value stands for."""
        given = arguments.get("batch_size")
        if self.samples == 0 or given is None or reduction != "mean":
            return float(self.samples)
        return float(given)

    def _log(self, part: Logged) -> None:
        entry, device = part.entry, self._module.device
        options: dict[str, Any] = dict(entry.options)
        if entry.shared and self._exchange is not None:
            options["rank_zero_only"] = True  # Lightning then leaves the value as it is
        value = on_device(part.value, device).to(entry.dtype)
        # In float64, as sizes add up over an epoch; filled, as the host would wait for a copy.
        options["batch_size"] = torch.full((), part.size, dtype=torch.float64, device=device)
        self._module.log(name=entry.name, value=value, reduce_fx=entry.reduction, **options)


_EXACT = 2**53  # integers below are float64
_LINES = 16  # of a table that fits into the first rows
_MOST_TABLES = 1000  # ranks that log other names in each step would send more and more
_RUNS = count()
"""Numbers the runs of this process, so that nobody reads in the store what was left there in an earlier one."""


class _Row(NamedTuple):
    """What a rank sends in a step. Behind its own values and sizes there may be zeros."""

    digest: float
    length: int
    sizes: list[float]
    values: list[float]


class LogExchange:
    """Exchanges what the ranks of a run log in a training step: numbers; names where the ranks differ in them.

    A rank's *table* of a step lists how it has logged what is `shared`, sorted by name, also where it does not count.
    In every training step, on every rank:

    1. A rank whose table is empty sends nothing and waits for nobody, unless an exchange is *expected*. It leaves the
       number of the step in the store of the process group, which takes some microseconds.
    2. Any other rank sends one row of numbers: the digest and the length of its table, and the values and their sizes.
       If a table is longer than the rows, all ranks see that, and send longer ones, in this step and all later ones.
    3. If the digests are equal, so are the tables, and nothing else is sent. If not, each rank looks up the others'
       tables by their digests among those that were sent before. Only if one is missing, all ranks send their tables,
       by pickle.
    4. Each rank puts together the values that the ranks have logged for it, name by name, in rank order.
    5. An exchange is expected in the first step of a run, and in the step after one in which any rank has logged
       something. From a step on in which some ranks have logged something and others have not, it is expected always.
    6. So only where nobody has logged for a while, a rank can begin to log without the others. It would wait for ranks
       that never come: while it waits, it looks in the store for ranks that have gone on, and raises.

    What is expected, known, and how long rows are, is the same on all ranks, as it follows from what all have seen.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._store = dist.PrefixStore(f"lightning_gradavg/log/{next(_RUNS)}", store_of_world())
        self._step = 0
        self._lines = _LINES
        self._tables = dict[float, list[Entry]]()
        self._expected = True
        self._differs = False  # whether some ranks have logged something in a step, and others nothing

    def of_all_ranks(self, logged: Sequence[Logged], device: torch.device) -> dict[str, Logged]:
        """Return the values of all ranks by name, on the CPU. A collective operation, as the class says."""
        self._step += 1
        if not logged and not self._expected:
            self._store.set(str(self._world.rank), str(self._step))
            return {}
        mine = sorted(logged, key=lambda part: part.entry.name)
        table = [part.entry for part in mine]
        rows = self._rows(mine, device)
        longest = max(row.length for row in rows)
        if longest > self._lines:
            self._lines = longest
            rows = self._rows(mine, device)
        self._expect([row.length for row in rows])
        tables = self._tables_of_ranks(table, [row.digest for row in rows])
        parts = defaultdict[str, list[Logged]](list)
        for row, entries in zip(rows, tables, strict=True):
            for entry, value, size in zip(entries, row.values, row.sizes, strict=False):  # the row may be longer
                if entry.ranks is None or self._world.rank in entry.ranks:
                    parts[entry.name].append(Logged(entry, torch.tensor(value, dtype=torch.float64), size))
        return {name: _combined(of_ranks) for name, of_ranks in parts.items()}

    def _rows(self, logged: Sequence[Logged], device: torch.device) -> list[_Row]:
        """Return the rows of all ranks. A collective operation."""
        length = len(logged)
        head = [float(digest(repr([part.entry for part in logged])) % _EXACT), float(length)]
        row = torch.zeros(len(head) + 2 * self._lines, dtype=torch.float64)
        row[: len(head)] = torch.tensor(head, dtype=torch.float64)
        sizes = slice(len(head), len(head) + self._lines)
        values = slice(sizes.stop, None)
        if 0 < length <= self._lines:
            row[sizes][:length] = torch.tensor([part.size for part in logged], dtype=torch.float64)
        row = on_device(row, device)
        if 0 < length <= self._lines:
            row[values][:length] = torch.stack([part.value for part in logged])
        begins = length > 0 and not self._expected
        with torch.profiler.record_function("GradAvg: exchange logged values"):
            rows = self._world.gather_row(row, self._require_company if begins else None)
        return [_Row(one[0], int(one[1]), one[sizes], one[values]) for one in rows]

    def _expect(self, lengths: Sequence[int]) -> None:
        """Note whether an exchange is expected in the next step."""
        if 0 == min(lengths) < max(lengths):
            self._differs = True
        self._expected = self._differs or max(lengths) > 0

    def _require_company(self) -> None:
        """Raise a RuntimeError if a rank has logged nothing in this step, where no exchange was expected."""
        absent = [rank for rank in range(self._world.size) if self._has_passed(rank)]
        if absent:
            raise RuntimeError(
                f"rank {self._world.rank} begins to log values of all ranks in a training step in which nothing is"
                f" logged {on_ranks(absent)}, and nobody waits for it there. Under equivalent_to=, each value that is"
                " logged in a step is that of all ranks. Log on all ranks, or on none, in each step; or log what only"
                " some ranks have beside a value that all ranks log; or pass rank_zero_only=True."
            )

    def _has_passed(self, rank: int) -> bool:
        """Return whether a rank has left word that it logs nothing in this step."""
        key = str(rank)
        return self._store.check([key]) and int(self._store.get(key)) >= self._step

    def _tables_of_ranks(self, table: list[Entry], digests: Sequence[float]) -> list[list[Entry]]:
        """Return the tables of all ranks. A collective operation where one is not known to all."""
        if len(set(digests)) == 1:
            return [table] * self._world.size
        if not self._tables.keys() >= set(digests):
            if len(self._tables) > _MOST_TABLES:
                self._tables.clear()
            self._tables.update(zip(digests, self._world.gather_objects(table), strict=True))
        return [self._tables[of_rank] for of_rank in digests]
