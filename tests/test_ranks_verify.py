"""RUNS: healthy runs, runs with one fault each, and runs that cannot be judged, and what `gradavg verify` says of them.

To add a row, choose the table by the verdict and append a `Run`: to EQUAL under any name, to DIFFERENT under the cause
that must be named and, after a colon, what the run does, to NOT_SHOWN under a part of the remark that the report must
have. Each row shows something that no other one shows: a mechanism of the package, or a way to ask for one. Its
layers, steps, hooks and loaders are functions of `verified_runs.py`. What is expected follows from how the run is
made: a healthy one computes the gradient of one process, and a planted fault multiplies it by a known `factor`. The
test records the first `steps` of the run on real ranks, and has one process judge what they recorded. It compares the
verdict, the cause, the factor, the code that the first finding names, and the texts that the report `says`, in this
order; of a run that splits batches, that its order of data is that of one process. docs/verify.md has the number of
rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from orders import Graphs
from ranks import NEEDS_SHARDS_ON_CPU, RankEnvironment
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from toys import GATHERS, Toy
from verified_runs import (
    DETACHED,
    FrozenEncoder,
    FunctionModule,
    MakeLayers,
    MakeLoader,
    OneNumber,
    ScaledByRank,
    Similarity,
    Step,
    Texts,
    add_noise,
    add_noise_of_index,
    add_noise_of_rank,
    add_noise_to_batch,
    add_noise_to_gradients,
    add_seeded_noise_to_gradients,
    add_up_count_of_batches,
    add_up_in_hook,
    average_weights,
    average_weights_by_ranks,
    call_and_write,
    call_checkpointed,
    call_compiled,
    call_reentrant,
    call_with_draw_of_batch,
    call_with_draw_of_python,
    call_with_list,
    call_with_noise_of_each,
    call_with_normalized_gradient,
    change_shard_of_rank_1,
    change_weight_of_rank_1,
    choose_by_numpy,
    choose_by_seed,
    choose_client_of_rank,
    choose_in_order_of_rank,
    choose_more_by_rank,
    choose_without_seed,
    clamped_mean,
    clip_norm,
    clip_norm_of_shards,
    collate_in_random_order,
    compensate_by_hand,
    contrast_all_rows,
    contrast_on_rank,
    contrast_with_all,
    count_after_batches_on_rank_1,
    count_batches_on_rank_1,
    count_in_step,
    count_none,
    count_one,
    count_samples_in_buffer,
    count_samples_of_all_in_buffer,
    count_without_class_0,
    divide_by_count_of_all_ranks,
    divide_by_global_mean,
    drop_word_by_word,
    flip_by_own_coin,
    freeze_first_layer,
    global_means,
    hundredth_of_ranks,
    in_one_tensor_parallel_group,
    infinite,
    load_augmented,
    load_backwards,
    load_batches_without_collating,
    load_case_7,
    load_case_42,
    load_cut_by_hand,
    load_equal_samples,
    load_opened,
    load_other_samples_by_ranks,
    load_samples_with_function,
    load_sharded_by_hand,
    load_texts,
    load_two,
    log_count,
    log_mean,
    log_mean_of_all,
    log_nan_of_rank_1,
    log_own,
    log_rising_on_rank_0,
    log_sum_over_ranks,
    loss_and_temperature,
    make_adams,
    make_batch_norm,
    make_changed_loader,
    make_clamped_layers,
    make_communication_hook,
    make_contrastive_step,
    make_dropout,
    make_frozen,
    make_generator_and_critic,
    make_langevin,
    make_layers,
    make_layers_by_rank,
    make_layers_in_list,
    make_layers_times_ranks,
    make_layers_with_buffer,
    make_layers_with_registered_temperature,
    make_layers_with_temperature,
    make_layers_with_tiny_gradient,
    make_lbfgs,
    make_manual_step,
    make_noisy_layers,
    make_normalizing_generator_and_critic,
    make_one_cycle,
    make_penalized_step,
    make_plain_loader,
    make_rows_loader,
    make_sampler_by_halves,
    make_sampler_in_other_orders,
    make_sampler_in_turn,
    make_sampler_that_leaves_out,
    make_scaled_step,
    make_seeded_langevin,
    make_sgd,
    make_sgd_by_rank,
    make_sgd_of_unregistered,
    make_sgd_on_plateau,
    make_sgd_on_validation_plateau,
    make_sgd_times_ranks,
    make_sgd_with_decay,
    make_sgd_with_decay_times_ranks,
    make_sized_loader,
    make_step,
    make_stream_loader,
    make_weighted_step,
    make_words,
    make_words_with_dropout,
    mean_loss,
    mean_loss_of_first_batch,
    mean_loss_of_first_loader,
    mean_loss_of_graphs,
    mean_loss_of_weighted_classes,
    mean_loss_with_state,
    mean_loss_without_class_0,
    mean_of_hardest,
    mean_over_texts,
    mean_product,
    multiply_gradients_by_ranks,
    one_over_ranks,
    ours,
    read_length_of_loader,
    read_moved,
    read_norms_of_gradients,
    scale_by_calls,
    shard,
    shard_and_add_up,
    shard_first_layer,
    shard_in_bfloat16,
    shard_twice,
    shard_without_sums,
    shard_without_values,
    sharded,
    spread_of_all,
    spread_of_batch,
    square_of_batch,
    step_on_sum,
    step_once_per_rank,
    stock,
    stock_sharded,
    stop_in_one_process,
    sum_loss,
    sum_of_two_means,
    train_generator_and_critic,
    two_global_means,
    unfreeze_in_second_batch,
    weigh_by_class,
    weigh_by_position,
    weighted_mean_over_tokens,
    with_hook,
    world_size,
    write_bias_of_all_rows,
    write_bias_of_own_rows,
)

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.verify.causes import CAUSES
from lightning_gradavg.verify.judge import judge
from lightning_gradavg.verify.recorder import Recorder
from lightning_gradavg.verify.records import Record
from lightning_gradavg.verify.run import record_run
from lightning_gradavg.verify.target import Built, quiet_options

# Loaders, by the sizes of the batches of each rank.
EVEN = make_sized_loader((4, 4), (4, 4))
UNEVEN = make_sized_loader((6, 4), (2, 2))
UNEVEN_LATER = make_sized_loader((4, 6), (4, 2))
THREE_BATCHES = make_sized_loader((4, 4, 4), (4, 4, 4))

FOUR_BATCHES = make_sized_loader((4, 4, 4, 4), (4, 4, 4, 4))

WEIGHTED_MEAN = ours(reduction="weighted_mean")
SUM = ours(reduction="sum")
SPLIT = ours(split_batches=True)
SINGLE_DEVICE = ours(equivalent_to="single_device")
DATA_PARALLEL = ours(equivalent_to="data_parallel")
FOUR_REPLICAS = ours(equivalent_to="data_parallel", num_replicas=4)

# Of sharded models.
SHARDS: Mapping[str, Callable[..., Any]] = {"configure_model": shard}
SHARDED_MEAN = stock_sharded()
SHARDED_WEIGHTED_MEAN = sharded(reduction="weighted_mean")
EVEN_ON_FOUR_RANKS = make_sized_loader((4, 4), (4, 4), (4, 4), (4, 4))
UNEVEN_ON_FOUR_RANKS = make_sized_loader((6, 4), (2, 2), (3, 4), (1, 5))


@dataclass(frozen=True)
class Run:
    """A row of RUNS: how a run is made, and what is to be said of it."""

    # What the module is made of: functions of `verified_runs.py`.
    layers: MakeLayers = make_layers
    step: Step = mean_loss
    loader: MakeLoader = EVEN
    strategy: Callable[[], Strategy] = DDPStrategy
    optimizer: Callable[[Any], Any] = make_sgd
    is_manual: bool = False
    # Further hooks of the module, by their names.
    hooks: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    # `accumulate_grad_batches` of the Trainer, and its further options.
    window: int = 1
    trainer: Mapping[str, Any] = field(default_factory=dict)
    # Of the initial weights.
    seed: int = 1
    # Optimizer steps that are recorded, and the number of ranks.
    steps: int = 2
    ranks: int = 2
    # The relative difference from which on numbers differ.
    tolerance: float = 1e-8
    # What both runs compute in.
    precision: str = "64-true"
    # What the gradient is multiplied by, compared with that of one process; None if that is not compared.
    factor: float | None = None
    # Parts of the report, in their order.
    says: Sequence[str] = ()
    # The verdict, the cause, a part of the remarks and the code that is named. `RUNS` fills these in from the row's
    # table and name, and from CODE.
    verdict: str = "equal"
    cause: str = ""
    remark: str = ""
    code: str = ""

    def build(self) -> Built:
        """Return the module, its data as arguments of `Trainer.fit`, and options of the Trainer."""
        torch.manual_seed(self.seed)
        module = FunctionModule(self.layers, self.step, {"configure_optimizers": self.optimizer, **self.hooks})
        module.automatic_optimization = not self.is_manual
        options = {
            "max_epochs": 1,
            "use_distributed_sampler": False,
            "accumulate_grad_batches": self.window,
            **self.trainer,
        }
        return Built(module, {"train_dataloaders": self.loader()}, quiet_options(options))


def make_sampled_run(
    layers: MakeLayers = make_layers, step: Step = mean_loss, loader: MakeLoader | None = None, **fields: Any
) -> Run:
    """Return a run over a loader of which Lightning's sampler deals a part to each rank."""
    if loader is None:
        loader = make_plain_loader()
    return Run(layers, step, loader, trainer={"use_distributed_sampler": True}, **fields)


