"""The states of a window: what each allows, and what an exception leaves. One process, no collectives."""

from __future__ import annotations

import gc
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.place import Place
from lightning_gradavg.reduction import lift
from lightning_gradavg.reduction.gradients import ReplicatedGradients
from lightning_gradavg.reduction.lift import WindowOptions
from lightning_gradavg.reduction.loss import MicroBatch, WeighedLoss
from lightning_gradavg.reduction.window import OpenWindows, Window, WindowState
from lightning_gradavg.rules import RULES, Rule, Share, resolve_rule


class Loop:
    """A user's own loop with two parameters, under the mean weighted by weights, or another rule."""

    def __init__(self, rule: Rule = RULES["weighted_mean"], **options: bool) -> None:
        self.first, self.second = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
        given = WindowOptions(rule, (Place(),), World(), torch.device("cpu"), **{"user_ends_windows": True, **options})
        self.windows = OpenWindows(given, ReplicatedGradients([self.first, self.second]))

    def train(self, *, first: bool, second: bool) -> None:
        self.first.requires_grad_(first)
        self.second.requires_grad_(second)

    def loss(self, gradient: float, weight: float) -> WeighedLoss:
        return WeighedLoss(gradient * self.first + gradient * self.second, MicroBatch(weight, explicit=True))

    def backward(self, gradient: float, weight: float, *, last: bool) -> Window:
        return self.backward_of(self.loss(gradient, weight), last=last)

    def backward_of(self, loss: WeighedLoss, *, last: bool) -> Window:
        window = self.windows.next(loss)
        window.add(loss, ends_window=last)
        window.begin_backward(loss)
        loss.value.backward()
        if window.end_backward():
            window.close()
        return window

    @property
    def gradients(self) -> tuple[float | None, float | None]:
        first, second = self.first.grad, self.second.grad
        return first if first is None else first.item(), second if second is None else second.item()


def test_states_in_their_order():
    """EMPTY, ENTERED, BACKWARD, OPEN, ENTERED, BACKWARD, REDUCED, EMPTY."""
    loop = Loop()
    loss = loop.loss(2.0, 1)
    window = loop.windows.next(loss)
    found = [window.state]
    for gradient, last in ((2.0, False), (6.0, True)):
        loss = loop.loss(gradient, 1 if gradient == 2 else 3)
        window.add(loss, ends_window=last)
        found.append(window.state)
        window.begin_backward(loss)
        found.append(window.state)
        loss.value.backward()
        assert window.end_backward() is last
        found.append(window.state)
    window.close()
    found.append(window.state)
    names = "EMPTY ENTERED BACKWARD OPEN ENTERED BACKWARD REDUCED EMPTY"
    assert [WindowState[name] for name in names.split()] == found
    assert ((2 + 18) / 4, (2 + 18) / 4) == loop.gradients


@pytest.mark.parametrize("call", ["begin_backward", "end_backward", "close"])
def test_an_empty_window_allows_add_alone(call):
    loop = Loop()
    loss = loop.loss(1.0, 1)
    window = loop.windows.next(loss)
    with pytest.raises(AssertionError, match="a window that has no micro-batch cannot be one that"):
        getattr(window, call)(*[loss] * (call == "begin_backward"))


def test_gradients_from_before_a_window_are_not_multiplied():
    """They are set aside, and added after the reduction."""
    loop = Loop()
    loop.first.grad = torch.tensor(100.0)
    loop.backward(2.0, 1, last=False)
    loop.backward(6.0, 3, last=True)
    assert (100 + 5.0, 5.0) == loop.gradients


def test_an_exception_leaves_the_gradients_from_before():
    """The window is empty, and the next one counts nothing of it."""
    loop = Loop()
    loop.first.grad = torch.tensor(100.0)
    loop.backward(2.0, 1, last=False)
    loss = loop.loss(6.0, -3)
    window = loop.windows.next(loss)
    window.add(loss, ends_window=True)
    window.begin_backward(loss)
    loss.value.backward()
    with pytest.raises(ValueError, match=r"applied: in micro-batch 1 of 2, weight -3 is not a finite number"):
        window.end_backward()
    assert (100.0, None) == loop.gradients
    assert window.state == WindowState.EMPTY
    loop.backward(4.0, 7, last=True)
    assert (104.0, 4.0) == loop.gradients


