"""A training step in pieces: each has a forward and a backward of its own, and Lightning sees one step.

All backwards but the last run within `training_step`, and their gradients stay on the rank: a rank holds the
activations of one piece at a time. Lightning runs the last one, which reduces the gradients of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_gradavg.batches.chunks import Chunk
from lightning_gradavg.batches.part import Batches, ReplicaSlice, SplitBatches
from lightning_gradavg.options import Options
from lightning_gradavg.part import Part, Run
from lightning_gradavg.reduction.gather import losses_weighed
from lightning_gradavg.reduction.reduction import Reduction
from lightning_gradavg.replicas.joined import ReplicaLog, join_outputs
from lightning_gradavg.replicas.obstacles import remarks, require_none
from lightning_gradavg.tree import mapped

__all__ = ["Pieces", "Step"]


class Step(NamedTuple):
    """How a training step is run."""

    forward: Callable[..., Any]
    backward: Callable[[], None]  # of a loss that is not the step's last
    reduction: Reduction
    batches: Batches


class Pieces(Part):
    """A rank computes its samples as they are, or in pieces of at most `max_device_batch_size`."""

    def __init__(self, options: Options, *, static_graph: bool = False) -> None:
        self._options, self._static_graph = options, static_graph
        self._runs_pieces = options.replicated or options.max_device_batch_size is not None

    def setup(self, run: Run) -> None:
        """Name what cannot be served, before DDP wraps the module, which has objections of its own."""
        super().setup(run)
        if run.trainer.state.fn == TrainerFn.FITTING:
            require_none(run, self._options, static_graph=self._static_graph)
            for remark in remarks(run.module, self._options, world_size=run.world.size):
                rank_zero_warn(remark)

    def configure_ddp(self, run: Run) -> None:
        """Prepare the pieces of a run."""
        super().configure_ddp(run)
        self._log = ReplicaLog(run.module, run.world, whole=self._options.preset is not None)
        # Ranks may then run a step different numbers of times.
        self._in_pieces = self._options.in_pieces(run.world.size)

    def num_replicas(self, world_size: int) -> int:
        """Return the number of chunks that each loader batch is computed in."""
        return self._options.num_replicas or world_size

    def weight(self, chunk: Chunk | None) -> float | None:
        """Return the weight of a loss that has none: the samples of its batch, None where they are not known."""
        return None if chunk is None else chunk.samples

    def run_step(self, step: Step, batch: Any, *args: Any) -> Any:
        """Return the output of all pieces of a training step, with the loss of the last to be run."""
        whole, reproducible = self.weight(step.batches.chunk), self._options.reproducible
        if not self._runs_pieces:
            with step.batches.training_step():
                return step.reduction.read(step.forward(batch, *args), whole)
        assert isinstance(step.batches, SplitBatches)
        pieces, outputs = step.batches.slices(batch), list[Any]()
        with self._log.collecting(), losses_weighed(refused=_APART) if self._in_pieces else nullcontext():
            for piece in pieces:
                self._log.samples, last = piece.samples, piece is pieces[-1]
                # Kernels choose the order of sums by alignment, and a slice begins wherever the samples before it end.
                samples = mapped(piece.batch, _copied) if reproducible else piece.batch
                weight = whole if len(pieces) == 1 or whole is None else piece.samples
                local = nullcontext() if last and not reproducible else self.run.ddp.no_sync()
                with local, self._as_piece(piece, step):
                    outputs.append(step.reduction.read(step.forward(samples, *args), weight))
                    if not last:
                        step.backward()
        return outputs[0] if len(outputs) == 1 else self._joined(outputs, pieces)

    def _as_piece(self, piece: ReplicaSlice, step: Step) -> AbstractContextManager[Any]:  # noqa: ARG002  # its own
        """Surround the forward and backward of a piece; of the last one only the forward."""
        return step.batches.training_step()

    def _joined(self, outputs: Sequence[Any], pieces: Sequence[ReplicaSlice]) -> Any:
        """Return the pieces' outputs as one, with the mean loss, whose backward is that of the last piece."""
        named = [output if isinstance(output, Mapping) else {"loss": output} for output in outputs]
        samples = [piece.samples for piece in pieces]
        loss = named[-1]["loss"].clone()
        with torch.no_grad():
            total = sum(one["loss"].detach() * size for one, size in zip(named, samples, strict=True))
            loss.copy_(total / sum(samples))
        keys = dict.fromkeys(key for one in named for key in one if key != "loss")
        return {key: join_outputs([one.get(key) for one in named], self.run.device) for key in keys} | {"loss": loss}

    def end_step(self) -> None:
        """End a step whose gradients are there. A collective operation."""


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


_APART = (
    "training_step gathers over the ranks, but with num_replicas above the number of ranks, or max_device_batch_size,"
    " they run it different numbers of times, one piece after another. Use as many processes as replicas, and no"
    " max_device_batch_size"
)
