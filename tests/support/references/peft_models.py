"""Small random models of transformers with adapters of PEFT, and both imported."""

import torch

from raymega.convert.huggingface.importer import hf_import
from raymega.convert.tuned.peft_import import peft_import
from tests.support.references import hf_models
from tests.unit.convert.folders import NOW

# Adapted layers there, and whether their scale is that of rsLoRA.
TARGETS = {
    "llama3": (["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"], True),
    "qwen3": (["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], False),
    "qwen2_moe": (["q_proj", "k_proj", "v_proj", "o_proj"], False),
    "deepseek_v3": (
        ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
        False,
    ),
}


def adapted(kind, tmp_path, *, positions=0, use_dora=False):
    """A model of transformers with random adapters of PEFT, its base and its adapters imported."""
    from peft import LoraConfig, get_peft_model

    theirs = hf_models.make_model(kind, positions=positions)
    theirs.save_pretrained(tmp_path / "theirs")
    base = hf_import(
        tmp_path / "theirs", str(tmp_path / "base"), created=NOW, make_vocab_size_divisible_by=8
    )
    targets, is_rs = TARGETS[kind]
    config = LoraConfig(
        r=4, lora_alpha=6, use_rslora=is_rs, target_modules=targets, task_type="CAUSAL_LM",
        use_dora=use_dora,
    )  # fmt: skip
    model = get_peft_model(theirs, config, autocast_adapter_dtype=False).to(torch.float64).eval()
    generator = torch.Generator().manual_seed(3)
    for name, param in model.named_parameters():
        if "lora_magnitude" in name:
            param.data *= 1 + 0.2 * torch.randn(
                param.shape, generator=generator, dtype=torch.float64
            )
        elif "lora_" in name:
            param.data = 0.2 * torch.randn(param.shape, generator=generator, dtype=torch.float64)
    model.save_pretrained(tmp_path / "peft")
    done = peft_import(tmp_path / "peft", base.uri, str(tmp_path / "adapters"), created=NOW)
    return model, done
