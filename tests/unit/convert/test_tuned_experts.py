"""Adapters of models with routers: what of PEFT's files is refused, and routers' states."""

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file as save_torch_file

from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.lora import LoraSection
from raymega.config.moe import MoeSection
from raymega.convert.huggingface.importer import hf_import
from raymega.convert.tuned.merge import merge
from raymega.convert.tuned.peft_export import peft_export
from raymega.convert.tuned.peft_import import peft_import
from raymega.errors import ConfigError
from tests.unit.convert.folders import NOW, make_model, write_checkpoint, write_folder
from tests.unit.convert.test_tuned import FILE, _spoil

LORA = LoraSection(r=2, lora_alpha=3.0, target_modules=("attention.q",))
MOE = MoeSection(
    num_experts=4, top_k=2, intermediate_size=8, expert_bias=True, expert_bias_update_rate=0.0,
    router_score_function="sigmoid",
)  # fmt: skip


def _moe_base(tmp_path, plain):
    write_folder(tmp_path / "theirs", make_model("glm4_moe", **plain))
    hf_import(
        tmp_path / "theirs", str(tmp_path / "base"), created=NOW, make_vocab_size_divisible_by=8
    )
    return str(tmp_path / "base")


@pytest.mark.parametrize("module", ["lm_head", "model.layers.0.mlp.gate"])
def test_adapters_outside_of_linear_layers_are_refused(module, tmp_path):
    # of a head, and of a router: files of PEFT may have both
    plain = {"tie_word_embeddings": False, "moe": MOE}
    model = make_model("glm4_moe", lora=LORA, **plain)
    base = _moe_base(tmp_path, plain)
    write_checkpoint(str(tmp_path / "adapters"), model, base=base)
    peft_export(str(tmp_path / "adapters"), tmp_path / "peft")
    rows = {"lm_head": 50}.get(module, MOE.num_experts)
    factors = {"A": np.ones((2, 16)), "B": np.ones((rows, 2))}
    further = {f"base_model.model.{module}.lora_{n}.weight": each for n, each in factors.items()}
    _spoil(tmp_path / "peft", {}, load_file(tmp_path / "peft" / FILE) | further)
    with pytest.raises(ConfigError, match="inside the language model's blocks"):
        peft_import(tmp_path / "peft", base, str(tmp_path / "again"), created=NOW)


def test_routers_keep_the_biases_of_the_base_beside_narrow_adapters(tmp_path):
    plain = {"tie_word_embeddings": False, "moe": MOE}
    base = _moe_base(tmp_path, plain)
    write_checkpoint(
        str(tmp_path / "adapters"), make_model("glm4_moe", lora=LORA, **plain), base=base
    )
    peft_export(str(tmp_path / "adapters"), tmp_path / "peft")
    file = load_file(tmp_path / "peft" / FILE)
    narrow = {name: torch.from_numpy(values).bfloat16() for name, values in file.items()}
    save_torch_file(narrow, tmp_path / "peft" / FILE)
    done = peft_import(tmp_path / "peft", base, str(tmp_path / "again"), created=NOW)
    merged = merge([done.uri], str(tmp_path / "merged"), created=NOW)
    name = "model/layers.1.moe.router.bias"
    wanted = open_checkpoint(base).read(name)
    np.testing.assert_array_equal(open_checkpoint(merged.uri).read(name), wanted)


def test_adapters_of_a_model_with_counts_of_routers_are_added_up(tmp_path):
    moe = MOE.model_copy(update={"load_balancing_type": "global", "router_aux_loss_coef": 0.1})
    plain = {"tie_word_embeddings": False, "moe": moe}
    base = _moe_base(tmp_path, plain)
    uris = [str(tmp_path / name) for name in ("one", "other")]
    for seed, uri in enumerate(uris):
        write_checkpoint(uri, make_model("glm4_moe", lora=LORA, **plain), base=base, seed=seed)
    assert merge(uris, str(tmp_path / "sum"), created=NOW).num_adapters == 2
