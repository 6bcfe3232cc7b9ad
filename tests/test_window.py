"""The states of a window: what each allows, what an exception leaves, and the factor. One process, no collectives."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef
from toys import approx

from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.place import Place
from lightning_gradavg.reduction import window as window_module
from lightning_gradavg.reduction.gradients import KeepsApart, scale_gradients
from lightning_gradavg.reduction.loss import MicroBatch, weighed
from lightning_gradavg.reduction.rows import NOTHING_TO_COMPARE, Row, exact_sum
from lightning_gradavg.reduction.window import Ranks, WeightUnit, Window, WindowState
from lightning_gradavg.reproducible.engine import ReplicaGradients
from lightning_gradavg.rules import RULES, Rule, Share

ALONE = Ranks(World(), (Place(),), torch.device("cpu"))


class OfOneRank(KeepsApart):
    """The gradients of a model on one rank, which are multiplied after the last backward."""

    copies = 1

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._parameters = parameters
        self.in_hook: bool | None = None  # what the last reduction was told

    def parameters(self) -> Sequence[nn.Parameter]:
        return self._parameters

    def leaves(self) -> Sequence[nn.Parameter]:
        return self._parameters

    def reduce(self, parameters: Sequence[nn.Parameter], factor: float, *, in_hook: bool) -> None:
        self.in_hook = in_hook
        if factor == 0:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
        else:
            scale_gradients(parameters, factor)

    def reduce_unfrozen(self, factor: float) -> None:
        raise AssertionError("a window does not call it")


class Loop:
    """A user's own loop with two parameters, under the mean weighted by weights, or another rule."""

    def __init__(self, rule: Rule = RULES["weighted_mean"], **options: Any) -> None:
        self.first, self.second = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
        self.unit = WeightUnit(rule, ALONE)
        gradients = OfOneRank([self.first, self.second])
        self.window = Window(rule, ALONE, gradients, self.unit, **{"user_ends_windows": True, **options})

    def train(self, *, first: bool, second: bool) -> None:
        self.first.requires_grad_(first)
        self.second.requires_grad_(second)

    def backward(self, gradient: float, weight: float, *, last: bool, divisor: float = 1.0, **step: bool) -> None:
        self.backward_of(gradient * (self.first + self.second), weight, last=last, divisor=divisor, **step)

    def backward_of(self, loss: Tensor, weight: float, *, last: bool, divisor: float = 1.0, **step: bool) -> None:
        factor = self.window.add(MicroBatch(weight, explicit=True), ends=last, divisor=divisor)
        self.window.begin_backward(**step)
        (weighed(loss, lambda: factor) / divisor).backward()
        self.window.end_backward()
        if self.window.has_ended:
            self.window.reduce()
            self.window.close()

    @property
    def gradients(self) -> tuple[float | None, float | None]:
        first, second = self.first.grad, self.second.grad
        return first if first is None else first.item(), second if second is None else second.item()


def test_states_in_their_order():
    """Every call has its state; (2 * 1 + 6 * 3) / 4 is 5."""
    loop = Loop()
    window = loop.window
    found = [window.state]
    for gradient, weight, last in ((2.0, 1, False), (6.0, 3, True)):
        factor = window.add(MicroBatch(weight), ends=last)
        found.append(window.state)
        window.begin_backward()
        found.append(window.state)
        weighed(gradient * loop.first + gradient * loop.second, lambda: factor).backward()  # noqa: B023  # run at once
        window.end_backward()
        found.append(window.state)
    window.reduce()
    found.append(window.state)
    window.close()
    found.append(window.state)
    names = "EMPTY WEIGHED BACKWARD OPEN WEIGHED BACKWARD ENDED REDUCED EMPTY"
    assert [WindowState[name] for name in names.split()] == found
    assert (5.0, 5.0) == loop.gradients


@pytest.mark.parametrize("call", ["begin_backward", "end_backward", "reduce", "close"])
def test_an_empty_window_allows_add_alone(call):
    with pytest.raises(AssertionError, match="a window that has no micro-batch cannot be one that"):
        getattr(Loop().window, call)()


