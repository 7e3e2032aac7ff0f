"""Shards of a store on a node: what is fetched, kept and evicted, and what faults do."""

import gc
import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest

from raymega.data.arrow import FolderFiles, TokenStream
from raymega.data.streaming import fetcher as fetching
from raymega.data.streaming.cache_bound import CacheBound
from raymega.data.streaming.node_cache import locked
from raymega.data.streaming.shard_cache import ShardCache
from raymega.data.streaming.stream_rows import StreamSource
from raymega.errors import DataError, InternalError, StorageError
from tests.unit.data.datasets import samples_of, write_dataset
from tests.unit.data.streamed import (
    CountingStore,
    make_fetcher,
    samples_of_source,
    samples_on,
    settle,
    source_of,
)

NUM_SHARDS, TOKENS = 40, 41
"""A shard has five rows of eight tokens."""


@pytest.fixture
def made(tmp_path):
    return tmp_path / "made"


@pytest.fixture
def split(made):
    return write_dataset(made, train=(TOKENS,) * NUM_SHARDS, vocab_size=1 << 16).splits["train"]


@pytest.fixture
def store(made, split):
    return CountingStore(made)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache"


def _size(split):
    return max(shard.num_bytes for shard in split.shards)


def _kept(root):
    with locked(root):
        return sum(path.stat().st_size for path in root.rglob("*.arrow"))


def test_samples_are_those_of_a_whole_copy_and_each_shard_is_fetched_once(store, split, root, made):
    """In two epochs of five blocks, with room for two blocks."""
    block = 8 * _size(split)
    near = samples_of(source_of(FolderFiles(made), split), seed=3, block_bytes=block)
    fetcher = make_fetcher(root, limit_bytes=2 * block)
    far, num_rows = samples_on(store, split, fetcher, block_bytes=block), 5 * NUM_SHARDS
    for sample in range(num_rows):
        assert (far.row(sample).tokens == near.row(sample).tokens).all()
        assert _kept(root) <= 2 * block
    fetched = fetcher.use().fetched_bytes
    read = sum(shard.num_bytes for shard in split.shards)
    # at most the first block of the next epoch beyond what was read
    assert read <= fetched <= read + block and sum(store.num_bytes.values()) >= fetched
    assert all(store.num_bytes[shard.file] >= shard.num_bytes for shard in split.shards)
    for sample in range(num_rows, 2 * num_rows):
        assert (far.row(sample).tokens == near.row(sample).tokens).all()
    assert fetcher.use().fetched_bytes <= 2 * read + block


def test_only_what_comes_next_is_fetched(store, split, root):
    block = 8 * _size(split)
    fetcher = make_fetcher(root, limit_bytes=10 * block)
    samples = samples_on(store, split, fetcher, block_bytes=block)
    samples.row(0)
    # until the fetcher has nothing to do: this block, and an eighth of the next one
    wants = fetcher._all[0]
    with fetcher._changed:
        assert fetcher._changed.wait_for(lambda: not fetcher._next() and not wants.waiting, 200)
    assert sum(store.num_bytes.values()) == (8 + 1) * _size(split)


def test_resumed_process_fetches_nothing_that_is_here(store, split, root):
    block = 8 * _size(split)
    first = samples_on(store, split, make_fetcher(root), block_bytes=block)
    wanted = [first.row(sample).tokens.tolist() for sample in range(40)]
    before = dict(store.num_bytes)
    again = samples_on(store, split, make_fetcher(root), block_bytes=block)
    assert [again.row(sample).tokens.tolist() for sample in range(40)] == wanted
    assert all(store.num_bytes[file] <= split.shards[0].num_bytes for file in before)


def test_mapped_shards_are_not_evicted(store, split, root):
    one, two = (
        ShardCache(store, root / "d", make_fetcher(root, limit_bytes=2 * _size(split)))
        for _ in range(2)
    )
    shards = split.shards
    one.need(shards[:1])
    one.table(shards[0])
    os.utime(root / "d" / shards[0].file, (0, 0))  # as a process that needs it no more
    # another process would take all the room
    for shard in shards[1:6]:
        two.need([shard])
        two.table(shard)
        assert (root / "d" / shards[0].file).exists()
        assert _kept(root) <= 2 * _size(split)
    one.need(shards[6:7])
    two.need(shards[7:9])
    two.table(shards[7])
    two.table(shards[8])
    assert not (root / "d" / shards[0].file).exists()


