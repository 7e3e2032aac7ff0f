"""The table of tensors: known parameter counts, and shards that tile."""

from dataclasses import replace

import pytest
import torch

from raymega.config.schema import ModelSection
from raymega.messages import Box
from raymega.plan.grid import Grid
from raymega.plan.stages import even_stages
from raymega.plan.state_size import count_parameters, rank_state
from raymega.plan.tensors import model_tensors, stage_tensors
from raymega.train.build import build_parts
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.params import ALONE


def _model(**changes) -> ModelSection:
    fields = {
        "family": "llama",
        "num_layers": 4,
        "width": 32,
        "num_heads": 8,
        "num_kv_heads": 4,
        "ffn_width": 64,
        "vocab_size": 256,
        "max_positions": 64,
    }
    return ModelSection(**{**fields, **changes})


def test_gpt2_small_has_its_published_parameter_count():
    model = _model(
        family="gpt2", num_layers=12, width=768, num_heads=12, num_kv_heads="num_heads",
        ffn_width=3072, vocab_size=50257, max_positions=1024,
    )  # fmt: skip
    assert count_parameters(model) == 124_439_808


def test_table_is_padded_whatever_the_layout_and_padding_is_no_parameter():
    padded, exact = _model(vocab_size=130), _model(vocab_size=130, vocab_multiple=1)
    assert model_tensors(padded)[0].shape == (256, 32) and model_tensors(exact)[0].shape == (
        130,
        32,
    )
    assert count_parameters(padded) == count_parameters(exact)


def test_llama2_7b_and_llama3_8b_have_their_published_parameter_counts():
    big = {"num_layers": 32, "width": 4096, "num_heads": 32, "is_embedding_tied": False}
    llama2 = _model(**big, num_kv_heads=32, ffn_width=11008, vocab_size=32000)
    llama3 = _model(**big, num_kv_heads=8, ffn_width=14336, vocab_size=128256)
    assert count_parameters(llama2) == 6_738_415_616
    assert count_parameters(llama3) == 8_030_261_248


def test_qwen_models_have_their_published_parameter_counts():
    """Qwen2.5-0.5B and Qwen3-0.6B, whose heads are wider than width / num_heads."""
    small = {"vocab_size": 151936, "is_embedding_tied": True}
    qwen2 = _model(
        family="qwen2", **small, num_layers=24, width=896, num_heads=14, num_kv_heads=2,
        ffn_width=4864,
    )  # fmt: skip
    qwen3 = _model(
        family="qwen3", **small, num_layers=28, width=1024, num_heads=16, num_kv_heads=8,
        ffn_width=3072, head_features=128,
    )  # fmt: skip
    assert count_parameters(qwen2) == 494_032_768
    assert count_parameters(qwen3) == 596_049_920


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_stages_hold_every_tensor_once_apart_from_the_tied_copy(family, is_tied, num_stages):
    model = _model(family=family, is_embedding_tied=is_tied)
    stages = even_stages(num_layers=4, num_stages=num_stages)
    held = [t.name for stage in stages for t in stage_tensors(model, stage)]
    names = [t.name for t in model_tensors(model)]
    assert len(names) == len(set(names))
    extra = ["embedding.tokens.weight"] if is_tied and num_stages > 1 else []
    assert sorted(held) == sorted(names + extra)


def test_boxes_of_all_tp_ranks_tile_the_tensor():
    for tensor in model_tensors(_model()):
        boxes = [tensor.box(tp=4, tp_rank=rank) for rank in range(4)]
        whole = Box(offset=(0,) * len(tensor.shape), shape=tensor.shape)
        assert all(whole.intersect(box) == box for box in boxes)
        if tensor.tp_dim < 0:
            assert boxes == [whole] * 4
            continue
        assert sum(box.num_elements for box in boxes) == tensor.num_elements
        assert all(a.intersect(b) is None for a in boxes for b in boxes if a is not b)


def test_rank_state_counts_masters_only_below_float32():
    count, full = _rank_state("precision.dtype=float32")
    assert full.total_bytes == 16 * count and full.master_bytes == 0
    count, half = _rank_state("precision.dtype=bfloat16")
    assert half.total_bytes == 18 * count


@pytest.mark.parametrize(("name", "moments"), [("adamw", 2), ("sgd", 1)])
@pytest.mark.parametrize("dp", [1, 2, 3, 8])
def test_sharded_rank_keeps_its_part_of_masters_and_moments(dp, name, moments):
    sharded = ["parallel.sharding=optimizer", f"optimizer.name={name}", f"parallel.dp={dp}"]
    count, state = _rank_state("precision.dtype=bfloat16", *sharded)
    per_parameter = 2 + 4 + 4 * (1 + moments) / dp
    assert state.total_bytes == pytest.approx(per_parameter * count, abs=4 * (1 + moments))
    count, state = _rank_state("precision.dtype=float32", *sharded)
    assert state.total_bytes == pytest.approx((8 + 4 * moments / dp) * count, abs=4 * moments)


def test_state_of_ranks_is_what_their_buffers_hold():
    """But for padding, which is less than one element a bucket."""
    plan = make_test_plan("parallel.sharding=optimizer", *layout_overrides("tp1"))
    size = rank_state(plan.job, plan.stages, Grid(dp=3), tp_rank=0)
    groups = replace(ALONE, replicas=replace(ALONE.replicas, ranks=(0, 1, 2)))
    parts = build_parts(plan, rank=0, groups=groups, device=torch.device("cpu"))
    blocks = [block for block in parts.optimizer.blocks() if block.kind != "model"]
    held = sum(block.values.nbytes for block in blocks)
    num_buckets = len(parts.optimizer._table.buckets)
    assert abs(held - size.moment_bytes) <= 2 * 4 * num_buckets


def _rank_state(*overrides):
    plan = make_test_plan(*layout_overrides("tp1"), *overrides)
    state = rank_state(plan.job, plan.stages, plan.grid, tp_rank=0)
    return count_parameters(plan.job.model), state
