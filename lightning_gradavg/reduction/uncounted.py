"""The backward of a rank whose loss does not count: its weight is 0, it has no loss, or its samples only stand in.

A rank without samples of a batch computes others in their place, a stand-in. The other ranks wait for its backward: in
DDP's buckets, and in the backward of all that they exchanged with it. Through an exchange come the gradients of their
losses, which count.

| the loss             | its backward                                                                             |
|----------------------|------------------------------------------------------------------------------------------|
| has a graph          | that of its graph, from a gradient of 0. `pass_no_nan` removes NaN, such as 0 times an   |
|                      | infinite derivative                                                                      |
| has no graph, or is  | that of `zero_loss`: zeros for every parameter, and for everything that was exchanged    |
| None                 |                                                                                          |
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from lightning_gradavg._lightning.internals import after_backward, in_reentrant_checkpoint
from lightning_gradavg._support.flat import local_part
from lightning_gradavg._support.running import OF_A_LOOP, running_forward

__all__ = ["note_exchange", "note_hidden_exchange", "pass_no_nan", "sparse_weights", "zero_loss"]

_LEAF = "torch::autograd::AccumulateGrad"
"""The name of a leaf: the node that adds a gradient to the `grad` of a parameter, and passes nothing on."""


def pass_no_nan(root: Node) -> None:
    """Have no function behind a node pass on a NaN, in the backward that has just begun at the node.

    The node is that of the loss (`loss.weighed`): it calls this, and passes on 0. NaN becomes 0 after every function.
    At the leaves and at exchanges it would be too late: there, NaN of this rank's loss was already added to what other
    ranks send back through `gather` or batch norm (`test_ranks_crossing.py`: UNCOUNTED). Infinity passes: it may be
    another rank's.
    """
    hooks: list[RemovableHandle] = []
    with torch.profiler.record_function("GradAvg: pass no NaN"):
        for node in _nodes_behind(root):
            hooks.append(node.register_hook(_without_nan))

    def remove() -> None:
        # The graph may have another loss, which counts, and keep its NaN.
        for hook in hooks:
            hook.remove()

    after_backward(ended=remove, failed=remove)


def _nodes_behind(root: Node) -> set[Node]:
    """Return the functions whose backward runs after that of a node, without the leaves."""
    found: set[Node] = set()
    waiting: list[Node | None] = [node for node, _ in root.next_functions]
    while waiting:
        node = waiting.pop()
        if node is None or node in found or node.name() == _LEAF:
            continue
        found.add(node)
        waiting.extend(behind for behind, _ in node.next_functions)
    return found


def _without_nan(gradients: Sequence[Tensor | None], _: object) -> tuple[Tensor | None, ...]:
    """Return what a function passes on, with 0 in place of NaN."""
    return tuple(_zeroed_where_nan(gradient) for gradient in gradients)


def _zeroed_where_nan(gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    # A copy: autograd may hold the tensor elsewhere. In place, the layout of sparse and sharded gradients stays.
    zeroed = gradient.clone()
    values = local_part(zeroed)
    if zeroed.is_sparse:
        # Before it is coalesced, a sparse gradient shows no values.
        zeroed = zeroed.coalesce()
        values = zeroed.values()
    values.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
    return zeroed


def note_exchange(name: str, begin_of_backward: Tensor) -> None:
    """Note an exchange with other ranks, in a training step of a strategy; in a loop of the user's own do nothing.

    `gather`, batch norm over all ranks and sharded models call this. If the step returns no loss, `zero_loss` must
    reach the backward of the exchange. Within a reentrant checkpoint it cannot, as only the checkpoint's output reaches
    it: then a missing loss is an error, which names the exchange.

    Args:
        name: What messages call the exchange.
        begin_of_backward: A tensor by which a loss reaches the backward of the exchange.
    """
    forward = running_forward()
    if forward is OF_A_LOOP:
        return
    if begin_of_backward.requires_grad:
        forward.exchanged.append(begin_of_backward)
    elif in_reentrant_checkpoint():
        forward.hidden_exchanges.append(f"{name} within a reentrant checkpoint")


def note_hidden_exchange(name: str, sent: Tensor) -> None:
    """Note an exchange of torch's, in a training step of a strategy: that of `self.all_gather(..., sync_grads=True)`.

    Only a loss reaches its backward: a missing one is an error, which names the exchange. `zero_loss` cannot take its
    place, as the exchange runs in DDP's process group, where ranks would meet in another order.

    Args:
        name: What messages call the exchange.
        sent: What is exchanged. If it needs no gradient, there is no backward.
    """
    forward = running_forward()
    if forward is OF_A_LOOP:
        return
    has_backward = torch.is_grad_enabled() and sent.requires_grad
    if has_backward or in_reentrant_checkpoint():
        forward.hidden_exchanges.append(name)


def sparse_weights(module: nn.Module) -> dict[int, Tensor]:
    """Return the parameters of a module with sparse gradients, by `id`.

    No attribute of a parameter says so. A layer of the user's own with sparse gradients is not found.
    """
    found: dict[int, Tensor] = {}
    for submodule in module.modules():
        if isinstance(submodule, (nn.Embedding, nn.EmbeddingBag)) and submodule.sparse:
            found[id(submodule.weight)] = submodule.weight
    return found


class _ZeroGradients(torch.autograd.Function):
    """A number 0 that depends on some tensors, each with a gradient of 0.

    A loss such as `0 * sum(p.sum() for p in parameters)` would read all parameters, be NaN if one of them is, and give
    an embedding with sparse gradients a dense one, where DDP's reducer waits for a sparse one.
    """

    @staticmethod
    def forward(ctx: Any, sparse: Container[int], *tensors: Tensor) -> Tensor:
        ctx.tensors = tensors  # not saved for the backward: their values are not read, and may change in between
        ctx.is_sparse = [id(tensor) in sparse for tensor in tensors]
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor] = []
        for tensor, is_sparse in zip(ctx.tensors, ctx.is_sparse, strict=True):
            if is_sparse:
                gradients.append(_no_rows(tensor))
            else:
                gradients.append(torch.zeros_like(tensor))
        return None, *gradients  # None for `sparse`


def _no_rows(parameter: Tensor) -> Tensor:
    """Return a sparse gradient without rows."""
    values = parameter.new_empty((0, *parameter.shape[1:]))
    indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    # The invariants hold by construction; checking them would wait for the device.
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def zero_loss(parameters: Sequence[Tensor], sparse: Container[int], exchanged: Sequence[Tensor]) -> Tensor:
    """Return a loss of 0 whose backward gives zeros to every trained parameter, and to all that was exchanged.

    It takes the place of a missing loss. It runs the backward of each exchange once: autograd runs the latest first, as
    on the other ranks.

    Args:
        parameters: The parameters of the model.
        sparse: The `id` of each whose gradient is sparse.
        exchanged: What `Forward.exchanged` holds.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    loss: Tensor = _ZeroGradients.apply(sparse, *trained, *exchanged)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return loss
