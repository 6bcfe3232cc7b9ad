"""The gradient noise scale: its formulas, the metric, and its agreement with gradients of single samples."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Sequence
from itertools import product
from typing import Any

import matplotlib as mpl
import pytest
import torch
import torch.distributed as dist
from ranks import make_trainer
from torch import Tensor
from torch.utils.data import DataLoader

from examples.digits import NUM_TRAIN, DigitsClassifier, DigitsData
from lightning_gradavg import GradAvgMonitor, GradAvgStrategy, GradientNoiseScale
from lightning_gradavg.report.noise import GradientSpread, estimate_noise, linear_scaling_limit, optimal_lr_ratio


def approx(value, tolerance=1e-12):
    return pytest.approx(value, rel=tolerance, abs=tolerance)


POPULATION = torch.tensor([[1.0, 2.0], [-0.5, 1.0], [2.0, 0.25]], dtype=torch.float64)
"""The gradients of three samples."""


@pytest.mark.parametrize(
    ("sizes", "fractions"),
    [
        ((2, 2), None),
        ((1, 3), None),
        ((1, 2, 1), None),
        ((1, 3), (0.5, 0.5)),
        ((1, 1, 2), (0.2, 0.3, 0.5)),
    ],
)
def test_the_estimates_have_no_bias(sizes, fractions):
    """Over all draws of all ranks, the mean of the estimates is tr(Sigma) and |G|^2, for any shards and fractions."""
    weights = fractions or [size / sum(sizes) for size in sizes]
    estimates = []
    for draw in product(range(len(POPULATION)), repeat=sum(sizes)):
        parts = [part.mean(0) for part in POPULATION[list(draw)].split(list(sizes))]
        total = sum(weight * part for weight, part in zip(weights, parts, strict=True))
        norms = tuple(float(part.square().sum()) for part in parts)
        estimates.append(estimate_noise(GradientSpread(norms, sizes, float(total.square().sum()), fractions)))
    traces, squares = zip(*filter(None, estimates), strict=True)
    mean = POPULATION.mean(0)

    assert 3 ** sum(sizes) == len(traces)
    assert approx(float((POPULATION - mean).square().sum(1).mean())) == sum(traces) / len(traces)
    assert approx(float(mean.square().sum())) == sum(squares) / len(squares)


def test_equal_shards_are_the_estimator_of_two_batch_sizes():
    """With W shards of b it is the published estimator with the batches b and W b."""
    spread = GradientSpread((5.0, 7.0, 9.0), (4.0, 4.0, 4.0), 3.0)
    small, big, small_norm, big_norm = 4.0, 12.0, 7.0, 3.0
    estimate = estimate_noise(spread)
    assert estimate is not None
    assert approx((big * big_norm - small * small_norm) / (big - small)) == estimate.squared_gradient
    assert approx((small_norm - big_norm) / (1 / small - 1 / big)) == estimate.trace


def test_uneven_shards_have_a_closed_form():
    """tr = (A - N) B / (W' - 1) and |G|^2 = (W' N - A) / (W' - 1), over the ranks that have samples."""
    estimate = estimate_noise(GradientSpread((5.0, 7.0, 100.0, 9.0), (3.0, 5.0, 0.0, 8.0), 3.0))
    mean_of_squares = (3 * 5 + 5 * 7 + 8 * 9) / 16
    assert estimate is not None
    assert approx((mean_of_squares - 3) * 16 / 2) == estimate.trace
    assert approx((3 * 3 - mean_of_squares) / 2) == estimate.squared_gradient


@pytest.mark.parametrize(
    ("norms", "sizes", "total"),
    [((4.0,), (8.0,), 4.0), ((4.0, 9.0), (8.0, 0.0), 4.0), ((4.0, math.inf), (8.0, 8.0), 4.0), ((), (), 0.0)],
)
def test_some_steps_say_nothing(norms, sizes, total):
    """One rank with samples, or a norm that is not finite, gives no estimate, and the metric counts the step."""
    assert estimate_noise(GradientSpread(norms, sizes, total)) is None
    metric = GradientNoiseScale()
    metric.update(norms, sizes, total)
    assert 1 == metric.skipped
    assert math.isnan(metric.compute())
    metric.update((5.0, 7.0), (4, 4), 4.0)
    assert 1 == metric.skipped
    assert not math.isnan(metric.compute())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((1.0, 2.0), (1.0,), 1.0), "batch_sizes has 1 values for 2 squared_local_norms; give one per rank"),
        (((1.0, 2.0), (1.0, -1.0), 1.0), r"batch_sizes must be >= 0, got \[1.0, -1.0\]"),
        (((1.0, 2.0), (1.0, 1.0), 1.0, (0.5, 0.6)), r"fractions must add up to 1, got \[0.5, 0.6\] with the sum 1.1"),
    ],
)
def test_spreads_that_cannot_be(arguments, message):
    """Lengths that differ, negative sizes and fractions of another sum are errors that quote them."""
    with pytest.raises(ValueError, match=message):
        GradientNoiseScale().update(*arguments)