@pytest.mark.parametrize("name", ["weighted_mean", "normalized_sum", "mean", "sum"])
@pytest.mark.parametrize("divisor", [1.0, 4.0])
@given(weights=st.lists(st.integers(0, 50), min_size=1, max_size=4))
def test_one_factor_is_the_rule(name, divisor, weights):
    """Gradient i + 1 has weight i; N does not matter."""
    loop = Loop(RULES[name])
    for index, weight in enumerate(weights):
        loop.backward(index + 1.0, weight, last=index == len(weights) - 1, divisor=divisor)
    counted = [weight if RULES[name].uses_weight else 1 for weight in weights]
    total = sum(counted)
    multipliers = {
        "weighted_mean": counted,
        "normalized_sum": [float(weight > 0) for weight in weights],
        "mean": counted,
        "sum": counted,
    }[name]
    normalizer = 1 if name == "sum" else total
    expected = 0.0
    if normalizer > 0:
        expected = sum(w * (index + 1) for index, w in enumerate(multipliers)) / normalizer
    assert [approx(expected, 1e-6)] * 2 == [*loop.gradients]


def test_gradients_from_before_a_window_are_not_multiplied():
    """They are taken away, and added after the reduction."""
    loop = Loop()
    loop.first.grad = torch.tensor(100.0)
    loop.backward(2.0, 1, last=False)
    loop.backward(6.0, 3, last=True)
    assert (100 + 5.0, 5.0) == loop.gradients


def test_gradients_from_before_a_step_in_pieces_are_zeroed():
    """Lightning zeroes between the first backward of a step and its last; the gradients of the pieces stay."""
    loop = Loop(user_ends_windows=False)
    loop.first.grad = torch.tensor(100.0)
    loop.backward(2.0, 1, last=False, is_last_of_step=False)
    assert (100.0, None) == loop.gradients
    loop.first.grad = None
    loop.backward(6.0, 3, last=True)
    assert (5.0, 5.0) == loop.gradients


def test_an_exception_leaves_the_gradients_from_before():
    """The window is empty, and the next one counts nothing of it."""
    loop = Loop()
    loop.first.grad = torch.tensor(100.0)
    loop.backward(2.0, 1, last=False)
    with pytest.raises(ValueError, match=r"applied: in micro-batch 1 of 2, weight -3 is not a finite number"):
        loop.backward(6.0, -3, last=True)
    assert (100.0, None) == loop.gradients
    assert loop.window.is_empty
    loop.backward(4.0, 7, last=True)
    assert (104.0, 4.0) == loop.gradients


def of_a_tree(parameters: list[nn.Parameter]) -> ReplicaGradients:
    run: Any = SimpleNamespace(world=World(), ddp=SimpleNamespace(module=nn.ParameterList(parameters)))
    return ReplicaGradients(run, replicas=1)


@pytest.mark.parametrize("gradients_of", [OfOneRank, of_a_tree])
def test_an_exception_within_a_backward_leaves_nothing_of_it(gradients_of):
    """Also where there was no gradient before: the next window would add it up as one from before."""
    parameter = nn.Parameter(torch.ones(()))
    unit = WeightUnit(RULES["weighted_mean"], ALONE, is_fixed=True)
    window = Window(RULES["weighted_mean"], ALONE, gradients_of([parameter]), unit)
    window.add(MicroBatch(1), ends=True)
    window.begin_backward()
    (100 * parameter).backward()
    window.abandon()
    assert parameter.grad is None


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True)])
def test_other_parameters_within_a_window_are_refused(first, second):
    """They begin to train, or stop: as where two optimizers take turns."""
    loop = Loop()
    loop.train(first=True, second=first)
    loop.backward_of(2.0 * loop.first, 1, last=False)
    loop.train(first=True, second=second)
    with pytest.raises(ValueError, match="in micro-batch 1 of 2, other parameters train than in the micro-batches"):
        loop.backward_of(2.0 * loop.first, 1, last=True)


