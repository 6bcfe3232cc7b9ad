"""RUNS: healthy runs, runs with one fault each, and some that cannot be judged; real ranks record, one process judges.

Each row shows something that no other row shows: a mechanism of the package, or a way to ask for one.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any
from unittest import mock

import pytest
import torch
import verify_modules as m
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from orders import Graphs
from ranks import RankEnvironment
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, default_collate
from toys import GATHERS, Toy
from verify_modules import (
    by_ranks,
    dropped,
    entropy,
    layers,
    normed,
    plain,
    scaled,
    scores,
    sgd,
    streamed,
    texts,
    world,
)

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.verify import record
from lightning_gradavg.verify.explain import judge
from lightning_gradavg.verify.run import quiet_options, record_run

EVEN, UNEVEN, WINDOWS = by_ranks((4, 4), (4, 4)), by_ranks((6, 4), (2, 2)), by_ranks((4, 4, 4), (4, 4, 4))
ALL, LATER = plain(), by_ranks((4, 6), (4, 2))


class Run:
    """Layers, step, loader, strategy, and hooks and options of the Trainer; and what is to be found.

    Lightning's sampler `deals`, and a gradient is a `factor` of the right one. The report `says` all this.
    """

    verdict, cause, not_shown = "equal", "", ""

    def __init__(
        self,
        make: m.Layers = layers,
        step: m.OfStep = m.classified,
        reads: m.Loader = EVEN,
        strategy: Callable[[], Any] = DDPStrategy,
        *,
        steps: int = 2,
        ranks: int = 2,
        tolerance: float = 1e-8,
        says: Sequence[str] = (),
        factor: float | None = None,
        deals: bool = False,
        window: int = 1,
        manual: bool = False,
        optimizer: Callable[[Any], Any] = sgd,
        **given: Any,
    ) -> None:
        given |= {"use_distributed_sampler": deals, "accumulate_grad_batches": window}
        given |= {"automatic_optimization": not manual, "configure_optimizers": optimizer}
        self.make, self.step, self.reads, self.strategy, self.given = make, step, reads, strategy, given
        self.steps, self.ranks, self.tolerance, self.says, self.factor = steps, ranks, tolerance, says, factor

    def build(self) -> tuple[LightningModule, dict[str, Any], dict[str, Any]]:
        """Return module, data and options, as of a new run."""
        hooks = {n: each for n, each in self.given.items() if hasattr(LightningModule, n) or n == "training_step_end"}
        options = {name: each for name, each in self.given.items() if name not in hooks}
        torch.manual_seed(1)
        module = m.Step(self.make, self.step, **hooks)
        return module, {"train_dataloaders": self.reads()}, quiet_options({"max_epochs": 1, **options}, "cpu")


def shared(make: m.Layers = layers, step: m.OfStep = m.classified, reads: m.Loader = ALL, **more: Any) -> Run:
    """Return a run over a loader of which Lightning's sampler deals a part to each rank."""
    return Run(make, step, reads, **{"deals": True, **more})


def recorded(name: str) -> record.Tape:
    """Body: record a run on this rank."""
    (module, data, options), environment = RUNS[name].build(), RankEnvironment()
    options["plugins"] = [*options["plugins"], environment]
    options["devices"] = environment.ranks_on_node
    with mock.patch.object(record, "_MOST_SAMPLES", 200):  # so that a stream without an end has one soon
        return record_run(record.Recorder(RUNS[name].steps), RUNS[name].strategy(), options, module, data)


def ours(**options: Any) -> Callable[[], GradAvgStrategy]:
    return lambda: GradAvgStrategy(**options)


def sending(hook: Any, **options: Any) -> Callable[[], GradAvgStrategy]:
    return ours(ddp_comm_hook=hook, **options)


def stock(**options: Any) -> Callable[[], DDPStrategy]:
    return lambda: DDPStrategy(**options)


