"""The writer: what training waits for, what it reports, and what a failing store does to it."""

import mmap
from dataclasses import replace
from functools import partial
from itertools import pairwise
from threading import Barrier, Event, Semaphore
from types import SimpleNamespace

import pytest
import torch

from raymega.checkpoint.format.data_file import share_boxes
from raymega.checkpoint.format.keys import CheckpointId, checkpoint_of, data_file, folder_of
from raymega.checkpoint.load.reader import load
from raymega.checkpoint.save.host_copy import HostCopy
from raymega.checkpoint.save.rate_limit import RateLimiter
from raymega.checkpoint.save.writer import RETRY, CheckpointWriter, SaveLimits
from raymega.errors import StorageError
from raymega.messages import RankSaveProgress, ShardSaved
from raymega.plan.grid import Grid
from raymega.storage.retry import RETRY as STORE_RETRY
from tests.support.fakes import FakeClock
from tests.support.memory_store import MemoryStore
from tests.unit.checkpoint.support import (
    MODELS,
    NO_WAIT,
    QUIET,
    STATE,
    FailingStore,
    assemble_shards,
    make_blocks,
    make_grid,
    same,
)

ALONE, MODEL = make_grid("tp1"), MODELS["llama-tied"]
GUARD_S = 60
"""Less than the longest wait of a save, so that a save which waits for what it must not is seen."""


class SlowStore(MemoryStore):
    """Writes when it is allowed to."""

    def __init__(self):
        super().__init__()
        self.is_writing, self.may_write = Event(), Event()

    def put(self, key, chunks, *, overwrite):
        self.is_writing.set()
        assert self.may_write.wait(GUARD_S)
        super().put(key, chunks, overwrite=overwrite)


def _writer(store, shards, *, retry=NO_WAIT, limits=QUIET):
    return CheckpointWriter(
        store, rank=0, attempt=1, report=shards.append, retry=retry, limits=limits
    )


def test_report_says_what_was_written():
    store, shards = MemoryStore(), []
    writer = _writer(store, shards)
    stall_s = writer.save(100, make_blocks(MODEL, ALONE, 0), STATE)
    assert writer.wait()
    (shard,) = shards
    assert (shard.rank, shard.step, shard.state, shard.error) == (0, 100, STATE, "")
    assert shard.stall_s == stall_s >= 0 and shard.write_s >= 0
    assert shard.num_bytes == sum(box.num_bytes for box in shard.boxes)
    assert list(store.list("")) == [folder_of(100) + data_file(attempt=1, rank=0)]
    assert {box.file for box in shard.boxes} == {data_file(attempt=1, rank=0)}


def test_stall_is_what_training_waited_for_the_save_before_and_for_the_copy(monkeypatch):
    clock, shards = FakeClock(), []
    monkeypatch.setattr(
        "raymega.checkpoint.save.writer.time", SimpleNamespace(monotonic=clock.monotonic)
    )
    reserve = HostCopy.reserve

    def slow(self, *sizes, **options):
        clock.advance(2.0)
        reserve(self, *sizes, **options)

    monkeypatch.setattr(HostCopy, "reserve", slow)
    writer = _writer(MemoryStore(), shards)
    assert writer.save(100, make_blocks(MODEL, ALONE, 0), STATE, waited_s=3.0) == 5.0
    assert writer.wait()


def test_tensors_may_change_as_soon_as_save_returns():
    store, shards = SlowStore(), []
    writer, blocks = _writer(store, shards), make_blocks(MODEL, ALONE, 0)
    writer.save(100, blocks, STATE)
    assert store.is_writing.wait(GUARD_S) and shards == []
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
    writer, blocks = _writer(MemoryStore(), shards), make_blocks(MODEL, Grid(dp=2), 0)
    addresses = []
    for step in (1, 2):
        writer.save(step, blocks, STATE)
        assert writer.wait()
        addresses.append(writer._host._buffer.data_ptr())
    assert writer.host_bytes == shards[0].num_bytes
    assert shards[0].num_bytes <= sum(b.values.nbytes for b in blocks) // 2 + MODEL.hidden_size * 4
    assert addresses[0] == addresses[1]


