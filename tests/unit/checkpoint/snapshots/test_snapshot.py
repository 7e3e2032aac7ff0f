"""Snapshots in memory: which one is the newest that is whole, whoever is lost, and how ranks agree."""

from dataclasses import replace
from itertools import product
from threading import Event

import pytest
import torch

from raymega.checkpoint.format.keys import ROOT, checkpoint_of, is_part, rank_of
from raymega.checkpoint.load.reader import load
from raymega.checkpoint.save.writer import CheckpointWriter
from raymega.checkpoint.snapshots import writer as snapshot_writer
from raymega.checkpoint.snapshots.copies import SnapshotCopies
from raymega.checkpoint.snapshots.part import SnapshotPart
from raymega.checkpoint.snapshots.queries import QUESTIONS
from raymega.checkpoint.snapshots.snapshot import find_snapshot
from raymega.checkpoint.snapshots.writer import SnapshotWriter
from raymega.errors import CheckpointError
from raymega.messages import Replicas
from raymega.plan.snapshot_replicas import copy_nodes
from raymega.storage.memory_server import MemoryStoreServer
from raymega.storage.replicated_store import ReplicatedStore
from tests.support.jobs import make_test_plan
from tests.support.memory_store import MemoryStore
from tests.unit.checkpoint.support import (
    MODELS,
    STATE,
    make_blocks,
    make_grid,
    places_of,
    same,
    save_shards,
)

MODEL = MODELS["llama-tied"]
GRID = make_grid("tp2-pp2-dp1")
NODES = ("n0", "n1", "n1", "n2")
"""Of the grid's four ranks."""


def write(
    stores, *, step, attempt=1, ranks=range(4), parts=True, grid=GRID, nodes=NODES, is_sharded=False
):
    """The snapshot of ``step`` as far as ``ranks`` wrote it; with ``parts`` they finished."""
    scratch = MemoryStore()
    shards = save_shards(scratch, MODEL, grid, step=step, attempt=attempt, is_sharded=is_sharded)
    homes = copy_nodes(nodes)
    for shard in shards:
        if shard.rank not in ranks:
            continue
        copies = ReplicatedStore({node: stores[node] for node in homes[shard.rank]})
        for key in list(scratch.list(ROOT)):
            if f"-rank{shard.rank:05d}" in key:
                copies.put(key, [scratch.get(key)], overwrite=True)
        if parts:
            part = SnapshotPart(
                attempt=attempt, grid=grid.degrees(), world_size=len(shards), shard=shard
            )
            copies.put(part.key, [part.to_json()], overwrite=True)


def find(stores, **options):
    return find_snapshot(stores, job={}, now="2026-01-02", **options)


def boxes_of(copies, snapshot, blocks, rank, grid):
    """The snapshot's manifest as a rank of ``grid`` reads it."""
    return copies.read_blocks(snapshot.manifest.key, places_of(blocks), rank=rank, grid=grid)


def step_of(snapshot):
    return snapshot.manifest.step if snapshot else None


@pytest.fixture
def stores():
    return {node: MemoryStore() for node in ("n0", "n1", "n2")}


def test_newest_snapshot_that_all_ranks_finished_is_found(stores):
    write(stores, step=4)
    write(stores, step=5)
    write(stores, step=6, ranks=(0, 1, 3))
    write(stores, step=7, ranks=(2,), parts=False)
    assert step_of(find(stores)) == 5
    assert step_of(find({})) is None


@pytest.mark.parametrize("lost", ["n0", "n1", "n2"])
def test_whichever_node_is_lost_every_value_comes_back_on_any_grid(stores, lost):
    write(stores, step=5)
    del stores[lost]
    snapshot = find(stores)
    assert step_of(snapshot) == 5
    assert snapshot.manifest.state == {**STATE, "step": 5}
    for layout in ("tp2-pp2-dp1", "tp1-pp1-dp1", "tp4-pp1-dp2"):
        grid = make_grid(layout)
        for rank, first in product(range(grid.world_size), (0, 1)):
            blocks = make_blocks(MODEL, grid, rank, is_filled=False)
            copies = SnapshotCopies(stores, snapshot.holders, first=first)
            load(copies, boxes_of(copies, snapshot, blocks, rank, grid), blocks)
            assert same(blocks, make_blocks(MODEL, grid, rank))