def test_shards_that_were_there_and_those_that_were_waited_for_are_counted(root):
    fetcher = fetching.Fetcher(limit_bytes=1000, root=root)
    for waited_s in (0.0, 2.0, 0.0):
        fetcher.note_read(waited_s=waited_s)
    use = fetcher.use()
    assert (use.hits, use.misses, use.waited_s) == (2, 1, 2.0)


def test_needed_shards_are_not_evicted_for_later_ones(store, split, root, monkeypatch):
    # of two threads one may take the room of an earlier shard, which the other has taken and not begun
    monkeypatch.setattr(fetching, "NUM_THREADS", 1)
    fetcher = make_fetcher(root, limit_bytes=3 * _size(split))
    cache = ShardCache(store, root / "d", fetcher)
    cache.need(split.shards[:6])
    for shard in split.shards[:3]:
        cache.table(shard)
    settle(fetcher)
    assert {path.name for path in (root / "d/train").glob("*.arrow")} == {
        shard.file.removeprefix("train/") for shard in split.shards[:3]
    }
    assert _kept(root) <= 3 * _size(split)


def test_store_that_fails_is_asked_again_and_the_wait_is_told(store, split, root, monkeypatch):
    monkeypatch.setattr(fetching, "AWAY_S", 0.1)
    store.failures = 5
    store.gate.clear()
    fetcher = make_fetcher(root)
    samples, rows = samples_on(store, split, fetcher, block_bytes=8 * _size(split)), []
    reading = threading.Thread(target=lambda: rows.append(samples.row(0)))
    reading.start()
    # the store answers once the reader waits
    with fetcher._changed:
        assert fetcher._changed.wait_for(lambda: fetcher._all and fetcher._all[0].hasty, 200)
    store.gate.set()
    reading.join(200)
    assert len(rows[0].tokens) == 8 and store.failures == 0
    assert fetcher.use().misses == 1 and fetcher.use().waited_s > 0


def test_reader_does_not_wait_for_the_pause_of_a_shard_without_room(
    store, split, root, monkeypatch
):
    monkeypatch.setattr(fetching, "ROOM_S", 100.0)
    fetcher = make_fetcher(root, limit_bytes=2 * _size(split), timeout_s=20.0)
    cache = ShardCache(store, root / "d", fetcher)
    cache.need(split.shards[:3])
    settle(fetcher)
    assert not (root / "d" / split.shards[2].file).exists()
    assert len(cache.table(split.shards[2])) == TOKENS


def test_attempt_that_failed_takes_no_room_of_another_shard(store, split, root, monkeypatch):
    """What it reserved was counted beside what the next attempt reserves, and another shard made way."""
    monkeypatch.setattr(fetching, "AWAY_S", 0.1)
    monkeypatch.setattr(fetching, "NUM_THREADS", 1)
    fetcher, store.failures = make_fetcher(root, limit_bytes=4 * _size(split)), 2
    ShardCache(store, root / "d", fetcher).need(split.shards[:4])
    with fetcher._changed:
        assert fetcher._changed.wait_for(
            lambda: not fetcher._next() and not fetcher._all[0].waiting, 200
        )
    assert len([*(root / "d/train").glob("*.arrow")]) == 4 and store.failures == 0


def test_store_that_stays_away_is_an_error_in_time(store, split, root, monkeypatch):
    monkeypatch.setattr(fetching, "AWAY_S", 0.05)
    store.failures = 1 << 60
    samples = samples_on(store, split, make_fetcher(root, timeout_s=1.0), block_bytes=1)
    with pytest.raises(StorageError, match=r"is not here after 1 s.*the store is away"):
        samples.row(0)


def test_shard_with_a_wrong_checksum_never_gets_its_name(store, split, made, root):
    path = made / split.shards[2].file
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    cache = ShardCache(store, root / "d", make_fetcher(root))
    with pytest.raises(DataError, match=r"train/000002\.arrow has crc32"):
        cache.table(split.shards[2])
    assert not (root / "d" / split.shards[2].file).exists()


