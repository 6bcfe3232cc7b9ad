"""What a loss weighs: the weights that users give with it, or the samples of its batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from lightning_gradavg.arguments import did_you_mean
from lightning_gradavg.rules import Rule
from lightning_gradavg.tree import batch_samples, leaves

__all__ = [
    "ALWAYS_OR_NEVER",
    "MOST_TERMS",
    "WHOLE_LOSS",
    "MicroBatch",
    "Weights",
    "as_weight",
    "loss_terms",
    "misspelt_weight",
]

WHOLE_LOSS = ""
"""The name of the only loss term of a loss that is one tensor."""

MOST_TERMS = 56
"""The most loss terms of a loss: the ranks' exchange has one length, whatever each of them found."""

ALWAYS_OR_NEVER = (
    'return "weight" from every training_step (or pass weight= to every manual_backward, or to what does the backward'
    " in your own loop), or never"
)


def as_weight(value: Any, device: torch.device) -> Any:
    """Return one number of any type as a float; on an accelerator, as a detached 0-dim float64 copy there.

    Raises:
        TypeError: If `value` is not one number.
    """
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
        found = f"{value!r} of type {type(value).__name__}"
    except OverflowError:
        found = f"{type(value).__name__} too large for a float"
    except (TypeError, ValueError):
        found = f"{value!r} of type {type(value).__name__}"
    raise TypeError(f"a weight is one number, got {found}")


@dataclass(frozen=True)
class MicroBatch:
    """What a rank knows of one micro-batch.

    Attributes:
        weights: The weight of every loss term by name; the one name `WHOLE_LOSS` for an undivided loss.
        explicit: Whether the user gave the weight. If not, it is the number of samples.
        problem: Why the weights cannot be used, or None. Raised on all ranks together.
        absent: Whether any rule discards its gradient: it only keeps the rank busy.
        without_loss: Whether it is absent because `training_step` returned no loss.
    """

    weights: Mapping[str, Any]
    explicit: bool = False
    problem: str | None = None
    absent: bool = False
    without_loss: bool = False

    def read(self) -> MicroBatch:
        """Return it with weights that the host has read, which waits for those on an accelerator."""
        if not any(isinstance(weight, Tensor) for weight in self.weights.values()):
            return self
        return replace(self, weights={term: float(weight) for term, weight in self.weights.items()})

    @property
    def is_zero(self) -> bool:
        """Whether the host knows that nothing of it counts."""
        return self.absent or all(isinstance(w, float) and w == 0 for w in self.weights.values())


def loss_terms(loss: Any) -> Mapping[str, Tensor]:
    """Return the terms of a loss by name; the one name `WHOLE_LOSS` for a loss that is one tensor.

    Raises:
        TypeError: If a term is no tensor.
        ValueError: If there are no terms, or too many.
    """
    terms: Mapping[str, Tensor] = loss if isinstance(loss, Mapping) else {WHOLE_LOSS: loss}
    for term in terms.values():
        if not isinstance(term, Tensor):
            raise TypeError(f"a loss is a tensor with a graph, got {term!r} of type {type(term).__name__}")
    if not 0 < len(terms) <= MOST_TERMS:
        raise ValueError(f"a loss has 1 to {MOST_TERMS} named terms, got {len(terms)}: add some of them up")
    return {name: terms[name] for name in sorted(terms)}


def misspelt_weight(result: Mapping[Any, Any]) -> str | None:
    """Return what is wrong with a result of `training_step` without weight that has a key such as "weights".

    A "height" is none: hardly anybody misspells the first letter.
    """
    near = (key for key in map(str, result) if key != "weight" and key[:1] in "wW")
    found = [key for key in near if get_close_matches(key.lower(), ["weight"], cutoff=0.8)]
    return f'the result of training_step has {found[0]!r}: call it "weight", or by another name' if found else None


IGNORE_INDEX = -100
"""The default `ignore_index` of torch's losses."""

_TARGETS = (torch.int16, torch.int32, torch.int64)
_LOOKS = 8

_IGNORED = (
    "integer tensors of a batch hold -100, the targets that torch's losses ignore, and no weight is given: the loss"
    " is then weighted by its samples, including the ignored ones. If it is a mean over targets, return"
    ' {"loss": loss, "weight": (targets != -100).sum()} from training_step.'
)