@pytest.mark.parametrize("decay", [-0.1, 1.0, 2.0])
def test_decays_that_cannot_be(decay):
    """A decay outside of [0, 1) is an error that quotes it."""
    with pytest.raises(ValueError, match=rf"decay must be None or in \[0, 1\), got {decay}"):
        GradientNoiseScale(decay)


@pytest.mark.parametrize("decay", [None, 0.8])
def test_numerator_and_denominator_are_averaged_apart(decay):
    """The noise scale is the ratio of the averages; as a moving average, newer steps weigh more."""
    steps = [((5.0, 7.0), (4, 4), 3.0), ((2.0, 3.0), (4, 4), 2.0), ((9.0, 4.0), (4, 4), 6.0)]
    metric = GradientNoiseScale(decay)
    for step in steps:
        metric.update(*step)
    estimates = [estimate_noise(GradientSpread(norms, sizes, total)) for norms, sizes, total in steps]
    weights = [1.0, 1.0, 1.0] if decay is None else [decay**2, decay, 1.0]
    traces, squares = zip(*filter(None, estimates), strict=True)
    expected = sum(w * t for w, t in zip(weights, traces, strict=True)) / sum(
        w * s for w, s in zip(weights, squares, strict=True)
    )
    assert approx(expected) == float(metric.compute())


def test_it_is_a_metric():
    """It resets, clones, pickles, takes tensors, gives the value of one step by `forward`, and plots."""
    mpl.use("agg")
    metric = GradientNoiseScale(decay=0.5)
    norms, sizes = torch.tensor([5.0, 7.0]), torch.tensor([4, 4])
    alone = metric(norms, sizes, torch.tensor(4.5))
    assert approx((6 - 4.5) * 8 / (2 * 4.5 - 6)) == float(alone)
    of_second_step = metric((5.0, 6.0), (4, 4), 4.0)
    assert approx((5.5 - 4) * 8 / (2 * 4 - 5.5)) == float(of_second_step)
    assert float(alone) < float(metric.compute()) < float(of_second_step)
    for twin in (metric.clone(), copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))):
        assert torch.equal(metric.compute(), twin.compute())
    figure, axis = metric.plot()
    assert figure is axis.figure
    figure, axis = metric.plot([metric.compute(), alone])
    assert 2 == len(axis.lines[0].get_xdata())
    metric.reset()
    assert 0 == metric.trace == metric.squared_gradient
    with pytest.warns(UserWarning, match="was called before the ``update`` method"):
        assert math.isnan(metric.compute())


def test_states_are_saved_and_merge():
    """state_dict() holds both averages: a metric that loads them and goes on, or merges another, has seen all steps."""
    steps = [((5.0, 7.0), (4, 4), 4.0), ((6.0, 3.0), (4, 4), 4.0), ((9.0, 4.0), (4, 4), 6.0)]
    whole, first, second = GradientNoiseScale(), GradientNoiseScale(), GradientNoiseScale()
    for step in steps:
        whole.update(*step)
    first.update(*steps[0])
    second.load_state_dict(first.state_dict())
    for step in steps[1:]:
        second.update(*step)
    assert {"trace", "squared_gradient", "skipped"} == set(first.state_dict())
    assert approx(float(whole.compute())) == float(second.compute())
    rest = GradientNoiseScale()
    for step in steps[1:]:
        rest.update(*step)
    rest.merge_state(first)
    assert approx(float(whole.compute())) == float(rest.compute())
    rest.reset()
    for other in (first.metric_state, whole.metric_state):
        rest.merge_state(other)
    assert approx(float(first.trace + whole.trace)) == float(rest.trace)
    with pytest.raises(ValueError, match=r"a moving average \(decay=0.5\) has no other one to merge"):
        GradientNoiseScale(0.5).merge_state(first)


@pytest.mark.parametrize("scale", [1.0, 2.0, 16.0])
def test_the_gain_of_adascale_is_the_ratio_of_learning_rates(scale):
    """AdaScale's gain (v + m) / (v / S + m) is (1 + B_noise/B0) / (1 + B_noise/B) with v = tr/B0 and m = |G|^2."""
    trace, squared, base = 37.0, 2.5, 8.0
    v, m = trace / base, squared
    assert approx((v + m) / (v / scale + m)) == optimal_lr_ratio(trace / squared, scale * base, base)


def test_linear_scaling_overshoots_by_less_than_two_up_to_the_limit():
    """Below the limit k / optimal_lr_ratio stays below 2 for any base batch; above it passes 2 for small ones."""
    noise = 900.0
    limit = linear_scaling_limit(noise)
    assert 900.0 == limit
    for base in (1.0, 30.0, 899.0):
        assert limit / base / optimal_lr_ratio(noise, limit, base) < 2
    assert 2 * limit / 1.0 / optimal_lr_ratio(noise, 2 * limit, 1.0) > 2


