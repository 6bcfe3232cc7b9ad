"""The time of a training step under every way of summing gradients, from the figures of the links."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_gradavg.costs.allreduce import ALGORITHMS, Layout, cost_of
from lightning_gradavg.costs.links import BYTES_PER_NUMBER, Links
from lightning_gradavg.costs.overlap import bucket_sizes, step_seconds

__all__ = ["Prediction", "Way", "Work", "best", "predict", "predict_all"]

_GRADIENT_BYTES = BYTES_PER_NUMBER["float32"]

_HOOKS = {"bfloat16": "bf16_compress_hook", "float16": "fp16_compress_hook"}


@dataclass(frozen=True)
class Way:
    """A way of summing gradients.

    Attributes:
        algorithm: A key of `ALGORITHMS`.
        wire_dtype: A key of `BYTES_PER_NUMBER`.

    Raises:
        ValueError: If one is unknown.
    """

    algorithm: str
    wire_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name, accepted in (("algorithm", ALGORITHMS), ("wire_dtype", BYTES_PER_NUMBER)):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(map(repr, accepted))}.")

    def __str__(self) -> str:
        return f"{self.algorithm}, {self.wire_dtype}"

    def chosen_by(self, layout: Layout) -> str | None:
        """Return how to choose it for ranks that stand so, or None where nothing offers it."""
        in_groups = layout.nodes > 1 and layout.ranks_per_node > 1
        if self.algorithm in ("ring", "tree"):
            if self.wire_dtype == "int8":
                return None
            hook = _HOOKS.get(self.wire_dtype)
            parts = ["NCCL_ALGO=Tree"] if self.algorithm == "tree" else []
            parts += [] if hook is None else [f"ddp_comm_hook={hook}"]
            return ", ".join(parts) or ("node_aware=False" if in_groups else "the default")
        if self.algorithm == "node by node":
            narrow = "" if self.wire_dtype == "float32" else f"wire_dtype={self.wire_dtype!r}, "
            return f"{narrow}node_aware=True" if in_groups else None
        if self.wire_dtype == "float32":
            return None
        return f"wire_dtype={self.wire_dtype!r}" + (", node_aware=False" if in_groups else "")


@dataclass(frozen=True)
class Work:
    """A training step on one rank.

    Attributes:
        gradient_bytes: Size of the gradients in float32.
        forward: Seconds of the forward, and of what else the backward does not follow upon: the optimizer, the data.
        backward: Seconds of the backward.
        bucket_bytes: `bucket_cap_mb` of DDP, in bytes.
        overlap: Whether buckets are summed during the backward.

    Raises:
        ValueError: If a size is not finite and > 0, or a time not finite and >= 0.
    """

    gradient_bytes: float
    forward: float
    backward: float
    bucket_bytes: float = 25 * 2**20
    overlap: bool = True

    def __post_init__(self) -> None:
        for name in ("gradient_bytes", "bucket_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and > 0, got {getattr(self, name)!r}.")
        for name in ("forward", "backward"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and >= 0, got {getattr(self, name)!r}.")

    @property
    def compute(self) -> float:
        """Seconds of a step without communication."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Prediction:
    """What a step is expected to take.

    Attributes:
        way: How gradients are summed.
        layout: Where the ranks stand.
        step: Seconds of the step.
        communication: Seconds of communication, hidden or not.
        exposed: Seconds of the step that are not computation.
        sent: Bytes that the link of the busiest node sends to other nodes.
        chosen_by: How to choose this way, or None where nothing offers it.
    """

    way: Way
    layout: Layout
    step: float
    communication: float
    exposed: float
    sent: float
    chosen_by: str | None


def predict(way: Way, work: Work, layout: Layout, links: Links) -> Prediction:
    """Return the time of a step, whose work is the same on every rank whatever their number (weak scaling).

    Raises:
        ValueError: If there are several nodes and no figures of the links between them.
    """
    sizes = bucket_sizes(work.gradient_bytes, work.bucket_bytes)

    def seconds_of(size: float) -> float:
        return cost_of(way.algorithm, size / _GRADIENT_BYTES, way.wire_dtype, layout, links).seconds

    step = step_seconds(work.forward, work.backward, sizes, seconds_of, overlap=work.overlap)
    return Prediction(
        way,
        layout,
        step,
        sum(map(seconds_of, sizes)),
        step - work.compute,
        cost_of(way.algorithm, work.gradient_bytes / _GRADIENT_BYTES, way.wire_dtype, layout, links).sent,
        way.chosen_by(layout),
    )


def predict_all(
    work: Work, layouts: Sequence[Layout], links: Links, wire_dtypes: Iterable[str] = tuple(BYTES_PER_NUMBER)
) -> list[Prediction]:
    """Return the predictions of every algorithm and wire type on every layout, by layout."""
    ways = [Way(algorithm, wire_dtype) for wire_dtype in wire_dtypes for algorithm in ALGORITHMS]
    return [predict(way, work, layout, links) for layout in layouts for way in ways]


def best(predictions: Iterable[Prediction]) -> Prediction | None:
    """Return the shortest step that something offers, of equal ones the first; None where nothing is offered."""
    offered = [prediction for prediction in predictions if prediction.chosen_by is not None]
    return min(offered, key=lambda prediction: prediction.step, default=None)
