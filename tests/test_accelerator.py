"""The simulated accelerator: it computes what the CPU does, and each planted mistake is found by its name and line.

Every mistake has its right counterpart: the same code but for one line, in which nothing is found.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerator import build as builder
from accelerator.build import obstacle
from accelerator.device import load
from accelerator.seen import Seen, observed, recorded, reset
from accelerator.trainer import make_sim_trainer
from lightning.pytorch.strategies import DDPStrategy
from ranks import Raised, RankError, RankPool
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from toys import Toy, loader

from lightning_gradavg import GradAvgStrategy

World = Callable[[int], RankPool]


def nothing_found(seen: Seen) -> bool:
    return not seen.races and not seen.early_frees


# Hooks of DDP: `run.planted` says whether the mistake is made. No annotations: DDP would evaluate them.


def averaged(run, bucket):
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def scaled_on_a_side_stream(run, bucket):
    side = torch.Stream(device="sim")
    if not run.planted:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def summed_while_written(run, bucket):
    side = torch.Stream(device="sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        bucket.buffer().div_(dist.get_world_size())
    if not run.planted:
        torch.accelerator.current_stream().wait_stream(side)
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def future_without_device(run, bucket):
    future = averaged(run, bucket)
    if not run.planted:
        return future
    promise = torch.futures.Future()
    future.add_done_callback(lambda future: promise.set_result(future.value()))
    return promise


def totals_not_waited_for(run, bucket):
    total = torch.ones((), device="sim")
    counted = dist.all_reduce(total, group=run.twin, async_op=True)  # on one communicator, one would wait for the other
    summed = dist.all_reduce(bucket.buffer(), async_op=True)

    def divide(future):
        if not run.planted:
            counted.wait()
        total.record_stream(torch.accelerator.current_stream())
        return future.value()[0].div_(total)

    return summed.get_future().then(divide)


def used_before_its_sum(run, bucket):
    world_size = dist.get_world_size()
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    if run.planted:
        bucket.buffer().div_(world_size)
        return work.get_future().then(lambda future: future.value()[0])
    return work.get_future().then(lambda future: future.value()[0].div_(world_size))


def freed_early(run, bucket):
    side = torch.Stream(device="sim")
    wide = bucket.buffer().double()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        bucket.buffer().copy_(wide / dist.get_world_size())
    if not run.planted:
        wide.record_stream(side)
    del wide
    torch.empty(1, device="sim")  # any next allocation of this stream may get the memory
    with side:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def hidden_item(run, bucket):
    largest = bucket.buffer().abs().max()
    if run.planted:
        if not largest.item() < float("inf"):
            bucket.buffer().zero_()
    else:
        bucket.buffer().mul_(torch.where(largest < float("inf"), 1.0, 0.0))
    return averaged(run, bucket)


def another_order_on_one_rank(run, bucket):
    count = torch.ones(2, device="sim")
    tensors = [bucket.buffer().div_(dist.get_world_size()), count]
    if run.planted and dist.get_rank() == 1:
        tensors.reverse()
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()
    return done(bucket.buffer())


def another_size_on_one_rank(run, bucket):
    count = torch.ones(3 if run.planted and dist.get_rank() == 1 else 2, device="sim")
    dist.all_reduce(count)
    return averaged(run, bucket)


def wrong_group(run, bucket):
    group = run.twin if run.planted and dist.get_rank() == 1 else dist.group.WORLD
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), group=group)
    return done(bucket.buffer())


def done(buffer):
    future = torch.futures.Future(devices=["sim:0"])
    future.set_result(buffer)
    return future


def train(hook: Any, *, planted: bool = False) -> list[Any]:
    """Body: three steps of a model in several buckets, and the gradients of the last."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Tanh())]).to("sim")
    with patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1):  # one megabyte otherwise, whatever the rest is to be
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    if hook is not None:
        ddp.register_comm_hook(SimpleNamespace(planted=planted, twin=dist.new_group()), hook)
    for _ in range(3):
        model.zero_grad()
        ddp(torch.full((4, 16), 0.5 + dist.get_rank(), device="sim")).square().mean().backward()
        gradients: Any = [parameter.grad for parameter in model.parameters()]
        torch._foreach_mul_(gradients, 1.0)  # as an optimizer does
    return [gradient.cpu() for gradient in gradients]