@pytest.mark.parametrize("how", ["cut", "token"])
def test_file_that_its_disk_damaged_is_fetched_again(store, split, made, root, how):
    """It failed in each attempt, and under each driver: a file under its final name was never fetched again."""
    near = samples_of(source_of(FolderFiles(made), split), seed=3, block_bytes=1 << 30)
    samples_on(store, split, make_fetcher(root), block_bytes=1 << 30).row(0)
    shard = split.shards[near._orders[0].shard(near._orders[0].row(0))]
    path, before = root / "d" / shard.file, store.num_bytes[shard.file]
    content = bytearray(path.read_bytes())
    at = content.index(near.row(0).tokens.astype("<u2").tobytes())
    content[at : at + 2] = b"\xff\xff"
    path.write_bytes(content[:-100] if how == "cut" else content)
    fetcher = make_fetcher(root)
    files = ShardCache(store, root / "d", fetcher)
    source = StreamSource(TokenStream(files, split), seq_len=8, vocab_size=(1 << 16) - 1)
    again = samples_of_source(source, block_bytes=1 << 30, fetcher=fetcher)
    assert (again.row(0).tokens == near.row(0).tokens).all()
    assert path.read_bytes() == (made / shard.file).read_bytes()
    assert store.num_bytes[shard.file] == before + shard.num_bytes


def test_damaged_file_that_another_process_has_replaced_is_let_go(store, split, root):
    one, two = (ShardCache(store, root / "d", make_fetcher(root)) for _ in range(2))
    shard, path = split.shards[0], root / "d" / split.shards[0].file
    one.table(shard)
    content = bytearray(path.read_bytes())
    content[content.index(b"\x05\x00\x06\x00")] ^= 1
    path.write_bytes(content)
    two.table(shard)
    assert one.drop_damaged(shard) and not path.exists()
    one.table(shard)
    # the second process has the damaged bytes mapped, and the file is sound
    assert two.drop_damaged(shard) and path.exists()
    assert not two.drop_damaged(shard)


def test_run_with_a_small_bound_takes_no_shards_of_one_with_a_large_bound(store, split, root):
    """Both evicted what the other one had fetched and not read yet, and fetched it again and again."""
    large, small = (make_fetcher(root, limit_bytes=n * _size(split)) for n in (20, 2))
    ShardCache(store, root / "d", large).need(split.shards[:10])
    settle(large)
    cache, others = ShardCache(store, root / "e", small), split.shards[20:30]
    for number, shard in enumerate(others):
        cache.need(others[number : number + 2])
        cache.table(shard)
    assert len([*(root / "d/train").glob("*.arrow")]) == 10
    assert len([*(root / "e/train").glob("*.arrow")]) == 10
    # once the other run is over, its bound is, too
    del large
    gc.collect()
    wait_until(lambda: small._bound.num_bytes() == 2 * _size(split), root)
    cache.need(split.shards[30:31])
    cache.table(split.shards[30])
    settle(small)
    assert _kept(root) <= 2 * _size(split)


def test_bound_of_a_command_is_no_runs_bound(root):
    root.mkdir()
    command = CacheBound(root, 1 << 40, is_of_run=False)
    run = CacheBound(root, 1 << 30, is_of_run=True)
    assert [command.num_bytes(), run.num_bytes()] == [1 << 40, 1 << 30]


def test_threads_end_with_the_fetcher_that_nobody_has_any_more(store, split, root):
    """While one waited for work it kept the fetcher for the other: each attempt left two, which went on fetching."""
    before = {*threading.enumerate()}
    fetcher = make_fetcher(root)
    ShardCache(store, root / "d", fetcher).need(split.shards[:4])
    settle(fetcher)
    own = [each for each in threading.enumerate() if each not in before]
    assert len(own) == fetching.NUM_THREADS
    del fetcher
    for thread in own:
        thread.join(200)
        assert not thread.is_alive()


def wait_until(is_so, root):
    """The threads of a fetcher that nobody has any more see it within a second."""
    for _ in range(2000):
        with locked(root):
            if is_so():
                return
        time.sleep(0.1)
    raise AssertionError("not in time")