# 1. Healthy runs.

EQUAL = {
    # Rules.
    "case 41": Run(make_dropout),
    "a sum loss, `sum`": Run(step=sum_loss, loader=UNEVEN_LATER, strategy=SUM, steps=1),
    "a sum loss, `normalized_sum`": Run(step=sum_loss, loader=UNEVEN, strategy=ours(reduction="normalized_sum")),
    "batches without terms, `normalized_sum`": Run(
        step=make_weighted_step(sum_loss, count_none), strategy=ours(reduction="normalized_sum")
    ),
    "manual optimization, `normalized_sum`": Run(
        step=step_on_sum, loader=UNEVEN, strategy=ours(reduction="normalized_sum"), is_manual=True
    ),
    "samples that are all equal": make_sampled_run(loader=load_equal_samples),
    "split, shuffled": Run(loader=make_plain_loader(shuffle=True), strategy=ours(split_batches=True)),
    "global means": Run(step=global_means, loader=UNEVEN),
    "global means of equal weight": Run(
        step=make_weighted_step(global_means, count_one), loader=UNEVEN, strategy=WEIGHTED_MEAN
    ),
    "windows of weighted batches": Run(
        step=make_weighted_step(mean_loss_without_class_0, count_without_class_0),
        loader=make_sized_loader((6, 4, 3), (2, 4, 1)),
        strategy=WEIGHTED_MEAN,
        window=2,
    ),
    "dropout, a short last window": Run(make_dropout, loader=THREE_BATCHES, strategy=GradAvgStrategy, window=2),
    "a short window beyond the steps": Run(loader=THREE_BATCHES, strategy=GradAvgStrategy, window=2, steps=1),
    "dropout, uneven batches, bfloat16": Run(
        make_dropout, loader=UNEVEN, strategy=WEIGHTED_MEAN, trainer={"precision": "bf16-mixed"}
    ),
    # Clipping, and optimizers.
    "clipping, float16 with a gradient scaler": Run(
        trainer={
            "plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))],
            "gradient_clip_val": 0.1,
        }
    ),
    "clipping in manual optimization": Run(step=make_manual_step(), strategy=GradAvgStrategy, is_manual=True),
    "a GAN with noise": Run(
        make_generator_and_critic,
        train_generator_and_critic,
        strategy=stock(find_unused_parameters=True),
        steps=4,
        is_manual=True,
        optimizer=make_adams,
    ),
    "AdamW, one cycle, batch norm on one device": Run(
        make_batch_norm, loader=make_plain_loader(20, 8), strategy=SINGLE_DEVICE, optimizer=make_one_cycle
    ),
    "L-BFGS, bucket views": Run(strategy=stock(gradient_as_bucket_view=True), optimizer=make_lbfgs),
    "a frozen layer, dropout, hooks that read gradients, an average of weights": Run(
        make_frozen,
        hooks={
            "on_train_start": read_length_of_loader,
            "on_before_optimizer_step": read_norms_of_gradients,
            "on_train_batch_end": average_weights,
        },
    ),
    # Batches that ranks share.
    "`split_batches` on three ranks": Run(
        loader=make_plain_loader(20, 7),
        strategy=SPLIT,
        steps=3,
        ranks=3,
        trainer={"precision": "64-true"},
        tolerance=1e-13,
    ),
    "an idle rank": Run(
        loader=make_plain_loader(10), strategy=SPLIT, steps=3, ranks=3, trainer={"precision": "64-true"}
    ),
    "`split_batches` in pieces, dropout": Run(
        make_dropout,
        loader=make_plain_loader(22, 7),
        strategy=ours(split_batches=True, max_device_batch_size=2),
        window=2,
    ),
    # Replicas.
    "replicas, weights": Run(
        step=make_weighted_step(mean_loss_without_class_0, count_without_class_0),
        loader=make_plain_loader(21, 7),
        strategy=DATA_PARALLEL,
        steps=3,
    ),
    "replicas, dropout, four for two ranks": Run(
        make_dropout,
        make_weighted_step(mean_loss_without_class_0, count_without_class_0),
        make_plain_loader(28, 14),
        FOUR_REPLICAS,
    ),
    "replicas, windows, three ranks": Run(loader=make_plain_loader(33, 11), strategy=DATA_PARALLEL, window=2, ranks=3),
    "replicas of a class of their own": Run(
        step=mean_loss_of_graphs, loader=make_plain_loader(14, 7, collate_fn=Graphs), strategy=DATA_PARALLEL
    ),
    "replicas, the same bits": Run(loader=make_plain_loader(16, 8), strategy=ours(reproducible=True, num_replicas=2)),
    # Batches of other kinds.
    "padded texts with their weights, dropout": make_sampled_run(
        make_words_with_dropout, weighted_mean_over_tokens, load_texts, strategy=WEIGHTED_MEAN
    ),
    "padded texts, attention, dropout": make_sampled_run(Texts, mean_over_texts, load_texts),
    "batches of a class of their own": make_sampled_run(
        step=mean_loss_of_graphs, loader=make_plain_loader(collate_fn=Graphs)
    ),
    "noise that a data set draws in a worker": make_sampled_run(
        lambda: nn.Linear(1, 3),
        square_of_batch,
        load_augmented,
        says=["one process would read"],
    ),
    "a stream, every W-th for each": Run(loader=make_stream_loader("every W-th"), strategy=WEIGHTED_MEAN, steps=4),
    "a stream, uneven parts for each": Run(loader=make_stream_loader("uneven parts"), strategy=WEIGHTED_MEAN, steps=4),
    "a data set cut by hand": Run(loader=load_cut_by_hand),
    "ranks that read backwards": Run(loader=load_backwards, says=["would read 0 of the 8 samples of step 0"]),
    "a sampler that gives rank 0 the first half": Run(
        loader=make_plain_loader(make_sampler=make_sampler_by_halves), says=["would read 4 of the 8 samples of step 0"]
    ),
    "samples that are others on each number of ranks": Run(
        loader=load_other_samples_by_ranks, says=["would read 0 of the 8 samples of step 0"]
    ),
    "a stream whose samples rank 1 moves": Run(
        loader=make_stream_loader("every W-th", read_moved), says=["would read 4 of the 8 samples of step 0"]
    ),
    "a sampler of your own": Run(loader=make_plain_loader(make_sampler=make_sampler_in_turn)),
    # Data sets that every rank makes for itself.
    "a split that follows from a seed": make_sampled_run(loader=make_rows_loader(choose_by_seed)),
    "clients that rank by rank have rows of their own": Run(loader=make_rows_loader(choose_client_of_rank)),
    "noise of a data set by two generators": make_sampled_run(loader=make_changed_loader(add_noise)),
    "noise of a data set that keeps it": make_sampled_run(loader=make_changed_loader(add_noise, caches=True)),
    "noise of a data set by a generator for each index": make_sampled_run(
        loader=make_changed_loader(add_noise_of_index)
    ),
    "a coin of a data set that follows no seed": make_sampled_run(loader=make_changed_loader(flip_by_own_coin)),
    "a file that a worker opens": make_sampled_run(loader=load_opened),
    # Random numbers that all ranks draw behind one seed, of the shape of weights.
    "noise of a hook that transfers batches": Run(hooks={"on_after_batch_transfer": add_noise_to_batch}),
    "seeded noise of gradients": Run(hooks={"on_before_optimizer_step": add_seeded_noise_to_gradients}),
    "Langevin steps by a generator with a seed": Run(optimizer=make_seeded_langevin),
    "noise by a generator for each sample, dropout": make_sampled_run(make_dropout, make_step(call_with_noise_of_each)),
    # Logged values.
    "a value that each rank logs for itself": make_sampled_run(
        step=log_own, says=["note: a logged value differs", "`loss` is that of one rank", "logged values      note"]
    ),
    "a count that each rank logs": make_sampled_run(
        step=log_count, says=["`samples` is that of one rank", "logged values      note"]
    ),
    "a value that is logged within a window": make_sampled_run(
        step=log_mean,
        window=2,
        says=["or of one micro-batch, and is not compared", "logged values      note"],
    ),
    # Types.
    "a weight of float32 numbers": Run(
        step=make_weighted_step(mean_loss_of_weighted_classes, weigh_by_class), loader=UNEVEN, strategy=WEIGHTED_MEAN
    ),
    "a step without a loss": Run(
        step=mean_loss_of_first_batch, loader=make_plain_loader(16, 8), strategy=SINGLE_DEVICE
    ),
    # Forwards of other kinds.
    **{f"contrastive, gathered by {way}": make_sampled_run(step=make_contrastive_step(way)) for way in GATHERS},
    "compiled, dropout": make_sampled_run(make_dropout, make_step(call_compiled)),
    "checkpointed, reentrant, dropout": make_sampled_run(make_dropout, make_step(call_reentrant)),
    # Sharded models, under Lightning's strategy and under that of this package.
    "shards, dropout, clipping": Run(
        make_dropout, strategy=SHARDED_MEAN, hooks=SHARDS, trainer={"gradient_clip_val": 0.1}
    ),
    "shards on four ranks, mixed precision": Run(
        loader=EVEN_ON_FOUR_RANKS, strategy=stock_sharded(4), ranks=4, hooks={"configure_model": shard_in_bfloat16}
    ),
    "shards, Lightning's sampler, in float32": make_sampled_run(
        strategy=SHARDED_MEAN, hooks=SHARDS, precision="32-true", tolerance=1e-4
    ),
    "shards, global means": Run(step=global_means, loader=UNEVEN, strategy=SHARDED_MEAN, hooks=SHARDS),
    "shards that are added up, of a loss by the samples of all ranks": Run(
        step=divide_by_count_of_all_ranks,
        loader=UNEVEN,
        strategy=SHARDED_MEAN,
        hooks={"configure_model": shard_and_add_up},
    ),
    "shards, AdamW, one cycle": Run(strategy=SHARDED_MEAN, hooks=SHARDS, optimizer=make_one_cycle),
    "weighted shards on four ranks, dropout": Run(
        make_dropout,
        loader=UNEVEN_ON_FOUR_RANKS,
        strategy=sharded(4, reduction="weighted_mean"),
        ranks=4,
        hooks=SHARDS,
    ),
    "weighted shards on four ranks, padded texts": make_sampled_run(
        make_words_with_dropout,
        weighted_mean_over_tokens,
        load_texts,
        strategy=sharded(4, reduction="weighted_mean"),
        ranks=4,
        hooks=SHARDS,
    ),
    "weighted shards, mixed precision": Run(
        loader=UNEVEN, strategy=SHARDED_WEIGHTED_MEAN, hooks={"configure_model": shard_in_bfloat16}
    ),
    "weighted shards, windows, a short last one": Run(
        step=make_weighted_step(mean_loss_without_class_0, count_without_class_0),
        loader=make_sized_loader((6, 4, 3), (2, 4, 1)),
        strategy=SHARDED_WEIGHTED_MEAN,
        window=2,
        hooks=SHARDS,
    ),
    "weighted shards, a stream that ends first on one rank": Run(
        loader=make_stream_loader("uneven parts"), strategy=SHARDED_WEIGHTED_MEAN, steps=4, hooks=SHARDS
    ),
    "shards, `normalized_sum`": Run(
        step=sum_loss, loader=UNEVEN, strategy=sharded(reduction="normalized_sum"), hooks=SHARDS
    ),
    "shards, clipping in manual optimization": Run(
        step=make_manual_step(), strategy=sharded(), is_manual=True, hooks=SHARDS
    ),
    "shards, contrastive, gathered": make_sampled_run(
        step=make_contrastive_step("lightning_gradavg"), strategy=sharded(), hooks=SHARDS
    ),
    "in place behind layers": Run(step=make_step(call_and_write)),
    "a frozen encoder of padded texts": make_sampled_run(
        FrozenEncoder, mean_over_texts, load_texts, strategy=stock(find_unused_parameters=True)
    ),
}


