"""The judgement of a run: what it reads otherwise than one process, where it first differs in training, and why.

`P` are the gradients that one process computes of each micro-batch alone, `F` that of all samples at once, and `G` what
the run made of them. A combination of `P` has a share for each micro-batch: equal shares ("mean"), those of the samples
or of the weights, or any others. The combination of `P` that is `F` is *right*, the one that is `G` was *made*.

These are the cases of a reduced gradient that differs from `F`. The first that holds gives the cause.
`tests/test_ranks_verify.py` has runs of each cause in `DIFFERENT`.

| case | cause |
|---|---|
| **All gradients** (`_of_gradient`) | |
| the module optimizes by itself | unexplained |
| one process computes another gradient of the same samples in reversed order | not shown |
| the loss uses `global_mean`, and the run does not take the plain mean | weighed global mean |
| **`F` is a combination of `P`, and the ranks' losses are those of one process** (`_of_combination`, `_of_change`) | |
| `G` is next to `F` | unexplained |
| `F` is the sum of `P`, the rule is no sum, and `G` is a multiple of a combination | sum loss |
| `G` is the mean | mean of means |
| `G` is another combination | counts |
| `G` is a combination, multiplied by the ranks over another divisor of `fully_shard` | divide factor |
| `G` is a combination, divided by a full window although the window is short | short window |
| `G` is a combination, divided by the number of ranks | double division |
| `G` is a combination, multiplied by the number of micro-batches, and the rule is a sum | counts |
| `G` is a combination, multiplied by the number of ranks | hand-compensated loss |
| `G` is zero | unexplained |
| every element of `G` is a number of 16 bits | 16-bit wire |
| `G` is no multiple of `F`, and a rank computes its batch in several parts | unexplained |
| `G` is no multiple of `F` | gradient hooks |
| any other | unexplained |
| **`F` is a combination of `P`, and the ranks' losses are others** (`_of_losses`) | |
| each is that of one process over the number of ranks | double division |
| with their factors as shares, the mean of `P` is `G` and `F` over the number of ranks | global normaliser |
| with their factors as shares, the mean of `P` is `F` | hand-compensated loss |
| all are the same multiple of those of one process | hand-compensated loss |
| any other | unexplained |
| **`F` is no combination of `P`: samples are compared with each other** (`_of_whole`) | |
| there is batch norm with the statistics of each rank | batch norm |
| a batch taken twice misses the same term as the batch in parts | constant term |
| something was gathered, and the mean of the ranks' losses is that of one process | detached gather |
| the step multiplies the rows of the batch with each other | contrastive loss |
| any other | non-decomposable loss |
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import pairwise, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gradavg.reduction.global_mean import SCOPE
from lightning_gradavg.rules import RULES
from lightning_gradavg.verify.draws import ROW_PRODUCT, SAMPLE_CHOICE, TYPES_OF_16_BITS, Draw
from lightning_gradavg.verify.places import (
    Location,
    first_other_value,
    of_backward,
    of_comm_hook,
    of_constant_term,
    of_hook_of_parameter,
    of_logged_value,
    of_loss,
    of_optimizer,
    of_stream,
    of_tensor,
    of_uneven_gradient,
    of_uneven_number,
    of_use,
    of_written_gradient,
)
from lightning_gradavg.verify.record import (
    SKETCHED_ELEMENTS,
    MicroBatch,
    Reading,
    Record,
    Refused,
    SampleId,
    join_shards,
)
from lightning_gradavg.verify.report import CAUSES, Finding, Report, value_in_words
from lightning_gradavg.verify.rows import rounding_of
from lightning_gradavg.verify.trace import Followed, Place
from lightning_gradavg.verify.twin import (
    Build,
    Seen,
    StepResult,
    Twin,
    compare_records,
    compare_tensors,
    flat,
    gap_between,
    multiple_of,
)

__all__ = ["judge"]

_BESIDE_DRAWS = ("initial weights", "optimizer options")
"""Stages that do not depend on what is drawn."""

_OF_COMBINATIONS = (
    "short window",
    "mean of means",
    "sum loss",
    "counts",
    "divide factor",
    "double division",
    "constant term",
    "16-bit wire",
    "gradient hooks",
    "learning-rate scale",
    "optimizer options",
)
"""Causes that are known from how the run combined gradients, or from numbers beside them.

State that changes with every micro-batch has none of these.
"""

_STATISTICS = (
    "if it normalizes by mean and variance, take those of all ranks' values (lightning_gradavg.gather), or keep each"
    " group of samples on one rank"
)
_LARGEST = "if it divides by the largest number of the batch, such as the longest text, divide by a constant instead"
_CLAMP = "if it clamps a mean over samples, clamp what each sample contributes before the mean"

_ADVICE_BY_OPERATOR: Mapping[str, str] = {
    SAMPLE_CHOICE: (
        "choose the samples among those of all ranks: gather what they are chosen by (lightning_gradavg.gather)"
    ),
    "aten.topk": (
        "if it balances the load of experts, average the experts' fractions over all ranks first"
        " (lightning_gradavg.global_mean)"
    ),
    "aten.std": _STATISTICS,
    "aten.std_mean": _STATISTICS,
    "aten.var": _STATISTICS,
    "aten.var_mean": _STATISTICS,
    "aten.max": _LARGEST,
    "aten.amax": _LARGEST,
    "aten.clamp": _CLAMP,
    "aten.clamp_min": _CLAMP,
    "aten.clamp_max": _CLAMP,
}
"""What may help if the gradient of a batch is no combination of those of its parts, by what `training_step` calls.

