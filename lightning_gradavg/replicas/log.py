"""What replicas log in a training step, as one: one value per name and batch, that of all replicas of all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
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

__all__ = ["LogExchange", "ReplicaLog", "with_sync_dist"]


def with_sync_dist(arguments: dict[str, object]) -> dict[str, object]:
    """Return the arguments of `log` for a value over all ranks, as one process logs it without `sync_dist=True`, too.

    A value with `rank_zero_only=True` stays that of rank 0.
    """
    changed = dict(arguments)
    changed["sync_dist"] = not arguments.get("rank_zero_only", False)
    if not arguments.get("sync_dist", False):
        # Lightning ignores a group without sync_dist=True, so the value is one over all ranks.
        changed.pop("sync_dist_group", None)
    return changed


class Entry(NamedTuple):
    """How a name was logged. Ranks send it by pickle, so it is plain data: a process group cannot be pickled."""

    name: str
    reduction: str  # "mean", "sum", "max" or "min"
    dtype: torch.dtype  # of the value that Lightning gets
    shared: bool  # whether it is the value of several ranks
    ranks: tuple[int, ...] | None  # those that share it: of `sync_dist_group`, or None for all
    options: tuple[tuple[str, object], ...]  # the other arguments of `log`


class LoggedValue(NamedTuple):
    """What was logged under a name."""

    entry: Entry
    value: Tensor  # in float64, 0-dim
    size: float  # the samples, or the `batch_size`, that it stands for; 0 if it does not count


def _merge(values: Sequence[LoggedValue]) -> LoggedValue:
    """Merge values that were logged under one name. Those of size 0 do not count, even if they are NaN."""
    counted = [value for value in values if value.size > 0]
    if not counted:
        return values[0]
    if len(counted) == 1:
        return counted[0]
    reduction = counted[0].entry.reduction
    numbers = torch.stack([value.value for value in counted])
    sizes = [value.size for value in counted]
    if reduction == "mean":
        weights = numbers.new_tensor(sizes)
        merged = (numbers * weights).sum() / weights.sum()
    elif reduction == "sum":
        merged = numbers.sum()
    elif reduction == "max":
        merged = numbers.max()
    else:
        assert reduction == "min"
        merged = numbers.min()
    return counted[0]._replace(value=merged, size=sum(sizes))


class ReplicaLog:
    """Collects what `self.log` is given in a training step, and logs each name once per batch.

    A mean is weighted by the replicas' samples, or the `batch_size` that was given. With `sync_dist=True`, or `whole`,
    a value is that of the replicas of all ranks (of `sync_dist_group`, if one is given), also on a rank that has not
    logged the name. What stands for no samples is not logged, even if it is NaN.

    `Replicas` makes one for a run. In each step it enters `collecting` around all pieces, and sets `samples` before
    each piece.

    Attributes:
        samples: Number of samples that the values logged from now on stand for; 0 if they do not count.
    """

    def __init__(self, module: LightningModule, world: World, *, whole: bool) -> None:
        """Collect what a module logs.

        Args:
            module: The module that trains.
            world: The ranks of the run.
            whole: Whether every value is one over all ranks, also without `sync_dist=True`.
        """
        self.samples = 0
        self._module = module
        self._world = world
        self._whole = whole
        self._exchange = LogExchange(world) if world.size > 1 else None
        self._collected = defaultdict[str, list[LoggedValue]](list)  # in the running step, by name

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect within the context, and log at its end. A collective operation (see `LogExchange`)."""
        self._collected.clear()
        with logged_as(self._module, self._collect):
            yield
        merged = {name: _merge(values) for name, values in self._collected.items()}
        if self._exchange is not None:
            shared = [value for value in merged.values() if value.entry.shared]
            merged.update(self._exchange.merge_over_ranks(shared, self._module.device))
        for value in merged.values():
            if value.size > 0:
                self._log(value)

    def _collect(self, arguments: dict[str, object]) -> dict[str, object] | None:
        """Collect a value given to `log`; return the arguments instead if Lightning is to log them now."""
        if self._whole:
            arguments = with_sync_dist(arguments)
        value = arguments["value"]
        reduction = reduction_name(arguments)
        if reduction is None or not isinstance(value, (Tensor, Number)):
            return arguments  # what Lightning refuses, or a metric, which gathers its own states
        value = torch.as_tensor(value, device=self._module.device).detach()
        if value.numel() != 1:
            return arguments  # Lightning refuses it
        entry = self._entry(arguments, reduction, value.dtype)
        size = self._size(arguments, reduction)
        self._collected[entry.name].append(LoggedValue(entry, value.double().reshape(()), size))
        return None

    def _entry(self, arguments: Mapping[str, Any], reduction: str, dtype: torch.dtype) -> Entry:
        shared = bool(arguments.get("sync_dist", False)) and not arguments.get("rank_zero_only", False)
        ranks = None
        group = arguments.get("sync_dist_group")
        if shared and group is not None:
            ranks = self._ranks_of(group)
        if not dtype.is_floating_point:
            dtype = torch.get_default_dtype()  # as Lightning converts a number that it logs
        fields = {"name", "value", "reduce_fx", "batch_size", "sync_dist_group"}
        options = sorted((name, option) for name, option in arguments.items() if name not in fields)
        return Entry(arguments["name"], reduction, dtype, shared, ranks, tuple(options))

    def _ranks_of(self, group: Any) -> tuple[int, ...]:
        """Return the ranks that share a value logged with a `sync_dist_group`."""
        if self._world.size == 1:
            return (self._world.rank,)
        # What `new_group` returns to processes that it leaves out. They share their value with nobody.
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return (self._world.rank,)
        return tuple(dist.get_process_group_ranks(group))

    def _size(self, arguments: Mapping[str, Any], reduction: str) -> float:
        """Return how many samples a value stands for."""
        batch_size = arguments.get("batch_size")
        if self.samples == 0 or batch_size is None or reduction != "mean":
            return float(self.samples)
        return float(batch_size)

    def _log(self, value: LoggedValue) -> None:
        """Have Lightning log a merged value."""
        entry = value.entry
        device = self._module.device
        options: dict[str, Any] = dict(entry.options)
        if entry.shared and self._exchange is not None:
            # It is the value of all ranks already, and Lightning reduces no value with rank_zero_only=True.
            options["rank_zero_only"] = True
        # Float64, as Lightning adds up the sizes of an epoch. `full` fills it on the device, while the host would wait
        # for a copy.
        options["batch_size"] = torch.full((), value.size, dtype=torch.float64, device=device)
        number = on_device(value.value, device).to(entry.dtype)
        self._module.log(name=entry.name, value=number, reduce_fx=entry.reduction, **options)


