"""What a row of published runs says of its system and hardware, in columns and in words."""

from __future__ import annotations

import pytest

from raymega.errors import ConfigError
from raymega.planner.calibration.known_models import is_gated, known_model
from raymega.planner.calibration.published_runs import COLUMNS, published_run
from raymega.planner.calibration.row_system import (
    device_of,
    facts_of,
    format_of,
    gpu_of,
    is_fully_sharded,
    is_late,
    software_of,
)


def a_row(**cells: object) -> dict[str, str]:
    """A dense model of 7B on a node of A100s, with other cells."""
    usual = {
        "source": "a source", "model": "GPT 7B", "layers": 32, "hidden": 4096, "heads": 32, "ffn": 16384,
        "vocab": 51200, "seq": 2048, "gpu": "A100-80GB", "n_gpus": 8, "gbs": 64, "mbs": 2,
        "precision": "bf16", "recompute": "none",
    }  # fmt: skip
    return dict.fromkeys(COLUMNS, "") | {k: str(v) for k, v in (usual | cells).items()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("BF16", "16-bit"), ("bf16", "16-bit"), ("AMP_BF16", "16-bit"), ("fp16 mixed", "16-bit"),
        ("", "16-bit"), ("FP8-CS (FP8-MX)", "8-bit"), ("MXFP8", "8-bit"), ("fp8", "8-bit"),
        ("float8 rowwise", "8-bit"), ("NVFP4", "4-bit"), ("mxfp4", "4-bit"),
    ],
)  # fmt: skip
def test_the_name_of_a_format_counts_in_any_case(name, expected):
    row = a_row(precision=name)
    assert format_of(row) == expected
    assert format_of(a_row(precision=name.swapcase())) == expected
    assert software_of(row) == software_of(a_row(precision=name.swapcase()))
    assert is_late(row) == (name not in ("fp16 mixed", ""))


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("GB300", "gb300"), ("NVIDIA GB200 NVL72", "gb200"), ("B300", "b300"), ("B200", "b200"),
        ("H800-80GB", "h800"), ("V100-32GB (DGX-2)", "v100"), ("A800-80GB", "a800"),
        ("H100-96GB-HBM2e-500W", "h100-96gb"), ("H100-80GB-SXM", "h100"), ("TPUv4", ""),
        ("cpu", ""),
    ],
)  # fmt: skip
def test_a_device_is_found_by_the_longest_name_that_the_cell_holds(name, gpu):
    assert gpu_of(a_row(gpu=name)) == gpu


def test_a_device_has_the_memory_and_the_network_that_its_name_states():
    usual = device_of(a_row())
    small = device_of(a_row(gpu="A100-40GB"))
    assert usual is not None and small is not None
    assert small.memory_bytes == 40 * 2**30 and small.memory_bytes_per_s < usual.memory_bytes_per_s
    slow = device_of(a_row(gpu="A100-80GB-SXM (4x100Gb RoCE)"))
    assert slow is not None
    assert slow.network_bytes_per_s == 4 * 100e9 / 8 / 8
    assert slow.memory_bytes == usual.memory_bytes


def test_products_in_four_bits_have_the_peak_of_four_bits():
    wide, narrow = (device_of(a_row(gpu="GB300", precision=name)) for name in ("fp8", "NVFP4"))
    assert wide is not None and narrow is not None
    assert narrow.peak_8_bit_flops == wide.peak_4_bit_flops > wide.peak_8_bit_flops
    without = device_of(a_row(gpu="H100-80GB", precision="NVFP4"))
    assert without is not None and without.peak_8_bit_flops == 1979e12


@pytest.mark.parametrize(
    ("note", "is_sharded"),
    [
        ("FSDP=64", True), ("fsdp=True; zero1=-1", True), ("fsdp=False", False), ("", False),
        ("DeepSpeed ZeRO-3", True), ("ZeRO-1", False), ("FULL_SHARD", True), ("ZeRO stage 3", True),
    ],
)  # fmt: skip
def test_words_of_a_note_say_whether_parameters_are_sharded(note, is_sharded):
    assert is_fully_sharded(a_row(note=note)) == is_sharded


def test_fsdp_in_16_bits_is_taken_for_a_model_of_modules_unless_it_is_compiled():
    assert not software_of(a_row(note="FSDP")).fuses_kernels
    assert software_of(a_row(note="FSDP, torch.compile")).fuses_kernels
    assert software_of(a_row(note="FSDP", precision="FP8")).fuses_kernels


def test_the_device_tells_the_year_too():
    assert is_late(a_row(gpu="H100", precision="fp16")) and not is_late(a_row(precision="fp16"))
    assert not software_of(a_row(gpu="V100-32GB", model="Llama 7B")).has_fused_attention
    assert software_of(a_row(gpu="H800", precision="")).has_fused_attention


@pytest.mark.parametrize("top_k", ["", 1, 2])
def test_rows_with_any_number_of_choices_have_a_plan(top_k):
    run = published_run(a_row(experts=8, topk=top_k, ep=8, mbs=1))
    assert not run.skipped
    assert run.candidates[0].job.model.moe.top_k == (top_k or 2)


