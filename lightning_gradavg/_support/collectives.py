"""A world of ranks, and the small exchanges by which all of them see the same, or the same error.

Nothing here moves gradients; `reduction/` does that. Each exchange is a collective operation: all ranks of the world
call it, in the same order.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gradavg._support.device import beside, on_device
from lightning_gradavg._support.place import Place, node_from_environment, places_on_nodes
from lightning_gradavg._support.text import by_value, message_of, on_ranks, ranks_by_value

__all__ = [
    "Agreed",
    "Agreement",
    "Contribution",
    "ReducedRow",
    "World",
    "backend_of",
    "digest",
]

_T = TypeVar("_T")

_EXACT_INTEGERS = 2**53
"""Float64 holds all integers below this one exactly."""
_NUMBERS_IN_HEAD = 13
"""So many numbers of a contribution travel with its head. The heads of all calls have one length, so that ranks which
make different calls exchange rows of one length, and see that they differ."""
_POLL_SECONDS = 0.001
_SETTLE_SECONDS = 0.1  # a thread needs microseconds; on a crowded machine its turn


@lru_cache  # a process registers it once
def _end_group_before_interpreter() -> None:
    """Have gloo's threads free their tensors, and the process group end, before the interpreter does.

    A thread that still waits for the interpreter then aborts the process: "terminate called without an active
    exception", exit code 134, in 2 of 25 short runs on torch 2.13.
    """
    atexit.register(_end_group)


def _end_group() -> None:
    # gloo's threads free the tensors of the last exchange meanwhile, for which they need the interpreter.
    time.sleep(_SETTLE_SECONDS)
    if not dist.is_initialized():
        return
    # The end of an NCCL group may wait for the other ranks.
    if "nccl" not in dist.get_backend_config():
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
    tensors: Mapping[str, Tensor] = MappingProxyType({})
    numbers: Sequence[float] = ()


class Agreed(NamedTuple):
    """What every rank brings, in rank order."""

    nodes: list[int]
    weights: list[float]
    details: Sequence[Sequence[int]]
    numbers: Sequence[Sequence[float]]


class Agreement(NamedTuple):
    """What `World.agree` returns."""

    contribution: Contribution  # this rank's, with its tensors
    of_ranks: Agreed


class _Head(NamedTuple):
    """The fixed numbers of a contribution, the first part of the row that `World.agree` exchanges."""

    failed: float  # 1 if the rank has no contribution because of an error
    digest_of_equal: float
    digest_of_details: float
    node: float
    weight: float


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
        # `new_group` returns this object to processes that it leaves out.
        left_out: object = dist.GroupMember.NON_GROUP_MEMBER
        if group is left_out:
            raise ValueError(
                f"the process of global rank {dist.get_rank()} is not a member of the group: only members may reduce"
                " over it. Pass a group that this process belongs to."
            )
        if group is None:
            group = dist.group.WORLD
        size = dist.get_world_size(group)
        if size == 1:
            return cls()  # nothing is exchanged, also if there is a process group
        _end_group_before_interpreter()
        return cls(group, dist.get_rank(group), size)

    def gather_integers(self, row: Sequence[int]) -> list[list[int]]:
        """Return every rank's row in rank order. All rows are of one length."""
        return self._gather(torch.tensor(row, dtype=torch.int64))

    def gather_floats(self, row: Sequence[float]) -> list[list[float]]:
        """Return every rank's row of float64 in rank order. All rows are of one length."""
        return self._gather(torch.tensor(row, dtype=torch.float64))

    def gather_row(self, row: Tensor, meanwhile: Callable[[], None] | None = None) -> list[list[float]]:
        """Return every rank's row of float64, from any device, in rank order. All rows are of one length.

        While other ranks have not come yet, call `meanwhile`, which may raise if they never will.
        """
        return self._gather(row, meanwhile)

    def gather_objects(self, value: _T) -> list[_T]:
        """Return every rank's value in rank order. Slow, because it pickles: for setup and messages."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size  # filled in place
        with torch.profiler.record_function("GradAvg: exchange objects"):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(
        self, refusal: str, contribute: Callable[[], Contribution], error_type: type[Exception] = ValueError
    ) -> Agreement:
        """Return what this rank and all others bring to a collective call.

        The ranks exchange one row each, and more only in these cases:

        | case | further exchange | then |
        |---|---|---|
        | `contribute` raised on some rank | the texts of the errors | all ranks raise one error with `refusal` |
        | what must be equal differs | its lines | all ranks raise one error with `refusal` |
        | `details` differ | the details | |
        | there are more numbers than the head holds | the remaining numbers | |
        """
        contribution = Contribution()
        error: Exception | None = None
        row: Sequence[float]
        try:
            contribution = contribute()
            row = _row_of(contribution)
        except Exception as failure:  # noqa: BLE001  # the other ranks wait for this one
            error = failure
            row = _row_of_failure()
        rows = self.gather_floats(row)
        length = len(_Head._fields)
        heads = [_Head(*row_of_rank[:length]) for row_of_rank in rows]

        # All ranks have the same rows, so all of them take the same branches.
        if any(head.failed for head in heads):
            raise error_type(f"{refusal}, {self._errors_of_ranks(error)}.") from error
        if len({head.digest_of_equal for head in heads}) > 1:
            difference = self._first_difference(contribution.equal)
            raise error_type(f"{refusal}: {difference}. Pass the same, in the same order, on all ranks.")

        # Shapes are mostly the same on all ranks, and their digests say so.
        details: Sequence[Sequence[int]] = [contribution.details] * self.size
        if len({head.digest_of_details for head in heads}) > 1:
            details = self.gather_integers(contribution.details)
        count = len(contribution.numbers)  # the same on all ranks, as they agree
        numbers = [row_of_rank[length : length + count] for row_of_rank in rows]
        if count > _NUMBERS_IN_HEAD:
            remaining = self.gather_floats(contribution.numbers[_NUMBERS_IN_HEAD:])
            numbers = [[*of_head, *of_rank] for of_head, of_rank in zip(numbers, remaining, strict=True)]
        return Agreement(
            contribution,
            Agreed(
                nodes=[int(head.node) for head in heads],
                weights=[head.weight for head in heads],
                details=details,
                numbers=numbers,
            ),
        )

    def _errors_of_ranks(self, error: Exception | None) -> str:
        """Return the errors of all ranks, such as "on rank 0: text; on ranks 1, 2: text". A collective operation."""
        text = None if error is None else _text_of(error)
        errors = []
        for text_of_ranks, ranks in ranks_by_value(self.gather_objects(text)).items():
            if text_of_ranks is not None:
                errors.append(f"{on_ranks(ranks)}: {text_of_ranks}")
        return "; ".join(errors).rstrip(".")

    def _first_difference(self, lines: Sequence[str]) -> str:
        """Return the first line of each rank that not all ranks have. A collective operation."""
        lines_of_ranks = self.gather_objects(lines)
        # Lines of all ranks are left out: behind a line that a rank lacks, they would be compared with others.
        of_all = set(lines).intersection(*lines_of_ranks)
        different = [[line for line in lines_of_rank if line not in of_all] for lines_of_rank in lines_of_ranks]
        if not any(different):
            # The same lines in another order, or another number of times.
            different = [list(lines_of_rank) for lines_of_rank in lines_of_ranks]
        for values in zip_longest(*different, fillvalue="nothing"):
            if len(set(values)) > 1:
                return by_value(values)
        raise AssertionError("the digests of equal lines differ")

    def from_first(self, value: Any) -> Any:
        """Return rank 0's value on every rank. What the others pass does not matter."""
        if self.group is None:
            return value
        values = [value]
        with torch.profiler.record_function("GradAvg: exchange objects"):
            dist.broadcast_object_list(values, dist.get_global_rank(self.group, 0), group=self.group)
        return values[0]

    def nodes(self, why: str) -> list[int]:
        """Return the node of every rank, as the launcher counts them."""
        agreement = self.agree(f"{why}, but cannot", lambda: Contribution(node=node_from_environment()))
        return agreement.of_ranks.nodes

    def places(self, node: int) -> tuple[Place, ...]:
        """Return the places of all ranks, each bringing the node that it runs on."""
        return places_on_nodes(self.gather_objects(node))

    def _gather(self, row: Tensor, meanwhile: Callable[[], None] | None = None) -> list[Any]:
        if self.group is None:
            return [row.tolist()]
        # NCCL moves no tensors of the host.
        local_row = row.to(_device_type_of(self.group))
        rows = local_row.new_empty(self.size, len(row))
        with torch.profiler.record_function("GradAvg: exchange numbers"):
            work = dist.all_gather(list(rows.unbind()), local_row, group=self.group, async_op=True)
            if meanwhile is not None:
                # gloo's `wait` cannot be interrupted, and would wait for a rank that never comes until the timeout.
                while not work.is_completed():
                    meanwhile()
                    time.sleep(_POLL_SECONDS)
            work.wait()
            return rows.tolist()


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend by which a group exchanges tensors of a device."""
    # `get_backend` may return "cpu:gloo,cuda:nccl".
    for backend in dist.get_backend_config(group).split(","):
        device_type, _, name = backend.partition(":")
        if device_type == device.type:
            return name
    return dist.get_backend(group)


def _device_type_of(group: dist.ProcessGroup) -> str:
    """Return the type of device on which a group exchanges rows: the CPU if it can.

    All ranks choose by the group, which they share; the devices of their parameters may differ.
    """
    # The config of a group is such as "cpu:gloo,cuda:nccl".
    types = [backend.split(":")[0] for backend in dist.get_backend_config(group).split(",")]
    if "cpu" in types:
        return "cpu"
    return types[0]


def _row_of(contribution: Contribution) -> list[float]:
    """Return the row that `World.agree` exchanges."""
    head = _Head(
        failed=0.0,
        digest_of_equal=digest(repr(contribution.equal)) % _EXACT_INTEGERS,
        digest_of_details=digest(repr(contribution.details)) % _EXACT_INTEGERS,
        node=contribution.node,
        weight=contribution.weight,
    )
    # In the head, so that in most calls one exchange is enough.
    numbers = contribution.numbers[:_NUMBERS_IN_HEAD]
    padding = [0.0] * (_NUMBERS_IN_HEAD - len(numbers))
    return [*head, *numbers, *padding]


def _row_of_failure() -> list[float]:
    """Return the row of a rank whose `contribute` raised."""
    return [1.0] + [0.0] * (len(_Head._fields) - 1 + _NUMBERS_IN_HEAD)


def _text_of(error: Exception) -> str:
    """Return what a message says of an error. Those of the package are whole sentences; others need their type."""
    if isinstance(error, (TypeError, ValueError)):
        return message_of(error)
    return f"{type(error).__name__}: {message_of(error)}"


def digest(text: str) -> int:
    """Return 64 bits that stand for a text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


