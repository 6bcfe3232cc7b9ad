"""Which module and line a report names: the first whose result or gradient differs, as far as the traces show it.

Ranks are held against one process that takes the samples of all ranks as one batch (*whole*), and against one that
takes a rank's samples alone (*part*). Only the calls that the loss depends on count. These are the cases of a reduced
gradient that differs. The first that holds names the place, and where none holds no place is named.

| case | named |
|---|---|
| a call has other values for the same samples than the whole has | the first such call |
| the gradients of what calls returned are no common multiple of those of the whole | the call that took the last |
| the cause is a term of no sample, and a call returned the same in the whole batch | the last such call |
| samples are compared with each other, and a number of no sample has another gradient | the call that took the last |
| samples are not compared, and a call has other values than the part has | the first such call |
| the cause lies in what the loss is a sum of | the call that made the loss |
| a communication hook did not return the mean | the hook |
| the parameters that differ have hooks, or their gradients were written after the backward, and not both | that line |

The second case in words: the gradient of a mean over 4 samples is twice that over the 8 samples of the whole, in every
call. Where that no longer holds, the function that took the rows compares samples with each other.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_gradavg.verify.record import Record, Step
from lightning_gradavg.verify.rows import Numbers, are_near
from lightning_gradavg.verify.trace import Call, CodeLine, Followed, Match, Piece, Place

__all__ = [
    "Location",
    "first_other_value",
    "of_backward",
    "of_comm_hook",
    "of_constant_term",
    "of_hook_of_parameter",
    "of_logged_value",
    "of_loss",
    "of_optimizer",
    "of_stream",
    "of_tensor",
    "of_uneven_gradient",
    "of_uneven_number",
    "of_use",
    "of_written_gradient",
]

_CAUSES_OF_LOSS = ("sum loss", "mean of means", "counts", "weighed global mean")
"""Causes that lie in what the loss is a sum or a mean of."""

_NOWHERE = Place("", "", None)


class Location(NamedTuple):
    """What a report names, and how it begins to say so."""

    what: str
    place: Place
    owner: str = ""  # the layer of a weight or a buffer, which may be written or used elsewhere

    @property
    def module(self) -> str:
        """The path of a layer, or the class of the LightningModule or of a layer that has no path."""
        return self.owner or self.place.module or self.place.layer

    @property
    def line(self) -> str:
        """The line, as in "train.py:31: x = self.norm(x)"; "" if it is unknown."""
        if self.place.line is None:
            return ""
        return f"{_in_words(self.place.line)}: {_code_of(self.place.line)}"

    def __str__(self) -> str:
        named = []
        if self.place.module and self.place.layer:
            named.append(f"`{self.place.module}` ({self.place.layer})")
        elif self.place.layer:
            named.append(f"`{self.place.layer}`")
        if self.place.line is not None:
            named.append(f"{_in_words(self.place.line)}: `{_code_of(self.place.line)}`")
        return f"{self.what} {', '.join(named)}".strip()


def _in_words(line: CodeLine) -> str:
    """Return a line as `train.py:31`, by a path from the working directory if the file is below it."""
    file = Path(line.file)
    if file.is_relative_to(Path.cwd()):
        file = file.relative_to(Path.cwd())
    return f"{file}:{line.number}"


def _code_of(line: CodeLine) -> str:
    return linecache.getline(line.file, line.number).strip()


class _Reached(NamedTuple):
    """A call that the loss of a piece depends on, and what one process computed there."""

    position: int
    call: Call
    match: Match | None  # None if one process made no such call, or one that cannot be compared


def _reached(followed: Followed) -> list[_Reached]:
    """Return the rank's calls that the loss depends on, there or on one process, in their order.

    The loss of a rank does not depend on rows that are gathered without their gradient, and that of one process does.
    """
    positions = _positions_before_loss(followed.piece)
    if followed.alone is not None:
        positions_alone = _positions_before_loss(followed.alone)
        for position, match in followed.matches.items():
            if match.position in positions_alone:
                positions.add(position)
    calls = followed.piece.calls
    return [_Reached(position, calls[position], followed.matches.get(position)) for position in sorted(positions)]


def _positions_before_loss(piece: Piece) -> set[int]:
    """Return the calls that the loss depends on.

    Where the call that made the loss is not known, or any of its arguments was computed unseen, these are the earlier
    calls that have gradients, too.
    """
    positions: set[int] = set()
    if piece.loss is not None:
        positions.add(piece.loss)
    is_seen = piece.loss is not None
    for position in reversed(range(len(piece.calls))):
        call = piece.calls[position]
        if not is_seen and call.gradient is not None:
            positions.add(position)
        if position in positions:
            positions.update(call.inputs)  # which were made before
            is_seen = is_seen and not call.is_blind
    return positions


def first_other_value(what: str, traces: Iterable[Followed]) -> Location | None:
    """Return the first call whose values are not those of one process; none if an unseen call may be the first."""
    first: _Reached | None = None
    for followed in traces:
        for reached in _reached(followed):
            if reached.match is None or reached.match.is_same:
                continue
            # Of a whole batch, a number of no sample is another one, such as a mean over samples.
            if not reached.match.has_samples:
                continue
            if first is None or reached.position < first.position:
                first = reached
            break
    if first is None or first.call.is_blind:
        return None
    return Location(what, first.call.place)


def of_uneven_gradient(traces: Iterable[Followed], rounding: float) -> Location | None:
    """Return the call that took rows whose gradients are no common multiple of those of the whole batch."""
    for followed in traces:
        factor: float | None = None
        # What is as small as this carries the rounding of the largest.
        least = 10 * rounding * _largest_gradient(followed)
        for reached in reversed(_reached(followed)):
            match = reached.match
            if match is None or not match.has_samples:
                continue
            found = _unless_zero(reached.call.gradient, least)
            expected = _unless_zero(match.gradient, least)
            if not found and not expected:
                continue
            if found and expected:
                if factor is None:
                    factor = _factor(found, expected)
                if are_near(found, expected, 10 * rounding, factor):
                    continue
            place = _place_of_taker(followed, reached)
            if place is None:
                return Location("other gradients first reach what is computed in", reached.call.place)
            return Location("rows of the same samples first get other gradients from a call in", place)
    return None


def of_uneven_number(traces: Iterable[Followed], rounding: float) -> Location | None:
    """Return the call that took a number of no sample, whose gradient depends on the batch.

    With a mean over samples the gradient of a number is that of the whole, or before a division by the number of
    samples, that times the factor between the numbers of samples.
    """
    for followed in traces:
        numbers = []
        for reached in _reached(followed):
            match = reached.match
            is_number = math.prod(reached.call.shape) == 1
            if match is None or match.has_samples or not is_number:
                continue
            if reached.call.gradient and match.gradient:
                numbers.append((reached, _factor(reached.call.gradient, match.gradient)))
        if not numbers or followed.alone is None:
            continue
        _, of_loss = numbers[-1]
        number_of_samples = followed.piece.stop - followed.piece.start
        of_sum = of_loss * (followed.alone.stop - followed.alone.start) / number_of_samples
        for reached, factor in reversed(numbers):
            is_of_mean = any(math.isclose(factor, known, rel_tol=10 * rounding) for known in (of_loss, of_sum))
            if not is_of_mean:
                place = _place_of_taker(followed, reached)
                if place is None:
                    return None
                return Location("a number of the whole batch enters the loss, and not as a mean, in", place)
    return None


def of_constant_term(traces: Sequence[Followed]) -> Location | None:
    """Return the last call with a gradient that gives the same in the whole batch, and has no rows for samples."""
    for reached in reversed(_reached(traces[0])):
        match = reached.match
        if match is not None and reached.call.gradient and match.is_same and not match.has_samples:
            return Location("the term is computed in", reached.call.place)
    return None


def of_loss(cause: str, traces: Sequence[Followed]) -> Location | None:
    """Return the call that made the loss, if the cause lies there."""
    piece = traces[0].piece
    if cause not in _CAUSES_OF_LOSS or piece.loss is None:
        return None
    return Location("the loss is computed in", piece.calls[piece.loss].place)


def of_written_gradient(names: Iterable[str], writes: Mapping[str, Place]) -> Location | None:
    """Return the line that wrote to a gradient after the backward."""
    for name in sorted(names):
        place = writes.get(f"gradient of {name}")
        if place is not None:
            return Location(f"after the backward, the gradient of `{name}` was last written in", place)
    return None


def of_comm_hook(records: Sequence[Record], step: int, rounding: float) -> Location | None:
    """Return the communication hook, if it made something else of the gradients than their mean.

    Nothing is known where the strategy multiplies what the hook returns: for weights, and in a short window.
    """
    facts = records[0].facts
    is_short = len(records[0].steps[step].micro_batches) != facts.accumulation
    if facts.is_gradavg and (facts.rule.name != "mean" or is_short):
        return None
    buckets_of_ranks = [record.steps[step].buckets for record in records]
    for buckets in zip(*buckets_of_ranks, strict=False):
        after = buckets[0].after
        if not after or any(len(bucket.before) != len(after) for bucket in buckets):
            continue
        mean = []
        for numbers in zip(*(bucket.before for bucket in buckets), strict=True):
            mean.append(sum(numbers) / len(numbers))
        mean[-1] = after[-1]  # the largest absolute value of a mean is not the mean of the largest
        if not are_near(after, tuple(mean), rounding):
            what = f"the communication hook `{records[0].comm_hook}` does not return the mean of the ranks' gradients"
            if records[0].comm_hook_at is not None:
                what += "; it begins in"
            return Location(what, Place("", "", records[0].comm_hook_at))
    return None


def of_hook_of_parameter(names: Iterable[str], record: Record) -> Location | None:
    """Return the hook of a parameter, if all parameters that differ have hooks of the user's."""
    lines = [record.parameter_hooks.get(name) for name in sorted(names)]
    if not lines or None in lines:
        return None
    name = min(names)
    what = f"the gradient of `{name}` differs, and no value before it; it has a hook,"
    return Location(what, Place("", "", lines[0]), _owner_of(name))