def test_zero_3_gathers_tensor_by_tensor_and_fsdp_block_by_block():
    assert software_of(a_row(note="DeepSpeed ZeRO-3")).gathers_tensors
    assert not software_of(a_row(note="FSDP")).gathers_tensors
    assert not software_of(a_row(note="ZeRO-3", facts="gathers: blocks")).gathers_tensors


def test_facts_are_read_and_count_more_than_words():
    row = a_row(facts="attention: unfused, kernels: fused, update: rolled_back", note="FSDP")
    software = software_of(row)
    assert not software.has_fused_attention and software.fuses_kernels
    assert not software.waits_for_update


@pytest.mark.parametrize("cell", ["many", "nan", "inf"])
def test_a_cell_that_is_no_number_is_refused(cell):
    with pytest.raises(ConfigError, match=r"n_gpus=.*must be a number"):
        published_run(a_row(n_gpus=cell))


@pytest.mark.parametrize("text", ["attention: some", "speed: high", "[", "micro_batch: 0"])
def test_a_fact_that_does_not_exist_is_refused(text):
    with pytest.raises(ConfigError, match="facts="):
        facts_of(a_row(facts=text))


@pytest.mark.parametrize(
    ("cells", "gated"),
    [
        ({"model": "GPT 7B"}, False),
        ({"model": "some 7B", "ffn": 11008}, True),
        ({"model": "some 7B", "ffn": ""}, False),
        ({"model": "Llama-2 7B", "ffn": ""}, True),
        ({"model": "Nemotron-4 340B", "hidden": 18432, "ffn": 73728}, False),
        # 32 blocks of 4096 with 11008: 6.7 billion with a gate, 5.3 without
        ({"model": "GPT", "ffn": 11008, "params_b": 6.9, "vocab": 32000}, True),
        ({"model": "Llama", "ffn": 16384, "params_b": 6.6, "vocab": 32000}, False),
    ],
)
def test_a_gate_follows_from_the_parameters_the_name_or_the_width(cells, gated):
    assert is_gated(a_row(**cells)) == gated


def test_a_model_that_is_known_by_name_needs_no_sizes():
    empty = dict.fromkeys(("layers", "hidden", "heads", "ffn", "vocab"), "")
    cells = {"gpu": "H100", "n_gpus": 64, "ep": 8, "dp": 64, "gbs": 64, "mbs": 1}
    run = published_run(a_row(model="GPT OSS 120B", **empty, **cells))
    assert not run.skipped
    model = run.candidates[0].job.model
    assert (model.num_layers, model.moe.num_experts, model.head_width) == (36, 128, 64)


def test_experts_of_a_known_model_have_its_widths_and_its_latent_attention():
    run = published_run(
        a_row(
            model="DeepSeekV3 (w/ MTP)",
            layers=61,
            hidden=7168,
            heads=128,
            ffn=2048,
            vocab=129280,
            experts=256,
            topk=8,
            gpu="H800",
            n_gpus=256,
            pp=16,
            ep=8,
            gbs=512,
            mbs=1,
            precision="FP8",
        )
    )
    assert not run.skipped
    model = run.candidates[0].job.model
    assert model.mla.kv_lora_rank == 512 and model.num_nextn_predict_layers == 1
    assert model.moe.first_k_dense_replace == 3 and model.ffn_hidden_size == 18432
    assert model.expert_width == 2048 and model.moe.shared_expert_intermediate_size == 2048
    assert known_model("Mixtral-8x22B-G8T8 [MCore]").sizes == {}


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"gbs": ""}, "does not state gbs"),
        ({"gpu": "TPUv4"}, "not in the catalogue"),
        ({"mbs": 64}, "mbs=64 is more than gbs=64 over dp=8"),
        ({"tp": 4, "dp": 8}, "32 ranks on n_gpus=8"),
        ({"tp": 3}, "must divide"),
        ({"pp": 0}, "pp=0: a count is at least 1"),
    ],
)
def test_a_row_is_skipped_only_for_what_is_missing_or_contradicts(cells, reason):
    assert reason in published_run(a_row(**cells)).skipped


@pytest.mark.parametrize(
    "cells",
    [
        {"gbs": 4, "mbs": ""}, {"gbs": 4, "mbs": 1}, {"layers": 41, "pp": 4, "mbs": 1, "gbs": 8},
        {"hidden": 5140, "heads": 40, "ffn": ""}, {"recompute": "block-wise"}, {"recompute": ""},
        {"precision": ""}, {"n_gpus": 60, "tp": 8, "mbs": 1}, {"seq": 2047, "tp": 2},
        {"mbs": "", "recompute": "", "vpp": "", "pp": 2},
    ],
)  # fmt: skip
def test_odd_rows_have_a_plan(cells):
    run = published_run(a_row(**cells))
    assert not run.skipped and run.candidates
