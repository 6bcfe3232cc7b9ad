"""The reduction of a sharded model: what `fully_shard` (FSDP2) and tensor parallelism change about ranks and gradients.

The engine averages over the data-parallel ranks, so losses carry the same numbers as under DDP. Ranks of one
tensor-parallel group compute one loss together, have one place, and give it one weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gradavg.lightning_internals import averages_of, sharded_modules
from lightning_gradavg.options import refuse_unserved
from lightning_gradavg.place import places_on_nodes
from lightning_gradavg.ranks import World, digest
from lightning_gradavg.reduction.weights import MicroBatch, WeighedLoss
from lightning_gradavg.reduction.window import Accumulation
from lightning_gradavg.rules import Rule, resolve_rule

__all__ = ["ShardedAccumulation", "sharded_rule"]

_RULES = ("mean", "sum", "weighted_mean", "normalized_sum")


def sharded_rule(reduction: str, options: Mapping[str, object], engine: type) -> Rule:
    """Return the rule that `reduction` names, after refusing options that the engine does not have."""
    refuse_unserved("GradAvgModelParallelStrategy", options, engine)
    rule = resolve_rule(reduction)
    if rule.name not in _RULES:
        raise ValueError(
            f"reduction={rule.name!r} needs the node of each rank, and ranks that share a model have none of their own."
            f" Use one of {', '.join(map(repr, _RULES))}."
        )
    return rule


class ShardedAccumulation(Accumulation):
    """The gradients of a window, where autograd accumulates into unsharded parameters, whose memory comes and goes.

    The optimizers' parameters have the gradients; optimizers may be added later. The mesh is Lightning's.
    """

    _stopped = 0.0  # not undefined: the engine waits for the gradients of all ranks

    def __init__(
        self, rule: Rule, module: nn.Module, mesh: Any, optimizers: Sequence[Optimizer], *, manual: bool
    ) -> None:
        self._ranks, tensor, world = mesh["data_parallel"].size(), mesh["tensor_parallel"], World.of(None)
        self._peers = World.of(tensor.get_group())
        shards, leaves = set[nn.Parameter](), set[nn.Parameter]()
        for each in sharded_modules(module):  # one at a time: unsharded, the whole model may not fit
            for size, divisor in averages_of(each):
                if {size, divisor} != {self._ranks}:
                    raise ValueError(
                        f"fully_shard sums gradients over {size} ranks and divides them by {divisor:g}; both must be"
                        f" data_parallel_size={self._ranks}. Set the strategy's sizes, leave out"
                        ' set_gradient_divide_factor, and pass mesh=self.device_mesh["data_parallel"].'
                    )
            resharded = set(each.parameters())
            each.unshard()
            unsharded = set(each.parameters())
            each.reshard()
            shards |= resharded - unsharded
            leaves |= unsharded - resharded
        self._outside = {one: name for name, one in module.named_parameters() if one not in shards}
        leaves |= self._outside.keys()
        self._require_averaged()
        weighs, half = rule.name != "mean", any(leaf.dtype == torch.float16 and leaf.requires_grad for leaf in leaves)
        # Ranks of one tensor-parallel group stand in one place.
        places = [place for place in places_on_nodes([0] * self._ranks) for _ in range(self._peers.size)]
        numbers = rule, places, world, next(module.parameters()).device
        ways: Any = {"compares": manual and weighs, "afterwards": manual or half}
        super().__init__(*numbers, parameters=(), owned_by_user=manual, leaves=list(leaves), guards=weighs, **ways)
        self._optimizers = optimizers

    def _require_averaged(self) -> None:
        outside = [name for parameter, name in self._outside.items() if parameter.requires_grad]
        if outside and self._ranks > 1:
            raise ValueError(
                f"the parameter {outside[0]!r} trains outside of fully_shard: nothing averages its gradient, and the"
                " ranks would drift apart. Call fully_shard on the root module, too, or freeze it."
            )

    def _micro_batch(self, loss: WeighedLoss) -> MicroBatch:
        if self.length == 0:
            of_groups = (group["params"] for optimizer in self._optimizers for group in optimizer.param_groups)
            self.parameters = list(dict.fromkeys(parameter for group in of_groups for parameter in group))
            self._require_averaged()
        micro_batch = self._agreed(super()._micro_batch(loss).read())
        pairs = [] if micro_batch.is_zero else zip(micro_batch.weights.items(), loss.terms, strict=False)
        for name in [name for (name, n), term in pairs if n == 0 and not bool(term.isfinite())]:
            # 0 times NaN is NaN, and an undefined gradient would not be sent to the ranks that wait for it.
            text = f"loss term {name!r} of weight 0 is not finite: select what is finite before you compute it"
            micro_batch = micro_batch._replace(problem=text)
        return micro_batch

    def _agreed(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return it with the problem that ranks of one tensor-parallel group weigh it differently, if they do."""
        weights = str({name or "weight": n for name, n in micro_batch.weights.items()})
        keys = self._peers.gather_integers([digest(weights)]) if self.rule.uses_weight else []
        if all(key == keys[0] for key in keys):
            return micro_batch
        text = f"ranks of one tensor-parallel group weigh one batch differently, here by {weights}"
        return micro_batch._replace(problem=f"{text}: have them read the same batches")

    def _scale(self, gradients: Sequence[Tensor], factor: Any) -> None:
        if not gradients:
            raise RuntimeError(
                "the optimizers' parameter groups show no gradients to scale. Make the optimizer after fully_shard, in"
                " Fabric by fabric.setup_optimizers, and do not step or free gradients within the backward."
            )
        super()._scale(gradients, factor)