# What the host does with pinned memory.


def pinned_memory_read_early(*, planted: bool) -> list[float]:
    ones = torch.ones(3, device="sim").to("cpu", non_blocking=True)
    event = torch.Event(device="sim")
    event.record()
    if not planted:
        event.synchronize()
    return ones.tolist()


def pinned_memory_filled_early(*, planted: bool) -> list[float]:
    host = torch.ones(3).pin_memory()
    sent = host.to("sim", non_blocking=True)
    if not planted:
        torch.accelerator.current_stream().synchronize()
    host.fill_(2.0)
    return sent.tolist()


def is_hook(function: Callable[..., Any]) -> bool:
    return "bucket" in inspect.signature(function).parameters


def make(mistake: Callable[..., Any], *, planted: bool) -> Any:
    """Body: train with a hook, or call what is none."""
    return train(mistake, planted=planted) if is_hook(mistake) else mistake(planted=planted)


# Of each: the later side, the earlier side. Of operators that write in place, the read may be the first to be told.
RACES = {
    scaled_on_a_side_stream: (r"aten::div on stream \d+", r"copy on stream \d+ \(.*\) writes"),
    summed_while_written: (r"nccl:all_reduce on stream \d+", r"aten::div on stream \d+ \(.*\) writes"),
    future_without_device: (r"copy on stream \d+", r"nccl:all_reduce on stream \d+ \(.*\) writes"),
    totals_not_waited_for: (r"aten::div on stream \d+", r"nccl:all_reduce on stream \d+ \(.*\) writes"),
    used_before_its_sum: (r"aten::div on stream \d+", r"nccl:all_reduce on stream \d+ \(.*\) writes"),
    pinned_memory_read_early: (r"aten::resolve_conj on the host", r"copy to the host on stream 0 \(.*\) writes"),
    pinned_memory_filled_early: (r"aten::fill_ on the host", r"copy to the device on stream 0 \(.*\) reads"),
}


@pytest.mark.parametrize("mistake", RACES, ids=lambda mistake: mistake.__name__)
def test_a_race_is_found_by_its_two_sides_and_their_lines(sim_world: World, mistake: Callable[..., Any]) -> None:
    """Accesses that nothing orders are named with both operators, streams and lines; ordered ones are not."""
    for result, seen in sim_world(2).run(observed, make, mistake, planted=False):
        assert nothing_found(seen), seen
        assert result
    for _, seen in sim_world(2).run(observed, make, mistake, planted=True):
        kind = "pinned memory" if "pinned" in mistake.__name__ else "race"
        pattern = r"{}: {} \(.*\) (reads|writes) what {}, and nothing makes".format(kind, *RACES[mistake])
        found = [race for race in seen.races if re.match(pattern, race)]
        assert found, seen.races
        assert any("tests/test_accelerator.py:" in race for race in found)


@pytest.mark.parametrize("hook", [*filter(is_hook, RACES), freed_early, hidden_item])
def test_right_hooks_average(sim_world: World, hook: Callable[..., Any]) -> None:
    """The right counterparts give the gradients of plain DDP."""
    for hooked, plain in zip(sim_world(2).run(train, hook), sim_world(2).run(train, None), strict=True):
        torch.testing.assert_close(hooked, plain)


def test_memory_freed_early_is_found(sim_world: World) -> None:
    """Memory that goes back to its stream while another may still read it is named; with `record_stream` it is not."""
    for _, seen in sim_world(2).run(observed, train, freed_early):
        assert nothing_found(seen), seen
    for _, seen in sim_world(2).run(observed, train, freed_early, planted=True):
        pattern = r"freed early: memory of stream \d+, freed at .* in freed_early, .* while aten::div on .* read it"
        assert any(re.match(pattern, one) for one in seen.early_frees), seen.early_frees


