"""NCCL on one GPU: every rule, CUDA weights, precisions, late errors, and no wait for the device within a step.

Alone, `python tests/test_gpu.py` runs everything on 2 and 4 ranks and prints a table last; `--backend gloo` runs what
a CPU can. NCCL refuses two ranks on one GPU unless each process has a host id of its own; the traffic then takes the
network transport, as between nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import data_parallel
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from ranks import isolated, make_trainer
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader

from lightning_gradavg import GradAvgStrategy, Place, Share
from lightning_gradavg.reduction.reduce import combine
from lightning_gradavg.rules import RULES, resolve_rule

WORLDS = (2, 4)
SIZE = 5
COLLECTIVE_TIMEOUT = timedelta(seconds=60)
WORLD_TIMEOUT = 420.0
NODES = {2: [0, 1], 4: [0, 0, 0, 1]}


class Outcome(NamedTuple):
    """What one rank says of one check."""

    status: str
    text: str = ""


class NotHereError(Exception):
    """The check needs CUDA."""


def on_cuda() -> bool:
    return dist.get_backend() == "nccl"


def root_weighted(place: Place, weight: Any) -> Share:
    """A user's rule whose multiplier also depends on the place."""
    return Share(weight**0.5 / place.ranks_on_node, weight**0.5)


class OnNodes(GradAvgStrategy):
    """Every process is a node of its own to Lightning, or it would ask for a GPU each; the rule sees other nodes."""

    @property
    def node_rank(self) -> int:
        return NODES[dist.get_world_size()][dist.get_rank()]


class Recorder(LightningModule):
    """Records the gradients that reach the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[Tensor] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        parts = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.gradients.append(torch.cat([part.detach().flatten().clone() for part in parts]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(model: Recorder, batches: Sequence[Any], strategy: Any, window: int = 1, **options: Any) -> list[Tensor]:
    """Train on this rank's batches and return the gradients, after comparing them with those of all ranks."""
    device = {"accelerator": "gpu", "devices": 1} if on_cuda() else {}
    trainer = make_trainer(
        strategy,
        nodes=list(range(dist.get_world_size())),
        max_epochs=1,
        use_distributed_sampler=False,
        accumulate_grad_batches=window,
        **{**device, **options},
    )
    trainer.fit(model, DataLoader(list(batches), batch_size=None))  # type: ignore[arg-type]  # a list is a data set
    mine = [gradient.cpu() for gradient in model.gradients]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for others in everyone:
        assert len(mine) == len(others) > 0
        for ours, theirs in zip(mine, others, strict=True):
            assert torch.equal(ours, theirs), "the ranks have different gradients"
    return mine


class Dictated(Recorder):
    """A batch is `[gradient .., weight]`; where the weight is 0 the loss is NaN. The weight stays on its device."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(SIZE, dtype=torch.float64))
        self.weighted = weighted

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = (self.w * batch[:-1]).sum()
        if not self.weighted:
            return loss
        poison = torch.where(batch[-1] == 0, torch.nan, 1.0)
        return {"loss": loss * poison, "weight": batch[-1]}


def dictate(world_size: int, micro_batches: int, seed: int) -> list[list[list[float]]]:
    draw = random.Random(seed)
    weights = (lambda: 0.0, lambda: draw.uniform(0.1, 9), lambda: float(draw.randint(1, 9)))
    return [
        [[*(draw.uniform(-1, 1) for _ in range(SIZE)), draw.choice(weights)()] for _ in range(micro_batches)]
        for _ in range(world_size)
    ]


def check_rule(reduction: Any) -> None:
    """Every gradient is `combine` of all pairs, for windows of 1, 2 and 3, and a short last one."""
    rule, world_size = resolve_rule(reduction), dist.get_world_size()
    for window in (1, 2, 3):
        steps = 2 * window + window // 2
        rows = dictate(world_size, steps, seed=window)
        mine = [torch.tensor(row, dtype=torch.float64) for row in rows[dist.get_rank()]]
        gradients = fit(Dictated(rule.uses_weight), mine, OnNodes(reduction=reduction), window)
        starts = range(0, steps, window)
        for start, gradient in zip(starts, gradients, strict=True):
            pairs = [(rank, row) for rank in range(world_size) for row in rows[rank][start : start + window]]
            expected = combine(
                torch.tensor([row[:-1] for _, row in pairs], dtype=torch.float64),
                rule=rule,
                nodes=[NODES[world_size][rank] for rank, _ in pairs],
                weights=[row[-1] for _, row in pairs],
            )
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


class Heads(Recorder):
    """Two named terms with a head each; the box loss is a masked mean, NaN in value and gradient without any box."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.cls, self.box = (nn.Parameter(torch.tensor(x, dtype=torch.float64)) for x in (1.0, 2.0, 3.0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        classes, boxes = batch
        mask = (boxes != 0).double()
        loss = {
            "cls": (self.trunk * self.cls * classes).mean(),
            "box": (self.trunk * self.box * boxes * mask).sum() / mask.sum(),
        }
        return {"loss": loss, "weight": {"cls": torch.full_like(mask.sum(), len(classes)), "box": mask.sum()}}