def of_tensor(name: str, writes: Mapping[str, Place]) -> Location:
    """Return the layer of a weight or a buffer, and the line that wrote it last, if that was no optimizer's."""
    place = writes.get(name)
    if place is None:
        return Location("", _NOWHERE, _owner_of(name))
    return Location(f"`{name}` was last written, but for optimizers, in", place, _owner_of(name))


def of_use(name: str, step: Step) -> Location:
    """Return the first call that took a weight, and the layer that holds it."""
    for micro_batch in step.micro_batches:
        for piece in micro_batch.pieces:
            for call in piece.calls:
                if name in call.weights:
                    return Location(f"`{name}` is first used in", call.place, _owner_of(name))
    return Location("", _NOWHERE, _owner_of(name))


def of_backward(step: Step) -> Location | None:
    """Return where `training_step` computed the gradients, in manual optimization."""
    for micro_batch in reversed(step.micro_batches):
        for piece in reversed(micro_batch.pieces):
            if piece.backward is not None:
                return Location("the gradients come from the backward in", piece.backward)
    return None


def of_optimizer(record: Record) -> Location | None:
    """Return where the optimizers are made, if that is the user's code."""
    if record.configured_at is None:
        return None
    return Location("the optimizers are made in", Place("", "", record.configured_at))


