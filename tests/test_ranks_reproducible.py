"""Training with `reproducible=True`: the same bits on any number of ranks, whatever else is asked for."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from accelerator import make_sim_trainer
from grids import grid
from lightning.pytorch import Callback, LightningModule, Trainer
from ranks import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from toys import FirstLater

from lightning_gradavg import GradAvgMonitor, GradAvgStrategy, monitor


class Net(LightningModule):
    """What the nets have in common."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = self.make()
        self.adamw = False

    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(13, 31), nn.ReLU(), nn.Linear(31, 17), nn.Tanh(), nn.Linear(17, 5))

    def inputs(self, samples: int) -> Tensor:
        return torch.randn(samples, 13)

    def samples(self, count: int) -> tuple[Tensor, Tensor]:
        return self.inputs(count), torch.randint(5, (count,))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.net(inputs), labels)

    def configure_optimizers(self) -> Any:
        if self.adamw:
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class CNN(Net):
    """Convolutions, whose weights have their channels last, with batch norm and dropout."""

    def make(self) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.ReLU(), nn.Dropout(0.2)),
            *(nn.Conv2d(7, 9, 3), nn.BatchNorm2d(9), nn.ReLU()),
            *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(9 * 16, 5)),
        ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing there

    def inputs(self, samples: int) -> Tensor:
        return torch.randn(samples, 3, 8, 8)


class Transformer(Net):
    """A small language model whose weight is the number of tokens, of which some samples have none."""

    def make(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 2, 33, dropout=0.1, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        return nn.Sequential(nn.Embedding(11, 16), encoder, nn.Linear(16, 11))

    def samples(self, count: int) -> tuple[Tensor, Tensor]:
        tokens, lengths = torch.randint(11, (count, 8)), torch.randint(8, (count, 1))
        return tokens[:, :-1], torch.where(torch.arange(7) < lengths, tokens[:, 1:], -100)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs).flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "weight": (labels != -100).sum()}


