"""Quantised weight files: MXFP4 and float8 in blocks, against transformers' own arithmetic."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.convert.huggingface.exporter import hf_export
from raymega.convert.huggingface.importer import hf_import
from raymega.convert.quantized_weights import fp8_values, mxfp4_values
from raymega.errors import ConfigError
from tests.unit.convert.folders import NOW, make_model, write_folder

MLA = {
    "kv_lora_rank": 8, "q_lora_rank": 0, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4,
}  # fmt: skip
EXPERTS = {"num_experts": 2, "top_k": 1, "norm_topk_prob": False}
BLOCK = 16, 8
GPT_OSS = {
    "hidden_size": 32, "ffn_hidden_size": 64, "moe": {**EXPERTS, "norm_topk_prob": True, "top_k": 2},
    "attention": {"sinks": True}, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK = {
    "num_kv_heads": "num_heads", "mla": MLA, "norm_eps": 1e-6,
    "moe": {
        **EXPERTS, "expert_bias": True, "router_score_function": "sigmoid", "first_k_dense_replace": 1,
        "shared_expert_intermediate_size": 24, "routed_scaling_factor": 2.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_is_multiplied_out_as_transformers_does(dtype):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(2, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8)[None, :, None].expand(2, 255, 16)
    wanted = convert_moe_packed_tensors(codes, scales, dtype=dtype)
    found = torch.from_numpy(mxfp4_values(codes.numpy(), scales.numpy()).copy())
    # torch's bfloat16 has no values below its normal range where ldexp multiplies by 2^-127
    is_normal = found.abs() >= 2.0**-120
    assert torch.equal(found.to(dtype)[is_normal], wanted[is_normal])
    assert found.unique().numel() > 255


def test_float8_blocks_are_multiplied_out_as_transformers_does():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes = torch.arange(256, dtype=torch.uint8).repeat(4, 1)
    weight, scales = codes.view(torch.float8_e4m3fn), torch.rand(2, 32)
    wanted = Fp8Dequantize(None)._dequantize_one(weight, scales, torch.float32)
    found = torch.from_numpy(fp8_values(codes.numpy(), scales.numpy(), (2, 8)))
    assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))


def test_last_blocks_may_be_cut():
    codes = torch.randn(5, 11).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3)
    found = fp8_values(codes.view(torch.uint8).numpy(), scales.numpy(), (4, 4))
    each = scales.repeat_interleave(4, 0)[:5].repeat_interleave(4, 1)[:, :11]
    np.testing.assert_array_equal(found, (codes.float() * each).numpy())


def _mxfp4_folder(path):
    """The folder with experts in MXFP4, and their values as transformers reads them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = write_folder(path, make_model("gpt_oss", **GPT_OSS), dtype="bfloat16")
    tensors, plain, numbers = load_file(folder / "model.safetensors"), {}, torch.Generator()
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, out = tensors.pop(name).shape
        codes = torch.randint(0, 256, (experts, out, inner // 32, 16), generator=numbers).to(
            torch.uint8
        )
        scales = torch.randint(118, 124, codes.shape[:-1], generator=numbers).to(torch.uint8)
        plain[name] = convert_moe_packed_tensors(codes, scales)
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    return _write(folder, tensors, {"quant_method": "mxfp4"}), plain


def _fp8_folder(path):
    """The folder with linear layers in float8, and their values in float32 as transformers reads them."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    folder = write_folder(path, make_model(**DEEPSEEK), dtype="bfloat16")
    tensors, plain = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        coded = tensors[name].to(torch.float8_e4m3fn)
        grid = [-(-size // block) for size, block in zip(coded.shape, BLOCK, strict=True)]
        scales = torch.rand(grid) + 0.5
        whole = torch.nn.functional.pad(
            coded.float(),
            (0, grid[1] * BLOCK[1] - coded.shape[1], 0, grid[0] * BLOCK[0] - coded.shape[0]),
        )
        values = Fp8Dequantize(None)._dequantize_one(whole, scales, torch.float32)
        plain[name] = values[: coded.shape[0], : coded.shape[1]]
        tensors |= {name: coded, f"{name}_scale_inv": scales}
    return _write(folder, tensors, {"quant_method": "fp8", "weight_block_size": BLOCK}), plain


def _write(folder, tensors, settings):
    save_file(
        {name: values.contiguous() for name, values in tensors.items()},
        folder / "model.safetensors",
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder


FOLDERS = {"mxfp4": _mxfp4_folder, "fp8": _fp8_folder}


@pytest.mark.parametrize("dtype", ["saved", "float32"])
@pytest.mark.parametrize("kind", FOLDERS)
def test_quantised_folder_is_read_into_the_chosen_format(tmp_path, kind, dtype):
    folder, plain = FOLDERS[kind](tmp_path / kind)
    done = hf_import(folder, str(tmp_path / "ours"), created=NOW, dtype=dtype)
    assert done.dtype == ("bfloat16" if dtype == "saved" else dtype)
    hf_export(done.uri, tmp_path / "back")
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    back = load_file(tmp_path / "back" / "model.safetensors")
    for name, values in plain.items():
        assert torch.equal(back[name], values.to(getattr(torch, done.dtype))), name
    assert open_checkpoint(done.uri)[1].job["precision"] == {"dtype": done.dtype}


@pytest.mark.parametrize("kind", FOLDERS)
def test_codes_need_scales_of_their_shape(tmp_path, kind):
    folder, _ = FOLDERS[kind](tmp_path / kind)
    tensors = load_file(folder / "model.safetensors")
    end = "_scales" if kind == "mxfp4" else "_scale_inv"
    name = next(name for name in tensors if name.endswith(end))
    scales = tensors.pop(name)
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    _write(folder, tensors, settings)
    with pytest.raises(ConfigError, match="codes need scales beside them"):
        hf_import(folder, str(tmp_path / "ours"), created=NOW)
    _write(folder, tensors | {name: torch.cat((scales, scales))}, settings)
    with pytest.raises(ConfigError, match="by quantization_config they are"):
        hf_import(folder, str(tmp_path / "ours"), created=NOW)


def test_other_formats_are_refused(tmp_path):
    folder, _ = _mxfp4_folder(tmp_path / "theirs")
    with pytest.raises(ConfigError, match="--dtype 'float16'; it is one of saved, float64"):
        hf_import(folder, str(tmp_path / "ours"), created=NOW, dtype="float16")
    _write(folder, load_file(folder / "model.safetensors"), {"quant_method": "awq"})
    with pytest.raises(ConfigError, match="weights may be in mxfp4, or in fp8 with"):
        hf_import(folder, str(tmp_path / "ours"), created=NOW)