def test_a_wait_of_the_host_is_found_by_its_line(sim_world: World) -> None:
    """A hidden `item()` is one wait per bucket and step, at its line; what stays on the device is none."""
    line = f"tests/test_accelerator.py:{hidden_item.__code__.co_firstlineno + 3} in hidden_item"
    for _, seen in sim_world(2).run(observed, train, hidden_item):
        assert [] == seen.waits_in("in hidden_item")
    for _, seen in sim_world(2).run(observed, train, hidden_item, planted=True):
        waits = [wait for wait in seen.waits if wait.where.startswith(line)]
        assert ["item"] * len(waits) == [wait.what for wait in waits]
        assert seen.launches.count("nccl:all_reduce") == len(waits) > 3


# What the first says, and what the second does.
DIFFERENCES = {
    another_order_on_one_rank: r"all_reduce Float\[\d+\] sum, .* launches all_reduce Float\[\d+\] sum",
    another_size_on_one_rank: r"all_reduce Float\[[23]\] sum, .* launches all_reduce Float\[[23]\] sum",
    wrong_group: r".* of group (\w+) of ranks 0 1, .* of group (?!\1)\w+ of ranks 0 1$",
}


@pytest.mark.parametrize("mistake", DIFFERENCES, ids=lambda mistake: mistake.__name__)
def test_collectives_that_differ_are_an_error_that_names_both(sim_world: World, mistake: Callable[..., Any]) -> None:
    """Where ranks launch different collectives, every rank is told which, and none hangs."""
    for _, seen in sim_world(2).run(observed, train, mistake):
        assert nothing_found(seen), seen
    for raised in sim_world(2).run_expecting_errors(observed, train, mistake, planted=True):
        assert isinstance(raised, Raised), raised
        assert "DistBackendError" == raised.type_name, raised
        assert re.match(r"collectives differ: rank \d launches " + DIFFERENCES[mistake], raised.message), raised


def ends_before_the_others(rank: int) -> None:
    if dist.get_rank() != rank:
        dist.all_reduce(torch.ones(1, device="sim"))


def test_a_rank_that_does_not_join_is_an_error_that_names_it(sim_world: World) -> None:
    """A collective that one rank does not launch is told to all of them, with what that rank did instead."""
    for raised in sim_world(2).run_expecting_errors(observed, ends_before_the_others, 1):
        assert "DistBackendError" == raised.type_name
        assert "the end of the test" in raised.message
        assert "all_reduce Float[1] sum" in raised.message


# The device computes what the CPU does.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.convolve = nn.Conv1d(8, 4, 3)
        self.batch_norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        with sdpa_kernel(SDPBackend.MATH):  # which the device has, too
            x = self.norm(x + self.attend(x, x, x, need_weights=False)[0])
        x = self.batch_norm(self.convolve(x.transpose(1, 2))).relu()
        return self.out(x.amax(-1))


def trained(device: str, make: Callable[..., torch.optim.Optimizer]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net, tokens = Net(), torch.randint(11, (4, 6))
    net, tokens = net.to(device), tokens.to(device)
    optimizer = make(net.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(tokens), tokens[:, 0] % 3).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return [value.cpu() for value in net.state_dict().values()]


def trained_on_both(make: Callable[..., torch.optim.Optimizer]) -> tuple[Any, Any]:
    return trained("cpu", make), trained("sim", make)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)


def fused_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


@pytest.mark.parametrize("make", [sgd, fused_adam])
def test_training_equals_that_of_the_cpu(sim_world: World, make: Callable[..., Any]) -> None:
    """Convolutions, norms, attention, embeddings, clipping and optimizers give the CPU's bits."""
    [((of_cpu, of_sim), seen)] = sim_world(1).run(observed, trained_on_both, make)
    assert len(of_cpu) == len(of_sim) > 10
    assert all(torch.equal(*pair) for pair in zip(of_cpu, of_sim, strict=True))
    assert nothing_found(seen)


# What is known of streams, events and memory.


def halves_on_two_streams() -> None:
    both = torch.empty(8, device="sim")
    first, second = torch.Stream(device="sim"), torch.Stream(device="sim")
    with first:
        both[:4].fill_(1.0)
    with second:
        both[4:].fill_(2.0)
    torch.accelerator.current_stream().wait_stream(first)
    both[:4].add_(1.0)
    torch.accelerator.synchronize()
    both.add_(1.0)