The first that was called counts. An operator may have another use, so the advice says what it is for.
"""

_MOST_BATCHES = 20_000  # of an epoch whose windows are looked at


def judge(
    records: Sequence[Record], build: Build, tolerance: float, double: bool = True, accelerator: str = "cpu"
) -> Report:
    """Return how a run, as all ranks recorded it, differs from one process, and why."""
    facts = records[0].facts
    twin = Twin(records, build, double, accelerator)
    problem = _first_problem(records, twin)
    if problem:
        return Report(facts.strategy, facts.rule.name, len(records), 0, math.nan, remarks=[problem])
    if facts.sharded:
        join_shards(records)
    return _Judge(records, twin, tolerance).report()


def _first_problem(records: Sequence[Record], twin: Twin) -> str:
    """Return why a run cannot be compared; "" if it can."""
    for record in records:
        if record.problem:
            return record.problem
        if not record.steps:
            return "the run took no optimizer step"
    if records[0].facts.sharded and any(_stages_of(record) != _stages_of(records[0]) for record in records):
        return "the ranks take different optimizer steps, so their shards make no whole tensors"
    if not twin.are_replicas_known():
        return "it is not known which samples are those of a replica: use as many processes as replicas"
    return ""


def _stages_of(record: Record) -> list[list[str]]:
    return [[snapshot.stage for snapshot in step.snapshots] for step in record.steps]


class _Explanation(NamedTuple):
    cause: str  # a key of `CAUSES`
    detail: str  # what was found, with numbers
    advice: str = ""  # what to do; "" for what `CAUSES` says
    location: Location | None = None  # the module and the line, if these are known


class _Traces(NamedTuple):
    """The calls of `training_step` on the ranks, held against those of one process."""

    whole: Sequence[Followed]  # that takes the samples of all ranks
    parts: Sequence[Followed]  # that takes a rank's samples alone


class _Judge:
    """Compares a run with one process.

    Args:
        records: What the ranks recorded.
        twin: Trains on one process.
        tolerance: The largest relative difference that counts as equal.
    """

    def __init__(self, records: Sequence[Record], twin: Twin, tolerance: float) -> None:
        self.records, self.twin, self.tolerance = records, twin, tolerance
        self.facts = records[0].facts

    def report(self) -> Report:
        """Compare, and put together what was found."""
        alone = self.twin.train()
        remarks: list[str] = []
        compared_steps = len(alone.steps)
        in_training = self._differences_between_ranks()
        logged = None
        try:
            seen = self._first_difference(alone)
            if seen is not None:
                compared_steps = seen.step
                in_training.append(self._finding(alone, seen))
            logged = self._first_logged_difference(alone, compared_steps)
        except Refused as error:
            remarks.append(str(error))

        # Ranks draw other numbers than one process then, so what depends on them differs for no other reason.
        shared_draws = self._shared_draws(alone)
        if shared_draws:
            remarks.insert(
                0,
                f"one draw for a whole batch ({', '.join(shared_draws)}): it belongs to no sample; every rank draws its"
                f" own, and one process draws one{_at(next(iter(shared_draws.values())))}",
            )
            in_training = [finding for finding in in_training if finding.stage in _BESIDE_DRAWS]
            logged = None

        # Only the first difference is a cause. Those behind it may follow from it.
        findings: list[Finding] = []
        if in_training:
            first = min(in_training, key=_place_in_run)
            compared_steps = first.step + 1
            findings.append(first)
        samples = _SampleComparison(self.records, alone.reading)
        samples.compare()
        findings += samples.findings
        remarks += samples.remarks
        remarks += self._remarks_on_schedulers()
        if logged is not None:
            findings.append(logged)
        return Report(
            strategy=self.facts.strategy,
            reduction=self.facts.rule.name,
            world_size=len(self.records),
            steps=compared_steps,
            tolerance=self.tolerance,
            findings=[self._with_remedy(finding) for finding in sorted(findings, key=_is_note)],
            remarks=list(dict.fromkeys(remarks)),  # each once
            precision="float64" if self.twin.double else "float32",
            baseline=self._baseline(alone, findings),
        )

    def _baseline(self, alone: Record, findings: Sequence[Finding]) -> str:
        """Return which run on one process the ranks are compared with, and how to reproduce that of the user's loader.

        The two differ in their batch, which is that of all ranks, or in the order of the samples.
        """
        batch = sum(rank_batch.micro_batch.size for rank_batch in self.twin.group_of_step(0))
        text = f"Compared with one process that takes the samples of all ranks as one batch, {batch} in step 0."
        batch_size = alone.reading.batch_size
        if self.facts.replicas is not None:
            return f"{text} Its batch norm normalizes the samples of each replica by themselves."
        if batch_size is None or self.facts.replicated or self.facts.sharded:
            return text
        is_other_batch = batch != batch_size * self.facts.accumulation
        is_other_order = any(finding.cause == "data order" for finding in findings)
        if is_other_batch or is_other_order:
            text += (
                f" To reproduce one process with `batch_size` {batch_size}, use"
                ' GradAvgStrategy(equivalent_to="single_device").'
            )
        return text

    def _with_remedy(self, finding: Finding) -> Finding:
        """Return a finding with what to do about it in this run."""
        if finding.advice:
            return finding
        used_options = []
        if self.facts.splits_batches:
            used_options.append("split_batches")
            if self.facts.rule.name == "mean":
                # "mean" takes samples or weights then, as `rule_of_split_batches` says: another rule changes nothing.
                used_options.append('reduction="weighted_mean"')
        if self.facts.replicated:
            used_options.append("equivalent_to")
        if self.facts.is_gradavg:
            used_options.append("GradAvgStrategy")
        if self.facts.sharded:
            # As of options that are set already, nothing advises them: sharded models have none of these.
            used_options += ["split_batches", "equivalent_to"]
        remedy = CAUSES[finding.cause].remedy(self.facts.strategy, self.facts.rule.name, used_options)
        if self.facts.sharded:
            remedy = remedy.for_shards()
        return replace(finding, advice=remedy.advice, diff=remedy.diff)

    def _remarks_on_schedulers(self) -> list[str]:
        """Return what is not known of schedulers that follow a value, and did not step."""
        remarks = []
        for plateau in self.records[0].plateaus:
            if plateau.has_stepped:
                continue
            of_value = ""
            if plateau.monitor:
                of_value = f" on {plateau.monitor!r}"
            remarks.append(
                f"{plateau.name}{of_value} was skipped: verify does not validate, and the compared steps do not reach"
                " it. The ranks keep the same learning rate only if they log the same value, as with sync_dist=True"
            )
        return remarks

    def _shared_draws(self, alone: Record) -> Mapping[str, Place | None]:
        """Return the operators that drew for no single sample, on a rank or on one process, and where."""
        places: dict[str, Place | None] = {}
        for record in (alone, *reversed(self.records)):
            places.update(record.shared)
        return places

    def _first_difference(self, alone: Record) -> Seen | None:
        """Return the first difference in training to a run on one process."""
        seen = next(compare_records(self.records[0], alone, self.tolerance), None)
        if seen is None and alone.problem:
            raise Refused(alone.problem)
        return seen

    def _finding(self, alone: Record, seen: Seen) -> Finding:
        """Return the finding of the first difference, or raise `Refused` if it may be none.

        | stage | cause |
        |---|---|
        | initial weights | initial weights |
        | reduced gradient | that of the first case in the table above |
        | clipped gradient | unexplained |
        | optimizer options | learning-rate scale, or optimizer options |
        | weights | weights beside the gradient |
        | buffers | buffers of one rank |
        """
        stage, name = seen.stage, seen.difference.name
        detail, advice = f"{name} is the first to differ", ""
        location = self._location_of_tensor(self.records[0], seen)
        if stage == "initial weights":
            cause = "initial weights"
        elif stage == "reduced gradient":
            cause, detail, advice, location = self._of_gradient(seen)
        elif stage == "clipped gradient":
            cause = "unexplained"
        elif stage == "optimizer options" and name.startswith("lr"):
            cause = "learning-rate scale"
        elif stage == "optimizer options":
            cause = "optimizer options"
        elif stage == "weights":
            cause = "weights beside the gradient"
        else:
            cause = "buffers of one rank"
        if stage == "buffers" and self.facts.replicas is not None:
            raise Refused(
                f"the buffer {name!r} is that of replica 0, of whose samples alone one process has only the running"
                " statistics of batch norm"
            )
        if stage not in _BESIDE_DRAWS:
            self._require_same_draws(alone, seen.step)
            self._require_difference_in_windows(seen.step, cause)
        finding = Finding(cause, stage, detail, seen.step, seen.difference, advice)
        return _with_location(finding, location)

    def _location_of_tensor(self, record: Record, seen: Seen) -> Location | None:
        """Return the layer and the line of a weight, a buffer or an option that differs; None of a reduced gradient."""
        name = seen.difference.name
        if seen.stage == "initial weights":
            return of_tensor(name, {})
        writes = record.steps[seen.step].writes
        if seen.stage == "clipped gradient":
            return of_written_gradient(seen.names, writes)
        if seen.stage == "optimizer options":
            return of_optimizer(record)
        if seen.stage in ("weights", "buffers"):
            return of_tensor(name, writes)
        return None

    def _of_gradient(self, seen: Seen) -> _Explanation:
        """Return why a reduced gradient differs, and where."""
        if not self.facts.automatic:
            group = self.twin.group_of_step(seen.step)
            of_parts = [self.twin.train_step([rank_batch], seen.step, follows=True) for rank_batch in group]
            of_whole = self.twin.train_step(group, seen.step, follows=True)
            traces = _traces_of(of_whole, of_parts)
            # What ranks gather from each other is other than what one process has of a part.
            are_independent = not _gathers(self.records)
            detail = _multiple_in_words(seen.difference.factor)
            location = self._location_of_gradient("unexplained", seen, traces, are_independent=are_independent)
            return _Explanation("unexplained", detail, location=location)
        evidence = _Evidence(self.twin, seen, self.tolerance)
        explanation = self._of_evidence(seen, evidence)
        are_independent = len(evidence.right) > 0
        location = self._location_of_gradient(explanation.cause, seen, evidence.traces, are_independent=are_independent)
        return explanation._replace(location=location)

    def _location_of_gradient(
        self, cause: str, seen: Seen, traces: _Traces, *, are_independent: bool
    ) -> Location | None:
        """Return the first place of the table in `places.py` that holds, if any does.

        Args:
            cause: The cause of the difference.
            seen: The difference.
            traces: The calls of `training_step`.
            are_independent: Whether the gradient of a batch is a combination of those of its parts.
        """
        rounding = rounding_of(double=self.twin.double)
        if not traces.whole:
            return None
        location = first_other_value("the same samples first have other values in", traces.whole)
        if location is None:
            location = of_uneven_gradient(traces.whole, rounding)
        if location is None and cause == "constant term":
            location = of_constant_term(traces.whole)
        elif location is None and not are_independent:
            location = of_uneven_number(traces.whole, rounding)
        elif location is None:
            location = first_other_value("a rank's samples alone first give another value in", traces.parts)
        if location is None:
            location = of_loss(cause, traces.whole)
        if location is None:
            location = of_comm_hook(self.records, seen.step, rounding)
        if location is not None:
            return location
        # Everything up to the reduction is right, and so is the reduction. If both a hook and a line are left that may
        # have changed the gradient since, neither is named.
        hook = of_hook_of_parameter(seen.names, self.records[0])
        write = of_written_gradient(seen.names, self.records[0].steps[seen.step].writes)
        if hook is not None and write is not None:
            return None
        return hook or write

    def _of_evidence(self, seen: Seen, evidence: _Evidence) -> _Explanation:
        """Return why a reduced gradient differs, in automatic optimization."""
        # If the order in a batch matters, a batch and its parts differ on one process, too, and explain nothing.
        reversed_order = self.twin.train_step(evidence.group[::-1], seen.step).gradient
        if gap_between(flat(reversed_order, evidence.like), evidence.whole) > evidence.near:
            raise Refused(
                "with the samples of the batch in a different order one process computes a different gradient: the"
                " loss, or a random draw, depends on their positions in the batch"
            )
        # `global_mean` enters a profiler scope of this name, which the dispatch mode of the recorder sees.
        if SCOPE in self.records[0].scopes and not _is_plain_mean(evidence):
            return _Explanation(
                "weighed global mean", f"{evidence.multiple}: the run weighs the ranks' losses once more"
            )
        if not evidence.right and self.facts.replicas is not None:
            raise Refused(
                "the gradient of a batch is no combination of those of its replicas: something beside batch norm"
                " compares the samples of a replica with each other, or batch norm gets their rows in another order."
                " One process has only the whole batch for that"
            )
        if not evidence.right:
            return _of_whole(evidence)
        if not _have_other_losses(evidence):
            return _of_combination(evidence) or _of_change(evidence)
        return _of_losses(evidence)

    def _require_same_draws(self, alone: Record, step: int) -> None:
        """Raise `Refused` if one process drew other numbers in a step than a rank did."""
        draws = alone.steps[step].micro_batches[-1].draws
        names: dict[str, None] = {}
        place: Place | None = None
        for record in self.records:
            for micro_batch in record.steps[step].micro_batches:
                if micro_batch.counts and not _are_same_draws(micro_batch.draws, draws):
                    names.update(dict.fromkeys(draw.operator for draw in (*micro_batch.draws, *draws)))
                    place = place or _first_other_draw(micro_batch.draws, draws)
        if names:
            raise Refused(f"a batch of another size draws other random numbers ({', '.join(names)}){_at(place)}")

    def _require_difference_in_windows(self, step: int, cause: str) -> None:
        """Raise `Refused` if one process that takes windows, too, trains as the run does.

        Then the cause is in the windows and not in the ranks, such as a step counter or spectral norm.
        """
        if len(self.records[0].steps[step].micro_batches) == 1 or cause in _OF_COMBINATIONS:
            return
        seen = self._first_difference(self.twin.train_in_windows())
        if seen is None or seen.step > step:
            raise Refused(
                "one process that accumulates the same micro-batches trains the same, and one that takes them as one"
                " batch does not: something counts or keeps state for every micro-batch, or compares samples within one"
            )

    def _differences_between_ranks(self) -> list[Finding]:
        """Return where ranks differ from the first."""
        findings = []
        for record in self.records[1:]:
            # Ranks that take different optimizer steps are not compared with each other.
            with suppress(Refused):
                for seen in compare_records(record, self.records[0], self.tolerance):
                    if seen.stage == "buffers" and not self._keeps_buffers_equal():
                        continue  # each rank may have its own: DDP broadcasts those of rank 0 before the next forward
                    difference = seen.difference
                    detail = (
                        f"{value_in_words(seen.stage, difference.name)} {difference.found:.6g} on rank {record.rank},"
                        f" {difference.expected:.6g} on rank 0"
                    )
                    cause = "unsynchronised replicas"
                    advice = ""
                    if seen.names.issubset(record.unregistered):
                        cause = "unregistered parameter"
                        detail += ". The optimizer holds it, but the module does not register it: DDP does not know it"
                    elif seen.stage == "optimizer options" and difference.name.startswith("lr") and record.plateaus:
                        cause = "unsynchronised schedule"
                    elif seen.stage == "buffers" and self.facts.replicas is not None:
                        cause = "buffers of one rank"
                    elif seen.stage == "buffers":
                        cause = "buffers of one rank"
                        detail += ". fully_shard sends no buffers to other ranks"
                    elif self.facts.sharded and seen.stage == "reduced gradient":
                        detail += ". fully_shard does not know it, so nothing averages its gradient"
                        advice = "call fully_shard on the root module, too, or on one that has this parameter"
                    location = self._location_of_tensor(record, seen)
                    if cause == "unregistered parameter":
                        location = of_use(difference.name, record.steps[seen.step])
                    elif seen.stage == "reduced gradient":
                        location = of_backward(record.steps[seen.step])
                    finding = Finding(cause, seen.stage, detail, seen.step, advice=advice)
                    findings.append(_with_location(finding, location))
        return findings

    def _keeps_buffers_equal(self) -> bool:
        """Return whether buffers must be equal on all ranks after a step.

        Shards have no broadcast of buffers. Of replicas, `GradAvgStrategy` raises an error where they differ.
        """
        return self.facts.sharded or self.facts.replicas is not None

    def _first_logged_difference(self, alone: Record, compared_steps: int) -> Finding | None:
        """Return the first value that all ranks logged alike, as with `sync_dist`, and that differs."""
        number = min(compared_steps, *(len(record.steps) for record in self.records))
        for position in range(number):
            expected_step = alone.steps[position]
            steps = [record.steps[position] for record in self.records]
            found, expected = {}, {}
            for name, value in steps[0].logged.items():
                is_alike = all(step.logged.get(name) == value for step in steps[1:])
                if is_alike and name in expected_step.logged:
                    found[name] = torch.tensor([value], dtype=torch.float64)
                    expected[name] = torch.tensor([expected_step.logged[name]], dtype=torch.float64)
            differences = compare_tensors(found, expected, 10 * self.tolerance, together=False)
            if differences:
                detail = f"{differences[0].name} was logged by all ranks; the training is the same"
                finding = Finding("logged value", "logged values", detail, position, differences[0])
                return _with_location(finding, of_logged_value(differences[0].name, self.records[0]))
        return None


def _with_location(finding: Finding, location: Location | None) -> Finding:
    """Return a finding that names a module and a line, as far as these are known."""
    if location is None:
        return finding
    return replace(finding, module=location.module, line=location.line, where=str(location))


def _at(place: Place | None) -> str:
    """Return what a remark on random numbers says of the place where they are drawn."""
    if place is None:
        return ""
    return str(Location("; drawn in", place))


def _are_same_draws(draws: Sequence[Draw], others: Sequence[Draw]) -> bool:
    """Return whether two micro-batches drew in the same way."""
    if len(draws) != len(others):
        return False
    for draw, other in zip(draws, others, strict=True):
        if (draw.operator, draw.dim) != (other.operator, other.dim):
            return False
    return True


def _first_other_draw(draws: Sequence[Draw], others: Sequence[Draw]) -> Place | None:
    """Return where the micro-batch that draws more often first draws otherwise than the other."""
    more, fewer = draws, others
    if len(others) > len(draws):
        more, fewer = others, draws
    for draw, other in zip_longest(more, fewer):
        if draw != other:
            return draw.place
    return None


def _traces_of(of_whole: StepResult, of_parts: Sequence[StepResult]) -> _Traces:
    parts: list[Followed] = []
    for result in of_parts:
        parts += result.followed
    return _Traces(of_whole.followed, parts)


def _gathers(records: Sequence[Record]) -> set[str]:
    """Return the names of the collective operations that gathered something."""
    gathers: set[str] = set()
    for record in records:
        gathers.update(name for name in record.collectives if "gather" in name)
    return gathers


def _place_in_run(finding: Finding) -> tuple[int, bool]:
    # Buffers that differ between the ranks may follow from what differs earlier in the step.
    return finding.step, finding.stage == "buffers"


def _is_note(finding: Finding) -> bool:
    return finding.note


class _EpochCounts(NamedTuple):
    """Numbers of samples in an epoch."""

    alone: int  # that one process reads
    on_ranks: int  # that the ranks read together
    dropped: int  # the most that `drop_last` leaves out: the largest batch of each rank
    missing: int  # that no rank reads; negative if the ranks read more samples that one process does not have
    repeated: int  # that the ranks read more often than one process
    strange: int  # from data that one process does not have


class _SampleComparison:
    """Whether the ranks together read what one process reads: each sample as often, in the same order and batches.

    `compare` fills `findings` and `remarks`. A remark is on what the compared steps do not show.

    Args:
        records: What the ranks recorded.
        alone: What one process reads.
    """

    def __init__(self, records: Sequence[Record], alone: Reading) -> None:
        self.findings: list[Finding] = []
        self.remarks: list[str] = []
        self._records, self._facts, self._world_size = records, records[0].facts, len(records)
        readings = [alone, *(record.reading for record in records)]
        self._is_complete = all(reading.is_complete for reading in readings)
        self._drops_last = any(reading.drops_last for reading in readings)
        self._shuffles = any(reading.shuffles for reading in readings)
        self._own_sampler = any(reading.own_sampler for reading in readings)
        self._replaces = any(reading.replaces for reading in readings)
        # An epoch, on one process and on the ranks.
        self._stream: list[SampleId] = [sample for batch in alone.batches for sample in batch]
        self._in_stream = Counter(self._stream)
        self._sources = {sample[0] for sample in self._stream}
        self._batches_of_ranks = [record.reading.batches for record in records]
        # The compared steps: what all ranks took, and the epoch.
        self._steps: list[list[MicroBatch]] = []
        for steps in zip(*(record.steps for record in records), strict=False):
            taken = []
            for step in steps:
                taken += [micro_batch for micro_batch in step.micro_batches if micro_batch.counts]
            self._steps.append(taken)
        self._epochs = [step.epoch for step in records[0].steps]

    def compare(self) -> None:
        """Compare the samples of the steps and of an epoch."""
        if self._is_stream_of_every_rank():
            detail = (
                f"all {self._world_size} ranks read the same samples in the same order: the global batch is one rank's"
            )
            finding = Finding("duplicated stream", "samples", detail)
            self.findings.append(_with_location(finding, of_stream(self._records[0])))
            return
        self._look_at_later_windows()
        self._compare_epochs()
        self._compare_order()

    def _is_stream_of_every_rank(self) -> bool:
        """Return whether all ranks take the same samples in every step, and their epoch cannot say more about it."""
        for taken in self._steps:
            if self._world_size == 1 or len(taken) < self._world_size:
                return False
            if any(micro_batch.sample_ids != taken[0].sample_ids for micro_batch in taken):
                return False
        # A complete epoch shows how many samples are repeated, which `_compare_epochs` says.
        if not self._is_complete or self._own_sampler:
            return True
        return not any(sample in self._in_stream for sample in _samples_of(self._steps[0]))

    def _look_at_later_windows(self) -> None:
        """Remark on a window beyond the compared steps in which not every micro-batch counts as its samples do.

        Only a mean without weights can be wrong there. If the compared steps have micro-batches of different sizes and
        nothing differed, the sizes do not decide how much a micro-batch counts, and each of them counts the same.
        """
        facts, window = self._facts, max(1, self._facts.accumulation)
        if not facts.automatic or facts.rule.uses_weight or not facts.rule.name.startswith("mean"):
            return
        compared_batches = sum(len(step.micro_batches) for step in self._records[0].steps)
        known_batches = min(len(batches) for batches in self._batches_of_ranks)
        sizes_count = known_batches > 0
        for taken in self._steps:
            if len({micro_batch.size for micro_batch in taken}) != 1:
                sizes_count = False
        end = min(facts.epoch_batches, _MOST_BATCHES)
        if known_batches > 0:
            end = min(end, known_batches)
        first_start = math.ceil(compared_batches / window) * window
        for start in range(first_start, int(end), window):
            stop = min(start + window, int(end))
            sizes = [1] * (stop - start) * self._world_size
            if sizes_count:
                sizes = [len(batch) for batches in self._batches_of_ranks for batch in batches[start:stop]]
            # Stock DDP divides a short window by the full number of micro-batches.
            divisor = window * self._world_size
            if facts.is_gradavg:
                divisor = len(sizes)
            if all(size * divisor == sum(sizes) for size in sizes):
                continue
            of_samples = ""
            if sizes_count:
                of_samples = f" of {' and '.join(str(size) for size in sorted(set(sizes)))} samples"
            self.remarks.append(
                f"beyond the compared steps, from batch {start} on, a window has {len(sizes)} micro-batches"
                f"{of_samples}, whose means {facts.strategy} adds up and divides by {divisor}"
            )
            return

    def _number_of_strange(self, samples: Counter[SampleId]) -> int:
        """Return how many of these samples one process does not have; of a data set it has all or none."""
        return sum(number for sample, number in samples.items() if sample[0] not in self._sources)

    def _compare_epochs(self) -> None:
        """Find samples that an epoch never reads, or reads more than once, or that one process does not have.

        | in an epoch | result |
        |---|---|
        | it cannot be read to its end, or samples are drawn with replacement | nothing |
        | there are samples that one process does not have | a remark, and then as below |
        | all samples are read once, but for a last batch that is dropped | nothing |
        | a sampler of the user's own leaves out or repeats samples | a remark |
        | samples are never read | "unread samples" |
        | every sample is read again | "duplicated stream", or a remark if it is beyond the compared steps |
        | some samples are read again | "padding", or a remark if it is beyond the compared steps |
        """
        if self._replaces or not self._is_complete:
            return
        epoch = self._count_epoch()
        # With `drop_last`, one process may leave out samples of a stream that the ranks read.
        expected_strange = epoch.dropped if self._drops_last else 0
        some_are_known = epoch.strange < epoch.on_ranks
        are_more = epoch.missing < 0 and not self._facts.splits_batches
        if epoch.strange > expected_strange and (some_are_known or are_more):
            self.remarks.append(
                f"{epoch.strange} of the {epoch.on_ranks} samples of an epoch are none of the {epoch.alone} of one"
                " process: they may be transformed at random"
            )
        if epoch.missing <= epoch.dropped and epoch.repeated == 0:
            return
        if self._own_sampler:
            self.remarks.append(
                f"by a sampler of your own, the ranks leave out {epoch.missing} samples of one process and add"
                f" {epoch.repeated}"
            )
        elif epoch.missing > epoch.dropped:
            detail = f"{epoch.missing} of the {epoch.alone} samples of an epoch are never read"
            self.findings.append(Finding("unread samples", "samples", detail))
        elif epoch.repeated >= epoch.alone:
            self._add_repeated("duplicated stream", "every rank reads all samples of an epoch")
        else:
            self._add_repeated("padding", f"{epoch.repeated} samples of an epoch are read twice, to fill the ranks")

    def _count_epoch(self) -> _EpochCounts:
        on_ranks = Counter[SampleId]()
        dropped = 0
        for batches in self._batches_of_ranks:
            dropped += max((len(batch) for batch in batches), default=0)
            for batch in batches:
                on_ranks.update(batch)
        surplus = on_ranks - self._in_stream
        unknown = sum(number for sample, number in surplus.items() if sample not in self._in_stream)
        repeated = surplus.total() - unknown
        if self._facts.splits_batches:
            repeated = 0  # all ranks read every batch, and each takes its chunk
        return _EpochCounts(
            alone=self._in_stream.total(),
            on_ranks=on_ranks.total(),
            dropped=dropped,
            # A sample that a rank changed is unknown, and the sample itself is not missing.
            missing=(self._in_stream - on_ranks).total() - unknown,
            repeated=repeated,
            strange=self._number_of_strange(on_ranks),
        )

    def _add_repeated(self, cause: str, detail: str) -> None:
        """Add a finding if samples are repeated within the compared steps, and a remark if they are beyond them."""
        read = Counter[SampleId]()
        for taken, epoch in zip(self._steps, self._epochs, strict=False):
            if epoch == self._epochs[0]:
                read.update(_samples_of(taken))
        repeated = read - self._in_stream
        if any(sample in self._in_stream for sample in repeated):
            finding = Finding(cause, "samples", detail)
            if cause == "duplicated stream":
                finding = _with_location(finding, of_stream(self._records[0]))
            self.findings.append(finding)
        else:
            self.remarks.append(f"beyond the compared steps, {detail}")

    def _compare_order(self) -> None:
        """Find the first global batch that is not what one process reads at that place of its epoch.

        | the batch has | result |
        |---|---|
        | samples that one process does not have, in an order that is free | "data order" as a note |
        | samples that one process does not have, in any other order | a remark |
        | samples of one process, in an order that is free, or rising on every rank | "data order" as a note |
        | samples of one process, in any other order | "data order" |
        """
        start = 0
        for position, taken in enumerate(self._steps):
            # One process goes on where a step as large as that of the ranks ended.
            on_ranks = Counter(_samples_of(taken))
            total = on_ranks.total()
            expected = Counter(self._stream[start : start + total])
            start += total
            # One epoch of one process is known. A sampler of the user's own is remarked on in `_compare_epochs`.
            if self._own_sampler or self._epochs[position] != self._epochs[0] or not expected:
                return
            if on_ranks == expected:
                continue
            strange = self._number_of_strange(on_ranks)
            of_strange = (
                f"{strange} of the {total} samples of the step are none of those of one process: they may be"
                " transformed at random"
            )
            if strange == total and (self._shuffles or self._facts.splits_batches):
                self.findings.append(Finding("data order", "samples", of_strange, position, note=True))
                return
            if strange == total:
                self.remarks.append(of_strange)
                return
            if strange > 0 and not self._is_complete:
                self.remarks.append(of_strange)
            alike = (on_ranks & expected).total()
            detail = f"{alike} of this step's {total} samples are also in the matching one-process step"
            is_note = self._shuffles or self._every_rank_reads_in_order()
            self.findings.append(Finding("data order", "samples", detail, position, note=is_note))
            return

    def _every_rank_reads_in_order(self) -> bool:
        """Return whether the samples of every rank, in all compared steps, rise in the order of one process."""
        places = {sample: place for place, sample in enumerate(self._stream)}
        for record in self._records:
            places_of_rank = []
            for step in record.steps:
                taken = [micro_batch for micro_batch in step.micro_batches if micro_batch.counts]
                places_of_rank += [places.get(sample, -1) for sample in _samples_of(taken)]
            if any(place >= next_place for place, next_place in pairwise(places_of_rank)):
                return False
        return True


def _samples_of(micro_batches: Sequence[MicroBatch]) -> Iterator[SampleId]:
    for micro_batch in micro_batches:
        yield from micro_batch.sample_ids


class _Evidence:
    """What is known of one step whose reduced gradient differs.

    Gradients are vectors of the sketches of those parameters that differ.

    Args:
        twin: Trains one process up to the step, once for each micro-batch alone, and once for all.
        seen: The difference.
        tolerance: The largest relative difference that counts as equal.

    Attributes:
        near: The largest relative difference up to which a combination of gradients is another gradient.
        world_size: The number of ranks.
        factor: `G` / `F`, if that is one number.
        multiple: The same in words.
        group: The micro-batches of all ranks.
        micro_batches: The same, without their places.
        parts: `P`, a row for each micro-batch.
        traces: The calls of `training_step`.
        losses: The losses of one process for each of them.
        whole: `F`.
        loss: The loss of one process for all of them.
        reduced: `G`.
        like: Sketches that have the names and the order of the vectors.
    """

    def __init__(self, twin: Twin, seen: Seen, tolerance: float) -> None:
        self.twin, self.seen = twin, seen
        self.facts = twin.records[0].facts
        self.near = 100 * tolerance
        self.world_size = len(twin.records)
        self.factor = seen.difference.factor
        self.multiple = _multiple_in_words(self.factor)
        self.group = twin.group_of_step(seen.step)
        self.micro_batches = [rank_batch.micro_batch for rank_batch in self.group]
        of_parts = [twin.train_step([rank_batch], seen.step, follows=True) for rank_batch in self.group]
        of_whole = twin.train_step(self.group, seen.step, follows=True)
        self.traces = _traces_of(of_whole, of_parts)
        self.losses = [result.loss for result in of_parts]
        self.loss = of_whole.loss
        # A part may have no gradient of a parameter, as of an embedding that its samples do not use.
        self.like: dict[str, Tensor] = {}
        for tensors in (*(result.gradient for result in of_parts), of_whole.gradient, seen.found):
            for name, tensor in tensors.items():
                if name in seen.names:
                    self.like[name] = tensor
        self.parts = torch.stack([flat(result.gradient, self.like) for result in of_parts])
        self.whole = flat(of_whole.gradient, self.like)
        self.reduced = flat(seen.found, self.like)

    @cached_property
    def shares(self) -> Mapping[str, Tensor]:
        """The named combinations: which share each micro-batch has, by what decides on it."""
        amounts = {
            "samples": [float(micro_batch.size) for micro_batch in self.micro_batches],
            "mean": [1.0] * len(self.micro_batches),
        }
        weights = [micro_batch.weight for micro_batch in self.micro_batches if micro_batch.weight is not None]
        if len(weights) == len(self.micro_batches):
            amounts["weights"] = weights
        shares: dict[str, Tensor] = {}
        for name in ("samples", "weights", "mean"):  # where several are right, reports show the first
            if name in amounts and sum(amounts[name]) > 0:
                of_name = torch.tensor(amounts[name], dtype=torch.float64)
                shares[name] = of_name / of_name.sum()
        return shares

    def factors(self, gradient: Tensor) -> Mapping[str, float]:
        """Return which of the named combinations a gradient is a multiple of, and which multiple."""
        factors: dict[str, float] = {}
        for name, shares in self.shares.items():
            counts = shares != 0  # a micro-batch without a share may have a gradient of NaN
            factor = multiple_of(gradient, shares[counts] @ self.parts[counts], self.near)
            if factor is not None:
                factors[name] = factor
        return factors

    def solved_shares(self, gradient: Tensor) -> Tensor | None:
        """Return the shares with which the parts make up a gradient; None if no shares do, or many could."""
        # With fewer elements than parts, or with parts that depend on each other, many shares make the same gradient.
        number = len(self.parts)
        if len(gradient) <= number or not gradient.isfinite().all() or not self.parts.isfinite().all():
            return None
        if int(torch.linalg.matrix_rank(self.parts, rtol=1e-9)) < number:
            return None
        scale = float(self.parts.abs().max())
        solution = torch.linalg.lstsq(self.parts.T / scale, (gradient / scale).unsqueeze(1)).solution
        shares: Tensor = solution[:, 0]
        if gap_between(gradient, shares @ self.parts) <= self.near:
            return shares
        return None

    @cached_property
    def right(self) -> Mapping[str, Tensor]:
        """The combinations of the parts that are the whole: by name, or "terms" with shares of their own."""
        right: dict[str, Tensor] = {}
        number = len(self.micro_batches)
        factors = self.factors(self.whole)
        for name, factor in factors.items():
            if self.is_close(factor, 1):
                right[name] = self.shares[name]
        if "mean" in factors and self.is_close(factors["mean"], number):
            right["sum"] = self.shares["mean"] * number
        if right:
            return right
        shares = self.solved_shares(self.whole)
        # A loss that is a mean over terms has shares of its numbers of terms, which are not negative and add up to 1.
        if shares is not None and float(shares.min()) > -self.near and self.is_close(float(shares.sum()), 1):
            right["terms"] = shares
        return right

    def is_close(self, factor: float, expected: float) -> bool:
        """Return whether a factor is another, but for rounding."""
        return math.isclose(factor, expected, rel_tol=self.near)


def _is_plain_mean(evidence: _Evidence) -> bool:
    """Return whether the run takes the plain mean of its micro-batches."""
    rule = evidence.facts.rule
    if not rule.uses_weight:
        return rule == RULES["mean"]
    shares = evidence.shares
    weights = shares.get("weights", shares["samples"])
    return torch.equal(weights, shares["mean"])


def _multiple_in_words(factor: float | None) -> str:
    if factor is None:
        return "the gradient is another one"
    return f"the gradient is {factor:.4g} x that of one process"


def _listed(numbers: Tensor) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers.tolist())


def _loss_ratios(evidence: _Evidence) -> Tensor:
    """Return the loss of each micro-batch on its rank over that of the same samples on one process."""
    on_ranks = torch.tensor([micro_batch.loss for micro_batch in evidence.micro_batches], dtype=torch.float64)
    return on_ranks / torch.tensor(evidence.losses, dtype=torch.float64)


def _have_other_losses(evidence: _Evidence) -> bool:
    """Return whether a rank computed another loss than one process does of the same samples."""
    ratios = _loss_ratios(evidence)
    known_ratios = ratios[ratios.isfinite()]  # a loss of 0, or of a micro-batch without terms, has no ratio
    return bool(((known_ratios - 1).abs() > evidence.near).any())


def _of_combination(evidence: _Evidence) -> _Explanation | None:
    """Return which multiple or which other combination of the parts the run made, if it is a known one."""
    rule, number = evidence.facts.rule, len(evidence.micro_batches)
    # Gradients that differ by more than the tolerance, and less than `near`. Both are the same combination then.
    gap = gap_between(evidence.reduced, evidence.whole)
    if gap <= evidence.near:
        detail = "what the ranks keep for themselves, such as a state, may have changed them"
        return _Explanation("unexplained", f"the gradients differ by {gap:.2g} of the largest element: {detail}")
    factors = evidence.factors(evidence.reduced)
    if not factors:
        return None
    if "sum" in evidence.right and "sum" not in rule.name:
        return _Explanation("sum loss", f"{evidence.multiple}: the loss is a sum over samples")
    if "sum" in evidence.right:
        # Shares add up to 1, and the right gradient is `number` times the mean.
        factors = {name: factor / number for name, factor in factors.items()}

    made = [name for name, factor in factors.items() if evidence.is_close(factor, 1)]
    if made:
        # Where all micro-batches have equally many samples, several names are the same combination.
        is_mean = "mean" in made and (len(made) == 1 or not rule.uses_weight)
        return _of_shares(evidence, is_mean=is_mean)
    return _of_multiple(evidence, list(factors.values()))


def _of_multiple(evidence: _Evidence, factors: Sequence[float]) -> _Explanation | None:
    """Return why the run made one of these multiples of the right gradient, if it is a known one."""
    facts, ranks, number = evidence.facts, evidence.world_size, len(evidence.micro_batches)

    def are_multiplied_by(scale: float) -> bool:
        return any(evidence.is_close(factor, scale) for factor in factors)

    for divisor in evidence.twin.records[0].divisors:
        if divisor != ranks and are_multiplied_by(ranks / divisor):
            detail = f"fully_shard divides the sum over {ranks} ranks by {divisor:g}"
            return _Explanation("divide factor", f"{evidence.multiple}: {detail}")
    if are_multiplied_by(number / (ranks * facts.accumulation)):
        detail = f"the window has {number / ranks:g} micro-batches on each rank and is divided by {facts.accumulation}"
        return _Explanation("short window", f"{evidence.multiple}: {detail}")
    if are_multiplied_by(1 / ranks):
        detail = f"it is divided by the {ranks} ranks a second time"
        return _Explanation("double division", f"{evidence.multiple}: {detail}")
    if "sum" in facts.rule.name and are_multiplied_by(number):
        detail = "the loss is a mean, but the reduction adds up the ranks"
        return _Explanation("counts", f"{evidence.multiple}: {detail}")
    if are_multiplied_by(ranks):
        detail = f"it is multiplied by the {ranks} ranks"
        return _Explanation("hand-compensated loss", f"{evidence.multiple}: {detail}")
    return None


def _of_shares(evidence: _Evidence, *, is_mean: bool) -> _Explanation:
    """Return what to say of a gradient that is a combination of the parts, but not the right one."""
    right_shares = next(iter(evidence.right.values()))
    detail = f"one process weights the micro-batches by {_listed(right_shares)}, but the run weights them"
    if is_mean:
        return _Explanation("mean of means", f"{detail} equally: the ranks' losses have different numbers of terms")
    shares = evidence.solved_shares(evidence.reduced)
    how = "otherwise"
    if shares is not None:
        how = f"by {_listed(shares)}"
    return _Explanation("counts", f"{detail} {how}: the weights are not the numbers of terms")


def _of_change(evidence: _Evidence) -> _Explanation:
    """Return what was done to the ranks' gradients beyond combining them, if it is known."""
    if not evidence.reduced.any():
        return _Explanation("unexplained", "the run has no gradient, as if the ranks never reduced theirs")
    elements = []
    for name, sketch in evidence.like.items():
        gradient = evidence.seen.found.get(name)
        if gradient is None:
            gradient = torch.zeros_like(sketch)
        elements.append(gradient[:SKETCHED_ELEMENTS])  # a sum of numbers of 16 bits is none of them
    values = torch.cat(elements)
    for dtype in TYPES_OF_16_BITS:
        if values.any() and torch.equal(values.to(dtype).double(), values):
            name_of_type = str(dtype).removeprefix("torch.")
            return _Explanation("16-bit wire", f"every element of the gradient is a {name_of_type} number")
    if evidence.factor is None and any(micro_batch.piece_sizes for micro_batch in evidence.micro_batches):
        return _Explanation(
            "unexplained",
            "the ranks compute their batches in several parts, each of which may have a weight of its own: verify with"
            " as many processes as replicas, and without max_device_batch_size",
        )
    if evidence.factor is None:
        return _Explanation(
            "gradient hooks",
            "no known combination of what one process computes was made: each rank changes its own",
        )
    return _Explanation("unexplained", evidence.multiple)


