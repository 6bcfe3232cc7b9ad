"""The line at the start of a run: what a user must know first, and the formula last.

It says the same about a run as the README and the first line of `gradavg verify`: which run of one process it equals,
and in what it does not (`tests/test_start_line.py`). *One process* is stock Lightning on one process with the named
batch. The line leaves out what a run does not have: dropout, a shuffled order, batch norm, a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from lightning_gradavg._lightning.internals import BatchNorm
from lightning_gradavg._support.text import plural
from lightning_gradavg.rules import RULES, Rule, explained

__all__ = ["Baseline", "StartFacts", "drops_out", "normalizes_by_rank", "start_line"]

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class StartFacts:
    """What the line says of a run that begins to train.

    Attributes:
        strategy: Name of the strategy's class.
        rule: The reduction rule.
        ranks: Number of ranks that gradients are reduced over.
        place: Where they are, as in "2 ranks on 1 node (gloo)".
        global_batch: Samples of one optimizer step, over ranks and window; None if they are not known.
        loader_batch: Samples of one batch of the user's loaders; None if they are not known.
        window: Micro-batches of one optimizer step.
        last_window: Micro-batches of the last window of an epoch if it is short; 0 if it is full or nobody knows.
        splits: Whether the ranks share each batch of the user's loaders.
        draws_order: Whether a loader that they share may draw its order with whatever else draws on the CPU.
        replicas: Chunks of each loader batch that have batch statistics and random numbers of their own; None if those
            are the ranks' own, or those of one device.
        cuts_in_pieces: Whether a rank may compute its samples in pieces.
        normalizes_by_rank: Whether a batch norm sees the samples of its own rank alone.
        drops_out: Whether a module of torch's is seen to drop values.
    """

    strategy: str
    rule: Rule
    ranks: int
    place: str
    global_batch: int | None = None
    loader_batch: int | None = None
    window: int = 1
    last_window: int = 0
    splits: bool = False
    draws_order: bool = False
    replicas: int | None = None
    cuts_in_pieces: bool = False
    normalizes_by_rank: bool = False
    drops_out: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether each optimizer step is one forward and backward, of one batch, as without the strategy."""
        return self.ranks * self.window == 1 and self.replicas is None and not self.cuts_in_pieces


