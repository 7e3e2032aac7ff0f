"""Model FLOPs against figures that others have printed, and peaks by device names."""

from pathlib import Path

import pytest

from raymega.api import load_job
from raymega.config.attention import AttentionSection
from raymega.config.load import parse_job
from raymega.config.lora import LoraSection
from raymega.config.mla import MlaSection
from raymega.config.schema import ModelSection
from raymega.plan.flops import flops_per_token
from raymega.plan.hardware.catalog import CATALOGUE
from raymega.plan.hardware.lookup import ROUND_H100, nvlink_bytes_per_s, peak_flops
from raymega.plan.layers.vision import image_flops
from raymega.plan.memory.state_bytes import count_parameters

JOBS = Path(__file__).parents[3] / "jobs"
LLAMA_3_8B = ModelSection(
    family="llama",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    ffn_hidden_size=14336,
    vocab_size=128256,
    max_positions=8192,
    tie_word_embeddings=False,
)


def test_llama_3_8b_needs_what_nvidias_tables_say():
    assert flops_per_token(LLAMA_3_8B, seq_len=8192) == pytest.approx(51.5e9, rel=2e-3)


def test_formula_of_a_gpt_without_grouped_heads():
    """Narayanan et al. 2021, equation 3, less recomputation (4 -> 3) and half of attention."""
    layers, width, seq_len, vocab = 24, 1024, 2048, 51200
    gpt = ModelSection(
        family="gpt2", num_layers=layers, hidden_size=width, num_heads=16, ffn_hidden_size=4 * width,
        vocab_size=vocab, max_positions=seq_len,
    )  # fmt: skip
    expected = 72 * layers * width**2 * (1 + seq_len / (12 * width) + vocab / (12 * layers * width))
    assert flops_per_token(gpt, seq_len=seq_len) == pytest.approx(expected, rel=1e-12)


NEXT = ModelSection.model_validate(
    {
        "family": "qwen3_next", "num_layers": 48, "hidden_size": 2048, "num_heads": 16, "num_kv_heads": 2,
        "head_dim": 256, "ffn_hidden_size": 5120, "vocab_size": 151936, "tie_word_embeddings": False,
        "attention": {"layer_types": ["gated_delta_net"] * 3 + ["full"], "partial_rotary_factor": 0.25},
        "linear_attention": {"num_key_heads": 16, "num_value_heads": 32, "key_head_dim": 128, "value_head_dim": 128},
        "moe": {
            "num_experts": 512, "top_k": 10, "intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "shared_expert_gate": True,
        },
    }
)  # fmt: skip


def test_qwen3_next_has_the_parameters_of_transformers_and_states_cost_no_more_in_longer_rows():
    """79,674,391,296 parameters has Qwen3NextForCausalLM of the config.json of Qwen/Qwen3-Next-80B-A3B-Instruct."""
    assert count_parameters(NEXT) == 79_674_391_296
    longer, shorter = (flops_per_token(NEXT, seq_len=length) for length in (8192, 4096))
    # 12 of 48 layers attend; three products of two sums each, forward and backward
    assert longer - shorter == 3 * 4096 * 12 * 16 * 2 * 256
    without = NEXT.model_copy(update={"attention": AttentionSection()})
    states = 3 * 36 * 6 * 32 * 128 * 128
    matrices = 2048 * (2 * 2048 + 2 * 4096 + 64) + 4096 * 2048 + 4 * 8192
    attention = 2048 * (2 * 16 + 2 * 2) * 256 + 16 * 256 * 2048
    more = states + 3 * 36 * (2 * (matrices - attention) - 4096 * 16 * 2 * 256)
    assert shorter - flops_per_token(without, seq_len=4096) == pytest.approx(more, rel=1e-9)


def test_a_tied_head_costs_what_an_own_one_does():
    tied = LLAMA_3_8B.model_copy(update={"tie_word_embeddings": True})
    assert flops_per_token(tied, seq_len=64) == flops_per_token(LLAMA_3_8B, seq_len=64)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
    ],
)
def test_peaks_of_known_devices(name, tflops):
    assert peak_flops(name, dtype="bfloat16") == tflops * 1e12
    assert peak_flops(name, dtype="float32") is None