@pytest.mark.parametrize("noise", [0.0, -3.0, math.nan, math.inf])
def test_noise_scales_that_cannot_be(noise):
    """A noise scale that is not finite and > 0 is an error that quotes it."""
    with pytest.raises(ValueError, match=f"noise_scale must be finite and > 0, got {noise}"):
        linear_scaling_limit(noise)
    with pytest.raises(ValueError, match=f"noise_scale must be finite and > 0, got {noise}"):
        optimal_lr_ratio(noise, 2, 1)


def digits() -> tuple[Tensor, Tensor]:
    data = DigitsData()
    data.setup("fit")
    images, labels = zip(*data.samples[:NUM_TRAIN], strict=True)
    return torch.stack(images).unsqueeze(1), torch.tensor(labels)


def draws(sizes: Sequence[int], batches: int, rank: int) -> list[Tensor]:
    """Return the images of each of a rank's batches, drawn with replacement, in batches of these sizes in turn."""
    draw = torch.Generator().manual_seed(rank)
    return [torch.randint(NUM_TRAIN, (sizes[index % len(sizes)],), generator=draw) for index in range(batches)]


def network() -> DigitsClassifier:
    torch.manual_seed(0)
    return DigitsClassifier(lr=0.0)


def products_of_sample_gradients() -> Tensor:
    """Return the inner products of the gradients of all pairs of images."""
    module, (images, labels) = network(), digits()
    parameters = {name: parameter.detach() for name, parameter in module.network.named_parameters()}

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        output = torch.func.functional_call(module.network, parameters, (image[None],))
        return torch.nn.functional.cross_entropy(output, label[None])

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), chunk_size=256)
    of_images = per_sample(parameters, images, labels)
    gradients = torch.cat([gradient.flatten(1) for gradient in of_images.values()], 1).double()
    return gradients @ gradients.T


def noise_scale_of_draws(products: Tensor, steps: Sequence[Sequence[Tensor]], fractions: Sequence[float]) -> float:
    """Return the ratio of the averaged estimates, from the gradients of the single images that each rank drew."""
    metric = GradientNoiseScale()
    for ranks in steps:
        pairs = [[float(products[one][:, other].mean()) for other in ranks] for one in ranks]
        total = sum(p * q * pairs[i][j] for i, p in enumerate(fractions) for j, q in enumerate(fractions))
        metric.update([pairs[i][i] for i in range(len(ranks))], [len(drawn) for drawn in ranks], total, fractions)
    return float(metric.compute())


def measured_noise_scale(sizes: Sequence[Sequence[int]], steps: int, reduction: Any, accumulation: int) -> float:
    """Body: what the monitor measures in a run on digits whose weights stay as they are."""
    monitor = GradAvgMonitor(1, noise_scale=True, cosines=False)
    trainer = make_trainer(
        GradAvgStrategy(reduction=reduction),
        callbacks=[monitor],
        max_epochs=1,
        accumulate_grad_batches=accumulation,
        use_distributed_sampler=False,
    )
    images, labels = digits()
    rank = dist.get_rank()
    chosen = draws(sizes[rank], steps * accumulation, rank)
    data: Any = [(images[indices], labels[indices]) for indices in chosen]
    trainer.fit(network(), DataLoader(data, batch_size=None))
    assert monitor.noise_scale is not None
    return float(monitor.noise_scale.compute())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "reduction", "accumulation", "fractions", "steps"),
    [
        pytest.param(((64,), (64,)), "mean", 1, (0.5, 0.5), 300, id="even", marks=pytest.mark.full),
        pytest.param(((16,), (112,)), "weighted_mean", 1, (0.125, 0.875), 300, id="uneven", marks=pytest.mark.full),
        pytest.param(((16,), (112,)), "mean", 1, (0.5, 0.5), 60, id="mean of uneven means"),
        pytest.param(((8, 56), (28, 36)), "weighted_mean", 2, (0.5, 0.5), 300, id="uneven windows"),
    ],
)
def test_it_agrees_with_the_gradients_of_single_samples(world, sizes, reduction, accumulation, fractions, steps):
    """On the digits task it is that of the drawn images' own gradients, and that of all images as far as steps tell.

    The estimate of 300 steps has a standard deviation of about 3 %, which falls with their root: within 10 % of 300.
    """
    of_ranks = world(2).run(measured_noise_scale, sizes, steps, reduction, accumulation)
    products = products_of_sample_gradients()
    drawn = [draws(sizes[rank], steps * accumulation, rank) for rank in range(2)]
    windows = [[torch.cat(batches[step * accumulation :][:accumulation]) for batches in drawn] for step in range(steps)]
    squared_gradient = float(products.mean())

    assert of_ranks[0] == of_ranks[1]
    assert noise_scale_of_draws(products, windows, fractions) == pytest.approx(of_ranks[0], rel=1e-5)
    assert float(products.diag().mean()) / squared_gradient - 1 == pytest.approx(
        of_ranks[0], rel=0.1 * math.sqrt(300 / steps)
    )