def start_line(facts: StartFacts, remarks: Sequence[str] = ()) -> str:
    """Return the line, with the remarks of the strategy's parts, each a sentence, before the formula."""
    steps = _number_of_steps(facts.global_batch, facts.loader_batch, facts.window)
    if steps:
        steps += "."
    sentences = [
        f"{facts.strategy}: {facts.place}, {_batch(facts)}.",
        _run_that_it_equals(facts),
        steps,
        _differences(facts),
        _window(facts),
        *remarks,
        f"{explained(facts.rule)} ({_name(facts.rule)}).",
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def normalizes_by_rank(module: nn.Module) -> bool:
    """Return whether a module has a batch norm that sees the samples of its own rank alone."""
    norms = [layer for layer in module.modules() if isinstance(layer, BatchNorm)]
    return any(not isinstance(norm, nn.SyncBatchNorm) for norm in norms)


def drops_out(module: nn.Module) -> bool:
    """Return whether a module has a dropout of torch's that drops anything. One that is a function is not seen."""
    for layer in module.modules():
        share = 0.0
        if isinstance(layer, _DROPOUTS):
            share = layer.p
        if isinstance(layer, (nn.MultiheadAttention, nn.RNNBase)):
            share = layer.dropout
        if share > 0:
            return True
    return False


def _name(rule: Rule) -> str:
    """Return the option that names a rule. The mean over samples that ranks share has the name of the plain one."""
    option = f"reduction={rule.name!r}"
    if rule.name == "mean" and rule != RULES["mean"]:
        return f"{option} of a batch that ranks share"
    return option


def _batch(facts: StartFacts) -> str:
    text = "global batch of unknown size"
    if facts.global_batch is not None:
        text = f"global batch of {plural(facts.global_batch, 'sample')}"
    if facts.window > 1:
        text += f", {plural(facts.window, 'micro-batch')} per optimizer step"
    return text


def _run_that_it_equals(facts: StartFacts) -> str:
    """Return the sentence that names the run of one process; "" under rules of nodes, which one process has not."""
    if facts.rule.uses_nodes:
        return ""
    batch = "that takes the samples of all ranks in one step"
    if facts.global_batch is not None:
        batch = f"with batch {facts.global_batch}"
        if facts.window > 1:
            batch += " in one step over all samples"
    chunks = ""
    if facts.replicas is not None:
        chunks = f" in {plural(facts.replicas, 'chunk')}, as nn.DataParallel on {plural(facts.replicas, 'device')}"
    return f"Equal to one process {batch}{chunks}{_condition(facts)}."


def _condition(facts: StartFacts) -> str:
    """Return what must hold of the loss for the run to equal one process."""
    if facts.rule == RULES["normalized_sum"]:
        return ' that divides its loss, a sum, by its "weight"'
    if facts.is_whole:
        return ""
    if facts.rule == RULES["mean"]:
        return " if every micro-batch has equally many loss terms, as in stock DDP"
    if facts.rule.multiplier == "n":
        return ' if its loss is a mean over its "weight", or over samples without one'
    return " if its loss is a sum"


def _number_of_steps(global_batch: int | None, loader_batch: int | None, window: int) -> str:
    """Return how many steps one process takes with the user's loader; "" if as many, or if it is not known.

    The first line of `gradavg verify` says the same (`Baseline`).
    """
    if not global_batch or not loader_batch:
        return ""
    times, rest = divmod(global_batch, loader_batch * window)
    if (times, rest) == (1, 0):
        return ""
    own = f"Your loader's batch is {loader_batch}"
    if window > 1:
        own += f", and {window} of them are accumulated"
    how_many = "another number of steps"
    if rest == 0:
        how_many = f"{times} times as many steps"
        if times == 2:  # noqa: PLR2004  # in words
            how_many = "twice as many steps"
    return f"{own}, so one process takes {how_many}"


class Baseline(NamedTuple):
    """The run on one process that `gradavg verify` compares with, beside that of the user's loader.

    Attributes:
        batch: The samples of all ranks in the first step, which one process takes as one batch.
        loader_batch: Those of a batch of the user's loader on one process; 0 if it is not known.
        window: The batches that the Trainer accumulates.
        replicas: The chunks of a loader batch, as of `nn.DataParallel`; None if it is not cut.
    """

    batch: int = 0
    loader_batch: int = 0
    window: int = 1
    replicas: int | None = None

    def __str__(self) -> str:
        """Return the run in words, as in "one process with batch 12. Your loader's batch is 6, so ..."."""
        if self.batch == 0:
            return "one process."
        text = f"one process with batch {self.batch}"
        if self.replicas is not None:
            text += f" in {plural(self.replicas * self.window, 'chunk')}"
        text += "."
        steps = _number_of_steps(self.batch, self.loader_batch, self.window)
        if steps:
            text += f" {steps}: see docs/which_run.md."
        return text


def _differences(facts: StartFacts) -> str:
    """Return the sentence that lists what differs from that run; "" if nothing does."""
    differences = [_samples(facts), _random_numbers(facts), _batch_norm(facts)]
    listed = "; ".join(difference for difference in differences if difference)
    sentences = []
    if listed:
        sentences.append(f"Different from one process: {listed}.")
    if facts.replicas is not None:
        sentences.append(f"{_drawn(facts).capitalize()} are each chunk's own, on any number of ranks.")
    return " ".join(sentences)


def _samples(facts: StartFacts) -> str:
    if facts.draws_order:
        return "the shuffled order, if anything else draws on the CPU (a loader with generator= keeps it)"
    if facts.splits:
        return ""
    if facts.ranks > 1:
        return "the samples of each step (split_batches=True keeps them)"
    # Lightning gives every DDP strategy the sampler, of one process too, and has it shuffle an unshuffled train loader.
    return "the samples of each step, if Lightning's DistributedSampler shuffles them (split_batches=True keeps them)"


def _random_numbers(facts: StartFacts) -> str:
    if facts.replicas is not None:
        return ""
    if facts.ranks > 1:
        return f"{_drawn(facts)}, each rank's own (equivalent_to='data_parallel' with num_replicas= fixes them)"
    if facts.cuts_in_pieces:
        return f"{_drawn(facts)}, of each piece of a batch its own"
    return ""


def _drawn(facts: StartFacts) -> str:
    if facts.drops_out:
        return "dropout and other random numbers"
    return "random numbers, if any are drawn"


def _batch_norm(facts: StartFacts) -> str:
    if facts.normalizes_by_rank and facts.ranks > 1:
        return "batch norm, which sees the samples of its own rank (equivalent_to='single_device' shares them)"
    return ""


def _window(facts: StartFacts) -> str:
    """Return the sentence about what stock Lightning makes of a window, on one process, too; "" if it is the same."""
    if facts.window == 1:
        return ""
    short = ""
    if facts.last_window > 0:
        short = (
            f"divides the last window of an epoch, which has {plural(facts.last_window, 'micro-batch')}, by"
            f" {facts.window}"
        )
    if facts.rule == RULES["mean"] or facts.rule.averages_window:
        if not short:
            return ""
        return f"Stock Lightning {short}; here it is divided by {facts.last_window}."
    averages = f"averages the losses of the {facts.window} micro-batches"
    both = " and ".join(part for part in (averages, short) if part)
    return f"Stock Lightning, on one process too, {both}."
