"""The loss of a training step: its terms and their weights, and what multiplies their gradients."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gradavg.reduction.sums import zero_gradient
from lightning_gradavg.reduction.window import MOST_TERMS, WHOLE_LOSS, MicroBatch, as_weight
from lightning_gradavg.rules import Rule, rule_of_replica_losses
from lightning_gradavg.tree import batch_samples, leaves

__all__ = [
    "NoWeights",
    "WeighedLoss",
    "Weights",
    "gradients_discarded",
    "holds_ignored_targets",
    "loss_terms",
    "misspelt_weight",
    "sparse_weights",
    "weigh_terms",
    "zero_loss",
]


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
    """Return what is wrong with a result of `training_step` that has no weight, but a key that looks like one.

    Such as "weights" or "Weight". A "height" is none: hardly anybody misspells the first letter.
    """
    if result.get("weight") is not None:
        return None
    near = (key for key in map(str, result) if key != "weight" and key[:1] in "wW")
    found = [key for key in near if get_close_matches(key.lower(), ["weight"], cutoff=0.8)]
    return f'the result of training_step has {found[0]!r}: call it "weight", or by another name' if found else None


IGNORE_INDEX = -100
"""`ignore_index` of torch's losses, where it is not given."""


def holds_ignored_targets(batch: Any) -> bool:
    """Return whether an integer tensor on the host, of a type that targets have, holds `IGNORE_INDEX`."""
    held = (leaf for _, leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.device.type == "cpu")
    return any(bool((leaf == IGNORE_INDEX).any()) for leaf in held if leaf.dtype in _TARGETS)


_TARGETS = (torch.int16, torch.int32, torch.int64)


_IGNORED = (
    "integer tensors of a batch hold -100, the targets that losses of torch leave out, and no weight is given: a loss"
    " then counts by its samples, also those left out. If its mean is over targets, return"
    ' {"loss": loss, "weight": (targets != -100).sum()} from training_step.'
)


class NoWeights:
    """Reads the weights of a run's micro-batches under a rule that uses none: 1 each.

    Args:
        rule: The rule.
        device: Where the gradients are.
        giver: What gives weights, or does not, in words.
        warn: Takes what a user is warned of.
        tell: Takes what a user is told.

    Attributes:
        explicit: Whether the user gave the last weight; None before the first.
    """

    explicit: bool | None = None

    def __init__(
        self, rule: Rule, device: torch.device, giver: str, warn: Callable[[str], None], tell: Callable[[str], None]
    ) -> None:
        self.rule, self._device, self._giver, self._warn, self._tell = rule, device, giver, warn, tell

    def look_at(self, batch: Any) -> None:
        """Look at a batch before it is moved to where reading it would be waited for."""

    def read(
        self,
        terms: Iterable[str],  # noqa: ARG002  # all terms share one weight
        weight: Any,
        batch: Any,  # noqa: ARG002  # nothing is counted
        samples: float | None = None,
        problem: str | None = None,  # noqa: ARG002  # of a weight
    ) -> MicroBatch:
        """Return the weights of a micro-batch; what is wrong with them is noted in it, for all ranks to raise together.

        Args:
            terms: The names of the loss terms.
            weight: What the user gave: nothing, one number for all terms, or one per term by name.
            batch: The batch, whose samples are counted where no weight was given.
            samples: The number of samples, where it is known; 0 if those of the batch do not count.
            problem: What is known to be wrong with them.
        """
        if weight is not None:
            self._warn(f'a "weight" was given, but reduction={self.rule.name!r} does not use weights: it is ignored.')
        return MicroBatch({WHOLE_LOSS: as_weight(samples != 0, self._device)}, absent=samples == 0)


