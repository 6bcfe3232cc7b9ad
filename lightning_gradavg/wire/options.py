"""What a user may ask of the wire."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WIRE_DTYPES", "WIRE_SCOPES", "WireOptions"]

WIRE_DTYPES = ("bfloat16", "float16", "int8")

WIRE_SCOPES = ("all", "nodes")


@dataclass(frozen=True)
class WireOptions:
    """How buckets are to travel.

    Attributes:
        dtype: What numbers are sent as, a member of `WIRE_DTYPES`; None for the type of the gradients.
        scope: `"all"` to send so between any two ranks, `"nodes"` only between nodes.
        node_aware: Whether to sum within each node before anything is sent between nodes; None where it pays.
        power_sgd_rank: Rank of the matrices that torch's PowerSGD sends instead of gradients, or None.
        power_sgd_start_step: Optimizer steps until PowerSGD begins, 2 or more.

    Raises:
        ValueError: If a value is unknown, or two contradict each other.
    """

    dtype: str | None = None
    scope: str = "all"
    node_aware: bool | None = None
    power_sgd_rank: int | None = None
    power_sgd_start_step: int = 1000

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in WIRE_DTYPES:
            raise ValueError(
                f"wire_dtype={self.dtype!r} is not one of {', '.join(map(repr, WIRE_DTYPES))}. Choose one, or None to"
                " send gradients in their own type."
            )
        if self.scope not in WIRE_SCOPES:
            raise ValueError(f"wire_scope={self.scope!r} is not one of {', '.join(map(repr, WIRE_SCOPES))}.")
        if self.scope == "nodes" and self.dtype is None:
            raise ValueError("wire_scope='nodes' says where wire_dtype applies, which is not set. Set it as well.")
        if self.node_aware not in (None, True, False):
            raise ValueError(f"node_aware must be True, False, or None for where it pays; got {self.node_aware!r}")
        if self.power_sgd_rank is not None:
            self._check_power_sgd()

    def _check_power_sgd(self) -> None:
        rank, start = self.power_sgd_rank, self.power_sgd_start_step
        if rank is None or rank < 1:
            raise ValueError(f"power_sgd_rank must be 1 or more, or None for no PowerSGD; got {rank}")
        if start < 2:  # noqa: PLR2004 - torch's own limit
            raise ValueError(f"power_sgd_start_step must be 2 or more, because buckets change after 1; got {start}")
        if self.dtype is not None or self.node_aware:
            other = f"wire_dtype={self.dtype!r}" if self.dtype is not None else "node_aware=True"
            raise ValueError(
                f"power_sgd_rank={rank} sends matrices of its own instead of gradients, which {other} is about."
                " Leave one of them out."
            )

    @property
    def asked_for(self) -> str | None:
        """The option that needs DDP's communication hook, as it was given; None if none does."""
        if self.dtype is not None:
            return f"wire_dtype={self.dtype!r}"
        if self.power_sgd_rank is not None:
            return f"power_sgd_rank={self.power_sgd_rank}"
        return "node_aware=True" if self.node_aware else None
