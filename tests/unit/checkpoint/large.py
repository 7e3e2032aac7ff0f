"""A model of 13 MB of state whose values tell the step: large enough for uploads of several parts."""

import torch

from raymega.checkpoint.format.keys import CheckpointId, entry_key
from raymega.checkpoint.format.manifest import commit
from raymega.checkpoint.format.manifest_builder import assemble
from raymega.checkpoint.load.reader import load
from raymega.checkpoint.save.writer import CheckpointWriter, SaveLimits
from raymega.config.schema import ModelSection
from tests.unit.checkpoint.support import NO_WAIT, STATE, make_blocks, make_grid

ALONE = make_grid("tp1")
LARGE = ModelSection(
    family="llama", num_layers=1, hidden_size=256, num_heads=8, num_kv_heads=4, ffn_hidden_size=256,
    vocab_size=3072, make_vocab_size_divisible_by=8, max_positions=12, tie_word_embeddings=True,
)  # fmt: skip
PART = 5 << 20  # the least that services take
FILES = SaveLimits(file_bytes=6 << 20)


def blocks_of_step(step):
    blocks = make_blocks(LARGE, ALONE, 0)
    for block in blocks:
        block.values.add_(step)
    return blocks


def write_step(store, step, *, attempt=1, limits=FILES, local_cache=None, retry=NO_WAIT):
    """The report of a save."""
    shards = []
    writer = CheckpointWriter(
        store, rank=0, attempt=attempt, report=shards.append, limits=limits,
        retry=retry, local_cache=local_cache,
    )  # fmt: skip
    writer.save(step, blocks_of_step(step), {**STATE, "step": step})
    assert writer.wait()
    return shards[-1]


def make_manifest(shard, *, attempt=1):
    return assemble(
        [shard], world_size=1, attempt=attempt, created="2026-01-02T03:04:05+00:00", job={}, grid={}
    )


def save_step(store, step, *, attempt=1, **options):
    """A committed checkpoint of ``step``."""
    shard = write_step(store, step, attempt=attempt, **options)
    assert shard.error == ""
    manifest = make_manifest(shard, attempt=attempt)
    commit(store, manifest)
    return manifest


def keys_of(manifest):
    """Every key of a checkpoint whose boxes are in its manifest."""
    at = CheckpointId(attempt=manifest.attempt, step=manifest.step)
    return {manifest.key, entry_key(at), *manifest.file_sizes()}


def holds_step(store, manifest):
    """Whether the checkpoint loads with the values of its own step, bit for bit."""
    found = make_blocks(LARGE, ALONE, 0, is_filled=False)
    load(store, manifest, found)
    wanted = blocks_of_step(manifest.step)
    return all(torch.equal(a.values, b.values) for a, b in zip(found, wanted, strict=True))
