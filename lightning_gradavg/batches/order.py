"""One order of the data on all ranks: samplers draw from rank 0's random state, and what they yield is compared."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, TypeAlias, TypedDict

import torch

from lightning_gradavg.tree import fingerprint

__all__ = [
    "Agree",
    "Broadcast",
    "Order",
    "RandomState",
    "Replay",
    "Snapshot",
    "random_state",
    "restore_random_state",
]

Broadcast: TypeAlias = Callable[[Any], Any]
"""Returns rank 0's object on every rank."""

Agree: TypeAlias = Callable[[bytes], bool]
"""Returns, on every rank, whether all ranks gave the same bytes."""

RandomState: TypeAlias = tuple[torch.Tensor, Any, Any]
"""States of torch's, Python's and NumPy's global generators, as values that `torch.load(weights_only=True)` reads."""


class Snapshot(TypedDict):
    """What the draws of samplers depend on: the ranks' common random state, and the loader's own generators."""

    random: RandomState
    generators: list[torch.Tensor]


@dataclass(frozen=True)
class Replay:
    """A pass over a loader that is begun again, to go on where another run left it.

    Attributes:
        snapshots: The snapshots of that pass, by the name of the moment.
        common: The common random state when it was left.
        batches: Number of loader batches to pass over.
        samples: Number of samples in them.
        digest: The digest of their fingerprints.
    """

    snapshots: Mapping[str, Snapshot]
    common: RandomState
    batches: int
    samples: int
    digest: bytes


def random_state() -> RandomState:
    """Return the states of the CPU generators that samplers draw from unless they were given one."""
    numpy = sys.modules.get("numpy")  # nobody can have drawn from it before it was imported
    return torch.get_rng_state(), random.getstate(), _plain(numpy.random.get_state(legacy=False)) if numpy else None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def restore_random_state(state: RandomState) -> None:
    """Set the states of the CPU generators."""
    for_torch, (version, words, gauss), for_numpy = state
    torch.set_rng_state(for_torch)
    random.setstate((version, tuple(words), gauss))
    if for_numpy is not None and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(for_numpy)


def _equal(one: RandomState, other: RandomState) -> bool:
    return (
        torch.equal(one[0], other[0]) and one[1] == other[1] and (one[2] is None or other[2] is None or one[2] == other[2])
    )


