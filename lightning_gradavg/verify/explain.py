"""The judgement of a run: what it reads otherwise than one process, where it first differs in training, and why.

`P` are the gradients that one process computes of each micro-batch alone, `F` that of all samples at once, and `G` what
the run made of them. The combination of `P` that is `F` is *right*, the one that is `G` is what was *done*. Where they
differ, their names say why. Where no combination of `P` is `F`, samples are compared with each other: by batch norm, by
a hook, or by the loss.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice, pairwise
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_gradavg.lightning_internals import BatchNorm, without_gradient_hooks
from lightning_gradavg.verify.record import Read, Refused, Step, Tape, Tensors
from lightning_gradavg.verify.report import CAUSES, STAGES, Finding, Report, Stage, times
from lightning_gradavg.verify.target import Settings
from lightning_gradavg.verify.twin import Build, Seen, Twin, difference, differences, flat, gap_between

__all__ = ["judge"]

_BESIDE_DRAWS = ("initial weights", "optimizer options")  # do not depend on what is drawn
_OF_COMBINATIONS = (
    *("short window", "mean of means", "sum loss", "counts", "double division", "constant term"),
    *("bf16 wire", "fp16 wire", "gradient hooks", "learning-rate scale", "optimizer options"),
)
_OF_STATE = (
    "one process that accumulates the same micro-batches trains the same, and one that takes them as one batch does"
    " not: something counts or keeps state for every micro-batch, or compares samples within one"
)
_OF_DRAWS = "it belongs to no sample; every rank draws its own, and one process draws one"
_BETWEEN_RANKS = {
    "initial weights": ("unsynchronised replicas", "rank {rank} starts with different weights than rank 0"),
    "reduced gradient": ("unsynchronised replicas", "rank {rank} steps with a different gradient than rank 0"),
    "clipped gradient": ("unsynchronised replicas", "rank {rank} clips to a different gradient than rank 0"),
    "optimizer options": ("different optimizers", "rank 0 and rank {rank} have different optimizers: {name}"),
    "weights": ("unsynchronised replicas", "rank {rank} has different weights than rank 0 after the step"),
}
_OF_STAGES = {
    "initial weights": ("initial weights", "the run starts with different values than one process"),
    "clipped gradient": (
        "unexplained",
        "the gradient equals that of one process before clipping, but not afterwards",
    ),
    "optimizer options": ("optimizer options", ""),
    "weights": ("weights beside the gradient", "the optimizer was given what one process gives it"),
    "buffers": ("buffers of one rank", "{name} is not that of one process after the step; gradient and weights are"),
}
_MEANS = ("mean", "mean of the ranks' means")
_WEIGHED = ("weights", "samples")
_OF_TERMS = frozenset({"samples", "weights", "terms", "mean"})
_SUM = frozenset({"sum"})
_RIGHT = ("samples", "weights", "sum", "mean")
_TWICE = ("divided twice", "samples, divided twice", "weights, divided twice")
_WIRES = {"bf16 wire": torch.bfloat16, "fp16 wire": torch.float16}
_MOST_BATCHES = 20_000  # of an epoch whose windows are looked at
_ELEMENTS = 2048  # of a sketch; the others are sums


class _Sign(NamedTuple):
    """What a cause shows by: what was done, what would be right, and the detail."""

    cause: str
    done: Sequence[str]
    right: frozenset[str]
    detail: str


_SIGNS = (
    _Sign("sum loss", (*_MEANS, *_WEIGHED, "configured window"), _SUM, "{multiple}: the loss is a sum over samples"),
    _Sign(
        "short window",
        ("configured window",),
        _OF_TERMS,
        "{multiple}: the window has {length:g} micro-batches on each rank and is divided by {window}",
    ),
    _Sign("double division", _TWICE, _OF_TERMS, "{multiple}: it is divided by the {ranks} ranks a second time"),
    _Sign("counts", ("sum",), _OF_TERMS, "{multiple}: the loss is a mean, but the reduction adds up the ranks"),
    _Sign("counts", _WEIGHED, _OF_TERMS, "{shares}: the weights are not the numbers of terms"),
    _Sign("mean of means", _MEANS, _OF_TERMS, "{shares} equally: the ranks' losses have different numbers of terms"),
    _Sign("hand-compensated loss", ("multiplied",), _OF_TERMS, "{multiple}: it is multiplied by the {ranks} ranks"),
    _Sign("unsynchronised replicas", ("alone",), _OF_TERMS | _SUM, "the gradient is that of one rank alone"),
)


def judge(tapes: Sequence[Tape], build: Build, settings: Settings) -> Report:
    """Return how a run, as all ranks recorded it, differs from one process, and why."""
    facts, problems = tapes[0].facts, [tape.problem for tape in tapes if tape.problem]
    if problems or not all(tape.steps for tape in tapes):
        stages = [Stage(name, "not compared") for name in STAGES]
        remarks = [*problems, "the run took no optimizer step"][:1]
        return Report(facts.strategy, facts.rule.name, len(tapes), 0, math.nan, stages, remarks=remarks)
    twin = Twin(tapes, build, not settings.single, settings.accelerator)
    return _Judge(tapes, twin, settings.largest_difference).report(order=settings.compare_order)


class _Judge:
    def __init__(self, tapes: Sequence[Tape], twin: Twin, tolerance: float) -> None:
        self.tapes, self.twin, self.tolerance = tapes, twin, tolerance

    def report(self, *, order: bool) -> Report:
        """Compare, and put together what was found."""
        alone, facts, gradients = self.twin.run(), self.tapes[0].facts, dict[str, list[float]]()
        found, steps, remarks = None, len(alone.steps), list[str]()
        try:
            seen = self._first(alone, gradients)
            steps = steps if seen is None else seen.step
            found = None if seen is None else self._finding(alone, seen)
        except Refused as error:
            remarks.append(str(error))
        if drawn := {name: None for each in (*self.tapes, alone) for name in each.shared}:
            remarks.insert(0, f"one draw for a whole batch ({', '.join(drawn)}): {_OF_DRAWS}")
            found = found if found is not None and found.stage in _BESIDE_DRAWS else None
        of_ranks = next(self._between_ranks(), None)
        found = of_ranks if of_ranks is not None and (found is None or of_ranks.step <= found.step) else found
        findings = [] if found is None else [found]
        if not remarks and (found is None or found.stage != "initial weights"):
            findings += self._logged(alone, steps)
        of_samples, more = _differences_in_reading(self.tapes, alone.read) if order else ([], [])
        findings, remarks = [*findings, *of_samples], [*remarks, *more]
        findings.sort(key=lambda each: (each.note, each.step, STAGES.index(each.stage)))
        used = {"split_batches": facts.splits_batches, "equivalent_to": facts.replicated, "GradAvgStrategy": facts.ours}
        given = [name for name, there in used.items() if there]
        remedies = [CAUSES[each.cause].remedy(facts.strategy, facts.rule.name, given) for each in findings]
        steps = steps if found is None else found.step + 1
        return Report(
            facts.strategy,
            facts.rule.name,
            len(self.tapes),
            steps,
            self.tolerance,
            list(_stages(findings, found, steps)),
            [replace(one, advice=advice, diff=diff) for one, (advice, diff) in zip(findings, remedies, strict=True)],
            gradients,
            list(dict.fromkeys(remarks)),
            "float64" if self.twin.double else "float32",
        )

    def _first(self, alone: Tape, gradients: dict[str, list[float]] | None = None) -> Seen | None:
        """Return the first difference in training to a run on one process.

        Raises:
            Refused: If there is no telling.
        """
        seen = next(differences(self.tapes[0], alone, self.tolerance, gradients), None)
        if seen is None and alone.problem:
            raise Refused(alone.problem)
        return seen

    def _finding(self, alone: Tape, seen: Seen) -> Finding:
        """Return the finding of the first difference.

        Raises:
            Refused: If something other than a fault makes it.
        """
        stage, found = seen.stage, seen.difference
        cause, text = _OF_STAGES.get(stage) or self._of_gradient(seen)
        if stage == "buffers" and found.name.rpartition(".")[0] in alone.batch_norms:
            cause = "batch norm"
        if stage == "optimizer options":
            cause = "learning-rate scale" if found.name.startswith("lr") else cause
            text = f"{found.name} is {found.found:.6g}, but {found.expected:.6g} on one process"
        if stage not in _BESIDE_DRAWS:
            self._require_no_other_reason(alone, seen.step, cause)
        told = None if stage == "optimizer options" else found
        return Finding(cause, stage, text.replace("{name}", found.name), seen.step, told)

    def _of_gradient(self, seen: Seen) -> tuple[str, str]:
        """Return the cause and the detail of a step whose reduced gradient differs.

        Raises:
            Refused: If what was compared depends on more than the samples.
        """
        if not self.twin.tapes[0].facts.automatic:
            return _by_factor(seen.difference.factor, len(self.tapes))
        known = _Evidence(self.twin, seen, self.tolerance)
        known.require_any_order()
        return _of_parts(known) if known.right else _of_whole(known)

    def _require_no_other_reason(self, alone: Tape, position: int, cause: str) -> None:
        drawn = alone.steps[position].taken[-1].trace
        of_ranks = [taken for tape in self.tapes for taken in tape.steps[position].taken if taken.counts]
        for taken in (taken for taken in of_ranks if taken.trace != drawn):
            names = dict.fromkeys(name for name, _ in [*taken.trace, *drawn])
            raise Refused(f"a batch of another size draws other random numbers ({', '.join(names)})")
        if len(self.tapes[0].steps[position].taken) > 1 and cause not in _OF_COMBINATIONS:
            try:
                seen = self._first(self.twin.windowed())
            except Refused:
                return
            if seen is None or seen.step > position:
                raise Refused(_OF_STATE)

    def _between_ranks(self) -> Iterator[Finding]:
        """Yield where the ranks first differ from each other."""
        for other in self.tapes[1:]:
            with suppress(Refused):
                for seen in differences(other, self.tapes[0], self.tolerance):
                    if seen.stage in _BETWEEN_RANKS:
                        cause, text = _BETWEEN_RANKS[seen.stage]
                        text = text.format(rank=other.rank, name=seen.difference.name)
                        yield Finding(cause, seen.stage, text, seen.step, seen.difference)

    def _logged(self, alone: Tape, steps: int) -> list[Finding]:
        """Return the first value that all ranks logged alike, as with `sync_dist`, and that differs."""
        of_steps = zip(alone.steps[:steps], *(tape.steps for tape in self.tapes), strict=False)
        for position, (mine, *of_ranks) in enumerate(of_steps):
            if any(len(step.taken) > 1 for step in of_ranks):
                continue
            first = of_ranks[0].logged
            alike = {name for name in first if all(step.logged.get(name) == first[name] for step in of_ranks)}
            names = [name for name in mine.logged if name in alike]
            found, expected = (
                {name: torch.tensor([values[name]], dtype=torch.float64) for name in names}
                for values in (first, mine.logged)
            )
            seen, _ = difference(found, expected, 10 * self.tolerance, together=False)
            if seen is not None:
                text = f"{seen.name} was logged by all ranks; the training is the same"
                return [Finding("logged value", "logged values", text, position, seen)]
        return []


class _Reading:
    """Whether the ranks together read what one process reads: each sample as often, in the same order and batches."""

    def __init__(self, tapes: Sequence[Tape], alone: Read) -> None:
        self.tapes, self.alone = tapes, alone
        self.facts = tapes[0].facts
        reads = [alone, *(tape.read for tape in tapes)]
        self.complete, self.chosen = all(each.complete for each in reads), any(each.chooses for each in reads)
        self.shuffled = any(each.shuffles for each in reads)
        self.stream = [one for batch in alone.batches for one in batch]
        self.there = Counter(self.stream)
        self.of_ranks = [tape.read.batches for tape in tapes]
        of_steps = zip(*(tape.steps for tape in tapes), strict=False)
        self.taken = [[one for step in steps for one in step.taken if one.counts] for steps in of_steps]
        self.steps = [[one.ids for one in taken] for taken in self.taken]
        self.epochs = [step.epoch for step in tapes[0].steps]

    def repeated(self) -> Iterator[Finding]:
        """Yield a finding of samples that are trained on more often in an epoch than by one process."""
        world, seen = len(self.tapes), Counter[Hashable]()
        alike = all(len(each) >= world > 1 and len(set(each)) == 1 and None not in each[0] for each in self.steps)
        for position, batches in enumerate(self.steps):
            here = Counter(one for batch in batches for one in batch if one is not None)
            seen = here + (seen if position and self.epochs[position] == self.epochs[position - 1] else Counter())
            known = self.alone.complete and not self.chosen
            more = sum(max(0, count - self.there[one]) for one, count in seen.items() if known and self.there[one])
            if alike and (more or not known or not here.keys() & self.there.keys()):
                text = f"all {world} ranks read the same samples in the same order: the global batch is one rank's"
                yield Finding("duplicated stream", "samples", text, position)
            elif more and not self.facts.splits_batches:
                text = f"{more} of {seen.total()} samples are trained on more often than by one process"
                yield Finding("padding", "samples", text, position)

    def lengths(self) -> Iterator[str]:
        """Yield a remark on a window beyond the steps in which not every micro-batch counts as its samples do."""
        facts, window, world = self.facts, max(1, self.facts.accumulation), len(self.tapes)
        taken, known = sum(len(step.taken) for step in self.tapes[0].steps), min(map(len, self.of_ranks))
        even = all(len({one.size for one in each}) == 1 for each in self.taken)
        if not facts.automatic or facts.rule.uses_weight or not facts.rule.name.startswith("mean"):
            return
        number = int(min(known or math.inf, facts.epoch_batches, _MOST_BATCHES))
        for start in range(-(-taken // window) * window, number, window):
            stop = min(start + window, number)
            held = [len(batch) for batches in self.of_ranks for batch in batches[start:stop]]
            held = held if even and known else [1] * (stop - start) * world
            divisor = len(held) if facts.ours else window * world
            if any(size * divisor != sum(held) for size in held):
                sizes = f" of {' and '.join(map(str, sorted(set(held))))} samples" if even and known else ""
                yield (
                    f"beyond the compared steps, from batch {start} on, a window has {len(held)} micro-batches{sizes},"
                    f" whose means {facts.strategy} adds up and divides by {divisor}"
                )
                return

    def coverage(self) -> Iterator[Finding | str]:
        """Yield what is said of samples that an epoch never reads, or reads more than once."""
        here = Counter(one for batches in self.of_ranks for batch in batches for one in batch)
        dropped = sum(max(map(len, batches), default=0) for batches in self.of_ranks)  # what drop_last leaves out
        known, total = here.keys() & self.there.keys(), self.there.total()
        missing = (self.there - here).total() if known else total - here.total()
        more = sum(max(0, here[one] - self.there[one]) for one in known)
        dealt = not self.facts.ours or any(tape.read.dealt for tape in self.tapes)  # else these are stand-ins
        if self.chosen or not self.complete:
            return
        if missing > dropped:
            text = f"{missing} of the {total} samples of an epoch are never read"
            yield Finding("unread samples", "samples", text)
        elif more and not self.facts.splits_batches and (dealt or more >= total):
            how = "every rank reads all" if more >= total else f"the sampler repeats {more} samples, to fill the ranks"
            yield f"beyond the compared steps {how}: they are trained on twice in an epoch"

    def order(self) -> Iterator[Finding | str]:
        """Yield the first global batch that is not what one process reads at that place of its epoch."""
        free = self.shuffled or self.facts.splits_batches
        left, places = self.stream, {one: index for index, one in enumerate(self.stream)}
        for position, batches in enumerate(self.steps):
            here = Counter(one for batch in batches for one in batch)
            there, left = Counter(left[: here.total()]), left[here.total() :]
            if self.chosen or self.epochs[position] != self.epochs[0] or not there:
                return
            if here == there:
                continue
            if not self.there.keys() & here.keys():
                text = "no sample is one that one process reads: they may be transformed at random"
                yield Finding("data order", "samples", text, position, note=True) if free else text
                return
            taken = ([one for step in t.steps for one in step.taken if one.counts] for t in self.tapes)
            read = ([places.get(one, -1) for each in of_rank for one in each.ids] for of_rank in taken)
            rising = all(one < other for of_rank in read for one, other in pairwise(of_rank))
            text = f"{(here & there).total()} of the {here.total()} samples of the step are those of one process there"
            yield Finding("data order", "samples", text, position, note=self.shuffled or rising)
            return


def _differences_in_reading(tapes: Sequence[Tape], alone: Read) -> tuple[list[Finding], list[str]]:
    """Return what ranks and one process read differently, and remarks on what the compared steps do not show."""
    reading = _Reading(tapes, alone)
    told: list[Finding | str] = [*islice(reading.repeated(), 1)]
    told = told or [*reading.lengths(), *reading.coverage(), *reading.order()]
    return [one for one in told if isinstance(one, Finding)], [one for one in told if isinstance(one, str)]


def _stages(findings: Sequence[Finding], found: Finding | None, steps: int) -> Iterator[Stage]:
    last = STAGES.index(found.stage) if found is not None and found.step == 0 else len(STAGES)
    for index, name in enumerate(STAGES):
        first = min((each for each in findings if each.stage == name), key=lambda each: each.note, default=None)
        if first is not None:
            yield Stage(name, "note" if first.note else "differs", first.step, first.cause)
        elif index > last and name != "logged values":
            yield Stage(name, "not compared", note="after the first difference")
        else:
            yield Stage(name, "equal" if steps else "not compared")


def _reduced(step: Step) -> Tensors:
    """Return the first reduced gradient of a step."""
    return next(moment.tensors for moment in step.moments if moment.stage == "reduced gradient")


def _loss(step: Step) -> float:
    return step.taken[-1].loss


class _Evidence:
    """What is known of one step."""

    def __init__(self, twin: Twin, seen: Seen, tolerance: float, variation: Any = nullcontext) -> None:
        self.compute = partial(twin.step_with, position=seen.step, variation=variation)
        self.twin, self.facts, self.seen, self.tolerance = twin, twin.tapes[0].facts, seen, tolerance
        self.near = 100 * tolerance  # up to which a combination is one
        self.factor, self.world_size = seen.difference.factor, len(twin.tapes)
        self.group = twin.taken(seen.step)
        self.ranks, self.taken = [rank for _, rank, _ in self.group], [one for *_, one in self.group]
        self.parts, self.whole = [self.compute([one]) for one in self.group], self.compute(self.group)
        known = [*(_reduced(part) for part in self.parts), _reduced(self.whole), seen.found]
        every = {name: tensor for tensors in known for name, tensor in tensors.items()}
        self.like = {name: each for name, each in every.items() if seen.relative.get(name, 0.0) > tolerance}
        self.target, self.reduced = flat(_reduced(self.whole), self.like), flat(seen.found, self.like)
        self.rows = torch.stack([flat(_reduced(part), self.like) for part in self.parts])
        self.multiple = _in_words(self.factor)

    def require_any_order(self) -> None:
        """Check that one process computes the same gradient with the samples in another order."""
        turned = flat(_reduced(self.compute(self.group[::-1])), self.like)
        if gap_between(turned, self.target) > self.near:
            raise Refused(
                "with the samples of the batch in a different order one process computes a different gradient: the"
                " loss, or a random draw, depends on their positions in the batch"
            )

    def keeps_state(self) -> bool:
        """Return whether a batch leaves something behind that changes the loss of the first part."""
        steps = [[self.twin.taken(index)] * 2 for index in range(self.seen.step)]
        tape = self.twin.run([*steps, [self.group, self.group[:1]]])
        return not math.isclose(tape.steps[-1].taken[-1].loss, _loss(self.parts[0]), rel_tol=1e-7)

    @cached_property
    def combinations(self) -> Mapping[str, Tensor]:
        """The coefficient of every micro-batch under every hypothesis."""
        number, ranks, window = len(self.ranks), self.ranks, self.world_size * self.facts.accumulation
        weights = [one.weight or 0.0 for one in self.taken] if None not in [one.weight for one in self.taken] else []
        counts: dict[str, list[float]] = {
            "mean": [1] * number,
            "mean of the ranks' means": [1 / ranks.count(rank) for rank in ranks],
            "alone": [rank == min(ranks) < max(ranks) for rank in ranks],
            "samples": [one.size for one in self.taken],
            "weights": weights,
        }
        found = {
            name: torch.tensor(each, dtype=torch.float64) / sum(each) for name, each in counts.items() if sum(each) > 0
        }
        scaled = {
            "sum": ("mean", number),
            "multiplied": ("mean", self.world_size),
            "configured window": ("mean", number / window),
            "divided twice": ("mean", 1 / self.world_size),
            "samples, divided twice": ("samples", 1 / self.world_size),
            "weights, divided twice": ("weights", 1 / self.world_size),
        }
        pointless = ("configured window",) if number == window else ()
        found |= {name: factor * found[of] for name, (of, factor) in scaled.items() if of in found}
        return {name: shares for name, shares in found.items() if name not in pointless}

    def named(self, target: Tensor) -> set[str]:
        """Return the names of the combinations of `P` that a gradient is."""
        return {name for name, shares in self.combinations.items() if self.combines(target, shares)}

    def combines(self, target: Tensor, shares: Tensor) -> bool:
        """Return whether a gradient is this combination of `P`."""
        return gap_between(target, shares[shares != 0] @ self.rows[shares != 0]) <= self.near

    def shares(self, target: Tensor) -> Tensor | None:
        """Return the coefficients with which the parts make up a gradient; None if none do, or many could."""
        scale, several = float(self.rows.abs().max()), len(target) > len(self.rows)
        if not (several and 0 < scale < math.inf and bool(torch.isfinite(target).all())):
            return None
        if int(torch.linalg.matrix_rank(self.rows, rtol=1e-9)) < len(self.rows):
            return None
        found: Tensor = torch.linalg.lstsq(self.rows.T / scale, (target / scale).unsqueeze(1)).solution[:, 0]
        return found if gap_between(target, found @ self.rows) <= self.near else None

    @cached_property
    def right(self) -> Mapping[str, Tensor]:
        """The combinations of the parts that are the whole: by name, or "terms" with shares of their own."""
        named = {name: self.combinations[name] for name in _RIGHT if name in self.named(self.target)}
        shares = None if named else self.shares(self.target)
        fits = shares is not None and float(shares.min()) > -self.near and abs(float(shares.sum()) - 1) < self.near
        return {"terms": shares} if fits and shares is not None else named


def _in_words(factor: float | None) -> str:
    return f"the gradient is {'another one' if factor is None else f'{times(factor)} that of one process'}"


def _by_factor(factor: float | None, ranks: int) -> tuple[str, str]:
    """Return what a factor alone tells."""
    text = _in_words(factor)
    if factor is not None and math.isclose(factor, ranks, rel_tol=1e-4):
        return "hand-compensated loss", f"{text}: it is multiplied by the {ranks} ranks"
    if factor is not None and math.isclose(factor * ranks, 1, rel_tol=1e-4):
        return "sum loss", f"{text}: the loss is a sum over samples, or was divided by the ranks by hand"
    return "unexplained", text


def _of_parts(known: _Evidence) -> tuple[str, str]:
    """Return why a gradient that is a combination of its parts is the wrong one."""
    pairs = [(one.loss, _loss(part)) for one, part in zip(known.taken, known.parts, strict=True)]
    ratios = torch.tensor([run / own if own else math.nan for run, own in pairs], dtype=torch.float64)
    if bool(((ratios - 1).abs() > known.near)[ratios.isfinite()].any()):
        text = f"{known.multiple}; the ranks' losses are {_listed(ratios)} x those of the same samples on one process"
        if all(math.isclose(ratio * known.world_size, 1, rel_tol=1e-4) for ratio in ratios):
            return "double division", text
        mean_is_right = known.combines(known.target, ratios / len(ratios))
        return "hand-compensated loss", text + '; with it `reduction="mean"` is right' * mean_is_right
    if "terms" in known.right and known.keeps_state():
        text = "a value that every rank keeps for itself, such as a moving average, changes the loss"
        return "hand-compensated loss", f"{known.multiple}; {text}"
    done = known.named(known.reduced)
    likely, unlikely = (_WEIGHED, _MEANS) if known.facts.rule.uses_weight else (_MEANS, _WEIGHED)
    done -= set(unlikely) if done & set(likely) else set()
    done -= set() if "sum" in known.facts.rule.name else {"sum"}
    for sign in _SIGNS:
        if done & set(sign.done) and set(known.right) & sign.right:
            return sign.cause, _detail(known, sign.detail)
    return _changed(known) or _by_factor(known.factor, known.world_size)


def _detail(known: _Evidence, text: str) -> str:
    right, found = next(iter(known.right.values())), known.shares(known.reduced)
    run = f" by {_listed(found)}" if found is not None and "{shares}:" in text else ""
    return text.format(
        multiple=known.multiple,
        ranks=known.world_size,
        shares=f"one process weights the micro-batches by {_listed(right)}, but the run weights them{run}",
        length=len(known.ranks) / len(set(known.ranks)),
        window=known.facts.accumulation,
    )


def _listed(shares: Tensor) -> str:
    return ", ".join(f"{one:.4g}" for one in shares.tolist())


def _changed(known: _Evidence) -> tuple[str, str] | None:
    """Return what was done to the ranks' gradients beyond combining them, if it is known."""
    elements = torch.cat([known.seen.found.get(name, each * 0)[:_ELEMENTS] for name, each in known.like.items()])
    for name, dtype in _WIRES.items():
        if torch.equal(elements.to(dtype).double(), elements):
            return name, f"every element of the gradient is a {str(dtype).removeprefix('torch.')} number"
    if known.factor is None:
        return "gradient hooks", "no known combination of what one process computes was made: each rank changes its own"
    return None


