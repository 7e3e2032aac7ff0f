"""Keyed dropout: a pure function of what an element is, and as good as independent coin flips."""

import pytest
import torch

from raymega.parallel.core import dropout, rng

SAMPLES = torch.tensor([70, 71, 5_000_000_000, -1])
KEYS = dropout.row_keys(1234, SAMPLES, torch.arange(128)[:, None])
PLACE = dropout.place_key(1234, "layers.3.mlp")


def _signs(kept, rate):
    """Mean 0 and variance 1 for independent flips."""
    return (kept.double() - (1 - rate)) / (rate * (1 - rate)) ** 0.5


def _is_uncorrelated(a, b):
    """The mean product of n independent pairs lies within 5 / sqrt(n) of 0."""
    return abs(float((a * b).mean())) < 5 / a.numel() ** 0.5


def test_splitmix_gives_the_published_answers():
    # The generator's own test: seed 1234567, first five numbers.
    states = [rng.signed((1234567 + i * rng.GOLDEN_GAMMA) % (1 << 64)) for i in range(1, 6)]
    words = rng.splitmix(torch.tensor(states)).tolist()
    assert [word % (1 << 64) for word in words] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_mask_never_changes():
    kept = dropout.keep_mask(KEYS[:2, :2] + PLACE, 8, rate=0.5).flatten().int().tolist()
    assert "".join(map(str, kept)) == "11111011111000001010100100110010"


def test_any_rows_equal_those_rows_of_the_whole():
    whole = dropout.keep_mask(KEYS + PLACE, 33, rate=0.3)
    for part in (range(32, 64), range(1, 128, 7), range(127, 128)):
        keys = dropout.row_keys(1234, SAMPLES[1:3], torch.tensor(part)[:, None]) + PLACE
        wanted = whole[part.start : part.stop : part.step, 1:3]
        assert torch.equal(dropout.keep_mask(keys, 33, rate=0.3), wanted)


def test_features_do_not_depend_on_the_width():
    wide, narrow = (dropout.keep_mask(KEYS, width, rate=0.3) for width in (64, 13))
    assert torch.equal(wide[..., :13], narrow)


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_chunks_do_not_matter(monkeypatch, chunk):
    wanted = dropout.keep_mask(KEYS, 50, rate=0.3)
    monkeypatch.setattr(dropout, "CPU_CHUNK", chunk)
    assert torch.equal(dropout.keep_mask(KEYS, 50, rate=0.3), wanted)


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_share_of_dropped_elements(rate):
    kept = dropout.keep_mask(KEYS + PLACE, 2048, rate=rate)
    assert abs(float((~kept).double().mean()) - rate) < 5 * (rate / kept.numel()) ** 0.5 + 2**-17
    by_feature, by_sample = kept.double().mean((0, 1)), kept.double().mean((0, 2))
    assert (by_feature - (1 - rate)).abs().max() < 6 * (rate * (1 - rate) / 512) ** 0.5 + 0.01
    assert (by_sample - (1 - rate)).abs().max() < 5 * (rate / kept[:, 0].numel()) ** 0.5 + 2**-17


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_neighbours_are_independent(rate):
    flips = _signs(dropout.keep_mask(KEYS + PLACE, 1024, rate=rate), rate)
    for distance in (1, 2, 3, 4, 5, 8, 64):
        assert _is_uncorrelated(flips[..., distance:], flips[..., :-distance]), "features"
        assert _is_uncorrelated(flips[distance:], flips[:-distance]), "positions"
    for distance in (1, 2, 3):
        assert _is_uncorrelated(flips[:, distance:], flips[:, :-distance]), "samples"


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_places_samples_and_seeds_are_independent(rate):
    def flips(seed, place, samples=SAMPLES):
        keys = dropout.row_keys(seed, samples, torch.arange(128)[:, None]) + dropout.place_key(
            seed, place
        )
        return _signs(dropout.keep_mask(keys, 1024, rate=rate), rate)

    wanted = flips(1234, "layers.3.mlp")
    others = [flips(1234, "layers.3.attention"), flips(1234, "layers.4.mlp")]
    others += [flips(1235, "layers.3.mlp"), flips(1234, "layers.3.mlp", SAMPLES + 4)]
    assert all(_is_uncorrelated(wanted, other) for other in others)


def test_rows_have_keys_of_their_own():
    samples = torch.tensor([0, 1, 1 << 32, 1 << 40])
    assert dropout.row_keys(1, samples, torch.arange(4096)[:, None]).unique().numel() == 4 * 4096


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_and_gradient_in_every_format(dtype):
    x = torch.randn(128, 4, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    x.requires_grad_()
    y = dropout.dropout(x, KEYS + PLACE, rate=0.25)
    kept = dropout.keep_mask(KEYS + PLACE, 33, rate=0.25)
    assert y.dtype == dtype
    assert torch.equal(y != 0, kept)
    torch.testing.assert_close(y, torch.where(kept, x / 0.75, 0))
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(gradient, torch.where(kept, torch.ones_like(x) / 0.75, 0))


def test_expected_value_is_kept_at_the_rate_that_is_really_used():
    x = torch.ones(128, 4, 4096)
    assert abs(float(dropout.dropout(x, KEYS, rate=0.1).mean()) - 1) < 0.001
    assert torch.isfinite(dropout.dropout(x, KEYS, rate=0.999999)).all()
