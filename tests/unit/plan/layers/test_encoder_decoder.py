"""Encoder-decoder models: counts of the published ones, stages by cost, kept bytes, and rules of their fields."""

from dataclasses import replace

import pytest
import torch

from benchmarks.encoder_decoder import EncoderDecoder
from raymega.config.schema import MemorySection, ModelSection, ParallelSection
from raymega.errors import PlanError
from raymega.model.encoder_decoder import EncoderDecoderStage
from raymega.plan.flops import flops_per_token, layer_costs
from raymega.plan.layers.encoder_decoder import corrupted_lengths, raw_length
from raymega.plan.layers.family_parts import FAMILY_PARTS
from raymega.plan.memory.activation_bytes import stage_activations
from raymega.plan.memory.activation_shape import ActivationShape
from raymega.plan.memory.state_bytes import count_parameters, rank_elements
from raymega.plan.stages import layer_counts
from raymega.plan.tensor_table import model_tensors
from tests.support.jobs import make_test_plan
from tests.support.saved_tensor_bytes import SavedBytes
from tests.support.stages import even_stages
from tests.unit.model.parts import CPU, make_stream

T5 = (
    "model.family=t5", "model.num_kv_heads=num_heads", "model.encoder_decoder={num_encoder_layers: 2, decoder_seq_len: 8}",
    "data.span_corruption={text_seq_len: 26, first_sentinel_id: 255, eos_token_id: 64}", "data.seq_len=32",
)  # fmt: skip
SIZES = {
    "t5-small": (EncoderDecoder(
        encoder_layers=6, decoder_layers=6, width=512, num_heads=8, head_width=64, ffn_hidden_size=2048, vocab_size=32128,
    ), 60_506_624),
    "t5_v1_1-xxl": (EncoderDecoder(
        encoder_layers=24, decoder_layers=24, width=4096, num_heads=64, head_width=64, ffn_hidden_size=10240,
        vocab_size=32128, is_gated=True, tie_word_embeddings=False,
    ), 11_135_332_352),
    "uneven": (EncoderDecoder(
        encoder_layers=5, decoder_layers=2, width=96, num_heads=8, head_width=16, ffn_hidden_size=64, vocab_size=512,
    ), 0),
}  # fmt: skip


def _model(sizes, decoder_seq_len):
    return ModelSection(
        family="t5_v1_1" if sizes.is_gated else "t5",
        num_layers=sizes.encoder_layers + sizes.decoder_layers,
        encoder_decoder={
            "num_encoder_layers": sizes.encoder_layers,
            "decoder_seq_len": decoder_seq_len,
        },
        hidden_size=sizes.width,
        num_heads=sizes.num_heads,
        head_dim=sizes.head_width,
        ffn_hidden_size=sizes.ffn_hidden_size,
        vocab_size=sizes.vocab_size,
        tie_word_embeddings=sizes.tie_word_embeddings,
    )


@pytest.mark.parametrize("name", SIZES)
def test_counts_are_those_of_the_published_models(name):
    sizes, published = SIZES[name]
    model = _model(sizes, 114)
    assert count_parameters(model) == sizes.num_parameters()
    if published:
        assert count_parameters(model) == published
    pair = sizes.flops_per_pair(source_tokens=512, target_tokens=114)
    assert flops_per_token(model, seq_len=626) == pytest.approx(pair / 626, rel=1e-12)


def test_text_of_a_row_is_that_of_the_published_training():
    spans = make_test_plan(*T5).job.data.span_corruption
    assert raw_length(spans, 512, 114) == 568
    assert corrupted_lengths(spans, 568) == (512, 114)


def test_stages_are_split_by_the_cost_of_each_side():
    model = _model(SIZES["t5-small"][0], 114)
    costs = layer_costs(model, 626)
    assert costs[-1] == 1.0
    assert costs[0] > 2 * costs[-1], "the encoder has the longer part of the row"
    parallel = ParallelSection(stages="auto", pp=3)
    counts = layer_counts(parallel, num_layers=12, num_stages=3, loss_cost=0.5, costs=costs)
    # by hand: three encoder blocks cost as much as the decoder and more
    assert counts == (3, 3, 6)
    assert layer_counts(parallel, num_layers=4, num_stages=3, loss_cost=9.0, costs=(1.0, 1.0, 2.0, 1.0)) == (2, 2, 0)  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("family", ["t5", "t5_v1_1"])
