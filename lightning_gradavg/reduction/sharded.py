"""The reduction of a sharded model: what `fully_shard` (FSDP2) and tensor parallelism change about ranks and gradients.

The engine averages over the data-parallel ranks, so losses carry the same numbers as under DDP. Ranks of one
tensor-parallel group compute one loss together, have one place, and give it one weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_gradavg._lightning.internals import averages_of, discard_unsharded_gradients, sharded_modules
from lightning_gradavg._lightning.options import refuse_unserved
from lightning_gradavg._support.collectives import World, digest
from lightning_gradavg._support.place import Place, places_on_nodes
from lightning_gradavg.reduction.gradients import scale_gradients
from lightning_gradavg.reduction.lift import WindowOptions
from lightning_gradavg.reduction.loss import MicroBatch
from lightning_gradavg.rules import Rule, resolve_rule

__all__ = ["ShardedGradients", "sharded_options", "sharded_rule"]

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


def sharded_options(rule: Rule, gradients: ShardedGradients, *, user_ends_windows: bool) -> WindowOptions:
    """Return the options of the windows of a sharded model."""
    return WindowOptions(
        rule=rule,
        places=gradients.places,
        world=World.of(None),
        device=gradients.device,
        user_ends_windows=user_ends_windows,
        has_float16=any(leaf.dtype == torch.float16 for leaf in gradients.leaves()),
    )


class ShardedGradients:
    """The gradients of a sharded model, as `ModelGradients` asks for them.

    Autograd accumulates into unsharded parameters, whose memory comes and goes. FSDP reduces their gradients into
    shards, which are the parameters of the optimizers. Optimizers may be added later. The mesh is Lightning's.
    """

    def __init__(self, rule: Rule, module: nn.Module, mesh: DeviceMesh, optimizers: Sequence[Optimizer]) -> None:
        """Find the unsharded parameters; raise a ValueError unless FSDP averages over the data-parallel ranks."""
        self.data_parallel_size = mesh["data_parallel"].size()
        self.device = next(module.parameters()).device
        self._rule = rule
        self._module = module
        self._optimizers = optimizers
        self._peers = World.of(mesh["tensor_parallel"].get_group())  # of this rank's tensor-parallel group
        # `FSDPModule.unshard` registers unsharded parameters in the place of shards, and `reshard` undoes it
        # (`FSDPParam.to_unsharded`, `to_sharded`). They are the same objects each time, so hooks on them stay.
        shards: set[nn.Parameter] = set()
        unsharded: set[nn.Parameter] = set()
        for submodule in sharded_modules(module):  # in turn: unsharded, the whole model may not fit
            self._require_average_of(submodule)
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
        self._require_averaged()

    @property
    def places(self) -> list[Place]:
        """The place of every rank; ranks of one tensor-parallel group stand in one place."""
        # Nodes are 0: rules that count them are refused (`sharded_rule`). Lightning's mesh is (data, tensor), so the
        # ranks of a tensor-parallel group follow each other.
        places: list[Place] = []
        for place in places_on_nodes([0] * self.data_parallel_size):
            places += [place] * self._peers.size
        return places

    def _require_average_of(self, submodule: nn.Module) -> None:
        """Raise a ValueError unless FSDP divides a submodule's summed gradients by the number of ranks."""
        # The factors of `reduction.factor` turn an average over W ranks into the rule, and no other sum.
        ranks = self.data_parallel_size
        for size, divisor in averages_of(submodule):
            if size != ranks or divisor != ranks:
                raise ValueError(
                    f"fully_shard sums gradients over {size} ranks and divides them by {divisor:g}; both must be"
                    f" data_parallel_size={ranks}. Set the strategy's sizes, leave out"
                    ' set_gradient_divide_factor, and pass mesh=self.device_mesh["data_parallel"].'
                )

    def _require_averaged(self) -> None:
        """Raise a ValueError if a parameter trains whose gradient nothing averages."""
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
        """Return the parameters of the optimizers, after checking that FSDP averages what trains."""
        self._require_averaged()
        found: dict[nn.Parameter, None] = {}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                found.update(dict.fromkeys(group["params"]))
        return list(found)

    def leaves(self) -> Sequence[nn.Parameter]:
        """Return the unsharded parameters, and those outside of `fully_shard`."""
        return self._leaves

    def checked(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch with the problem that its tensor-parallel group weighs it differently, if it does."""
        if not self._rule.uses_weight:
            return micro_batch
        # Also with a problem of its own, which its peers do not know of: they wait here.
        digest_of_peer = self._peers.gather_integers([digest(str(micro_batch.weight))])
        if micro_batch.problem is not None or all(row == digest_of_peer[0] for row in digest_of_peer):
            return micro_batch
        return micro_batch._replace(
            problem="ranks of one tensor-parallel group weigh one batch differently, here by"
            f" {micro_batch.weight:g}: have them read the same batches"
        )

    def discard(self) -> None:
        """Free the gradients that FSDP has not reduced yet."""
        discard_unsharded_gradients(self._module)

    def finish(self, parameters: Sequence[nn.Parameter], factor: float) -> None:
        """Multiply the gradients of the shards."""
        # Nothing to multiply, and nothing to find wrong: an optimizer without gradients is then stock FSDP2's business.
        if factor == 1:
            return
        if scale_gradients(parameters, factor) == 0:
            raise RuntimeError(
                "the optimizers' parameter groups show no gradients to scale. Make the optimizer after fully_shard, in"
                " Fabric by fabric.setup_optimizers, and do not step or free gradients within the backward."
            )
