"""The window: the micro-batches of one optimizer step, their totals over all ranks, and their gradients.

Each pair (rank, micro-batch) has a share `(w, z)`, and the gradient is `sum(w * g) / sum(z)`. DDP, FSDP and their like
average over the W ranks, and the training loop divides every loss by a constant N. With `Z = sum(z)`,

    a window of one:   the loss carries  (w * N * W) / Z , known before its backward;
    a longer window:   each loss carries  w * lift , and the reduced gradient is multiplied by  N * W / Z / lift .

On CPUs, waiting for `Z` before a backward costs a few percent of a small model's step. So where the two windows before
had the same totals, a window of one assumes them, and multiplies by `Z_assumed / Z` afterwards if they differ.

In a longer window the totals travel during the last backward, and no rank waits for them before it. The *lift* keeps
losses at their magnitude: a factor of 4096 tokens would overflow float16 activations where the result does not. It is
equal on all ranks. Under a rule with weights it is the inverse of a power of two near the weights of the previous
window, so multiplying by it is exact. Under other rules it leaves nothing to multiply after a window of one.
"""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_gradavg.device import Tally, on_device
from lightning_gradavg.lightning_internals import scale_each, stored, version_of
from lightning_gradavg.place import Place
from lightning_gradavg.ranks import World
from lightning_gradavg.reduction.average import average_gradients
from lightning_gradavg.reduction.weights import (
    ALWAYS_OR_NEVER,
    MOST_TERMS,
    WHOLE_LOSS,
    MicroBatch,
    WeighedLoss,
    gradients_discarded,
    nan_stopped,
)
from lightning_gradavg.rules import Rule, Share, powers_of_length, share_of

__all__ = ["Accumulation", "Totals", "Window"]

_NOTHING = Share(0.0, 0.0)
_NAMED = (
    "named loss terms need the global weight of each before their backward, and a window of several micro-batches knows"
    " it after its last one. Do not accumulate; or return one loss under reduction='mean', with each term's sum divided"
    " by its count over all ranks, as DETR does: `count = self.trainer.strategy.reduce(count, reduce_op='sum')`,"
    " `loss = world_size * (cls_sum / cls_count + box_sum / box_count)`"
)
_DIFFERENT = f"the ranks' losses differ in what must be the same. For weights: {ALWAYS_OR_NEVER}"
_OTHERS = (
    "it trains other parameters than the micro-batches before it, which were not reduced yet:"
    " reduce the window of one optimizer before the backward of another"
)


class Totals(NamedTuple):
    """Sums over all ranks that describe a window: numbers on the host, or tensors on a device that nobody waits for."""

    faults: Any  # micro-batches with unusable weights or shares
    without_loss: Any  # ranks
    pairs: Any  # micro-batches that are not absent
    digest: Any  # over these, a number that stands for what must be equal on all ranks
    digests: Any  # over these, its square
    normalizers: Any  # `Z` of each loss term
    more: Any  # of the numbers given to `Window.exchange`

    @classmethod
    def of(cls, values: Any) -> Totals:
        """Return the totals that a sum of summaries holds."""
        return cls._make([*values[:_HEADER], values[_HEADER:_TERMS_END], values[_TERMS_END:]])

    @property
    def problem(self) -> str | None:
        """Why no rank can use the window, or None; only for totals on the host."""
        if self.faults != 0:
            return "a weight or a share is not usable"
        # For equal numbers the square of their sum is their count times the sum of their squares. `x * x` is rounded
        # once, like the other product; `x**2` may not be.
        alike = self.digest * self.digest == self.pairs * self.digests
        return None if alike else _DIFFERENT


_HEADER = len(Totals._fields) - 2
_TERMS_END = _HEADER + MOST_TERMS
_UNKNOWN = Totals.of([0.0] * (_HEADER + 1))


def _scaled(multiplier: Any, scale: float, normalizer: Any) -> Any:
    """Return `multiplier * N * W / Z`, with `scale = N * W`; 0 where there is nothing to normalize.

    This function decides every scale of the reduction. In this order equal weights give exactly 1.
    """
    if isinstance(normalizer, Tensor):
        return torch.where(normalizer > 0, multiplier * scale / normalizer, 0.0)
    return multiplier * scale / normalizer if normalizer > 0 else 0.0 * multiplier


