"""Replicas that hold equal state read each byte of it once between them, and all have every bit."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from raymega.checkpoint.format.manifest import commit, find_restore, read_blocks
from raymega.checkpoint.load import ranged_reads
from raymega.checkpoint.load.reader import boxes_by_name, load
from raymega.checkpoint.load.shared_load import SharedLoad, groups_to_share
from raymega.parallel.comm.collectives import all_gather
from raymega.parallel.comm.process_groups import Group
from raymega.storage.local import LocalStore
from raymega.storage.store import DelegatingStore
from tests.dist.checkpoint.test_held_state import block
from tests.dist.checkpoint.test_save_and_load import SEED, _optimizer, _save
from tests.support.ranks import run_grid
from tests.unit.checkpoint.support import MODELS, assemble_shards, make_grid

pytestmark = pytest.mark.dist

FAR = "s3://bucket/run"


class Far(DelegatingStore):
    """A folder that passes for an object store, and counts the bytes of data files."""

    uri = FAR

    def __init__(self, path):
        super().__init__(LocalStore(Path(path)))
        self.num_bytes = 0

    def get(self, key, *, start=0, num_bytes=-1):
        found = super().get(key, start=start, num_bytes=num_bytes)
        if key.endswith(".safetensors"):
            self.num_bytes += len(found)
        return found


def _restore(env, model, path, key, is_sharded, is_shared):
    """Return the bytes that all ranks read together, and whether this rank's state is the saved one."""
    ranged_reads.GAP_BYTES = 0  # these tensors are smaller than what is read along
    store = Far(path)
    _, _, optimizer = _optimizer(env, MODELS[model], seed=SEED + 1, is_sharded=is_sharded)
    for held in optimizer.blocks():
        held.values.fill_(torch.nan)
    shared = SharedLoad(list(optimizer.blocks()), groups_to_share(env.groups, FAR) * is_shared)
    manifest = read_blocks(store, key, boxes_by_name(shared.mine))
    load(store, manifest, shared.mine)
    shared.send()
    _, _, wanted = _optimizer(env, MODELS[model], seed=SEED, is_sharded=is_sharded)
    pairs = zip(optimizer.blocks(), wanted.blocks(), strict=True)
    is_equal = all(torch.equal(a.values, b.values) for a, b in pairs)
    mine = torch.tensor([store.num_bytes], dtype=torch.float64)
    return all_gather(mine, env.groups.world).sum().item(), is_equal


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "saved", "loaded", "is_sharded"),
    [
        ("gpt2-tied", "tp2-pp2", "dp3", False),
        ("llama-tied", "tp4", "pp2-dp2", False),
        ("llama-untied", "pp4", "tp2-dp2", False),
        ("llama-tied", "tp4", "dp4", True),
    ],
)
def test_each_byte_is_read_once_by_all_replicas_together(model, saved, loaded, is_sharded, tmp_path):  # fmt: skip
    store, grid = LocalStore(tmp_path), make_grid(saved)
    results = run_grid(_save, grid, model, str(tmp_path), False)
    commit(store, assemble_shards([shard for shard, _, _ in results], grid))
    key, grid = find_restore(store).key, make_grid(loaded)
    found = {}
    for is_shared in (False, True):
        ((num_bytes, is_equal),) = set(
            run_grid(_restore, grid, model, str(tmp_path), key, is_sharded, is_shared)
        )
        assert is_equal
        found[is_shared] = num_bytes
    # a saved box that two readers' blocks meet is read by both
    copies = 1 if is_sharded else grid.dp
    assert found[True] <= found[False] / copies * 1.02


@pytest.mark.sample(1)
@pytest.mark.parametrize("num_replicas", [2, 7, 512])
def test_blocks_are_divided_evenly_and_each_has_one_reader(num_replicas):
    ranks = tuple(range(num_replicas))
    blocks = [
        replace(block(f"layers.{number}", 0, [0.0] * (1 + number % 5)), holders=ranks)
        for number in range(4 * num_replicas)
    ]
    alone = block("alone", 0, [1.0])
    read = []
    for rank in ranks:
        group = Group(name="replicas", ranks=ranks, index=rank, timeout_s=1.0, handle="made")
        first, *mine = SharedLoad([alone, *blocks], [group, group]).mine
        assert first is alone and len({id(each) for each in mine}) == len(mine)
        read.append(mine)
    assert sorted(map(id, chain.from_iterable(read))) == sorted(map(id, blocks))
    num_bytes = [sum(each.values.nbytes for each in mine) for mine in read]
    assert max(num_bytes) - min(num_bytes) <= 2 * max(each.values.nbytes for each in blocks)


def test_a_folder_is_read_by_each_rank_itself(tmp_path):
    assert groups_to_share(None, str(tmp_path)) == ()