def _of_whole(known: _Evidence) -> tuple[str, str]:
    """Return why the gradient of a batch is no combination of those of its parts."""
    variations: dict[str, Callable[[nn.Module], AbstractContextManager[None]]] = {
        **({} if known.facts.replicated else {"batch norm": _without_statistics}),  # which are over all ranks there
        "gradient hooks": without_gradient_hooks,
    }
    for cause, variation in variations.items():
        other = _Evidence(known.twin, known.seen, known.tolerance, variation)
        if other.right:
            combines = f"combines from those of its parts ({', '.join(other.right)})"
            return cause, f"only without it the gradient of the whole batch {combines}"
    if _has_constant_term(known):
        text = "the losses of two parts of a batch add up to its loss and one more term, which depends on no sample"
        return "constant term", text
    collectives = sorted({name for tape in known.twin.tapes for name in tape.collectives})
    reached = [name for name in collectives if "gather" in name or "reduce" in name]
    mean = sum(one.loss for one in known.taken) / len(known.taken)
    if reached and math.isclose(mean, _loss(known.whole), rel_tol=1e-7):
        text = f"what {', '.join(reached)} brought from other ranks carries no gradient"
        return "detached gather", f"the ranks' losses are those of one process, but the gradient is not: {text}"
    text = "that of a batch is not a combination of those of its parts: the loss compares samples"
    return "non-decomposable loss", f"{known.multiple}, and {text}"


def _has_constant_term(known: _Evidence) -> bool:
    """Return whether the loss is a sum over samples and something that is there once for every batch."""
    twice = known.compute([*known.group, *known.group])
    of_parts = (known.rows.sum(0) - known.target) / max(1, len(known.rows) - 1)
    of_twice = 2 * known.target - flat(_reduced(twice), known.like)
    return len(known.rows) > 1 and gap_between(of_twice, of_parts) <= 10 * known.near and bool(of_parts.any())


@contextmanager
def _without_statistics(module: nn.Module) -> Iterator[None]:
    """Let batch norm scale and shift only."""

    def affine(norm: BatchNorm) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            zeros, ones = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
            return nn.functional.batch_norm(x, zeros, ones, norm.weight, norm.bias, training=False)

        return forward

    with ExitStack() as stack:
        for part in (part for part in module.modules() if isinstance(part, BatchNorm)):
            if part.training or not part.track_running_stats:
                stack.enter_context(mock.patch.object(part, "forward", affine(part)))
        yield
