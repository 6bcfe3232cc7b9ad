"""The judgement of a run: what it reads otherwise than one process, where it first differs in training, and why.

`P` are the gradients that one process computes of each micro-batch alone, `F` that of all samples at once, and `G` what
the run made of them. The combination of `P` that is `F` is *right*, the one that is `G` is what was *done*. Where they
differ, their names say why. Where no combination of `P` is `F`, samples are compared with each other: by batch norm, by
a hook, or by the loss.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from lightning_gradavg.reduction.global_mean import SCOPE
from lightning_gradavg.rules import RULES
from lightning_gradavg.verify.record import Id, Read, Refused, Tape
from lightning_gradavg.verify.report import CAUSES, Finding, Report
from lightning_gradavg.verify.twin import Build, Seen, Twin, difference, differences, flat, gap_between, multiple_of

__all__ = ["judge"]

_BESIDE_DRAWS = ("initial weights", "optimizer options")  # do not depend on what is drawn
_OF_COMBINATIONS = (
    *("short window", "mean of means", "sum loss", "counts", "double division", "constant term"),
    *("16-bit wire", "gradient hooks", "learning-rate scale", "optimizer options"),
)
_OF_STATE = (
    "one process that accumulates the same micro-batches trains the same, and one that takes them as one batch does"
    " not: something counts or keeps state for every micro-batch, or compares samples within one"
)
_OF_DRAWS = "it belongs to no sample; every rank draws its own, and one process draws one"
_OF_ORDER = (
    "with the samples of the batch in a different order one process computes a different gradient: the loss, or a"
    " random draw, depends on their positions in the batch"
)
_OF_STAGES = {
    "initial weights": "initial weights",
    "clipped gradient": "unexplained",
    "optimizer options": "optimizer options",
    "weights": "weights beside the gradient",
    "buffers": "buffers of one rank",
}
_OF_ONE_PROCESS = "of one process: they may be transformed at random"
_WIRES = (torch.bfloat16, torch.float16)
_MOST_BATCHES = 20_000  # of an epoch whose windows are looked at
_ELEMENTS = 2048  # of a sketch; the others are sums


def judge(
    tapes: Sequence[Tape], build: Build, tolerance: float, double: bool = True, accelerator: str = "cpu"
) -> Report:
    """Return how a run, as all ranks recorded it, differs from one process, and why."""
    facts, untold = tapes[0].facts, "the run took no optimizer step"
    if problems := [tape.problem or untold for tape in tapes if tape.problem or not tape.steps]:
        return Report(facts.strategy, facts.rule.name, len(tapes), 0, math.nan, remarks=problems[:1])
    return _Judge(tapes, Twin(tapes, build, double, accelerator), tolerance).report()


class _Judge:
    def __init__(self, tapes: Sequence[Tape], twin: Twin, tolerance: float) -> None:
        self.tapes, self.facts, self.twin, self.tolerance = tapes, tapes[0].facts, twin, tolerance

    def report(self) -> Report:
        """Compare, and put together what was found."""
        alone, facts, remarks = self.twin.run(), self.facts, list[str]()
        found, logged, steps = [*self._between_ranks()], list[Finding](), len(alone.steps)
        try:
            if seen := self._first(alone):
                steps = seen.step
                found.append(self._finding(alone, seen))
            logged = [*self._logged(alone, steps)]
        except Refused as error:
            remarks.append(str(error))
        if drawn := dict.fromkeys(name for each in (*self.tapes, alone) for name in each.shared):
            remarks.insert(0, f"one draw for a whole batch ({', '.join(drawn)}): {_OF_DRAWS}")
            found, logged = [each for each in found if each.stage in _BESIDE_DRAWS], []
        found = sorted(found, key=lambda each: each.step)[:1]
        told = [*found, *_Reading(self.tapes, alone.read).told(), *logged]
        findings = sorted((one for one in told if isinstance(one, Finding)), key=lambda one: one.note)
        remarks += [one for one in told if isinstance(one, str)]
        used = {"split_batches": facts.splits_batches, "equivalent_to": facts.replicated, "GradAvgStrategy": facts.ours}
        given = [name for name, there in used.items() if there]
        return Report(
            facts.strategy,
            facts.rule.name,
            len(self.tapes),
            found[0].step + 1 if found else steps,
            self.tolerance,
            [replace(one, **CAUSES[one.cause].remedy(facts.strategy, facts.rule.name, given)) for one in findings],
            list(dict.fromkeys(remarks)),
            "float64" if self.twin.double else "float32",
        )

    def _first(self, alone: Tape) -> Seen | None:
        """Return the first difference in training to a run on one process."""
        seen = next(differences(self.tapes[0], alone, self.tolerance), None)
        if seen is None and alone.problem:
            raise Refused(alone.problem)
        return seen

    def _finding(self, alone: Tape, seen: Seen) -> Finding:
        """Return the finding of the first difference."""
        stage, name = seen.stage, seen.difference.name
        cause, text = _OF_STAGES.get(stage, ""), f"{name} is the first to differ"
        if stage == "reduced gradient":
            cause, text = self._of_gradient(seen)
        elif stage == "optimizer options" and name.startswith("lr"):
            cause = "learning-rate scale"
        if stage not in _BESIDE_DRAWS:
            self._require_no_other_reason(alone, seen.step, cause)
        return Finding(cause, stage, text, seen.step, seen.difference)

    def _of_gradient(self, seen: Seen) -> tuple[str, str]:
        """Return the cause and the detail of a step whose reduced gradient differs."""
        if not self.facts.automatic:
            return "unexplained", _in_words(seen.difference.factor)
        known = _Evidence(self.twin, seen, self.tolerance)
        turned, _ = self.twin.step_with(known.group[::-1], seen.step)
        if gap_between(flat(turned, known.like), known.target) > known.near:
            raise Refused(_OF_ORDER)
        if SCOPE in self.tapes[0].scopes and not _is_plain(known):
            return (
                "weighed global mean",
                f"{known.multiple}: the run weighs the ranks' losses once more",
            )
        return _of_parts(known) if known.right else _of_whole(known)

    def _require_no_other_reason(self, alone: Tape, position: int, cause: str) -> None:
        drawn = alone.steps[position].taken[-1].trace
        of_ranks = [taken for tape in self.tapes for taken in tape.steps[position].taken if taken.counts]
        others = [one for taken in of_ranks if taken.trace != drawn for one in [*taken.trace, *drawn]]
        if names := dict.fromkeys(name for name, _ in others):
            raise Refused(f"a batch of another size draws other random numbers ({', '.join(names)})")
        if len(self.tapes[0].steps[position].taken) > 1 and cause not in _OF_COMBINATIONS:
            seen = self._first(self.twin.windowed())
            if seen is None or seen.step > position:
                raise Refused(_OF_STATE)

    def _between_ranks(self) -> Iterator[Finding]:
        """Yield where ranks differ from the first."""
        for other in self.tapes[1:]:
            with suppress(Refused):
                for seen in differences(other, self.tapes[0], self.tolerance):
                    name, _, found, expected, _ = vars(seen.difference).values()
                    text = f"{name} is {found:.6g} on rank {other.rank}, but {expected:.6g} on rank 0"
                    if seen.stage != "buffers":
                        yield Finding("unsynchronised replicas", seen.stage, text, seen.step)

    def _logged(self, alone: Tape, steps: int) -> Iterator[Finding]:
        """Yield the first value that all ranks logged alike, as with `sync_dist`, and that differs."""
        of_steps = zip(alone.steps[:steps], *(tape.steps for tape in self.tapes), strict=False)
        for position, (mine, *of_ranks) in enumerate(of_steps):
            alike = dict(set.intersection(*(set(step.logged.items()) for step in of_ranks)))
            found, expected = (
                {name: torch.tensor([values[name]], dtype=torch.float64) for name in alike.keys() & mine.logged.keys()}
                for values in (alike, mine.logged)
            )
            for seen in difference(found, expected, 10 * self.tolerance, together=False)[:1]:
                text = f"{seen.name} was logged by all ranks; the training is the same"
                yield Finding("logged value", "logged values", text, position, seen)
                return


class _Reading:
    """Whether the ranks together read what one process reads: each sample as often, in the same order and batches."""

    def __init__(self, tapes: Sequence[Tape], alone: Read) -> None:
        self.tapes, self.facts = tapes, tapes[0].facts
        reads = [alone, *(tape.read for tape in tapes)]
        self.traits = frozenset[str]().union(*(each.traits for each in reads))
        self.complete, self.chosen = "goes on" not in self.traits, "chooses" in self.traits
        self.stream = [one for batch in alone.batches for one in batch]
        self.there, self.sources = Counter(self.stream), {one[0] for one in self.stream}
        self.of_ranks = [tape.read.batches for tape in tapes]
        of_steps = zip(*(tape.steps for tape in tapes), strict=False)
        self.taken = [[one for step in steps for one in step.taken if one.counts] for steps in of_steps]
        self.epochs = [step.epoch for step in tapes[0].steps]

    def told(self) -> Iterator[Finding | str]:
        """Yield findings, and remarks on what the compared steps do not show."""
        world, steps = len(self.tapes), [[one.ids for one in taken] for taken in self.taken]
        alike = all(len(each) >= world > 1 and len(set(each)) == 1 for each in steps)
        known = self.complete and not self.chosen and self.there.keys() & {one for ids in steps[0] for one in ids}
        if alike and not known:
            text = f"all {world} ranks read the same samples in the same order: the global batch is one rank's"
            yield Finding("duplicated stream", "samples", text)
            return
        yield from self.lengths()
        yield from self.coverage()
        yield from self.order()

    def lengths(self) -> Iterator[str]:
        """Yield a remark on a window beyond the steps in which not every micro-batch counts as its samples do."""
        facts, window, world = self.facts, max(1, self.facts.accumulation), len(self.tapes)
        if not facts.automatic or facts.rule.uses_weight or not facts.rule.name.startswith("mean"):
            return
        taken, known = sum(len(step.taken) for step in self.tapes[0].steps), min(map(len, self.of_ranks))
        even = known and all(len({one.size for one in each}) == 1 for each in self.taken)
        number = int(min(known or math.inf, facts.epoch_batches, _MOST_BATCHES))
        for start in range(-(-taken // window) * window, number, window):
            stop = min(start + window, number)
            held = [len(batch) for batches in self.of_ranks for batch in batches[start:stop]]
            held = held if even else [1] * (stop - start) * world
            divisor = len(held) if facts.ours else window * world
            if any(size * divisor != sum(held) for size in held):
                sizes = f" of {' and '.join(map(str, sorted(set(held))))} samples" if even else ""
                yield (
                    f"beyond the compared steps, from batch {start} on, a window has {len(held)} micro-batches{sizes},"
                    f" whose means {facts.strategy} adds up and divides by {divisor}"
                )
                return

    def strange(self, samples: Counter[Id]) -> int:
        """Return how many of these samples one process has not; of a data set it has all or none."""
        return sum(number for one, number in samples.items() if one[0] not in self.sources)

    def coverage(self) -> Iterator[Finding | str]:
        """Yield what is said of samples that an epoch never reads, or reads more than once, or that are strange."""
        here = Counter(one for batches in self.of_ranks for batch in batches for one in batch)
        dropped = sum(max(map(len, batches), default=0) for batches in self.of_ranks)  # what drop_last leaves out
        total, splits, surplus = self.there.total(), self.facts.splits_batches, here - self.there
        strange, beyond = self.strange(here), sum(surplus[one] for one in surplus.keys() - self.there.keys())
        missing, more = (self.there - here).total() - beyond, (surplus.total() - beyond) * (not splits)
        if "replaces" in self.traits or not self.complete:
            return
        least = dropped * ("drops a last batch" in self.traits)
        if least < strange and (strange < here.total() or (missing < 0 and not splits)):
            yield f"{strange} of the {here.total()} samples of an epoch are none of the {total} {_OF_ONE_PROCESS}"
        if missing <= dropped and not more:
            return
        if self.chosen:
            yield f"by a sampler of your own, the ranks leave out {missing} samples of one process and add {more}"
        elif missing > dropped:
            yield Finding("unread samples", "samples", f"{missing} of the {total} samples of an epoch are never read")
        else:
            steps, first = zip(self.taken, self.epochs, strict=False), self.epochs[0]
            read = Counter(one for taken, epoch in steps if epoch == first for each in taken for one in each.ids)
            within = (read - self.there).keys() & self.there.keys()
            cause, text = "padding", f"{more} samples of an epoch are read twice, to fill the ranks"
            if more >= total:
                cause, text = "duplicated stream", "every rank reads all samples of an epoch"
            yield Finding(cause, "samples", text) if within else f"beyond the compared steps, {text}"

    def order(self) -> Iterator[Finding | str]:
        """Yield the first global batch that is not what one process reads at that place of its epoch."""
        left, places = self.stream, {one: index for index, one in enumerate(self.stream)}
        for position, taken in enumerate(self.taken):
            here = Counter(one for each in taken for one in each.ids)
            there, left = Counter(left[: here.total()]), left[here.total() :]
            if self.chosen or self.epochs[position] != self.epochs[0] or not there:
                return
            if here == there:
                continue
            strange = self.strange(here)
            text = f"{strange} of the {here.total()} samples of the step are none of those {_OF_ONE_PROCESS}"
            if strange == here.total():
                free = "shuffles" in self.traits or self.facts.splits_batches
                yield Finding("data order", "samples", text, position, note=True) if free else text
                return
            if strange and not self.complete:
                yield text
            of_ranks = ([one.ids for step in tape.steps for one in step.taken if one.counts] for tape in self.tapes)
            read = ([places.get(one, -1) for ids in of_rank for one in ids] for of_rank in of_ranks)
            rising = all(one < other for of_rank in read for one, other in pairwise(of_rank))
            text = f"{(here & there).total()} of the {here.total()} samples of the step are those of one process there"
            yield Finding("data order", "samples", text, position, note="shuffles" in self.traits or rising)
            return


class _Evidence:
    """What is known of one step."""

    def __init__(self, twin: Twin, seen: Seen, tolerance: float) -> None:
        self.twin, self.facts, self.seen = twin, twin.tapes[0].facts, seen
        self.near = 100 * tolerance  # up to which a combination is one
        self.factor, self.world_size = seen.difference.factor, len(twin.tapes)
        self.multiple = _in_words(self.factor)
        self.group = twin.taken(seen.step)
        self.taken = [one for *_, one in self.group]
        parts, self.losses = zip(*(twin.step_with([one], seen.step) for one in self.group), strict=True)
        whole, self.loss = twin.step_with(self.group, seen.step)
        every = {name: tensor for tensors in (*parts, whole, seen.found) for name, tensor in tensors.items()}
        self.like = {name: each for name, each in every.items() if name in seen.names}
        self.target, self.reduced = flat(whole, self.like), flat(seen.found, self.like)
        self.rows = torch.stack([flat(part, self.like) for part in parts])

    @cached_property
    def shares(self) -> Mapping[str, Tensor]:
        """By which share each micro-batch counts, by what decides on it."""
        weights = [math.nan if one.weight is None else one.weight for one in self.taken]
        sizes, ones = [float(one.size) for one in self.taken], [1.0] * len(weights)
        counts = {"samples": sizes, "weights": weights, "mean": ones}
        every = {name: torch.tensor(each, dtype=torch.float64) for name, each in counts.items() if sum(each) > 0}
        return {name: each / each.sum() for name, each in every.items()}

    def factors(self, gradient: Tensor) -> Mapping[str, float]:
        """Return which of these combinations of `P` a gradient is a multiple of, and which multiple."""
        made = {name: each[each != 0] @ self.rows[each != 0] for name, each in self.shares.items()}
        found = {name: multiple_of(gradient, each, self.near) for name, each in made.items()}
        return {name: factor for name, factor in found.items() if factor is not None}

    def solved(self, gradient: Tensor) -> Tensor | None:
        """Return the coefficients with which the parts make up a gradient; None if none do, or many could."""
        number, scale = len(self.rows), float(self.rows.abs().max())
        known = len(gradient) > number and bool(torch.isfinite(torch.stack([*self.rows, gradient])).all())
        if not known or int(torch.linalg.matrix_rank(self.rows, rtol=1e-9)) < number:
            return None
        found: Tensor = torch.linalg.lstsq(self.rows.T / scale, (gradient / scale).unsqueeze(1)).solution[:, 0]
        return found if gap_between(gradient, found @ self.rows) <= self.near else None

    @cached_property
    def right(self) -> Mapping[str, Tensor]:
        """The combinations of the parts that are the whole: by name, or "terms" with shares of their own."""
        factors, number = self.factors(self.target), len(self.taken)
        named = {name: self.shares[name] for name, factor in factors.items() if self.equals(factor, 1)}
        named |= {"sum": self.shares["mean"] * number} if self.equals(factors.get("mean", 0.0), number) else {}
        shares = None if named else self.solved(self.target)
        fits = shares is not None and float(shares.min()) > -self.near and self.equals(float(shares.sum()), 1)
        return {"terms": shares} if fits and shares is not None else named

    def equals(self, factor: float, expected: float) -> bool:
        """Return whether a factor is another, but for rounding."""
        return math.isclose(factor, expected, rel_tol=self.near)


def _is_plain(known: _Evidence) -> bool:
    """Return whether the run takes the plain mean of its micro-batches."""
    rule = known.facts.rule
    if not rule.uses_weight:
        return rule == RULES["mean"]
    weights = known.shares.get("weights", known.shares["samples"])
    return torch.equal(weights, known.shares["mean"])


def _in_words(factor: float | None) -> str:
    return f"the gradient is {'another one' if factor is None else f'{factor:.4g} x that of one process'}"


def _of_parts(known: _Evidence) -> tuple[str, str]:
    """Return why a gradient that is a combination of its parts is the wrong one."""
    losses, on_one = torch.tensor([[one.loss for one in known.taken], known.losses], dtype=torch.float64)
    ratios = losses / on_one
    if not bool(((ratios - 1).abs() > known.near)[ratios.isfinite()].any()):
        return _of_combinations(known) or _changed(known) or ("unexplained", known.multiple)
    text = f"{known.multiple}; the ranks' losses are {_listed(ratios)} x those of the same samples on one process"
    if torch.allclose(ratios * known.world_size, torch.ones_like(ratios), rtol=1e-4, atol=0.0):
        return "double division", text
    if gap_between(known.target, ratios / len(ratios) @ known.rows) <= known.near:
        return "hand-compensated loss", f'{text}; with it `reduction="mean"` is right'
    alike = torch.allclose(ratios, ratios[0], rtol=known.near, atol=0.0)
    return "hand-compensated loss" if alike else "unexplained", text


def _of_combinations(known: _Evidence) -> tuple[str, str] | None:
    """Return which multiple or which other combination of the parts the run made, if it is a known one."""
    facts, ranks, number = known.facts, known.world_size, len(known.taken)
    factors, sums = known.factors(known.reduced), "sum" in facts.rule.name
    if "sum" in known.right and factors and not sums:
        return "sum loss", f"{known.multiple}: the loss is a sum over samples"
    factors = {name: factor / (number if "sum" in known.right else 1) for name, factor in factors.items()}
    length = f"the window has {number / ranks:g} micro-batches on each rank and is divided by {facts.accumulation}"
    multiples = (
        (number / (ranks * facts.accumulation), "short window", length),
        (1 / ranks, "double division", f"it is divided by the {ranks} ranks a second time"),
        (number if sums else math.nan, "counts", "the loss is a mean, but the reduction adds up the ranks"),
        (ranks, "hand-compensated loss", f"it is multiplied by the {ranks} ranks"),
    )
    if plain := [name for name, factor in factors.items() if known.equals(factor, 1)]:
        return _of_shares(known, by_mean="mean" in plain and (len(plain) == 1 or not facts.rule.uses_weight))
    for scale, cause, text in multiples:
        if any(known.equals(factor, scale) for factor in factors.values()):
            return cause, f"{known.multiple}: {text}"
    return None


def _of_shares(known: _Evidence, *, by_mean: bool) -> tuple[str, str]:
    right, found = _listed(next(iter(known.right.values()))), known.solved(known.reduced)
    text = f"one process weights the micro-batches by {right}, but the run weights them"
    if by_mean:
        return "mean of means", f"{text} equally: the ranks' losses have different numbers of terms"
    how = "otherwise" if found is None else f"by {_listed(found)}"
    return "counts", f"{text} {how}: the weights are not the numbers of terms"


def _listed(shares: Tensor) -> str:
    return ", ".join(f"{one:.4g}" for one in shares.tolist())


def _changed(known: _Evidence) -> tuple[str, str] | None:
    """Return what was done to the ranks' gradients beyond combining them, if it is known."""
    elements = torch.cat([known.seen.found.get(name, each * 0)[:_ELEMENTS] for name, each in known.like.items()])
    for dtype in (dtype for dtype in _WIRES if elements.any() and torch.equal(elements.to(dtype).double(), elements)):
        return "16-bit wire", f"every element of the gradient is a {str(dtype).removeprefix('torch.')} number"
    if known.factor is None:
        return "gradient hooks", "no known combination of what one process computes was made: each rank changes its own"
    return None


