"""`average_gradients`: the reduction rules for a plain PyTorch loop, in place after `backward()`.

A call has two steps. Every rank first tells the others, in one small exchange, what it is about to reduce: whether it
met a problem, digests of its parameters and gradients, its node and its weight. Whatever does not fit together raises
the same error on all ranks, before any gradient has changed. Then the gradients are summed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gradavg.collectives.agreement import Header, World, on_ranks, ranks_by_value
from lightning_gradavg.collectives.buckets import sum_dense, sum_sparse
from lightning_gradavg.collectives.contribution import ABSENT, Contribution, form_dtype, form_sparse_dim, form_text
from lightning_gradavg.place import places_on_nodes
from lightning_gradavg.reduction.reduce import share_of, window_factor
from lightning_gradavg.rules import Rule, RuleFunction
from lightning_gradavg.wire.codecs import CODECS, Codec

__all__ = ["average_gradients", "rank_factors"]


@torch.no_grad()
def average_gradients(
    module_or_parameters: nn.Module | Iterable[Tensor],
    *,
    reduction: str | RuleFunction | Rule = "mean",
    weight: float | Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    wire_dtype: Literal["bfloat16", "float16"] | None = None,
) -> None:
    """Reduce the gradients over the ranks of a process group, in place. Call it on every rank, after `backward()`.

    Every gradient becomes `sum over r of w_r * g_r / Z` with `Z = sum over r of z_r`, where the rule gives each rank
    its share `(w_r, z_r)`; see `lightning_gradavg.rules`. All ranks end with the same bits. Without an initialized
    process group this is a world of one rank: nothing is communicated, and the formula still applies.

    - A gradient that is None on some ranks counts as zero there, and those ranks receive the reduced one. None on
      all ranks stays None.
    - Gradients are dense or sparse (COO), real or complex, in any memory format. Those of fewer than 32 bits are
      summed in float32. A gradient that is sparse, repeats an element in memory (`expand`) or is lazily conjugated
      is replaced by a new tensor; others are written in place.
    - Under a rule that uses weights, a rank of weight 0 contributes nothing, even if its gradients are NaN. If no rank
      has any weight, the gradients become zero.
    - With no parameters nothing is reduced, but the arguments are checked all the same.

    Nodes are those of the launcher, see `lightning_gradavg.place.node_from_environment`.

    Args:
        module_or_parameters: The module, or its parameters in the same order on all ranks. Each counts once.
        reduction: A key of `lightning_gradavg.rules.RULES`, or a function `(place, weight) -> Share`, pure and the
            same on all ranks.
        weight: The count of loss terms behind this rank's gradient: a number >= 0 of any type, or a tensor with one
            element. Pass it on all ranks or on none; rules that do not use it ignore it. Summed in float64.
        group: The process group to reduce over; the default group if None.
        wire_dtype: What dense gradients are sent as between ranks, the same on all: `"bfloat16"` or `"float16"`, half
            the bytes of float32. They are summed in float32, each number rounded once before the sum and once after it.
            Gradients in double precision are refused, and so is `"int8"`, which needs a memory that a function has not.
            None for the type that they are summed in. See docs/communication.md.

    Raises:
        ValueError: On all ranks alike and with the gradients untouched, if an argument is not usable on some rank, or
            if the ranks' arguments, parameters or gradients do not fit together. On this process alone, if it is not
            a member of `group`.
    """
    world = World.of(group)
    contribution, error = None, None
    try:
        contribution = Contribution.of(module_or_parameters, reduction, weight, world.device_types, wire_dtype)
    except Exception as failure:  # noqa: BLE001  # whatever this rank meets: the others would wait for it for ever
        error = failure
    header = contribution.header if contribution is not None else Header(failed=True)
    headers = [Header.unpack(row) for row in world.gather_integers(header.pack())]
    if contribution is None or any(header.failed for header in headers):
        raise ValueError(_problems_of_ranks(world, error)) from error
    if len({header.parameters for header in headers}) > 1:
        raise ValueError(_difference_of_ranks(world, contribution))
    factors = _agreed_factors(contribution.rule, headers)
    forms = _agreed_forms(world, contribution, headers)
    codec = None if contribution.wire_dtype is None else CODECS[contribution.wire_dtype]
    _reduce(world, contribution.parameters, forms, factors, codec)


def rank_factors(rule: Rule, nodes: Sequence[int], weights: Sequence[float]) -> list[float]:
    """Return what each rank multiplies its gradient by before the sum: `w_r / Z`, or 0 for "discard it".

    Args:
        rule: The reduction rule.
        nodes: The node of every rank.
        weights: The weight of every rank, finite and >= 0; anything if the rule uses none.

    Raises:
        ValueError: If the rule fails, or a multiplier, the normalizer or a factor is not finite and >= 0.
    """
    places = places_on_nodes(nodes)
    shares = [share_of(rule, place, weight) for place, weight in zip(places, weights, strict=True)]
    multipliers = [float(share.multiplier) for share in shares]
    normalizer = float(sum(share.normalizer for share in shares))
    factors = [
        float(window_factor(reference=multiplier, normalizer=normalizer, live=multiplier > 0, loss_divisor=1.0))
        for multiplier in multipliers
    ]
    if not all(0 <= number < math.inf for number in (*multipliers, normalizer, *factors)):
        raise ValueError(
            f"reduction={rule.name!r} gives weights {list(weights)} the multipliers {multipliers} and the normalizer"
            f" {normalizer!r}. Scale the weights so that these, and their quotients, are finite numbers >= 0."
        )
    return factors


def _problems_of_ranks(world: World, error: Exception | None) -> str:
    """Return what every rank that failed met, the same text on all ranks."""
    text = None
    if error is not None:
        text = str(error) if isinstance(error, (TypeError, ValueError)) else f"{type(error).__name__}: {error}"
    texts = world.gather_objects(text)
    found = (f"{on_ranks(ranks)}: {text}" for text, ranks in ranks_by_value(texts).items() if text is not None)
    return f"average_gradients cannot reduce, {'; '.join(found)}."


def _difference_of_ranks(world: World, contribution: Contribution) -> str:
    """Return the first thing that the ranks do not have in common, the same text on all ranks."""
    gathered = world.gather_objects((contribution.reduction, contribution.wire_dtype, contribution.descriptions))
    reductions, wire_dtypes, descriptions = zip(*gathered, strict=True)
    if len(set(reductions)) > 1:
        return f"reduction= differs between ranks: {_by_value(reductions)}. Pass the same on all ranks."
    if len(set(wire_dtypes)) > 1:
        return f"wire_dtype= differs between ranks: {_by_value(map(repr, wire_dtypes))}. Pass the same on all ranks."
    if len(set(map(len, descriptions))) > 1:
        numbers = _by_value(f"{len(of_rank)} parameters" for of_rank in descriptions)
        return f"the ranks pass different numbers of parameters: {numbers}. Pass the same parameters on all ranks."
    different = next(of_ranks for of_ranks in zip(*descriptions, strict=True) if len(set(of_ranks)) > 1)
    return (
        f"the ranks pass different parameters: {_by_value(different)}."
        " Pass the same parameters in the same order on all ranks."
    )


def _by_value(values: Iterable[object]) -> str:
    return "; ".join(f"{value} {on_ranks(ranks)}" for value, ranks in ranks_by_value(values).items())


def _agreed_factors(rule: Rule, headers: Sequence[Header]) -> list[float]:
    """Return every rank's factor."""
    given = [header.weight is not None for header in headers]
    if any(given) and not all(given):
        present, absent = (
            [rank for rank, is_given in enumerate(given) if is_given is which] for which in (True, False)
        )
        raise ValueError(
            f"weight= was given {on_ranks(present)} but not {on_ranks(absent)}:"
            " pass it on all ranks, 0 where a rank has no loss term, or on none."
        )
    if rule.uses_weight and not any(given):
        raise ValueError(
            f"reduction={rule.name!r}, {rule.formula}, needs a weight: pass weight= on every rank,"
            " the number of loss terms (samples, tokens, ...) behind its gradient."
        )
    weights = [1.0 if header.weight is None else header.weight for header in headers]
    nodes = [header.node for header in headers]
    if None in nodes:
        count = len(weights)
        # One node, a node for each rank, and uneven nodes, which some rules tell apart only from the other two.
        layouts = ([0] * count, range(count), [0] * (count - 1) + [1])
        one_node, *others = (rank_factors(rule, layout, weights) for layout in layouts)
        if any(other != one_node for other in others):
            unknown = [rank for rank, node in enumerate(nodes) if node is None]
            raise ValueError(
                f"reduction={rule.name!r} depends on nodes, and no environment variable of the launcher tells the node"
                f" {on_ranks(unknown)}. Set NODE_RANK there to the index of the node, from 0."
            )
    return rank_factors(rule, [node or 0 for node in nodes], weights)


