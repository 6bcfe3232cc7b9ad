"""What a loss weighs, and losses whose gradients are multiplied, or stopped, when their backward runs."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from lightning_gradavg.lightning_internals import stored
from lightning_gradavg.rules import Rule, Share
from lightning_gradavg.tree import batch_samples, leaves

__all__ = [
    "ALWAYS_OR_NEVER",
    "MOST_TERMS",
    "WHOLE_LOSS",
    "MicroBatch",
    "WeighedLoss",
    "Weights",
    "as_weight",
    "gradients_discarded",
    "loss_terms",
    "nan_stopped",
    "sparse_weights",
    "weigh_terms",
    "zero_loss",
]

WHOLE_LOSS = ""
"""The name of the only loss term of a loss that is one tensor."""

MOST_TERMS = 56
"""The most terms of a loss: the ranks exchange rows of one length."""

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
            # A copy, as on the host: the user may keep counting in the same tensor. One to the host is waited for, as
            # torch would fill it later, in pinned memory.
            waits = device.type == "cpu"
            return value.detach().reshape(()).to(device=device, dtype=torch.float64, non_blocking=not waits, copy=True)
        return float(value.detach())
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise TypeError(f"a weight is one number, got {value!r:.80} of type {type(value).__name__}")


class MicroBatch(NamedTuple):
    """What a rank knows about one micro-batch."""

    weights: Mapping[str, Any]  # of each loss term by name; the name of an undivided loss is `WHOLE_LOSS`
    explicit: bool = False  # whether the user gave the weights; if not, they are numbers of samples
    problem: str | None = None  # why the weights are unusable; raised on all ranks together
    absent: bool = False  # whether every rule discards its gradient: it only lets the rank take part
    without_loss: bool = False  # whether that is because `training_step` returned no loss
    shares: Mapping[str, Share] = MappingProxyType({})  # of each loss term, once it is in a window

    def read(self) -> MicroBatch:
        """Return it with weights on the host. Waits for weights on an accelerator."""
        if not any(isinstance(weight, Tensor) for weight in self.weights.values()):
            return self
        return self._replace(weights={term: float(weight) for term, weight in self.weights.items()})

    @property
    def is_zero(self) -> bool:
        """Whether the host knows that all of its weights are 0, or that it is absent."""
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
    """Reads the weights of a run's micro-batches; under a rule without weights they are 1."""

    def __init__(
        self, rule: Rule, device: torch.device, warn: Callable[[str], None], tell: Callable[[str], None]
    ) -> None:
        self._rule, self._device, self._warn, self._tell = rule, device, warn, tell
        self._explicit: bool | None = None
        self._looks, self._ignores = 8 if rule.uses_weight else 0, False

    def look_at(self, batch: Any) -> None:
        """Look for ignored targets in the first batches, while they are still on the host."""
        if self._looks > 0:
            self._looks -= 1
            held = (leaf for _, leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.device.type == "cpu")
            self._ignores = any(bool((leaf == _IGNORE_INDEX).any()) for leaf in held if leaf.dtype in _TARGETS)

    def read(
        self, loss: Any, weight: Any, batch: Any, samples: float | None = None, problem: str | None = None
    ) -> tuple[Mapping[str, Tensor], MicroBatch]:
        """Return a loss's terms by name, and their weights or a problem, which all ranks raise together.

        `samples` is the number of samples in the batch, None if unknown, 0 if they don't count. A `problem` may already
        be known.
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
        if samples is not None and not explicit:
            problem = problem or _dropped(batch, samples)
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
        """Tell the user about the default weight; return a problem if only some steps of the run have weights."""
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


def _dropped(batch: Any, samples: float) -> str | None:
    """Return the problem that a batch has fewer rows than the samples that were loaded for it, if it tells its rows."""
    try:
        rows = batch_samples(batch)
    except ValueError:
        return None
    if rows >= samples:
        return None
    return (
        f"the batch has {rows} rows for {samples} samples of the dataset, and no weight is given. Return"
        ' {"loss": loss, "weight": n} from training_step, or drop samples in the dataset, not in collate_fn'
    )


def weigh_terms(coefficients: list[Any], terms: Iterable[Tensor], begin: Callable[[], None] | None = None) -> Tensor:
    """Return the sum of 0-dim losses, each of whose gradients a backward multiplies by its coefficient.

    The backward first calls `begin`, which may set the coefficients. None stops the gradient of its term.
    """
    copies = [term.clone() for term in terms]
    total = sum(copies[1:], copies[0])
    if begin is not None and total.grad_fn is not None:
        total.grad_fn.register_prehook(lambda _: begin())
    for index, copy in enumerate(copies):
        if copy.grad_fn is not None:
            copy.grad_fn.register_prehook(partial(_weigh, coefficients, index))
    return total


def _weigh(coefficients: list[Any], index: int, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    (gradient,), value = gradients, coefficients[index]
    return (None if gradient is None or value is None else (gradient * value).to(gradient.dtype),)


class WeighedLoss(NamedTuple):
    """A loss whose terms are multiplied by coefficients in its backward."""

    value: Tensor  # the plain sum of the terms, with its graph
    micro_batch: MicroBatch
    coefficients: list[Any]  # one per term; empty if the backward runs on the loss as it is
    terms: Sequence[Tensor] = ()

    @classmethod
    def of(
        cls,
        terms: Mapping[str, Tensor],
        micro_batch: MicroBatch,
        *,
        plain: bool = False,
        begin: Callable[[WeighedLoss], None] | None = None,
    ) -> WeighedLoss:
        """Return a loss with a coefficient per weight: terms that share a weight become one term.

        A `plain` loss keeps its graph unchanged. `begin` is called with the loss when its backward begins.
        """
        losses = list(terms.values())
        if tuple(micro_batch.weights) == (WHOLE_LOSS,):
            losses = [sum(losses[1:], losses[0])]
        value, coefficients = losses[0], [] if plain else [1.0] * len(losses)
        weighed = cls(value, micro_batch, coefficients, losses)
        if not plain:
            # `begin` holds a loss without the new graph: a graph that held itself would never be freed.
            value = weigh_terms(coefficients, losses, None if begin is None else partial(begin, weighed))
        return weighed._replace(value=value)


def sparse_weights(module: nn.Module) -> dict[int, Tensor]:
    """Return the parameters of a module with sparse gradients, by `id`."""
    embeddings = (each for each in module.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag)))
    return {id(each.weight): each.weight for each in embeddings if each.sparse}


class _ZeroGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sparse: Container[int], *parameters: Tensor) -> Tensor:
        ctx.like = [(parameter, id(parameter) in sparse) for parameter in parameters]
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(_no_rows(one) if sparse else torch.zeros_like(one) for one, sparse in ctx.like)


def _no_rows(parameter: Tensor) -> Tensor:
    values = parameter.new_empty((0, *parameter.shape[1:]))
    indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    # The invariants hold by construction; checking them would wait for the device.
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def zero_loss(parameters: Sequence[Tensor], sparse: Container[int]) -> Tensor:
    """Return a loss of 0 that gives every parameter a zero gradient, sparse for each `id` in `sparse`."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    loss: Tensor = _ZeroGradients.apply(sparse, *trained)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return loss


