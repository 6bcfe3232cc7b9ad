"""Rows that travel between ranks and back: a concatenation over ranks, its sum backwards, and autograd around them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gradavg.collectives.agreement import World
from lightning_gradavg.collectives.buckets import WIRE_DTYPES

__all__ = ["RowExchange", "gather_rows"]


def gather_rows(exchange: RowExchange, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the ranks' tensors along dimension 0; the result requires grad, and its backward is `sum_back`.

    Without a leaf of its own that requires grad, a rank whose tensors need no gradient would not join the backward
    of the others.
    """
    return _apply(_Gather, exchange, False, _anchor(), *tensors)


@dataclass(frozen=True)
class RowExchange:
    """Moves rows between ranks, as bytes: every dtype travels, on every backend.

    Attributes:
        world: The ranks.
        rows: `rows[q][i]`, the rows that rank q has of tensor i.
        factors: Per rank, what the reduction will multiply its gradient by; None if that is the same for all.
    """

    world: World
    rows: Sequence[Sequence[int]]
    factors: Sequence[float] | None = None

    def gather(self, tensors: Sequence[Tensor], *, weigh: bool = False) -> list[Tensor]:
        """Return the ranks' tensors along dimension 0; with `weigh`, the adjoint of `sum_back`.

        Args:
            tensors: This rank's rows of every tensor.
            weigh: Whether to multiply the rows of rank r by this rank's factor over that of rank r.
        """
        mine = _pack(tensors)
        sizes = [_bytes(tensors, of_rank) for of_rank in self.rows]
        slots = mine.new_empty(self.world.size, max(sizes))
        if max(sizes) > 0:
            if len(mine) < max(sizes):
                mine = torch.cat([mine, mine.new_zeros(max(sizes) - len(mine))])
            dist.all_gather(list(slots.unbind()), mine, group=self.world.group)
        blocks = [_unpack(slot[:size], tensors, n) for slot, size, n in zip(slots, sizes, self.rows, strict=True)]
        if weigh:
            blocks = [
                [_times(block, self._ratio(self.world.rank, rank)) for block in of_rank]
                for rank, of_rank in enumerate(blocks)
            ]
        return [torch.cat(of_leaf) for of_leaf in zip(*blocks, strict=True)]

    def sum_back(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the sum over ranks of their gradients of this rank's rows, each times its factor over this rank's.

        Args:
            gradients: This rank's gradients of all ranks' rows.
        """
        cut = [gradient.split([of_rank[i] for of_rank in self.rows]) for i, gradient in enumerate(gradients)]
        send = torch.cat([_pack(blocks) for blocks in zip(*cut, strict=True)])
        mine = self.rows[self.world.rank]
        size, sizes = _bytes(gradients, mine), [_bytes(gradients, of_rank) for of_rank in self.rows]
        received = send.new_empty(self.world.size * size)
        # Not reduce_scatter: on gloo that moves twice the bytes, and sums half precision in half precision.
        dist.all_to_all_single(received, send, [size] * self.world.size, sizes, group=self.world.group)
        totals = [
            gradient.new_zeros((n, *gradient.shape[1:]), dtype=_wide(gradient))
            for gradient, n in zip(gradients, mine, strict=True)
        ]
        for rank, block in enumerate(received.view(self.world.size, size)):
            ratio = self._ratio(rank, self.world.rank)
            if ratio == 0:  # nothing behind its loss, which may be NaN
                continue
            for total, part in zip(totals, _unpack(block, gradients, mine), strict=True):
                total.add_(part.to(total.dtype), alpha=ratio)
        return [total.to(gradient.dtype) for total, gradient in zip(totals, gradients, strict=True)]

    def _ratio(self, rank: int, other: int) -> float:
        if self.factors is None:
            return 1.0
        # A rank without factor has no rows: what it receives is empty.
        return self.factors[rank] / self.factors[other] if self.factors[other] else 1.0


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: RowExchange, weigh: bool, _anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(exchange.gather(tensors, weigh=weigh))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_apply(_SumBack, ctx.exchange, _anchor(), *gradients)


class _SumBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: RowExchange, _anchor: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(exchange.sum_back(gradients))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weigh = ctx.exchange.factors is not None
        return None, None, *_apply(_Gather, ctx.exchange, weigh, _anchor(), *gradients)


def _apply(function: type[torch.autograd.Function], *args: Any) -> tuple[Tensor, ...]:
    outputs: tuple[Tensor, ...] = function.apply(*args)
    return outputs


def _anchor() -> Tensor:
    return torch.zeros((), requires_grad=torch.is_grad_enabled())


def _wide(tensor: Tensor) -> torch.dtype:
    return WIRE_DTYPES.get(tensor.dtype, tensor.dtype)


def _bytes(like: Sequence[Tensor], rows: Sequence[int]) -> int:
    return sum(n * math.prod(leaf.shape[1:]) * leaf.element_size() for leaf, n in zip(like, rows, strict=True))


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of the tensors, one after the other."""
    whole = [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors]
    # One expanded element is contiguous with a stride of 0, which cannot be viewed as bytes.
    return torch.cat([tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in whole])


def _unpack(data: Tensor, like: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
    """Return the tensors that `_pack` made bytes of, with the dtypes and shapes of `like` apart from the rows."""
    tensors, start = [], 0
    for leaf, n in zip(like, rows, strict=True):
        stop = start + _bytes([leaf], [n])
        # A copy, because a slice may start where no number of this dtype may.
        tensors.append(data[start:stop].clone().view(leaf.dtype).reshape(n, *leaf.shape[1:]))
        start = stop
    return tensors


def _times(tensor: Tensor, ratio: float) -> Tensor:
    return tensor.to(_wide(tensor)).mul(ratio).to(tensor.dtype) if ratio else torch.zeros_like(tensor)