def event_between_streams(*, waits: bool) -> None:
    ones = torch.ones(4, device="sim")
    event = torch.Event(device="sim")
    event.record()
    side = torch.Stream(device="sim")
    if waits:
        event.wait(side)
    with side:
        ones.sum()
    ones.record_stream(side)


def host_between_streams() -> None:
    ones = torch.ones(4, device="sim")
    event = torch.Event(device="sim")
    event.record()
    event.synchronize()
    with torch.Stream(device="sim") as side:
        ones.sum()
    ones.record_stream(side)


@pytest.mark.parametrize(
    ("body", "options", "races"),
    [
        (halves_on_two_streams, {}, 0),
        (event_between_streams, {"waits": True}, 0),
        (event_between_streams, {"waits": False}, 1),
        (host_between_streams, {}, 0),
    ],
)
def test_what_orders_two_accesses(
    sim_world: World, body: Callable[..., Any], options: dict[str, Any], races: int
) -> None:
    """Other bytes are no race; streams, events and waits of the host order what came before them."""
    [(_, seen)] = sim_world(1).run(observed, body, **options)
    assert races == len(seen.races), seen.races
    assert [] == seen.early_frees


def queries(delay: int) -> list[bool]:
    load().delay_events(delay)
    try:
        event = torch.Event(device="sim")
        event.record()
        return [event.query() for _ in range(3)]
    finally:
        load().delay_events(0)


def test_an_event_may_be_late(sim_world: World) -> None:
    """Whoever asks an event may have to ask again, as often as a test wants it."""
    assert [[True, True, True]] == sim_world(1).run(queries, 0)
    assert [[False, False, True]] == sim_world(1).run(queries, 2)


def waiting_operators() -> None:
    ones = torch.ones(4, device="sim")
    ones.nonzero()
    ones[ones > 0]
    ones[ones > 0] = 1.0
    ones.tolist()
    ones.to("cpu", non_blocking=True)  # pinned, and not waited for
    torch.empty(4).copy_(ones, non_blocking=True)  # not pinned
    torch.tensor(1.0, device="sim")
    torch.ones(4).to("sim", non_blocking=True)
    torch.equal(ones, ones)
    torch.accelerator.synchronize()


def test_waits_of_the_host(sim_world: World) -> None:
    """Each operator that makes the host wait on CUDA is told as one, in order."""
    [(_, seen)] = sim_world(1).run(observed, waiting_operators)
    assert [
        "aten::nonzero",
        "aten::nonzero",
        "aten::_index_put_impl_",
        "copy to the host",
        "copy to the host",
        "copy to the device",
        "aten::equal",
        "device.synchronize",
    ] == [wait.what for wait in seen.waits]
    first = waiting_operators.__code__.co_firstlineno
    assert [first + line for line in (2, 3, 4, 5, 7, 8, 10, 11)] == [
        int(re.search(r"tests/test_accelerator.py:(\d+) in waiting_operators", wait.where)[1]) for wait in seen.waits
    ]


def launches_of_a_block() -> Seen:
    many = [torch.ones(2, device="sim") for _ in range(5)]
    with recorded() as block:
        torch._foreach_mul_(many, 2.0)
        many[0].view(-1)[:1].add_(many[1][:1])
        nn.functional.linear(torch.ones(1, 2, device="sim"), torch.ones(2, 2, device="sim"))
    return block


def test_launches_are_counted(sim_world: World) -> None:
    """Between two points the launches are named: one for a list of tensors, none for a view or for memory."""
    [(block, _)] = sim_world(1).run(observed, launches_of_a_block)
    assert ["aten::_foreach_mul_", "aten::add", "aten::fill_", "aten::fill_", "aten::mm"] == block.launches


# Collectives.


