"""Small models whose every element has a known value, on any grid, in one process."""

from math import inf, prod
from zlib import crc32

import torch

from raymega.box import Box
from raymega.checkpoint.format.manifest import Manifest, commit
from raymega.checkpoint.format.manifest_builder import assemble
from raymega.checkpoint.save.writer import CheckpointWriter, SaveLimits
from raymega.config.schema import ModelSection
from raymega.errors import StorageError
from raymega.parallel.comm.process_groups import Group, alone
from raymega.parallel.core.buckets import Sharing, make_buckets
from raymega.parallel.core.shard_spec import ShardSpec, make_spec
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.plan.grid import Grid
from raymega.plan.layers.global_tensor import GlobalTensor
from raymega.plan.tensor_table import stage_tensors
from raymega.plan.zero_levels import ZeroLevel
from raymega.storage.retry import RetryPolicy
from tests.support.blocks import blocks_of
from tests.support.memory_store import MemoryStore
from tests.support.stages import even_stages

KINDS = ("model", "adam.exp_avg", "adam.exp_avg_sq")
FUSED = (("attention.q.", "attention.k.", "attention.v."), ("mlp.gate.", "mlp.up."))
NO_WAIT = RetryPolicy(pauses_s=(0.0, 0.0))
DEFAULT_LIMITS = SaveLimits()
QUIET = SaveLimits(report_every_s=inf)
"""Nothing is reported before the end of a save, however long that takes."""
STATE = {"step": 100, "samples": 800, "tokens": 12800.0, "note": "x"}


def make_model(family: str, *, is_tied: bool) -> ModelSection:
    return ModelSection(
        family=family, num_layers=4, hidden_size=16, num_heads=8, num_kv_heads=4, ffn_hidden_size=24,
        vocab_size=40, make_vocab_size_divisible_by=8, max_positions=12, tie_word_embeddings=is_tied,
    )  # fmt: skip


MODELS = {
    f"{family}-{'tied' if is_tied else 'untied'}": make_model(family, is_tied=is_tied)
    for family in ("gpt2", "llama")
    for is_tied in (True, False)
}


class FailingStore(MemoryStore):
    """Refuses the next ``failures[method]`` calls."""

    def __init__(self):
        super().__init__()
        self.failures = {}

    def put(self, key, chunks, *, overwrite):
        self._fail("put")
        super().put(key, chunks, overwrite=overwrite)

    def size(self, key):
        self._fail("size")
        return super().size(key)

    def _fail(self, method):
        if self.failures.get(method, 0) > 0:
            self.failures[method] -= 1
            raise StorageError(f"{method} refused")


def make_grid(layout: str, order: str = "tp-cp-ep-dp-pp") -> Grid:
    degrees = {part[:2]: int(part[2:]) for part in layout.split("-")}
    return Grid(**degrees, order=order)


def rank_specs(model: ModelSection, grid: Grid, rank: int) -> list[ShardSpec]:
    """Specs of one rank, with q, k, v and gate, up as one parameter each."""
    at = grid.coords(rank)
    stage = even_stages(num_layers=model.num_layers, num_stages=grid.pp)[at.pp]
    groups: dict[str, list[GlobalTensor]] = {}
    for tensor in stage_tensors(model, stage):
        groups.setdefault(_fused_name(tensor.name), []).append(tensor)
    is_split = grid.pp > 1 and model.tie_word_embeddings
    return [
        make_spec(
            tuple(tensors),
            tp=grid.tp,
            tp_rank=at.tp,
            is_tied=is_split and name == "embedding.tokens.weight",
            is_tied_copy=is_split and name == "embedding.tokens.weight" and stage.is_last,
        )
        for name, tensors in groups.items()
    ]


def _fused_name(name: str) -> str:
    for first, *others in FUSED:
        for other in others:
            name = name.replace(other, first)
    return name