class Order:
    """The order of one pass over a loader.

    Args:
        broadcast: Returns rank 0's object on every rank; None where this rank's own random state decides.
        agree: Returns, on every rank, whether all ranks gave the same bytes; None where nothing is to be compared.
        generators: The loader's own generators.
        replay: The pass to begin again.
        seeded: Whether the worker processes have their seed from an earlier epoch, so that none is to be drawn. Where
            they had to be started anew, the draw is taken back.
    """

    def __init__(
        self,
        broadcast: Broadcast | None = None,
        agree: Agree | None = None,
        generators: Sequence[torch.Generator] = (),
        replay: Replay | None = None,
        *,
        seeded: bool = False,
    ) -> None:
        self._broadcast = broadcast
        self._agree = agree
        self._generators = generators
        self._seeded = seeded
        self._state: RandomState | None = None
        self._within = False
        self._own: RandomState | None = None  # to put back after a draw
        self._digest = blake2b(digest_size=16)
        self._batches = 0
        self.snapshots: dict[str, Snapshot] = {} if replay is None else dict(replay.snapshots)
        self._replay = replay
        self._to_skip = 0 if replay is None else replay.batches
        self.reach("begin")

    @property
    def replay(self) -> Replay | None:
        """The pass of a checkpoint that is still to be gone through again; None where there is none."""
        return self._replay

    @property
    def shares(self) -> bool:
        """Whether the order is that of all ranks. Only then fingerprints of the batches are wanted."""
        return self._broadcast is not None

    @property
    def common(self) -> RandomState:
        """The common random state that the next draw starts from."""
        return random_state() if self._within or self._state is None else self._state

    @property
    def batches(self) -> int:
        """Number of loader batches so far."""
        return self._batches

    @property
    def digest(self) -> bytes:
        """16 bytes that stand for all batches so far, in their order."""
        return self._digest.digest()

    def reach(self, moment: Literal["begin", "made", "first"]) -> None:
        """Take a snapshot, or go back to the one of the pass to replay. A collective operation.

        Args:
            moment: `begin`, before an iterator is made; `made`, before the sampler's iterator is made (twice, where
                there are workers), or after that of an iterable; `first`, before the first batch. At the first and at
                the last, all further draws are made to start from rank 0's random state.
        """
        if self._broadcast is None:
            return
        seen = None if self._replay is None else self._replay.snapshots.get(moment)
        if seen is None and moment == "made" and self._seeded:
            seen = self.snapshots["begin"]
        if seen is not None:
            self._go_to(seen)
        # Within a draw the state is rank 0's already; worker processes are fed their first indices there.
        elif moment != "made" and not self._within:
            self._state = self._broadcast(random_state())
        states = [generator.get_state() for generator in self._generators]
        self.snapshots[moment] = Snapshot(random=self.common, generators=states)
        if moment == "first" and self._to_skip == 0:
            self._catch_up()

    def _go_to(self, snapshot: Snapshot) -> None:
        if self._within:
            restore_random_state(snapshot["random"])
        else:
            self._state = snapshot["random"]
        for generator, state in zip(self._generators, snapshot["generators"], strict=True):
            generator.set_state(state)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Draw from the ranks' common random state inside.

        A rank whose own state is equal to it moves on with it, as a single process does. A rank with another state has
        that one back at the end. So has every rank while a pass is replayed, until that has caught up.
        """
        if self._state is None or self._within:
            yield
            return
        own = random_state()
        self._own = own if self._replay is not None or not _equal(own, self._state) else None
        if self._own is not None:
            restore_random_state(self._state)
        self._within = True
        try:
            yield
        finally:
            self._within = False
            self._state = random_state()
            if self._own is not None:
                restore_random_state(self._own)

    def _catch_up(self) -> None:
        """End the replay. A rank moves on with it if its random state is the common one that the pass was left with."""
        replay, self._replay = self._replay, None
        if replay is None or self._state is None:
            return
        own = self._own if self._within and self._own is not None else random_state()
        if not _equal(own, replay.common):
            return
        if self._within:
            self._own = None
        else:
            restore_random_state(self._state)

    def skips(self, key: bytes) -> bool:
        """Return whether the next loader batch is one to pass over, and note it. A collective operation.

        Args:
            key: The fingerprint of the batch.

        Raises:
            RuntimeError: If the last of them is reached, and they are not those of the pass to replay.
        """
        if self._to_skip == 0:
            return False
        assert self._replay is not None
        self._note(key)
        self._to_skip -= 1
        if self._to_skip == 0:
            self._compare(f"batch {self._batches}, the last that the checkpoint counts as trained on")
            if self.digest != self._replay.digest:
                raise self._other_batches(self._replay, "are not those of the checkpoint")
            self._catch_up()
        return True

    def _other_batches(self, replay: Replay, found: str) -> RuntimeError:
        return RuntimeError(
            f"the checkpoint was saved after {replay.batches} batches ({replay.samples} samples) of its epoch, but the"
            f" first {replay.batches} batches of the train loader {found}: going on would train on some samples twice"
            " and on others never. Resume with the dataset, batch size and sampler of that run. A sampler whose order"
            " does not come from `generator=` or the global random state needs methods `state_dict` and"
            " `load_state_dict`. Or resume from a checkpoint of the end of an epoch."
        )

    def require(self, value: Any, message: str) -> None:
        """Raise on all ranks unless `value` is the same on all of them. A collective operation.

        Raises:
            ValueError: With `message`.
        """
        if self._agree is not None and not self._agree(fingerprint(value)):
            raise ValueError(f"{message} With split_batches=True it must be the same on all ranks.")

    def _note(self, key: bytes) -> None:
        self._digest.update(key)
        self._batches += 1

    def add(self, key: bytes, *, sized: bool) -> None:
        """Note a loader batch by its fingerprint, and compare. A collective operation.

        Args:
            key: The fingerprint of the batch.
            sized: Whether all ranks know that they have the same number of batches. If not, every batch is compared, so
                that a rank that ends early and one that goes on meet here, and not in different collectives.

        Raises:
            RuntimeError: If the batches so far are not the same on all ranks.
        """
        self._note(key)
        if not sized or self._batches & (self._batches - 1) == 0:
            self._compare(f"batch {self._batches}")

    def finish(self) -> None:
        """Compare at the end of the pass. A collective operation.

        Raises:
            RuntimeError: If the batches are not the same on all ranks, or some to pass over are missing.
        """
        self._compare(f"the end after batch {self._batches}")
        if self._to_skip:
            assert self._replay is not None
            raise self._other_batches(self._replay, f"are missing, it ends after {self._batches}")

    def _compare(self, what: str) -> None:
        if self._agree is not None and not self._agree(self._digest.digest()):
            raise RuntimeError(
                f"the train loader does not yield the same batches on all ranks: found at {what} of this epoch."
                " With split_batches=True every rank takes its chunk of the same batch. Make the sampler or the dataset"
                " independent of the rank, and seed generators of its own alike on every rank; or, where every rank is"
                " to read its own part of the data, set `sharded_by_rank = True` on the loader or on its dataset."
            )