def collectives() -> dict[str, Any]:
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def full(value: float, size: int = 2, **options: Any) -> torch.Tensor:
        return torch.full((size,), value, device="sim", **options)

    def reduced(tensor: torch.Tensor, **options: Any) -> list[float]:
        dist.all_reduce(tensor, **options)
        return tensor.tolist()

    seen: dict[str, Any] = {
        "sum": reduced(full(rank + 1.0)),
        "avg": reduced(full(rank + 1.0), op=dist.ReduceOp.AVG),
        "max": reduced(full(rank, dtype=torch.int32), op=dist.ReduceOp.MAX),
        "bfloat16": reduced(full(rank + 1.0, dtype=torch.bfloat16)),
        "bool": reduced(full(rank == 1, dtype=torch.bool)),
    }
    tensor = full(float(rank))
    dist.broadcast(tensor, 1)
    seen["broadcast"] = tensor.tolist()
    dist.reduce(tensor, 2)
    seen["reduce"] = tensor.tolist()
    rows = [full(-1.0) for _ in range(world_size)]
    dist.all_gather(rows, full(float(rank)))
    seen["all_gather"] = [row.tolist() for row in rows]
    dist.gather(full(float(rank)), rows if rank == 1 else None, 1)
    seen["gather"] = [row.tolist() for row in rows]
    dist.scatter(tensor, [full(10.0 * other) for other in range(world_size)] if rank == 0 else None)
    seen["scatter"] = tensor.tolist()
    dist.reduce_scatter(tensor, [full(float(other)) for other in range(world_size)])
    seen["reduce_scatter"] = tensor.tolist()
    sent = torch.arange(world_size, device="sim") + 10 * rank
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    seen["all_to_all_single"] = received.tolist()
    uneven = torch.empty(3 * (rank + 1), device="sim")
    dist.all_to_all_single(uneven, full(float(rank), 6), [rank + 1] * 3, [1, 2, 3])
    seen["uneven"] = uneven.tolist()
    dist.all_to_all(rows, [full(10.0 * rank + other) for other in range(world_size)])
    seen["all_to_all"] = [row.tolist() for row in rows]
    objects: list[Any] = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank})
    seen["objects"] = objects
    dist.barrier()
    return seen


def test_collectives(sim_world: World) -> None:
    """Every collective gives each rank what c10d promises, without a race."""
    for rank, (seen, found) in enumerate(sim_world(3).run(observed, collectives)):
        assert nothing_found(found)
        assert {
            "sum": [6.0, 6.0],
            "avg": [2.0, 2.0],
            "max": [2, 2],
            "bfloat16": [6.0, 6.0],
            "bool": [True, True],
            "broadcast": [1.0, 1.0],
            "reduce": [3.0, 3.0] if rank == 2 else [1.0, 1.0],
            "all_gather": [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]],
            "gather": [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]],
            "scatter": [10.0 * rank] * 2,
            "reduce_scatter": [3.0 * rank] * 2,
            "all_to_all_single": [rank, 10 + rank, 20 + rank],
            "uneven": [0.0] * (rank + 1) + [1.0] * (rank + 1) + [2.0] * (rank + 1),
            "all_to_all": [[10.0 * other + rank] * 2 for other in range(3)],
            "objects": [{"rank": other} for other in range(3)],
        } == seen


def tensors_in_one() -> dict[str, Any]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD._get_backend(torch.device("sim"))
    gathered = torch.empty(2 * world_size, device="sim")
    world._allgather_base(gathered, torch.full((2,), float(rank), device="sim")).wait()
    part = torch.empty(1, device="sim")
    world._reduce_scatter_base(part, torch.arange(float(world_size), device="sim")).wait()
    first, second = torch.ones(2, device="sim"), torch.full((3,), 2.0, device="sim")
    with dist._coalescing_manager():
        dist.all_reduce(first)
        dist.all_reduce(second)
    parameters = [torch.full((3,), float(rank), device="sim") for _ in range(2)]
    dist._broadcast_coalesced(dist.group.WORLD, parameters, 16, 1)
    return {
        "gathered": gathered.tolist(),
        "part": part.tolist(),
        "coalesced": [*first.tolist(), *second.tolist()],
        "parameters": [parameter.tolist() for parameter in parameters],
    }


