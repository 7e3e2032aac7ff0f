"""The table of tensors: known parameter counts, and shards that tile."""

import pytest

from raymega.config.schema import ModelSection
from raymega.messages import Box
from raymega.plan.grid import Grid
from raymega.plan.stages import make_stages
from raymega.plan.state_size import count_parameters, rank_state
from raymega.plan.tensors import model_tensors, stage_tensors


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
    stages = make_stages(num_layers=4, num_stages=num_stages)
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
    model, stage = _model(), make_stages(num_layers=4, num_stages=1)
    full = rank_state(model, stage, Grid(), tp_rank=0, dtype="float32")
    half = rank_state(model, stage, Grid(), tp_rank=0, dtype="bfloat16")
    count = count_parameters(model)
    assert full.total_bytes == 16 * count and full.master_bytes == 0
    assert half.total_bytes == 18 * count
