"""rng: published Philox answers, and that a block equals the block of the whole."""

import itertools
import math
import random

import numpy as np
import pytest
import torch

from raymega.messages import Box
from raymega.parallel.core import rng

ONES = 0xFFFFFFFF
# Random123 1.14, tests/kat_vectors: philox4x32 10.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, ONES << 32 | ONES, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0 << 32 | 0xA4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
KEY = rng.key(1, "init", "layers.0.mlp.up.weight")


def _whole(shape):
    return Box(offset=(0,) * len(shape), shape=shape)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    words = rng.philox(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(int(word) for word in words) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_any_block_equals_the_block_of_the_whole(dtype):
    shape = (37, 61, 11)
    whole = rng.normal(KEY, _whole(shape), shape, dtype)
    source = random.Random(0)
    for _ in range(30):
        offset = tuple(source.randrange(extent) for extent in shape)
        inner = tuple(source.randint(1, n - o) for n, o in zip(shape, offset, strict=True))
        box = Box(offset=offset, shape=inner)
        block = rng.normal(KEY, box, shape, dtype)
        assert block.shape == inner
        assert torch.equal(block, whole[box.within(_whole(shape))])


def _plain_normal(key, index):
    """The definition: Philox with Python's integers, then Box-Muller."""
    c0, c1, c2, c3 = index & ONES, index >> 32, 0, 0
    k0, k1 = key & ONES, key >> 32
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & ONES, p0 >> 32 ^ c3 ^ k1, p0 & ONES
        k0, k1 = (k0 + 0x9E3779B9) & ONES, (k1 + 0xBB67AE85) & ONES
    one, two = ((high << 21 | low >> 11) * 2.0**-53 for high, low in ((c0, c1), (c2, c3)))
    return one, two


def test_values_are_those_of_the_definition_bit_for_bit_on_any_box(monkeypatch):
    source = random.Random(1)
    for _ in range(60):
        shape = tuple(source.choice((1, 2, 3, 7, 20)) for _ in range(source.randint(1, 4)))
        shape = (source.choice((1, 1 << 40)), *shape)  # also indices beyond 32 bits
        offset = tuple(source.randrange(extent) for extent in shape)
        inner = tuple(source.randint(1, min(8, n - o)) for n, o in zip(shape, offset, strict=True))
        box, key = Box(offset=offset, shape=inner), source.getrandbits(64)
        monkeypatch.setattr(rng, "CPU_CHUNK", source.choice((1, 5, 64, 1 << 14)))
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        places = itertools.product(*(range(o, o + n) for o, n in zip(offset, inner, strict=True)))
        drawn = [
            _plain_normal(key, sum(p * s for p, s in zip(place, strides, strict=True)))
            for place in places
        ]
        one, two = torch.tensor(drawn, dtype=torch.float64).unbind(1)
        wanted = (1.0 - one).log_().mul_(-2.0).sqrt_() * two.mul_(math.tau).cos_()
        found = rng.normal(key, box, shape, torch.float64)
        assert torch.equal(found.flatten(), wanted), (shape, box)


@pytest.mark.parametrize("make", [torch.tensor, lambda words: np.array(words, np.uint64)])
def test_philox_takes_tensors_and_arrays_and_leaves_them_as_they_are(make):
    words = make([5, 6, ONES])
    zeros = make([0, 0, 0])
    found = rng.philox((words, 0, zeros, 0), KEY)
    assert [int(word) for word in words] == [5, 6, ONES]
    assert [int(word) for word in zeros] == [0, 0, 0]
    for at, word in enumerate((5, 6, ONES)):
        alone = rng.philox(tuple(torch.tensor([w]) for w in (word, 0, 0, 0)), KEY)
        assert [int(w[at]) for w in found] == [int(w) for w in alone]


def test_indices_beyond_32_bits_have_their_own_values():
    shape = (1 << 20, 1 << 20)
    rows = [
        rng.normal(KEY, Box(offset=(row, 0), shape=(1, 8)), shape, torch.float64)
        for row in (0, 1 << 12, 1 << 13)
    ]
    assert len({float(value) for row in rows for value in row.flatten()}) == 24


def test_streams_differ_by_seed_purpose_and_name():
    keys = {rng.key(s, p, n) for s in (1, 2) for p in ("init", "dropout") for n in ("a", "b")}
    assert len(keys) == 8
    assert all(0 <= key < 1 << 64 for key in keys)
    shape = (64,)
    values = {tuple(rng.normal(k, _whole(shape), shape, torch.float64).tolist()) for k in keys}
    assert len(values) == 8


def test_key_never_changes():
    assert rng.key(1234, "init", "embedding.tokens.weight") == 0x4F9379442F262453


def test_normal_has_mean_zero_variance_one_and_normal_tails():
    shape = (1 << 18,)
    values = rng.normal(KEY, _whole(shape), shape, torch.float64)
    assert abs(values.mean()) < 0.008
    assert abs(values.std() - 1) < 0.005
    assert abs((values**3).mean()) < 0.02
    assert abs((values**4).mean() - 3) < 0.06
    assert abs((values.abs() < 1).double().mean() - 0.6827) < 0.004
    correlation = (values[1:] * values[:-1]).mean()
    assert abs(correlation) < 0.008