# 2. Runs with one fault each: by the cause that must be named, and what the run does.

DIFFERENT = {
    # Data.
    "duplicated stream": Run(loader=make_stream_loader("all")),
    "duplicated stream: without an end": Run(loader=make_stream_loader("all", cycle)),
    "padding": make_sampled_run(
        loader=make_plain_loader(15),
        says=["DIFFERENT from one process with batch 8. Your loader's batch is 4, so one process takes twice as many"],
    ),
    "different data sets: sharded by hand and by the sampler": make_sampled_run(loader=load_sharded_by_hand),
    "different data sets: a split that follows no seed": make_sampled_run(
        loader=make_rows_loader(choose_without_seed),
        says=["they differ in `sample[0]`", "on every rank: seed what splits"],
    ),
    "different data sets: a permutation by NumPy": make_sampled_run(
        loader=make_rows_loader(choose_by_numpy, shuffle=True)
    ),
    "different data sets: listed in another order": make_sampled_run(loader=make_rows_loader(choose_in_order_of_rank)),
    "different data sets: of other lengths": make_sampled_run(loader=make_rows_loader(choose_more_by_rank)),
    "different data sets: under a coin that follows no seed": make_sampled_run(
        loader=make_changed_loader(flip_by_own_coin, choose_without_seed), says=["they differ in `sample[1]`"]
    ),
    "different data sets: in a worker": make_sampled_run(
        loader=make_changed_loader(add_noise, choose_by_numpy, num_workers=1)
    ),
    "different data sets: noise by the rank": make_sampled_run(loader=make_changed_loader(add_noise_of_rank)),
    # Layers and losses that a split of the batch changes.
    "batch norm: case 42": Run(lambda: nn.BatchNorm1d(1), mean_product, load_case_42, steps=1),
    "batch norm: windows": Run(make_batch_norm, loader=THREE_BATCHES, strategy=GradAvgStrategy, window=3, steps=1),
    "batch norm: under Lightning's sampler": make_sampled_run(make_batch_norm),
    "batch norm: pieces, checkpointed": Run(
        make_batch_norm,
        make_step(call_checkpointed),
        make_plain_loader(32, 8),
        ours(split_batches=True, max_device_batch_size=2),
        window=2,
    ),
    "unexplained: batch norm in manual optimization": Run(
        make_normalizing_generator_and_critic,
        train_generator_and_critic,
        strategy=stock(find_unused_parameters=True),
        is_manual=True,
        optimizer=make_adams,
    ),
    "non-decomposable loss: two means of different numbers": Run(step=sum_of_two_means),
    "non-decomposable loss: a variance": Run(step=spread_of_batch),
    "non-decomposable loss: a variance of one number": Run(OneNumber, spread_of_batch),
    "non-decomposable loss: the hardest samples": Run(step=mean_of_hardest),
    "non-decomposable loss: a clamped mean": Run(step=clamped_mean),
    "non-decomposable loss: contrastive": Run(
        step=contrast_on_rank, says=["lightning_gradavg.global_mean(total, count)", "lightning_gradavg.gather"]
    ),
    **{
        f"non-decomposable loss: gathered by {way}": make_sampled_run(step=make_contrastive_step(way))
        for way in DETACHED
    },
    "non-decomposable loss: a multiple of what is gathered": make_sampled_run(Similarity, contrast_all_rows),
    # Means and sums.
    "non-decomposable loss: global means that are weighed": Run(
        step=global_means, loader=UNEVEN, strategy=WEIGHTED_MEAN, says=['under reduction="mean"']
    ),
    "sum loss": Run(
        step=sum_loss,
        factor=0.5,
        says=[
            "From step 0 on, in the reduced gradient of `net.",
            "`, 0.5 x that of one process: the loss is a sum over samples",
            "the gradient is 0.5 x that of one process: the loss is a sum over samples",
            "parameter `net.",
            " on one process",
            "Do: ",
            '+trainer = Trainer(strategy=GradAvgStrategy(reduction="sum"), ...)',
            "differs",
            "ranks: 2, optimizer steps: 1",
        ],
    ),
    "non-decomposable loss: an L2 penalty under `sum`": Run(step=make_penalized_step(sum_loss), strategy=SUM),
    "mean of means": Run(loader=UNEVEN),
    "mean of means: over tokens": Run(step=mean_loss_without_class_0),
    "mean of means: over tokens of padded texts, with weights": make_sampled_run(
        make_words, weighted_mean_over_tokens, load_texts
    ),
    "counts: class weights": Run(step=mean_loss_of_weighted_classes, strategy=WEIGHTED_MEAN),
    "counts: tokens of replicas without weights": Run(
        step=mean_loss_without_class_0,
        loader=make_plain_loader(14, 7),
        strategy=DATA_PARALLEL,
        says=["Do: return ", "such as (targets != -100).sum()"],
    ),
    "sum loss: of four replicas on two ranks": Run(
        make_dropout,
        sum_loss,
        make_plain_loader(16, 8),
        FOUR_REPLICAS,
        factor=0.25,
        says=[
            "DIFFERENT from one process with batch 8 in 4 chunks.",
            '=GradAvgStrategy(equivalent_to="data_parallel", num_replicas=4, reduction="sum"), ...)',
        ],
    ),
    "counts: weights of replicas": Run(
        step=make_weighted_step(mean_loss, count_without_class_0),
        loader=make_plain_loader(16, 8),
        strategy=DATA_PARALLEL,
    ),
    "unexplained: weights of four replicas on two ranks": Run(
        step=make_weighted_step(mean_loss, count_without_class_0),
        loader=make_plain_loader(28, 14),
        strategy=FOUR_REPLICAS,
    ),
    "unsynchronised replicas: rates of replicas": Run(
        loader=make_plain_loader(24, 8), strategy=DATA_PARALLEL, optimizer=make_sgd_by_rank
    ),
    "buffers of one rank: of replicas": Run(
        make_layers_with_buffer,
        loader=make_plain_loader(24, 8),
        strategy=DATA_PARALLEL,
        hooks={"on_train_batch_end": count_after_batches_on_rank_1},
    ),
    "counts: a mean under `sum`": Run(loader=UNEVEN, strategy=SUM),
    "short window": Run(loader=THREE_BATCHES, window=2),
    # A loss or a gradient that the user's code changes.
    "multiple: case 7": Run(
        Toy,
        compensate_by_hand,
        load_case_7,
        WEIGHTED_MEAN,
        steps=1,
        factor=0.875,
        says=[
            "parameter `net.w`: gradient 1.75 here, 2 on one process",
        ],
    ),
    "multiple: times the ranks, dropout": Run(make_dropout, make_scaled_step(world_size)),
    "multiple: a tiny gradient times the ranks": Run(
        make_layers_with_tiny_gradient, says=["parameter `net.0.bias`: gradient "]
    ),
    "multiple: a loss": Run(step=make_scaled_step(one_over_ranks)),
    "multiple: a communication hook": Run(strategy=with_hook(make_communication_hook(lambda bucket: bucket / 2))),
    "gradient hooks: every rank clips its norm": Run(strategy=with_hook(make_communication_hook(clip_norm))),
    "gradient hooks: float16": Run(
        strategy=with_hook(fp16_compress_hook), says=["the communication hook `fp16_compress_hook`", "--tolerance 0.02"]
    ),
    "multiple: a communication hook that adds up": Run(strategy=with_hook(add_up_in_hook), factor=2.0),
    "non-decomposable loss: gradients that hooks clamp": Run(make_clamped_layers),
    "multiple: of a loss that compares samples": make_sampled_run(
        step=make_scaled_step(world_size, make_contrastive_step("lightning_gradavg")),
        factor=2.0,
        says=["`, 2 x that of one process: the gradient is a multiple"],
    ),
    "multiple: times the ranks in manual optimization": Run(
        step=make_manual_step(make_scaled_step(hundredth_of_ranks)),
        is_manual=True,
        says=["the gradient is 2 x that of one process"],
    ),
    "multiple: by the count of all ranks": Run(
        step=divide_by_count_of_all_ranks, loader=UNEVEN, factor=0.5, says=["is for lightning_gradavg.global_mean"]
    ),
    "unexplained: a layer that depends on the rank": Run(lambda: make_layers(ScaledByRank())),
    "multiple: a hook after the backward": Run(hooks={"on_after_backward": multiply_gradients_by_ranks}),
    "unexplained: a state of each rank that hardly differs": Run(
        step=mean_loss_with_state, says=["what the ranks keep for themselves"]
    ),
    "multiple: times 1.004": Run(
        strategy=with_hook(make_communication_hook(lambda bucket: bucket * 1.004)),
        trainer={"precision": "bf16-mixed"},
    ),
    # Weights, optimizers and logged values that depend on the rank or on the number of ranks.
    "initial weights": Run(make_layers_times_ranks),
    "unsynchronised replicas: a weight": Run(hooks={"on_train_batch_start": change_weight_of_rank_1}),
    "unsynchronised replicas: past the strategy": Run(step=make_manual_step(outside=True), is_manual=True),
    "unsynchronised replicas: a weight that a rank writes": Run(
        step=write_bias_of_own_rows,
        says=["reduced gradient   differs", "clipped gradient   not compared", "weights            differs"],
    ),
    "unsynchronised replicas: a layer that unfreezes": Run(
        lambda: make_layers(change=freeze_first_layer), hooks={"on_train_batch_start": unfreeze_in_second_batch}
    ),
    "unsynchronised replicas: a temperature": Run(
        make_layers_with_temperature,
        loss_and_temperature,
        optimizer=make_sgd_of_unregistered,
        says=["tensor 0 of the optimizers that the module does not register", "as an nn.Parameter"],
    ),
    "unsynchronised replicas: layers in a list": Run(
        make_layers_in_list,
        make_step(call_with_list),
        optimizer=make_sgd_of_unregistered,
    ),
    "unsynchronised replicas: layers in a list, in float32": Run(
        make_layers_in_list,
        make_step(call_with_list),
        optimizer=make_sgd_of_unregistered,
        precision="32-true",
        tolerance=1e-4,
    ),
    "unsynchronised replicas: rates": Run(optimizer=make_sgd_by_rank),
    "unsynchronised replicas: a schedule": Run(
        step=log_rising_on_rank_0, optimizer=make_sgd_on_plateau, steps=4, loader=FOUR_BATCHES, says=["sync_dist=True"]
    ),
    "optimizer options: a rate": Run(optimizer=make_sgd_times_ranks),
    "optimizer options: weight decay": Run(optimizer=make_sgd_with_decay_times_ranks),
    "weights beside the gradient: an average": Run(make_frozen, hooks={"on_train_batch_end": average_weights_by_ranks}),
    "buffers of one rank: of its samples": Run(
        make_layers_with_buffer, hooks={"on_train_batch_start": count_samples_in_buffer}
    ),
    "buffers of one rank: that a collective adds up": Run(
        make_layers_with_buffer, hooks={"on_train_batch_start": add_up_count_of_batches}
    ),
    "logged value: NaN of one rank": make_sampled_run(step=log_nan_of_rank_1),
    "logged value: a mean of means": Run(step=log_mean, loader=UNEVEN, strategy=WEIGHTED_MEAN),
    "logged value: summed over the ranks": make_sampled_run(
        step=log_sum_over_ranks, factor=2.0, says=["in the logged values", "the training is the same"]
    ),
    # Sharded models, under Lightning's strategy and under that of this package.
    "duplicated stream: shards": Run(
        loader=make_stream_loader("all"),
        strategy=SHARDED_MEAN,
        hooks=SHARDS,
        says=["Do: let every rank read its own part"],
    ),
    "batch norm: shards": Run(make_batch_norm, strategy=SHARDED_MEAN, hooks=SHARDS),
    "non-decomposable loss: shards, a normalized gradient": Run(
        step=make_step(call_with_normalized_gradient), strategy=SHARDED_MEAN, hooks=SHARDS
    ),
    "non-decomposable loss: shards, contrastive": Run(
        step=contrast_on_rank,
        strategy=SHARDED_MEAN,
        hooks=SHARDS,
    ),
    "non-decomposable loss: shards, a detached gather": make_sampled_run(
        step=make_contrastive_step("`self.all_gather`"), strategy=SHARDED_MEAN, hooks=SHARDS
    ),
    "sum loss: shards on four ranks": Run(
        step=sum_loss,
        loader=EVEN_ON_FOUR_RANKS,
        strategy=stock_sharded(4),
        ranks=4,
        hooks=SHARDS,
        factor=0.25,
        says=[
            "Do: use GradAvgModelParallelStrategy(reduction=",
            '+trainer = Trainer(strategy=GradAvgModelParallelStrategy(reduction="sum"), ...)',
        ],
    ),
    "mean of means: shards": Run(loader=UNEVEN, strategy=SHARDED_MEAN, hooks=SHARDS),
    "mean of means: shards under `mean`, on four ranks": Run(
        loader=UNEVEN_ON_FOUR_RANKS, strategy=sharded(4), ranks=4, hooks=SHARDS
    ),
    "counts: shards under `sum`": Run(strategy=sharded(reduction="sum"), hooks=SHARDS, factor=2.0),
    "short window: shards": Run(
        loader=THREE_BATCHES,
        strategy=SHARDED_MEAN,
        window=2,
        hooks=SHARDS,
        says=["+trainer = Trainer(strategy=GradAvgModelParallel"],
    ),
    "multiple: a divide factor": Run(
        strategy=SHARDED_MEAN,
        hooks={"configure_model": shard_and_add_up},
        factor=2.0,
        says=["the gradient is 2 x that of one process"],
    ),
    "unexplained: shards whose gradients are never summed": Run(
        strategy=SHARDED_MEAN,
        hooks={"configure_model": shard_without_sums},
        says=["the run has no gradient, as if the ranks never reduced theirs"],
    ),
    "unexplained: shards that are clipped by a norm of their own": Run(
        strategy=SHARDED_MEAN,
        hooks={**SHARDS, "on_before_optimizer_step": clip_norm_of_shards},
        says=["in the clipped gradient"],
    ),
    "multiple: shards on four ranks": Run(
        step=make_scaled_step(world_size),
        loader=EVEN_ON_FOUR_RANKS,
        strategy=stock_sharded(4),
        ranks=4,
        hooks=SHARDS,
        factor=4.0,
    ),
    "initial weights: shards of other weights on every rank": Run(
        make_layers_by_rank, strategy=SHARDED_MEAN, hooks=SHARDS
    ),
    "unsynchronised replicas: a root that is not sharded": Run(
        strategy=SHARDED_MEAN,
        hooks={"configure_model": shard_first_layer},
        says=[
            "parameter `net.2.",
        ],
    ),
    "unsynchronised replicas: rates of shards": Run(strategy=sharded(), hooks=SHARDS, optimizer=make_sgd_by_rank),
    "weights beside the gradient: of a shard": Run(
        strategy=SHARDED_MEAN, hooks={**SHARDS, "on_train_batch_end": change_shard_of_rank_1}
    ),
    "buffers of one rank: shards": Run(
        make_layers_with_buffer,
        strategy=SHARDED_MEAN,
        hooks={**SHARDS, "on_train_batch_start": count_batches_on_rank_1},
        says=["buffer `net.seen`: 1 on rank 1, 0 on rank 0"],
    ),
}


