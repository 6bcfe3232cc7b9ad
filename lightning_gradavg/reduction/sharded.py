"""The reduction of a sharded model: what `fully_shard` (FSDP2) and tensor parallelism change about ranks and gradients.

The engine averages over the data-parallel ranks, so losses carry the same numbers as under DDP. Ranks of one
tensor-parallel group compute one loss together, have one place, and give it one weight.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_gradavg.device import on_device
from lightning_gradavg.lightning_internals import averages_of, sharded_modules
from lightning_gradavg.place import places_on_nodes
from lightning_gradavg.ranks import World, by_rank, digest
from lightning_gradavg.reduction.accumulation import Accumulation
from lightning_gradavg.reduction.gather import weigh_losses_from_here
from lightning_gradavg.reduction.reducer import GradAvgReducer
from lightning_gradavg.reduction.weigh import WeighedLoss
from lightning_gradavg.reduction.weights import MicroBatch, Weights
from lightning_gradavg.reduction.window import Window
from lightning_gradavg.rules import RULES, Rule, RuleFunction, resolve_rule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["REFUSED", "ShardedAccumulation", "ShardedModel", "ShardedReducer", "ShardedWeights", "sharded_rule"]

_RULES = ("mean", "sum", "weighted_mean", "normalized_sum")

_DDP_OPTIONS = [*signature(DistributedDataParallel.__init__).parameters][2:]
_OF_DDP = (*_DDP_OPTIONS, "ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "start_method", "ddp_options")
_OF_STEP = "needs the whole gradient of a rank, of which a sharded rank holds a part"
_OF_BATCHES = "cuts loader batches, of which ranks of one tensor-parallel group need the same part: set the loader's"
_RATES = "follows the global batch of GradAvgStrategy: set the learning rate that `gradavg plan` prints"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("equivalent_to", "num_replicas", "reproducible"), _OF_STEP),
    **dict.fromkeys(("split_batches", "max_device_batch_size"), f"{_OF_BATCHES} batch_size"),
    **dict.fromkeys(("lr_scaling", "base_batch_size", "base_world_size", "lr_warmup_steps"), _RATES),
    "allow_recipe_change": "is about recipes, which only checkpoints of GradAvgStrategy hold",
    "exact_evaluation": "deals batches to ranks one by one, and a sharded forward needs all ranks at once",
    "nonfinite": f"{_OF_STEP}: give a loss that is not finite the weight 0",
    "check_replicas_every_n_steps": "compares replicas, which shards are not",
    **dict.fromkeys(_OF_DDP, "configures DistributedDataParallel, or what starts it: configure fully_shard instead"),
    "model_averaging_period": "averages weights instead of reducing gradients",
    "log_hyperparams": "is for GradAvgStrategy: call log_hyperparams of your loggers",
}
"""Options of `GradAvgStrategy` that the strategies of sharded models refuse, each with the reason."""

_UNSEEN = (
    "the window's gradients cannot be seen in the optimizers' parameter groups, so they would keep a wrong scale. Make"
    " the optimizer of the sharded module's parameters, after fully_shard; in Fabric, set it up by"
    " fabric.setup_optimizers; and do not step or free gradients within the backward."
)
_UNWEIGHED = (
    "a gradient reached the sharded model by a backward that bypassed reduction={!r}, so it would be averaged."
    " Call self.manual_backward(loss, weight=...), or fabric.backward(loss, weight=...), instead of loss.backward()."
)
_UNEVEN = (
    "fully_shard averages gradients over {size} ranks, and data_parallel_size is {ranks}. Set data_parallel_size={size}"
    " and tensor_parallel_size to the ranks that share a batch, or call fully_shard with"
    ' mesh=self.device_mesh["data_parallel"].'
)
_DIVIDED = (
    "set_gradient_divide_factor({divisor:g}) has fully_shard divide by another number than the {size} ranks that it"
    " averages over, which every rule counts on. Leave it out, and choose a reduction."
)
_OUTSIDE = (
    "the parameter {!r} trains outside of fully_shard ({} such in all): nothing averages its gradient, and the ranks"
    " would drift apart. Call fully_shard on the root module, too, or freeze it with requires_grad_(False)."
)


def sharded_rule(reduction: str | RuleFunction | Rule) -> Rule:
    """Return the rule that `reduction` names; a ValueError for one that sharded models cannot follow."""
    rule = resolve_rule(reduction)
    if rule not in [RULES[name] for name in _RULES]:
        raise ValueError(
            f"reduction={rule.name!r} needs the node of each rank, and ranks that share a model have none of their own."
            f" Use one of {', '.join(map(repr, _RULES))}."
        )
    return rule


class ShardedModel:
    """A module whose parameters are sharded, and the ranks that share it.

    Args:
        module: The module, sharded and on its device.
        mesh: Lightning's mesh, of the dimensions "data_parallel" and "tensor_parallel".

    Attributes:
        ranks: The number of data-parallel ranks, over which gradients are averaged.
        peers: The ranks that compute one loss together.
        leaves: The parameters that autograd accumulates into: unsharded ones, whose memory comes and goes.

    Raises:
        ValueError: If the engine would not average the gradient of a parameter over the data-parallel ranks.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        tensor = mesh["tensor_parallel"]
        self.ranks = mesh["data_parallel"].size()
        self.peers = World.of(tensor.get_group()) if tensor.size() > 1 else World()
        self.device = next(module.parameters()).device
        self._modules = sharded_modules(module)
        self._apart = {parameter: name for name, parameter in module.named_parameters()}
        self.leaves: list[nn.Parameter] = []
        for each in self._modules:  # one at a time: unsharded, the whole model may not fit
            before = dict(each.named_parameters())
            each.unshard()
            for name, parameter in each.named_parameters():
                if parameter is not before[name]:
                    self._apart.pop(before[name], None)
                    self.leaves.append(parameter)
            each.reshard()
        self.leaves += self._apart
        self.require_averaged(module.parameters())

    def require_averaged(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raise a ValueError if one of them trains, and is not averaged over the data-parallel ranks."""
        for size, divisor in (average for each in self._modules for average in averages_of(each)):
            if size != self.ranks:
                raise ValueError(_UNEVEN.format(size=size, ranks=self.ranks))
            if divisor not in (None, size):
                raise ValueError(_DIVIDED.format(size=size, divisor=divisor))
        outside = [self._apart[one] for one in parameters if one in self._apart and one.requires_grad]
        if outside and self.ranks > 1:
            raise ValueError(_OUTSIDE.format(outside[0], len(outside)))

    def window(self, rule: Rule, *, manual: bool) -> Window:
        """Return the window of all ranks, of which those of one tensor-parallel group stand in one place."""
        world, places = World.of(None), places_on_nodes([0] * self.ranks)
        of_ranks = [places[rank // self.peers.size] for rank in range(world.size)]
        half = any(leaf.dtype == torch.float16 and leaf.requires_grad for leaf in self.leaves)
        compares = manual and rule != RULES["mean"]
        return Window(rule, of_ranks, world, self.device, compares=compares, afterwards=manual or half)


class ShardedWeights(Weights):
    """Reads the weights of micro-batches, on which tensor-parallel ranks must agree. The arguments are those above."""

    def __init__(self, model: ShardedModel, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._model = model

    def read(self, terms: Mapping[str, Tensor], *arguments: Any, **named: Any) -> MicroBatch:  # type: ignore[override]  # the losses
        """Return the weights of a micro-batch, and note why they cannot be used. A collective operation of one group.

        Raises:
            RuntimeError: If the loss has no graph, whose backward the other ranks wait for.
        """
        micro_batch = super().read(terms, *arguments, **named).read()
        if not any(term.requires_grad for term in terms.values()):
            raise RuntimeError(
                "a loss without a graph was given where the model is sharded: the backward of this rank is one that the"
                " others need. Compute the loss from the model's output, and give it the weight 0."
            )
        # 0 times NaN is NaN, and an undefined gradient would not be sent to the ranks that wait for it.
        lost = [name for name, n in micro_batch.weights.items() if n == 0 and not micro_batch.is_zero]
        for name in [name for name in lost if not bool(terms[name].isfinite())]:
            text = f"loss term {name!r} is {terms[name].item()} with weight 0, beside a term that counts: select"
            micro_batch = replace(micro_batch, problem=f"{text} what is finite before it is summed")
        return self._agreed(micro_batch)

    def _agreed(self, micro_batch: MicroBatch) -> MicroBatch:
        peers, key = self._model.peers, digest(repr(sorted(micro_batch.weights.items())))
        if peers.group is None or not self._rule.uses_weight:
            return micro_batch
        bounds = on_device(torch.tensor([key, -key]), self._model.device)
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=peers.group)
        if int(bounds.sum()) == 0:
            return micro_batch
        found = by_rank(peers.gather_objects(str({name or "weight": n for name, n in micro_batch.weights.items()})))
        text = f"ranks of one tensor-parallel group weigh one batch differently ({found}, counted within the group)"
        return replace(micro_batch, problem=f"{text}: have them read the same batches")


class ShardedAccumulation(Accumulation):
    """The gradients of a window, as the optimizers see them: a module shows unsharded parameters, which have none.

    Args:
        window: The window.
        model: The model.
        optimizers: Those of the run, to which some may be added later.
        owned_by_user: As of `Accumulation`.
    """

    def __init__(
        self, window: Window, model: ShardedModel, optimizers: Sequence[Optimizer], *, owned_by_user: bool
    ) -> None:
        super().__init__(window, (), owned_by_user=owned_by_user, leaves=model.leaves)
        self._model, self._optimizers, self._running = model, optimizers, False
        watched = [leaf for leaf in model.leaves if leaf.requires_grad and window.rule != RULES["mean"]]
        self._handles = [leaf.register_hook(self._require_weighed) for leaf in watched]

    def _require_weighed(self, gradient: Tensor) -> None:
        del gradient
        if not self._running:
            raise RuntimeError(_UNWEIGHED.format(self.window.rule.name))

    def start(self, loss: WeighedLoss, inside: ExitStack, **options: Any) -> None:
        """Weigh a loss whose backward begins now: see `Accumulation.start`."""
        if self.window.length == 0:
            of_groups = (group["params"] for optimizer in self._optimizers for group in optimizer.param_groups)
            self.parameters = list(dict.fromkeys(parameter for group in of_groups for parameter in group))
            self._model.require_averaged(self.parameters)
        self._running = True
        super().start(loss, inside, **options)

    def reduce(self) -> bool:
        """Finish the gradients after a backward."""
        self._running = False
        return super().reduce()

    def abandon(self) -> None:
        """Give the window up."""
        self._running = False
        super().abandon()

    def _holds_any(self, gradients: Sequence[Tensor]) -> bool:
        # One shard may be 0 and another not.
        found = on_device(torch.tensor([super()._holds_any(gradients)], dtype=torch.int32), self._model.device)
        if self.window.world.group is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.window.world.group)
        return bool(found)

    def _scale(self, gradients: Sequence[Tensor], factor: Any) -> None:
        if not gradients:
            raise RuntimeError(_UNSEEN)
        super()._scale(gradients, factor)

    def close(self) -> None:
        """Leave the parameters as they were found."""
        for handle in self._handles:
            handle.remove()


class ShardedReducer(GradAvgReducer):
    """Weighs losses in a loop of one's own whose model is sharded.

    Attributes:
        holding: Whether the window goes on after the next backward.
    """

    holding = False

    def shard(self, module: nn.Module, mesh: DeviceMesh, optimizers: Sequence[Optimizer]) -> None:
        """Reduce the gradients of a sharded model by the rule from now on. A collective operation.

        Args:
            module: The module.
            mesh: As of `ShardedModel`.
            optimizers: Those of its parameters, to which some may be added later.
        """
        if self._registered:
            raise ValueError("one strategy shards one model, as its checkpoints do: use a strategy for each")
        model, rule = ShardedModel(module, mesh), self._rule
        self._window = model.window(rule, manual=True)
        self._weights = ShardedWeights(
            model, rule, model.device, "fabric.backward was given", warnings.warn, lambda _: None
        )
        self._accumulation = ShardedAccumulation(self._window, model, optimizers, owned_by_user=True)
        self._sparse: list[Tensor] = []
        watched: Any = module
        self._handles = [module.register_forward_pre_hook(lambda *_: weigh_losses_from_here(weighed=True))]
        self._registered = [weakref.ref(watched)]

    def _ends_window(self) -> bool:
        return not self.holding