def block_values(name: str, shape: tuple[int, ...], box: Box, dtype: torch.dtype) -> torch.Tensor:
    """What the block holds: a function of the saved name and the global index, exact in dtype."""
    if dtype == torch.bfloat16:
        whole = (torch.arange(prod(shape)) * 7 + crc32(name.encode())) % 251
    else:
        whole = torch.arange(prod(shape)) + (crc32(name.encode()) % 1024) * 2**13
    everything = Box(offset=(0,) * len(shape), shape=shape)
    return whole.view(shape)[box.within(everything)].to(dtype)


def make_blocks(model, grid, rank, *, dtype=torch.float32, is_filled=True, is_sharded=False):
    """A rank's blocks: filled with their known values, or with NaN.

    Sharded as real buckets are, which are small here so that there are several.
    """
    params = [
        ShardedParameter(torch.zeros(spec.shape, dtype=dtype), spec)
        for spec in rank_specs(model, grid, rank)
    ]
    dp = Group(
        name="dp", ranks=grid.group("dp", rank), index=grid.coords(rank).dp, timeout_s=1.0, handle=None
    )  # fmt: skip
    sharing = Sharing(whole=dp, inside=dp, across=alone(rank))
    table = make_buckets([params], sharing, level=ZeroLevel(is_sharded), bucket_bytes=2000)
    blocks = []
    for kind in KINDS:
        for part in map(table.owned, table.buckets):
            values = torch.full((part.end - part.begin,), torch.nan, dtype=dtype)
            blocks += blocks_of(kind, part, values)
    if is_filled:
        fill(blocks)
    return blocks


def places_of(blocks):
    """The boxes of the blocks, by saved name."""
    places = {}
    for block in blocks:
        places.setdefault(block.name, []).append(block.box)
    return places


def fill(blocks):
    """Give each block its known values."""
    for block in blocks:
        block.values.copy_(known_values(block))


def known_values(block) -> torch.Tensor:
    return block_values(block.name, block.tensor.shape, block.box, block.values.dtype)


def same(blocks, wanted) -> bool:
    """Equal blocks with equal bits."""
    pairs = zip(blocks, wanted, strict=True)
    return all(a.box == b.box and torch.equal(a.values, b.values) for a, b in pairs)


def save_shards(
    store,
    model,
    grid,
    *,
    step=100,
    attempt=1,
    dtype=torch.float32,
    is_sharded=False,
    limits=DEFAULT_LIMITS,
):
    """Every rank's report of a save."""
    return [
        save_rank(
            store,
            make_blocks(model, grid, rank, dtype=dtype, is_sharded=is_sharded),
            rank=rank,
            step=step,
            attempt=attempt,
            limits=limits,
        )
        for rank in range(grid.world_size)
    ]


def save_rank(store, blocks, *, rank, step=100, attempt=1, limits=DEFAULT_LIMITS):
    """One rank's report of a save."""
    shards = []
    writer = CheckpointWriter(
        store, rank=rank, attempt=attempt, report=shards.append, retry=NO_WAIT,
        limits=limits,
    )  # fmt: skip
    writer.save(step, blocks, {**STATE, "step": step})
    assert writer.wait()
    return shards[-1]


def assemble_shards(shards, grid, *, attempt=1, metrics=None) -> Manifest:
    return assemble(
        shards,
        world_size=grid.world_size,
        attempt=attempt,
        created="2026-01-02T03:04:05+00:00",
        job={"run": {"name": "t"}},
        grid={"tp": grid.tp, "pp": grid.pp, "dp": grid.dp},
        metrics=metrics or {},
    )


def save_checkpoint(
    store,
    model,
    grid,
    *,
    step=100,
    attempt=1,
    dtype=torch.float32,
    is_sharded=False,
    limits=DEFAULT_LIMITS,
    metrics=None,
) -> Manifest:
    """A committed checkpoint of known values."""
    shards = save_shards(
        store, model, grid, step=step, attempt=attempt, dtype=dtype, is_sharded=is_sharded,
        limits=limits,
    )  # fmt: skip
    manifest = assemble_shards(shards, grid, attempt=attempt, metrics=metrics)
    commit(store, manifest)
    return manifest