class ReducedRow:
    """Numbers of all ranks, reduced element by element, while this rank goes on. A collective operation.

    The constructor begins the exchange, and `read` waits for it:

    | device | exchange | reduced by |
    |---|---|---|
    | CPU | all-to-all: every rank gets all rows | the host, in `read` |
    | accelerator | all-reduce | the exchange; the row is then copied to the host on a second stream |
    | any, without a group | none | nothing, as there is one row |

    On a CPU, gloo's all-reduce of a few numbers goes round a ring, twice. The all-to-all is one step, and takes a fifth
    of the time.
    """

    def __init__(
        self,
        row: Sequence[float],
        reduce: Literal["max", "sum"],
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Begin to reduce rows of floats (float64) or of integers (int64), of the same length on all ranks."""
        self._reduces_by_max = reduce == "max"
        self._length = len(row)
        self._work: dist.Work | None = None
        self._copied: Any = None  # the event after the copy from an accelerator to the host
        dtype = torch.int64 if isinstance(row[0], int) else torch.float64
        local_row = torch.tensor(row, dtype=dtype)
        if device.type == "cpu":
            self._rows = self._exchanged_on_host(local_row, group)
        else:
            self._rows = self._reduced_on_accelerator(on_device(local_row, device), device, group)

    def _exchanged_on_host(self, row: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        if group is None:
            return row
        sent = row.repeat(dist.get_world_size(group))
        rows = torch.empty_like(sent)
        self._work = dist.all_to_all_single(rows, sent, group=group, async_op=True)
        return rows

    def _reduced_on_accelerator(self, row: Tensor, device: torch.device, group: dist.ProcessGroup | None) -> Tensor:
        if group is not None:
            operation = dist.ReduceOp.MAX if self._reduces_by_max else dist.ReduceOp.SUM
            self._work = dist.all_reduce(row, operation, group=group, async_op=True)
        # On the model's stream, its next forward would wait for the other ranks.
        with beside(device) as stream:
            if self._work is not None:
                self._work.wait()  # the stream waits, and not the host
            host_row = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
            host_row.copy_(row, non_blocking=True)
            self._copied = stream.record_event()
        return host_row

    def read(self) -> list[Any]:
        """Return the reduced row. One step after the exchange began, nobody waits for it."""
        if self._copied is not None:
            self._copied.synchronize()
        elif self._work is not None:
            self._work.wait()
        rows = self._rows.view(-1, self._length)
        reduced = rows.amax(0) if self._reduces_by_max else rows.sum(0)
        row: list[Any] = reduced.tolist()
        return row