def _of_whole(known: _Evidence) -> tuple[str, str]:
    """Return why the gradient of a batch is no combination of those of its parts."""
    norms = known.twin.tapes[0].batch_norms
    if norms and not known.facts.replicated:  # whose statistics are over all ranks
        return "batch norm", f"{known.multiple}, and each rank normalizes by its own samples, first in {norms[0]!r}"
    # A term that is there once for every batch: what two parts have more than the whole, so has a batch taken twice.
    of_parts = (known.rows.sum(0) - known.target) / (len(known.rows) - 1)
    twice, _ = known.twin.step_with([*known.group, *known.group], known.seen.step)
    of_twice = 2 * known.target - flat(twice, known.like)
    if gap_between(of_twice, of_parts) <= 10 * known.near:
        text = "the losses of two parts of a batch add up to its loss and one more term, which depends on no sample"
        return "constant term", text
    gathered = sorted({name for tape in known.twin.tapes for name in tape.collectives if "gather" in name})
    mean = sum(one.loss for one in known.taken) / len(known.taken)
    if gathered and math.isclose(mean, known.loss, rel_tol=1e-7):
        text = f"what {', '.join(gathered)} brought from other ranks carries no gradient"
        return "detached gather", f"the ranks' losses are those of one process, but the gradient is not: {text}"
    text = "that of a batch is not a combination of those of its parts: the loss, or a hook, looks at all samples"
    return "non-decomposable loss", f"{known.multiple}, and {text}"
