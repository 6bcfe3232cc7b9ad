"""The figures that the cost model computes with: what links carry, and how long a processor works on each number."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

__all__ = ["BYTES_PER_NUMBER", "SCHEMA", "Link", "Links", "Stages", "fit_link"]

SCHEMA = 1
"""Version of the file; raised when a field changes its name or its meaning, not when one is added."""

BYTES_PER_NUMBER: Mapping[str, float] = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0 + 4.0 / 256.0}
"""Of each wire type; int8 with its float32 scale per block of 256."""


def _check(name: str, value: Any, *, positive: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and (value > 0 if positive else value >= 0)):
        raise ValueError(f"{name} must be a finite number {'> 0' if positive else '>= 0'}, got {value!r}.")


@dataclass(frozen=True)
class Link:
    """What it takes to send a message of `m` bytes: `latency + m / bandwidth` seconds.

    This is the model of Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", 1994; its `alpha`
    is the latency and its `beta` one over the bandwidth.

    Attributes:
        latency: Seconds per message.
        bandwidth: Bytes per second in each direction, in both at once.

    Raises:
        ValueError: If a figure is not a finite number, the latency below 0 or the bandwidth not above.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        _check("latency", self.latency)
        _check("bandwidth", self.bandwidth, positive=True)

    def seconds(self, size: float, messages: int = 1) -> float:
        """Return the time of some messages one after another, of `size` bytes in all."""
        return messages * self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Stages:
    """Processor seconds per number of the stages that a wire type adds.

    Attributes:
        encode: Reading the number out of its bucket, times the factor of the rule, and writing it as bytes.
        decode_sum: Reading it from the bytes that came, and adding it to the sum.
        decode: Reading it from the bytes that came, and writing it into its bucket.

    Raises:
        ValueError: If a figure is not a finite number >= 0.
    """

    encode: float = 0.0
    decode_sum: float = 0.0
    decode: float = 0.0

    def __post_init__(self) -> None:
        for one in fields(self):
            _check(one.name, getattr(self, one.name))


@dataclass(frozen=True)
class Links:
    """The figures of one cluster.

    Attributes:
        within: Between two ranks of a node, while all ranks of the node send.
        between: A node's link to the other nodes, which its ranks share; None where it was not measured.
        stages: By wire type; a type that is missing takes no processor time.
        sum: Processor seconds per number of adding one float32 to another.
        about: Where the figures come from: for people.

    Raises:
        ValueError: If a wire type is unknown, or `sum` is not a finite number >= 0.
    """

    within: Link
    between: Link | None = None
    stages: Mapping[str, Stages] = field(default_factory=dict)
    sum: float = 0.0
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check("sum", self.sum)
        for name in self.stages:
            if name not in BYTES_PER_NUMBER:
                raise ValueError(f"stages of {name!r}, which is not one of {', '.join(map(repr, BYTES_PER_NUMBER))}.")

    def of(self, wire_dtype: str) -> Stages:
        """Return the stages of a wire type."""
        return self.stages.get(wire_dtype, Stages())

    def as_dict(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Links:
        """Return the figures that `as_dict` made a dictionary of.

        Raises:
            ValueError: If it is of another schema, or a figure is missing, unknown or out of range.
        """
        if saved.get("schema") != SCHEMA:
            raise ValueError(f"schema {saved.get('schema')!r} is not {SCHEMA}: measure again with `gradavg bench`.")
        try:
            return cls(
                within=Link(**saved["within"]),
                between=None if saved["between"] is None else Link(**saved["between"]),
                stages={name: Stages(**stages) for name, stages in saved["stages"].items()},
                sum=saved["sum"],
                about=saved["about"],
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"these are no figures of links: {error}. Measure them with `gradavg bench`.") from error

    def save(self, path: Path) -> None:
        """Write the figures as JSON, which `load` reads."""
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Links:
        """Return the figures in a file that `save` wrote.

        Raises:
            ValueError: If the file cannot be read or holds something else.
        """
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{str(path)!r} cannot be read as figures of links: {error}") from error
        if not isinstance(saved, dict):
            raise ValueError(f"{str(path)!r} holds no figures of links. Measure them with `gradavg bench`.")  # noqa: TRY004  # of the file, not of an argument
        try:
            return cls.from_dict(saved)
        except ValueError as error:
            raise ValueError(f"{str(path)!r}: {error}") from error


def fit_link(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[Link, float]:
    """Return the link whose times are nearest to those measured, and how near.

    Least squares of the relative error, `sum of ((latency + size / bandwidth) / second - 1)^2`: latency shows in small
    messages only, whose absolute times are small. A line that does not rise, or begins below 0, gives way to the best
    one through the origin; its residual tells.

    Args:
        sizes: Bytes of two messages or more, of different sizes.
        seconds: The time of each.

    Returns:
        The link, and the root mean square of the relative error.

    Raises:
        ValueError: If there are fewer than two sizes, or a size or a time is not above 0.
    """
    if len(sizes) != len(seconds) or len(set(sizes)) < 2 or min(*sizes, *seconds) <= 0:  # noqa: PLR2004  # a line has two points
        raise ValueError(
            f"a line needs two sizes or more and a time for each, all > 0; got {sizes!r} bytes, {seconds!r} s."
        )
    # With u = 1/second and v = size/second, the error is latency * u + slope * v - 1: two normal equations.
    us = [1 / second for second in seconds]
    vs = [size / second for size, second in zip(sizes, seconds, strict=True)]
    uu, vv = sum(u * u for u in us), sum(v * v for v in vs)
    uv = sum(u * v for u, v in zip(us, vs, strict=True))
    determinant = uu * vv - uv * uv
    latency = (sum(us) * vv - sum(vs) * uv) / determinant
    slope = (sum(vs) * uu - sum(us) * uv) / determinant
    if latency < 0 or slope <= 0:
        latency, slope = 0.0, sum(vs) / vv
    squares = [(latency * u + slope * v - 1) ** 2 for u, v in zip(us, vs, strict=True)]
    return Link(latency, 1 / slope), math.sqrt(sum(squares) / len(squares))