def test_memory_reserved_ahead_is_what_saves_use():
    shards = []
    writer, blocks = _writer(MemoryStore(), shards), make_blocks(MODEL, ALONE, 0)
    writer.reserve(blocks)
    reserved = writer._host._buffer.data_ptr()
    writer.save(1, blocks, STATE)
    assert writer.wait()
    assert writer._host._buffer.data_ptr() == reserved
    assert writer.host_bytes == shards[0].num_bytes > 0


def test_shares_are_found_once_for_the_same_blocks_and_anew_for_others(monkeypatch):
    divided, store, shards = [], MemoryStore(), []

    def count(local_blocks, **options):
        divided.append(len(local_blocks))
        return share_boxes(local_blocks, **options)

    monkeypatch.setattr("raymega.checkpoint.save.writer.share_boxes", count)
    writer, blocks = _writer(store, shards), make_blocks(MODEL, ALONE, 0)
    others = [replace(block, holders=(0, 1)) for block in blocks]
    for step, held in ((1, blocks), (2, make_blocks(MODEL, ALONE, 0)), (3, others), (4, blocks)):
        writer.save(step, held, STATE)
        assert writer.wait()
    assert divided == [len(blocks)] * 3
    sizes = [shard.num_bytes for shard in shards]
    assert sizes[0] == sizes[1] == sizes[3] > sizes[2]
    for shard in (shards[1], shards[3]):
        load(store, assemble_shards([shard], ALONE), found := make_blocks(MODEL, ALONE, 0, is_filled=False))  # fmt: skip
        assert same(found, blocks)


def test_parameter_that_needs_a_gradient_is_saved():
    shards, blocks = [], make_blocks(MODEL, ALONE, 0)
    blocks[0].values.requires_grad_()
    writer = _writer(MemoryStore(), shards)
    writer.save(1, blocks, STATE)
    assert writer.wait() and shards[0].error == ""


def test_replica_without_a_share_writes_no_file_but_reports():
    store, shards = MemoryStore(), []
    writer = _writer(store, shards)
    writer.save(1, [], STATE)
    assert writer.wait()
    assert shards[0].boxes == () and shards[0].error == "" and list(store.list("")) == []


def test_write_is_tried_three_times():
    store, shards = FailingStore(), []
    store.failures["put"] = 2
    writer = _writer(store, shards)
    writer.save(100, make_blocks(MODEL, ALONE, 0), STATE)
    assert writer.wait()
    assert shards[0].error == "" and len(list(store.list(""))) == 1


@pytest.mark.parametrize("is_last", [False, True])
def test_last_save_is_tried_until_the_store_recovers(is_last):
    """Other saves are given up sooner, as the next one makes up for them."""
    store, reports, pauses = FailingStore(), [], []
    store.failures["put"] = 30
    patient = replace(STORE_RETRY.lasting(600.0), sleep=pauses.append)
    writer = CheckpointWriter(
        store, rank=0, attempt=1, report=reports.append, retry=NO_WAIT, last_retry=patient,
        limits=QUIET,
    )  # fmt: skip
    writer.save(100, make_blocks(MODEL, ALONE, 0), STATE, is_last=is_last)
    assert writer.wait()
    *retried, shard = reports
    assert (shard.error == "") == is_last
    assert pauses[:6] == ([1.0, 2.0, 4.0, 8.0, 15.0, 15.0] if is_last else [])
    assert [each.error for each in retried] == ["put refused"] * (30 if is_last else 0)


def test_failed_write_is_reported_and_the_next_save_works():
    store, shards = FailingStore(), []
    writer, blocks = _writer(store, shards), make_blocks(MODEL, ALONE, 0)
    store.failures["put"] = 3
    for step in (100, 200):
        writer.save(step, blocks, STATE)
        assert writer.wait()
    assert shards[0].error == "StorageError: put refused" and shards[0].boxes == ()
    assert shards[1].error == "" and shards[1].boxes


def test_pauses_between_tries_grow():
    store, pauses = FailingStore(), []
    store.failures["put"] = 3
    writer = _writer(store, [], retry=replace(RETRY, sleep=pauses.append))
    writer.save(100, make_blocks(MODEL, ALONE, 0), STATE)
    assert writer.wait() and pauses == [1.0, 4.0]