@pytest.mark.parametrize(("at_once", "refused"), [(True, True), (False, False)])
def test_several_optimizers_in_a_window(at_once, refused):
    """Each may have a loss of its own, of other weights; but not where the other one's parameters are frozen."""
    loop = Loop(optimizers=lambda: optimizers)
    optimizers = [torch.optim.SGD([loop.first]), torch.optim.SGD([loop.second])]
    loop.train(first=True, second=at_once)
    loop.backward_of(2.0 * loop.first, 1, last=False)
    if refused:
        with pytest.raises(ValueError, match="several optimizers train in a window of several micro-batches"):
            loop.backward_of(6.0 * loop.second, 1, last=True)
        return
    loop.backward_of(6.0 * loop.first, 1, last=True)
    assert (4.0, None) == loop.gradients


@pytest.mark.parametrize("to_none", [True, False])
def test_zeroed_gradients_give_a_window_up(to_none):
    loop = Loop()
    loop.first.grad = torch.tensor(100.0)
    loop.backward(2.0, 1, last=False)
    torch.optim.SGD([loop.first, loop.second]).zero_grad(set_to_none=to_none)
    loop.backward(6.0, 3, last=True)
    assert (6.0, 6.0) == loop.gradients


def test_gradients_set_to_none_in_part_are_refused():
    """As if the first parameter's optimizer had a window of its own: no weight is right for both."""
    loop = Loop()
    loop.backward(2.0, 1, last=False)
    loop.first.grad = None
    with pytest.raises(ValueError, match="the gradients of some parameters were zeroed within a window"):
        loop.backward(6.0, 3, last=True)


@pytest.mark.parametrize(
    "clip", [lambda gradient: gradient.mul_(0.5), lambda gradient: gradient * 0.5], ids=["in place", "anew"]
)
def test_clipping_within_a_window_is_no_zeroing(clip: Callable[[Tensor], Tensor]):
    """In place or not. It touches all gradients, of which one is zero."""
    loop = Loop()
    loop.backward_of(2 * loop.first + 0 * loop.second, 1, last=False)
    for parameter in (loop.first, loop.second):
        assert parameter.grad is not None
        parameter.grad = clip(parameter.grad)
    loop.backward(6.0, 1, last=True)
    assert ((1 + 6) / 2, 3.0) == loop.gradients


def test_gradients_that_are_zero_from_the_start_are_no_zeroing():
    """As of a hinge loss in its flat part, whose weight counts: (0 * 1 + 6 * 3) / 4."""
    loop = Loop()
    loop.backward(0.0, 1, last=False)
    loop.backward(6.0, 3, last=True)
    assert (4.5, 4.5) == loop.gradients


def test_nothing_keeps_gradients_that_the_user_frees():
    loop = Loop()
    loop.backward(2.0, 1, last=False)
    assert loop.first.grad is not None
    alive = TensorWeakRef(loop.first.grad)
    loop.first.grad = loop.second.grad = None
    assert alive() is None


def test_a_loss_whose_backward_never_begins_counts_nothing():
    """As in a pass of Lightning without backward."""
    loop = Loop(user_ends_windows=False)
    for _ in range(2):
        loop.window.add(MicroBatch(9), ends=True)
    loop.backward(6.0, 3, last=True)
    assert (6.0, 6.0) == loop.gradients


@pytest.mark.parametrize("runs", [True, False], ids=["after a backward", "without one"])
def test_no_step_keeps_its_loss(runs):
    """Nor what the loss was computed from: a graph that holds its own loss is a circle that is never collected."""
    parameter = nn.Parameter(torch.ones(()))
    activation = parameter * 2
    alive = TensorWeakRef(activation)
    loss = weighed(activation**2, lambda: 2.0)
    if runs:
        loss.backward(retain_graph=True)
    del activation, loss
    gc.collect()
    assert alive() is None