def test_two_optimizers_have_windows_of_their_own():
    """First 2 and 6 of weights 1 and 3, second 3 and 5 of weights 1 and 1, in turns."""
    loop = Loop()
    for last, first, second in ((False, (2.0, 1), (3.0, 1)), (True, (6.0, 3), (5.0, 1))):
        loop.train(first=True, second=False)
        loop.backward(*first, last=last)
        loop.train(first=False, second=True)
        loop.backward(*second, last=last)
    assert (5.0, 4.0) == loop.gradients


def test_windows_that_share_parameters_are_refused():
    loop = Loop()
    loop.backward(2.0, 1, last=False)
    loop.train(first=True, second=False)
    with pytest.raises(ValueError, match="two windows are open at once"):
        loop.backward(2.0, 1, last=True)


@pytest.mark.parametrize("to_none", [True, False])
def test_zeroed_gradients_give_a_window_up(to_none):
    loop = Loop()
    loop.backward(2.0, 1, last=False)
    torch.optim.SGD([loop.first, loop.second]).zero_grad(set_to_none=to_none)
    loop.backward(6.0, 3, last=True)
    assert (6.0, 6.0) == loop.gradients


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_zeroed_in_part_are_refused(to_none):
    """As if the first parameter's optimizer had a window of its own: no weight is right for both."""
    loop = Loop()
    loop.backward(2.0, 1, last=False)
    torch.optim.SGD([loop.first]).zero_grad(set_to_none=to_none)
    with pytest.raises(ValueError, match="the gradients of some parameters were zeroed within a window"):
        loop.backward(6.0, 3, last=True)


def test_clipping_within_a_window_is_no_zeroing():
    """It touches all gradients, of which one is zero."""
    loop = Loop()
    loss = WeighedLoss(2 * loop.first + 0 * loop.second, MicroBatch(1, explicit=True))
    window = loop.windows.next(loss)
    window.add(loss, ends_window=False)
    window.begin_backward(loss)
    loss.value.backward()
    window.end_backward()
    for parameter in (loop.first, loop.second):
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)
    loop.backward(6.0, 1, last=True)
    assert ((1 + 6) / 2, 3.0) == loop.gradients


def with_three(clips: Callable[[Loop, nn.Parameter], None]) -> tuple[float | None, ...]:
    """Return the gradients of a window of two micro-batches whose first one leaves 2, 2 and 0, which a loop `clips`."""
    loop, third = Loop(), nn.Parameter(torch.ones(()))
    loop.windows = OpenWindows(loop.windows.options, ReplicatedGradients([loop.first, loop.second, third]))
    loop.backward_of(
        WeighedLoss(2 * loop.first + 2 * loop.second + 0 * third, MicroBatch(1, explicit=True)), last=False
    )
    clips(loop, third)
    loop.backward_of(WeighedLoss(6 * (loop.first + loop.second + third), MicroBatch(1, explicit=True)), last=True)
    return *loop.gradients, None if third.grad is None else third.grad.item()


def test_clipping_some_gradients_is_no_zeroing():
    """As those of one part of a model, of which one is zero; the others are as the backward left them."""

    def clips(loop: Loop, third: nn.Parameter) -> None:
        for parameter in (loop.first, third):
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

    assert ((1 + 6) / 2, (2 + 6) / 2, 3.0) == with_three(clips)


def test_gradients_set_to_none_beside_clipped_ones_are_refused():
    """Clipping sets none to None: one optimizer has zeroed its gradients, and that of another one has clipped them."""

    def clips(loop: Loop, third: nn.Parameter) -> None:
        for parameter in (loop.first, third):
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        loop.second.grad = None

    with pytest.raises(ValueError, match="the gradients of some parameters were zeroed within a window"):
        with_three(clips)


def test_nothing_keeps_gradients_that_the_user_frees():
    loop = Loop()
    loop.backward(2.0, 1, last=False)
    assert loop.first.grad is not None
    alive = torch.utils.weak.TensorWeakRef(loop.first.grad)
    loop.first.grad = loop.second.grad = None
    assert alive() is None