class Sometimes(Net):
    """Of its two heads, one is used where the first sample says so: by some replicas, or none."""

    def make(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(13, 5), nn.Linear(13, 5), nn.Linear(13, 5)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        outputs = self.net[0](inputs) + (self.net[1](inputs) if inputs[0, 0] > 0.7 else 0)
        return nn.functional.cross_entropy(outputs, labels)


class Sparse(Transformer):
    """Its embedding has sparse gradients, several for a row."""

    def make(self) -> nn.Module:
        net: Any = super().make()
        net[0].sparse = True
        return net  # type: ignore[no-any-return]  # indexed above


class Unfrozen(FirstLater, Net):
    """Its first layer trains from the third step on."""


class Fractions(Net):
    """Weights that no sum in floating point holds exactly."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "weight": batch[0].abs().sum().double() ** 3}


Left = tuple[str, dict[str, Tensor]]
"""What is left of a run: the fingerprint; parameters, buffers, and the optimizer's state by name."""


def trained(
    kind: type[Net],
    replicas: int,
    nodes: Sequence[int] | None = None,
    *,
    adamw: bool = False,
    batch_size: int = 32,
    batches: int = 12,
    workers: int = 0,
    resumed: str | None = None,
    options: Mapping[str, Any] | None = None,
    make: Callable[..., Trainer] = make_trainer,
    **trainer_options: Any,
) -> Left:
    """Body: train, on a short last batch, too, which leaves some replicas without samples."""
    module = kind()
    module.adamw = adamw
    torch.manual_seed(1)
    data = TensorDataset(*module.samples(batch_size * batches - batch_size // 2 - 3))
    loader = DataLoader(data, batch_size=batch_size, shuffle=True, num_workers=workers)
    strategy = GradAvgStrategy(num_replicas=replicas, reproducible=True, **(options or {}))
    trainer = make(strategy, nodes=nodes, **{"max_epochs": 1, **trainer_options})
    # Of random numbers that do not go on from the checkpoint; other tests leave a seed behind.
    os.environ.pop("PL_GLOBAL_SEED", None)
    torch.manual_seed(1 if resumed is None else 2)
    trainer.fit(module, loader, ckpt_path=resumed)
    state: dict[str, Tensor] = dict(module.state_dict())
    for index, values in strategy.optimizers[0].state_dict()["state"].items():
        state |= {f"{index} {name}": value for name, value in values.items()}
    return strategy.fingerprint(), {name: value.cpu().clone() for name, value in state.items()}


def same_bits(one: Left, other: Left) -> bool:
    """Return whether the states are equal, and their fingerprints say so."""
    (of_one, state), (of_other, its) = one, other
    equal = list(state) == list(its) and all(torch.equal(value, its[name]) for name, value in state.items())
    assert equal == (of_one == of_other)
    return equal


def assert_same_bits(world: Any, sizes: Sequence[Any], *arguments: Any, **options: Any) -> None:
    """Assert that all that is left of a run on ranks of some nodes has the bits of that on one rank."""
    (expected,) = world(1).run(trained, *arguments, **options)
    for nodes in sizes:
        found = world(len(nodes)).run(trained, *arguments, nodes=nodes, **options)
        assert [True] * len(nodes) == [same_bits(expected, one) for one in found]


RANKS = {4: ([0, 0], [0, 0, 1, 1]), 8: ([0, 1], [0, 0, 0, 0]), 6: ([0, 0], [0, 0, 1])}
"""The nodes of the ranks that replicas are trained on, by their number. Of 6, 2 ranks have no whole subtree."""

ASKED: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "AdamW and clipping": {"adamw": True, "gradient_clip_val": 0.1},
    "windows of 4": {"accumulate_grad_batches": 4},
}


@pytest.mark.parametrize(("kind", "replicas", "asked"), grid([Net, CNN, Transformer], [*RANKS], [*ASKED]))
def test_same_bits(world, kind, replicas, asked):
    """12 steps leave the same bits on any number of ranks, on one node and on several."""
    assert_same_bits(world, RANKS[replicas], kind, replicas, **ASKED[asked])


SERVED: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "workers": (Transformer, {"workers": 1}),
    "bucket views": (Net, {"options": {"gradient_as_bucket_view": True}, "accumulate_grad_batches": 3}),
    "unused parameters": (Sometimes, {"options": {"find_unused_parameters": True}}),
    "unfrozen parameters": (Unfrozen, {}),
    "an idle rank at the end of a window": (Net, {"batch_size": 8, "batches": 4, "accumulate_grad_batches": 2}),
    "sparse gradients": (Sparse, {"accumulate_grad_batches": 2}),
    "sums of fractions": (Fractions, {"precision": "64-true"}),
    "sum": (Net, {"options": {"reduction": "sum"}, "gradient_clip_val": 0.5}),
    "normalized_sum": (Transformer, {"options": {"reduction": "normalized_sum"}}),
    "bf16-true": (Net, {"precision": "bf16-true"}),
    "bf16-mixed": (CNN, {"precision": "bf16-mixed"}),
}


@pytest.mark.parametrize("name", SERVED)
def test_what_is_served(world, name):
    """Options and models of any kind leave the bits alone."""
    kind, asked = SERVED[name]
    assert_same_bits(world, [[0, 0]], kind, 6, **{"batches": 8, **asked})


def fixed(number: int) -> tuple[list[Any], list[Any]]:
    """Body: train where the process is set otherwise; return how it was set within the run, and after it."""
    seen = []

    class Look(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            seen.append(how_set())

    torch.set_num_threads(number)
    torch.backends.cudnn.benchmark = True
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    before = how_set()
    trained(Net, 4, batches=1, callbacks=[Look()])
    assert before == how_set()
    torch.backends.cudnn.benchmark = False
    return before, seen[0]


def how_set() -> list[Any]:
    return [
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]  # set by torch
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    ]


def test_a_process_is_set_alike(world):
    """A run computes in one thread by deterministic algorithms, and puts back what was set before."""
    expected = [[2, False, True, True, None], [1, True, False, False, ":4096:8"]]
    assert [tuple(expected)] * 2 == world(2).run(fixed, 2)


def test_same_bits_on_an_accelerator(sim_world):
    """On 2 and 4 devices as on one."""
    options = {"batches": 6, "gradient_clip_val": 0.5, "make": make_sim_trainer}
    (expected,) = sim_world(1).run(trained, Net, 4, **options)
    for ranks in (2, 4):
        assert all(same_bits(expected, found) for found in sim_world(ranks).run(trained, Net, 4, **options))


class Fingerprints(Callback):
    """Notes the fingerprint after each step, and saves a checkpoint after the second."""

    def __init__(self, path: str | None) -> None:
        self.path, self.prints = path, list[str]()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.prints.append(trainer.strategy.fingerprint())
        if self.path is not None and trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def prints(path: str | None = None, **options: Any) -> tuple[list[str], list[str]]:
    """Body: the fingerprints after all steps of 3 per epoch, and what the monitor says of them on rank 0."""
    noted, said = Fingerprints(path), list[str]()
    with mock.patch.object(monitor, "rank_zero_info", said.append):
        callbacks = [noted, GradAvgMonitor(every_n_steps=1, fingerprint_every_n_steps=2)]
        trained(CNN, 4, batches=3, callbacks=callbacks, **options)
    return noted.prints, said


def test_fingerprints_tell_states_apart_and_runs_go_on_alike(world, tmp_path):
    path = str(tmp_path / "saved.ckpt")
    ((whole, _),) = world(1).run(prints, max_epochs=2)
    assert len(whole) == len(set(whole)) == 6
    assert all(re.fullmatch("[0-9a-f]{16}", one) for one in whole)
    ((other, *_), _), *_ = world(1).run(prints, adamw=True)
    assert other != whole[0]
    for found, said in world(2).run(prints, path):
        assert whole[:3] == found
        assert [f"GradAvgMonitor: after step 2, fingerprint {whole[1]}"] == said
    assert [whole[2:]] * 4 == [found for found, _ in world(4).run(prints, resumed=path, max_epochs=2)]
    for raised in world(2).run_expecting_errors(trained, CNN, 2, resumed=path, max_epochs=2):
        assert "num_replicas: 4 in the checkpoint, now 2" in raised.message


def test_a_fingerprint_of_nothing():
    with pytest.raises(RuntimeError, match="nothing to take a fingerprint of before the Trainer has begun a run"):
        GradAvgStrategy().fingerprint()