def test_failure_that_nobody_waited_for_is_tried_again_when_the_shard_is_read(store, split, root):
    """A disk that was full for a moment ended the run hours later, when the shard's turn came."""
    root.write_text("a file")
    fetcher = make_fetcher(root)
    cache = ShardCache(store, root / "d", fetcher)
    cache.need(split.shards[:1])
    with fetcher._changed:
        assert fetcher._changed.wait_for(lambda: fetcher._all[0].failed, 200)
    root.unlink()
    assert len(cache.table(split.shards[0])) == TOKENS


def test_shard_that_the_store_lacks_is_named(store, split, made, root):
    (made / split.shards[1].file).unlink()
    with pytest.raises(DataError, match=r"train/000001\.arrow does not exist"):
        ShardCache(store, root / "d", make_fetcher(root)).table(split.shards[1])


def test_cache_that_cannot_be_written_is_a_storage_error(store, split, root):
    root.write_text("a file")
    with pytest.raises(StorageError, match="cannot be written: Not a directory"):
        ShardCache(store, root / "d", make_fetcher(root)).table(split.shards[0])


def _read_all(made, split, root, samples, results, die_at=None):
    block = 8 * _size(split)
    fetcher, store = make_fetcher(root), CountingStore(made)
    if die_at is not None:
        fetcher._fill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    rows = samples_on(store, split, fetcher, block_bytes=block)
    results.put([rows.row(sample).tokens.tolist() for sample in samples])


def test_processes_of_a_node_share_and_a_killed_one_leaves_nothing_in_the_way(
    made, split, root, store
):
    context = multiprocessing.get_context("fork")
    results, samples = context.Queue(), range(100)
    dead = context.Process(target=_read_all, args=(made, split, root, samples, results, 0))
    dead.start()
    dead.join(200)
    assert dead.exitcode == -signal.SIGKILL and list(root.rglob("*.partial"))
    workers = [
        context.Process(target=_read_all, args=(made, split, root, samples, results))
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=200) for _ in workers]
    for worker in workers:
        worker.join(200)
    near = samples_of(source_of(FolderFiles(made), split), seed=3, block_bytes=8 * _size(split))
    assert found == [[near.row(sample).tokens.tolist() for sample in samples]] * 3
    # three processes fetched each shard once, and at most one block ahead
    read = len({near._orders[0].shard(near._orders[0].row(s)) for s in samples}) * _size(split)
    assert int((root / "fetched").read_text()) <= read + 8 * _size(split)


def test_reader_does_not_wait_for_shards_behind_its_own(store, split, root):
    """What it needs now goes first, whatever was asked for before."""
    store.gate.clear()
    fetcher = make_fetcher(root)
    cache = ShardCache(store, root / "d", fetcher)
    cache.need(split.shards[:30])
    seen, get = [], store.get
    store.get = lambda key, **how: (seen.append(key), get(key, **how))[1]
    waiting = threading.Thread(target=cache.table, args=(split.shards[35],))
    waiting.start()
    with fetcher._changed:
        assert fetcher._changed.wait_for(lambda: fetcher._all[0].hasty, 200)
    store.gate.set()
    waiting.join(200)
    assert split.shards[35].file in seen[: 2 + 2 * fetching.NUM_THREADS]


def test_lengths_of_documents_come_through_the_cache(store, split, root):
    cache = ShardCache(store, root / "d", make_fetcher(root, limit_bytes=4 * _size(split)))
    lengths = TokenStream(cache, split).document_lengths()
    assert np.array_equal(lengths, [TOKENS] * NUM_SHARDS)


def test_what_is_needed_is_read_under_the_lock_under_which_readers_change_it(store, split, root):
    """Else a reader that asks for a shard nobody expected would end the thread that makes room."""
    fetcher, owned = make_fetcher(root), []

    class Watched(dict):
        def items(self):
            owned.append(fetcher._changed._is_owned())
            return super().items()

    cache = ShardCache(store, root / "d", fetcher)
    cache._wants.kept = Watched()
    cache.table(split.shards[0])
    assert owned and all(owned)


def test_error_that_nobody_expected_is_the_readers(store, split, root, monkeypatch):
    monkeypatch.setattr(store, "get", lambda *_args, **_more: [][0])
    cache = ShardCache(store, root / "d", make_fetcher(root, timeout_s=60.0))
    with pytest.raises(InternalError, match=r"000000\.arrow was not fetched: IndexError"):
        cache.table(split.shards[0])