BY_WEIGHT, BY_SUM, SPLIT = ours(reduction="weighted_mean"), ours(reduction="sum"), ours(split_batches=True)
SINGLE, PARALLEL = ours(equivalent_to="single_device"), ours(equivalent_to="data_parallel")
SCALED = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
TOKENS = m.weighing(m.each_token, lambda batch: batch != 0)
COUNTER = scaled(lambda module: next(vars(module).setdefault("factors", iter(range(1, 99)))))

EQUAL = {
    "case 41": Run(dropped),
    "a sum loss, `sum`": Run(step=m.summed, reads=LATER, strategy=BY_SUM, steps=1),
    "a sum loss, `normalized_sum`": Run(step=m.summed, reads=UNEVEN, strategy=ours(reduction="normalized_sum")),
    "named loss terms": Run(step=m.named_terms, reads=LATER, strategy=BY_WEIGHT, steps=1),
    "windows of weighted batches": Run(
        step=m.weighing(m.masked, lambda batch: batch[1] != 0),
        reads=by_ranks((6, 4, 3), (2, 4, 1)),
        strategy=BY_WEIGHT,
        window=2,
    ),
    "dropout, a short last window": Run(dropped, reads=WINDOWS, strategy=GradAvgStrategy, window=2),
    "a short window beyond the steps": Run(reads=WINDOWS, strategy=GradAvgStrategy, window=2, steps=1),
    "dropout, uneven batches, bfloat16": Run(dropped, reads=UNEVEN, strategy=BY_WEIGHT, precision="bf16-mixed"),
    "noise drawn in `training_step`, bfloat16 weights": Run(
        step=entropy(lambda net, x: net(x + torch.randn_like(x))),
        reads=UNEVEN,
        strategy=BY_WEIGHT,
        precision="bf16-true",
    ),
    "clipping, float16 with a gradient scaler": Run(plugins=[SCALED], gradient_clip_val=0.1),
    "clipping in manual optimization": Run(step=m.by_hand(), strategy=GradAvgStrategy, manual=True),
    "a GAN with noise": Run(
        lambda: nn.ModuleList([nn.Linear(3, 6), layers()]),
        m.adversarial,
        strategy=stock(find_unused_parameters=True),
        steps=4,
        manual=True,
        optimizer=lambda self: [torch.optim.Adam(each.parameters(), 0.01) for each in self.net.children()],
    ),
    "AdamW, one cycle, batch norm on one device": Run(
        normed, reads=plain(20, 8), strategy=SINGLE, optimizer=m.one_cycle
    ),
    "momentum, schedules of epochs and of a metric, a counter": Run(
        step=COUNTER, optimizer=m.halving, max_epochs=3, steps=5
    ),
    "a schedule of steps, reads the data set and writes to the logger": shared(
        step=m.reads_data, optimizer=m.one_cycle, steps=3
    ),
    "a frozen layer, dropout, hooks that read gradients, an average of weights": Run(
        m.frozen,
        on_train_start=lambda self: len(self.trainer.train_dataloader),
        on_before_optimizer_step=lambda self, _: [float(each.grad.norm()) for each in self.net[-1].parameters()],
        on_train_batch_end=m.averaged(lambda: 1.0),
    ),
    "`split_batches` on three ranks": Run(
        reads=plain(20, 7), strategy=SPLIT, steps=3, ranks=3, precision="64-true", tolerance=1e-13
    ),
    "an idle rank": Run(reads=plain(12), strategy=SPLIT, ranks=3, precision="64-true"),
    "asks for the global batch": Run(
        step=scaled(lambda module: module.trainer.strategy.global_batch_size / 8), reads=ALL, strategy=SPLIT
    ),
    "`split_batches` in pieces, dropout": Run(
        dropped, reads=plain(22, 7), strategy=ours(split_batches=True, max_device_batch_size=2), window=2
    ),
    "dropout, `single_device`": Run(dropped, reads=plain(14, 5), strategy=SINGLE),
    "`training_step_end`": Run(
        step=lambda module, batch: {"outputs": module.net(batch[0])},
        reads=plain(14, 5),
        strategy=SINGLE,
        training_step_end=lambda _, outputs: m.spread(outputs["outputs"]),
    ),
    "a static graph, spectral norm": Run(
        lambda: layers(change=lambda net: nn.utils.parametrizations.spectral_norm(net[0])),
        strategy=stock(static_graph=True),
    ),
    "a counter outside of the module": Run(step=scaled(lambda _: next(m.CALLS))),
    "an L2 penalty in a mean loss, a factor of `batch_idx`": Run(
        step=scaled(lambda module: 1 + module.batch_idx, m.penalized())
    ),
    "padded texts with their weights, dropout": shared(lambda: m.words(0.3), TOKENS, texts, strategy=BY_WEIGHT),
    "padded texts, attention, dropout": shared(m.attention, m.each_text, texts),
    "padded texts, attention, dropout, `single_device`": Run(m.attention, m.each_text, lambda: texts(8), SINGLE),
    "LSTM, dropout": shared(m.recurrent, m.last_word, texts),
    "samples along dimension 1, dropout": shared(
        lambda: nn.Sequential(nn.Linear(2, 5), nn.Dropout(0.4), nn.Linear(5, 3)),
        entropy(lambda net, x: net(x.reshape(-1, 3, 2).transpose(0, 1)).mean(0)),
    ),
    "sparse gradients, SparseAdam": Run(
        lambda: nn.Embedding(3, 4, sparse=True),
        lambda module, batch: (module.net(batch[1]) - 1).square().mean(),
        optimizer=lambda self: torch.optim.SparseAdam(list(self.parameters()), lr=0.1),
    ),
    "L-BFGS, bucket views": Run(strategy=stock(gradient_as_bucket_view=True), optimizer=m.lbfgs),
    "`x.float()`, logged with `sync_dist`, medium precision of products": shared(
        step=m.in_float, on_fit_start=lambda _: torch.set_float32_matmul_precision("medium")
    ),
    "samples in lists": shared(
        step=lambda module, batch: m.classified(module, tuple(map(torch.stack, batch))),
        reads=plain(collate_fn=lambda rows: tuple(zip(*rows, strict=True))),
    ),
    "batches of a class of their own": shared(
        step=lambda module, batch: m.classified(module, default_collate(batch.samples)), reads=plain(collate_fn=Graphs)
    ),
    "noise that a data set draws in a worker": shared(
        lambda: nn.Linear(1, 3),
        lambda module, batch: module.net(batch).square().mean(),
        m.augmented,
        says=["samples of the step are those of one process there"],
    ),
    **{f"contrastive, gathered by {way}": shared(step=scores(way)) for way in GATHERS},
    "compiled, dropout": shared(dropped, entropy(lambda net, x: torch.compile(net)(x))),
    **{
        f"checkpointed, reentrant: {reentrant}, dropout": shared(
            dropped, entropy(lambda net, x, how=reentrant: checkpoint(net, x.requires_grad_(), use_reentrant=how))
        )
        for reentrant in (False, True)
    },
    **{
        f"a stream, {how} for each": Run(reads=streamed(how), strategy=BY_WEIGHT, steps=4)
        for how in ("every W-th", "halves", "uneven parts")
    },
    "a stream with noise": Run(
        reads=streamed("halves", lambda rows: ((x + torch.randn_like(x), y) for x, y in rows)), strategy=BY_WEIGHT
    ),
    "a sampler of your own": Run(reads=m.sampled(lambda: m.in_turn([*range(32)]))),
    "a half of the batches for each, in order": Run(reads=lambda: m.dealt(m.batches((4,) * 4), m.half)),
    "a sampler with replacement": Run(reads=m.sampled(m.replacing)),
    "batches of a sampler with replacement": Run(reads=m.replacing_in_batches),
    "`drop_last`": shared(reads=plain(30, drop_last=True)),
}
DIFFERENT = {
    "initial weights": Run(lambda: layers(change=lambda net: net[0].weight.data.mul_(world()))),
    "duplicated stream: in batches": Run(reads=plain(16)),
    "duplicated stream": Run(reads=streamed("all")),
    "duplicated stream: without an end": Run(reads=streamed("all", cycle)),
    "duplicated stream: a sampler of your own": Run(reads=plain(sampler=range(32))),
    "padding": shared(reads=plain(15)),
    "unread samples: sharded by hand and by the sampler": shared(reads=m.sharded_by_hand),
    "data order: ranks that read backwards": Run(reads=lambda: m.dealt(m.batches((4,) * 4), m.backwards)),
    "batch norm: case 42": Run(
        lambda: nn.BatchNorm1d(1),
        lambda module, batch: (module.net(batch) * batch).mean(),
        m.of_rows([[0.0], [2.0]], [[4.0], [6.0]]),
        steps=1,
    ),
    "batch norm: windows": Run(normed, reads=WINDOWS, strategy=GradAvgStrategy, window=3, steps=1),
    "batch norm: without running statistics": Run(lambda: normed(track_running_stats=False)),
    "batch norm: uneven batches": Run(normed, reads=UNEVEN),
    "non-decomposable loss": Run(step=lambda module, batch: m.spread(module.net(batch[0]))),
    "non-decomposable loss: a batch hook that normalizes": shared(
        on_after_batch_transfer=lambda _, batch, __: ((batch[0] - batch[0].mean(0)) / batch[0].std(0), batch[1])
    ),
    "non-decomposable loss: a hook on parameters that clips": Run(m.hooked(lambda grad: grad.clamp(-0.01, 0.01))),
    **{f"detached gather: {way}": shared(step=scores(way)) for way in m.DETACHED},
    "sum loss": Run(
        step=m.summed,
        factor=0.5,
        says=[
            "in the reduced gradient",
            "the gradient is 0.5 x that of one process: the loss is a sum over samples",
            '+trainer = Trainer(strategy=GradAvgStrategy(..., reduction="sum"), ...)',
        ],
    ),
    "sum loss: L-BFGS": Run(step=m.summed, optimizer=m.lbfgs),
    "sum loss: shuffled": shared(step=m.summed, reads=plain(16), says=["note: one process would train on these"]),
    "sum loss: samples repeated to fill the ranks": shared(step=m.summed, reads=plain(15)),
    "constant term: an L2 penalty under `sum`": Run(step=m.penalized(m.summed), strategy=BY_SUM),
    "constant term: an L2 penalty in a sum loss": Run(step=m.penalized(m.summed)),
    "mean of means": Run(reads=UNEVEN),
    "mean of means: late in a long window": Run(reads=by_ranks((4,) * 9 + (2,), (4,) * 10), window=10),
    "mean of means: a short last batch in a window": shared(reads=plain(28), window=2),
    "mean of means: over tokens": Run(step=m.masked),
    "mean of means: over tokens of padded texts, with weights": shared(m.words, TOKENS, texts),
    "mean of means: a moving average of the loss in an attribute": Run(step=m.by_average),
    "counts: class weights": Run(step=entropy(weight=torch.tensor([1.0, 5.0, 2.0])), strategy=BY_WEIGHT),
    "counts: a mean over tokens weighted by samples": Run(
        step=m.masked, reads=UNEVEN, strategy=BY_WEIGHT, says=["the run weights them by 0.75, 0.25:", '"weight": n']
    ),
    "counts: a mean under `sum`": Run(reads=UNEVEN, strategy=BY_SUM),
    "short window": Run(reads=WINDOWS, window=2),
    "hand-compensated loss: case 7": Run(
        Toy,
        m.case_7,
        m.of_rows([1.0, 1.0, 1.0], [5.0]),
        BY_WEIGHT,
        steps=1,
        factor=0.875,
        says=["net.w is 1.75, but 2 on one process", 'reduction="mean"'],
    ),
    "hand-compensated loss: times the ranks, dropout": Run(dropped, scaled(lambda _: world())),
    "hand-compensated loss: times the ranks in the second step": Run(
        step=scaled(lambda module: world() if module.batch_idx == 1 else 1), reads=WINDOWS, steps=3
    ),
    "hand-compensated loss: a tiny gradient times the ranks": Run(
        lambda: layers(change=lambda net: net[0].bias.register_hook(lambda grad: 1e-9 * world() * grad)),
        says=["net.0.bias is "],
    ),
    "double division: a loss": Run(step=scaled(lambda _: 1 / world())),
    "double division: a communication hook": Run(strategy=sending(m.reduced_by(lambda sent: sent / 2))),
    "double division: a communication hook under `sum`": Run(
        step=m.summed, strategy=sending(m.reduced_by(lambda sent: sent / 2), reduction="sum")
    ),
    "double division: a hook on parameters": Run(m.hooked(lambda grad: grad / world())),
    "double division: after the reduction": Run(
        on_after_backward=lambda self: [each.grad.div_(world()) for each in self.parameters()]
    ),
    "gradient hooks: every rank clips its norm": Run(
        strategy=sending(m.reduced_by(lambda sent: sent * min(1.0, 0.05 / float(sent.norm()))))
    ),
    "gradient hooks: lost on the way": Run(strategy=sending(m.reduced_by(lambda sent: sent * 0))),
    "16-bit wire: float16": Run(strategy=sending(fp16_compress_hook)),
    "16-bit wire: bfloat16": Run(strategy=sending(bf16_compress_hook)),
    "unsynchronised replicas: a weight": Run(on_train_batch_start=m.drifts),
    "unsynchronised replicas: past the strategy": Run(step=m.by_hand(outside=True), manual=True),
    "unsynchronised replicas: rates": Run(optimizer=lambda self: sgd(self, lr=0.1 * (1 + self.global_rank))),
    "unsynchronised replicas: optimizers": Run(
        optimizer=lambda self: (torch.optim.Adam if m.rank() else torch.optim.SGD)(self.parameters(), lr=0.1)
    ),
    "learning-rate scale": Run(optimizer=lambda self: sgd(self, lr=0.1 * world(), momentum=0.9)),
    "learning-rate scale: a short last window": Run(
        reads=WINDOWS, window=2, optimizer=lambda self: sgd(self, lr=0.1 * world())
    ),
    "learning-rate scale: one group": Run(optimizer=lambda self: m.grouped(self, 0.1 * world())),
    "optimizer options: weight decay": Run(optimizer=lambda self: sgd(self, weight_decay=0.01 * world())),
    "weights beside the gradient: an average": Run(m.frozen, on_train_batch_end=m.averaged(world)),
    "buffers of one rank: of its samples": Run(
        lambda: layers(change=lambda net: net.register_buffer("seen", torch.zeros(()))), m.counts
    ),
    "logged value: summed over the ranks": shared(
        step=m.summed_value, factor=2.0, says=["in the logged values", "the training is the same"]
    ),
    "unexplained: an L2 penalty of rank 0": Run(step=m.penalized(alone=True)),
    "unexplained: times the ranks in manual optimization": Run(
        step=m.by_hand(scaled(lambda _: 0.01 * world())), manual=True, says=["the gradient is 2 x that of one process"]
    ),
    "unexplained: times 1.004": Run(strategy=sending(m.reduced_by(lambda sent: sent * 1.004)), precision="bf16-mixed"),
    "unexplained: clipping to a part for every rank": Run(
        configure_gradient_clipping=lambda self, optimizer, *_, **__: self.clip_gradients(
            optimizer, 0.1 / world(), "norm"
        )
    ),
}
"""By the cause that is to be named, and what the run does."""

