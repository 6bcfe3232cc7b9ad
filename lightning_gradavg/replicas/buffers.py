"""The buffers of a training step that runs in several pieces, so that the step writes what one forward writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_gradavg._lightning.internals import buffers_of, version_of
from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.flat import broadcast_from_first

__all__ = ["SharedBuffers"]


class SharedBuffers:
    """Has each piece of a step start from the buffers of the step's beginning, and keeps those of the first piece.

    `nn.DataParallel` does the same: it copies the module's buffers to all replicas, and the first replica's are those
    of the module. So batch norm's running statistics are those of the first replica's samples.

    `Replicas` makes one for a run. The calls of a step, in this order:

    1. `begin_step`.
    2. `begin_piece` before each piece.
    3. `require_written_in_place` and `require_no_count_of_samples` after the forward of the last piece; `restore`
       instead, if something raised.
    4. `end_step` after the last backward, which may run parts of the forward again and write buffers again.
    """

    def __init__(self, module: nn.Module, *, in_pieces: bool) -> None:
        """Share the buffers of a module.

        Args:
            module: The module that trains.
            in_pieces: Whether ranks may run a step different numbers of times. Then a step must not write parameters:
                a rank would write them once for each of its pieces.
        """
        self._module = module
        # Torch's own mappings: they also show a buffer that a step assigns. `named_buffers` takes ten times as long.
        self._mappings = [buffers_of(submodule) for submodule in module.modules()]
        self._parameters: dict[str, nn.Parameter] = {}
        if in_pieces:
            self._parameters = dict(module.named_parameters())
        # Of the running step.
        self._buffers: list[Tensor] = []
        self._values_before: list[Tensor] = []
        self._values_of_first_piece: list[Tensor] | None = None  # None if the first piece is the only one
        self._versions: list[int] = []  # of the parameters before the step
        self._buffer_versions: list[int] = []  # of the buffers before the step, until counting is known
        self._pieces = 0  # that have begun
        self._is_counting_known = False  # whether steps have shown that no buffer counts samples
        self._may_count: list[Tensor] | None = None  # what the first step added its samples to; None before it

    def begin_step(self) -> None:
        """Save the values that each piece of the step starts from."""
        self._buffers = self._current_buffers()
        self._values_before = [buffer.clone() for buffer in self._buffers]
        self._values_of_first_piece = None
        self._versions = [version_of(parameter) for parameter in self._parameters.values()]
        self._buffer_versions = []
        if not self._is_counting_known:
            self._buffer_versions = [version_of(buffer) for buffer in self._buffers]
        self._pieces = 0

    def begin_piece(self, index: int) -> None:
        """Have the piece of this number start from the values of the step's beginning."""
        self._pieces = index + 1
        if index == 1:
            # Not after the forward of the first piece: its backward comes later, and activation checkpointing runs
            # parts of the forward again in it, which move running statistics a second time, as on one process.
            self._values_of_first_piece = [buffer.clone() for buffer in self._buffers]
        if index > 0:
            self.restore()

    def restore(self) -> None:
        """Write the values of the step's beginning."""
        self._write(self._values_before)

    def require_written_in_place(self) -> None:
        """Raise a RuntimeError if the step wrote parameters, or replaced buffers instead of writing into them."""
        written: list[str] = []
        for (name, parameter), version in zip(self._parameters.items(), self._versions, strict=True):
            if version_of(parameter) != version:
                written.append(name)
        if written:
            raise RuntimeError(
                f"training_step has written the parameters {', '.join(written)}, but it runs once per replica or part"
                " of a batch, and of those a rank has several. Write parameters in on_train_batch_end."
            )
        known = {id(buffer) for buffer in self._buffers}
        current = {id(buffer) for buffer in self._current_buffers()}
        if known != current:
            new = [name for name, buffer in self._module.named_buffers() if id(buffer) not in known]
            raise RuntimeError(
                f"training_step has assigned or made the buffers {', '.join(new)}, or removed one: replicas share what"
                " is written into buffers. Register them in __init__, with a tensor, and write by buffer.copy_(...)."
            )

    def require_no_count_of_samples(self, samples: float | None, whole: float) -> None:
        """Raise a RuntimeError if two steps add the samples of one piece to a buffer, and not those of a batch.

        All ranks write the same where their pieces are of one size, so no comparison of ranks sees it. The host reads
        the buffers of one number, in two steps of the run. One step does not tell: a buffer that holds the length of a
        sequence grows from 0 to the number of samples where the two are equal.

        Args:
            samples: Number of samples of the first piece.
            whole: What the run to reproduce would add.
        """
        # A step that counts steps adds 1.
        if self._is_counting_known or samples is None or samples <= 1 or samples == whole:
            return
        growing = self._grown_by(samples)
        if self._may_count is None:
            self._may_count = growing
            self._is_counting_known = not growing
            return
        self._is_counting_known = True
        for buffer in growing:
            if any(buffer is counting for counting in self._may_count):
                (name,) = [name for name, known in self._module.named_buffers() if known is buffer]
                raise RuntimeError(
                    f"training_step adds {samples:g} to the buffer {name!r}, the samples of one piece of a batch,"
                    f" where one process adds {whole:g}. Add len(lightning_gradavg.gather(batch)); or keep the count"
                    " in on_train_batch_end, outside of the step."
                )

    def _grown_by(self, samples: float) -> list[Tensor]:
        """Return the buffers of one number that the first piece of the step has added so much to, at once."""
        values = self._values_of_first_piece
        if values is None:
            values = self._buffers
        found: list[Tensor] = []
        states = zip(self._buffers, self._buffer_versions, self._values_before, values, strict=True)
        for buffer, version, before, value in states:
            # What counts forwards, as batch norm does, is written several times where it adds more than 1.
            is_written_once = version_of(buffer) == version + self._pieces
            if is_written_once and value.numel() == 1 and value.item() - before.item() == samples:
                found.append(buffer)
        return found

    def end_step(self, world: World | None) -> None:
        """Keep what the first piece wrote; with a world, that of rank 0. A collective operation with a world."""
        if self._values_of_first_piece is not None:
            self._write(self._values_of_first_piece)
        if world is not None:
            with torch.profiler.record_function("GradAvg: broadcast buffers"):
                broadcast_from_first(self._buffers, world.group)

    def _current_buffers(self) -> list[Tensor]:
        """Return the buffers that the module has at the moment."""
        found: list[Tensor] = []
        for mapping in self._mappings:
            if not mapping:  # as of most modules: this loop runs twice in a step
                continue
            for buffer in mapping.values():
                if buffer is not None:
                    found.append(buffer)
        return found

    def _write(self, values: Sequence[Tensor]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            # `data`: unseen by autograd, whatever graph the buffer is part of.
            buffer.data.copy_(value)