@pytest.mark.parametrize(
    "rates", [(0.0, 0.0), (0.1, 0.0), (0.1, 0.1)], ids=["whole", "hidden", "weights"]
)
def test_kept_bytes_are_those_of_the_formula(stage, family, rates):
    dropped = dict(zip(("hidden_dropout", "attention_dropout"), rates, strict=True))
    sizes = SIZES["uneven"][0]
    model = _model(sizes, 16).model_copy(update={"family": family, **dropped})
    stages = even_stages(num_layers=model.num_layers, num_stages=2)
    module = EncoderDecoderStage(
        model, stages[stage], sp=make_stream(), dtype=torch.bfloat16, device=CPU, seed=1
    )
    tokens, mask, hidden = torch.zeros(2, 80, dtype=torch.int64), torch.ones(2, 80), None
    if stage:
        hidden = torch.randn(80 + module.carried_rows(2), 2, 96).bfloat16().requires_grad_()
    with SavedBytes([*module.parameters(), tokens, mask]) as kept:
        module(tokens, tokens, mask, hidden, torch.arange(2))
    shape = ActivationShape(
        model=model, parallel=ParallelSection(), memory=MemorySection(), seq_len=80, micro_batch_size=2, dtype="bfloat16"
    )  # fmt: skip
    assert kept.total == pytest.approx(
        stage_activations(shape, stages[stage]).micro_batch_bytes, rel=0.03
    )


@pytest.mark.parametrize("pp", [1, 2])
def test_state_of_all_ranks_is_that_of_all_tensors(pp):
    plan = make_test_plan(*T5, f"parallel.pp={pp}", "model.tie_word_embeddings=false")
    held = [
        rank_elements(plan.job, plan.stages_of(rank), plan.grid, tp_rank=0)
        for rank in range(plan.grid.world_size)
    ]
    assert sum(each.dense for each in held) == count_parameters(plan.job.model)


def test_a_family_of_two_streams_has_the_norm_that_it_names(monkeypatch):
    parts = replace(FAMILY_PARTS["t5"], norm="layer_norm")
    monkeypatch.setattr("raymega.plan.layers.family_parts.family_parts", lambda _name: parts)
    model = _model(SIZES["uneven"][0], 16)
    (stage,) = even_stages(num_layers=model.num_layers, num_stages=1)
    module = EncoderDecoderStage(
        model, stage, sp=make_stream(), dtype=torch.float64, device=CPU, seed=1
    )
    # a stack of projections has the names of all
    names = {name for param in module.parameters() for name in param.spec.name.split("+")}
    assert {"layers.4.encoder_norm.bias", "layers.5.cross_attention_norm.bias"} < names
    assert names == {tensor.name for tensor in model_tensors(model)}


RULES = {
    "model.encoder_decoder.num_encoder_layers=0": "each has a block or more",
    "model.encoder_decoder.decoder_seq_len=0": "each side reads one or more",
    "data.span_corruption.text_seq_len=27": "becomes 25 of the encoder and 6 of the decoder",
    "data.span_corruption.first_sentinel_id=300": "it is one of the model's tokens, 99 to 255",
    "data.span_corruption.eos_token_id=255": "a text has the sentinels 255 to 255, and it is none of them",
    "model.attention_dropout=0.1 parallel.cp=2 parallel.cp_method=all_gather": "dropped without a fused kernel",
    "model.lora={r: 2, lora_dropout: 0.1, target_modules: [attention.q]}": "lora_dropout is set",
    "model.moe.num_experts=4": "moe is set",
    "model.head.kind=token_classification": "scores are read from one stream of tokens",
    "parallel.cp=2": "each score has a bias",
    "model.family=llama": "has one stream of tokens",
}


@pytest.mark.parametrize("change", RULES)
def test_what_two_streams_cannot_have_is_refused(change):
    with pytest.raises(PlanError, match=RULES[change]):
        make_test_plan(*T5, *([change] if "{" in change else change.split()))
