"""What replicas log: one value per batch, that of all replicas together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from numbers import Number
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_gradavg.device import on_device
from lightning_gradavg.faults.last_words import is_broken_exchange
from lightning_gradavg.methods import logged_as
from lightning_gradavg.ranks import World, digest
from lightning_gradavg.stand_in import NEUTRAL, reduction_name

__all__ = ["ReplicaLog", "of_whole_run"]


def of_whole_run(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what `log` was given, for a value over all ranks even without `sync_dist=True`, as on one process."""
    return {**arguments, "sync_dist": not arguments.get("rank_zero_only", False)}


Part = tuple[Tensor, float]
"""A value in float64, and how much it stands for: the number of samples, or the `batch_size` that was given."""

_COMBINED: dict[str, Callable[[Sequence[Part]], Tensor]] = {
    "mean": lambda parts: torch.stack([value * size for value, size in parts]).sum() / sum(size for _, size in parts),
    "sum": lambda parts: torch.stack([value for value, _ in parts]).sum(),
    "max": lambda parts: torch.stack([value for value, _ in parts]).max(),
    "min": lambda parts: torch.stack([value for value, _ in parts]).min(),
}


class _Entry(NamedTuple):
    """What one name was logged with: everything but the value, the type of that, and the parts that make it up."""

    arguments: dict[str, Any]
    dtype: torch.dtype
    parts: list[Part]

    def combined(self) -> Part:
        """Return the value of the parts that count; what does not count may be NaN."""
        reduction, counted = reduction_name(self.arguments), [part for part in self.parts if part[1]]
        if len(counted) == 1:
            return counted[0]
        value = _COMBINED[reduction](counted) if counted else torch.tensor(NEUTRAL[reduction], dtype=torch.float64)
        return value, sum(size for _, size in counted)


class ReplicaLog:
    """Collects what `self.log` is given in a step, and logs it once per batch.

    A mean is weighted by the replicas' samples, or the `batch_size` that was given. With `sync_dist=True` a value is
    that of the replicas of all ranks. What does not count adds nothing, nor does a rank that has not logged a name that
    another has.

    Args:
        module: The module whose `log` is replaced.
        world: The ranks that share the replicas; a world of one rank where all of them are this rank's.
        whole: Whether values are those of the whole run even without `sync_dist=True`, as on one process.

    Attributes:
        samples: How many samples has what is logged now; 0 if they do not count.
    """

    def __init__(self, module: LightningModule, world: World, *, whole: bool) -> None:
        self._module, self._world, self._whole = module, world, whole
        self._entries: dict[str, _Entry] = {}
        self.samples = 0

    @contextmanager
    def collecting(self, *, joined: bool = False) -> Iterator[None]:
        """Collect within the context, and log what came at its end. A collective operation.

        With `joined`, for ranks that exchange nothing within the context, an exception of one is an error of all.
        """
        self._entries = {}
        try:
            with logged_as(self._module, self._collect):
                yield
        except Exception as error:
            if joined and not is_broken_exchange(error):
                with suppress(RuntimeError):
                    self._names_differ("", f"{type(error).__name__}: {error}")
            raise
        if self._world.size > 1:
            self._share({name: one for name, one in self._entries.items() if one.arguments.get("sync_dist", False)})
        for entry in self._entries.values():
            value, size = entry.combined()
            value = on_device(value, self._module.device).to(entry.dtype)
            # In float64, as sizes add up over an epoch; filled, as the host would wait for a copy.
            number = torch.full((), size, dtype=torch.float64, device=value.device)
            self._module.log(**{**entry.arguments, "value": value, "batch_size": number})

    def _collect(self, arguments: dict[str, Any]) -> dict[str, Any] | None:
        arguments = of_whole_run(arguments) if self._whole else arguments
        value, size = arguments["value"], arguments.get("batch_size")
        if not isinstance(value, (Tensor, Number)) or reduction_name(arguments) not in _COMBINED:
            return arguments
        value = torch.as_tensor(value, device=self._module.device).detach().squeeze()
        dtype = value.dtype if value.dtype.is_floating_point else torch.get_default_dtype()
        if size is None or self.samples == 0 or reduction_name(arguments) != "mean":
            size = self.samples
        entry = self._entries.setdefault(arguments["name"], _Entry({**arguments, "value": None}, dtype, []))
        entry.parts.append((value.double(), float(size)))
        return None

    def _names_differ(self, names: str, failure: str | None = None) -> bool:
        """Return whether ranks log different names, or raise a RuntimeError on all of them if one has failed."""
        rows = self._world.gather_integers([digest(names), failure is not None])
        if any(failed for _, failed in rows):
            said = enumerate(self._world.gather_objects(failure))
            raise RuntimeError("; ".join(f"rank {rank} ended with {text}" for rank, text in said if text is not None))
        return len({signature for signature, _ in rows}) > 1

    def _share(self, own: dict[str, _Entry]) -> None:
        """Have all ranks log the same, one part of each of them. A collective operation."""
        if self._names_differ("\0".join(sorted(own))):
            for of_rank in self._world.gather_objects({name: entry._replace(parts=[]) for name, entry in own.items()}):
                own = of_rank | own
        if not own:
            return
        mine = [own[name].combined() for name in sorted(own)]
        values = torch.stack([value.to(self._module.device) for value, _ in mine])
        rows = self._world.gather_floats([*values.tolist(), *(size for _, size in mine)])
        of_ranks = torch.tensor(rows, dtype=torch.float64).view(len(rows), 2, -1)
        for index, (name, entry) in enumerate(sorted(own.items())):
            # There is nothing left to synchronize.
            arguments = {**entry.arguments, "rank_zero_only": True}
            parts = [(value, float(size)) for value, size in of_ranks[..., index]]
            self._entries[name] = _Entry(arguments, entry.dtype, parts)
