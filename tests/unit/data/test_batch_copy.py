"""Packed micro-batches are the same ones, each tensor once and where a kernel may read it in wide words."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from raymega.data.batch_copy import ALIGNMENT_BYTES, pack_batches
from raymega.data.loader import Loader
from raymega.data.rows import Row, one_shard
from raymega.parallel.comm.process_groups import Group, alone
from raymega.parallel.context_parallel.context import Context
from raymega.plan.batch import make_batch

SEQ_LEN = 16
OUTER = Context(inner=alone(0), outer=alone(0))
INNER = Context(
    inner=Group(name="cp", ranks=(0, 1), index=0, timeout_s=1.0, handle=None), outer=alone(0)
)


class Packed:
    """Rows of two documents, cut elsewhere in every row."""

    num_windows, seq_len = 40, SEQ_LEN
    shards = one_shard(40)

    def need(self, shards):
        pass

    def row(self, index):
        cut = 4 * (1 + index % 3)
        tokens = np.arange(SEQ_LEN) + 100 * index
        return Row(
            tokens=tokens, labels=tokens + 1, mask=tokens % 5 > 0, documents=(cut, SEQ_LEN - cut)
        )


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from _tensors(one)


def _all_tensors(batch):
    return [tensor for part in fields(batch) for tensor in _tensors(getattr(batch, part.name))]


@pytest.mark.parametrize("context", [OUTER, INNER], ids=["cp1", "cp2 all_to_all"])
@pytest.mark.parametrize("depth", [0, 2])
def test_packed_batches_are_the_loaders(context, depth):
    loader = Loader(Packed(), dp_rank=0, device="cpu", context=context, depth=depth)
    batch = make_batch(global_batch_size=5, micro_batch_size=2, dp=1)
    plain = loader.micro_batches(batch, 0)
    buffers = []

    def make_buffer(num_bytes):
        buffers.append(torch.full((num_bytes,), 255, dtype=torch.uint8))
        return buffers[-1]

    packed = pack_batches(plain, "cuda", make_buffer=make_buffer)
    (buffer,), found = buffers, packed.on_device("cpu")
    assert len(found) == 3
    for one, same in zip(plain, found, strict=True):
        before, after = _all_tensors(one), _all_tensors(same)
        # tokens, labels, mask, samples, positions, positions in the row, and what attention reads
        assert len(before) == 6 + 2 * (depth > 0) + (3 if context is INNER else 1)
        for tensor, view in zip(before, after, strict=True):
            assert view.dtype == tensor.dtype and torch.equal(view, tensor)
            assert view.untyped_storage().data_ptr() == buffer.data_ptr()
            assert (view.data_ptr() - buffer.data_ptr()) % ALIGNMENT_BYTES == 0
        assert same.rows.documents == one.rows.documents and same.num_counted == one.num_counted


def test_on_a_cpu_nothing_is_packed():
    batches = Loader(Packed(), dp_rank=0, device="cpu").micro_batches(
        make_batch(global_batch_size=2, micro_batch_size=2, dp=1), 0
    )
    packed = pack_batches(batches, "cpu")
    assert packed.buffer is None and packed.on_device("cpu")[0] is batches[0]
