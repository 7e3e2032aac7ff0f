"""What a rank copies and what its node's snapshot server has of it are one memory, which outlives the rank."""

import ctypes
import gc
import os
import signal
from dataclasses import asdict
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch

from raymega.checkpoint.load.reader import load
from raymega.checkpoint.save.host_copy import HostCopy
from raymega.checkpoint.snapshots import writer as snapshot_writer
from raymega.checkpoint.snapshots.copies import SnapshotCopies
from raymega.checkpoint.snapshots.snapshot import find_snapshot
from raymega.checkpoint.snapshots.writer import SnapshotWriter
from raymega.messages import Replicas
from raymega.plan.snapshot_replicas import snapshot_cost
from raymega.storage import memory_server
from raymega.storage.memory_server import BATCH_BYTES
from raymega.storage.remote_memory_store import RemoteMemoryStore
from raymega.storage.shared_memory import SharedMemories, SharedMemory
from tests.support.jobs import make_test_plan
from tests.support.snapshot_servers import SPAWN, TOKEN, memory_of, server_processes
from tests.unit.checkpoint.large import ALONE, LARGE, blocks_of_step
from tests.unit.checkpoint.support import STATE, make_blocks, places_of

MIB = 2**20


def writer_to(*addresses, home):
    plan = make_test_plan(
        "parallel.pp=1", "parallel.dp=1", "parallel.tp=1", "elastic.snapshot_every=1"
    )
    replicas = Replicas(
        token=TOKEN, write_to=addresses, num_copies=len(addresses), home=home, tidies=addresses
    )
    return SnapshotWriter(plan, rank=0, attempt=1, replicas=replicas)


def take(writer, step, *, blocks=None):
    """Step ``step`` of a run of one rank, and its snapshot."""
    writer.observe(writer.extra_reductions(), step=step)
    assert writer.is_due
    writer.save(step, blocks or blocks_of_step(step), {**STATE, "step": step})
    writer.wait()


def holds(stores, step):
    """The newest whole snapshot in ``stores`` is that of ``step``, bit for bit."""
    snapshot = find_snapshot(stores, job={}, now="")
    if snapshot is None or snapshot.manifest.step != step:
        return False
    found = make_blocks(LARGE, ALONE, 0, is_filled=False)
    copies, key = SnapshotCopies(stores, snapshot.holders), snapshot.manifest.key
    manifest = copies.read_blocks(key, places_of(found), rank=0, grid=ALONE)
    load(copies, manifest, found)
    wanted = blocks_of_step(step)
    return all(torch.equal(a.values, b.values) for a, b in zip(found, wanted, strict=True))