# 2a. The code that the first finding of these runs names.

COMMUNICATION_HOOK = "the communication hook `make_communication_hook.<locals>.hook`"

CODE = {
    "multiple: a communication hook": COMMUNICATION_HOOK,
    "gradient hooks: every rank clips its norm": COMMUNICATION_HOOK,
    "multiple: a communication hook that adds up": "the communication hook `add_up_in_hook`",
    "multiple: times 1.004": COMMUNICATION_HOOK,
}


# 2b. What a user does who follows the advice about a run: the run is equal then. Every cause is here but those that
# advise nothing that can be done to a run.

ADVICE: Mapping[str, Mapping[str, Any]] = {
    "initial weights": {"layers": make_layers},
    "unsynchronised replicas: past the strategy": {"step": make_manual_step()},
    "unsynchronised replicas: a weight that a rank writes": {"step": write_bias_of_all_rows},
    "unsynchronised replicas: a layer that unfreezes": {"strategy": ours()},
    "unsynchronised replicas: a temperature": {
        "layers": make_layers_with_registered_temperature,
        "optimizer": make_sgd,
    },
    "duplicated stream": {"strategy": SPLIT},
    "padding": {"strategy": SPLIT},
    "different data sets: sharded by hand and by the sampler": {"trainer": {"use_distributed_sampler": False}},
    "different data sets: a split that follows no seed": {"loader": make_rows_loader(choose_by_seed)},
    "different data sets: noise by the rank": {"loader": make_changed_loader(add_noise_of_index)},
    "batch norm: under Lightning's sampler": {"strategy": SINGLE_DEVICE},
    "non-decomposable loss: global means that are weighed": {"strategy": ours()},
    "non-decomposable loss: contrastive": {"step": contrast_with_all},
    "non-decomposable loss: a variance": {"step": spread_of_all},
    "non-decomposable loss: two means of different numbers": {"step": two_global_means},
    "non-decomposable loss: an L2 penalty under `sum`": {"step": sum_loss, "optimizer": make_sgd_with_decay},
    "non-decomposable loss: gathered by `self.all_gather`": {"step": make_contrastive_step("Lightning")},
    "sum loss": {"strategy": SUM},
    "sum loss: shards on four ranks": {"strategy": sharded(4, reduction="sum")},
    "mean of means": {"strategy": WEIGHTED_MEAN},
    "mean of means: over tokens": {
        "step": make_weighted_step(mean_loss_without_class_0, count_without_class_0),
        "strategy": WEIGHTED_MEAN,
    },
    "counts: class weights": {"step": make_weighted_step(mean_loss_of_weighted_classes, weigh_by_class)},
    "counts: a mean under `sum`": {"strategy": WEIGHTED_MEAN},
    "short window": {"strategy": GradAvgStrategy},
    "multiple: a hook after the backward": {"hooks": {}},
    "multiple: of a loss that compares samples": {"step": make_contrastive_step("lightning_gradavg")},
    "multiple: times the ranks, dropout": {"step": mean_loss},
    "multiple: case 7": {"strategy": ours()},
    "multiple: a divide factor": {"hooks": SHARDS},
    "multiple: a loss": {"step": mean_loss},
    "multiple: by the count of all ranks": {"step": divide_by_global_mean},
    "gradient hooks: every rank clips its norm": {"strategy": GradAvgStrategy, "trainer": {"gradient_clip_val": 0.05}},
    "gradient hooks: float16": {"strategy": GradAvgStrategy},
    "optimizer options: a rate": {"optimizer": make_sgd},
    "optimizer options: weight decay": {"optimizer": make_sgd},
    "weights beside the gradient: an average": {"hooks": {"on_train_batch_end": average_weights}},
    "buffers of one rank: of its samples": {"hooks": {"on_train_batch_start": count_samples_of_all_in_buffer}},
    "logged value: a mean of means": {"step": log_mean_of_all},
    "logged value: summed over the ranks": {"step": log_mean},
}

