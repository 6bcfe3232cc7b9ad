"""What a checkpoint holds of a training loader: where training stands in it, the same for every world size.

A pass over a loader is determined by the random states that it draws from. A checkpoint holds them, and the number of
loader batches that training stepped on. To resume, the pass is repeated from the same states, and that many batches are
passed over; a digest of them proves that they are the same.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypedDict, cast

import torch

from lightning_gradavg.loaders import keeps_state
from lightning_gradavg.random_state import RandomState

__all__ = ["FORMAT", "LoaderParts", "LoaderState", "PassState", "Snapshot", "checked"]

FORMAT = 1
_DEPTH = 4  # a sampler of a batch sampler, a dataset of a subset: more levels are not followed


class Snapshot(TypedDict):
    """What draws depend on: rank 0's random state, and the loader's own generators."""

    random: RandomState
    generators: list[torch.Tensor]


class PassState(TypedDict):
    """What determines a pass: what it drew from, by moment, and the states of samplers and datasets before it."""

    snapshots: dict[str, Snapshot]
    objects: list[Any]


class LoaderState(TypedDict):
    """Where training stands in a loader.

    Attributes:
        format: Version of this format.
        complete: Whether the epoch is over, so that the next pass starts at its first batch.
        batches: Loader batches of the pass that were trained on.
        samples: Samples in them.
        epoch_batches: The same number. Before version 0.2, of a loader that was started again within the epoch, more.
        digest: Of the digests of these batches, in hexadecimal digits.
        passes: The pass; none after a complete epoch.
        generators: States of the loader's own generators now.
        objects: States of the samplers and datasets that have some, now.
        seeded: Whether worker processes outlive the epoch, so that the next pass draws no seed for them.
        random: Rank 0's global random state after these batches.
    """

    format: int
    complete: bool
    batches: int
    samples: int
    epoch_batches: int
    digest: str
    passes: list[PassState]
    generators: list[torch.Tensor]
    objects: list[Any]
    seeded: bool
    random: RandomState


class LoaderParts:
    """What has a state in a loader, each once, in an order that is the same in every run.

    Attributes:
        generators: The generators that the loader, its samplers and its datasets own.
        objects: The samplers and datasets that have a state. A loader with one of its own resumes itself.
    """

    def __init__(self, loader: Any) -> None:
        found, level = {id(loader): loader}, [loader]
        for _ in range(_DEPTH):
            inner = [getattr(part, name, None) for part in level for name in ("batch_sampler", "sampler", "dataset")]
            level = [part for part in inner if part is not None and id(part) not in found]
            found |= {id(part): part for part in level}
        owned = [getattr(part, "generator", None) for part in found.values()]
        self.generators = list({id(each): each for each in owned if isinstance(each, torch.Generator)}.values())
        self.objects = list(filter(keeps_state, list(found.values())[1:]))

    def generator_states(self) -> list[torch.Tensor]:
        """Return the generators' states."""
        return [generator.get_state() for generator in self.generators]

    def object_states(self) -> list[Any]:
        """Return the objects' states."""
        return [copy.deepcopy(part.state_dict()) for part in self.objects]

    def load(self, generators: Sequence[torch.Tensor] = (), objects: Sequence[Any] = ()) -> None:
        """Give generators, samplers and datasets states of their own."""
        for generator, state in zip(self.generators, generators, strict=False):
            generator.set_state(state)
        for part, state in zip(self.objects, objects, strict=False):
            part.load_state_dict(copy.deepcopy(state))


def checked(state: Any, loader: Any) -> LoaderState:
    """Return `state` if a loader can go on from it, or raise a ValueError."""
    known = isinstance(state, dict) and LoaderState.__required_keys__ <= state.keys()
    if not known or state["format"] != FORMAT:
        found = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"the checkpoint's state of a train loader is not one of format {FORMAT} of a loader split with"
            f" split_batches=True; it holds {found}. Resume with the strategy and the train loaders that saved it."
        )
    parts = LoaderParts(loader)
    for what, mine, theirs in (
        ("generators of its own", parts.generators, state["generators"]),
        ("samplers and datasets with a state_dict", parts.objects, state["objects"]),
    ):
        if len(mine) != len(theirs):
            raise ValueError(
                f"the train loader has {len(mine)} {what}, but that of the checkpoint had {len(theirs)}. Resume"
                " with the sampler and dataset of the run that saved it."
            )
    return cast("LoaderState", dict(state))