def test_mistake_in_the_background_becomes_a_report_too(monkeypatch):
    shards = []
    writer = _writer(MemoryStore(), shards)
    monkeypatch.setattr("raymega.checkpoint.save.writer.saved_boxes", lambda *_, **__: 1 / 0)
    writer.save(100, make_blocks(MODEL, ALONE, 0), STATE)
    assert writer.wait() and shards[0].error == "ZeroDivisionError: division by zero"


def test_save_is_given_up_when_the_one_before_hangs():
    store, shards = SlowStore(), []
    writer = _writer(store, shards, limits=SaveLimits(timeout_s=0.01))
    blocks = make_blocks(MODEL, ALONE, 0)
    writer.save(100, blocks, STATE)
    assert not writer.wait()
    writer.save(200, blocks, STATE)
    (given_up,) = shards
    assert given_up.step == 200
    assert given_up.error == "the store has taken nothing of the save before for 0.01 s"
    store.may_write.set()
    assert writer._background.wait(GUARD_S)
    assert [(shard.step, shard.error) for shard in shards[1:]] == [(100, "")]


class PieceStore(MemoryStore):
    """Takes a piece whenever it is allowed to, and says when it asks for one."""

    def __init__(self):
        super().__init__()
        self.may_take, self.asks = Semaphore(0), Semaphore(0)

    def put(self, key, chunks, *, overwrite):
        data = []
        for chunk in chunks:
            self.asks.release()
            assert self.may_take.acquire(timeout=GUARD_S)
            data.append(bytes(chunk))
        super().put(key, data, overwrite=overwrite)


@pytest.mark.parametrize(
    ("pause_s", "is_last", "is_saved"),
    [(0.9, False, True), (1.1, False, False), (1.1, True, True), (31.1, True, False)],
)
def test_save_before_is_waited_for_as_long_as_the_store_takes_something(
    pause_s, is_last, is_saved, monkeypatch
):
    """However long it takes; without a byte a last save waits by its time of retries longer."""
    clock, store, shards = FakeClock(), PieceStore(), []
    monkeypatch.setattr(
        "raymega.checkpoint.save.writer.time", SimpleNamespace(monotonic=clock.monotonic)
    )
    writer = CheckpointWriter(
        store, rank=0, attempt=1, report=shards.append, retry=NO_WAIT,
        last_retry=replace(RETRY, pauses_s=(10.0, 20.0)), limits=replace(QUIET, timeout_s=1.0),
    )  # fmt: skip
    blocks, wait = make_blocks(MODEL, ALONE, 0), writer._background.wait
    writer.save(100, blocks, STATE)
    assert store.asks.acquire(timeout=GUARD_S)

    def take_a_piece(seconds):
        if seconds < pause_s:
            clock.advance(seconds)
            return False
        clock.advance(pause_s)
        store.may_take.release()
        while not store.asks.acquire(timeout=0.05):
            if wait(0):
                return True
        return False

    monkeypatch.setattr(writer._background, "wait", take_a_piece)
    began_s = clock.now_s
    writer.save(200, blocks, STATE, is_last=is_last)
    store.may_take.release(10**6)
    assert wait(GUARD_S)
    saved = {shard.step: shard.error for shard in shards}
    limit = "31 s" if is_last else "1 s"
    told = "" if is_saved else f"the store has taken nothing of the save before for {limit}"
    assert saved == {100: "", 200: told}
    assert not is_saved or clock.now_s - began_s > 5.0


@pytest.mark.parametrize(
    "taker, error",
    [((torch, "empty"), RuntimeError), ((mmap, "mmap"), OSError)],
    ids=["pinned", "pages"],
)
def test_lack_of_host_memory_is_reported(taker, error, monkeypatch):
    shards = []
    writer = _writer(MemoryStore(), shards)

    def refuse(*_args, **_kwargs):
        raise error("can't allocate memory")

    blocks = make_blocks(MODEL, ALONE, 0)
    monkeypatch.setattr(*taker, refuse)
    writer.save(100, blocks, STATE)
    assert "no host memory" in shards[0].error


def _limited(store, shards, **limits):
    return CheckpointWriter(
        store, rank=0, attempt=1, report=shards.append, retry=NO_WAIT,
        limits=replace(QUIET, **limits),
    )  # fmt: skip