def test_two_nodes_lost_at_once_take_a_snapshot_along(stores):
    write(stores, step=5)
    assert step_of(find({"n2": stores["n2"]})) is None


def test_search_writes_nothing_and_names_two_servers_a_rank(stores):
    write(stores, step=5)
    before = {name: list(store.list("")) for name, store in stores.items()}
    snapshot = find(stores)
    assert before == {name: list(store.list("")) for name, store in stores.items()}
    of_rank = {rank: set(snapshot.holders.of(rank)) for rank in range(4)}
    assert of_rank == {rank: set(nodes) for rank, nodes in enumerate(copy_nodes(NODES))}


def test_later_attempt_is_newer_whatever_its_step(stores):
    write(stores, step=9, attempt=1)
    write(stores, step=6, attempt=2)
    assert step_of(find(stores)) == 6


def test_snapshot_that_could_not_be_read_is_passed_over(stores):
    write(stores, step=4)
    write(stores, step=5)
    newest = find(stores)
    assert step_of(find(stores, skip={newest.manifest.key})) == 4


def test_part_that_is_damaged_or_a_file_that_is_gone_is_no_snapshot(stores):
    write(stores, step=4)
    write(stores, step=5)
    write(stores, step=6)
    for store in stores.values():
        for key in list(store.list(ROOT)):
            if checkpoint_of(key).step == 6 and is_part(key):
                store.put(key, [store.get(key)[:-3]], overwrite=True)
            if checkpoint_of(key).step == 5 and "rank00003.safetensors" in key:
                store.delete(key)
    assert step_of(find(stores)) == 4


def test_flipped_bit_of_one_copy_is_noticed_and_the_other_is_right(stores):
    write(stores, step=5)
    snapshot = find(stores)
    grid = make_grid("tp1")
    blocks = make_blocks(MODEL, grid, 0, is_filled=False)
    one, other = (SnapshotCopies(stores, snapshot.holders, first=first) for first in (0, 1))
    manifest = boxes_of(one, snapshot, blocks, 0, grid)
    box = max(manifest.boxes, key=lambda box: box.num_bytes)
    key = manifest.file_key(box)
    wrong = snapshot.holders.of(rank_of(key))[0]
    data = bytearray(stores[wrong].get(key))
    data[box.start + 1] ^= 1
    stores[wrong].put(key, [data], overwrite=True)
    with pytest.raises(CheckpointError, match="crc32"):
        load(one, manifest, blocks)
    load(other, manifest, blocks)
    assert same(blocks, make_blocks(MODEL, grid, 0))


class Asked(MemoryStore):
    """A server that is asked; ``answers`` has the questions with their number of ranks and boxes."""

    def __init__(self):
        super().__init__()
        self.answers = []

    def ask(self, question, about):
        answer = QUESTIONS[question](self, about)
        of = (len(answer["ranks"]), len(answer["boxes"])) if question == "boxes" else ()
        self.answers.append((question, *of))
        return answer


@pytest.mark.parametrize("is_sharded", [False, True])
def test_rank_of_the_same_grid_asks_few_ranks_and_the_others_only_for_what_it_lacks(is_sharded):
    grid = make_grid("tp2-pp2-dp4")
    nodes = [f"n{rank // 4}" for rank in range(16)]
    stores = {node: Asked() for node in nodes}
    write(stores, step=5, grid=grid, nodes=nodes, ranks=range(16), is_sharded=is_sharded)
    snapshot = find(stores)
    assert [store.answers for store in stores.values()] == [[("held",)]] * 4
    for rank in range(16):
        for store in stores.values():
            store.answers.clear()
        blocks = make_blocks(MODEL, grid, rank, is_filled=False, is_sharded=is_sharded)
        copies = SnapshotCopies(stores, snapshot.holders, first=rank)
        manifest = boxes_of(copies, snapshot, blocks, rank, grid)
        asked = [answer for store in stores.values() for answer in store.answers]
        # itself, tp, pp; without sharding its replicas too, and theirs
        assert sum(ranks for _, ranks, _ in asked) <= (3 if is_sharded else 12)
        assert sum(boxes for _, _, boxes in asked) == len(manifest.boxes)
        places = places_of(blocks)
        assert all(any(map(each.box.intersect, places[each.tensor])) for each in manifest.boxes)
        load(copies, manifest, blocks)
        assert same(blocks, make_blocks(MODEL, grid, rank, is_sharded=is_sharded))