@pytest.mark.parametrize("name", ["", "NVIDIA GH200 480GB", "Tesla T4"])
def test_unknown_devices_have_no_peak(name):
    assert peak_flops(name, dtype="bfloat16") is None


def test_nvlink_is_of_gpus_on_a_board_and_not_of_cards():
    assert nvlink_bytes_per_s("NVIDIA H100 80GB HBM3 81559 MiB") == 450e9
    assert nvlink_bytes_per_s("NVIDIA H100 PCIe 81559 MiB") is None
    assert nvlink_bytes_per_s("NVIDIA A100-PCIE-40GB 40960 MiB") is None


@pytest.mark.parametrize("device", [ROUND_H100, *CATALOGUE.values()], ids=lambda each: each.name)
def test_groups_get_no_more_than_the_makers_links(device):
    inside, outside = device.devices_per_node, device.devices_per_node + 1
    assert device.bytes_per_s(inside) <= device.link_bytes_per_s
    assert device.bytes_per_s(outside) <= device.network_bytes_per_s


def test_round_figures_are_the_makers_with_round_shares():
    assert ROUND_H100.attention_flops == 989e12 * 0.4
    assert [ROUND_H100.bytes_per_s(span) for span in (8, 9)] == [450e9, 50e9]


def test_deepseek_v3_costs_what_its_authors_say():
    """250 GFLOP a token at S=4096, without multi-token prediction (Zhao et al. 2025, table 2)."""
    model = parse_job(JOBS / "deepseek-v3-2048gpu.yaml").job().model
    model = model.model_copy(update={"num_nextn_predict_layers": 0})
    assert flops_per_token(model, seq_len=4096) == pytest.approx(250e9, rel=5e-3)


def test_scores_and_values_of_latent_attention_have_widths_of_their_own():
    """A causal token multiplies S / 2 keys, as wide as both parts of a query, and S / 2 values."""
    mla = MlaSection(
        kv_lora_rank=12, q_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5
    )
    model = LLAMA_3_8B.model_copy(update={"num_kv_heads": "num_heads", "mla": mla})
    wanted = 3 * 2 * (64 / 2) * model.num_layers * model.num_heads * ((6 + 4) + 5)
    attention = flops_per_token(model, seq_len=64) - flops_per_token(model, seq_len=0)
    assert attention == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("frozen", [{"freeze": ("*",)}, {"lora": LoraSection(r=16)}])
def test_frozen_weights_have_no_gradients(frozen):
    """Two thirds of the products: those of the forward and of the inputs' gradients."""
    tuned = LLAMA_3_8B.model_copy(update=frozen)
    attention = (
        3 * (flops_per_token(LLAMA_3_8B, seq_len=8192) - flops_per_token(LLAMA_3_8B, seq_len=0)) / 3
    )
    matrices = flops_per_token(LLAMA_3_8B, seq_len=0)
    whole = flops_per_token(tuned, seq_len=8192)
    assert whole == pytest.approx(attention + 2 / 3 * matrices, rel=0.01)


def test_a_frozen_tower_is_spared_its_backward():
    model = load_job(JOBS / "llava.yaml").model
    frozen = model.model_copy(update={"freeze": ("vision.*",)})
    spared = flops_per_token(model, seq_len=64) - flops_per_token(frozen, seq_len=64)
    assert spared == pytest.approx(2 * model.vision.images_per_token * image_flops(model))


def test_frozen_matrices_of_two_sides_meet_their_own_tokens():
    """One product of three with each: 10,240 weights of a block, 4,096 more of the decoder's, and the head's."""
    model = load_job(JOBS / "t5.yaml").model
    frozen = model.model_copy(update={"freeze": ("*",)})
    spared = flops_per_token(model, seq_len=64) - flops_per_token(frozen, seq_len=64)
    per_row = 48 * 2 * 10_240 + 16 * (2 * (10_240 + 4_096) + 256 * 32)
    assert spared == pytest.approx(2 * per_row / 64)
