"""The state of a train loader in a checkpoint, and what in a loader has a state."""

from __future__ import annotations

import copy
from typing import Any, TypedDict, cast

import torch

from lightning_gradavg.batches.order import RandomState, Snapshot

__all__ = [
    "FORMAT",
    "LoaderState",
    "PassState",
    "checked_state",
    "generators_of",
    "load_objects",
    "objects_of",
    "set_generators",
]

FORMAT = 1
_DEPTH = 4  # a sampler of a batch sampler, a dataset of a subset: more levels are not followed


class PassState(TypedDict):
    """What determines one pass over a loader.

    Attributes:
        snapshots: The random states that it was drawn from.
        objects: States that samplers and datasets had before it.
        common: The ranks' common random state when it was left.
    """

    snapshots: dict[str, Snapshot]
    objects: list[Any]
    common: RandomState


class LoaderState(TypedDict):
    """Where training stands in a loader. The same on all ranks, and for every world size.

    Attributes:
        format: Version of this format.
        complete: Whether the epoch is over, so that the next pass starts at its first batch.
        batches: Loader batches of the pass that were trained on.
        samples: Samples in them.
        epoch_batches: Loader batches of the epoch that were trained on. Of a loader that was started again within the
            epoch, being shorter than another, it is more than `batches`.
        digest: Of the fingerprints of these batches, in hexadecimal digits.
        passes: The pass; then those that were already begun after it, because Lightning fetches ahead. None after a
            complete epoch.
        generators: States of the loader's own generators after a complete epoch.
        objects: States of the samplers and datasets that have some, after a complete epoch.
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


def checked_state(state: Any) -> LoaderState:
    """Return `state` if it is one of a split loader.

    Raises:
        ValueError: If it is something else.
    """
    if isinstance(state, dict) and state.get("format") == FORMAT and LoaderState.__required_keys__ <= state.keys():
        return cast("LoaderState", state)
    found = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
    raise ValueError(
        f"the checkpoint's state of a train loader is not one of format {FORMAT} of a loader split with"
        f" split_batches=True; it holds {found}. Resume with the strategy and the train loaders that saved it."
    )


def _parts(loader: Any) -> list[Any]:
    """Return the loader's samplers and datasets, each once, in an order that is the same in every run."""
    found, level = [loader], [loader]
    for _ in range(_DEPTH):
        inner = [getattr(part, name, None) for part in level for name in ("batch_sampler", "sampler", "dataset")]
        level = []
        for part in inner:
            if part is not None and not any(part is known for known in found):
                found.append(part)
                level.append(part)
    return found


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that the loader, its samplers and its datasets own, each once."""
    owned = [getattr(part, "generator", None) for part in _parts(loader)]
    unique = {id(generator): generator for generator in owned if isinstance(generator, torch.Generator)}
    return list(unique.values())


def objects_of(loader: Any) -> list[Any]:
    """Return the samplers and datasets that have a state."""
    parts = _parts(loader)[1:]  # a loader with a state of its own resumes itself
    return [part for part in parts if hasattr(part, "state_dict") and hasattr(part, "load_state_dict")]


def set_generators(generators: list[torch.Generator], states: list[torch.Tensor]) -> None:
    """Give every generator its state."""
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def load_objects(objects: list[Any], states: list[Any]) -> None:
    """Give every sampler and dataset a state of its own."""
    for part, state in zip(objects, states, strict=True):
        part.load_state_dict(copy.deepcopy(state))