def test_collectives_of_one_tensor_and_of_many(sim_world: World) -> None:
    """One tensor for all ranks, and many tensors in one collective, as DDP sends its parameters."""
    for rank, (seen, found) in enumerate(sim_world(3).run(observed, tensors_in_one)):
        assert nothing_found(found)
        assert {
            "gathered": [0.0, 0.0, 1.0, 1.0, 2.0, 2.0],
            "part": [3.0 * rank],
            "coalesced": [3.0, 3.0, 6.0, 6.0, 6.0],
            "parameters": [[1.0] * 3] * 2,
        } == seen


def groups_of_groups() -> tuple[Any, ...]:
    pair = dist.new_group([0, 2])
    alone = dist.new_group(backend="simnccl")
    device = torch.device("sim")
    numbers = torch.ones(1, device="sim")
    if dist.get_rank() != 1:
        dist.all_reduce(numbers, group=pair)
    answer: list[Any] = [dist.get_rank()]
    dist.broadcast_object_list(answer, 2, group=alone)  # through the device: there is no gloo in that group
    return numbers.item(), answer, alone._get_backend(device).name(), dist.group.WORLD._get_backend(device).name()


def test_groups(sim_world: World) -> None:
    """A group of some ranks, and a group without gloo, go by the name of the backend that they stand for."""
    results = [result for result, _ in sim_world(3).run(observed, groups_of_groups)]
    assert [(numbers, [2], "nccl", "nccl") for numbers in (2.0, 1.0, 2.0)] == results


# A real Trainer.


def fit(strategy: str, options: dict[str, Any], **trainer: Any) -> tuple[Any, ...]:
    toy = Toy(dtype=torch.float32)
    chosen = DDPStrategy(**options) if strategy == "ddp" else GradAvgStrategy(**options)
    batches = loader([[1.0, 2.0], [3.0, 4.0 + dist.get_rank()]])
    make_sim_trainer(chosen, max_epochs=1, use_distributed_sampler=False, **trainer).fit(toy, batches)
    return [gradient.device.type for gradient in toy.seen.gradients], [one.item() for one in toy.seen.gradients]


@pytest.mark.parametrize(
    ("strategy", "options", "gradients"),
    [("ddp", {}, [1.5, 3.75]), ("gradavg", {}, [1.5, 3.75]), ("gradavg", {"reduction": "sum"}, [3.0, 7.5])],
)
def test_a_trainer_runs_on_it(sim_world: World, strategy: str, options: dict[str, Any], gradients: list[float]) -> None:
    """A real fit gives the gradients that it gives on the CPU, with nothing found."""
    for (devices, seen), found in sim_world(2).run(observed, fit, strategy, options):
        assert ["sim", "sim"] == devices
        assert gradients == pytest.approx(seen, rel=1e-6)
        assert nothing_found(found), found


# Last of all, because gloo gives up the connection, and with it this world of ranks.


def never_joined() -> None:
    reset()
    group = dist.new_group(timeout=timedelta(milliseconds=200))
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1, device="sim"), group=group, async_op=True).wait()


def test_a_group_has_its_own_timeout(sim_world: World) -> None:
    """Who waits longer than the group's timeout is told for whom."""
    message = (
        r"collective without its peer: rank 0 launches all_reduce .*, and rank 1 does not join within 200 ms;"
        " it has launched nothing"
    )
    with pytest.raises(RankError, match=message):
        sim_world(2).run(never_joined)


# Building it.


def test_why_it_cannot_be_built_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler or ninja, the reason names what to install."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "install g++" in (obstacle() or "")
    monkeypatch.setattr(torch, "__version__", "2.4.0")
    assert "needs torch" in (obstacle() or "")


def test_one_process_builds_for_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of several that start at once, one compiles, and the others wait for it."""
    built: list[Path] = []

    def compiles(target: Path) -> None:
        built.append(target)
        target.touch()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(builder, "_compile", compiles)
    with ThreadPoolExecutor(4) as pool:
        paths = [future.result() for future in [pool.submit(builder.build) for _ in range(4)]]
    assert [builder.library()] * 4 == paths
    assert [builder.library()] == built