def _agreed_forms(world: World, contribution: Contribution, headers: Sequence[Header]) -> list[int]:
    """Return the form that each gradient has on the ranks where it is not None."""
    if len({header.gradients for header in headers}) == 1:
        return contribution.forms
    agreed = []
    of_parameters = zip(*world.gather_integers(contribution.forms), strict=True)
    for label, forms in zip(contribution.labels, of_parameters, strict=True):
        present = set(forms) - {ABSENT}
        if len(present) > 1:
            raise ValueError(
                f"the gradient of {label} differs between ranks: {_by_value(map(form_text, forms))}."
                " It must have one layout and one dtype wherever it is not None."
            )
        agreed.append(present.pop() if present else ABSENT)
    return agreed


def _reduce(
    world: World,
    parameters: Sequence[Tensor],
    forms: Sequence[int],
    factors: Sequence[float],
    codec: Codec | None,
) -> None:
    factor = factors[world.rank]
    # All factors are known: where all are 0, every rank discards what it has, and there is nothing to send.
    group = world.group if any(factors) else None
    dense, sparse, holders = [], [], []
    for parameter, form in zip(parameters, forms, strict=True):
        if form == ABSENT:
            continue
        gradient = _present(parameter, form)
        if gradient.is_sparse:
            sparse.append(gradient)
            holders.append(parameter)
        else:
            dense.append(gradient)
    if world.size == 1 and factor == 1:
        return
    sum_dense(dense, factor, group, codec)
    if sparse:
        for parameter, total in zip(holders, sum_sparse(sparse, factor, group), strict=True):
            parameter.grad = total


