"""A manifest is made only of reports that add up."""

from dataclasses import replace

import pytest

from raymega.box import Box
from raymega.errors import CheckpointError
from tests.support.memory_store import MemoryStore
from tests.unit.checkpoint.support import MODELS, assemble_shards, make_grid, save_shards

GRID = make_grid("tp2-dp2")


@pytest.fixture
def shards():
    return save_shards(MemoryStore(), MODELS["llama-tied"], GRID)


def test_reports_in_any_order_give_one_manifest(shards):
    assert assemble_shards(shards[::-1], GRID) == assemble_shards(shards, GRID)


def test_missing_rank_is_named(shards):
    with pytest.raises(CheckpointError, match=r"3 reports, none from ranks \[2\]"):
        assemble_shards([s for s in shards if s.rank != 2], GRID)
    with pytest.raises(CheckpointError, match="0 reports"):
        assemble_shards([], GRID)


def test_report_given_twice_is_refused(shards):
    with pytest.raises(CheckpointError, match="5 reports"):
        assemble_shards([*shards, shards[0]], GRID)


def test_every_failed_rank_is_named_with_its_cause(shards):
    failed = [replace(s, boxes=(), error="disk full") if s.rank in (1, 3) else s for s in shards]
    with pytest.raises(CheckpointError) as caught:
        assemble_shards(failed, GRID)
    assert [f.fact[-24:] for f in caught.value.faults] == [
        f"rank {rank} failed: disk full" for rank in (1, 3)
    ]


def test_ranks_at_different_states_are_refused(shards):
    shards[3] = replace(shards[3], state={**shards[3].state, "samples": 801})
    with pytest.raises(CheckpointError, match=r"rank 3 is at .*801.*, rank 0 is not"):
        assemble_shards(shards, GRID)


def test_box_over_another_of_its_size_is_refused(shards):
    """As many elements are saved as there are, and some of them twice."""
    first, *rest = shards[1].boxes
    twin = next(
        box
        for shard in shards
        for box in shard.boxes
        if box.tensor == first.tensor and box.box.offset != first.box.offset
    )
    moved = replace(first, box=Box(offset=twin.box.offset, shape=first.box.shape))
    shards[1] = replace(shards[1], boxes=(moved, *rest))
    with pytest.raises(CheckpointError, match=f"{first.tensor} has .*0 times"):
        assemble_shards(shards, GRID)


def _change_box(shards, change):
    first, *rest = shards[1].boxes
    shards[1] = replace(shards[1], boxes=(*change(first), *rest))
    return first.tensor


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _: (), "0 times"),
        (lambda box: (box, box), "2 times"),
        (lambda box: (replace(box, dtype="float64"),), "several shapes or dtypes"),
        (
            lambda box: (replace(box, box=Box(offset=(999, 0), shape=box.box.shape)),),
            "a box outside its shape",
        ),
    ],
    ids=["hole", "overlap", "dtype", "outside"],
)
def test_boxes_that_do_not_add_up_are_refused(shards, change, said):
    name = _change_box(shards, change)
    with pytest.raises(CheckpointError, match=f"{name} has .*{said}"):
        assemble_shards(shards, GRID)