def test_a_weighed_loss_keeps_its_value():
    """Hooks of parameters see the gradient times w / u."""
    loop = Loop()
    seen: list[float] = []
    loop.first.register_hook(lambda gradient: seen.append(gradient.item()))
    factor = loop.window.add(MicroBatch(3), ends=True)
    loss = weighed(5 * loop.first, lambda: factor)
    assert (5.0, 3 / 4) == (loss.item(), factor)
    loop.window.begin_backward()
    loss.backward()
    assert [5 * 3 / 4] == seen
    loop.window.end_backward()
    loop.window.reduce()
    assert (5.0, None) == loop.gradients


def test_weights_that_add_up_to_0_erase_nan():
    loop = Loop()
    loop.backward(math.nan, 0, last=False)
    loop.backward(math.nan, 0, last=True)
    assert (0.0, 0.0) == loop.gradients


@pytest.mark.parametrize("rule", ["sum", "weighted_mean"])
def test_a_window_that_is_cut_off_leaves_the_gradients_from_before(rule):
    """As at the end of an epoch of Lightning, with gradients that the user does not zero."""
    loop = Loop(RULES[rule], user_ends_windows=False)
    loop.first.grad = torch.tensor(100.0)
    loop.backward(2.0, 1, last=False)
    loop.backward(6.0, 1, last=False)
    loop.window.abandon()
    assert (100.0, None) == loop.gradients


def test_the_record_of_a_window_without_any_weight():
    loop = Loop(user_ends_windows=False)
    loop.window.add(MicroBatch(0), ends=True)
    loop.window.begin_backward()
    (2.0 * loop.first).backward()
    loop.window.end_backward()
    loop.window.reduce()
    assert loop.window.record() == ([MicroBatch(0)], [Share(0.0, 0.0)], 0.0)


def test_ranks_choose_a_unit_together_once():
    """Also if nobody had a weight then: a rank that begins its window anew would ask alone, and wait."""
    loop = Loop()
    with mock.patch.object(window_module, "RowExchange", wraps=window_module.RowExchange) as exchange:
        loop.backward(2.0, 0, last=False)
        loop.first.grad = loop.second.grad = None
        loop.backward(6.0, 3, last=True)
        loop.backward(4.0, 7, last=True)
    asked = [call for call in exchange.call_args_list if len(call.args[0]) == 1]
    assert (1, 3) == (len(asked), exchange.call_count)
    assert (6.0 + 4.0, 6.0 + 4.0) == loop.gradients


def test_the_unit_is_that_of_the_last_window_in_which_something_counted():
    """A first weight of 1e-8 serves its own window alone; one of 0 changes nothing."""
    loop = Loop()
    found = []
    for weight in (2.0**-20, 4096, 0, 3):
        found.append(loop.window.add(MicroBatch(weight), ends=True))
        loop.window.abandon()
        loop.backward(1.0, weight, last=True)
    assert [0.5, 4096 * 2.0**19, 0.0, 3 * 2.0**-13] == found


def test_the_unit_stays_while_a_window_is_open():
    """All losses of a window carry the same, whatever the windows of other models were."""
    loop = Loop()
    loop.backward(1.0, 1, last=False)
    loop.unit.follow(1024.0)
    assert loop.unit.value == 2
    loop.backward(1.0, 2, last=True)
    assert loop.unit.value == 2.0**2


@given(st.floats(1e-300, 1e300))
def test_the_unit_is_a_power_of_two(number):
    """Multiplying by it is exact, and brings the largest weight near 1."""
    unit = WeightUnit(RULES["weighted_mean"], ALONE)
    unit.choose(number)
    assert math.frexp(unit.value)[0] == 0.5
    assert 0.5 <= number / unit.value <= 1


@pytest.mark.parametrize("name", ["mean", "sum", "normalized_sum", "mean_of_node_means"])
def test_rules_whose_multiplier_is_no_weight_have_no_unit(name):
    unit = WeightUnit(RULES[name], ALONE)
    unit.choose(4096.0)
    unit.follow(4096.0)
    assert unit.value == 1