def holds_ignored_targets(batch: Any) -> bool:
    """Return whether an integer tensor on the host, of a type that targets have, holds `IGNORE_INDEX`."""
    held = (leaf for _, leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.device.type == "cpu")
    return any(bool((leaf == IGNORE_INDEX).any()) for leaf in held if leaf.dtype in _TARGETS)


class Weights:
    """Reads the weights of a run's micro-batches; 1 for each under a rule that uses none.

    Args:
        rule: The rule.
        device: Where the gradients are.
        giver: What gives weights, or does not, in words.
        warn: Takes warnings.
        tell: Takes remarks.
    """

    def __init__(
        self, rule: Rule, device: torch.device, giver: str, warn: Callable[[str], None], tell: Callable[[str], None]
    ) -> None:
        self._rule, self._device, self._giver, self._warn, self._tell = rule, device, giver, warn, tell
        self._explicit: bool | None = None
        self._looks, self._targets_ignored = _LOOKS if rule.uses_weight else 0, False

    def look_at(self, batch: Any) -> None:
        """Look for targets that do not count, in the first batches, before they move to where reading waits."""
        if self._looks > 0:
            self._looks -= 1
            self._targets_ignored = holds_ignored_targets(batch)

    def read(
        self, loss: Any, weight: Any, batch: Any, samples: float | None = None, problem: str | None = None
    ) -> tuple[Mapping[str, Tensor], MicroBatch]:
        """Return a loss's terms by name and their weights, with what is wrong with these for all ranks to raise.

        Args:
            loss: A tensor, or terms by name; see `loss_terms`.
            weight: None, one number for all terms, or one per term by name.
            batch: Its samples are counted if no weight was given.
            samples: Their number, where it is known; 0 if they do not count.
            problem: What is known to be wrong.
        """
        terms = loss_terms(loss)
        return terms, self._of_terms(sorted(terms), weight, batch, samples, problem)

    def _of_terms(
        self, names: list[str], weight: Any, batch: Any, samples: float | None, problem: str | None
    ) -> MicroBatch:
        explicit, named = weight is not None, isinstance(weight, Mapping)
        if not self._rule.uses_weight:
            if explicit:
                self._warn(
                    f'a "weight" was given, but reduction={self._rule.name!r} does not use weights: it is ignored.'
                )
            return MicroBatch({WHOLE_LOSS: float(samples != 0)}, absent=samples == 0)
        problem = problem or self._note(given=explicit)
        if samples == 0:
            return MicroBatch(dict.fromkeys(names if named else [WHOLE_LOSS], 0.0), explicit, problem, absent=True)
        try:
            given: Any = weight if explicit else batch_samples(batch) if samples is None else samples
            given = given if named else {WHOLE_LOSS: given}
            if not named or set(given) == set(names):
                return MicroBatch(
                    {name: as_weight(given[name], self._device) for name in sorted(given)}, explicit, problem
                )
            unknown = next((name for name in sorted(given) if name not in names), "")
            found = f"its weights are named {sorted(given)}, but its loss terms {list(filter(None, names))}"
            found += f":{hint.rstrip('?')} instead of {unknown!r}?" if (hint := did_you_mean(unknown, names)) else ""
        except TypeError as error:
            found = str(error)
        except ValueError:
            found = (
                f"the number of samples cannot be read from a batch of type {type(batch).__name__}:"
                ' return {"loss": loss, "weight": n} from training_step'
            )
        return MicroBatch(dict.fromkeys(names, 0.0), explicit, problem or found)

    def _note(self, *, given: bool) -> str | None:
        """Say what stands in for a weight that is not given; return what is wrong where others of the run had one."""
        before, self._explicit = self._explicit, given
        if given:
            self._looks = 0
        else:
            self._tell(f"GradAvgStrategy: n = samples of the batch, as {self._giver} no weight")
            if self._targets_ignored:
                self._targets_ignored, self._looks = False, 0
                self._warn(_IGNORED)
        if before in (None, given):
            return None
        return (
            f"a weight was {'not ' * given}given in the steps before, but {'not ' * (not given)}in this one:"
            f" {ALWAYS_OR_NEVER}"
        )