NOT_SHOWN = {
    "trains replicas": Run(normed, reads=plain(14, 7), strategy=PARALLEL),
    "lr_scaling= changes the learning rate": Run(
        reads=plain(16, 8), strategy=ours(lr_scaling="linear", base_batch_size=4, split_batches=True)
    ),
    "a generator of Python or NumPy": Run(step=entropy(lambda net, x: net(x * random.betavariate(1, 1)))),
    "one draw for a whole batch (aten.rand)": shared(step=entropy(lambda net, x: net(x * torch.rand(1)))),
    "one draw for a whole batch (aten.randn_like)": Run(
        on_before_optimizer_step=lambda self, _: [each.grad.add_(torch.randn_like(each)) for each in self.parameters()]
    ),
    "collate_fn draws random numbers": shared(
        reads=plain(collate_fn=lambda rows: default_collate([rows[place] for place in torch.randperm(len(rows))]))
    ),
    "a batch of another size draws other random numbers (aten.bernoulli_)": shared(m.words, m.by_words, texts),
    "verify with --single, in float32": Run(
        step=entropy(lambda net, x: net(torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()))
    ),
    "one process takes fewer steps than the run": Run(
        on_train_batch_end=lambda self, *_: setattr(self.trainer, "should_stop", world() == 1)
    ),
    "one process takes other optimizer steps in a batch than the run": Run(step=m.repeated, manual=True),
    "use one DataLoader": shared(
        step=lambda module, batch: m.classified(module, batch["one"]),
        reads=lambda: {"one": plain()(), "other": plain()()},
    ),
    "no collate_fn makes the loader's batches": Run(reads=lambda: DataLoader(m.batches((4, 4)), batch_size=None)),
    "a sample cannot be copied": shared(reads=m.uncopied),
    "transformed at random": Run(reads=lambda: m.dealt(m.batches((4,) * 4, seed=world()))),
    "16 of the 32 samples of an epoch are none of the 32 of one process": Run(reads=streamed("halves", m.moved)),
    "64 of the 64 samples of an epoch are none of the 32 of one process": Run(
        reads=streamed("all", lambda rows: m.moved(rows, world() + 0.5))
    ),
    "4 of the 8 samples of the step are none of those of one process": Run(
        reads=streamed("every W-th", lambda rows: m.moved(cycle(rows)))
    ),
    "by a sampler of your own, the ranks leave out": Run(reads=m.sampled(m.permuted)),
    "keeps state for every micro-batch": Run(step=COUNTER, reads=WINDOWS, strategy=GradAvgStrategy, window=2),
    "their positions in the batch": Run(step=m.by_position),
    "the user's own sum": Run(step=m.by_hand(every=2), reads=WINDOWS, steps=1, manual=True),
    "1 samples of an epoch are read twice": shared(reads=plain(31)),
    "2 micro-batches of 4 samples, whose means DDPStrategy adds up and divides by 4": Run(
        reads=WINDOWS, window=2, steps=1
    ),
    "2 micro-batches of 2 and 4 samples": Run(reads=by_ranks((4, 4, 2), (4, 4, 4)), steps=1),
}
"""By what the report is to say."""