def test_part_that_its_first_holder_lost_comes_from_the_other(stores):
    write(stores, step=5)
    snapshot = find(stores)
    grid = make_grid("tp1")
    blocks = make_blocks(MODEL, grid, 0, is_filled=False)
    for key in list(stores["n1"].list(ROOT)):
        if is_part(key):
            stores["n1"].put(key, [b"{"], overwrite=True)
    copies = SnapshotCopies(stores, snapshot.holders)
    manifest = boxes_of(copies, snapshot, blocks, 0, grid)
    assert sum(box.num_bytes for box in manifest.boxes) == sum(b.values.nbytes for b in blocks)
    load(copies, manifest, blocks)
    assert same(blocks, make_blocks(MODEL, grid, 0))
    for store in stores.values():
        for key in list(store.list(ROOT)):
            store.delete(key)
    with pytest.raises(CheckpointError, match="part of rank 0"):
        boxes_of(copies, snapshot, blocks, 0, grid)


# How ranks agree. Two ranks on two nodes, each with its snapshot server; this thread is both ranks' loop.


@pytest.fixture
def servers():
    with (
        MemoryStoreServer("127.0.0.1", "token") as one,
        MemoryStoreServer("127.0.0.1", "token") as other,
    ):
        yield [one, other]


class Ranks:
    """Two ranks in step."""

    def __init__(self, servers, *, every=1, attempt=1, when_late="skip", assignments=True):
        plan = make_test_plan(
            "parallel.pp=1", "parallel.dp=1", "parallel.tp=2", f"elastic.snapshot_every={every}", f"elastic.snapshot_backpressure={when_late}",
        )  # fmt: skip
        self.grid, self.step, self.num_waits = plan.grid, 0, 0
        self.writers = [
            SnapshotWriter(
                plan,
                rank=rank,
                attempt=attempt,
                replicas=Replicas(
                    token="token",
                    write_to=(servers[rank].uri, servers[1 - rank].uri),
                    num_copies=2,
                    home=servers[rank].uri if assignments else "",
                    tidies=(servers[rank].uri,),
                ),
            )
            for rank in range(2)
        ]

    def go(self, *, waits=True):
        """One step; whether it took a snapshot."""
        self.step += 1
        self._agree()
        late = [writer.is_late for writer in self.writers]
        assert len(set(late)) == 1, "all ranks or none"
        if late[0]:
            self.num_waits += 1
            for writer in self.writers:
                writer.wait()
            self._agree()
        due = [writer.is_due for writer in self.writers]
        assert len(set(due)) == 1, "all ranks or none"
        if due[0]:
            for rank, writer in enumerate(self.writers):
                blocks = make_blocks(MODEL, self.grid, rank)
                writer.save(self.step, blocks, {**STATE, "step": self.step})
        for writer in self.writers:
            if waits:
                writer.wait()
        return due[0]

    def _agree(self):
        totals = (
            torch.tensor([writer.extra_reductions() for writer in self.writers]).sum(0).tolist()
        )
        for writer in self.writers:
            writer.observe(totals, step=self.step)

    def whole_step(self):
        return {writer.metrics()["checkpoint/snapshot_step"] for writer in self.writers}


@pytest.fixture
def inline_tidying(monkeypatch):
    """Old snapshots go at once, so that a test sees what is left."""

    class Inline:
        def __init__(self, target, **_):
            self.start = target

    monkeypatch.setattr(snapshot_writer, "Thread", Inline)


def test_two_generations_are_kept_and_no_more(servers, inline_tidying):
    ranks = Ranks(servers)
    for step in range(1, 6):
        assert ranks.go()
        assert ranks.whole_step() == {step - 1}
        for server in servers:
            steps = {checkpoint_of(key).step for key in server._objects}
            assert steps == {step, step - 1} - {0}
            assert len(server._objects) == 4 * len(steps), "file and part of both ranks"


def test_rank_that_still_writes_makes_all_wait_and_none_forget(servers, monkeypatch):
    ranks = Ranks(servers)
    assert ranks.go()
    slow = ranks.writers[1]
    done = slow._newest
    slow._newest = None
    assert not ranks.go() and not ranks.go()
    assert ranks.whole_step() == {0}
    slow._newest = done
    assert ranks.go() and ranks.whole_step() == {1}


