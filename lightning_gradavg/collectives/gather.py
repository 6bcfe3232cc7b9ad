"""`gather`: all ranks' rows for a loss that does not split over samples, with the gradient that the rule means.

Rank q computes a loss `l_q` of all ranks' features `x = [x_0, ..., x_(W-1)]`, and the reduction multiplies each rank's
gradient by its `w_r / Z` *after* the backward. What is meant is the gradient of the rule applied to the losses,

    g = d/dtheta sum over q of  w_q * l_q / Z
      = sum over r of  (dx_r/dtheta)^T  sum over q of  (w_q / Z) * dl_q/dx_r ,

so what has to come back to the rows `x_r` of rank r is

    sum over q of  (w_q / w_r) * dl_q/dx_r .

Where all multipliers are equal (mean, sum, normalized sum) this is the plain sum over ranks, the adjoint of the gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gradavg.collectives.agreement import Header, World, on_ranks, ranks_by_value
from lightning_gradavg.collectives.average import rank_factors
from lightning_gradavg.collectives.rows import RowExchange, gather_rows
from lightning_gradavg.place import node_from_environment
from lightning_gradavg.rules import Rule, RuleFunction, resolve_rule
from lightning_gradavg.weights import as_weight, weight_problem

__all__ = ["collectives_refused", "gather", "require_allowed"]

T = TypeVar("T")

_REFUSED: ContextVar[str | None] = ContextVar("refused", default=None)


def gather(
    tensors: T,
    *,
    reduction: str | RuleFunction | Rule = "mean",
    weight: float | Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> T:
    """Return the ranks' tensors concatenated along dimension 0 in rank order, with gradient. Call it on every rank.

    The reduced gradient is that of the rule applied to the ranks' losses, in all parameters alike.
    `docs/contrastive.md` says which loss is right under which rule. `reduction` and `weight` matter only where the rule
    multiplies the gradients of some ranks by more than those of others: `"weighted_mean"` with unequal weights, one
    vote per node on uneven nodes, or a rule of your own. There pass what the strategy or `average_gradients` gets; for
    the other rules leave both out.

    - Ranks may bring different numbers of rows, or none.
    - If any rank's tensor requires grad, the result requires grad on all ranks, and every rank must run its backward
      through it, in the same order if there are several: the backward is a collective operation, too. Gather what
      belongs together in one call; then it is enough that one of the results is used.
    - Gradients of fewer than 32 bits are summed in float32. The order of the sum is that of the ranks.
    - Under `torch.no_grad`, on all ranks, the result has no gradient, and there is no backward.
    - Without an initialized process group, and in a group of one rank, the result is a copy.

    Under accumulation the multipliers of a window are relative to those of its first micro-batch, which `gather` does
    not know. There use a rule that multiplies all ranks alike, such as `"normalized_sum"` with summed losses.

    Args:
        tensors: A dense tensor of shape `(rows, ...)`, or tuples, lists and dicts of such, nested in any way. All ranks
            bring the same structure, dtypes and shapes beyond the rows. Any dtype; integers have no gradient.
        reduction: The rule that reduces the gradients afterwards.
        weight: This rank's weight under a rule that uses weights: a number >= 0 of any type, or a tensor with one
            element, which is copied to the host.
        group: The process group; the default group if None.

    Returns:
        New tensors in the same structure, each of shape `(sum of all ranks' rows, ...)`, dtype and device kept.

    Raises:
        ValueError: On all ranks alike, if an argument is not usable on some rank, if the ranks' arguments do not fit
            together, if only some ranks run under `torch.no_grad`, or if a rank has rows but the rule discards its
            gradient. On this process alone, if it is not a member of `group`.
    """
    require_allowed()
    if torch.is_inference_mode_enabled():
        # Gloo of torch 2.4 cannot write into tensors that were made in inference mode, as Lightning validates.
        with torch.inference_mode(False), torch.no_grad():
            return gather(tensors, reduction=reduction, weight=weight, group=group)
    world = World.of(group)
    call, error = None, None
    try:
        call = _Call.of(tensors, reduction, weight, world.device_types)
    except Exception as failure:  # noqa: BLE001  # whatever this rank meets: the others would wait for it for ever
        error = failure
    header = Header(failed=True) if call is None else call.header
    entries = [0] if call is None else call.entries
    table = world.gather_integers([*header.pack(), torch.is_grad_enabled(), entries[0]])
    headers = [Header.unpack(row[:-2]) for row in table]
    if call is None or any(one.failed for one in headers):
        text = None if error is None else str(error)
        raise ValueError(f"gather cannot proceed, {_by_value(world.gather_objects(text))}.") from error
    if len({one.parameters for one in headers}) > 1:
        raise ValueError(
            f"the ranks call gather differently: {_by_value(world.gather_objects(call.description))}."
            " Pass the same structure, dtypes, shapes beyond dimension 0 and reduction= on all ranks."
        )
    of_ranks = [row[-1:] for row in table]
    if len(entries) > 1:
        of_ranks = [a + b for a, b in zip(of_ranks, world.gather_integers(entries[1:]), strict=True)]
    wanted = [any(entry & 1 for entry in of_leaf) for of_leaf in zip(*of_ranks, strict=True)]
    disabled = [rank for rank, row in enumerate(table) if not row[-2]]
    if any(wanted) and disabled:
        raise ValueError(
            f"gather runs under torch.no_grad {on_ranks(disabled)}, but other ranks need a gradient, for which those"
            " would wait for ever. Use torch.no_grad on all ranks or on none."
        )
    rows = [[entry >> 1 for entry in of_rank] for of_rank in of_ranks]
    factors = _agreed_factors(call.rule, headers)
    if any(wanted):
        _require_kept(call.rule, factors, [any(of_rank) for of_rank in rows])
    gathered = _gather_leaves(world, call.leaves, rows, wanted, factors)
    result: T = _rebuilt(tensors, iter(gathered))
    return result


def require_allowed() -> None:
    """Raise a RuntimeError within `collectives_refused`."""
    refused = _REFUSED.get()
    if refused is not None:
        raise RuntimeError(f"{refused}.")


@contextmanager
def collectives_refused(reason: str) -> Iterator[None]:
    """Have `gather` raise a RuntimeError within the context, on every rank that calls it."""
    token = _REFUSED.set(reason)
    try:
        yield
    finally:
        _REFUSED.reset(token)


@dataclass(frozen=True)
class _Call:
    """One rank's arguments, checked.

    Attributes:
        rule: The reduction rule.
        leaves: The tensors in the order of the structure.
        description: What must be the same on all ranks, in words.
        weight: The weight, or None.
    """

    rule: Rule
    leaves: list[Tensor]
    description: str
    weight: float | None

    @classmethod
    def of(cls, tensors: Any, reduction: Any, weight: Any, device_types: Sequence[str] | None) -> _Call:
        rule = resolve_rule(reduction)
        labeled = list(_labeled(tensors, ""))
        if not labeled:
            raise ValueError(f"there is no tensor in {tensors!r}: pass at least one")
        for label, leaf in labeled:
            _check(label, leaf, device_types)
        if len({leaf.device for _, leaf in labeled}) > 1:
            devices = ", ".join(f"tensors{label} on {leaf.device}" for label, leaf in labeled)
            raise ValueError(f"the tensors of one call must be on one device, got {devices}")
        number = None
        if rule.uses_weight:
            if weight is None:
                raise ValueError(
                    f"reduction={rule.name!r}, {rule.formula}, needs a weight: pass the same weight= as for the loss"
                )
            number = float(as_weight(weight, torch.device("cpu")))
            problem = weight_problem(number)
            if problem is not None:
                raise ValueError(f"{problem}: pass the number of loss terms")
        # The rank's own structure counts, and so does every shape but the number of rows.
        forms = "; ".join(f"tensors{label} of shape (rows, {_sizes(leaf)}) and {leaf.dtype}" for label, leaf in labeled)
        return cls(rule, [leaf for _, leaf in labeled], f"{forms}, reduction={rule.name!r}", number)

    @property
    def header(self) -> Header:
        digest = blake2b(self.description.encode(), digest_size=8).digest()
        node = node_from_environment()
        return Header(False, int.from_bytes(digest, "little", signed=True), 0, node, self.weight)

    @property
    def entries(self) -> list[int]:
        """Per tensor, twice its rows plus 1 if it requires grad."""
        grad = torch.is_grad_enabled()
        return [2 * leaf.shape[0] + (leaf.requires_grad and grad) for leaf in self.leaves]


def _gather_leaves(
    world: World,
    leaves: Sequence[Tensor],
    rows: Sequence[Sequence[int]],
    wanted: Sequence[bool],
    factors: Sequence[float],
) -> list[Tensor]:
    if world.size == 1:
        return [leaf.clone() for leaf in leaves]
    gathered: dict[int, Tensor] = {}
    # What needs no gradient on any rank stays out of the backward.
    for differentiable in (True, False):
        indices = [index for index, of_leaf in enumerate(wanted) if of_leaf is differentiable]
        if not indices:
            continue
        exchange = RowExchange(
            world,
            [[of_rank[index] for index in indices] for of_rank in rows],
            factors if len(set(factors)) > 1 else None,
        )
        chosen = [leaves[index] for index in indices]
        if differentiable:
            outputs = gather_rows(exchange, chosen)
        else:
            outputs = tuple(exchange.gather([leaf.detach() for leaf in chosen]))
        gathered.update(zip(indices, outputs, strict=True))
    return [gathered[index] for index in range(len(leaves))]


def _agreed_factors(rule: Rule, headers: Sequence[Header]) -> list[float]:
    """Return what the reduction will multiply each rank's gradient by."""
    weights = [1.0 if header.weight is None else header.weight for header in headers]
    nodes = [header.node for header in headers]
    if None not in nodes:
        return rank_factors(rule, [node or 0 for node in nodes], weights)
    W = len(nodes)
    # Under one vote per node, a single node and a node for each rank come out alike; uneven nodes do not.
    one_node, *others = ([0] * W, range(W), [0] * (W - 1) + [1])
    factors = rank_factors(rule, one_node, weights)
    if any(rank_factors(rule, layout, weights) != factors for layout in others):
        unknown = [rank for rank, node in enumerate(nodes) if node is None]
        raise ValueError(
            f"reduction={rule.name!r} depends on nodes, and no environment variable of the launcher tells the node"
            f" {on_ranks(unknown)}. Set NODE_RANK there to the index of the node, from 0."
        )
    return factors