WITHOUT_ADVICE = ("data order", "unexplained")


# 3. Runs that one process cannot repeat: by a part of the remark that the report must have.

NOT_SHOWN = {
    # What the strategy does on purpose.
    "trains replicas in manual optimization": Run(
        make_batch_norm, make_manual_step(), make_plain_loader(14, 7), DATA_PARALLEL, is_manual=True
    ),
    "`net.1` normalizes by the samples of a replica": Run(
        make_batch_norm, loader=make_plain_loader(14, 7), strategy=DATA_PARALLEL
    ),
    "something compares the samples of a replica with each other": Run(
        step=spread_of_batch, loader=make_plain_loader(14, 7), strategy=DATA_PARALLEL
    ),
    "the buffer 'net.seen' is that of replica 0": Run(
        make_layers_with_buffer, count_in_step, make_plain_loader(14, 7), DATA_PARALLEL
    ),
    "tensor parallelism, by which several ranks compute one loss": Run(
        strategy=in_one_tensor_parallel_group, hooks=SHARDS
    ),
    "without HSDP and tensor parallelism": Run(
        loader=EVEN_ON_FOUR_RANKS, strategy=stock_sharded(4), ranks=4, hooks={"configure_model": shard_twice}
    ),
    "weights that have values before fully_shard": Run(
        strategy=SHARDED_MEAN, hooks={"configure_model": shard_without_values}
    ),
    "lr_scaling= changes the learning rate": Run(
        loader=make_plain_loader(16, 8), strategy=ours(lr_scaling="linear", base_batch_size=4, split_batches=True)
    ),
    # Random numbers.
    "a generator of Python or NumPy": Run(step=make_step(call_with_draw_of_python)),
    "one draw for a whole batch (aten.rand)": make_sampled_run(
        step=make_step(call_with_draw_of_batch), says=["; drawn in ", "return net(x * torch.rand(1))"]
    ),
    "one draw for a whole batch (aten.randn_like)": Run(make_noisy_layers),
    "(aten.randn_like): it belongs to no sample": Run(
        hooks={"on_before_optimizer_step": add_noise_to_gradients}, says=["parameter.grad.add_(torch.randn_like("]
    ),
    "an operator draws what it does not return (aten.rrelu_with_noise": Run(lambda: make_layers(nn.RReLU())),
    "one draw for a whole batch (aten.normal_)": Run(optimizer=make_langevin),
    "one draw for a whole batch (in a communication hook)": Run(
        strategy=with_hook(make_communication_hook(lambda bucket: bucket + 1e-6 * torch.rand(len(bucket))))
    ),
    "collate_fn draws random numbers": make_sampled_run(loader=make_plain_loader(collate_fn=collate_in_random_order)),
    "a batch of another size or rank draws other random numbers (aten.bernoulli_)": make_sampled_run(
        make_words, drop_word_by_word, load_texts, says=["; drawn in ", "dropout(row"]
    ),
    # Schedulers.
    "ReduceLROnPlateau follows 'validation_loss'": Run(optimizer=make_sgd_on_validation_plateau),
    # Steps.
    "no reduced gradient of the compared steps is finite": Run(step=make_scaled_step(infinite)),
    "one process takes fewer steps than the run": Run(hooks={"on_train_batch_end": stop_in_one_process}),
    "one process takes other optimizer steps in a batch than the run": Run(step=step_once_per_rank, is_manual=True),
    "a state that changes with each": Run(
        step=scale_by_calls, loader=THREE_BATCHES, strategy=GradAvgStrategy, window=2
    ),
    "such as global_mean, which divides each by its own count": Run(
        step=global_means, loader=UNEVEN, window=2, steps=1
    ),
    "their positions in the batch": Run(step=weigh_by_position),
    "the user's own sum": Run(step=make_manual_step(every=2), loader=THREE_BATCHES, steps=1, is_manual=True),
    # Loaders.
    "in the compared steps the ranks read some samples twice": Run(
        loader=make_plain_loader(make_sampler=make_sampler_in_other_orders)
    ),
    "the run took no optimizer step": Run(trainer={"limit_train_batches": 0}),
    "use one DataLoader": make_sampled_run(step=mean_loss_of_first_loader, loader=load_two),
    "no collate_fn makes the loader's batches": Run(loader=load_batches_without_collating),
    "a sample cannot be copied": make_sampled_run(loader=load_samples_with_function),
    "the samplers of the ranks read 28 samples in an epoch, and that of one process 32": Run(
        loader=make_plain_loader(make_sampler=make_sampler_that_leaves_out)
    ),
    "the samplers of the ranks read 32 samples in an epoch, and that of one process 31": make_sampled_run(
        loader=make_plain_loader(31)
    ),
}