def test_snapshot_that_is_due_while_another_is_written_comes_at_the_next_chance(servers):
    ranks = Ranks(servers, every=3)
    assert [ranks.go() for _ in range(3)] == [False, False, True]
    slow = ranks.writers[0]
    done = slow._newest
    assert [ranks.go(), ranks.go()] == [False, False]
    slow._newest = None
    assert not ranks.go(), "step 6 was due"
    slow._newest = done
    assert ranks.go(), "so step 7 is taken"


def test_late_snapshot_is_waited_for_so_that_no_loss_costs_more_than_a_step(servers, monkeypatch):
    may_write = Event()
    put = MemoryStoreServer.do_put
    monkeypatch.setattr(
        MemoryStoreServer, "do_put", lambda *args: may_write.wait(100) and put(*args)
    )
    wait = SnapshotWriter.wait
    monkeypatch.setattr(SnapshotWriter, "wait", lambda writer: (may_write.set(), wait(writer)))
    ranks = Ranks(servers, when_late="wait")
    assert ranks.go(waits=False) and ranks.num_waits == 0
    assert [writer.extra_reductions()[0] for writer in ranks.writers] == [1, 1]
    assert ranks.go(waits=False) and ranks.num_waits == 1
    assert ranks.whole_step() == {1}, "step 2 ends with the snapshot of step 1 whole"
    assert ranks.go() and ranks.whole_step() == {2}


def test_failed_rank_keeps_the_one_before_and_the_next_is_whole(servers, inline_tidying):
    ranks = Ranks(servers)
    assert ranks.go() and ranks.go()
    ranks.writers[0]._newest = replace(ranks.writers[0]._newest, error="lost")
    assert ranks.go() and ranks.whole_step() == {1}
    steps = {checkpoint_of(key).step for key in servers[0]._objects}
    assert steps == {1, 2, 3}, "nothing is dropped before a newer one is whole"
    assert ranks.go() and ranks.whole_step() == {3}
    assert {checkpoint_of(key).step for key in servers[0]._objects} == {3, 4}


def test_lost_server_leaves_single_copies_and_is_said(servers):
    ranks = Ranks(servers)
    assert ranks.go() and ranks.go()
    servers[1].shutdown()
    assert [ranks.go() for _ in range(3)] == [True] * 3
    assert ranks.whole_step() == {4}
    assert {w.metrics()["checkpoint/snapshot_lacking"] for w in ranks.writers} == {2}


def test_without_any_server_training_goes_on(servers):
    ranks = Ranks(servers)
    for server in servers:
        server.shutdown()
    assert [ranks.go() for _ in range(3)] == [True] * 3
    assert ranks.whole_step() == {0}


def test_first_whole_snapshot_of_an_attempt_drops_the_attempts_before(servers, inline_tidying):
    before = Ranks(servers)
    for _ in range(3):
        before.go()
    after = Ranks(servers, attempt=2)
    after.step = 2
    after.go()
    assert {checkpoint_of(key).attempt for key in servers[0]._objects} == {1, 2}
    after.go()
    assert {checkpoint_of(key).attempt for key in servers[0]._objects} == {2}


def test_fence_of_a_snapshot_is_that_of_its_copy(servers, monkeypatch):
    writer, fenced = Ranks(servers).writers[0], []
    monkeypatch.setattr(CheckpointWriter, "fence", lambda own: fenced.append(own))
    writer.fence()
    assert fenced == [writer._writer]


def test_metrics_of_a_snapshot_are_those_of_the_write(servers):
    ranks = Ranks(servers)
    assert set(ranks.writers[0].metrics()) == {
        "checkpoint/snapshot_step", "checkpoint/snapshot_lacking"
    }  # fmt: skip
    ranks.go()
    metrics = ranks.writers[0].metrics()
    held = sum(block.values.nbytes for block in make_blocks(MODEL, ranks.grid, 0))
    assert 0 < metrics["checkpoint/snapshot_bytes"] <= held
    # Training goes on while the copy is sent: which of the two takes longer is the machine's matter.
    assert metrics["checkpoint/snapshot_stall_s"] > 0 and metrics["checkpoint/snapshot_s"] > 0