def check_named_terms() -> None:
    """Terms whose weights are CUDA tensors each have their own mean, those without any box included."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def rows(r: int) -> list[tuple[list[float], list[float]]]:
        return [([1.0 + r, 3.0], [4.0 * r, 0.0]), ([2.0], [0.0, 0.0, 0.0]), ([5.0, 1.0, r], [1.0 + r, 7.0])]

    mine = [tuple(torch.tensor(part, dtype=torch.float64) for part in pair) for pair in rows(rank)]
    for window in (1, 3):
        gradients = fit(Heads(), mine, GradAvgStrategy(reduction="weighted_mean"), window)
        for step, gradient in enumerate(gradients):
            pairs = [pair for r in range(world_size) for pair in rows(r)[step * window : (step + 1) * window]]
            classes = [x for pair in pairs for x in pair[0]]
            boxes = [x for pair in pairs for x in pair[1] if x]
            of_classes, of_boxes = sum(classes) / len(classes), sum(boxes) / len(boxes) if boxes else 0.0
            expected = torch.tensor([2 * of_classes + 3 * of_boxes, of_classes, of_boxes], dtype=torch.float64)
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


class BadWeight(Dictated):
    def __init__(self, step: int, value: float) -> None:
        super().__init__(weighted=True)
        self.step, self.value = step, value

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        bad = batch_idx == self.step and dist.get_rank() == dist.get_world_size() - 1
        weight = torch.full_like(batch[-1], self.value) if bad else torch.ones_like(batch[-1])
        return {"loss": (self.w * batch[:-1]).sum(), "weight": weight}


def check_errors_one_step_later() -> None:
    """An unusable weight on one rank is raised by all: on CUDA after one more step, and at the end for the last."""
    late = int(on_cuda())
    for value in (-1.0, float("nan"), float("inf")):
        for step in (1, 3):
            model = BadWeight(step, value)
            raised = None
            try:
                fit(model, [torch.ones(SIZE + 1, dtype=torch.float64)] * 4, GradAvgStrategy(reduction="weighted_mean"))
            except ValueError as error:
                raised = str(error)
            assert raised is not None, f"weight {value} in step {step} of 4 was not found"
            assert "a weight or a share is not usable" in raised
            assert min(4, step + late) == len(model.gradients)


class Line(Recorder):
    """One weight in the precision's dtype; a batch is `[x, weight]`."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0]))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"loss": (self.w * batch[0].to(self.w.dtype)).sum(), "weight": batch[1].double()}


