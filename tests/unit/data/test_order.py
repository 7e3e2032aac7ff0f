from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from raymega.data.order import RowOrder, num_blocks, permute, two_blocks_bytes
from raymega.data.rows import ShardRows, one_shard

# chi-square at 1 %, and its degrees of freedom
CHI_SQUARE_1_PERCENT = {4: 13.277, 19: 36.191, 39: 62.428}


def _order(rows, *, block_bytes, seed=7):
    rows = np.array(rows)
    return RowOrder(ShardRows(rows=rows, num_bytes=10 * rows), seed=seed, block_bytes=block_bytes)


def _whole(num_rows, *, seed=7):
    return RowOrder(one_shard(num_rows), seed=seed, block_bytes=1)


def _chi_square(counts, wanted):
    return sum((counts[key] - want) ** 2 / want for key, want in wanted.items())


@pytest.mark.parametrize("size", [*range(1, 70), 99, 100, 101, 1000, 4096, 10007])
def test_permute_is_a_bijection(size):
    assert sorted(permute(i, size, key=b"k") for i in range(size)) == list(range(size))


def test_permute_mixes():
    order = [permute(i, 1000, key=b"k") for i in range(1000)]
    num_near = sum(abs(a - b) < 20 for a, b in pairwise(order))
    num_fixed = sum(i == window for i, window in enumerate(order))
    assert num_near < 80 and num_fixed < 10  # 39 and 1 expected of a random order


@pytest.mark.parametrize("block_bytes", [1, 100, 260, 1 << 20])
@pytest.mark.parametrize(
    "rows", [[100], [7, 0, 13, 1, 5], [4] * 25, [0, 0, 9], [10, 20, 30, 1]], ids=str
)
def test_each_epoch_visits_every_row_in_an_order_of_its_own(rows, block_bytes):
    order, size = _order(rows, block_bytes=block_bytes), sum(rows)
    epochs = [[order.row(size * e + i) for i in range(size)] for e in range(3)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_seeds_give_different_orders():
    one, two = (_order([9] * 20, block_bytes=300, seed=seed) for seed in (1, 2))
    assert [one.row(i) for i in range(9)] != [two.row(i) for i in range(9)]


def test_order_never_changes():
    # A run that is resumed by a later version must see the same data.
    order = _whole(1000, seed=1234)
    assert [order.row(sample) for sample in (0, 1, 999, 1000)] == [664, 715, 303, 717]
    blocks = _order([50] * 20, block_bytes=2000, seed=1234)
    assert [blocks.row(sample) for sample in (0, 1, 250, 999, 1000)] == [741, 947, 871, 390, 511]


def test_corpus_of_one_block_is_permuted_as_a_whole():
    rows = [30, 0, 11, 59]
    order, whole = _order(rows, block_bytes=1000), _whole(100)
    assert [order.row(i) for i in range(300)] == [whole.row(i) for i in range(300)]


@pytest.mark.parametrize("rows", [[10] * 40, [*range(1, 41)]], ids=["equal", "unequal"])
def test_rows_of_a_block_are_of_its_shards_alone(rows):
    order = _order(rows, block_bytes=10 * max(rows) * 8)
    assert order.num_blocks == 5
    for epoch in range(2):
        by_block = {}
        for sample in range(epoch * sum(rows), (epoch + 1) * sum(rows)):
            at, block, _ = order.place(sample)
            assert at == epoch
            by_block.setdefault(block, set()).add(order.shard(order.row(sample)))
        found = [by_block[block] for block in range(5)]
        assert sorted(shard for shards in found for shard in shards) == list(range(40))
        # drawn from the whole split: no block is a run of neighbours
        assert all(max(shards) - min(shards) > 16 for shards in found)


def test_shards_that_come_next_are_told_in_the_order_of_need():
    order = _order([6] * 40, block_bytes=480)
    for sample in (0, 13, 47, 48, 200, 239, 240 + 100):
        ahead = list(order.shards_from(sample))
        _, block, share = order.place(sample)
        end = next(s for s in range(sample, 999) if order.place(s)[1] != block)
        needed = dict.fromkeys(order.shard(order.row(each)) for each in range(sample, end))
        assert ahead[: len(needed)] == list(needed) and len(ahead) == len(set(ahead)) == 8
        following = list(order.shards_from(end))
        assert list(order.shards_after(sample, 0.5)) == following[:4]
        assert list(order.shards_after(sample, 2 * share + 1)) == following


def test_cache_holds_two_blocks_of_the_largest_shards():
    sizes = np.array([100] * 30 + [40] * 10)
    assert num_blocks(sizes, 500) == 8 and two_blocks_bytes(sizes, 500) == 1000
    assert num_blocks(sizes, 10_000) == 1 and two_blocks_bytes(sizes, 10_000) == 3400
    assert num_blocks(sizes, 10) == 40 and two_blocks_bytes(sizes, 10) == 200


def test_batches_of_512_are_mixed_by_source_and_by_shard():
    # 200 shards of 5 sources, one after the other; a block is 5 % of the split
    rows, per_source, batch = 1000, 40, 512
    order = _order([rows] * 200, block_bytes=10 * rows * 10, seed=3)
    assert order.num_blocks == 20
    # whole batches within a block, from every block of two epochs
    by_source, by_shard, walk = [], [], []
    for start in range(0, 400_000, 10_000):
        shards = [order.shard(order.row(start + i)) for i in range(batch)]
        assert len(set(shards)) == 10
        by_shard.append(_chi_square(Counter(shards), dict.fromkeys(shards, batch / 10)))
        walk += [order.row(start + i) for i in range(batch)]
        in_block = Counter(shard // per_source for shard in set(shards))
        wanted = {source: batch * count / 10 for source, count in in_block.items()}
        by_source.append(_chi_square(Counter(shard // per_source for shard in shards), wanted))
    # 9 degrees of freedom for shards; 1 % of batches lie above by chance
    assert np.mean(by_shard) < 10.5 and np.mean(np.array(by_shard) > 21.666) <= 0.05
    assert np.mean(np.array(by_source) > CHI_SQUARE_1_PERCENT[4]) <= 0.05
    # neighbours within a batch say nothing of each other
    pairs = np.array(walk, dtype=np.float64).reshape(40, batch)
    centred = pairs - pairs.mean(axis=1, keepdims=True)
    lag = (centred[:, :-1] * centred[:, 1:]).sum() / (centred**2).sum()
    assert abs(lag) < 0.01
