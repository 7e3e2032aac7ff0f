"""rng: published Philox answers, and that a block equals the block of the whole."""

import itertools
import math
import random

import numpy as np
import pytest
import torch

from raymega.box import Box
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


WIDE_ONES = (1 << 64) - 1


def _plain_word(key, number):
    """The definition: Philox4x64-10 with Python's integers; block 0 has counter 1, as in numpy."""
    c0, c1, c2, c3 = number // 4 + 1, 0, 0, 0
    k0, k1 = key, 0
    for _ in range(10):
        p0, p1 = c0 * 0xD2E7470EE14C6C93, c2 * 0xCA5A826395121157
        c0, c1, c2, c3 = p1 >> 64 ^ c1 ^ k0, p1 & WIDE_ONES, p0 >> 64 ^ c3 ^ k1, p0 & WIDE_ONES
        k0 = (k0 + 0x9E3779B97F4A7C15) & WIDE_ONES
        k1 = (k1 + 0xBB67AE8584CAA73B) & WIDE_ONES
    return (c0, c1, c2, c3)[number % 4]


def _plain_normal(key, index):
    """Box-Muller of the two halves of a word: an even index is the cosine's, an odd one the sine's."""
    word = _plain_word(key, index // 2)
    low, high = ((half ^ 1 << 31) - (1 << 31) for half in (word & ONES, word >> 32))
    radius = math.sqrt(-2.0 * math.log((low + 2**31 + 0.5) / 2**32))
    return radius * (math.sin if index % 2 else math.cos)(math.pi * high / 2**31)


def test_values_are_those_of_the_definition_on_any_box(monkeypatch):
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
        wanted = torch.tensor(
            [
                _plain_normal(key, sum(p * s for p, s in zip(place, strides, strict=True)))
                for place in places
            ],
            dtype=torch.float64,
        )
        found = rng.normal(key, box, shape, torch.float64).flatten()
        # the last bits of logarithm, sine and cosine are the library's
        torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("key", [0, 5, KEY, WIDE_ONES])
def test_tensor_operations_draw_the_words_of_numpy(key):
    blocks = np.array([0, 3, 1, 1 << 40])
    found = rng.TensorWords(key, torch.device("cpu")).draw(blocks, 5)
    assert torch.equal(found, rng.NumpyWords(key).draw(blocks, 5))
    assert int(found[1, 2]) & WIDE_ONES == _plain_word(key, 14)


@pytest.mark.parametrize("columns", [64, 61], ids=["whole blocks", "runs begin inside blocks"])
@pytest.mark.parametrize("part", [(0, 13), (13, 31), (1, 2), (40, 61)])
def test_rows_and_columns_are_bit_for_bit_those_of_the_whole_at_any_chunk(
    columns, part, monkeypatch
):
    shape, (first, end) = (97, columns), part
    whole = rng.normal(KEY, _whole(shape), shape, torch.float64)
    rows = Box(offset=(first, 0), shape=(end - first, columns))
    cut = Box(offset=(0, first), shape=(97, end - first))
    for chunk in (1, 24, 1000, 1 << 14):
        monkeypatch.setattr(rng, "CPU_CHUNK", chunk)
        assert torch.equal(rng.normal(KEY, rows, shape, torch.float64), whole[first:end])
        assert torch.equal(rng.normal(KEY, cut, shape, torch.float64), whole[:, first:end])


def test_rows_neighbours_tensors_and_seeds_are_independent_and_normal():
    """Kolmogorov-Smirnov at 1e-6, and correlations within five standard deviations."""
    shape = (256, 512)
    one, other_seed, other_tensor = (
        rng.normal(rng.key(seed, "init", name), _whole(shape), shape, torch.float64)
        for seed, name in ((1, "a.weight"), (2, "a.weight"), (1, "b.weight"))
    )
    values = one.flatten().sort().values
    steps = torch.arange(len(values) + 1, dtype=torch.float64) / len(values)
    exact = torch.special.ndtr(values)
    distance = max((exact - steps[:-1]).abs().max(), (exact - steps[1:]).abs().max())
    assert distance < 2.7 / math.sqrt(len(values))
    pairs = [(one, other_seed), (one, other_tensor), (one[1:], one[:-1])]
    pairs += [(one[:, lag:], one[:, :-lag]) for lag in (1, 2, 3, 4, 8)]
    pairs += [(one[:, lag:] ** 2 - 1, one[:, :-lag] ** 2 - 1) for lag in (1, 2)]  # also of sizes
    for a, b in pairs:
        scale = math.sqrt(float((a * a).mean() * (b * b).mean()))
        assert abs(float((a * b).mean())) / scale < 5 / math.sqrt(a.numel())


def test_philox_leaves_its_counters_as_they_are():
    words = torch.tensor([5, 6, ONES])
    zeros = torch.zeros_like(words)
    found = rng.philox((words, zeros, zeros, zeros), KEY)
    assert words.tolist() == [5, 6, ONES] and zeros.tolist() == [0, 0, 0]
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