def check_true_half() -> None:
    """In float16 and bfloat16 neither large gradients overflow on the way nor small ones underflow."""
    world_size = dist.get_world_size()
    for precision, dtype in (("16-true", torch.float16), ("bf16-true", torch.bfloat16)):
        for scale in (1.0, 2.0**-38):
            for window in (1, 2):
                rows = [((60000.0 - 5000 * r) * scale, 3.0 - r % 2) for r in range(world_size)]
                batch = torch.tensor(rows[dist.get_rank()])
                strategy = GradAvgStrategy(reduction="weighted_mean")
                (gradient,) = fit(Line(), [batch] * window, strategy, window, precision=precision)
                expected = torch.tensor(
                    [sum(x * n for x, n in rows) / sum(n for _, n in rows)], dtype=torch.float64
                ).to(dtype)
                assert dtype == gradient.dtype
                # Every gradient was rounded to half precision once before, and so was each of two micro-batches' sum.
                torch.testing.assert_close(gradient, expected, rtol=3 * torch.finfo(dtype).eps, atol=2.0**-23)


class Regression(Recorder):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        tokens = torch.full((), 4096.0 * len(batch), device=batch.device)
        return {"loss": self.net(batch).float().square().mean(), "weight": tokens}


def check_mixed() -> None:
    """Under autocast with a GradScaler, weights of thousands overflow nothing: the gradient is that of float32."""
    world_size = dist.get_world_size()
    for precision, tolerance in (("16-mixed", 5e-3 if on_cuda() else 3e-2), ("bf16-mixed", 3e-2)):
        for window in (1, 3):
            data = [
                [
                    torch.randn(1 + (r + m) % 3, 6, generator=torch.Generator().manual_seed(10 * m + r))
                    for m in range(window)
                ]
                for r in range(world_size)
            ]
            strategy = GradAvgStrategy(reduction="weighted_mean")
            (gradient,) = fit(Regression(), data[dist.get_rank()], strategy, window, precision=precision)
            net = Regression().net
            loss = net(torch.cat([batch for rank in data for batch in rank])).square().mean()
            expected = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(net.parameters()))])
            assert torch.linalg.norm(gradient - expected) <= tolerance * torch.linalg.norm(expected)


def check_stock_bits() -> None:
    """Without options the gradients have the bits of stock DDP."""
    batches = [torch.randn(3, 6, generator=torch.Generator().manual_seed(dist.get_rank() + 9 * m)) for m in range(4)]
    for window in (1, 2):
        ours = fit(Regression(), batches, GradAvgStrategy(), window)
        stock = fit(Regression(), batches, DDPStrategy(), window)
        assert all(torch.equal(mine, its) for mine, its in zip(ours, stock, strict=True))


def check_hook() -> None:
    """A compression hook of DDP composes with weights that are CUDA tensors."""
    strategy = GradAvgStrategy(reduction="weighted_mean", ddp_comm_hook=default_hooks.bf16_compress_hook)
    batches = [torch.randn(1 + dist.get_rank(), 6, generator=torch.Generator().manual_seed(5))]
    compressed = fit(Regression(), batches, strategy)
    exact = fit(Regression(), batches, GradAvgStrategy(reduction="weighted_mean"))
    assert torch.linalg.norm(compressed[0] - exact[0]) <= 2e-2 * torch.linalg.norm(exact[0])


def check_equivalence(equivalent_to: Any, num_replicas: int | None, recompute: bool) -> None:
    """After 20 steps in float64 a run is that of the emulation on a CPU, with replicas or with one device."""
    for kind in (data_parallel.CNN, data_parallel.Contrastive):
        reference = kind(torch.float64)
        expected = data_parallel.train(reference, list(data_parallel.loader(reference)), num_replicas or 1)
        model = kind(torch.float64)
        device = {"accelerator": "gpu", "devices": 1} if on_cuda() else {}
        strategy = GradAvgStrategy(equivalent_to=equivalent_to, num_replicas=num_replicas, recompute_replicas=recompute)
        nodes = list(range(dist.get_world_size()))
        make_trainer(strategy, nodes=nodes, max_epochs=1, **device).fit(model, data_parallel.loader(model))
        state = {name: value.cpu() for name, value in model.state_dict().items()}
        # Other kernels than on the CPU, over 20 steps.
        torch.testing.assert_close(state, expected.weights, rtol=1e-9, atol=1e-9)