_EXACT = 2**53  # float64 holds every integer below
_LINES = 16  # of a table that fits into the first rows
_MOST_TABLES = 1000  # that are remembered; ranks that log other names in each step would fill the memory
_RUNS = count()
"""Numbers the runs of this process, so that no run reads what an earlier one left in the store."""


class Expectation(Enum):
    """In which steps the ranks expect each other to exchange. `LogExchange` has the table."""

    NEXT_STEP = "in the next step"
    NOT = "in no step, until a rank logs something"
    ALWAYS = "in every step from now on"


class _Row(NamedTuple):
    """What a rank sends in a step: the digest and the length of its table, and the table's sizes and values.

    It travels as float64: digest, length, sizes, values. Sizes and values are padded with zeros to the same number of
    lines on all ranks. They are all zeros if the table is longer than that.
    """

    digest: float
    length: int
    sizes: list[float]
    values: list[float]


class LogExchange:
    """Exchanges what the ranks log in a training step: numbers, and names only where ranks differ in them.

    A rank's *table* of a step lists the entries that it has logged and that are `shared`, sorted by name, also where
    they do not count. All ranks call `merge_over_ranks` in every training step:

    1. A rank whose table is empty sends nothing and waits for nobody, unless an exchange is expected. It writes the
       number of the step into the store of the process group, which takes some microseconds.
    2. Any other rank sends one row of numbers: the digest and the length of its table, and the values and their sizes.
       If a table is longer than the rows, all ranks see that, and send longer rows, in this step and all later ones.
    3. If the digests are equal, so are the tables, and nothing else is sent. If not, each rank looks up the others'
       tables by their digests among those that were sent before. Only if one is missing, all ranks send their tables,
       by pickle.
    4. Each rank merges the values that the ranks have logged for it, name by name, in rank order.

    Whether an exchange is expected in a step follows from who has logged something:

    | who                                            | expectation |
    |------------------------------------------------|-------------|
    | nobody yet: it is the first step of a run      | `NEXT_STEP` |
    | no rank in the step before                     | `NOT`       |
    | all ranks in the step before                   | `NEXT_STEP` |
    | some ranks but not others, in any earlier step | `ALWAYS`    |

    So a rank can begin to log without the others only where the expectation is `NOT`. It would wait for ranks that
    never come. While it waits, it looks in the store for ranks that have passed the step, and raises.

    Expectation, known tables and length of the rows are the same on all ranks: they follow from what all have seen.
    """

    def __init__(self, world: World) -> None:
        """Begin to exchange among ranks; all of them make their exchanges in the same order."""
        self._world = world
        self._store = dist.PrefixStore(f"lightning_gradavg/log/{next(_RUNS)}", store_of_world())
        self._step = 0
        self._lines = _LINES
        self._tables = dict[float, list[Entry]]()  # that were sent, by digest
        self._expectation = Expectation.NEXT_STEP

    def merge_over_ranks(self, logged: Sequence[LoggedValue], device: torch.device) -> dict[str, LoggedValue]:
        """Return the values of all ranks by name, on the CPU. A collective operation, as the class says."""
        self._step += 1
        if not logged and self._expectation is Expectation.NOT:
            self._store.set(str(self._world.rank), str(self._step))
            return {}
        values = sorted(logged, key=lambda value: value.entry.name)
        rows = self._gather_rows(values, device)
        longest = max(row.length for row in rows)
        if longest > self._lines:
            self._lines = longest
            rows = self._gather_rows(values, device)
        self._update_expectation([row.length for row in rows])
        tables = self._tables_of_ranks([value.entry for value in values], [row.digest for row in rows])

        values_of_ranks = defaultdict[str, list[LoggedValue]](list)
        for row, table in zip(rows, tables, strict=True):
            # The row may be longer than the table.
            for entry, value, size in zip(table, row.values, row.sizes, strict=False):
                if entry.ranks is None or self._world.rank in entry.ranks:
                    number = torch.tensor(value, dtype=torch.float64)
                    values_of_ranks[entry.name].append(LoggedValue(entry, number, size))
        return {name: _merge(values) for name, values in values_of_ranks.items()}

    def _gather_rows(self, logged: Sequence[LoggedValue], device: torch.device) -> list[_Row]:
        """Return the rows of all ranks. A collective operation."""
        length = len(logged)
        sizes = slice(2, 2 + self._lines)
        values = slice(2 + self._lines, 2 + 2 * self._lines)
        row = torch.zeros(2 + 2 * self._lines, dtype=torch.float64)
        row[0] = digest(repr([value.entry for value in logged])) % _EXACT
        row[1] = length
        has_numbers = 0 < length <= self._lines
        if has_numbers:
            row[sizes][:length] = torch.tensor([value.size for value in logged], dtype=torch.float64)
        row = on_device(row, device)
        if has_numbers:
            row[values][:length] = torch.stack([value.value for value in logged])  # on the device: no host waits
        while_waiting = None
        if length > 0 and self._expectation is Expectation.NOT:
            while_waiting = self._require_other_ranks
        with torch.profiler.record_function("GradAvg: exchange logged values"):
            rows = self._world.gather_row(row, while_waiting)
        return [_Row(numbers[0], int(numbers[1]), numbers[sizes], numbers[values]) for numbers in rows]

    def _update_expectation(self, lengths: Sequence[int]) -> None:
        """Note in which steps the ranks exchange from now on, by the lengths of their tables in this step."""
        if self._expectation is Expectation.ALWAYS:
            return
        if max(lengths) == 0:
            self._expectation = Expectation.NOT
        elif min(lengths) == 0:
            self._expectation = Expectation.ALWAYS
        else:
            self._expectation = Expectation.NEXT_STEP

    def _require_other_ranks(self) -> None:
        """Raise a RuntimeError if a rank has passed this step, where no exchange was expected. Called while waiting."""
        passed = [rank for rank in range(self._world.size) if self._has_passed(rank)]
        if passed:
            raise RuntimeError(
                f"rank {self._world.rank} begins to log values of all ranks in a training step in which nothing is"
                f" logged {on_ranks(passed)}, and nobody waits for it there. Under equivalent_to=, each value that is"
                " logged in a step is that of all ranks. Log on all ranks, or on none, in each step; or log what only"
                " some ranks have beside a value that all ranks log; or pass rank_zero_only=True."
            )

    def _has_passed(self, rank: int) -> bool:
        """Return whether a rank has written that it logs nothing in this step, or a later one."""
        key = str(rank)
        return self._store.check([key]) and int(self._store.get(key)) >= self._step

    def _tables_of_ranks(self, table: list[Entry], digests: Sequence[float]) -> list[list[Entry]]:
        """Return the tables of all ranks. A collective operation where one is not known."""
        if len(set(digests)) == 1:
            return [table] * self._world.size
        if not self._tables.keys() >= set(digests):
            if len(self._tables) > _MOST_TABLES:
                self._tables.clear()
            self._tables.update(zip(digests, self._world.gather_objects(table), strict=True))
        return [self._tables[table_digest] for table_digest in digests]
