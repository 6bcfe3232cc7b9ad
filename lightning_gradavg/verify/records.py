"""What a process records of a run, as it is sent to the process that compares."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from torch import Tensor

from lightning_gradavg.rules import RULES, Rule
from lightning_gradavg.verify.sketches import Tensors

__all__ = [
    "DrawnNumbers",
    "EpochReading",
    "RankBatch",
    "Record",
    "RecordedPiece",
    "RecordedStep",
    "Refused",
    "RunFacts",
    "SampleId",
    "StageTensors",
    "join_shards",
]

SampleId: TypeAlias = bytes
"""A digest of a sample, equal on all processes."""


class Refused(Exception):  # noqa: N818  # no error of the run
    """Ends a run, with the reason why it cannot be compared; without one if everything that was asked for is there."""


class DrawnNumbers(NamedTuple):
    """Random numbers that an operator drew."""

    operator: str
    numbers: Tensor


@dataclass
class RecordedPiece:
    """Samples that are computed at once: those of a rank, a part of them such as a replica, or those of all ranks.

    Attributes:
        packed_samples: The samples, pickled, as `collate_fn` was given them.
        sample_ids: Which samples these are.
        indices: Their indices in the data set; empty for a stream.
        size: The number of samples.
        draws: The random numbers that they drew.
        unknown_because: Why the samples are not known; "" if they are.
        parts: If it joins pieces of ranks, what each of them drew.
    """

    packed_samples: Sequence[bytes] = ()
    sample_ids: Sequence[SampleId] = ()
    indices: Sequence[Hashable] = ()
    size: int = 1
    draws: list[DrawnNumbers] = field(default_factory=list)
    unknown_because: str = ""
    parts: Sequence[Sequence[DrawnNumbers]] = ()


@dataclass
class RankBatch:
    """A micro-batch that a rank took.

    Attributes:
        pieces: What the rank computed at once, one after the other.
        counts: Whether its samples count: not if the strategy only kept the rank busy.
        weight: The weight that `training_step` returned with it.
    """

    pieces: Sequence[RecordedPiece]
    counts: bool = True
    weight: float | None = None

    @property
    def size(self) -> int:
        """The number of samples."""
        return sum(piece.size for piece in self.pieces)

    @property
    def sample_ids(self) -> list[SampleId]:
        """Which samples these are."""
        return [sample for piece in self.pieces for sample in piece.sample_ids]


class StageTensors(NamedTuple):
    """Tensors at one stage of a step."""

    stage: str  # of `report.STAGES`
    tensors: Tensors
    shards: frozenset[str] = frozenset()  # names of tensors of which the sketch is that of this rank's shard alone


@dataclass
class RecordedStep:
    """What one global batch does, in order.

    Attributes:
        epoch: The epoch.
        batches: The micro-batches of the window.
        stages: The tensors at each stage.
        logged: The values that were logged, as tensors of one element.
    """

    epoch: int
    batches: list[RankBatch]
    stages: list[StageTensors]
    logged: Tensors


@dataclass(frozen=True)
class RunFacts:
    """How a run was set up.

    Attributes:
        strategy: The name of the strategy's class.
        rule: Its reduction rule; of stock DDP the mean.
        splits_batches: Whether each rank takes its chunk of the loader's batches.
        replicated: Whether batch statistics may be those of all ranks, as a training step runs once per replica.
        replicas: The number of chunks of a loader batch that have batch statistics of their own, as with
            `nn.DataParallel`; None if there are none.
        sharded: Whether the ranks share the model by `fully_shard`, where each has its own buffers.
        accumulation: Loader batches per optimizer step.
        automatic: Whether Lightning optimizes, and not the module.
        epoch_batches: Loader batches in an epoch, on each rank.
        given: The options that the user gave the strategy, as a script has them.
    """

    strategy: str = ""
    rule: Rule = RULES["mean"]
    splits_batches: bool = False
    replicated: bool = False
    replicas: int | None = None
    sharded: bool = False
    accumulation: int = 1
    automatic: bool = True
    epoch_batches: float = math.inf
    given: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EpochReading:
    """What one pass over the user's loader reads in this process.

    Attributes:
        samples: The first samples, by what they are, as many as one process reads in the compared steps.
        batch_size: The number of samples in a batch; 0 if it is not known.
        length: The number of samples that the sampler reads; NaN if it is not known.
        deals_indices: Whether a sampler deals the indices of one data set to several ranks.
        held: Digests of some samples of this rank's data set, by the place of each part, such as the label.
    """

    samples: Sequence[SampleId] = ()
    batch_size: int = 0
    length: float = math.nan
    deals_indices: bool = False
    held: Mapping[str, Sequence[bytes]] = field(default_factory=dict)


@dataclass
class Record:
    """What one process recorded.

    Attributes:
        rank: The rank of the process.
        facts: How its run was set up.
        steps: The optimizer steps.
        reading: What one pass over the loader reads.
        batch_norms: Names of layers whose statistics are those of one rank.
        comm_hook: The name of the user's communication hook, or of torch's; "" if there is none.
        remarks: What the compared steps do not show.
        draws_problem: Why random numbers cannot be compared; "" if they can.
        problem: Why the run cannot be compared; "" if it can.
    """

    rank: int = 0
    facts: RunFacts = field(default_factory=RunFacts)
    steps: list[RecordedStep] = field(default_factory=list)
    reading: EpochReading = field(default_factory=EpochReading)
    batch_norms: list[str] = field(default_factory=list)
    comm_hook: str = ""
    remarks: list[str] = field(default_factory=list)
    draws_problem: str = ""
    problem: str = ""


def join_shards(records: Sequence[Record]) -> None:
    """Replace the sketches of shards by those of whole tensors, in the records of ranks that take the same steps.

    If a rank does not have a tensor, such as a gradient, its shard counts as zero.
    """
    for steps in zip(*(record.steps for record in records), strict=True):
        for position in range(len(steps[0].stages)):
            sums: Tensors = {}
            for step in steps:
                for name in step.stages[position].shards:
                    sums[name] = step.stages[position].tensors[name] + sums.get(name, 0.0)
            for step in steps:
                step.stages[position].tensors.update(sums)
