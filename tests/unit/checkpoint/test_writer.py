"""The writer: what training waits for, what it reports, and what a failing store does to it."""

from dataclasses import replace
from threading import Event

import pytest
import torch

from raymega.checkpoint.keys import data_file, folder_of
from raymega.checkpoint.reader import load
from raymega.checkpoint.writer import CheckpointWriter, Patience
from raymega.storage.memory import MemoryStore
from tests.unit.checkpoint.support import (
    MODELS,
    NO_WAIT,
    STATE,
    FailingStore,
    assemble_shards,
    make_blocks,
    make_grid,
    same,
)

ALONE, MODEL = make_grid("tp1"), MODELS["llama-tied"]


class SlowStore(MemoryStore):
    """Writes when it is allowed to."""

    def __init__(self):
        super().__init__()
        self.is_writing, self.may_write = Event(), Event()

    def put(self, key, chunks, *, overwrite):
        self.is_writing.set()
        assert self.may_write.wait(20)
        super().put(key, chunks, overwrite=overwrite)


def _writer(store, shards, *, patience=NO_WAIT, dp=1):
    return CheckpointWriter(
        store, rank=0, attempt=1, dp=dp, report=shards.append, patience=patience
    )


def test_report_says_what_was_written():
    store, shards = MemoryStore(), []
    writer = _writer(store, shards)
    stall_s = writer.save(100, make_blocks(MODEL, ALONE, 0), STATE, dp_rank=0)
    assert writer.wait()
    (shard,) = shards
    assert (shard.rank, shard.step, shard.state, shard.error) == (0, 100, STATE, "")
    assert shard.stall_s == stall_s >= 0 and shard.write_s >= 0
    assert shard.num_bytes == sum(box.num_bytes for box in shard.boxes)
    assert list(store.list("")) == [folder_of(100) + data_file(attempt=1, rank=0)]
    assert {box.file for box in shard.boxes} == {data_file(attempt=1, rank=0)}


def test_tensors_may_change_as_soon_as_save_returns():
    store, shards = SlowStore(), []
    writer, blocks = _writer(store, shards), make_blocks(MODEL, ALONE, 0)
    writer.save(100, blocks, STATE, dp_rank=0)
    assert store.is_writing.wait(20) and shards == []
    for block in blocks:
        block.values.zero_()
    store.may_write.set()
    assert writer.wait()
    manifest = assemble_shards(shards, ALONE)
    load(store, manifest, blocks)
    wanted = make_blocks(MODEL, ALONE, 0)
    assert same(blocks, wanted)


def test_host_buffer_is_as_large_as_the_share_and_used_again():
    shards = []
    writer, blocks = _writer(MemoryStore(), shards, dp=2), make_blocks(MODEL, ALONE, 0)
    addresses = []
    for step in (1, 2):
        writer.save(step, blocks, STATE, dp_rank=0)
        assert writer.wait()
        addresses.append(writer._buffer.data_ptr())
    assert writer._buffer.numel() == shards[0].num_bytes
    assert shards[0].num_bytes <= sum(b.values.nbytes for b in blocks) // 2 + MODEL.width * 4
    assert addresses[0] == addresses[1]


def test_parameter_that_needs_a_gradient_is_saved():
    shards, blocks = [], make_blocks(MODEL, ALONE, 0)
    blocks[0].values.requires_grad_()
    writer = _writer(MemoryStore(), shards)
    writer.save(1, blocks, STATE, dp_rank=0)
    assert writer.wait() and shards[0].error == ""


def test_replica_without_a_share_writes_no_file_but_reports():
    store, shards = MemoryStore(), []
    writer = CheckpointWriter(store, rank=0, attempt=1, dp=1, report=shards.append)
    writer.save(1, [], STATE, dp_rank=0)
    assert writer.wait()
    assert shards[0].boxes == () and shards[0].error == "" and list(store.list("")) == []


def test_write_is_tried_three_times():
    store, shards = FailingStore(), []
    store.failures["put"] = 2
    writer = _writer(store, shards)
    writer.save(100, make_blocks(MODEL, ALONE, 0), STATE, dp_rank=0)
    assert writer.wait()
    assert shards[0].error == "" and len(list(store.list(""))) == 1


def test_failed_write_is_reported_and_the_next_save_works():
    store, shards = FailingStore(), []
    writer, blocks = _writer(store, shards), make_blocks(MODEL, ALONE, 0)
    store.failures["put"] = 3
    for step in (100, 200):
        writer.save(step, blocks, STATE, dp_rank=0)
        assert writer.wait()
    assert shards[0].error == "StorageError: put refused" and shards[0].boxes == ()
    assert shards[1].error == "" and shards[1].boxes


def test_pauses_between_tries_grow(monkeypatch):
    store, pauses = FailingStore(), []
    monkeypatch.setattr("raymega.checkpoint.writer.time.sleep", pauses.append)
    store.failures["put"] = 3
    writer = _writer(store, [], patience=Patience())
    writer.save(100, make_blocks(MODEL, ALONE, 0), STATE, dp_rank=0)
    assert writer.wait() and pauses == [1.0, 4.0]


def test_mistake_in_the_background_becomes_a_report_too(monkeypatch):
    shards = []
    writer = _writer(MemoryStore(), shards)
    monkeypatch.setattr("raymega.checkpoint.writer.saved_boxes", lambda *_: 1 / 0)
    writer.save(100, make_blocks(MODEL, ALONE, 0), STATE, dp_rank=0)
    assert writer.wait() and shards[0].error == "ZeroDivisionError: division by zero"


def test_save_is_given_up_when_the_one_before_hangs():
    store, shards = SlowStore(), []
    writer = _writer(store, shards, patience=Patience(timeout_s=0.01, retry_delays_s=(0.0, 0.0)))
    blocks = make_blocks(MODEL, ALONE, 0)
    writer.save(100, blocks, STATE, dp_rank=0)
    assert not writer.wait()
    writer.save(200, blocks, STATE, dp_rank=0)
    (given_up,) = shards
    assert given_up.step == 200 and "still being written after 0.01 s" in given_up.error
    store.may_write.set()
    writer._thread.join(20)
    assert [(shard.step, shard.error) for shard in shards[1:]] == [(100, "")]


def test_lack_of_host_memory_is_reported(monkeypatch):
    shards = []
    writer = _writer(MemoryStore(), shards)

    def refuse(*_args, **_kwargs):
        raise RuntimeError("can't allocate memory")

    blocks = make_blocks(MODEL, ALONE, 0)
    monkeypatch.setattr(torch, "empty", refuse)
    writer.save(100, blocks, STATE, dp_rank=0)
    assert "no host memory" in shards[0].error


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_are_saved_through_pinned_memory_and_loaded_back():
    store, shards = MemoryStore(), []
    wanted = make_blocks(MODEL, ALONE, 0)
    blocks = [replace(block, values=block.values.cuda()) for block in wanted]
    writer = _writer(store, shards)
    writer.save(100, blocks, STATE, dp_rank=0)
    for block in blocks:
        block.values.zero_()
    assert writer.wait() and writer._buffer.is_pinned()
    load(store, assemble_shards(shards, ALONE), blocks)
    assert same([replace(block, values=block.values.cpu()) for block in blocks], wanted)
