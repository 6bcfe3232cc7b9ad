"""Training with `reproducible=True`: the same bits on any number of ranks, whatever else is asked for.

Replicas are added up by a tree, whose shape depends on their number alone, not on who holds them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from data_parallel import CNN, Masked, Model, Sparse, fit
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from ranks import grid
from torch import Tensor, nn

from lightning_gradavg import GradAvgMonitor, monitor
from lightning_gradavg._support.collectives import World
from lightning_gradavg.reproducible.sum import Span, TreeSum, add_up, subtrees

T = TypeVar("T")


class Sometimes(Model):
    """Of its three heads, one is used where the first sample says so: by some replicas, or none; and one never."""

    def build(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(13, 4), nn.Linear(13, 4), nn.Linear(13, 4)])

    def forward(self, x: Tensor) -> Any:
        return self.net[0](x) + (self.net[1](x) if x[0, 0] > 0.7 else 0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.net[2].weight.grad is None


class Unfrozen(Model):
    """Its first layer trains from the third step on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx >= 2)

    def build(self) -> nn.Module:
        net: Any = super().build()
        net[0].requires_grad_(False)
        return net


class Stopped(Model):
    """Its first layer stops training within every window of two."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx % 2 == 0)


def bits(replicas: int = 4, **options: Any) -> dict[str, Any]:
    return {"reproducible": True, "num_replicas": replicas, **options}


def assert_same_bits(
    world: Any, places: Sequence[Any], kind: type[Model], strategy: Any, *, load: Any = None, **options: Any
) -> None:
    """Assert that all that is seen of 8 batches on ranks of some nodes has the bits of that on one rank."""
    given = {"dtype": torch.float32, "load": load or {}, **options}
    (expected,) = world(1).run(fit, kind, strategy, **given)
    for nodes in places:
        for found in world(len(nodes)).run(fit, kind, strategy, nodes=nodes, **given):
            # Logged values agree to rounding.
            torch.testing.assert_close(found.logged, expected.logged, rtol=1e-5, atol=1e-5)
            for name in ("gradients", "buffers", "weights"):
                torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=0)


RANKS = {4: ([0, 0], [0, 0, 1, 1]), 8: ([0, 1], [0, 0, 0, 0]), 6: ([0, 0], [0, 0, 1])}
"""The nodes of the ranks that replicas are trained on, by their number. Of 6, 2 ranks have no whole subtree."""

ASKED: dict[str, dict[str, Any]] = {
    "clipping": {"gradient_clip_val": 0.1},
    "windows of 3": {"accumulate_grad_batches": 3},
}


@pytest.mark.parametrize(("kind", "replicas", "asked"), grid([Masked, CNN], [*RANKS], [*ASKED]))
def test_same_bits(world, kind, replicas, asked):
    """Training leaves the same bits on any number of ranks, on one node and on several."""
    assert_same_bits(world, RANKS[replicas], kind, bits(replicas), **ASKED[asked])


SERVED: dict[str, tuple[type[Model], dict[str, Any], dict[str, Any]]] = {
    "workers": (Model, {}, {"load": {"num_workers": 1}}),
    "bucket views": (Masked, {"gradient_as_bucket_view": True}, {"accumulate_grad_batches": 3}),
    "unused parameters": (Sometimes, {"find_unused_parameters": True}, {}),
    "unfrozen parameters": (Unfrozen, {}, {}),
    "an idle rank at the end of a window": (Model, {}, {"load": {"sizes": [8, 4]}, "accumulate_grad_batches": 2}),
    "sparse gradients": (Sparse, {}, {"accumulate_grad_batches": 2}),
    "weights without an exact sum": (Masked, {}, {"dtype": torch.float64}),
    "sum": (Model, {"reduction": "sum"}, {"gradient_clip_val": 0.5}),
    "normalized_sum": (Masked, {"reduction": "normalized_sum"}, {}),
    "bf16-true": (Model, {}, {"precision": "bf16-true"}),
    "bf16-mixed": (CNN, {}, {"precision": "bf16-mixed"}),
}


@pytest.mark.parametrize("name", SERVED)
def test_what_is_served(world, name):
    """Options and models of any kind leave the bits alone."""
    kind, strategy, options = SERVED[name]
    assert_same_bits(world, [[0, 0]], kind, bits(6, **strategy), **options)


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}], ids=str)
def test_a_parameter_that_stops_training_within_a_window(world, options):
    """The sum of the window would leave its gradient out. Between two windows it may stop."""
    for raised in world(2).run_expecting_errors(fit, Stopped, bits(**options), accumulate_grad_batches=2):
        assert "other parameters train than in the micro-batches before it" in raised.message
    assert_same_bits(world, [[0, 0]], Stopped, bits())


def how_set() -> list[Any]:
    return [
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]  # set by torch
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    ]


def settings() -> list[list[Any]]:
    """Body: train where the process is set otherwise; return how it was set before, in a batch, and after the run."""
    torch.set_num_threads(2)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    torch.backends.cudnn.benchmark = True
    seen = [how_set()]
    look = LambdaCallback(on_train_batch_start=lambda *_: seen.append(how_set()))
    fit(Model, bits(), callbacks=[look], max_steps=1)
    seen.append(how_set())
    torch.backends.cudnn.benchmark = False
    return seen


def test_a_process_is_set_alike(world):
    """A run computes in one thread by deterministic algorithms, and puts back what was set before."""
    usual = [2, False, True, True, None]
    assert [[usual, [1, True, False, False, ":4096:8"], usual]] * 2 == world(2).run(settings)


class Fingerprints(Callback):
    """Notes the fingerprint after each step, and saves a checkpoint after the second."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.prints = list[str]()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.prints.append(trainer.strategy.fingerprint())
        if self.path is not None and trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


