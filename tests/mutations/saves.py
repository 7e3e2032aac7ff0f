"""Planted mistakes in how checkpoints are saved, and the save and load that must not take them for whole.

`tests.mutations.outcomes` calls `outcome` with each of them planted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class SaveMutation:
    """A row: ``old`` in the package's ``file`` becomes ``new``; ``caught`` is what then says so."""

    name: str
    file: str
    old: str
    new: str
    caught: str


SAVE_MUTATIONS = (
    SaveMutation(
        name="a byte of every box is flipped on its way to the store",
        file="checkpoint/save/writer.py",
        old="            yield piece\n",
        new="            yield bytes([piece[0] ^ 1]) + bytes(piece[1:])\n",
        caught="load: CheckpointError",
    ),
    SaveMutation(
        name="every replica writes all that they share",
        file="checkpoint/format/data_file.py",
        old="begin, end = (total * place // len(holders) for place in (replica, replica + 1))",
        new="begin, end = 0, total",
        caught="save: CheckpointError",
    ),
    SaveMutation(
        name="the row in which a replica's stretch begins is written by nobody",
        file="checkpoint/format/data_file.py",
        old="for byte in (begin, end))",
        new="for byte in (begin + row_bytes * (begin > 0), end))",
        caught="save: CheckpointError",
    ),
    SaveMutation(
        name="tensor-parallel ranks all write what they share",
        file="checkpoint/format/data_file.py",
        old="        if local_block.is_primary:\n",
        new="        if True:\n",
        caught="save: CheckpointError",
    ),
    SaveMutation(
        name="the first tensor is left out",
        file="checkpoint/format/data_file.py",
        old="        if local_block.is_primary:\n",
        new="        if local_block.is_primary and local_block.tensor != local_blocks[0].tensor:\n",
        caught="load: CheckpointError",
    ),
    SaveMutation(
        name="boxes are copied to where the one before lies",
        file="checkpoint/save/host_copy.py",
        old="        for start, values in parts:\n",
        new="        for start, values in ((max(0, s - 8), v) for s, v in parts):\n",
        caught="values differ",
    ),
    SaveMutation(
        name="the manifest says that a box begins where its file does",
        file="checkpoint/format/data_file.py",
        old="start=header_bytes + assignment.start",
        new="start=assignment.start",
        caught="load: CheckpointError",
    ),
    SaveMutation(
        name="a snapshot is copied over the one before, which alone is whole",
        file="checkpoint/snapshots/buffers.py",
        old="int(bool(whole_step) and self._steps[0] == whole_step)",
        new="0",
        caught="snapshot: of step 0",
    ),
    SaveMutation(
        name="a snapshot is copied to memory that a checkpoint is still read from",
        file="checkpoint/snapshots/writer.py",
        old="return self._is_wanted and self._is_free and not self._is_lent",
        new="return self._is_wanted and self._is_free",
        caught="snapshot: over a checkpoint",
    ),
)


def outcome(_folder: Path) -> str:
    """What becomes of a checkpoint of known values that one grid saves and another one loads."""
    from raymega.checkpoint.format.manifest import commit
    from raymega.checkpoint.load.reader import load
    from raymega.errors import RaymegaError
    from tests.support.memory_store import MemoryStore
    from tests.unit.checkpoint import support

    model, store, grid = support.MODELS["gpt2-tied"], MemoryStore(), support.make_grid("tp2-dp2")
    try:
        shards = support.save_shards(store, model, grid)
        manifest = support.assemble_shards(shards, grid)
        commit(store, manifest)
    except RaymegaError as error:
        return f"save: {type(error).__name__}"
    alone = support.make_grid("tp1")
    blocks = support.make_blocks(model, alone, 0, is_filled=False)
    try:
        load(store, manifest, blocks)
    except RaymegaError as error:
        return f"load: {type(error).__name__}"
    if not support.same(blocks, support.make_blocks(model, alone, 0)):
        return "values differ"
    return snapshot_outcome()


def snapshot_outcome() -> str:
    """Which snapshot is whole when a rank has not finished the one of step 2."""
    from raymega.checkpoint.format.keys import folder_of
    from raymega.checkpoint.snapshots.snapshot import find_snapshot
    from raymega.checkpoint.snapshots.writer import SnapshotWriter
    from raymega.messages import Replicas
    from raymega.storage.memory_server import MemoryStoreServer
    from raymega.storage.remote_memory_store import RemoteMemoryStore
    from tests.support.jobs import make_test_plan
    from tests.unit.checkpoint import support

    plan = make_test_plan(
        "parallel.pp=1", "parallel.dp=1", "parallel.tp=1", "elastic.snapshot_every=1"
    )
    blocks = support.make_blocks(support.MODELS["gpt2-tied"], support.make_grid("tp1"), 0)
    with MemoryStoreServer("127.0.0.1", "token") as server:
        homes = Replicas(token="token", write_to=(server.uri,), num_copies=1, home=server.uri)
        writer = SnapshotWriter(plan, rank=0, attempt=1, replicas=homes)
        for step in (1, 2):
            writer.observe(writer.extra_reductions(), step=step)
            writer.save(step, blocks, {**support.STATE, "step": step})
            writer.wait()
        writer.observe(writer.extra_reductions(), step=3, is_lent=True)
        if writer.is_due:
            return "snapshot: over a checkpoint"
        store = RemoteMemoryStore(server.uri, "token")
        store.drop(key for key in store.list(folder_of(2)) if key.endswith(".json"))
        found = find_snapshot({"snapshot server": store}, job={}, now="")
        step = found.manifest.step if found else 0
    return "whole" if step == 1 else f"snapshot: of step {step}"