def _require_kept(rule: Rule, factors: Sequence[float], present: Sequence[bool]) -> None:
    """Raise where other ranks' losses need the gradient of rows whose rank will have its gradient discarded."""
    lost = [rank for rank, factor in enumerate(factors) if factor == 0 and present[rank]]
    if lost and any(factors):
        raise ValueError(
            f"reduction={rule.name!r} discards the gradient of a rank of weight 0, but there are rows {on_ranks(lost)}"
            " that count in the other ranks' losses. Gather no rows there (tensor[:0]); or use reduction='sum' with"
            " losses that are divided by the count of all ranks."
        )


def _by_value(values: Sequence[object]) -> str:
    return "; ".join(f"{on_ranks(ranks)}: {value}" for value, ranks in ranks_by_value(values).items() if value)


def _labeled(value: Any, label: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield label, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _labeled(item, f"{label}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _labeled(item, f"{label}[{index}]")
    else:
        raise TypeError(
            f"tensors{label} must be a tensor, or a tuple, list or dict of tensors; got {value!r} of type"
            f" {type(value).__name__}"
        )


def _rebuilt(value: Any, leaves: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(leaves)
    if isinstance(value, Mapping):
        return {key: _rebuilt(item, leaves) for key, item in value.items()}
    items = [_rebuilt(item, leaves) for item in value]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*items)
    return tuple(items) if isinstance(value, tuple) else items


def _check(label: str, leaf: Tensor, device_types: Sequence[str] | None) -> None:
    if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
        raise ValueError(f"tensors{label} must be a dense tensor, got layout {leaf.layout} and {leaf.dtype}")
    if leaf.ndim == 0:
        raise ValueError(f"tensors{label} has no dimension to concatenate along: pass tensor.reshape(1), one row")
    if device_types is not None and leaf.device.type not in device_types:
        raise ValueError(
            f"tensors{label} is on {leaf.device}, but the process group serves {', '.join(device_types)}: move it"
        )


def _sizes(leaf: Tensor) -> str:
    return ", ".join(map(str, leaf.shape[1:]))