def _saved(shards):
    return [shard for shard in shards if isinstance(shard, ShardSaved)]


def test_share_is_cut_into_files_of_the_wanted_size_and_loads_back():
    store, shards = MemoryStore(), []
    writer, blocks = _limited(store, shards, file_bytes=4096), make_blocks(MODEL, ALONE, 0)
    writer.save(100, blocks, STATE)
    assert writer.wait()
    manifest = assemble_shards(shards, ALONE)
    sizes = {key: store.size(key) for key in store.list("")}
    assert sizes == manifest.file_sizes()
    in_files = [sum(box.num_bytes for box in manifest.boxes if manifest.file_key(box) == key)
                for key in sizes]  # fmt: skip
    assert max(in_files) <= 4096 and len(sizes) < 1.5 * sum(in_files) / 4096 + 1
    load(store, manifest, blocks := make_blocks(MODEL, ALONE, 0, is_filled=False))
    assert same(blocks, make_blocks(MODEL, ALONE, 0))
    assert all(checkpoint_of(key) == CheckpointId(attempt=1, step=100) for key in sizes)


def test_files_of_a_share_are_written_side_by_side():
    class Meeting(MemoryStore):
        """A put goes on when another one is under way."""

        def __init__(self):
            super().__init__()
            self.both = Barrier(2, timeout=GUARD_S)

        def put(self, key, chunks, *, overwrite):
            self.both.wait()
            super().put(key, chunks, overwrite=overwrite)

    shards, blocks = [], make_blocks(MODEL, ALONE, 0)
    half = sum(block.values.nbytes for block in blocks) * 6 // 10
    writer = _limited(Meeting(), shards, file_bytes=half)
    writer.save(100, blocks, STATE)
    assert writer.wait()
    (shard,) = _saved(shards)
    assert shard.error == "" and len({box.file for box in shard.boxes}) == 2


@pytest.mark.parametrize("buffer_bytes", [512, 5000, 10**9])
def test_buffer_stays_below_its_cap_and_everything_is_saved(buffer_bytes):
    store, shards = MemoryStore(), []
    writer, blocks = (
        _limited(store, shards, buffer_bytes=buffer_bytes),
        make_blocks(MODEL, ALONE, 0),
    )
    for step in (100, 200):
        writer.save(step, blocks, {**STATE, "step": step})
        assert writer.wait()
    assert 0 < writer.host_bytes <= buffer_bytes
    for shard in _saved(shards):
        manifest = assemble_shards([shard], ALONE)
        load(store, manifest, found := make_blocks(MODEL, ALONE, 0, is_filled=False))
        assert same(found, blocks)


def test_only_the_last_piece_of_a_share_beyond_the_buffer_is_written_in_the_background():
    store, shards = SlowStore(), []
    store.may_write.set()
    writer, blocks = _limited(store, shards, buffer_bytes=5000), make_blocks(MODEL, ALONE, 0)
    total = sum(block.values.nbytes for block in blocks)
    seen = []
    take = writer._host.copy

    def watch(parts):
        seen.append(sum(store.size(key) for key in store.list("")))
        take(parts)

    writer._host.copy = watch
    writer.save(100, blocks, STATE)
    assert len(seen) >= total // 5000 and seen[-1] >= total - 5000
    assert writer.wait() and shards[0].error == ""


def test_row_beyond_the_buffer_and_a_failure_before_the_last_piece_are_reported():
    store, shards = FailingStore(), []
    blocks = make_blocks(MODEL, ALONE, 0)
    _limited(store, shards, buffer_bytes=16).save(100, blocks, STATE)
    assert "a row of 96 bytes is more than checkpoint.buffer_bytes=16" in shards[0].error
    store.failures["put"] = 3
    writer = _limited(store, shards, buffer_bytes=5000)
    writer.save(200, blocks, STATE)
    writer.save(300, blocks, STATE)
    assert writer.wait()
    assert shards[1].error == "StorageError: put refused" and shards[1].boxes == ()
    assert shards[2].error == "" and assemble_shards([shards[2]], ALONE)