def _of_losses(evidence: _Evidence) -> _Explanation:
    """Return why the ranks' losses are not those of one process."""
    ratios = _loss_ratios(evidence)
    detail = f"{evidence.multiple}; the ranks' losses are {_listed(ratios)} x those of the same samples on one process"
    compensated = ratios / len(ratios) @ evidence.parts
    multiple = multiple_of(compensated, evidence.whole, evidence.near)
    is_made = gap_between(evidence.reduced, compensated) <= evidence.near
    are_summed = any("reduce" in name for name in evidence.twin.records[0].step_operators)
    if is_made and are_summed and multiple is not None and evidence.is_close(multiple, 1 / evidence.world_size):
        again = f"a sum over all ranks divides them, and their average divides by the {evidence.world_size} ranks again"
        return _Explanation("global normaliser", f"{detail}: {again}")
    if torch.allclose(ratios * evidence.world_size, torch.ones_like(ratios), rtol=1e-4, atol=0.0):
        return _Explanation("double division", detail)
    if gap_between(evidence.whole, compensated) <= evidence.near:
        return _Explanation("hand-compensated loss", f'{detail}; with it `reduction="mean"` is right')
    if torch.allclose(ratios, ratios[0], rtol=evidence.near, atol=0.0):
        return _Explanation("hand-compensated loss", detail)
    return _Explanation("unexplained", detail)


