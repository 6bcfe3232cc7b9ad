"""What a training step that runs in several pieces may write, so that it is what one forward writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_gradavg._lightning.internals import broadcast_from_first, buffers_of, version_of
from lightning_gradavg._support.collectives import World

__all__ = ["SharedBuffers"]


class SharedBuffers:
    """The buffers of a module: each piece starts from those at the beginning of the step, and the first piece's stay.

    Parameters that a step writes are an error, where a rank has several pieces and would write them as often.
    """

    def __init__(self, module: nn.Module, *, in_pieces: bool) -> None:
        self._module = module
        self._registered = [buffers_of(each) for each in module.modules()]
        self._parameters = dict(module.named_parameters()) if in_pieces else {}

    def begin_step(self) -> None:
        """Note what the pieces of the next step start from."""
        self._held, self._of_first = self._now(), list[Tensor]()
        self._before = [buffer.clone() for buffer in self._held]
        self._versions = [version_of(parameter) for parameter in self._parameters.values()]

    def _now(self) -> list[Tensor]:
        # Twice a step; `named_buffers` takes ten times as long.
        return [buffer for owned in self._registered for buffer in owned.values() if buffer is not None]

    def begin_piece(self, index: int) -> None:
        """Have a piece start from the beginning of the step. A backward may have run parts of the one before again."""
        if index == 1:
            self._of_first = [buffer.clone() for buffer in self._held]
        if index > 0:
            self.put_back()

    def put_back(self) -> None:
        """Write what was there at the beginning of the step."""
        self._write(self._before)

    def _write(self, values: Sequence[Tensor]) -> None:
        for buffer, value in zip(self._held, values, strict=False):  # there may be none
            buffer.data.copy_(value)

    def end_step(self, world: World | None) -> None:
        """Keep what the first piece wrote; with a world, that of rank 0. A collective operation."""
        self._write(self._of_first)
        if world is not None:
            with torch.profiler.record_function("GradAvg: broadcast buffers"):
                broadcast_from_first(self._held, world.group)

    def require_written_in_place(self) -> None:
        """Raise a RuntimeError if the step has written what a rank would write once for each of its pieces."""
        now = zip(self._parameters.items(), self._versions, strict=True)
        written = [name for (name, parameter), version in now if version_of(parameter) != version]
        if written:
            raise RuntimeError(
                f"training_step has written the parameters {', '.join(written)}, but it runs once per replica or part"
                " of a batch, and of those a rank has several. Write parameters in on_train_batch_end."
            )
        own = set(map(id, self._held))
        if own != set(map(id, self._now())):
            new = [name for name, buffer in self._module.named_buffers() if id(buffer) not in own]
            raise RuntimeError(
                f"training_step has assigned or made the buffers {', '.join(new)}, or removed one: replicas share what"
                " is written into buffers. Register them in __init__, with a tensor, and write by buffer.copy_(...)."
            )