def test_bytes_go_out_no_faster_than_the_job_allows(monkeypatch):
    """Its time goes on when training, which does not wait for it, lets it."""
    clock, may_go_on = FakeClock(), Event()

    def sleep(seconds):
        assert may_go_on.wait(GUARD_S)
        clock.advance(seconds)

    pace = partial(RateLimiter, clock=clock.monotonic, sleep=sleep)
    monkeypatch.setattr("raymega.checkpoint.save.writer.RateLimiter", pace)
    store, shards, blocks = MemoryStore(), [], make_blocks(MODEL, ALONE, 0)
    total = sum(block.values.nbytes for block in blocks)
    writer, began_s = _limited(store, shards, bytes_per_s=2 * total), clock.now_s
    writer.save(100, blocks, STATE)
    assert writer.is_busy and list(store.list("")) == [] and clock.now_s == began_s
    may_go_on.set()
    assert writer.wait() and shards[0].error == ""
    (file,) = store.list("")
    assert clock.now_s - began_s == pytest.approx(store.size(file) / (2 * total))


def test_progress_of_a_save_is_reported_and_a_retry_counts_anew():
    class Torn(MemoryStore):
        num_left = 1

        def put(self, key, chunks, *, overwrite):
            chunks = list(chunks)
            if self.num_left:
                self.num_left -= 1
                raise StorageError("torn at its end")
            super().put(key, chunks, overwrite=overwrite)

    shards, blocks = [], make_blocks(MODEL, ALONE, 0)
    writer = _limited(Torn(), shards, report_every_s=0.0)
    writer.save(100, blocks, STATE)
    assert writer.wait()
    (saved,) = _saved(shards)
    told = [each for each in shards if isinstance(each, RankSaveProgress)]
    assert shards[-1] is saved and {each.num_bytes for each in told} == {saved.num_bytes}
    counts = [each.written_bytes for each in told]
    assert counts[-1] == saved.num_bytes
    falls = [b < a for a, b in pairwise(counts)]
    assert sum(falls) == 1, "one try was torn"


def test_writer_is_busy_until_the_report():
    store, shards = SlowStore(), []
    writer = _writer(store, shards)
    assert not writer.is_busy
    writer.save(100, make_blocks(MODEL, ALONE, 0), STATE)
    assert store.is_writing.wait(GUARD_S) and writer.is_busy
    store.may_write.set()
    assert writer.wait() and not writer.is_busy and len(shards) == 1


def _is_taken_before_it_is_copied(snapshot, values):
    """With enough work before it on the GPU, however slow the host is; one that waits never is."""
    for exponent in range(24, 36, 2):  # from milliseconds to half a minute
        torch.cuda._sleep(1 << exponent)
        snapshot.copy([(0, values)])
        if not snapshot._copied.query():
            return True
    return False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copy_runs_beside_the_step_and_the_update_comes_behind_it():
    """Kernels that were enqueued before the save are in it, changes behind the fence are not."""
    size = 64 << 20
    values = torch.zeros(size, device="cuda")
    snapshot = HostCopy()
    snapshot.reserve(values.nbytes, is_pinned=True)
    for turn in range(1, 6):
        values.fill_(turn)
        assert _is_taken_before_it_is_copied(snapshot, values), "the host waits for the copy"
        busy = values @ values  # work of the next step that only reads
        snapshot.fence()
        values.fill_(-1.0)
        snapshot.wait()
        copy = torch.frombuffer(snapshot.chunk(0, values.nbytes), dtype=torch.float32)
        assert (copy == turn).all(), "the copy is of the moment of the save"
        torch.cuda.synchronize()
        assert (values == -1.0).all() and busy.isfinite()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_are_saved_through_pinned_memory_and_loaded_back():
    store, shards = MemoryStore(), []
    wanted = make_blocks(MODEL, ALONE, 0)
    blocks = [replace(block, values=block.values.cuda()) for block in wanted]
    writer = _writer(store, shards)
    writer.save(100, blocks, STATE)
    for block in blocks:
        block.values.zero_()
    assert writer.wait() and writer._host._buffer.is_pinned()
    load(store, assemble_shards(shards, ALONE), blocks)
    assert same([replace(block, values=block.values.cpu()) for block in blocks], wanted)