class Weights(NoWeights):
    """Reads weights under a rule that uses them: those given, or the samples of the batch."""

    _looks = True
    _targets_ignored = False

    def look_at(self, batch: Any) -> None:
        """Look for targets that do not count, until a weight is given or they are found."""
        self._targets_ignored = self._looks and holds_ignored_targets(batch)

    def read(
        self, terms: Iterable[str], weight: Any, batch: Any, samples: float | None = None, problem: str | None = None
    ) -> MicroBatch:
        """See above."""
        explicit, names = weight is not None, sorted(terms)
        problem = problem or self._note(given=explicit)
        named = isinstance(weight, Mapping)
        if samples == 0:
            nothing = self._nothing(names if named else [WHOLE_LOSS])
            return MicroBatch(nothing, explicit, problem, absent=True)
        try:
            if not explicit:
                weight = batch_samples(batch) if samples is None else samples
            given = weight if named else {WHOLE_LOSS: weight}
            if not named or set(given) == set(names):
                weights = {name: as_weight(given[name], self._device) for name in sorted(given)}
                return MicroBatch(weights, explicit, problem)
            found = f"its weights are named {sorted(given)}, but its loss terms {list(filter(None, names))}"
        except TypeError as error:
            found = str(error)
        except ValueError:
            found = (
                f"the number of samples cannot be read from a batch of type {type(batch).__name__}:"
                ' return {"loss": loss, "weight": n} from training_step'
            )
        return MicroBatch(self._nothing(names), explicit, problem or found)

    def _nothing(self, names: Iterable[str]) -> dict[str, Tensor]:
        return dict.fromkeys(names, as_weight(0.0, self._device))

    def _note(self, *, given: bool) -> str | None:
        """Say what stands in for a weight that is not given; return what is wrong where others of the run had one."""
        if not given and self.rule != rule_of_replica_losses():
            self._tell(f"GradAvgStrategy: n = samples of the batch, as {self._giver} no weight")
        if not given and self._targets_ignored:
            self._warn(_IGNORED)
        self._looks = self._looks and not given and not self._targets_ignored
        explicit, self.explicit = self.explicit, given
        if explicit in (None, given):
            return None
        return (
            f"a weight was {'not ' * given}given in the steps before, but {'not ' * (not given)}in this one:"
            ' return "weight" from every training_step (or pass weight= to every manual_backward, or to what does the'
            " backward in your own loop), or never"
        )


class _WeighTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, coefficients: list[Any], *terms: Tensor) -> Tensor:
        ctx.coefficients = coefficients
        ctx.like = [(term.dtype, term.shape) for term in terms]
        return sum(terms[1:], terms[0].clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        weighed = [
            None if value is None else (grad * value).to(dtype).reshape(shape)
            for value, (dtype, shape) in zip(ctx.coefficients, ctx.like, strict=True)
        ]
        return None, *weighed


def weigh_terms(coefficients: list[Any], terms: Iterable[Tensor]) -> Tensor:
    """Return the sum of the terms, whose gradients `coefficients` multiplies when the backward runs.

    The value is the plain sum: only gradients are weighed. The backward may run several times with other coefficients
    (`retain_graph=True`).

    Args:
        coefficients: One number per term, read at each backward. None stops that term's gradient.
        terms: 0-dim losses.
    """
    weighed: Tensor = _WeighTerms.apply(coefficients, *terms)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return weighed


@dataclass
class WeighedLoss:
    """A loss whose terms are weighed when its backward runs.

    Attributes:
        value: The sum of the terms, with graph. Its value is not weighed.
        micro_batch: The weights.
        coefficients: What the backward multiplies each term by; not read where it multiplies by nothing.
    """

    value: Tensor
    micro_batch: MicroBatch
    coefficients: list[Any] = field(default_factory=list)

    @classmethod
    def plain(cls, terms: Mapping[str, Tensor], micro_batch: MicroBatch) -> WeighedLoss:
        """Return a loss that is not weighed."""
        first, *rest = terms.values()
        return cls(sum(rest, first), micro_batch)

    @classmethod
    def of(cls, terms: Mapping[str, Tensor], micro_batch: MicroBatch) -> WeighedLoss:
        """Return a loss to be weighed, of which terms that share a weight are one term."""
        coefficients = [1.0] * len(micro_batch.weights)
        whole = tuple(micro_batch.weights) == (WHOLE_LOSS,)
        losses = [cls.plain(terms, micro_batch).value] if whole else list(terms.values())
        return cls(weigh_terms(coefficients, losses), micro_batch, coefficients)


def sparse_weights(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module whose gradients are sparse, which DDP does not take undefined."""
    embeddings = (each for each in module.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag)))
    return [each.weight for each in embeddings if each.sparse]


class _ZeroGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sparse: Container[int], *parameters: Tensor) -> Tensor:
        ctx.like = [(parameter, int(id(parameter) in sparse)) for parameter in parameters]
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        del grads
        return None, *(zero_gradient(parameter, sparse_dim) for parameter, sparse_dim in ctx.like)


def zero_loss(parameters: Sequence[Tensor], sparse: Container[int]) -> Tensor:
    """Return a loss of 0 that gives every parameter a zero gradient, whatever the parameter's value.

    Args:
        parameters: Leaves, one or more of which require a gradient.
        sparse: The `id` of those whose gradients are sparse.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    loss: Tensor = _ZeroGradients.apply(sparse, *trained)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return loss


@contextmanager
def gradients_discarded(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Replace by zeros every gradient that reaches `parameters` within the context, before it is accumulated.

    A gradient is replaced and not multiplied: 0 times NaN is NaN.
    """

    def zeros(gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else torch.zeros_like(gradient)

    handles = [parameter.register_hook(zeros) for parameter in parameters if parameter.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