def _of_whole(evidence: _Evidence) -> _Explanation:
    """Return why the gradient of a batch is no combination of those of its parts."""
    records = evidence.twin.records
    batch_norms = records[0].batch_norms
    # Replicas share their statistics over all ranks.
    if batch_norms and not evidence.facts.replicated:
        return _Explanation(
            "batch norm",
            f"{evidence.multiple}, and each rank normalizes by its own samples, first in {batch_norms[0]!r}",
        )

    # A term that is there once for every batch: what two parts have more than the whole, so has a batch taken twice.
    surplus_of_parts = (evidence.parts.sum(0) - evidence.whole) / (len(evidence.parts) - 1)
    twice = evidence.twin.train_step([*evidence.group, *evidence.group], evidence.seen.step).gradient
    surplus_of_twice = 2 * evidence.whole - flat(twice, evidence.like)
    if gap_between(surplus_of_twice, surplus_of_parts) <= 10 * evidence.near:
        return _Explanation(
            "constant term",
            "the losses of two parts of a batch add up to its loss and one more term, which depends on no sample",
        )

    # A gather without gradient leaves the loss as it is. A loss that lacks the other ranks' samples is another one.
    gathers = _gathers(records)
    losses = [micro_batch.loss for micro_batch in evidence.micro_batches]
    if gathers and math.isclose(sum(losses) / len(losses), evidence.loss, rel_tol=1e-7):
        return _Explanation(
            "detached gather",
            "the ranks' losses are those of one process, but the gradient is not: what"
            f" {', '.join(sorted(gathers))} brought from other ranks carries no gradient",
        )
    detail = (
        f"{evidence.multiple}, and that of a batch is not a combination of those of its parts: the loss, or a hook,"
        " looks at all samples"
    )
    operators = records[0].step_operators
    if ROW_PRODUCT in operators:
        return _Explanation("contrastive loss", f"{detail}; training_step multiplies them with each other")
    for operator, advice in _ADVICE_BY_OPERATOR.items():
        if operator in operators:
            name = operator.removeprefix("aten.")
            return _Explanation("non-decomposable loss", f"{detail}; training_step has {name}", advice)
    return _Explanation("non-decomposable loss", detail)