def test_a_loss_whose_backward_never_begins_counts_nothing():
    """As in a pass of Lightning without backward."""
    loop = Loop(user_ends_windows=False)
    for _ in range(2):
        loss = loop.loss(100.0, 9)
        loop.windows.next(loss).add(loss, ends_window=True)
    loop.backward(6.0, 3, last=True)
    assert (6.0, 6.0) == loop.gradients


@pytest.mark.parametrize("runs", [True, False], ids=["after a backward", "without one"])
@pytest.mark.parametrize("on_backward", [None, lambda _: None], ids=["factor set before", "factor set in the backward"])
def test_no_step_keeps_its_loss(on_backward, runs):
    """Nor what the loss was computed from: a graph that holds its own hook is a circle that is never collected."""
    parameter = nn.Parameter(torch.ones(()))
    activation = parameter * 2
    alive = TensorWeakRef(activation)
    loss = WeighedLoss(activation**2, MicroBatch(1), on_backward=on_backward)
    if runs:
        loss.value.backward(retain_graph=True)
    del activation, loss
    gc.collect()
    assert alive() is None


def test_a_share_of_0_stops_nan():
    """A rule of your own may give it to a weight that is not 0."""
    loop = Loop(resolve_rule(lambda _, weight: Share(weight, weight) if weight > 2 else Share(0.0, 0.0)))
    loop.backward(float("nan"), 1, last=False)
    loop.backward(5.0, 4, last=True)
    assert (5.0, 5.0) == loop.gradients


def test_losses_that_reach_no_parameter_in_common_are_refused():
    """As of two optimizers in turns, none of which freezes the parameters of the other."""
    loop = Loop()
    loop.first.grad = torch.tensor(100.0)
    loop.backward_of(WeighedLoss(2 * loop.first, MicroBatch(1, explicit=True)), last=False)
    with pytest.raises(
        RuntimeError,
        match="two windows are open at once: two losses of one window reach no parameter in common",
    ):
        loop.backward_of(WeighedLoss(3 * loop.second, MicroBatch(1, explicit=True)), last=False)
    assert (100.0, None) == loop.gradients


def test_losses_that_reach_some_parameters_in_common_are_served():
    loop = Loop()
    loop.backward_of(WeighedLoss(2 * loop.first, MicroBatch(1, explicit=True)), last=False)
    loop.backward(6.0, 3, last=True)
    assert ((2 + 18) / 4, 18 / 4) == loop.gradients


def test_the_record_of_a_window_without_any_weight():
    loop = Loop(user_ends_windows=False)
    loss = loop.loss(2.0, 0)
    window = loop.windows.next(loss)
    window.add(loss, ends_window=True)
    window.begin_backward(loss)
    loss.value.backward()
    assert window.end_backward()
    assert window.record() == ([loss.micro_batch], [Share(0.0, 0.0)], 0.0)
    window.close()
    assert (0.0, 0.0) == loop.gradients


@pytest.mark.parametrize("rule", ["mean", "sum", "weighted_mean"])
def test_a_window_that_is_cut_off_leaves_the_gradients_from_before(rule):
    """As at the end of an epoch of Lightning, with gradients that the user does not zero."""
    loop = Loop(RULES[rule], user_ends_windows=False)
    loop.first.grad = torch.tensor(100.0)
    loop.backward(2.0, 1, last=False)
    loop.backward(6.0, 1, last=False)
    loop.windows.abandon()
    assert (100.0, None) == loop.gradients


def test_ranks_choose_a_lift_once():
    """Also if nobody had a weight then: a rank that begins its window anew would ask alone, and wait."""
    loop = Loop()
    with mock.patch.object(lift, "ReducedRow", wraps=lift.ReducedRow) as reduced:
        loop.backward(2.0, 0, last=False)
        loop.first.grad = loop.second.grad = None
        loop.backward(6.0, 3, last=True)
        loop.backward(4.0, 7, last=True)
    assert 1 == reduced.call_count
    assert (6.0 + 4.0, 6.0 + 4.0) == loop.gradients