def test_a_bucket_of_a_backward_that_was_not_weighed():
    """It is of no weighed loss, or the window goes on: then the factor is 0, and the backward raises when it ends."""
    loop = Loop()
    assert not loop.window.reduces_bucket(is_last_bucket=True)
    loop.window.add(MicroBatch(1), ends=False)
    loop.window.begin_backward()
    assert loop.window.reduces_bucket(is_last_bucket=True)
    assert loop.window.factor() == 0
    with pytest.raises(RuntimeError, match=r"DDP reduced the gradients in a backward within no_sync\(\)"):
        loop.window.end_backward()
    assert loop.window.is_empty


@pytest.mark.parametrize(
    ("buckets", "in_hook"),
    [([], False), ([False], False), ([False, True], True)],
)
def test_a_window_is_reduced_in_the_hook_with_the_last_bucket(buckets, in_hook):
    """DDP waits for a parameter without a gradient, in the bucket that it is in."""
    loop = Loop()
    loop.window.add(MicroBatch(1), ends=True)
    loop.window.begin_backward()
    for is_last in buckets:
        assert loop.window.reduces_bucket(is_last_bucket=is_last)
    loop.window.end_backward()
    loop.window.reduce()
    assert loop.window._gradients.in_hook is in_hook


def row(*, agreement: float = 7.0, normalizer: float = 1.0, problems: float = 0.0, weights: float = 5.0) -> Row:
    return Row(normalizer, 0.0, 1.0, problems, agreement, weights)


@pytest.mark.parametrize(
    ("rows", "copies", "factor"),
    [
        ([row(), row()], 1, 1 / 2),
        ([row(), row(agreement=8.0)], 1, 0.0),
        ([row(), row(agreement=NOTHING_TO_COMPARE, normalizer=0.0)], 1, 1.0),
        ([row(agreement=NOTHING_TO_COMPARE, normalizer=0.0)] * 3, 1, 0.0),
        ([row(), row(problems=1.0)], 1, 0.0),
        ([row(normalizer=1e308), row(normalizer=1e308)], 1, 0.0),
        ([row(normalizer=math.nan), row()], 1, 0.0),
        ([row(normalizer=1e-320)] * 2, 1, 0.0),  # its inverse is infinite
        ([row()] * 4095 + [row(agreement=8.0)], 1, 0.0),
        ([row()] * 4096, 1, 1 / 4096),
        ([row(weights=4.0)] * 2 + [row()] * 2, 2, 1 / 2),
        ([row(weights=4.0), row()] * 2, 2, 0.0),
    ],
)
def test_the_factor_of_all_ranks_rows(rows, copies, factor):
    """1 / Z, or 0 where all ranks will raise. A rank without a micro-batch agrees with all."""
    loop = Loop()
    loop.unit.choose(0.75)  # u is 1
    loop.window.add(MicroBatch(1), ends=True)
    loop.window.begin_backward()
    loop.window._gradients.copies = copies
    loop.window._contents.rows = rows
    assert approx(factor) == loop.window.factor()


def test_weights_that_are_too_small_beside_their_unit():
    """Z in units of 2**1000 is 0 in float64. All ranks raise, and the hook does not."""
    loop = Loop()
    loop.unit.choose(2.0**999)
    loop.window.add(MicroBatch(1e-300), ends=True)
    loop.window.begin_backward()
    assert loop.window.factor() == 0
    loop.window.end_backward()
    with pytest.raises(ValueError, match="the weights add up to 1e-300"):
        loop.window.reduce()


@given(st.lists(st.floats(2**-20, 2**20), min_size=1, max_size=9), st.integers(0, 8))
def test_a_sum_does_not_depend_on_who_adds_up_what(numbers, cut):
    """Rows hold a sum and what rounding took off it: twice the digits, for weights that differ by less than 2**50."""
    parts = []
    for part in (numbers[:cut], numbers[cut:]):
        rounded = exact_sum(part)
        parts += [rounded, exact_sum([*part, -rounded])]
    assert exact_sum(numbers) == exact_sum(parts)
