"""The table of tensors: known parameter counts, and shards that tile."""

from dataclasses import replace

import pytest
import torch

from raymega.box import Box
from raymega.config.schema import ModelSection
from raymega.parallel.core.sharded_parameter import initial_values
from raymega.plan import flops, tensor_table
from raymega.plan.flops import (
    active_weights,
    flops_per_token,
    forward_flops_per_token,
    trained_share,
)
from raymega.plan.grid import ExpertPlace, Grid
from raymega.plan.memory import state_bytes
from raymega.plan.memory.state_bytes import count_parameters, rank_state
from raymega.plan.save_cost import save_cost
from raymega.plan.tensor_table import layer_tensors, model_tensors, stage_tensors
from raymega.train.build import build_parts
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.params import ALONE
from tests.support.stages import even_stages


def _model(**changes) -> ModelSection:
    fields = {
        "family": "llama",
        "num_layers": 4,
        "hidden_size": 32,
        "num_heads": 8,
        "num_kv_heads": 4,
        "ffn_hidden_size": 64,
        "vocab_size": 256,
        "max_positions": 64,
    }
    return ModelSection(**{**fields, **changes})


def test_gpt2_small_has_its_published_parameter_count():
    model = _model(
        family="gpt2", num_layers=12, hidden_size=768, num_heads=12, num_kv_heads="num_heads",
        ffn_hidden_size=3072, vocab_size=50257, max_positions=1024,
    )  # fmt: skip
    assert count_parameters(model) == 124_439_808


def test_table_is_padded_whatever_the_layout_and_padding_is_no_parameter():
    padded, exact = _model(vocab_size=130), _model(vocab_size=130, make_vocab_size_divisible_by=1)
    assert model_tensors(padded)[0].shape == (256, 32) and model_tensors(exact)[0].shape == (
        130,
        32,
    )
    assert count_parameters(padded) == count_parameters(exact)


def test_llama2_7b_and_llama3_8b_have_their_published_parameter_counts():
    big = {"num_layers": 32, "hidden_size": 4096, "num_heads": 32, "tie_word_embeddings": False}
    llama2 = _model(**big, num_kv_heads=32, ffn_hidden_size=11008, vocab_size=32000)
    llama3 = _model(**big, num_kv_heads=8, ffn_hidden_size=14336, vocab_size=128256)
    assert count_parameters(llama2) == 6_738_415_616
    assert count_parameters(llama3) == 8_030_261_248


def test_mixtral_8x7b_has_its_published_parameter_count():
    model = _model(
        num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, ffn_hidden_size=14336, vocab_size=32000,
        tie_word_embeddings=False, moe={"num_experts": 8},
    )  # fmt: skip
    assert count_parameters(model) == 46_702_792_704


MOE = {
    "num_experts": 8, "intermediate_size": 24, "first_k_dense_replace": 1, "layer_freq": 2, "shared_expert_intermediate_size": 16,
    "shared_expert_gate": True, "expert_bias": True, "load_balancing_type": "global", "router_aux_loss_coef": 0.1,
}  # fmt: skip


def test_blocks_with_experts_have_a_router_its_state_experts_and_a_shared_expert():
    model = _model(moe=MOE)
    table = {tensor.name: tensor for tensor in model_tensors(model)}
    holders = {name.split(".")[1] for name in table if ".moe." in name}
    assert holders == {"2"} and "layers.2.mlp.up.weight" not in table
    assert "layers.1.mlp.up.weight" in table
    shapes = {n.removeprefix("layers.2.moe."): t.shape for n, t in table.items() if ".moe." in n}
    assert shapes == {
        "router.weight": (8, 32), "router.bias": (8,), "router.counts": (8,),
        "experts.gate.weight": (8, 24, 32), "experts.up.weight": (8, 24, 32),
        "experts.down.weight": (8, 32, 24), "shared.gate.weight": (16, 32),
        "shared.up.weight": (16, 32), "shared.down.weight": (32, 16), "shared_gate.weight": (1, 32),
    }  # fmt: skip
    assert not any("gate" in t.name for t in layer_tensors(_model(family="gpt2", moe=MOE), 2)[6:-1])
    states = [tensor for tensor in table.values() if not tensor.is_trained]
    assert len(states) == 2 and all(tensor.num_parameters == 0 for tensor in states)


LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
}


@pytest.mark.parametrize("layers", [3, 8])
@pytest.mark.parametrize(
    "changes", [{}, {"family": "gpt2"}, {"moe": MOE}, {"mla": LATENT}], ids=str
)
def test_what_writes_to_the_residual_stream_starts_smaller_by_the_published_rule(layers, changes):
    """By 1 / sqrt(N), N residual layers (Radford et al. 2019, section 2.3): two a block."""
    full = {"num_kv_heads": "num_heads", "num_nextn_predict_layers": 1} if "mla" in changes else {}
    model = _model(num_layers=layers, initializer_range=0.02, **changes, **full)
    residual = (
        "attention.out.weight",
        "mlp.down.weight",
        "experts.down.weight",
        "shared.down.weight",
    )
    found = {tensor.name: tensor for tensor in model_tensors(model) if tensor.init == "normal"}
    assert sum(name.endswith(residual) for name in found) >= 2 * layers
    for name, tensor in found.items():
        wanted = 0.02 / (2 * layers) ** 0.5 if name.endswith(residual) else 0.02
        assert tensor.initializer_range == pytest.approx(wanted, rel=1e-15), name


def test_gpt2_starts_as_transformers_starts_it():
    """The standard deviation of each matrix, of the numbers that both draw."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=4, n_embd=96, n_head=4, vocab_size=512, n_positions=64)
    theirs = GPT2LMHeadModel(config).transformer.h
    model = _model(
        family="gpt2", num_layers=4, hidden_size=96, num_heads=4, num_kv_heads="num_heads",
        ffn_hidden_size=384, initializer_range=config.initializer_range,
    )  # fmt: skip
    alike = {
        "attention.q": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    for mine, other in alike.items():
        drawn = torch.cat([b.get_submodule(other).weight.detach().flatten() for b in theirs])
        (tensor,) = (t for t in layer_tensors(model, 1) if t.name == f"layers.1.{mine}.weight")
        own = initial_values(tensor, tensor.whole, seed=3, device=torch.device("cpu"))
        for std in (float(own.std()), tensor.initializer_range):
            assert std == pytest.approx(float(drawn.std()), rel=0.03), mine


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (8, 1), (2, 4), (4, 3)])
def test_boxes_of_all_experts_ranks_tile_the_expert_tensors(ep, etp):
    for tensor in (t for t in layer_tensors(_model(moe=MOE), 2) if t.is_expert):
        boxes = [
            tensor.box(tp=2, tp_rank=1, experts=ExpertPlace(ep=ep, ep_rank=e, etp=etp, etp_rank=f))
            for e in range(ep)
            for f in range(etp)
        ]
        assert sum(box.num_elements for box in boxes) == tensor.num_elements
        assert all(a.intersect(b) is None for a in boxes for b in boxes if a is not b)
        assert {box.shape[0] for box in boxes} == {8 // ep}


def test_qwen_models_have_their_published_parameter_counts():
    """Qwen2.5-0.5B and Qwen3-0.6B, whose heads are wider than hidden_size / num_heads."""
    small = {"vocab_size": 151936, "tie_word_embeddings": True}
    qwen2 = _model(
        family="qwen2", **small, num_layers=24, hidden_size=896, num_heads=14, num_kv_heads=2,
        ffn_hidden_size=4864,
    )  # fmt: skip
    qwen3 = _model(
        family="qwen3", **small, num_layers=28, hidden_size=1024, num_heads=16, num_kv_heads=8,
        ffn_hidden_size=3072, head_dim=128,
    )  # fmt: skip
    assert count_parameters(qwen2) == 494_032_768
    assert count_parameters(qwen3) == 596_049_920


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_stages_hold_every_tensor_once_apart_from_the_tied_copy(family, is_tied, num_stages):
    model = _model(family=family, tie_word_embeddings=is_tied)
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
    assert full.total_bytes - full.fixed_bytes == 16 * count and full.master_bytes == 0
    count, half = _rank_state("precision.dtype=bfloat16")
    assert half.total_bytes - half.fixed_bytes == 18 * count


@pytest.mark.parametrize(("name", "moments"), [("adamw", 2), ("sgd", 1), ("lion", 1)])
@pytest.mark.parametrize("dp", [1, 2, 3, 8])
def test_sharded_rank_keeps_its_part_of_masters_and_moments(dp, name, moments):
    sharded = ["parallel.sharding=optimizer", f"optimizer.name={name}", f"parallel.dp={dp}"]
    count, state = _rank_state("precision.dtype=bfloat16", *sharded)
    per_parameter = 2 + 4 + 4 * (1 + moments) / dp
    assert state.total_bytes - state.fixed_bytes == pytest.approx(
        per_parameter * count, abs=4 * (1 + moments)
    )
    count, state = _rank_state("precision.dtype=float32", *sharded)
    assert state.total_bytes - state.fixed_bytes == pytest.approx(
        (8 + 4 * moments / dp) * count, abs=4 * moments
    )


@pytest.mark.parametrize(
    ("name", "state_dtype"),
    [("adamw", "master"), ("muon", "bfloat16"), ("muon", "8bit")],
)
def test_state_of_ranks_is_what_their_buffers_hold(name, state_dtype):
    """But for padding, which is less than one element a bucket; the mean of the ranks that share it.

    Where a rank's part ends inside of a block of 8-bit state, its scale is there twice: less than 1 %.
    """
    optimizer = [f"optimizer.name={name}", f"optimizer.state_dtype={state_dtype}"]
    plan = make_test_plan("parallel.sharding=optimizer", *optimizer, *layout_overrides("tp1"))
    size = rank_state(plan.job, plan.stages, Grid(dp=3), tp_rank=0)
    held = num_buckets = 0
    for index in range(3):
        three = replace(ALONE.replicas, ranks=(0, 1, 2), index=index)
        groups = replace(ALONE, replicas=three, sharers=three)
        parts = build_parts(plan, rank=0, groups=groups, device=torch.device("cpu"))
        blocks = [block for block in parts.optimizer.blocks() if block.kind != "model"]
        held += sum(block.values.nbytes for block in blocks)
        num_buckets += len(parts.optimizer._table.buckets)
    cut_blocks = held // 100 if state_dtype == "8bit" else 0
    assert abs(held - 3 * size.moment_bytes) <= 2 * 8 * num_buckets + cut_blocks


def _rank_state(*overrides):
    plan = make_test_plan(*layout_overrides("tp1"), *overrides)
    state = rank_state(plan.job, plan.stages, plan.grid, tp_rank=0)
    return count_parameters(plan.job.model), state


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"moe": {"num_experts": 4, "first_k_dense_replace": 1}},
        {"freeze": ("layers.1.*", "*.mlp.*")},
        {"layer_sizes": {"ffn_hidden_size": (64, 96)}},
    ],
)
def test_sums_by_kind_of_block_are_those_of_all_blocks(changes):
    model, seq_len = _model(num_layers=5, **changes), 64
    tensors = model_tensors(model)
    assert count_parameters(model) == sum(each.num_parameters for each in tensors)
    blocks = [layer_tensors(model, layer) for layer in range(5)]
    trained = [active_weights((t for t in block if t.is_trained), model) for block in blocks]
    whole = sum(active_weights(block, model) for block in blocks)
    assert trained_share(model) == pytest.approx(sum(trained) / whole)
    attention = seq_len * model.hidden_size * 2 * 5
    forward = 2 * (whole + model.vocab_size * model.hidden_size) + attention
    assert forward_flops_per_token(model, seq_len=seq_len) == pytest.approx(forward)


def test_a_block_of_each_kind_is_enough_for_a_plan_of_many(monkeypatch):
    """100,000 blocks are planned in seconds: tables of tensors are made for each kind, not for each block."""
    made = []
    for module in (tensor_table, flops, state_bytes):
        monkeypatch.setattr(
            module, "layer_tensors", lambda *args: made.append(args) or layer_tensors(*args)
        )
    model = _model(num_layers=3000, freeze=("layers.7.*",))
    assert count_parameters(model) > 0 and forward_flops_per_token(model, seq_len=64) > 0
    assert trained_share(model) < 1 and flops_per_token(model, seq_len=64) > 0
    plan = make_test_plan("model.num_layers=3000", *layout_overrides("pp2"))
    assert rank_state(plan.job, plan.stages_of(0), plan.grid, tp_rank=0).total_bytes > 0
    assert save_cost(plan, 0).share_bytes > 0
    assert len(made) < 40
