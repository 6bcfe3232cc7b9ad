"""What a loss weighs: the weights that users give with it, or the samples of its batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gradavg.rules import Rule, Share
from lightning_gradavg.tree import batch_samples, leaves

__all__ = ["ALWAYS_OR_NEVER", "MOST_TERMS", "WHOLE_LOSS", "MicroBatch", "Weights", "as_weight", "loss_terms"]

WHOLE_LOSS = ""
"""The name of the only loss term of a loss that is one tensor."""

MOST_TERMS = 56
"""The most loss terms of a loss: the ranks' exchange has one length, whatever each of them found."""

ALWAYS_OR_NEVER = (
    'return "weight" from every training_step (or pass weight= to every manual_backward, or to what does the backward'
    " in your own loop), or never"
)


def as_weight(value: Any, device: torch.device) -> Any:
    """Return one number of any type as a float; on an accelerator, as a detached 0-dim float64 copy there."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise TypeError(f"a weight is one number, got a tensor of shape {tuple(value.shape)} and {value.dtype}")
        if value.device.type != "cpu":
            # A copy, as on the host: the user may keep counting in the same tensor.
            return value.detach().reshape(()).to(device=device, dtype=torch.float64, non_blocking=True, copy=True)
        return float(value.detach())
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise TypeError(f"a weight is one number, got {value!r:.80} of type {type(value).__name__}")


class MicroBatch(NamedTuple):
    """What a rank knows of one micro-batch."""

    weights: Mapping[str, Any]  # of every loss term by name; `WHOLE_LOSS` is that of an undivided loss
    explicit: bool = False  # whether the user gave the weight; if not, it is the number of samples
    problem: str | None = None  # why the weights cannot be used; raised on all ranks together
    absent: bool = False  # whether any rule discards its gradient: it only keeps the rank busy
    without_loss: bool = False  # whether that is because `training_step` returned no loss
    shares: Mapping[str, Share] = MappingProxyType({})  # of every loss term, once it is in a window

    def read(self) -> MicroBatch:
        """Return it with weights that the host has read, which waits for those on an accelerator."""
        if not any(isinstance(weight, Tensor) for weight in self.weights.values()):
            return self
        return self._replace(weights={term: float(weight) for term, weight in self.weights.items()})

    @property
    def is_zero(self) -> bool:
        """Whether the host knows that nothing of it counts."""
        return self.absent or all(isinstance(w, float) and w == 0 for w in self.weights.values())


def loss_terms(loss: Any) -> Mapping[str, Tensor]:
    """Return the terms of a loss by name; the one name `WHOLE_LOSS` for a loss that is one tensor."""
    terms: Mapping[str, Tensor] = loss if isinstance(loss, Mapping) else {WHOLE_LOSS: loss}
    for term in terms.values():
        if not isinstance(term, Tensor):
            raise TypeError(f"a loss is a tensor with a graph, got {term!r} of type {type(term).__name__}")
    if not 0 < len(terms) <= MOST_TERMS:
        raise ValueError(f"a loss has 1 to {MOST_TERMS} named terms, got {len(terms)}: add some of them up")
    return {name: terms[name] for name in sorted(terms)}


_IGNORE_INDEX = -100  # the default of torch's losses
_TARGETS = (torch.int16, torch.int32, torch.int64)
_IGNORED = (
    "integer tensors of a batch hold -100, the targets that torch's losses ignore, and no weight is given: the loss"
    " is then weighted by its samples, including the ignored ones. If it is a mean over targets, return"
    ' {"loss": loss, "weight": (targets != -100).sum()} from training_step.'
)


class Weights:
    """Reads the weights of a run's micro-batches; 1 for each under a rule that uses none."""

    def __init__(
        self, rule: Rule, device: torch.device, warn: Callable[[str], None], tell: Callable[[str], None]
    ) -> None:
        self._rule, self._device, self._warn, self._tell = rule, device, warn, tell
        self._explicit: bool | None = None
        self._looks, self._ignores = 8 if rule.uses_weight else 0, False

    def look_at(self, batch: Any) -> None:
        """Look for targets that do not count in the first batches, before they move to where reading waits."""
        if self._looks > 0:
            self._looks -= 1
            held = (leaf for _, leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.device.type == "cpu")
            self._ignores = any(bool((leaf == _IGNORE_INDEX).any()) for leaf in held if leaf.dtype in _TARGETS)

    def read(
        self, loss: Any, weight: Any, batch: Any, samples: float | None = None, problem: str | None = None
    ) -> tuple[Mapping[str, Tensor], MicroBatch]:
        """Return a loss's terms by name and their weights, with what is wrong with these for all ranks to raise.

        `samples` are those of the batch, where their number is known; 0 if they do not count. A `problem` is already
        known.
        """
        terms, explicit, named = loss_terms(loss), weight is not None, isinstance(weight, Mapping)
        if not self._rule.uses_weight:
            if explicit:
                self._warn(
                    f'a "weight" was given, but reduction={self._rule.name!r} does not use weights: it is ignored.'
                )
            return terms, MicroBatch({WHOLE_LOSS: float(samples != 0)}, absent=samples == 0)
        problem = problem or self._note(given=explicit)
        if samples == 0:
            return terms, MicroBatch(dict.fromkeys(terms if named else [WHOLE_LOSS], 0.0), explicit, problem, True)
        try:
            given: Any = weight if explicit else batch_samples(batch) if samples is None else samples
            given = given if named else {WHOLE_LOSS: given}
            weights = {name: as_weight(given[name], self._device) for name in sorted(given)}
            if not named or weights.keys() == terms.keys():
                return terms, MicroBatch(weights, explicit, problem)
            found = f"its weights are named {list(weights)}, but its loss terms {list(filter(None, terms))}"
        except TypeError as error:
            found = str(error)
        except ValueError:
            found = (
                f"the number of samples cannot be read from a batch of type {type(batch).__name__}:"
                ' return {"loss": loss, "weight": n} from training_step'
            )
        return terms, MicroBatch(dict.fromkeys(terms, 0.0), explicit, problem or found)

    def _note(self, *, given: bool) -> str | None:
        """Say what stands in for a weight that is not given; return what is wrong where others of the run had one."""
        before, self._explicit = self._explicit, given
        if given:
            self._looks = 0
        else:
            if self._ignores:
                self._warn(_IGNORED)
            self._tell(
                "GradAvgStrategy: n = samples of the batch, as no weight is given. If the loss is a mean over tokens,"
                " or leaves targets out, give their number as weight"
            )
        if before in (None, given):
            return None
        return (
            f"a weight was {'not ' * given}given in the steps before, but {'not ' * (not given)}in this one:"
            f" {ALWAYS_OR_NEVER}"
        )