for _name, _run in DIFFERENT.items():
    _run.verdict, _run.cause = "different", _name.partition(":")[0]
for _name, _run in NOT_SHOWN.items():
    _run.verdict, _run.not_shown = "not shown", _name
RUNS = EQUAL | DIFFERENT | NOT_SHOWN

# One rank's micro-batch has no terms, or its random numbers are its own, which is meant.
pytestmark = [
    pytest.mark.filterwarnings("ignore:random numbers drawn in:UserWarning"),
    pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric val_loss:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:c10d.*an autograd kernel was not registered:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning"),
]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_judged_right(world, name):
    """A healthy run is equal, a fault is named with its factor, and what was not compared is said."""
    run = RUNS[name]
    tapes = world(run.ranks).run(recorded, name)
    with warnings.catch_warnings(), mock.patch.object(record, "_MOST_SAMPLES", 200):
        warnings.filterwarnings("ignore", category=UserWarning, module="lightning")  # advice for a longer run
        report = judge(tapes, run.build, run.tolerance)
    text, found = str(report), report.first.cause if report.first is not None else ""
    assert (run.verdict, run.cause) == (report.verdict, found), text
    assert run.not_shown in " ".join(report.remarks), text
    assert all(said in text for said in run.says), text
    assert run.factor is None or run.factor == pytest.approx(report.first.factor)
