"""The reduction of a sharded model: what `fully_shard` (FSDP2) and tensor parallelism change about ranks and gradients.

Losses carry the same numbers as under DDP. FSDP2 averages over the data-parallel ranks in every backward, and the
shards are multiplied after the last one. Ranks of one tensor-parallel group compute one loss together, have one place,
and give it one weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_gradavg._lightning.internals import averages_of, sharded_modules
from lightning_gradavg._lightning.options import refuse_unserved
from lightning_gradavg._support.place import Place, places_on_nodes
from lightning_gradavg.reduction.gradients import KeepsApart, scale_gradients
from lightning_gradavg.rules import Rule, resolve_rule

__all__ = ["ShardedGradients", "sharded_rule"]

# Ranks of a tensor-parallel group compute one loss, and may be on several nodes: "the ranks on a node" would be none.
_RULES = ("mean", "sum", "weighted_mean", "normalized_sum")


def sharded_rule(reduction: str, options: Mapping[str, object], engine: type) -> Rule:
    """Return the rule that `reduction` names, after refusing options that the engine does not have."""
    refuse_unserved("GradAvgModelParallelStrategy", ("reduction",), options, engine)
    rule = resolve_rule(reduction)
    if rule.name not in _RULES:
        raise ValueError(
            f"reduction={rule.name!r} needs the node of each rank, and ranks that share a model have none of their own."
            f" Use one of {', '.join(map(repr, _RULES))}."
        )
    return rule


class ShardedGradients(KeepsApart):
    """The gradients of a sharded model, as `Gradients` asks for them.

    Autograd accumulates into unsharded parameters, whose memory comes and goes. FSDP reduces their gradients into
    shards, which are the parameters of the optimizers.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, optimizers: Sequence[Optimizer]) -> None:
        """Find the unsharded parameters; raise a ValueError unless FSDP averages over the data-parallel ranks.

        Args:
            module: The sharded model.
            mesh: Lightning's mesh, of the dimensions "data_parallel" and "tensor_parallel".
            optimizers: The strategy's list, asked for parameters at every window: it may get more optimizers.
        """
        super().__init__()
        self.copies = mesh["tensor_parallel"].size()
        self.data_parallel_size = mesh["data_parallel"].size()
        self._optimizers = optimizers
        # `FSDPModule.unshard` registers unsharded parameters in the place of shards, and `reshard` undoes it
        # (`FSDPParam.to_unsharded`, `to_sharded`). They are the same objects each time, so hooks on them stay.
        shards: set[nn.Parameter] = set()
        unsharded: set[nn.Parameter] = set()
        for submodule in sharded_modules(module):  # in turn: unsharded, the whole model may not fit
            self._require_division(submodule)
            resharded = set(submodule.parameters())
            submodule.unshard()
            whole = set(submodule.parameters())
            submodule.reshard()
            shards |= resharded - whole
            unsharded |= whole - resharded
        self._outside: dict[nn.Parameter, str] = {}
        for name, parameter in module.named_parameters():
            if parameter not in shards:
                self._outside[parameter] = name
        self._leaves = [*unsharded, *self._outside]
        self._require_sharded()

    @property
    def places(self) -> list[Place]:
        """The place of every rank; ranks of one tensor-parallel group stand in one place."""
        # Nodes are 0: rules that count them are refused (`sharded_rule`). Lightning's mesh is (data, tensor), so the
        # ranks of a tensor-parallel group follow each other.
        places: list[Place] = []
        for place in places_on_nodes([0] * self.data_parallel_size):
            places += [place] * self.copies
        return places

    def _require_division(self, submodule: nn.Module) -> None:
        """Raise a ValueError unless FSDP divides a submodule's summed gradients by the number of ranks."""
        # `reduce` turns an average over these ranks into the rule, and no other sum.
        ranks = self.data_parallel_size
        for size, divisor in averages_of(submodule):
            if size != ranks or divisor != ranks:
                raise ValueError(
                    f"fully_shard sums gradients over {size} ranks and divides them by {divisor:g}; both must be"
                    f" data_parallel_size={ranks}. Set the strategy's sizes, leave out"
                    ' set_gradient_divide_factor, and pass mesh=self.device_mesh["data_parallel"].'
                )

    def _require_sharded(self) -> None:
        """Raise a ValueError if a parameter trains that is not sharded: nothing averages its gradient."""
        # At every window's beginning: a parameter may be unfrozen later.
        if self.data_parallel_size == 1:
            return
        for parameter, name in self._outside.items():
            if parameter.requires_grad:
                raise ValueError(
                    f"the parameter {name!r} trains outside of fully_shard: nothing averages its gradient, and the"
                    " ranks would drift apart. Call fully_shard on the root module, too, or freeze it."
                )

    def parameters(self) -> Sequence[nn.Parameter]:
        """Return the parameters of the optimizers, after checking that all that trains is sharded."""
        self._require_sharded()
        found: dict[nn.Parameter, None] = {}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                found.update(dict.fromkeys(group["params"]))
        return list(found)

    def leaves(self) -> Sequence[nn.Parameter]:
        """Return the unsharded parameters, and those outside of `fully_shard`."""
        return self._leaves

    def reduce(self, parameters: Sequence[nn.Parameter], factor: float, *, in_hook: bool) -> None:  # noqa: ARG002  # DDP
        """Multiply the gradients of the shards, which FSDP2 has averaged over the data-parallel ranks."""
        if scale_gradients(parameters, factor * self.data_parallel_size) == 0:
            raise RuntimeError(
                "the optimizers' parameter groups show no gradients to scale. Make the optimizer after fully_shard, and"
                " do not step or free gradients within the backward. Or an exception came out of a backward before, and"
                " the loop went on: FSDP2 reduces no more then."
            )

    def reduce_unfrozen(self, factor: float) -> None:  # noqa: ARG002  # FSDP2 averages
        """Reduce nothing; raise a ValueError if a parameter trains that is not sharded."""
        self._require_sharded()

    def abandon(self, *, are_zeroed: bool = False) -> None:
        """Discard the gradients of the window, also those that FSDP2 has not reduced yet.

        With a `reduce_dtype` other than the parameters', FSDP2 keeps them out of reach (docs/sharded.md).
        """
        for leaf in self._leaves:
            if leaf not in self._outside:
                leaf.grad = None
        super().abandon(are_zeroed=are_zeroed)
