"""Runs for the verification: with one fault each, healthy ones, and some that cannot be judged; no test in here."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import verify_modules as m
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from ranks import RankEnvironment
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.utils.data import DataLoader
from verify_modules import by_ranks, dropped, layers, normed, plain, scores, sgd, streamed, texts

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.verify.explain import judge
from lightning_gradavg.verify.record import Recorder, Tape
from lightning_gradavg.verify.report import Report
from lightning_gradavg.verify.run import quiet_options, record_run

EVEN, UNEVEN, SIZES = by_ranks((4, 4), (4, 4)), by_ranks((6, 4), (2, 4)), ((6, 4), (2, 4))
ALL, WINDOWS = plain(), by_ranks((4, 4, 4), (4, 4, 4))


@dataclass(frozen=True)
class Run:
    """Layers, step, loader, strategy, and hooks and options of the Trainer; and what is to be found."""

    make: m.Layers
    step: m.OfStep
    reads: m.Loader
    strategy: Callable[[], Any]
    steps: int
    cause: str
    not_shown: str
    ranks: int
    given: Mapping[str, Any]

    @property
    def verdict(self) -> str:
        return "different" if self.cause else "not shown" if self.not_shown else "equal"

    def build(self) -> tuple[LightningModule, dict[str, Any], dict[str, Any]]:
        """Return module, data and options, as of a new run."""
        hooks = {n: each for n, each in self.given.items() if hasattr(LightningModule, n) or n == "training_step_end"}
        options = {name: each for name, each in self.given.items() if name not in hooks}
        torch.manual_seed(1)
        module = m.Step(self.make, self.step, **hooks)
        return module, {"train_dataloaders": self.reads()}, quiet_options({"max_epochs": 1, **options}, "cpu")


def run(
    make: m.Layers = layers,
    step: m.OfStep = m.classified,
    reads: m.Loader = EVEN,
    strategy: Callable[[], Any] = DDPStrategy,
    *,
    steps: int = 2,
    cause: str = "",
    not_shown: str = "",
    ranks: int = 2,
    deals: bool = False,
    window: int = 1,
    manual: bool = False,
    optimizer: Callable[[Any], Any] = sgd,
    **given: Any,
) -> Run:
    """Return a run of hooks and options beside these; Lightning's sampler `deals`."""
    given |= {"use_distributed_sampler": deals, "accumulate_grad_batches": window}
    given |= {"automatic_optimization": not manual, "configure_optimizers": optimizer}
    return Run(make, step, reads, strategy, steps, cause, not_shown, ranks, given)


def shared(make: m.Layers = layers, step: m.OfStep = m.classified, reads: m.Loader = ALL, **more: Any) -> Run:
    """Return a run over a loader of which Lightning's sampler deals a part to each rank."""
    return run(make, step, reads, **{"deals": True, **more})


def recorded(name: str) -> Tape:
    """Body: record a run on this rank."""
    (module, data, options), environment = RUNS[name].build(), RankEnvironment()
    options["plugins"] = [*options["plugins"], environment]
    options["devices"] = environment.ranks_on_node
    return record_run(Recorder(RUNS[name].steps), RUNS[name].strategy(), options, module, data)


