"""Fabric, and DDP in a plain loop. Rules, windows and weights are rows of `cases.py`; this is what only loops have."""

from __future__ import annotations

import gc
import pickle
import re
import warnings
import weakref
from collections.abc import Callable
from contextvars import copy_context
from itertools import chain
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from toys import WEIGHTED, FabricLoop, OneWeight, TorchLoop, approx

from lightning_gradavg import GradAvgModelParallelStrategy as OfTrainerSharded
from lightning_gradavg import GradAvgReducer, average_gradients, gather
from lightning_gradavg.fabric import GradAvgStrategy
from lightning_gradavg.reduction.gradients import ReplicatedGradients

OF_RANKS = ([1.0, 2.0, 3.0], [5.0, 7.0])
"""The samples of each rank, whose mean is 3.6."""
SQUARES = sum(x * x for x in OF_RANKS[0] + OF_RANKS[1]) / 5
either_loop = pytest.mark.parametrize("loop", [FabricLoop, TorchLoop])


def begin(loop: Callable[..., Any] = TorchLoop, **options: Any) -> tuple[Any, OneWeight, Any, Tensor]:
    """Return a loop, a module, what the loop makes of it, and the samples of this rank."""
    a_loop = loop(**{**WEIGHTED, **options})
    module = OneWeight()
    return a_loop, module, a_loop.set_up(module), torch.tensor(OF_RANKS[dist.get_rank()], dtype=torch.float64)


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
def test_a_strategy_can_be_pickled(reduction):
    """As for the processes that Fabric spawns."""
    strategy = pickle.loads(pickle.dumps(GradAvgStrategy(reduction=reduction, split_batches=True)))
    assert strategy.samples is None
    assert f"reduction={reduction!r}" in repr(strategy)


def spawned(fabric: Fabric) -> float:
    """Body: train in a process that Fabric has spawned; return the gradient."""
    model = fabric.setup(module := OneWeight())
    x = torch.tensor(OF_RANKS[fabric.global_rank], dtype=torch.float64)
    fabric.backward(model(x).mean(), weight=len(x))
    return float(module.gradient)


# Both send a pickle. What is spawned imports everything anew, and takes 8 s of the processor.
@pytest.mark.parametrize("start_method", ["forkserver", pytest.param("spawn", marks=pytest.mark.full)])
def test_spawned_processes_train(start_method):
    strategy = GradAvgStrategy(**WEIGHTED, start_method=start_method)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    assert approx(3.6) == fabric.launch(spawned)


@on_ranks()
def test_no_option_is_stock():
    """Without options the strategy is Fabric's DDP: the same bits, and no communication hook."""
    found = []
    for a_loop in (FabricLoop(strategy="ddp"), FabricLoop()):
        model = a_loop.set_up(module := OneWeight())
        for factor, last in ((1.0, True), (3.0, False), (0.1, True)):
            with a_loop.no_sync(model, enabled=not last):
                a_loop.backward(model(factor * torch.tensor(OF_RANKS[dist.get_rank()])).mean())
        found.append(module.gradient)
        assert not module._backward_hooks
    assert found[0] == found[1]


@pytest.mark.parametrize("weight", [2, 0])
@either_loop
@on_ranks()
def test_a_gather_crosses_ranks(loop, weight):
    a_loop, module, model, x = begin(loop)
    a_loop.backward((gather(model(x)) ** 2).mean(), weight=[3, weight][dist.get_rank()])
    assert approx(2 * SQUARES) == module.gradient


