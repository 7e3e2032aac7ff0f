"""The cost of a save as planned is what the writer of a rank then takes and writes."""

import pytest
import torch

from raymega.checkpoint.save.writer import CheckpointWriter, SaveLimits
from raymega.plan.save_cost import save_cost, share_bytes
from raymega.train.build import build_parts
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.memory_store import MemoryStore
from tests.support.params import ALONE
from tests.unit.checkpoint.support import STATE, make_blocks, make_grid

PAUSE = ("elastic.snapshot_every=5", "elastic.snapshot_during_save=pause")


@pytest.mark.parametrize("layout", ["tp1-pp1-dp1", "tp2-pp2-dp1", "tp1-pp2-dp2", "tp1-pp1-dp3"])
@pytest.mark.parametrize("buffer_bytes", [0, 40_000])
def test_writer_writes_as_many_bytes_as_planned(layout, buffer_bytes):
    """But for norms, which one tensor-parallel rank saves for all, and rows that do not divide."""
    settings = [f"checkpoint.buffer_bytes={buffer_bytes}", "checkpoint.file_bytes=20000"]
    plan = make_test_plan("precision.dtype=float32", *settings, *layout_overrides(layout))
    grid, model = make_grid(layout), plan.job.model
    for rank in range(grid.world_size):
        cost, shards = save_cost(plan, rank), []
        writer = CheckpointWriter(
            MemoryStore(), rank=rank, attempt=1, report=shards.append,
            limits=SaveLimits(file_bytes=20_000, buffer_bytes=buffer_bytes),
        )  # fmt: skip
        blocks = make_blocks(model, grid, rank)
        writer.save(1, blocks, STATE)
        assert writer.wait() and shards[-1].error == ""
        row = 4 * model.ffn_hidden_size * 3
        norms = 3 * 4 * model.hidden_size * (2 * model.num_layers + 1) if grid.tp > 1 else 0
        assert cost.share_bytes - row - norms <= shards[-1].num_bytes <= cost.share_bytes + row
        assert cost.num_files <= len({box.file for box in shards[-1].boxes}) <= 2 * cost.num_files
        if buffer_bytes:
            assert writer.host_bytes <= cost.buffer_bytes


@pytest.mark.parametrize(
    ("settings", "is_shared"),
    [
        (["elastic.snapshot_every=0"], False),
        (["elastic.snapshot_every=5"], False),
        ([*PAUSE], True),
        ([*PAUSE, "checkpoint.buffer_bytes=40000"], False),
    ],
    ids=["none", "go-on", "pause", "own-buffer"],
)
def test_copy_in_the_memory_of_snapshots_takes_none_of_its_own(settings, is_shared):
    cost = save_cost(make_test_plan(*settings), 0)
    assert (cost.buffer_bytes == 0) == is_shared and cost.num_files >= 1


def test_rate_of_the_job_gives_the_least_time():
    plan = make_test_plan("checkpoint.bytes_per_s=1000")
    assert save_cost(plan, 0).least_s == share_bytes(plan, 0) / 1000
    assert save_cost(make_test_plan(), 0).least_s == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_weights_are_written_too(dtype):
    """In the compute format; with adapters they are another checkpoint's."""
    frozen = ["model.freeze=['layers.*','embedding.*']", "model.tie_word_embeddings=false"]
    for tuned in (frozen, ["model.lora.r=4"]):
        plan = make_test_plan("parallel.pp=1", f"precision.dtype={dtype}", *tuned)
        parts = build_parts(plan, rank=0, groups=ALONE, device=torch.device("cpu"))
        saved = [each.values for each in parts.optimizer.blocks()]
        assert share_bytes(plan, 0) == sum(each.numel() * each.element_size() for each in saved)


def test_a_rank_without_trained_tensors_writes_nothing():
    adapted = ["model.lora.r=4", "model.lora.target_modules=['layers.[23].*']"]
    plan = make_test_plan("parallel.pp=2", *adapted)
    assert (save_cost(plan, 0).share_bytes, save_cost(plan, 0).num_files) == (0, 0)
    assert save_cost(plan, 1).num_files == 1