def fill_in_expectations() -> dict[str, Run]:
    """Return the rows of all tables, with the verdict, the cause and the remark that their table and name say."""
    runs = dict(EQUAL)
    for name, run in DIFFERENT.items():
        cause, _, _ = name.partition(":")
        runs[name] = replace(run, verdict="different", cause=cause, code=CODE.get(name, ""))
    for name, changes in ADVICE.items():
        runs[f"advice followed: {name}"] = replace(DIFFERENT[name], factor=None, says=(), **changes)
    for remark, run in NOT_SHOWN.items():
        runs[remark] = replace(run, verdict="not shown", remark=remark)
    return runs


RUNS = fill_in_expectations()

# One rank's micro-batch has no samples that count, or its random numbers are its own, which is meant.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:random numbers drawn in:UserWarning"),
    pytest.mark.filterwarnings("ignore:Found 5 module.s. in eval mode:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:c10d.*an autograd kernel was not registered:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning"),
    pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric:RuntimeWarning"),
]


def record_ranks_run(name: str) -> Record:
    """Body: train the run of a row on this rank, and return what was recorded."""
    run = RUNS[name]
    module, data, options = run.build()
    environment = RankEnvironment()
    plugins = [*options["plugins"], environment]
    options = {**options, "plugins": plugins, "devices": environment.ranks_on_node}
    return record_run(Recorder(run.steps, run.precision), run.strategy(), options, module, data)