def _present(parameter: Tensor, form: int) -> Tensor:
    """Return the parameter's gradient: a zero one where it has none, a copy where it cannot be written in place."""
    gradient = parameter.grad
    if gradient is None:
        gradient = parameter.grad = _zero_gradient(parameter, form)
    elif not gradient.is_sparse and not _is_writable(gradient):
        gradient = parameter.grad = gradient.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return gradient


def _zero_gradient(parameter: Tensor, form: int) -> Tensor:
    dimensions = form_sparse_dim(form)
    if dimensions == 0:
        return torch.zeros_like(parameter, dtype=form_dtype(form))
    return torch.sparse_coo_tensor(
        torch.empty(dimensions, 0, dtype=torch.int64, device=parameter.device),
        torch.empty(0, *parameter.shape[dimensions:], dtype=form_dtype(form), device=parameter.device),
        parameter.shape,
        check_invariants=False,
    )


def _is_writable(gradient: Tensor) -> bool:
    """Return whether every element has a memory of its own (not so after `expand`) that holds its value itself."""
    if gradient.is_conj() or gradient.is_neg():
        return False
    if gradient.is_contiguous():
        return True
    reach = 1
    for stride, size in sorted(zip(gradient.stride(), gradient.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return False
            reach += stride * (size - 1)
    return True