class Resumed(CNN):
    """Begins with other random numbers than those that go on from the checkpoint."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        torch.manual_seed(2)


def prints(path: str | None = None, kind: type[Model] = CNN, replicas: int = 4, **options: Any) -> Any:
    """Body: the fingerprints after all steps of 4 per epoch, and what the monitor says of them on rank 0."""
    noted = Fingerprints(path)
    said = list[str]()
    with mock.patch.object(monitor, "rank_zero_info", said.append):
        callbacks = [noted, GradAvgMonitor(every_n_steps=1, fingerprint_every_n_steps=2)]
        fit(kind, bits(replicas), load={"times": 1}, callbacks=callbacks, **options)
    return noted.prints, said


def test_fingerprints_tell_states_apart_and_runs_go_on_alike(world, tmp_path):
    path = str(tmp_path / "saved.ckpt")
    ((whole, _),) = world(1).run(prints, max_epochs=2)
    assert len(whole) == len(set(whole)) == 8
    assert all(re.fullmatch("[0-9a-f]{16}", one) for one in whole)
    for found, said in world(2).run(prints, path):
        assert whole[:4] == found
        assert [f"GradAvgMonitor: after step {step}, fingerprint {whole[step - 1]}" for step in (2, 4)] == said
    assert [whole[2:]] * 4 == [found for found, _ in world(4).run(prints, kind=Resumed, resumed=path, max_epochs=2)]
    for raised in world(2).run_expecting_errors(prints, replicas=2, resumed=path, max_epochs=2):
        assert "num_replicas: 4 in the checkpoint, now 2" in raised.message


def tree(start: int, stop: int, leaf: Callable[[int], T], add: Callable[[T, T], T]) -> T:
    """Return the sum of some leaves as it is written down: the left half is the largest power of two below them."""
    if stop - start == 1:
        return leaf(start)
    middle = start + (1 << (stop - start - 1).bit_length() - 1)
    return add(tree(start, middle, leaf, add), tree(middle, stop, leaf, add))


def bracketed(left: str, right: str) -> str:
    return f"({left} {right})"


@pytest.mark.parametrize("leaves", range(1, 65))
def test_any_number_of_ranks_makes_the_same_tree(leaves):
    """A rank adds up its leaves one by one, holds at most as many sums as the tree is high, and is left with few."""
    expected = tree(0, leaves, str, bracketed)
    assert leaves != 6 or expected == "(((0 1) (2 3)) (4 5))"
    for ranks in (number for number in range(1, leaves + 1) if leaves % number == 0):
        whole: dict[Span, str] = {}
        each = leaves // ranks
        for held in (range(rank * each, (rank + 1) * each) for rank in range(ranks)):
            own: dict[Span, str] = {}
            for leaf in held:
                own[leaf, leaf + 1] = str(leaf)
                add_up(own, 0, leaves, bracketed)
                assert ranks > 1 or len(own) <= max((leaves - 1).bit_length(), 1)
            assert [*own] == [*subtrees(leaves, held)]
            whole |= own
        assert add_up(whole, 0, leaves, bracketed)
        assert {(0, leaves): expected} == whole


def sum_of_negative_zeros() -> list[Tensor]:
    world = World.of(None)
    parameter = torch.ones(1)
    sums = TreeSum([parameter], replicas=world.size, world=world)
    sums.add(world.rank, {id(parameter): torch.tensor([-0.0])} if world.rank == 0 else {})
    return [*sums.gradients(1.0).values()]


def test_zeros_are_positive(world):
    for size in (1, 2):
        for (total,) in world(size).run(sum_of_negative_zeros):
            assert not total.signbit().any()