def judged(name: str, tapes: Sequence[Tape], tolerance: float = 1e-8) -> Report:
    """Return what one process makes of a recorded run."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="lightning")  # advice for a longer run
        return judge(tapes, RUNS[name].build, tolerance)


def ours(**options: Any) -> Callable[[], GradAvgStrategy]:
    return lambda: GradAvgStrategy(**options)


def sending(hook: Any, **options: Any) -> Callable[[], GradAvgStrategy]:
    return ours(ddp_comm_hook=hook, **options)


def changing(change: Callable[[Any], Any], **options: Any) -> Callable[[], GradAvgStrategy]:
    return sending(m.reduced_by(change), **options)


def unused(**options: Any) -> DDPStrategy:
    return DDPStrategy(find_unused_parameters=True, **options)


BY_WEIGHT, BY_SUM, SPLIT = ours(reduction="weighted_mean"), ours(reduction="sum"), ours(split_batches=True)
SINGLE, PARALLEL = ours(equivalent_to="single_device"), ours(equivalent_to="data_parallel")
SCALED = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
LATE = by_ranks((4,) * 9 + (2,), (4,) * 10)
ADAMS = {
    "manual": True,
    "optimizer": lambda self: [torch.optim.Adam(each.parameters(), 0.01) for each in self.net.children()],
}
TOKENS = m.weighing(m.each_token, lambda batch: batch != 0)

EQUAL = {
    "stock DDP": run(),
    "`GradAvgStrategy()`": run(strategy=GradAvgStrategy),
    "stock DDP with a shuffling sampler": shared(reads=plain(16)),
    "a mean over uneven batches, `weighted_mean`": run(layers, m.classified, UNEVEN, BY_WEIGHT),
    "a mean over tokens, with its weight": run(layers, m.weighted, UNEVEN, BY_WEIGHT),
    "a sum loss, `sum`": run(layers, m.summed, UNEVEN, BY_SUM),
    "a sum loss, `normalized_sum`": run(layers, m.summed, UNEVEN, ours(reduction="normalized_sum")),
    "named loss terms": run(layers, m.named_terms, UNEVEN, BY_WEIGHT),
    "a short last window, `GradAvgStrategy()`": run(layers, m.classified, WINDOWS, GradAvgStrategy, window=2),
    "windows of weighted batches": run(layers, m.weighted, by_ranks((6, 4, 3), (2, 4, 1)), BY_WEIGHT, window=2),
    "gradient clipping": run(gradient_clip_val=0.1),
    "manual optimization, clipping": run(layers, m.by_hand(), strategy=GradAvgStrategy, manual=True),
    "a GAN with noise": run(m.Gan, m.adversarial(lambda: 1), strategy=unused, steps=4, **ADAMS),
    "AdamW, one cycle, batch norm on one device": run(
        normed, reads=plain(20, 8), strategy=SINGLE, optimizer=m.one_cycle
    ),
    "momentum, weight decay, three epochs": run(optimizer=m.halving, max_epochs=3, steps=5),
    "a schedule by `estimated_stepping_batches`": shared(optimizer=m.scheduled, steps=3),
    "`split_batches`": run(reads=plain(14, 5), strategy=SPLIT, steps=3),
    "`split_batches` on three ranks": run(reads=plain(20, 7), strategy=SPLIT, steps=3, ranks=3, precision="64-true"),
    "an idle rank": run(reads=plain(12), strategy=SPLIT, ranks=3, precision="64-true"),
    "asks for the global batch": run(
        step=m.scaled(lambda module: module.trainer.strategy.global_batch_size / 8), reads=ALL, strategy=SPLIT
    ),
    "`split_batches` in pieces": run(
        reads=plain(22, 7), strategy=ours(split_batches=True, max_device_batch_size=2), window=2
    ),
    "`single_device`, batch norm": run(normed, reads=plain(14, 5), strategy=SINGLE),
    "`single_device`, `training_step_end`": run(
        step=lambda module, batch: {"outputs": module.net(batch[0])},
        reads=plain(14, 5),
        strategy=SINGLE,
        training_step_end=lambda _, outputs: m.spread(outputs["outputs"]),
    ),
    "unused parameters, bucket views": run(
        lambda: layers(nn.PReLU(8)), strategy=lambda: unused(gradient_as_bucket_view=True)
    ),
    "a static graph, dropout": run(dropped, strategy=lambda: DDPStrategy(static_graph=True)),
    "dropout, uneven batches, `weighted_mean`": run(dropped, m.classified, UNEVEN, BY_WEIGHT),
    "dropout, windows": run(dropped, m.classified, WINDOWS, GradAvgStrategy, window=2),
    "dropout, `single_device`": run(dropped, reads=plain(14, 5), strategy=SINGLE),
    "case 41": run(dropped),
    "noise drawn in `training_step`": run(layers, m.noisy, UNEVEN, BY_WEIGHT),
    "padded texts with their weights, dropout": shared(lambda: m.words(0.3), TOKENS, texts, strategy=BY_WEIGHT),
    "padded texts, a sum loss, `sum`": shared(m.words, m.all_tokens, texts, strategy=BY_SUM),
    "padded texts, a mean over texts": shared(m.words, m.each_text, texts),
    "padded texts, attention, dropout, a mean over texts": shared(m.Attention, m.each_text, texts),
    "padded texts, attention, dropout, `single_device`": run(
        m.Attention, m.each_text, lambda: texts(batch_size=8), SINGLE
    ),
    "bucketed batches, a mean over texts": run(m.words, m.each_text, m.bucketed),
    "GRU": shared(m.Recurrent, m.last_word, texts),
    "LSTM, dropout": shared(lambda: m.Recurrent(nn.LSTM, part=0.3), m.last_word, texts),
    "packed sequences": shared(lambda: m.Recurrent(packs=True), m.last_word, texts),
    "an L2 penalty in a mean loss": run(step=m.penalized()),
    "a step counter in an attribute": run(step=m.kept(lambda: iter(range(1, 99)), lambda step: min(1.0, step / 10))),
    "an iterator in an attribute": run(step=m.kept(lambda: iter(range(1, 99)))),
    "a counter outside of the module": run(step=m.by_global),
    "a loss of `batch_idx`": run(step=m.by_index),
    "spectral norm": run(m.spectral),
    "an average of the weights": shared(m.Teacher, m.taught, on_train_batch_end=m.averaged(lambda: 1.0)),
    "sparse gradients, SparseAdam": run(
        lambda: nn.Embedding(3, 4, sparse=True),
        m.sparse,
        optimizer=lambda self: torch.optim.SparseAdam(list(self.parameters()), lr=0.1),
    ),
    "L-BFGS": run(optimizer=m.lbfgs),
    "hooks that read gradients, the loader, a validation metric": run(
        steps=3,
        max_epochs=3,
        optimizer=m.on_plateau,
        on_train_start=lambda self: len(self.trainer.train_dataloader),
        on_before_optimizer_step=lambda self, _: [float(each.grad.norm()) for each in self.parameters()],
    ),
    "bfloat16 mixed precision, dropout": run(dropped, m.classified, UNEVEN, BY_WEIGHT, precision="bf16-mixed"),
    "float16 with a gradient scaler": run(plugins=[SCALED]),
    "bfloat16 weights": run(precision="bf16-true"),
    "medium precision of products": run(on_fit_start=lambda _: torch.set_float32_matmul_precision("medium")),
    "`x.float()`": shared(step=m.in_float),
    "samples along dimension 1, dropout": shared(m.sequences, m.sequence_first),
    "images with records, `collate_fn`": shared(step=m.detected, reads=m.records),
    "graphs, `collate_fn`": shared(step=m.of_graphs, reads=m.graphs),
    "contrastive, `gather`": run(step=scores("lightning_gradavg")),
    "contrastive, `self.all_gather(sync_grads=True)`": shared(step=scores("Lightning")),
    "contrastive, `torch.distributed.nn`": shared(step=scores("torch")),
    "compiled, dropout": shared(m.compiled),
    "checkpointed, dropout": shared(lambda: m.checkpointed(reentrant=False)),
    "checkpointed, reentrant": shared(lambda: m.checkpointed(reentrant=True)),
    "a frozen layer, dropout": shared(m.frozen),
    "a stream, every W-th": run(reads=streamed("every W-th")),
    "a stream, a part for each": run(reads=streamed("halves")),
    "a stream that ends earlier on a rank": run(reads=streamed("uneven"), strategy=BY_WEIGHT, steps=4),
    "a sampler with replacement": run(reads=m.replaced),
    "batches of a sampler with replacement": run(reads=lambda: m.replaced(in_batches=True)),
    "reads the data set and writes to the logger": shared(step=m.reads_data),
    "logged with `sync_dist`": shared(step=m.logged),
    "`drop_last`": shared(reads=plain(30, drop_last=True)),
}
DIFFERENT = {
    "other initial weights on several processes": run(m.other_start, cause="initial weights"),
    "one stream on all ranks": run(reads=plain(16), cause="duplicated stream"),
    "a stream that all ranks read": run(reads=streamed("alike"), cause="duplicated stream"),
    "a sampler of your own that all ranks read": run(reads=plain(sampler=range(32)), cause="duplicated stream"),
    "graphs that all ranks read": run(layers, m.of_graphs, m.graphs, cause="duplicated stream"),
    "samples repeated to fill the ranks": shared(reads=plain(15), cause="padding"),
    "data sharded by hand and by the sampler": shared(reads=m.sharded_by_hand, cause="unread samples"),
    "ranks that read backwards": run(reads=lambda: m.dealt(m.batches((4,) * 4), order=-1), cause="data order"),
    "batch norm": run(normed, cause="batch norm"),
    "case 42": run(
        lambda: nn.BatchNorm1d(1), m.case_42, m.of_rows([0.0, 2.0], [4.0, 6.0]), steps=1, cause="batch norm"
    ),
    "batch norm, dropout": run(lambda: layers(nn.BatchNorm1d(8), nn.Dropout(0.5)), cause="batch norm"),
    "batch norm in windows": run(normed, m.classified, WINDOWS, GradAvgStrategy, window=3, steps=1, cause="batch norm"),
    "batch norm without running statistics": run(lambda: normed(track_running_stats=False), cause="batch norm"),
    "batch norm and uneven batches": run(normed, reads=UNEVEN, cause="batch norm"),
    "a loss that compares samples": run(
        step=lambda module, batch: m.spread(module.net(batch[0])), cause="non-decomposable loss"
    ),
    "contrastive on each rank, dropout": run(dropped, scores("none"), cause="non-decomposable loss"),
    "a batch hook that normalizes": shared(on_after_batch_transfer=m.normalized, cause="non-decomposable loss"),
    "a hook on parameters that clips": run(
        lambda: m.hooked(lambda grad: grad.clamp(-0.01, 0.01)), cause="non-decomposable loss"
    ),
    "a detached `self.all_gather`": shared(step=scores("Lightning, detached"), cause="detached gather"),
    "a `torch.distributed.all_gather`": shared(step=scores("torch, detached"), cause="detached gather"),
    "a `torch.distributed.all_gather_single`": shared(step=scores("torch, at once"), cause="detached gather"),
    "a sum loss": run(step=m.summed, cause="sum loss"),
    "a sum loss, dropout": run(dropped, m.summed, cause="sum loss"),
    "a sum loss, bfloat16": run(step=m.summed, precision="bf16-mixed", cause="sum loss"),
    "a sum loss over padded texts": shared(m.words, m.all_tokens, texts, cause="sum loss"),
    "a sum loss, L-BFGS": run(step=m.summed, optimizer=m.lbfgs, cause="sum loss"),
    "a sum loss, shuffled": shared(step=m.summed, reads=plain(16), cause="sum loss"),
    "a sum loss, and samples repeated to fill the ranks": shared(step=m.summed, reads=plain(15), cause="sum loss"),
    "an L2 penalty under `sum`": run(step=m.penalized(m.summed), strategy=BY_SUM, cause="constant term"),
    "an L2 penalty in a sum loss": run(step=m.penalized(m.summed), cause="constant term"),
    "an L2 penalty of rank 0": run(step=m.penalized(alone=True), cause="unexplained"),
    "uneven batches": run(reads=UNEVEN, cause="mean of means"),
    "uneven batches late in a long window": run(reads=LATE, window=10, cause="mean of means"),
    "uneven batches, noise": run(step=m.noisy, reads=UNEVEN, cause="mean of means"),
    "a short last batch in a window": shared(reads=plain(28), window=2, cause="mean of means"),
    "a mean over tokens": run(step=m.masked, cause="mean of means"),
    "a mean over tokens of padded texts": shared(m.words, m.each_token, texts, cause="mean of means"),
    "a mean over tokens of padded texts, with weights": shared(m.words, TOKENS, texts, cause="mean of means"),
    "class weights": run(step=m.class_weighted, cause="mean of means"),
    "a moving average of the loss in an attribute": run(step=m.by_average, cause="mean of means"),
    "class weights under `weighted_mean`": run(step=m.class_weighted, strategy=BY_WEIGHT, cause="counts"),
    "a mean over tokens weighted by samples": run(layers, m.masked, UNEVEN, BY_WEIGHT, cause="counts"),
    "a mean under `sum`": run(layers, m.classified, UNEVEN, BY_SUM, cause="counts"),
    "a short last window": run(reads=WINDOWS, window=2, cause="short window"),
    "case 7": run(
        m.Scalar, m.case_7, m.of_rows([1.0, 1.0, 1.0], [5.0]), BY_WEIGHT, steps=1, cause="hand-compensated loss"
    ),
    "a loss multiplied by the ranks, dropout": run(dropped, m.multiplied, cause="hand-compensated loss"),
    "a loss multiplied by the ranks in the second step": run(
        step=m.multiplied_late, reads=by_ranks((4,) * 4, (4,) * 4), steps=3, cause="hand-compensated loss"
    ),
    "a tiny gradient times the ranks": shared(m.Tiny, cause="hand-compensated loss"),
    "a GAN multiplied by the ranks": run(
        m.Gan, m.adversarial(m.world), strategy=unused, steps=4, cause="unexplained", **ADAMS
    ),
    "a loss divided by the ranks": run(step=m.divided, cause="double division"),
    "a communication hook that divides again": run(strategy=changing(lambda sent: sent / 2), cause="double division"),
    "a communication hook that divides again under `sum`": run(
        step=m.summed, strategy=changing(lambda sent: sent / 2, reduction="sum"), cause="double division"
    ),
    "a hook on parameters that divides, dropout": run(
        lambda: m.hooked(lambda grad: grad / m.world(), nn.Dropout(0.5)), cause="double division"
    ),
    "gradients divided after the reduction": run(on_after_backward=m.divides, cause="double division"),
    "every rank clips its norm": run(
        strategy=changing(lambda sent: sent * min(1.0, 0.05 / float(sent.norm()))), cause="gradient hooks"
    ),
    "every rank clips its values": run(strategy=changing(lambda sent: sent.clamp(-0.01, 0.01)), cause="gradient hooks"),
    "gradients lost on the way": run(strategy=changing(lambda sent: sent * 0), cause="gradient hooks"),
    "gradients sent as float16": run(strategy=sending(fp16_compress_hook), cause="16-bit wire"),
    "gradients sent as bfloat16": run(strategy=sending(bf16_compress_hook), cause="16-bit wire"),
    "gradients times 1.004 in bfloat16": run(
        strategy=changing(lambda sent: sent * 1.004), precision="bf16-mixed", cause="unexplained"
    ),
    "one rank changes a weight": run(on_train_batch_start=m.drifts, cause="unsynchronised replicas"),
    "a backward past the strategy": run(step=m.by_hand(outside=True), manual=True, cause="unsynchronised replicas"),
    "a learning rate of each rank": run(
        optimizer=lambda self: sgd(self, lr=0.1 * (1 + self.global_rank)), cause="unsynchronised replicas"
    ),
    "an optimizer of each rank": run(
        optimizer=lambda self: (torch.optim.Adam if self.global_rank else torch.optim.SGD)(self.parameters(), lr=0.1),
        cause="unsynchronised replicas",
    ),
    "a learning rate times the ranks": run(
        optimizer=lambda self: sgd(self, lr=0.1 * self.trainer.world_size, momentum=0.9), cause="learning-rate scale"
    ),
    "a learning rate times the ranks, a short last window": run(
        reads=WINDOWS,
        window=2,
        optimizer=lambda self: sgd(self, lr=0.1 * self.trainer.world_size),
        cause="learning-rate scale",
    ),
    "a learning rate of one group times the ranks": run(
        optimizer=lambda self: m.grouped(self, 0.1 * self.trainer.world_size), cause="learning-rate scale"
    ),
    "weight decay times the ranks": run(
        optimizer=lambda self: sgd(self, weight_decay=0.01 * self.trainer.world_size), cause="optimizer options"
    ),
    "an average of the weights that depends on the ranks": shared(
        m.Teacher, m.taught, on_train_batch_end=m.averaged(m.world), cause="weights beside the gradient"
    ),
    "a clamp that depends on the ranks": shared(on_train_batch_end=m.clamped, cause="weights beside the gradient"),
    "a buffer of one rank's samples": run(m.counting, m.counts, cause="buffers of one rank"),
    "an average in a buffer that depends on the ranks": shared(
        lambda: m.Teacher(held=True), m.taught, on_train_batch_end=m.held, cause="buffers of one rank"
    ),
    "clipping to a part for every rank": run(
        configure_gradient_clipping=lambda self, optimizer, *_, **__: self.clip_gradients(
            optimizer, 0.1 / m.world(), "norm"
        ),
        cause="unexplained",
    ),
    "a loss summed over the ranks by hand": shared(step=m.summed_value, cause="logged value"),
}
PER_BATCH = {"window": 2, "not_shown": "keeps state for every micro-batch"}
NOT_SHOWN = {
    "`data_parallel`, batch norm": run(normed, reads=plain(14, 7), strategy=PARALLEL, not_shown="trains replicas"),
    "`reproducible`, four replicas on two ranks": run(
        reads=plain(16, 8), strategy=ours(reproducible=True, num_replicas=4), not_shown="trains replicas"
    ),
    "a learning rate scaled by `lr_scaling`": run(
        reads=plain(16, 8),
        strategy=ours(lr_scaling="linear", base_batch_size=4, split_batches=True),
        not_shown="lr_scaling= changes the learning rate",
    ),
    "mixup": run(step=m.mixed_up, not_shown="a generator of Python or NumPy"),
    "noise for whole gradients": shared(on_before_optimizer_step=m.shaken, not_shown="one draw for a whole batch"),
    "one draw for each batch": shared(step=m.one_draw, not_shown="one draw for a whole batch (aten.rand)"),
    "random masks in `collate_fn`": shared(reads=m.masking, not_shown="collate_fn draws random numbers"),
    "a draw for each word, and for all": shared(
        m.words, m.by_words, texts, not_shown="a batch of another size draws other random numbers (aten.bernoulli_)"
    ),
    "computes in float32 alone": run(step=m.quantized, not_shown="verify with --single, in float32"),
    "ends earlier on one process": run(
        on_train_batch_end=lambda self, *_: setattr(self.trainer, "should_stop", m.world() == 1),
        not_shown="one process takes fewer steps than the run",
    ),
    "a step for every rank": run(
        step=m.repeated, manual=True, not_shown="one process takes other optimizer steps in a batch than the run"
    ),
    "two loaders": shared(
        step=m.of_both, reads=lambda: {"one": plain()(), "other": plain()()}, not_shown="use one DataLoader"
    ),
    "batches that no `collate_fn` made": run(
        reads=lambda: DataLoader(m.batches((4, 4)), batch_size=None),  # type: ignore[arg-type]  # a list is a data set
        not_shown="no collate_fn makes the loader's batches",
    ),
    "samples that cannot be copied": shared(reads=m.uncopied, not_shown="a sample cannot be copied"),
    "samples of their own on several processes": run(
        reads=by_ranks((4, 4), (4, 4), own=True), not_shown="transformed at random"
    ),
    "a permutation of each rank": run(
        reads=plain(sampler=m.Permuted()), not_shown="by a sampler of your own, the ranks leave out"
    ),
    "a step counter in windows": run(
        layers, EQUAL["a step counter in an attribute"].step, WINDOWS, GradAvgStrategy, **PER_BATCH
    ),
    "spectral norm in windows": run(m.spectral, m.classified, WINDOWS, GradAvgStrategy, **PER_BATCH),
    "a loss of the positions in a batch": run(step=m.by_position, not_shown="their positions in the batch"),
    "windows in manual optimization": run(
        step=m.by_hand(every=2), reads=WINDOWS, steps=1, manual=True, not_shown="the user's own sum"
    ),
    "padding beyond the steps": shared(reads=plain(31), not_shown="1 samples of an epoch are read twice"),
    "a short window beyond the steps": run(
        reads=by_ranks((4,) * 5, (4,) * 5),
        window=2,
        steps=1,
        not_shown="2 micro-batches of 4 samples, whose means DDPStrategy adds up and divides by 4",
    ),
    "a short last batch beyond the steps": run(
        reads=by_ranks((4, 4, 2), (4, 4, 4)), steps=1, not_shown="2 micro-batches of 2 and 4 samples"
    ),
}
RUNS = EQUAL | DIFFERENT | NOT_SHOWN