@pytest.mark.parametrize(("once", "left"), [(True, None), (False, 3.6)])
@either_loop
@on_ranks()
def test_a_backward_that_is_not_reduced(loop, once, left):
    """Where DDP would leave each rank its own gradient an error says which forward, and gradients are as before.

    That is after a forward within `no_sync`, and in a second backward of a forward.
    """
    a_loop, module, model, x = begin(loop)
    with a_loop.no_sync(model, enabled=once):
        outputs = model(x)
    if not once:
        a_loop.backward(outputs.mean(), weight=len(x), retain_graph=True)
    with pytest.raises(RuntimeError, match="outside of it, too; and run one backward for each forward"):
        a_loop.backward((outputs * 1).mean(), weight=len(x))
    assert (None if left is None else approx(left)) == module.gradient


@either_loop
@on_ranks()
def test_ddp_decides_in_its_forward(loop):
    """A forward outside of `no_sync` reduces, wherever its backward is; one with gradients off changes nothing."""
    a_loop, module, model, x = begin(loop)
    outputs = model(x)
    with torch.no_grad():
        model(x)
    with a_loop.no_sync(model, enabled=True):
        a_loop.backward(outputs.mean(), weight=len(x))
    assert approx(3.6) == module.gradient


@either_loop
@on_ranks()
def test_a_reduction_that_the_user_holds_back(loop):
    """DDP reduces in a backward within `no_sync`, as a forward outside of it has had none."""
    a_loop, module, model, x = begin(loop)
    model(x)
    with a_loop.no_sync(model, enabled=True), pytest.raises(RuntimeError, match=r"in a backward within no_sync\(\)"):
        a_loop.backward(model(x).mean(), weight=len(x))
    assert module.gradient is None


@pytest.mark.parametrize(("reduction", "expected"), [("mean", None), ("weighted_mean", 3.6)])
@either_loop
@on_ranks()
def test_a_parameter_that_trains_after_the_model_is_wrapped(loop, reduction, expected):
    """DDP does not know it. A window sums its gradients; under the plain mean there is none, and an error."""
    a_loop = loop(reduction=reduction)
    net = nn.Sequential(OneWeight(), OneWeight())
    net[1].requires_grad_(False)
    model = a_loop.set_up(net)
    net[1].requires_grad_(True)
    x = torch.tensor(OF_RANKS[dist.get_rank()], dtype=torch.float64)
    if expected is None:
        with pytest.raises(RuntimeError, match="trains that was frozen when DistributedDataParallel was made"):
            model(x)
        return
    a_loop.backward(model(x).mean(), weight=len(x))
    assert [approx(expected)] * 2 == [one.gradient for one in net]


@on_ranks()
def test_gradients_that_no_bucket_has_reduced():
    """Every rank would keep its own."""
    net = nn.Sequential(OneWeight(), OneWeight())
    gradients = ReplicatedGradients(DistributedDataParallel(net), dist.group.WORLD)
    (net[0](torch.ones(1)) * net[1](torch.ones(1))).sum().backward()
    with pytest.raises(RuntimeError, match="DDP reduced nothing in this backward"):
        gradients.reduce(gradients.parameters(), 1.0, in_hook=False)
    net.zero_grad()
    gradients.reduce(gradients.parameters(), 1.0, in_hook=False)


@pytest.mark.skipif(
    hasattr(DistributedDataParallel, "_should_disable_cpp_reducer"),
    reason="DDP of an older torch ignores the value outside of torch.compile",
)
@on_ranks()
def test_a_hook_that_gets_no_bucket():
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        loop, _, model, x = begin()
    with pytest.raises(TypeError, match="optimize_ddp='python_reducer', which gives a communication hook no bucket"):
        loop.backward(model(x).mean(), weight=len(x))


