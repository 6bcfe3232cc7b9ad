"""Which random numbers a training loader draws, and what that leaves in the random state of the process.

This file alone decides what the global generators hold while training data are read. It tells two states apart:

- the *own* state of a process, from which the user's hooks and the model draw;
- the *stream* of a pass over a loader, from which samplers, datasets and `collate_fn` draw. It begins at rank 0's own
  state. From there it depends neither on what hooks draw nor on the number of ranks.

Without this package, one process has one state for both. So while its own state equals the stream, a process moves on
with what the pass draws.

`PassDraws` has the stream of one pass, read by the Trainer, by Fabric or by a loop of the user's own:

```text
                 drawing(): own state and stream are equal
             ------------------------------------------------>  JOINED   on exit, the own state becomes the stream's
            |    <--------------------------------------------
         OUTSIDE
            |    <--------------------------------------------
             ------------------------------------------------>  APART    on exit, the own state is restored
                 drawing(): they differ, or apart=True
```

`RunDraws` has the own states that a checkpoint of the Trainer needs, over all loaders and epochs of a run:

```text
          resume                  end_set_up                     note_arrival
         --------->  RESUMING  --------------->  BETWEEN_BATCHES  --------->  IN_TRAINING
                      |    ^                      |    ^   ^                      |
                      +----+                      +----+   +----------------------+
                     note_read                   note_read        note_read
```

A run that resumes nothing begins in BETWEEN_BATCHES.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from lightning_gradavg._lightning.loaders import Stateful, loader_parts, loader_samplers
from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.random_state import (
    RandomState,
    forked,
    random_state,
    restore_random_state,
    same_random_state,
)

__all__ = ["Draw", "PassDraws", "RunDraws", "RunPhase", "Snapshot", "Sources"]


class Snapshot(TypedDict):
    """What the next draws of a loader depend on. Checkpoints hold it."""

    random: RandomState  # of rank 0
    generators: list[Tensor]  # the states of the loader's own generators, in the order of `Sources`


class Sources:
    """What the order of a loader depends on beside the global generators: its own generators, and stateful samplers."""

    def __init__(self, loader: object) -> None:
        # By identity: `DataLoader(shuffle=True, generator=g)` gives its RandomSampler the same generator.
        generators: dict[int, torch.Generator] = {}
        for part in loader_parts(loader):
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator):
                generators[id(generator)] = generator
        self._generators = list(generators.values())
        self._samplers: list[Stateful] = [
            sampler for sampler in loader_samplers(loader) if hasattr(sampler, "load_state_dict")
        ]

    def snapshot(self) -> Snapshot:
        """Return what the next draws of the loader in this process depend on."""
        return Snapshot(random=random_state(), generators=[generator.get_state() for generator in self._generators])

    def sampler_states(self) -> list[object]:
        """Return the states of stateful samplers, copied: a sampler may return the very dict that it changes."""
        return [copy.deepcopy(sampler.state_dict()) for sampler in self._samplers]

    def load_generators(self, states: Sequence[Tensor]) -> None:
        """Set the states of the loader's own generators."""
        # Not strict: the loader of a resumed run may have fewer. If that changes the order, `Order.record` raises.
        for generator, state in zip(self._generators, states, strict=False):
            generator.set_state(state)

    def load_samplers(self, states: Sequence[object]) -> None:
        """Set the states of stateful samplers."""
        for sampler, state in zip(self._samplers, states, strict=False):  # as above
            sampler.load_state_dict(copy.deepcopy(state))


class Draw(NamedTuple):
    """The states of a stream before and after something was drawn from it."""

    before: RandomState
    after: RandomState


class _Generators(Enum):
    """What the global generators of the process hold. The module's docstring draws the transitions."""

    OUTSIDE = "the own state: the pass draws nothing"
    JOINED = "the stream, which was equal to the own state: the process goes on from where the stream will be"
    APART = "the stream; the own state is kept aside"