def gradients_discarded(parameters: Iterable[nn.Parameter], *, nan_only: bool) -> list[RemovableHandle]:
    """Replace gradients by zeros before they are accumulated, until the hooks are removed: 0 times NaN is NaN.

    With `nan_only`, other values pass: gradients of other ranks' losses arrive through gathers and through batch norm
    over all ranks.
    """

    def zeros(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        kept = gradient.clone()
        numbers = stored(kept)
        numbers.masked_fill_(numbers.isnan() | (not nan_only), 0)
        return kept

    return [parameter.register_hook(zeros) for parameter in parameters if parameter.requires_grad]


def nan_stopped(loss: Tensor, counting: Sequence[Tensor]) -> list[RemovableHandle]:
    """Replace NaN by 0 around functions written in Python that only terms without a coefficient pass through.

    Beside terms that count, the gradient of such a term is undefined, and torch's own operators pass that on. A
    reentrant checkpoint and a compiled module turn it into zeros, and without terms that count it is zero. An infinite
    derivative turns zeros into NaN, and a gather would send them on.
    """
    handles = []
    for node in _functions_below([loss]) - _functions_below(counting):
        handles += [node.register_prehook(_without_nan), node.register_hook(lambda given, _: _without_nan(given))]
    return handles


def _without_nan(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    # Sparse gradients come from losses of zero, or go to a parameter, where NaN is discarded.
    return tuple(each if each is None or each.is_sparse else each.masked_fill(each.isnan(), 0) for each in gradients)


def _functions_below(losses: Iterable[Tensor]) -> set[Any]:
    """Return the functions written in Python in the graphs of some losses."""
    seen, ahead = set(), list[Any](loss.grad_fn for loss in losses)
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [each for each, _ in node.next_functions]
    return {node for node in seen if isinstance(node, BackwardCFunction)}
