"""rng: published Philox answers, and that a block equals the block of the whole."""

import random

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