class Noisy(Recorder):
    """Its gradient is the noise that its replicas draw on their device."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(SIZE, dtype=torch.float64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.w * torch.randn(SIZE, dtype=torch.float64, device=self.device)).sum() * batch.mean()


def check_random_numbers() -> None:
    """Replicas of a device draw different numbers, and the same ones in a rerun."""
    device = {"accelerator": "gpu", "devices": 1} if on_cuda() else {}
    runs = []
    for _ in range(2):
        model = Noisy()
        torch.manual_seed(4)
        strategy = GradAvgStrategy(equivalent_to="data_parallel", num_replicas=4)
        nodes = list(range(dist.get_world_size()))
        trainer = make_trainer(strategy, nodes=nodes, max_epochs=1, **device)
        trainer.fit(model, DataLoader(torch.ones(12, dtype=torch.float64), batch_size=4))  # type: ignore[arg-type]  # a tensor is a data set
        runs.append(torch.stack(model.gradients).cpu())
    assert torch.equal(runs[0], runs[1])
    assert len(runs[0].unique()) == runs[0].numel()


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def unwaiting(strategy: type[DDPStrategy]) -> type[DDPStrategy]:
    """Return the strategy with an error for every wait in a training step and its backward, after the first 6."""

    class Unwaiting(strategy):  # type: ignore[valid-type, misc]  # a class that is an argument
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("batch_idx", args[1] if len(args) > 1 else 0) < 6:
                return super().training_step(*args, **kwargs)
            with waiting_is_an_error():
                return super().training_step(*args, **kwargs)

        def backward(self, *args: Any, **kwargs: Any) -> Any:
            if self.lightning_module.trainer.fit_loop.epoch_loop.batch_idx < 6:
                return super().backward(*args, **kwargs)
            with waiting_is_an_error():
                return super().backward(*args, **kwargs)

    return Unwaiting


def check_no_waits() -> None:
    """No step waits for the device: not under stock DDP, and not under rules whose weights are CUDA tensors.

    What the mode finds are implicit waits, such as reading a number. The event that a step awaits is not one of them:
    it lies one step back.
    """
    if not on_cuda():
        raise NotHereError
    rank = dist.get_rank()
    rows = [torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, float((m + rank) % 3)], dtype=torch.float64) for m in range(12)]
    pairs = [tuple(torch.tensor(x, dtype=torch.float64) for x in ([1.0, 2.0], [0.0, float(m % 3)])) for m in range(12)]
    fit(Dictated(weighted=False), rows, unwaiting(DDPStrategy)())
    for window in (1, 3):
        for reduction in [*RULES, root_weighted]:
            model = Dictated(resolve_rule(reduction).uses_weight)
            fit(model, rows, unwaiting(GradAvgStrategy)(reduction=reduction), window)
        fit(Heads(), pairs, unwaiting(GradAvgStrategy)(reduction="weighted_mean"), window)


CHECKS: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    **{f"rule {name}": (check_rule, (name,)) for name in RULES},
    "rule custom": (check_rule, (root_weighted,)),
    "named terms": (check_named_terms, ()),
    "errors": (check_errors_one_step_later, ()),
    "true half precision": (check_true_half, ()),
    "mixed precision": (check_mixed, ()),
    "stock bits": (check_stock_bits, ()),
    "hook": (check_hook, ()),
    "data_parallel": (check_equivalence, ("data_parallel", 4, False)),
    "data_parallel recomputed": (check_equivalence, ("data_parallel", 4, True)),
    "single_device": (check_equivalence, ("single_device", None, False)),
    "random numbers": (check_random_numbers, ()),
    "no waits": (check_no_waits, ()),
}


def _run_rank(rank: int, world_size: int, backend: str, folder: str) -> None:
    """Run all checks as one rank and write what came of them."""
    os.environ.update(
        NCCL_HOSTID=f"gradavg-{rank}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        NCCL_P2P_DISABLE="1",
        NCCL_SHM_DISABLE="1",
        NCCL_MAX_CTAS="2",
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(0)
    store = dist.FileStore(f"{folder}/store", world_size)  # type: ignore[attr-defined]  # not listed in __all__
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
    outcomes: dict[str, Outcome] = {}
    for name, (check, arguments) in CHECKS.items():
        try:
            with isolated(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "rank . has a micro-batch of weight 0")
                check(*arguments)
            outcomes[name] = Outcome("passed")
        except NotHereError:
            outcomes[name] = Outcome("skipped", "needs CUDA")
        except Exception:  # noqa: BLE001  # whatever it is, the table says so
            outcomes[name] = Outcome("failed", traceback.format_exc())
        Path(folder, f"rank{rank}.json").write_text(json.dumps(outcomes))
        # A rank that failed between collectives leaves the others waiting: they end by the timeout of the group.
        dist.barrier()
    dist.destroy_process_group()


def run_world(world_size: int, backend: str) -> dict[str, list[Outcome]]:
    """Return every rank's outcome of every check, in new processes on one device."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="gradavg-gpu-") as folder:
        ranks = range(world_size)
        processes = [context.Process(target=_run_rank, args=(rank, world_size, backend, folder)) for rank in ranks]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(WORLD_TIMEOUT)
        finally:
            for process in processes:
                process.kill()
                process.join()
        files = [Path(folder, f"rank{rank}.json") for rank in ranks]
        answers = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    missing = ("failed", "the rank did not come this far: see the first failure, of any rank")
    return {name: [Outcome(*answer.get(name, missing)) for answer in answers] for name in CHECKS}


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world_size: f"{world_size} ranks")
def nccl_outcomes(request: pytest.FixtureRequest) -> dict[str, list[Outcome]]:
    return run_world(request.param, "nccl")