def of_stream(record: Record) -> Location | None:
    """Return where the samples of a stream are read, if that is the user's code."""
    if record.read_at is None:
        return None
    return Location("the stream is read in", Place("", "", record.read_at))


def of_logged_value(name: str, record: Record) -> Location | None:
    """Return where a value was logged."""
    place = record.logged_at.get(name)
    if place is None:
        return None
    return Location("it is logged in", place)


def _owner_of(name: str) -> str:
    """Return the path of the layer that holds a weight or a buffer."""
    layer, _, _ = name.rpartition(".")
    return layer


def _largest_gradient(followed: Followed) -> float:
    largest = 0.0
    for call in followed.piece.calls:
        if call.gradient:
            largest = max(largest, call.gradient[-1])
    return largest


def _unless_zero(gradient: Numbers | None, least: float) -> Numbers:
    """Return a gradient; nothing if it is zero but for rounding, or was not computed."""
    if gradient is None or len(gradient) == 0 or gradient[-1] <= least:
        return ()
    return gradient


def _factor(found: Numbers, expected: Numbers) -> float:
    """Return which multiple of some numbers others are, by least squares."""
    product = sum(number * other for number, other in zip(found[:-1], expected[:-1], strict=True))
    square = sum(number * number for number in expected[:-1])
    if square == 0:
        return math.nan
    return product / square


def _place_of_taker(followed: Followed, reached: _Reached) -> Place | None:
    """Return where the result of a call was taken on the way to the loss; None if several places took it, or none.

    What a rank does not pass on to the loss, such as rows that are gathered without gradient, one process does.
    """
    takers = [other for other in _reached(followed) if reached.position in other.call.inputs]
    places = {taker.call.place for taker in takers}
    if not places and followed.alone is not None and reached.match is not None:
        places = {call.place for call in followed.alone.calls if reached.match.position in call.inputs}
    if len(places) == 1:
        return places.pop()
    return None