ALSO_SHOWN_BY_OTHERS = (
    "contrastive, gathered by torch",
    "shards on four ranks, mixed precision",
    "shards, AdamW, one cycle",
    "shards, contrastive, gathered",
    "weighted shards on four ranks, dropout",
    "mean of means: shards under `mean`, on four ranks",
    "multiple: shards on four ranks",
    "non-decomposable loss: shards, contrastive",
    "unsynchronised replicas: rates of shards",
)


def make_parameters_of_runs() -> list[Any]:
    """Return a parameter of pytest for every row of RUNS; those that others show, too, run before a release."""
    parameters = []
    for name in RUNS:
        marks = []
        if name in ALSO_SHOWN_BY_OTHERS:
            marks.append(pytest.mark.full)
        if name == "compiled, dropout":
            marks.append(RUNS_COMPILED_EAGERLY)
        if "configure_model" in RUNS[name].hooks:
            marks.append(NEEDS_SHARDS_ON_CPU)
        parameters.append(pytest.param(name, marks=marks))
    return parameters


def test_following_the_advice_is_tested_for_every_cause():
    followed = {name.partition(":")[0] for name in ADVICE}
    assert set(CAUSES) - set(WITHOUT_ADVICE) == followed


RUNS_COMPILED_EAGERLY = pytest.mark.skipif(
    not hasattr(torch.compiler, "set_stance"), reason="torch 2.6 brought what runs compiled functions eagerly"
)


@pytest.mark.parametrize("name", make_parameters_of_runs())
def test_a_run_is_judged_right(world, name):
    """A healthy run is equal, a fault is named with its factor, and what was not compared is said."""
    run = RUNS[name]
    records = world(run.ranks).run(record_ranks_run, name)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="lightning")  # advice for a longer run
        report = judge(records, run.build, run.tolerance, run.precision)
    text = str(report)
    cause = report.first.cause if report.first is not None else ""
    assert (run.verdict, run.cause) == (report.verdict, cause), text
    assert run.remark in " ".join(report.remarks), text
    positions = [text.index(part) for part in run.says]
    assert sorted(positions) == positions, text
    if records[0].facts.splits_batches:
        assert "data order" not in text, text
    # The whole recipe of the user's strategy stays, and findings do not contradict each other.
    weighs = cause == "counts" and records[0].facts.rule.uses_weight
    assert text.count("Trainer(strategy=") <= (0 if weighs else 1), text
    if run.code:
        assert run.code in report.first.detail, text
    if run.factor is not None:
        assert run.factor == pytest.approx(report.first.factor)