@pytest.mark.gpu
@pytest.mark.timeout(WORLD_TIMEOUT * 2)
@pytest.mark.parametrize("name", CHECKS)
def test_nccl_on_one_gpu(nccl_outcomes: dict[str, list[Outcome]], name: str) -> None:
    """Every check passes on all ranks of NCCL."""
    for rank, outcome in enumerate(nccl_outcomes[name]):
        assert outcome.status == "passed", f"rank {rank}: {outcome.text}"


@pytest.mark.slow
@pytest.mark.timeout(WORLD_TIMEOUT)
def test_checks_are_right_on_cpu() -> None:
    """What the checks for a GPU expect holds on gloo, so that a failure on a GPU is one of the GPU."""
    outcomes = run_world(2, "gloo")
    for name, ranks in outcomes.items():
        expected = "skipped" if name == "no waits" else "passed"
        for rank, outcome in enumerate(ranks):
            assert outcome.status == expected, f"{name}, rank {rank}: {outcome.text}"


def main() -> int:
    """Run the checks and print what failed and a table; the exit code is 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--worlds", type=int, nargs="+", default=list(WORLDS), choices=WORLDS)
    arguments = parser.parse_args()
    if arguments.backend == "nccl" and not torch.cuda.is_available():
        parser.error("no CUDA device is available: --backend gloo runs on the CPU what does not need one")
    table = {world_size: run_world(world_size, arguments.backend) for world_size in arguments.worlds}
    rows, failures = [], []
    for name in CHECKS:
        cells = []
        for world_size, outcomes in table.items():
            broken = [(rank, one.text) for rank, one in enumerate(outcomes[name]) if one.status == "failed"]
            failures += [f"{name}, {world_size} ranks, rank {rank}:\n{text}" for rank, text in broken]
            cells.append("failed" if broken else outcomes[name][0].status)
        rows.append((name, *cells))
    header = (arguments.backend, *(f"{world_size} ranks" for world_size in table))
    lines = [f"{name:24}" + "".join(f"{cell:>10}" for cell in cells) for name, *cells in (header, *rows)]
    print("\n".join([*failures, *lines]))  # noqa: T201  # the script reports on the console
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