def _memory_of_all(pids):
    """Without what allocators of this process hold for later."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)
    return sum(map(memory_of, pids))


def test_stall_that_is_told_has_the_wait_for_the_write(monkeypatch):
    """The wait is timed by a clock of the test's own."""
    with server_processes(1) as ((_, address),):
        writer = writer_to(address, home=address)
        take(writer, 1)
        stall_s, write_s = writer._newest.stall_s, writer._newest.write_s
        clock = iter([10.0, 17.0])
        monkeypatch.setattr(snapshot_writer, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        writer.wait()
        told = writer.metrics()
    assert told["checkpoint/snapshot_stall_s"] == pytest.approx(stall_s + 7.0)
    assert told["checkpoint/snapshot_s"] == stall_s + write_s > stall_s


@pytest.mark.sample(1)
@pytest.mark.parametrize("num_servers", [1, 2], ids=["one-node", "two-nodes"])
def test_memory_of_rank_and_servers_together_is_what_the_plan_says(num_servers):
    with server_processes(num_servers) as servers:
        pids = [os.getpid(), *(pid for pid, _ in servers)]
        addresses = [address for _, address in servers]
        blocks = blocks_of_step(0)

        def six_snapshots():
            writer = writer_to(*addresses, home=addresses[0])
            for step in range(1, 7):
                take(writer, step, blocks=blocks)
            return writer, _memory_of_all(pids)

        six_snapshots()  # what threads and connections take stays, and is not of it
        for address in addresses:
            RemoteMemoryStore(address, TOKEN).clear("")
        before = _memory_of_all(pids)
        writer, after = six_snapshots()
        cost = snapshot_cost(writer._plan, 0, num_copies=num_servers)
        assignment = writer._newest.num_bytes
        planned = assignment * (cost.buffer_bytes + cost.server_bytes) / cost.share_bytes
        assert planned == 2 * num_servers * assignment
        messages = 2 * BATCH_BYTES * (num_servers - 1)  # held at both ends
        assert abs(after - before - planned) < messages + 0.1 * assignment
        assert writer._buffers.num_bytes == 2 * assignment


def _die_while_copying(addresses, step):
    """A rank that is killed when half of the snapshot of ``step`` is copied."""
    writer = writer_to(*addresses, home=addresses[0])
    copy = HostCopy._copy

    def half(host, parts):
        parts = list(parts)
        copy(host, parts[: len(parts) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    for number in range(1, step):
        take(writer, number)
    HostCopy._copy = half
    take(writer, step)


@pytest.mark.sample(1)
@pytest.mark.parametrize("step", [2, 3, 4])
def test_rank_killed_while_it_copies_leaves_the_snapshot_before_on_either_node(step):
    with server_processes(2) as servers:
        addresses = [address for _, address in servers]
        rank = SPAWN.Process(target=_die_while_copying, args=(addresses, step))
        rank.start()
        rank.join(300)
        assert rank.exitcode == -signal.SIGKILL
        for lost in (None, *addresses):
            left = {each: RemoteMemoryStore(each, TOKEN) for each in addresses if each != lost}
            assert holds(left, step - 1)


def test_memory_reserved_ahead_is_what_snapshots_use():
    with server_processes(1) as ((_, address),):
        for home in (address, "lost"):
            writer = writer_to(address, home=home)
            writer.reserve(blocks_of_step(1))
            reserved = [each._buffer.data_ptr() for each in writer._buffers._buffers]
            for step in (1, 2, 3):
                take(writer, step)
                assert writer._newest.error == ""
            assert [each._buffer.data_ptr() for each in writer._buffers._buffers] == reserved
            assert len(reserved) == (2 if home == address else 1)


def test_failed_snapshot_gives_its_memory_to_the_next_and_the_whole_one_stays():
    with server_processes(1) as ((_, address),):
        writer = writer_to(address, home=address)
        take(writer, 1)
        take(writer, 2)
        has_failed = (0.0, 1.0, 0.0)
        writer.observe(has_failed, step=3)
        writer.save(3, blocks_of_step(3), {**STATE, "step": 3})
        writer.wait()
        store = RemoteMemoryStore(address, TOKEN)
        assert {key.split("/")[1] for key in store.list("")} == {"step-00000001", "step-00000003"}
        assert holds({address: store}, 3)
        for key in list(store.list("checkpoints/step-00000003")):
            store.delete(key)
        assert holds({address: store}, 1)


def test_server_that_sees_no_memory_of_ranks_is_sent_copies_and_one_buffer_is_enough(
    monkeypatch, caplog
):
    def blind(_tail):
        raise OSError("not here")

    monkeypatch.setattr(memory_server, "attach", blind)
    with memory_server.MemoryStoreServer("127.0.0.1", TOKEN) as only:
        writer = writer_to(only.uri, home=only.uri)
        for step in range(1, 5):
            take(writer, step)
            assert holds({only.uri: RemoteMemoryStore(only.uri, TOKEN)}, step)
        assert writer._buffers.num_bytes == writer._newest.num_bytes
        assert "which takes more memory: not here" in caplog.text
        assert caplog.text.count("which takes more memory") == 1


def test_system_without_shared_memory_is_sent_copies_too(monkeypatch, caplog):
    monkeypatch.delattr(os, "memfd_create")
    with memory_server.MemoryStoreServer("127.0.0.1", TOKEN) as only:
        writer = writer_to(only.uri, home=only.uri)
        for step in range(1, 4):
            take(writer, step)
            assert holds({only.uri: RemoteMemoryStore(only.uri, TOKEN)}, step)
        assert writer._buffers.num_bytes == writer._newest.num_bytes
        assert "no shared memory" in caplog.text


def test_lost_server_of_the_own_node_ends_neither_training_nor_the_partners_copies():
    with memory_server.MemoryStoreServer("127.0.0.1", TOKEN) as partner:
        own = memory_server.MemoryStoreServer("127.0.0.1", TOKEN)
        writer = writer_to(own.uri, partner.uri, home=own.uri)
        take(writer, 1)
        own.shutdown()
        for step in range(2, 6):
            take(writer, step)
            assert holds({partner.uri: RemoteMemoryStore(partner.uri, TOKEN)}, step)
        assert writer._buffers.num_bytes == writer._newest.num_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_shared_memory_is_pinned_for_a_gpu():
    host = HostCopy(SharedMemories())
    host.reserve(64 * MIB, is_pinned=True)
    assert host.is_shared and host._buffer.is_pinned()
    values = torch.arange(8 * MIB, device="cuda")
    host.copy([(0, values)])
    host.wait()
    copy = torch.frombuffer(host.chunk(0, values.nbytes), dtype=values.dtype)
    assert torch.equal(copy, values.cpu())


def test_memory_is_seen_under_its_name_alone():
    memory = SharedMemory(4096)
    memory.pages[:4] = b"here"
    stretch = memory.stretch(memory._begin + 2, 100)
    assert stretch and bytes(memory_server.attach(asdict(stretch))[:2]) == b"re"
    assert memory.stretch(memory._begin + 4000, 100) is None
    with pytest.raises(OSError, match="is not the file raymega-guess"):
        memory_server.attach({**asdict(stretch), "name": "raymega-guess"})