class Window:
    """The numbers of this rank's micro-batches since the last reduction.

    With `compares`, ranks exchange totals even if the rule uses no weights: their windows may have different lengths,
    or they judge steps together. With `afterwards`, the factor of a window of one is applied after its backward, too,
    unless the loss has named terms: a rank may not know that all ranks' windows have one micro-batch, or gradients are
    float16, in which a loss times W may overflow where the result does not.
    """

    def __init__(
        self,
        rule: Rule,
        places: Sequence[Place],
        world: World,
        device: torch.device,
        *,
        compares: bool = False,
        afterwards: bool = False,
    ) -> None:
        self.rule, self.places, self.world, self.device = rule, places, world, device
        self.afterwards, self._exchanges = afterwards, rule.uses_weight or compares
        # The training loop divides every loss of the window by this; None: by the window's length.
        self.loss_divisor: float | None = 1.0
        self.divided_by = 1.0  # the divisor of this rank's gradient, once the window has ended
        self.missing = 0  # ranks without the next micro-batch, which a mean doesn't count
        self.is_alone = False  # whether the only micro-batch carries the whole factor
        self._raises_late = False  # whether its error waits for the backward, before which some rank reads no totals
        self._place, self._constant = places[world.rank], 0.0
        self._next_lift: float | None = None
        if not rule.uses_weight:
            self._constant = float(sum(share_of(rule, place, 1.0).normalizer for place in places))
            self._next_lift = 1.0 if afterwards else float(_scaled(1.0, world.size, self._constant))
        # The backward runs on unchanged losses, as in stock DDP.
        self.carries_nothing = not rule.uses_weight and share_of(rule, self._place, 1.0)[0] * self._next_lift == 1
        self._tally: Tally | None = None
        self._unchecked: tuple[Window, Tally] | None = None
        self._known = _UNKNOWN
        self._expected: Totals | None = None  # the totals of the next window, if the last two had the same
        self.reset()

    def reset(self) -> None:
        """Begin a window."""
        self.micro_batches: list[MicroBatch] = []
        self.terms: tuple[str, ...] = ()
        self._missed, self.lift = 0, self._next_lift or 1.0
        self._assumed: Totals | None = None  # by the only micro-batch, before the totals are there

    def take(self, micro_batch: MicroBatch, *, last: bool, unread: bool = False) -> None:
        """Add a micro-batch before its backward. With `unread`, its weights may stay on an accelerator.

        A collective operation if the window has only this micro-batch, or is the first. In a step of several backwards,
        `last` is False for all of them.
        """
        begins, named = not self.micro_batches, tuple(micro_batch.weights) != (WHOLE_LOSS,)
        # Equal on all ranks, which must all exchange or not.
        self.is_alone = begins and last and self.rule.uses_weight and (named or not self.afterwards)
        late = self.device.type == "cpu" and (self.afterwards or self._expected is not None)
        self._raises_late = self.is_alone and late
        asks = begins and self._next_lift is None and (self.afterwards or not last)
        if named and not self.is_alone:
            # On all ranks together: the window of another rank may have one micro-batch.
            micro_batch = micro_batch._replace(problem=micro_batch.problem or _NAMED)
        if self.device.type != "cpu" and (named or not (self.is_alone and unread)):
            # A bucket holds gradients of all terms, so a term of weight 0 must be stopped at its loss.
            micro_batch = micro_batch.read()
        self.add(micro_batch)
        if asks:
            self._ask(named=named)
        if self.is_alone:
            self.exchange()

    def _ask(self, *, named: bool) -> None:
        """Learn the first lift; later ones follow from earlier windows. If no rank has any weight, the next one asks.

        Only ranks that all name their terms, or none, make the same exchanges.
        """
        largest = max(float(share.normalizer) for share in self.micro_batches[0].shares.values())
        row = [largest, float(named), float(not named)]
        number, some_named, some_not = Tally(row, "max", self.device, self.world.group).read()
        if some_named and some_not:
            self._raise(_DIFFERENT, [self._must_agree])
        self._next_lift = _lift_of(number)
        self.lift = self._next_lift or 1.0

    def add(self, micro_batch: MicroBatch) -> MicroBatch:
        """Append a micro-batch; return it with its shares, or its problem."""
        self.micro_batches.append(self._judged(micro_batch))
        self.terms = tuple(sorted({*self.terms, *micro_batch.weights}))
        self._missed += self.missing
        return self.micro_batches[-1]

    @property
    def length(self) -> int:
        """Number of micro-batches."""
        return len(self.micro_batches)

    @property
    def divisor(self) -> float:
        """`N`, what the training loop divided every loss of the window by."""
        return self.length if self.loss_divisor is None else self.loss_divisor

    def shares(self, term: str) -> list[Share]:
        """Return the shares of one term in all micro-batches, zeros where a micro-batch doesn't have it."""
        alone, (w, z) = [each.shares.get(term, _NOTHING) for each in self.micro_batches], self._of_length
        return [Share(share.multiplier * w, share.normalizer * z) for share in alone]

    def _judged(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch with its shares in a window of one, or the problem of weights that the host has read."""
        shares, problem = dict.fromkeys(micro_batch.weights, _NOTHING), micro_batch.problem
        for term, weight in micro_batch.weights.items() if problem is None else ():
            try:
                share = share_of(self.rule, self._place, weight)
                shares[term] = share._replace(multiplier=0.0) if micro_batch.absent else share
            except ValueError as error:
                problem = f"loss term {term!r}: {error}" if term else str(error)
        return micro_batch._replace(shares=shares, problem=problem)

    @cached_property
    def _powers(self) -> Share:
        return powers_of_length(self.rule, self.places)

    @property
    def depends_on_length(self) -> bool:
        """Whether a share depends on the length of its rank's window."""
        # Without weights `Z` has as many summands as the window is long.
        return self._powers != (0.0, 0.0 if self.rule.uses_weight else -1.0)

    @property
    def _of_length(self) -> Share:
        """The factors between shares in a window of one and in this window."""
        return Share(*(self.length**power for power in self._powers)) if self.length > 1 else Share(1.0, 1.0)

    def carried(self, *, last: bool) -> list[Any]:
        """Return the factor of each term of the latest micro-batch, None for no gradient."""
        if self.is_alone:
            self._assumed = self._expected if self.terms == (WHOLE_LOSS,) else None
            return self.alone(self._assumed or self.totals())
        if last:
            self.exchange()
        multipliers = [float(share.multiplier) for share in self.micro_batches[-1].shares.values()]
        return [w * self.lift if w > 0 else None for w in multipliers]

    def alone(self, totals: Totals) -> list[Any]:
        """Return the whole factor of each term of the window's only micro-batch, None for no gradient."""
        scale, shares = self.divisor * self.world.size, self.micro_batches[0].shares.values()
        of_terms = [(share.multiplier, self._usable(totals, index)) for index, share in enumerate(shares)]
        self.divided_by = of_terms[0][1] / self.world.size
        return [_scaled(w, scale, z) if isinstance(w, Tensor) or w > 0 else None for w, z in of_terms]

    def finished(self) -> Any:
        """Return the factor of the reduced gradient, or raise the window's error on all ranks."""
        if not self.is_alone:
            return self._after(self.totals())
        if self._assumed is None:
            if self._raises_late:
                self._checked(self._known)
            return 1.0
        (assumed, *_), (normalizer, *_) = self._assumed.normalizers, self.totals().normalizers
        self.divided_by = normalizer / self.world.size
        return _scaled(assumed, 1.0, normalizer)

    def _after(self, totals: Totals) -> Any:
        """Return the factor of the reduced gradient of a longer window."""
        ratio, of_z = self._of_length
        self.divided_by = ratio * self.divisor / self.lift
        scale = self.divisor * self.world.size
        if self.rule.uses_weight:
            return _scaled(ratio, scale / of_z, self._usable(totals, 0)) / self.lift
        normalizer = self._constant * self.length ** (1 + self._powers.normalizer) - self._missed
        return _scaled(ratio, scale, normalizer) / self.lift

    def _usable(self, totals: Totals, index: int) -> Any:
        """Return `Z` of a loss term, 0 in a faulty window, whose step then changes nothing."""
        z = totals.normalizers[index]
        return z.masked_fill(totals.faults != 0, 0) if isinstance(z, Tensor) else z

    def exchange(self, more: Sequence[float] = ()) -> None:
        """Begin to sum the ranks' summaries, if they are needed, with `more` numbers."""
        self._tally = Tally(self._summarized(more), "sum", self.device, self.world.group) if self._exchanges else None

    def _summarized(self, more: Sequence[float] = ()) -> Tensor:
        """Return the float64 vector whose sum over the ranks `Totals` reads."""
        counted = sum(not each.absent for each in self.micro_batches)
        digest = crc32(self._must_agree.encode()) % 2**16
        faults = sum(each.problem is not None for each in self.micro_batches)
        without_loss = any(each.without_loss for each in self.micro_batches)
        sums, unread = [0.0] * MOST_TERMS, None
        for index, term in enumerate(self.terms if self.rule.uses_weight else ()):
            shares = [each.shares[term] for each in self.micro_batches if term in each.shares]
            if isinstance(shares[0].normalizer, Tensor):
                (unread,) = shares  # alone in its window
            else:
                sums[index] = float(sum(share.normalizer for share in shares))
        header = [faults, without_loss, counted, counted * digest, counted * digest * digest]
        summary = torch.frombuffer(array("d", [*header, *sums, *more]), dtype=torch.float64)
        if self.device.type != "cpu":
            summary = on_device(summary, self.device)
        if unread is not None:
            numbers = torch.stack(unread)
            summary[_HEADER] = unread.normalizer
            summary[0] += ((numbers >= 0) & (numbers < math.inf)).logical_not().sum()
        return summary

    @property
    def _must_agree(self) -> str:
        """What must be equal on all ranks with a micro-batch that counts."""
        terms = ", ".join(map(repr, filter(None, self.terms)))
        given = any(each.explicit for each in self.micro_batches)
        of_length = self.length > 1 and self.depends_on_length
        return (
            f"{f'the loss terms {terms}' if terms else 'one loss'}, {'a' if given else 'no'} weight given"
            f"{f', in a window of {self.length}, which {self.rule.name!r} depends on' if of_length else ''}"
        )

    def totals(self) -> Totals:
        """Return the totals, zeros if nothing was exchanged; if the window is unusable, raise on all ranks.

        On an accelerator nobody waits: the error is that of the previous window.
        """
        self.check()
        before, self._known = self._known, _UNKNOWN
        if self._tally is not None and self.device.type == "cpu":
            self._known = Totals.of(self._tally.read())
            late = self._raises_late and self._assumed is None
            # A total of 0 tells nothing of the next one, by which nothing could be made up for.
            steady = self._known == before and self.world.size > 1 and min(self._known.normalizers[:1]) > 0
            self._expected = self._known if steady else None
            if not late:
                self._checked(self._known)
        elif self._tally is not None:
            self._unchecked = copy.copy(self), self._tally
            self._tally.wait()
            self._known = Totals.of(self._tally.row)
        return self._known

    def check(self) -> Totals:
        """Return the totals of the last window on the host; raise its error if they had not been read yet."""
        unchecked, self._unchecked = self._unchecked, None
        if unchecked is None:
            return self._known
        window, tally = unchecked
        totals = window._checked(Totals.of(tally.read()))  # noqa: SLF001  # of the same class
        self._next_lift = window._next_lift  # noqa: SLF001  # likewise
        return totals

    def _checked(self, totals: Totals) -> Totals:
        """Raise the error of this window, or derive the next lift from its weights."""
        if totals.problem is not None:
            self._raise(totals.problem, self.problems() if totals.faults != 0 else [self._must_agree])
        if self.rule.uses_weight:
            self._next_lift = _lift_of(max(totals.normalizers) / max(totals.pairs, 1)) or self._next_lift
        return totals

    def _raise(self, problem: str, mine: list[str]) -> NoReturn:
        """Raise the same error on all ranks, with what each of them has to say."""
        found = self.world.gather_objects(mine)
        culprits = "".join(f"\n  rank {rank}: {text}" for rank, texts in enumerate(found) for text in texts)
        raise ValueError(f"reduction {self.rule.name!r}: {problem}.{culprits}")

    def problems(self) -> list[str]:
        """Return the problems of this rank's micro-batches. Reads their weights."""
        self.micro_batches = [self._judged(each.read()) for each in self.micro_batches]
        found = enumerate(each.problem for each in self.micro_batches)
        return [f"micro-batch {index} of the window: {problem}" for index, problem in found if problem is not None]


def _lift_of(number: float) -> float | None:
    """Return the inverse of a power of two above a number; None unless the number is finite and positive."""
    # Within these bounds the power and its inverse are normal numbers.
    return math.ldexp(1.0, -min(max(math.frexp(number)[1], -1022), 1022)) if 0 < number < math.inf else None


class Accumulation(Window):
    """A window with the gradients that it computed, and no others.

    With `owned_by_user`, as in manual optimization and in your own loop, gradients may exist before the window and may
    change within it. Autograd accumulates into `leaves`, by default the parameters. The engine does not know those that
    were `frozen` when it was built. With `guards`, gradients of other backwards are an error. On an accelerator, `mask`
    masks gradients by weights that the host has not read.
    """

    _stopped: float | None = None  # the factor of a term that doesn't count

    def __init__(
        self,
        *numbers: Any,
        parameters: Sequence[nn.Parameter],
        owned_by_user: bool,
        leaves: Sequence[nn.Parameter] = (),
        frozen: Sequence[nn.Parameter] = (),
        guards: bool = False,
        mask: Callable[[MicroBatch], None] | None = None,
        compares: bool = False,
        afterwards: bool = False,
    ) -> None:
        super().__init__(*numbers, compares=compares, afterwards=afterwards)
        self.parameters, self._leaves = list(parameters), leaves or list(parameters)
        self.frozen, self._owned_by_user, self._mask = frozen, owned_by_user, mask
        self._before: list[Tensor | None] = []  # gradients from before the window
        self._left: list[tuple[Tensor | None, int]] = []  # gradients that the user may change, and their versions
        self._trained: list[bool] = []
        # The backwards of this step before its last, and their gradients.
        self._pieces, self._of_pieces = 0, list[Tensor | None]()
        self._inside: list[RemovableHandle] = []  # hooks of the running backward
        self._entered = self._begun = self._running = self._last = False
        self._handles = [one.register_hook(self._guard) for one in self._leaves if guards and one.requires_grad]

    def begin_step(self, *, anew: bool) -> None:
        """Begin a step. Abandon the window of an unfinished step; with `anew`, drop one that the epoch cut off."""
        if self._pieces > 0:
            self._of_pieces, self._pieces = [], 0
            self.abandon()
        if anew:
            self.reset()

    @contextmanager
    def _or_abandon(self) -> Iterator[None]:
        """Abandon the window if something raises: the loop may go on, as after a batch that didn't fit in memory."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def enter(self, loss: WeighedLoss, *, last: bool) -> None:
        """Add a loss to the window before its backward, as `Window.take` does."""
        if self._entered:
            self.abandon()  # its backward has never begun
        with self._or_abandon():
            self.take(self._micro_batch(loss), last=last, unread=self._mask is not None)
        self._entered = True

    def _micro_batch(self, loss: WeighedLoss) -> MicroBatch:
        return self._of_user(loss.micro_batch) if self._owned_by_user else loss.micro_batch

    def _of_user(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch, with a problem if it trains other parameters than the window's earlier ones."""
        if self.micro_batches and self._cleared():
            self._before = []
            self.reset()
        before, self._trained = self._trained, [parameter.requires_grad for parameter in self.parameters]
        differs = self.micro_batches and before != self._trained
        return micro_batch._replace(problem=_OTHERS) if differs else micro_batch

    def begin(self, loss: WeighedLoss, *, last: bool) -> None:
        """Weigh a loss at the root of its backward, after which come `reduce` and `end`, or `abandon`."""
        self.enter(loss, last=last)
        with self._or_abandon():
            self._start(loss, last=last)

    def backward(self, loss: WeighedLoss, run: Callable[[], None], *, last: bool, final: bool) -> None:
        """Call `run` for the backward of the entered loss: the `last` of its window, the `final` of its step, or not.

        If it raises, the window is abandoned, and its gradients with it.
        """
        with self._piece(final=final) if self._pieces > 0 or not final else nullcontext(), self._or_abandon():
            self._start(loss, last=last)
            run()
            self._remove_hooks()

    @contextmanager
    def _piece(self, *, final: bool) -> Iterator[None]:
        """Keep the gradients of a step's backwards for the final one: the loop zeroes gradients in between."""
        before, began = [p.grad for p in self.parameters], self.length == self._pieces + 1
        if final and began:
            self._before, before = self._copies(), []
        self._set_gradients(self._of_pieces)
        if final:
            self._of_pieces, self._pieces = [], 0
            self._add(before)
            yield
            return
        self._pieces += 1
        try:
            yield
            self._of_pieces = [p.grad for p in self.parameters]
        finally:
            self._set_gradients(before)

    def _set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients or [None] * len(self.parameters), strict=True):
            parameter.grad = gradient

    def _add(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=False):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def _start(self, loss: WeighedLoss, *, last: bool) -> None:
        self._entered, self._running, self._last = False, True, last
        if self.length == 1:
            # If nothing is multiplied afterwards, gradients may stay: DDP averages what is equal on all ranks.
            self._begin(aside=not last or self.afterwards or self.loss_divisor != 1)
        carried, micro_batch = self.carried(last=last), self.micro_batches[-1]
        discarded = micro_batch.absent or micro_batch.problem is not None
        pairs = [] if discarded else zip(loss.terms, carried, strict=False)
        counting = [term for term, value in pairs if value is not None]
        # If nothing counts, zeros: hooks of the user would get an undefined gradient as None.
        stopped = self._stopped if counting else 0.0
        if loss.coefficients:
            loss.coefficients[:] = [stopped if value is None else value for value in carried]
        if not counting:
            self._inside += gradients_discarded(self._leaves, nan_only=not discarded)
        if len(counting) < len(carried):
            self._inside += nan_stopped(loss.value, counting)
        if self._mask is not None:
            self._mask(micro_batch)

    def _begin(self, *, aside: bool) -> None:
        """Begin a window, and set existing gradients aside."""
        self._before, self._begun = [], True
        if aside and any(parameter.grad is not None for parameter in self.parameters):
            self._before = self._copies()
            self._set_gradients([])

    def _copies(self) -> list[Tensor | None]:
        # A gradient may live in a bucket of DDP, which the next reduction overwrites.
        return [None if parameter.grad is None else parameter.grad.clone() for parameter in self.parameters]

    def _guard(self, gradient: Tensor) -> None:
        if not self._running:
            raise RuntimeError(
                f"a gradient of shape {tuple(gradient.shape)} reached the model by a backward that bypassed"
                f" reduction={self.rule.name!r}, so it would be averaged. Call self.manual_backward,"
                " fabric.backward or GradAvgReducer.weigh(...).backward() with weight= instead of loss.backward()."
            )

    def _remove_hooks(self) -> None:
        for handle in self._inside:
            handle.remove()
        self._inside.clear()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()

    def _cleared(self) -> bool:
        """Return whether the user zeroed the gradients of an unfinished window, which abandons it."""
        gradients = [parameter.grad for parameter in self.parameters]
        touched = any(
            now is not left or (now is not None and version_of(now) != version)
            for now, (left, version) in zip(gradients, self._left, strict=True)
        )
        # Only after a change are values read, which waits for an accelerator.
        return touched and not any(bool(stored(gradient).any()) for gradient in gradients if gradient is not None)

    def reduce(self) -> bool:
        """Finish the gradients if the last backward ended the window; return whether it did."""
        self._remove_hooks()
        self._running = False
        if not self._last:
            if self._owned_by_user:
                self._left = [(p.grad, 0 if p.grad is None else version_of(p.grad)) for p in self.parameters]
            return False
        with self._or_abandon():
            factor = self.finished()
            if isinstance(factor, Tensor) or factor != 1:
                trained = (parameter.grad for parameter in self.parameters if parameter.requires_grad)
                self._scale([gradient for gradient in trained if gradient is not None], factor)
            if unfrozen := [parameter for parameter in self.frozen if parameter.requires_grad]:
                average_gradients(unfrozen, group=self.world.group)
        return True

    def _scale(self, gradients: Sequence[Tensor], factor: Any) -> None:
        scale_each(map(stored, gradients), factor)

    def end(self) -> None:
        """Add the gradients from before the window to the reduced ones, and begin the next window."""
        if self._last:
            self._add(self._before)
            self._before, self._begun = [], False
            self.reset()

    def abandon(self) -> None:
        """Discard the window, and restore the gradients from before it."""
        self._remove_hooks()
        if self._begun:
            self._set_gradients(self._before)
        self._before, self._begun = [], False
        self._entered = self._running = False
        self.reset()
