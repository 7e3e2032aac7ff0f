import gc
import time
import weakref

import numpy as np
import pytest
import torch

from raymega.data.loader import Loader
from raymega.data.order import RowOrder
from raymega.data.rows import one_shard, whole_row
from raymega.plan.batch import make_batch
from tests.unit.data.datasets import samples_of

SEQ_LEN, NUM_WINDOWS, SEED = 5, 40, 9


class CountingSource:
    """Window i is i * 100 + 1, i * 100 + 2, ...: its tokens tell its number."""

    num_windows, seq_len, context, efficiency = NUM_WINDOWS, SEQ_LEN, float(SEQ_LEN), 1.0
    shards = one_shard(NUM_WINDOWS)

    def need(self, shards):
        pass

    def row(self, index):
        return whole_row(100 * index + np.arange(1, SEQ_LEN + 2))


def _window(sample):
    return RowOrder(one_shard(NUM_WINDOWS), seed=SEED, block_bytes=1).row(sample)


def _step(step, *, dp, micro_batch_size, global_batch_size=16):
    batch = make_batch(
        global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, dp=dp
    )
    loaders = [
        Loader(samples_of(CountingSource(), seed=SEED), dp_rank=rank, device="cpu")
        for rank in range(dp)
    ]
    first = step * global_batch_size
    return [micro for loader in loaders for micro in loader.micro_batches(batch, first)]


def _rows(micro_batches, field):
    return torch.cat([getattr(micro, field) for micro in micro_batches])


@pytest.mark.parametrize("dp, micro_batch_size", [(1, 16), (2, 4), (3, 2), (3, 3), (5, 1)])
@pytest.mark.parametrize("step", [0, 1, 7])
def test_every_grid_reads_the_same_samples_once(dp, micro_batch_size, step):
    micro_batches = _step(step, dp=dp, micro_batch_size=micro_batch_size)
    is_sample = _rows(micro_batches, "mask").sum(1) > 0
    windows = (_rows(micro_batches, "tokens")[is_sample][:, 0] // 100).tolist()
    expected = [_window(16 * step + i) for i in range(16)]
    assert sorted(windows) == sorted(expected)


def test_batch_that_dp_does_not_divide_is_masked_not_repeated():
    micro_batches = _step(0, dp=3, micro_batch_size=2)
    masks = _rows(micro_batches, "mask")
    assert sum(micro.num_counted for micro in micro_batches) == 16 * SEQ_LEN
    assert masks.shape == (18, SEQ_LEN) and masks.sum() == 16 * SEQ_LEN
    is_empty = masks.sum(1) == 0
    assert _rows(micro_batches, "tokens")[is_empty].eq(0).all()
    assert _rows(micro_batches, "labels")[is_empty].eq(0).all()


def test_labels_are_the_tokens_moved_on_by_one():
    (micro,) = _step(0, dp=1, micro_batch_size=16)
    assert micro.tokens.dtype == micro.labels.dtype == torch.int64
    assert micro.mask.dtype == torch.float32
    assert torch.equal(micro.labels, micro.tokens + 1)
    assert micro.num_counted == 16 * SEQ_LEN
    assert micro.tokens.is_contiguous() and micro.labels.is_contiguous()


def test_labels_further_ahead_are_of_the_same_kinds_and_end_with_the_row():
    batch = make_batch(global_batch_size=4, micro_batch_size=4, dp=1)
    source = samples_of(CountingSource(), seed=SEED)
    (micro,) = Loader(source, dp_rank=0, device="cpu", depth=2).micro_batches(batch, 0)
    labels, masks = micro.later
    assert labels.dtype == torch.int64 and masks.dtype == torch.float32
    for depth in (1, 2):
        assert torch.equal(labels[depth - 1][:, :-depth], micro.labels[:, depth:])
        assert masks[depth - 1].tolist() == [[1.0] * (SEQ_LEN - depth) + [0.0] * depth] * 4


def test_samples_are_the_global_ones_behind_the_tokens():
    for micro in _step(3, dp=3, micro_batch_size=2):
        for row, sample in zip(micro.tokens, micro.samples.tolist(), strict=True):
            window = int(row[0]) // 100 if sample >= 0 else -1
            wanted = _window(sample) if sample >= 0 else -1
            assert window == wanted
    samples = _rows(_step(3, dp=3, micro_batch_size=2), "samples").tolist()
    assert sorted(sample for sample in samples if sample >= 0) == list(range(48, 64))


def test_loader_and_its_newest_step_are_freed_with_their_last_reference():
    gc.collect()
    gc.disable()
    try:
        loader = Loader(samples_of(CountingSource(), seed=SEED), dp_rank=0, device="cpu")
        batch = make_batch(global_batch_size=4, micro_batch_size=4, dp=1)
        tokens = weakref.ref(loader.micro_batches(batch, 0)[0].tokens)
        assert tokens() is not None
        del loader
        # the loader's thread ends by itself, a moment later
        until_s = time.monotonic() + 100
        while tokens() is not None and time.monotonic() < until_s:
            time.sleep(0.01)
        assert tokens() is None
    finally:
        gc.enable()