@pytest.mark.skipif(
    torch.backends.cuda.is_built() and not torch.cuda.is_available(),
    reason="a CUDA build of torch makes a stream of the GPU for the optimizer first",
)
@on_ranks()
def test_torch_refuses_an_optimizer_in_the_backward():
    """It would step before the rule is applied. DDP registers a hook of its own for it, beside the rule's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a deprecated class in the module, when it is imported
        from torch.distributed.optim import _apply_optimizer_in_backward  # noqa: PLC0415  # as above
    _, _, model, x = begin()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
    with pytest.raises(RuntimeError, match="register_comm_hook or register_builtin_comm_hook can only be called once"):
        model(x)


@on_ranks()
def test_joined_inputs_are_refused():
    """A rank that shadows the others sends no row that they wait for."""
    _, _, model, _ = begin()
    with pytest.raises(RuntimeError, match=r"within DistributedDataParallel\.join"):
        model.join()
    with pytest.raises(RuntimeError, match=r"within DistributedDataParallel\.join"):
        Join([model])


@on_ranks()
def test_before_and_beside_a_model():
    """Saving needs no model, and a forward may run in a context of its own.

    A plain backward is told what to do, also one that DDP does not reduce: its gradient would be each rank's own.
    """
    FabricLoop(**WEIGHTED).fabric.save(f"{mkdtemp()}/state.ckpt", {"step": 0})
    loop, module, model, x = begin()
    loop.backward(copy_context().run(lambda: model(x).mean()), weight=len(x))
    assert approx(3.6) == module.gradient
    advice = re.escape("GradAvgReducer.weigh(...).backward() with weight= instead of loss.")
    for within_window in (True, False):
        with loop.no_sync(model, enabled=within_window), pytest.raises(RuntimeError, match=advice):
            model(x).mean().backward()
        assert module.w.grad is None


@on_ranks()
def test_reducers_that_take_turns():
    """A loss belongs to its own reducer, and neither a loss nor a forward that is only looked at changes a gather."""
    (one, _, of_one, x), (two, module, of_two, _) = begin(), begin()
    first = of_one(x).mean()
    second = of_two(x).mean()
    one.backward(first, weight=len(x))
    two.backward(second, weight=len(x))
    of_one(x)  # has no loss
    alone = OneWeight()
    ((gather(alone(x)) ** 2).mean() * len(x) / 5).backward()
    average_gradients(alone, reduction="sum")
    assert (approx(3.6), approx(2 * SQUARES)) == (module.gradient, alone.gradient)
    with pytest.raises(ValueError, match="divided_by=0 is not a finite number > 0"):
        one.reducer.weigh(of_one(x).mean(), weight=1, divided_by=0)


@on_ranks()
def test_losses_that_a_trainer_divides_and_a_scaler_scales():
    """What is multiplied into the weighed loss afterwards multiplies the gradient, and `divided_by` takes it back."""
    (loop, module, model, _), scaler = begin(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for index, micro_batch in enumerate(([1.0, 2.0, 3.0], [4.0])):
        with loop.no_sync(model, enabled=index == 0):
            loss = loop.reducer.weigh(model(torch.tensor(micro_batch)).mean(), weight=len(micro_batch), divided_by=2)
            scaler.scale(loss / 2).backward()
    scaler.unscale_(torch.optim.SGD(module.parameters(), lr=0.0))
    assert approx(2.5) == module.gradient


@either_loop
@on_ranks()
def test_a_loss_may_reach_two_models(loop):
    """One loss is weighed for all models that it reaches, which are all reduced with it or none.

    What a parameter holds before the window is added to it once, even if a third model has that parameter, too.
    """
    a_loop, first, one, x = begin(loop)
    two = a_loop.set_up(second := OneWeight())
    a_loop.set_up(nn.Sequential(first))
    first.w.grad = torch.full((), 100.0, dtype=torch.float64)
    a_loop.backward(two(one(x)).mean(), weight=len(x))
    assert (approx(103.6), approx(3.6)) == (first.gradient, second.gradient)


@either_loop
@on_ranks()
def test_models_have_windows_of_their_own(loop):
    """The window of the first goes on where that of the second ends: the mean of 3.6 and 3 * 3.6 is 2 * 3.6."""
    a_loop, first, one, x = begin(loop)
    two = a_loop.set_up(second := OneWeight())
    with a_loop.no_sync(one, enabled=True):
        a_loop.backward(two(one(x)).mean(), weight=len(x))
    assert approx(3.6) == second.gradient
    second.zero_grad()
    a_loop.backward(two(one(3 * x)).mean(), weight=len(x))
    assert (approx(2 * 3.6), approx(3 * 3.6)) == (first.gradient, second.gradient)


@either_loop
@on_ranks()
def test_both_forwards_and_then_both_backwards(loop):
    """As of an actor and a critic. Of samples 1 and 2 with weights 1 and 2, the mean is 5 / 3."""
    (a_loop, first, one, _), second = begin(loop), OneWeight()
    two = a_loop.set_up(second)
    count = 1 + dist.get_rank()
    losses = [model(factor * torch.tensor(float(count))) for model, factor in ((one, 1), (two, 10))]
    for loss in losses:
        a_loop.backward(loss, weight=count)
    assert (approx(5 / 3), approx(50 / 3)) == (first.gradient, second.gradient)


@either_loop
@on_ranks()
def test_a_second_backward_after_the_forward_of_another_model(loop):
    """DDP reduces the first alone, and the forward of another model changes nothing in that."""
    a_loop, module, model, x = begin(loop)
    other = a_loop.set_up(OneWeight())
    outputs = model(x)
    a_loop.backward(outputs.mean(), weight=len(x), retain_graph=True)
    other(x)
    with pytest.raises(RuntimeError, match="DDP would reduce nothing in this backward"):
        a_loop.backward((outputs * 1).mean(), weight=len(x))
    assert approx(3.6) == module.gradient


@either_loop
@on_ranks()
def test_a_model_that_is_registered_within_a_window(loop):
    """The window goes on: every model has its own."""
    a_loop, module, model, x = begin(loop)
    with a_loop.no_sync(model, enabled=True):
        a_loop.backward(model(x).mean(), weight=len(x))
    a_loop.set_up(OneWeight())
    a_loop.backward(model(3 * x).mean(), weight=len(x))
    assert approx((3.6 + 3 * 3.6) / 2) == module.gradient


@on_ranks()
def test_parameters_that_ddp_does_not_know():
    """Those unfrozen between DDP and `register`, which would keep the gradients of each rank."""
    net = nn.Sequential(OneWeight(), OneWeight())
    loop = TorchLoop(**WEIGHTED)
    net[1].requires_grad_(False)
    model = DistributedDataParallel(net)
    net[1].requires_grad_(True)
    with pytest.raises(ValueError, match="2 parameters of the model require grad, but 1 did when Distributed"):
        loop.reducer.register(model)


@on_ranks()
def test_gradients_that_are_only_looked_at():
    """`torch.autograd.grad` leaves none in the model, so nothing bypasses the rule."""
    loop, module, model, x = begin()
    (found,) = torch.autograd.grad(model.module(x).sum(), list(module.parameters()))
    loop.backward(model(x).mean(), weight=len(x))
    assert (found.item(), module.gradient) == (x.sum().item(), approx(3.6))


@on_ranks()
def test_a_sum_of_two_weighed_losses():
    loop, module, model, x = begin()
    first, second = (loop.reducer.weigh(loss, weight=1) for loss in model(x)[:2])
    with pytest.raises(RuntimeError, match="a backward runs two weighed losses"):
        (first + second).backward()
    loop.backward(model(x).mean(), weight=len(x))
    assert approx(3.6) == module.gradient


@on_ranks()
def test_a_reduction_that_raises_once():
    """The window is given up, with what DDP left in the model, and the next one counts nothing of it."""
    module = OneWeight()
    loop = TorchLoop(**WEIGHTED)
    failures = ["lost connection"]

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        def mean(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            if failures:
                raise ValueError(failures.pop())
            return future.value()[0] / dist.get_world_size()

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(mean)

    model = DistributedDataParallel(module)
    x = torch.tensor(OF_RANKS[dist.get_rank()])
    loop.reducer.register(model, comm_hook=hook)
    module.w.grad = torch.tensor(100.0, dtype=torch.float64)
    with pytest.raises((RuntimeError, ValueError), match="lost connection"):
        loop.backward(model(x).mean(), weight=len(x))
    assert module.gradient == 100
    loop.backward(model(x).mean(), weight=len(x))
    assert approx(103.6) == module.gradient


def epochs() -> list[float | None]:
    """Body: train two shuffled epochs on split batches; return the gradients, and the weight at the end."""
    data: Any = torch.arange(1, 10, dtype=torch.float64)
    torch.manual_seed(3 + dist.get_rank())  # the order is that of rank 0
    module = OneWeight()
    loop = FabricLoop(split_batches=True)
    model = loop.set_up(module)
    loader = loop.fabric.setup_dataloaders(DataLoader(data, 4, shuffle=True))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    found = []
    for samples in chain(loader, loader):
        loop.backward((model(samples) ** 2).mean())
        found.append(module.gradient)
        optimizer.step()
        optimizer.zero_grad()
    assert (len(found), loop.strategy.samples) == (2 * len(loader), None)
    return [*found, module.w.item()]


def test_split_batches(world):
    """Two shuffled epochs, whose last batch leaves rank 1 nothing, are those of one process, batch by batch."""
    (alone,) = world(1).run(epochs)
    assert [approx(alone)] * 2 == world(2).run(epochs)
    assert 2 * 3 + 1 == len(alone)


@pytest.mark.parametrize(("reduction", "expected"), [("mean", 13.0), ("sum", 26.0)])
@on_ranks()
def test_a_weight_without_use(reduction, expected):
    """A rule that uses no weights ignores them, with a warning."""
    loop, module, model, x = begin(FabricLoop, reduction=reduction)
    with pytest.warns(UserWarning, match='a "weight" was given, but reduction=.* does not use weights: it is ignored'):
        loop.backward(model(x).mean() + model(x).sum(), weight=3)
    assert approx(expected) == module.gradient


@on_ranks()
def test_loaders_that_differ():
    """Which samples count is unclear where two loaders of other batch sizes are read at once."""
    loop = FabricLoop(split_batches=True)
    data = TensorDataset(torch.arange(8))
    loaders: Any = loop.fabric.setup_dataloaders(DataLoader(data, 4), DataLoader(data, 2))
    with pytest.raises(ValueError, match=r"split_batches=True cannot tell which count\. Read one"):
        [loop.strategy.samples for _ in zip(*loaders, strict=False)]


@pytest.mark.parametrize(
    ("reduction", "names", "weighs"),
    [
        ("sum", "losses", {}),
        ("weighted_mean", "losses", {"weight": 3}),
        ("weighted_mean", "weights", {"weight": {"a": 3}}),
        ("weighted_mean", "losses", {"weight": {"a": 3}}),
    ],
)
@either_loop
@on_ranks()
def test_losses_and_weights_by_name(loop, reduction, names, weighs):
    """Terms with counts of their own are served by `global_mean`, as the error says."""
    a_loop, module, model, x = begin(loop, reduction=reduction)
    loss: Any = {"a": model(x).mean()} if names == "losses" else model(x).mean()
    with pytest.raises((TypeError, ValueError), match="global_mean"):
        a_loop.backward(loss, **weighs)
    assert module.gradient is None


@either_loop
@on_ranks()
def test_a_model_that_is_dropped_is_freed(loop):
    """DDP holds the hook, and Python sees no circle through DDP: models come and go, as in cross-validation."""
    a_loop, module, model, x = begin(loop)
    a_loop.backward(model(x).mean(), weight=3)
    freed = weakref.ref(model)
    del module, model
    gc.collect()
    assert freed() is None


@on_ranks()
def test_a_loader_that_is_dropped_is_freed():
    """A new loader per epoch holds no data of the epochs before, and `samples` is that of the loader that is read."""
    loop = FabricLoop(split_batches=True)
    data = TensorDataset(torch.arange(6))
    freed = []
    for size in (4, 2, 6):
        loader = loop.fabric.setup_dataloaders(DataLoader(data, size))
        iterator = iter(loader)
        next(iterator)
        assert size // 2 == loop.strategy.samples
        freed.append(weakref.ref(loader._dataloader))
        del iterator
        assert loop.strategy.samples is None
        del loader
        gc.collect()
    assert [None] * 3 == [loader() for loader in freed]
    assert [3] == [loop.strategy.samples for _ in loop.fabric.setup_dataloaders(DataLoader(data, 6))]


BY_NODE = {"reduction": "mean_of_node_means"}


@pytest.mark.parametrize(
    ("make", "options", "error", "text"),
    [
        (GradAvgStrategy, {"lr_scaling": "linear"}, TypeError, "is not an option of GradAvgStrategy for Fabric"),
        (GradAvgStrategy, {"find_unused_parameter": True}, TypeError, "Did you mean 'find_unused_parameters'?"),
        (GradAvgStrategy, {"reduction": "median"}, ValueError, "reduction='median' is not one of 'mean'"),
        (GradAvgStrategy, {**BY_NODE, "split_batches": True}, ValueError, "weights all ranks of a node equally"),
        (OfTrainerSharded, {"lr_scaling": "linear"}, TypeError, "is not an option of GradAvgModelParallelStrategy"),
        (OfTrainerSharded, BY_NODE, ValueError, "Use one of 'mean', 'sum', 'weighted_mean'"),
        (OfTrainerSharded, {"tensor_paralel_size": 2}, TypeError, "Did you mean 'tensor_parallel_size'?"),
    ],
)
def test_refused_options(make, options, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make(**options)


def test_fabric_shards_no_model():
    with pytest.raises(ImportError, match="reduces no sharded model in Fabric"):
        from lightning_gradavg.fabric import GradAvgModelParallelStrategy  # noqa: F401, PLC0415  # the test


@pytest.mark.parametrize("rules", [("sum", "weighted_mean"), ("mean", "sum")])
@either_loop
@on_ranks()
def test_ranks_that_reduce_differently(loop, rules):
    with pytest.raises(ValueError, match="reduction='{}', .* on rank 0; reduction='{}', ".format(*rules)):
        loop(reduction=rules[dist.get_rank()]).set_up(OneWeight())


@on_ranks()
def test_models_that_cannot_be_served():
    """A module without DDP, a static graph, another group, and a loss of no model are refused with what to do."""
    reducer = GradAvgReducer(**WEIGHTED)
    group = dist.new_group([0, 1])
    with pytest.raises(RuntimeError, match="call register first"):
        reducer.weigh(torch.ones((), requires_grad=True), weight=1)
    with pytest.raises(TypeError, match=r"got OneWeight\. Wrap the model first"):
        reducer.register(OneWeight())
    with pytest.raises(ValueError, match="static_graph=True"):
        reducer.register(DistributedDataParallel(OneWeight(), static_graph=True))
    mixed = DistributedDataParallel(OneWeight())
    mixed.mixed_precision = object()  # DDP takes one on an accelerator
    with pytest.raises(ValueError, match="mixed_precision= of DistributedDataParallel"):
        reducer.register(mixed)
    hooked = DistributedDataParallel(OneWeight())
    hooked.register_comm_hook(None, allreduce_hook)
    with pytest.raises(RuntimeError, match="register_comm_hook or register_builtin_comm_hook can only be called once"):
        reducer.register(hooked)
    first = DistributedDataParallel(OneWeight())
    reducer.register(first)
    with pytest.raises(ValueError, match="reduced over one process group: use a reducer for each"):
        reducer.register(DistributedDataParallel(OneWeight(), process_group=group))
