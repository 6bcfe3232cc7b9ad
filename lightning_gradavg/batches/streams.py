"""The random streams of a run: one for each thing that draws, so that nothing that draws moves another.

| who draws | from | key |
|---|---|---|
| the order of training data: samplers, seeds of workers, readers of streams of samples | `OrderStream` | |
| a piece of a batch: its samples and its `collate_fn` | its stream | seed, "load", loader, pass, batch, piece |
| a piece of a stream of samples: its `collate_fn` | its stream | "collate", as above, with the worker's own batches |
| a piece: its transfer hooks, forward and backward | its stream | seed, what it does, step, piece |
| a batch of exact evaluation: its loading, hooks and step | its stream | seed, stage, epoch, loader, batch |
| a batch that is not cut, and every other hook | the process's own state | |

The key of a stream names no rank, so it draws the same numbers wherever it is drawn from. The pieces of ranks without
replicas are numbered by the ranks, so no two ranks draw the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import NamedTuple

import torch

from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.random_state import (
    RandomState,
    random_state,
    restore_random_state,
    same_random_state,
    stream_key,
)
from lightning_gradavg.batches.chunks import Piece

__all__ = ["OrderStream", "PassPlace", "run_seed", "seed_of_state"]


def run_seed(world: World) -> int:
    """Return the seed of all keyed streams of a new run: rank 0's. A collective operation.

    `seed_everything` leaves its seed in the environment. Without it, torch's generator has a seed.
    """
    seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))
    return int(world.from_first(seed))


def seed_of_state(state: RandomState) -> int:
    """Return a seed that follows from the state of torch's generator."""
    for_torch = state[0].numpy().tobytes()
    return int.from_bytes(blake2b(for_torch, digest_size=8).digest(), "little")


class PassPlace(NamedTuple):
    """The place of a pass over a training loader, which the keys of what it loads begin with."""

    seed: int  # of the run
    loader: int  # its position among the loaders of the run
    number: int  # passes over this loader that the run began before

    def key(self, batch: int, piece: Piece, rank: int) -> bytes:
        """Return the key of the stream from which a piece of a batch is loaded and collated."""
        if piece.number is None:
            return stream_key(self.seed, "load a stand-in", self.loader, self.number, batch, rank)
        return stream_key(self.seed, "load", self.loader, self.number, batch, piece.number)


class OrderStream:
    """The stream that the order of training data is drawn from, over all loaders and epochs of a run.

    It begins at rank 0's state when training begins, and nothing else moves it: no hook, no validation, no dropout. So
    every rank asks its own samplers, and all get the same order.

    A stock process has one state for everything. So while the process's own state equals the stream, it moves on with
    it: where nothing else draws, every number is stock's.

    Attributes:
        state: Where the stream is.
        is_drawing: Whether something draws from it now.
    """

    def __init__(self, state: RandomState) -> None:
        self.state = state
        self.is_drawing = False

    def copy(self) -> OrderStream:
        """Return a stream that goes on from here, and leaves this one where it is."""
        return OrderStream(self.state)

    @contextmanager
    def drawing(self, *, apart: bool = False) -> Iterator[None]:
        """Draw from the stream within the context. Contexts may nest: a loader asks its sampler within its own.

        Args:
            apart: Whether the process's own state stays where it is, even if it equals the stream. A resumed pass
                repeats draws that the own state has moved on with already.
        """
        if self.is_drawing:
            yield
            return
        own = random_state()
        moves_along = not apart and same_random_state(own, self.state)
        if not moves_along:
            restore_random_state(self.state)
        self.is_drawing = True
        try:
            yield
        finally:
            self.is_drawing = False
            self.state = random_state()
            if not moves_along:
                restore_random_state(own)
