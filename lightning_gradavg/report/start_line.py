"""The line at the start of a run: what a user must know first, and the formula last.

It says the same about a run as the README and the first line of `gradavg verify`: which run of one process it equals,
and in what it does not (`tests/test_start_line.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightning_gradavg._lightning.internals import BatchNorm
from lightning_gradavg._support.text import plural
from lightning_gradavg.rules import RULES, Rule, explained

__all__ = ["StartFacts", "normalizes_by_rank", "start_line"]


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
        replicas: Chunks of each loader batch that have batch statistics and random numbers of their own; None if those
            are the ranks' own, or those of one device.
        cuts_in_pieces: Whether a rank may compute its samples in pieces.
        normalizes_by_rank: Whether a batch norm sees the samples of its own rank alone.
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
    replicas: int | None = None
    cuts_in_pieces: bool = False
    normalizes_by_rank: bool = False


def start_line(facts: StartFacts, remarks: Sequence[str] = ()) -> str:
    """Return the line, with the remarks of the strategy's parts, each a sentence, before the formula."""
    sentences = [
        f"{facts.strategy}: {facts.place}, {_batch(facts)}.",
        _run_that_it_equals(facts),
        _number_of_steps(facts),
        _differences(facts),
        *remarks,
        f"{explained(facts.rule)} (reduction={facts.rule.name!r}).",
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def normalizes_by_rank(module: nn.Module) -> bool:
    """Return whether a module has a batch norm that sees the samples of its own rank alone."""
    norms = [layer for layer in module.modules() if isinstance(layer, BatchNorm)]
    return any(not isinstance(norm, nn.SyncBatchNorm) for norm in norms)


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
    batch = "that takes the samples of all ranks as one batch"
    if facts.global_batch is not None:
        batch = f"with batch {facts.global_batch}"
    chunks = ""
    if facts.replicas is not None:
        chunks = f" in {plural(facts.replicas, 'chunk')}, as nn.DataParallel on {plural(facts.replicas, 'device')}"
    return f"Equal to one process {batch}{chunks}{_condition(facts)}."


def _condition(facts: StartFacts) -> str:
    """Return what must hold of the loss for the run to equal one process."""
    if facts.rule == RULES["mean"]:
        if facts.ranks * facts.window == 1:
            return ""
        return " if every micro-batch has equally many loss terms, as in stock DDP"
    if facts.rule.multiplier == "n":
        return " if its loss is a mean over the weight that training_step returns, or else over samples"
    return " if its loss is a sum"


def _number_of_steps(facts: StartFacts) -> str:
    """Return how many steps one process takes with the user's loader, if it is another number.

    In the words of `gradavg verify` (`verify.report.Baseline`).
    """
    if facts.global_batch is None or facts.loader_batch is None:
        return ""
    times, rest = divmod(facts.global_batch, facts.loader_batch * facts.window)
    if (times, rest) == (1, 0):
        return ""
    own = f"Your loader's batch is {facts.loader_batch}"
    if facts.window > 1:
        own += f", and {facts.window} of them are accumulated"
    how_many = "another number of steps"
    if rest == 0:
        how_many = f"{times} times as many steps"
        if times == 2:  # noqa: PLR2004  # in words
            how_many = "twice as many steps"
    return f"{own}, so one process takes {how_many}."


def _differences(facts: StartFacts) -> str:
    """Return the sentence that lists what differs from that run; "" if nothing does."""
    differences = [_samples(facts), _random_numbers(facts), _batch_norm(facts), _short_window(facts)]
    listed = "; ".join(difference for difference in differences if difference)
    if not listed:
        return ""
    # On one process, what the run differs from is the same script without the strategy.
    other = "one process" if facts.ranks > 1 else "the plain Trainer"
    return f"Different from {other}: {listed}."


def _samples(facts: StartFacts) -> str:
    if facts.splits:
        return "a shuffled order, where something else draws on the CPU and the loader has no generator="
    if facts.ranks > 1:
        return "the samples of each step (split_batches=True keeps those of one process)"
    return ""


def _random_numbers(facts: StartFacts) -> str:
    if facts.replicas is not None:
        return "dropout and augmentation, which each replica draws for itself, equal on any number of ranks"
    if facts.ranks > 1:
        return (
            "dropout and augmentation, which each rank draws for itself (equivalent_to='data_parallel' with"
            " num_replicas= draws equal ones on any number of ranks)"
        )
    if facts.cuts_in_pieces:
        return "dropout and augmentation, which each piece of a batch draws for itself"
    return ""


def _batch_norm(facts: StartFacts) -> str:
    if facts.normalizes_by_rank and facts.ranks > 1:
        return "batch norm, which sees the samples of its own rank (equivalent_to='single_device' shares them)"
    return ""


def _short_window(facts: StartFacts) -> str:
    if facts.last_window == 0:
        return ""
    return (
        f"the last window of an epoch, which has {facts.last_window} and is averaged over {facts.last_window}"
        f" (stock Lightning divides by {facts.window})"
    )
