"""The order of a blend's sources: exact shares at every prefix, from any position alone."""

from fractions import Fraction
from random import Random

import numpy as np
import pytest

import raymega.data.blends.blend as module
from raymega.data.blends.blend import Blend, longest_window, whole_weights


def _largest_error(blend, first, num_samples):
    """Over all prefixes and sources: |count - share * n|, and that places follow one another."""
    counts, worst = list(blend.counts(first)), Fraction(0)
    for sample in range(first, first + num_samples):
        source, rank = blend.place(sample)
        assert rank == counts[source]
        counts[source] += 1
        errors = (
            abs(count * blend.total - weight * (sample + 1))
            for count, weight in zip(counts, blend.weights, strict=True)
        )
        worst = max(worst, Fraction(max(errors), blend.total))
    assert tuple(counts) == blend.counts(first + num_samples)
    return worst


def _drawn_weights(random):
    spread, digits = random.choice([1, 4, 9]), random.choice([0, 1, 3])
    number = random.randint(1, 9)
    return [round(1 + 2 ** (spread * random.random()), digits) for _ in range(number)]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("least_block", [1, 64, module.LEAST_BLOCK])
@pytest.mark.sample(20)
def test_every_source_has_its_share_of_every_prefix(seed, least_block, monkeypatch):
    """Also far into a run, where no rank has computed anything before."""
    monkeypatch.setattr(module, "LEAST_BLOCK", least_block)
    random = Random(seed)
    blend = Blend(_drawn_weights(random))
    for first in (0, random.randint(1, 10**10)):
        assert _largest_error(blend, first, 2 * longest_window(blend.weights) + 50) < 1


def test_error_stays_below_one_sample_at_every_prefix_of_100_000():
    places = [Blend([0.6, 0.3, 0.1]).place(sample)[0] for sample in range(100)]
    blend = Blend([0.6, 0.3, 0.1])
    sources = np.array([blend.place(sample)[0] for sample in range(100_000)])
    assert list(sources[:100]) == places
    for source, share in enumerate((Fraction(6, 10), Fraction(3, 10), Fraction(1, 10))):
        counts = np.cumsum(sources == source)
        n = np.arange(1, 100_001)
        assert np.abs(counts * share.denominator - n * share.numerator).max() < share.denominator


def test_order_is_pinned():
    """It is part of a run's identity: a resumed run must find the same samples."""
    found = [Blend([0.6, 0.3, 0.1]).place(sample)[0] for sample in range(10)]
    assert found == [0, 0, 1, 0, 1, 0, 0, 1, 0, 2]


@pytest.mark.parametrize(
    "weights, whole",
    [((0.6, 0.3, 0.1), (6, 3, 1)), ((2, 4), (1, 2)), ((1e-3, 1), (1, 1000)), ((5,), (1,))],
)
def test_weights_are_the_decimal_numbers_that_are_written(weights, whole):
    assert whole_weights(weights) == whole


def test_thousand_sources_open_at_once_and_stay_exact():
    """A source of the least share has a sample in every window, so a block is cheap to make."""
    random = Random(3)
    blend = Blend([random.randint(1000, 100_000) for _ in range(1000)])
    first = random.randint(1, 10**12)
    sources = np.array([blend.place(sample)[0] for sample in range(first, first + 5000)])
    counts = np.array(blend.counts(first)) + np.bincount(sources, minlength=1000)
    shares = [Fraction(weight, blend.total) for weight in blend.weights]
    errors = [abs(int(c) - s * (first + 5000)) for c, s in zip(counts, shares, strict=True)]
    assert max(errors) < 1