class PassDraws:
    """The random stream of one pass over a loader, and the process's own state beside it.

    All that a pass draws is drawn within `drawing`. The calls come in this order:

    1. `begin`, on all ranks, before the iterator is made.
    2. `begin_reading`, when the first batch is asked for: on all ranks if they read the same, else on rank 0.
    3. `follow`, where only rank 0 draws, with what rank 0 has drawn.

    The pass takes rank 0's state twice, because one process draws at these two moments: when the iterator is made, the
    seed of the workers and the order of some samplers; with the first batch, the order of most samplers. Hooks and
    other loaders may draw in between.

    Attributes:
        snapshots: What the pass has drawn from, by moment: `"begin"` and `"first"`, the keys in checkpoints. In a pass
            that is repeated, what to draw from.
        forks: Whether this rank draws augmentations from a stream of its own. It does where ranks read their own
            samples, except rank 0, which draws what one process draws: no two ranks draw the same augmentation.
        last_draw: What was drawn last.
        own: The own state after the last draw of this process; before the first, and while APART, that from before it.
    """

    def __init__(self, world: World, sources: Sources, snapshots: dict[str, Snapshot], *, shared: bool) -> None:
        self._world = world
        self._sources = sources
        self._shared = shared  # all ranks read the same batches, and draw the same numbers
        self.snapshots = snapshots
        self.forks = not shared and world.rank > 0
        self._holds = _Generators.OUTSIDE
        self._stream = random_state()  # while OUTSIDE; else the generators hold it
        self.own = self._stream
        self.last_draw = Draw(self._stream, self._stream)

    def begin(self) -> None:
        """Begin the stream at rank 0's own state, or where the pass to be repeated began. A collective operation."""
        self._start_at("begin", from_rank_0=True)
        if self.forks:
            self._stream = forked(self._stream, self._world.rank)

    def begin_reading(self) -> None:
        """Set the stream to rank 0's own state once more. A collective operation if all ranks read the same."""
        # With workers, making the iterator asks for the first indices already. Then this comes within `drawing`, and
        # the state of rank 0 is the stream.
        self._start_at("first", from_rank_0=self._shared)

    def _start_at(self, moment: str, *, from_rank_0: bool) -> None:
        if moment not in self.snapshots:
            snapshot = self._sources.snapshot()
            if from_rank_0:
                snapshot = self._world.from_first(snapshot)
            self.snapshots[moment] = snapshot
        snapshot = self.snapshots[moment]
        self._stream = snapshot["random"]
        if self._holds is not _Generators.OUTSIDE:
            restore_random_state(self._stream)
        if not self.forks:  # else this rank never asks the samplers
            self._sources.load_generators(snapshot["generators"])

    @contextmanager
    def drawing(self, *, apart: bool = False) -> Iterator[None]:
        """Draw from the stream inside.

        Contexts may nest, where a loader asks our sampler for indices. The outermost one decides what the process has
        afterwards.

        Args:
            apart: Whether the own state is restored even if it equals the stream.
        """
        before = random_state()
        is_outermost = self._holds is _Generators.OUTSIDE
        if is_outermost:
            self._enter(before, apart=apart)
            before = self._stream
        try:
            yield
        finally:
            self._stream = random_state()
            self.last_draw = Draw(before, self._stream)
            if is_outermost:
                self._leave()

    def _enter(self, own: RandomState, *, apart: bool) -> None:
        if not apart and same_random_state(own, self._stream):
            self._holds = _Generators.JOINED
            return
        self._holds = _Generators.APART
        self.own = own
        restore_random_state(self._stream)

    def _leave(self) -> None:
        if self._holds is _Generators.APART:
            restore_random_state(self.own)
        else:
            self.own = self._stream
        self._holds = _Generators.OUTSIDE

    def follow(self, draw: Draw) -> None:
        """Move this rank's own state on as rank 0's, which has drawn, if both were equal before.

        So ranks with equal seeds go on with equal numbers, as a model expects. On a rank that does not fork, its own
        draws have moved the state already.
        """
        if not self.forks:
            return
        if self._holds is _Generators.OUTSIDE:
            if same_random_state(random_state(), draw.before):
                restore_random_state(draw.after)
        elif same_random_state(self.own, draw.before):
            self.own = draw.after  # restored when the context ends


class RunPhase(Enum):
    """Where a run of the Trainer is between reading and training. The module's docstring draws the transitions."""

    RESUMING = "a checkpoint was loaded, and Lightning sets the run up: only what it reads may draw"
    BETWEEN_BATCHES = "no batch is in training since the last read: that batch is moved to the device, or failed there"
    IN_TRAINING = "the batch that was read last is in training"


class RunDraws:
    """The own random states of a process that a checkpoint of the Trainer needs: one for all loaders of a run.

    For each batch the calls are `note_read` when Lightning has read it, and `note_arrival` when training begins on it.
    In a resumed run, `resume` comes before the first read, and `end_set_up` before the first arrival.

    Attributes:
        phase: Where the run is between reading and training.
        after_read: The own state after the last read; before the first one in a resumed run, that of the checkpoint.
        before_window: The own state before the first batch of the window was moved to the device.
    """

    def __init__(self) -> None:
        self.phase = RunPhase.BETWEEN_BATCHES
        self.after_read = random_state()
        self.before_window = self.after_read

    def resume(self, state: RandomState) -> None:
        """Go on from the own state of a checkpoint. Each loader of the run calls it."""
        assert self.phase is not RunPhase.IN_TRAINING, "a checkpoint is loaded before training"
        self.phase = RunPhase.RESUMING
        self.after_read = state
        restore_random_state(state)

    def note_read(self, own: RandomState) -> None:
        """Note that Lightning has read, a batch or the end of a loader, and the own state after that."""
        self.after_read = own
        if self.phase is RunPhase.IN_TRAINING:
            self.phase = RunPhase.BETWEEN_BATCHES

    def end_set_up(self) -> None:
        """Go back to where the last read left the own state, before hooks of a resumed run may draw.

        Until then, Lightning makes and drops iterators of training and validation loaders, which draw. In the run that
        goes on nothing draws there.
        """
        if self.phase is RunPhase.RESUMING:
            restore_random_state(self.after_read)
            self.phase = RunPhase.BETWEEN_BATCHES

    def note_arrival(self, *, begins_window: bool) -> None:
        """Note that training begins on a batch.

        It may be called twice for a batch: a user who replaces the callbacks of the Trainer has the strategy begin the
        batch once more (`test_a_user_may_replace_the_callbacks_of_the_trainer`).
        """
        assert self.phase is not RunPhase.RESUMING, "end_set_up comes before the first batch"
        if begins_window:
            # Not the state of this moment: a resumed run moves the batch to the device once more, and hooks may draw
            # there (`test_hooks_that_move_batches_may_draw`).
            self.before_window = self.after_read
        self.phase = RunPhase.IN_TRAINING
