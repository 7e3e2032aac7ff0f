"""Merges of adapters and of checkpoints, and PEFT's files, without PEFT: arithmetic, names, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch_file

from raymega.checkpoint.format.manifest import commit
from raymega.checkpoint.load.init_from import resume_faults, start_faults
from raymega.checkpoint.load.pinned_source import BASE, pin_faults, pinned
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.lora import LoraSection
from raymega.config.schema import CheckpointSection
from raymega.convert.huggingface.importer import hf_import
from raymega.convert.native import model_of, tuned_model_of
from raymega.convert.tuned.merge import merge
from raymega.convert.tuned.peft_export import _config as peft_export_config
from raymega.convert.tuned.peft_export import peft_export
from raymega.convert.tuned.peft_import import peft_import
from raymega.errors import CheckpointError, ConfigError
from raymega.storage.registry import open_store
from tests.unit.convert.folders import NOW, make_model, write_checkpoint, write_folder

LORA = LoraSection(r=2, lora_alpha=3.0, target_modules=("attention.q", "layers.1.mlp.down"))
MODEL = make_model(lora=LORA)
NAME = "model/layers.1.mlp.down"
FILE = "adapter_model.safetensors"


DORA = make_model(lora=LORA.model_copy(update={"use_dora": True}))
OTHER = make_model(lora=LoraSection(r=3, lora_alpha=6.0, target_modules=("mlp.down",)))


@pytest.fixture
def places(tmp_path):
    """URIs of a base and of adapters for it."""
    write_folder(tmp_path / "theirs", make_model(), dtype="float64")
    base, adapters = str(tmp_path / "base"), str(tmp_path / "adapters")
    hf_import(tmp_path / "theirs", base, created=NOW, make_vocab_size_divisible_by=8)
    write_checkpoint(adapters, MODEL, base=base)
    return base, adapters


def test_a_merge_adds_the_scaled_product_to_the_base(places, tmp_path):
    base, adapters = places
    done = merge([adapters], str(tmp_path / "merged"), created=NOW)
    assert (done.num_adapters, done.dtype) == (3, "float64")
    before, factors, after = (open_checkpoint(uri) for uri in (base, adapters, done.uri))
    assert model_of(after.manifest) == model_of(before.manifest)
    a, b = (factors.read(f"{NAME}.lora_{x}.weight") for x in "ab")
    wanted = before.read(f"{NAME}.weight") + 1.5 * b @ a
    np.testing.assert_allclose(after.read(f"{NAME}.weight"), wanted, rtol=0, atol=1e-14)
    for name in ("model/layers.0.mlp.down.weight", "model/embedding.tokens.weight"):
        np.testing.assert_array_equal(after.read(name), before.read(name))
    narrow = merge([adapters], str(tmp_path / "narrow"), created=NOW, dtype="float32")
    assert open_checkpoint(narrow.uri).dtype(f"{NAME}.weight") == "float32"


def test_a_merge_of_dora_gives_rows_their_magnitudes(places, tmp_path):
    base, _ = places
    write_checkpoint(str(tmp_path / "dora"), DORA, base=base)
    done = merge([str(tmp_path / "dora")], str(tmp_path / "merged"), created=NOW)
    assert done.num_adapters == 3
    before, adapter, after = (
        open_checkpoint(uri) for uri in (base, str(tmp_path / "dora"), done.uri)
    )
    a, b, magnitudes = (adapter.read(f"{NAME}.lora_{x}.weight") for x in ("a", "b", "magnitude"))
    changed = before.read(f"{NAME}.weight") + 1.5 * b @ a
    wanted = changed * (magnitudes / np.sqrt((changed**2).sum(1)))[:, None]
    np.testing.assert_allclose(after.read(f"{NAME}.weight"), wanted, rtol=0, atol=1e-13)
    # to PEFT's format and back, bit for bit
    exported = peft_export(str(tmp_path / "dora"), tmp_path / "peft")
    assert exported.num_parameters == 2 * (16 + 16) * 2 + 2 * (24 + 16) + 2 * 16 + 16
    file = load_file(tmp_path / "peft" / FILE)
    at = "base_model.model.model.layers.1.mlp.down_proj.lora_magnitude_vector"
    np.testing.assert_array_equal(file[at], magnitudes)
    again = peft_import(tmp_path / "peft", base, str(tmp_path / "again"), created=NOW)
    assert again.model.lora == DORA.lora
    for name in adapter.names:
        np.testing.assert_array_equal(open_checkpoint(again.uri).read(name), adapter.read(name))
    # further checkpoints of the base's run change nothing
    told = open_checkpoint(again.uri).manifest.job["checkpoint"]
    assert told == {"init_from": f"{base}/{open_checkpoint(base).manifest.key}"}


@pytest.fixture
def two(places, tmp_path):
    """URIs of two adapters for one base: of other ranks, on other layers."""
    write_checkpoint(str(tmp_path / "other"), OTHER, base=places[0], seed=5)
    return [places[1], str(tmp_path / "other")]


def test_adapters_of_one_base_are_added_up_with_weights(two, places, tmp_path):
    done = merge(two, str(tmp_path / "sum"), created=NOW, weights=[0.5, -2.0])
    assert done.num_adapters == 4
    wanted = open_checkpoint(places[0]).read(f"{NAME}.weight")
    for uri, weight, scale in zip(two, (0.5, -2.0), (1.5, 2.0), strict=True):
        a, b = (open_checkpoint(uri).read(f"{NAME}.lora_{x}.weight") for x in "ab")
        wanted = wanted + weight * scale * b @ a
    found = open_checkpoint(done.uri).read(f"{NAME}.weight")
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-13)


def test_a_combined_adapter_adds_what_all_add(two, tmp_path):
    apart = merge(two, str(tmp_path / "sum"), created=NOW, weights=[0.5, -2.0]).uri
    done = merge(
        two, str(tmp_path / "cat"), created=NOW, weights=[0.5, -2.0], combination_type="cat"
    )
    lora = tuned_model_of(open_checkpoint(done.uri).manifest).lora
    assert (lora.r, lora.scale) == (5, 1.0)
    assert set(lora.target_modules) == {"attention.q", "layers.1.mlp.down", "mlp.down"}
    joined = merge([done.uri], str(tmp_path / "joined"), created=NOW).uri
    for name in open_checkpoint(apart).names:
        one, other = (open_checkpoint(uri).read(name) for uri in (apart, joined))
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-13)


def test_a_mean_has_the_weights_that_are_given(places, tmp_path):
    base, adapters = places
    merged = merge([adapters], str(tmp_path / "merged"), created=NOW).uri
    mean = merge([base, merged], str(tmp_path / "mean"), created=NOW, weights=[3.0, 1.0]).uri
    one, other, found = (
        open_checkpoint(uri).read(f"{NAME}.weight") for uri in (base, merged, mean)
    )
    np.testing.assert_allclose(found, 0.75 * one + 0.25 * other, rtol=0, atol=1e-14)


def test_a_file_of_peft_has_its_names_and_comes_back(places, tmp_path):
    base, adapters = places
    done = peft_export(adapters, tmp_path / "peft", base="theirs")
    assert (done.num_adapters, done.num_parameters) == (3, 2 * (16 + 16) * 2 + 2 * (24 + 16))
    file = load_file(tmp_path / "peft" / FILE)
    at = "base_model.model.model.layers.1.mlp.down_proj"
    factors = open_checkpoint(adapters)
    for theirs, ours in (("A", "a"), ("B", "b")):
        values = factors.read(f"{NAME}.lora_{ours}.weight")
        np.testing.assert_array_equal(file[f"{at}.lora_{theirs}.weight"], values)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "model.layers.1.mlp.down_proj"]
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (2, 3, False)
    again = peft_import(tmp_path / "peft", base, str(tmp_path / "again"), created=NOW)
    assert again.model.lora == LORA
    for name in factors.names:
        np.testing.assert_array_equal(open_checkpoint(again.uri).read(name), factors.read(name))


@pytest.mark.parametrize(
    ("family", "fields", "task"),
    [
        ("llama", {}, "CAUSAL_LM"),
        ("t5_v1_1", {"num_kv_heads": "num_heads"}, "SEQ_2_SEQ_LM"),
        ("bert", {"num_kv_heads": "num_heads"}, None),
        ("qwen3", {"head": {"kind": "embedding"}}, None),
    ],
)
def test_a_file_of_peft_says_what_its_model_is_for(family, fields, task):
    assert peft_export_config(make_model(family, **fields), [], "")["task_type"] == task


@pytest.mark.parametrize(
    ("uris", "options", "words"),
    [
        (["adapters", "base"], {}, "a mean of factors"),
        (["base"], {}, "at least two checkpoints"),
        (["base", "base"], {"base": "base"}, "leave --base out"),
        (["base", "base"], {"weights": [1.0]}, "give --weight once"),
        (["base", "wider"], {}, "another model section"),
        (["alone"], {}, "name these weights"),
        (["adapters"], {"base": "wider"}, "the base has every weight"),
        (["adapters"], {"base": "nowhere"}, "--base"),
        (["adapters"], {"dtype": "fp8"}, "--dtype"),
        (["adapters"], {"weights": [0.0]}, "some are not 0"),
        (["adapters", "other"], {"combination_type": "linear"}, "--combination-type cat"),
        (["base", "base"], {"combination_type": "cat"}, "leave --combination-type out"),
        (["adapters", "dora"], {}, "merge it alone"),
        (["dora"], {"combination_type": "cat"}, "has no magnitudes"),
        (["adapters", "alone"], {}, "change the same weights"),
        (["adapters", "headed"], {}, "which is no adapter"),
        (["headed"], {"combination_type": "cat"}, "has factors alone"),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused(uris, options, words, places, tmp_path):
    wider = make_model(ffn_hidden_size=32)
    write_folder(tmp_path / "wide", wider)
    hf_import(tmp_path / "wide", str(tmp_path / "wider"), created=NOW)
    write_checkpoint(str(tmp_path / "alone"), MODEL)
    write_checkpoint(str(tmp_path / "other"), OTHER, base=places[0])
    write_checkpoint(str(tmp_path / "dora"), DORA, base=places[0])
    write_checkpoint(
        str(tmp_path / "headed"), make_model(lora=LORA, train=("*norm*",)), base=places[0]
    )
    if "base" in options:
        options = {"base": str(tmp_path / options["base"])}
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=words):
        merge([str(tmp_path / uri) for uri in uris], str(out), created=NOW, **options)
    assert not list(out.glob("**/manifest*"))


def test_adapters_alone_are_no_model_and_a_run_takes_those_of_its_section_only(places):
    base, adapters = places
    with pytest.raises(CheckpointError, match="checkpoint merge"):
        model_of(open_checkpoint(adapters).manifest)
    section = CheckpointSection(init_from=base, init_adapter=adapters)
    assert start_faults(section, MODEL) == []
    wider = MODEL.model_copy(update={"lora": LORA.model_copy(update={"r": 4})})
    (fault,) = start_faults(section, wider)
    assert "set model.lora as the adapters were trained with" in fault.remedy
    louder = MODEL.model_copy(update={"lora": LORA.model_copy(update={"lora_alpha": 4.0})})
    (fault,) = start_faults(section, louder)
    assert fault.remedy == "set model.lora.lora_alpha=3.0"
    sizes = {"micro_batch_size": 2}
    assert list(resume_faults(open_store(adapters), MODEL, **sizes)) == []
    assert list(resume_faults(open_store(adapters), louder, **sizes)) == [fault]
    coded = MODEL.model_copy(update={"lora": LORA.model_copy(update={"base_dtype": "nf4"})})
    assert start_faults(section, coded) == []
    (fault,) = resume_faults(open_store(adapters), coded, **sizes)
    assert fault.remedy == "set model.lora.base_dtype=compute"
    (fault,) = start_faults(section.model_copy(update={"init_adapter": "nowhere"}), MODEL)
    assert "checkpoint.init_adapter='nowhere'" in fault.fact


def test_a_run_with_adapters_keeps_the_base_that_it_began_with(places, tmp_path):
    base, adapters = places
    began = pinned(base, open_store(adapters), field=BASE)
    assert began == f"{base}/{open_checkpoint(base).manifest.key}"
    write_checkpoint(str(tmp_path / "run"), MODEL, base=began)
    own = open_store(str(tmp_path / "run"))
    # the base is trained further: its newest checkpoint is another one
    manifest = open_checkpoint(base).manifest
    (tmp_path / "base" / manifest.key).rename(tmp_path / "newer.json")
    newer = replace(manifest, step=7, boxes=())
    commit(open_store(base), newer)
    assert pinned(base, own, field=BASE) == began
    assert pinned(base, open_store(adapters), field=BASE) == f"{base}/{newer.key}"
    # what is named exactly is taken, and refused where it is another one
    assert list(pin_faults(began, own, field=BASE)) == []
    assert list(pin_faults(f"s3://copy/{manifest.key}", own, field=BASE)) == []
    for other in (f"{base}/{newer.key}", "none"):
        (fault,) = pin_faults(other, own, field=BASE)
        assert fault.remedy.startswith(f"set checkpoint.init_from={began}")
    write_checkpoint(str(tmp_path / "random"), MODEL)
    (fault,) = pin_faults(began, open_store(str(tmp_path / "random")), field=BASE)
    assert "begun with none" in fault.fact
    assert pinned("nowhere", open_store(str(tmp_path / "random")), field=BASE) == "nowhere"


def _spoil(folder, config, tensors):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if tensors is not None:
        save_file(tensors, folder / FILE)


@pytest.mark.parametrize(
    ("config", "tensors", "words"),
    [
        ({"peft_type": "IA3"}, None, "adapters of type LORA"),
        ({"use_rslora": True, "rank_pattern": {"q": 1}}, None, "rank_pattern="),
        ({"use_dora": True}, None, "by adapter_config.json"),
        ({"r": "many"}, None, "numbers above 0"),
        ({}, {}, "at least one layer"),
        ({}, {"base_model.model.x.lora_A.weight": np.zeros((2, 2))}, "no such layer"),
        ({"r": 4}, None, "by adapter_config.json"),
    ],
)
def test_folders_of_peft_with_something_else_are_refused(config, tensors, words, places, tmp_path):
    base, adapters = places
    peft_export(adapters, tmp_path / "peft")
    _spoil(tmp_path / "peft", config, tensors)
    with pytest.raises(ConfigError, match=words):
        peft_import(tmp_path / "peft", base, str(tmp_path / "again"), created=NOW)


@pytest.mark.parametrize(
    ("factors", "magnitudes"), [("float16", "float16"), ("bfloat16", "float32")]
)
def test_formats_of_an_adapter_are_imported_without_rounding(factors, magnitudes, places, tmp_path):
    write_checkpoint(str(tmp_path / "dora"), DORA, base=places[0])
    peft_export(str(tmp_path / "dora"), tmp_path / "peft")
    wanted = {
        name: torch.from_numpy(values).to(
            getattr(torch, magnitudes if "magnitude" in name else factors)
        )
        for name, values in load_file(tmp_path / "peft" / FILE).items()
    }
    save_torch_file(wanted, tmp_path / "peft" / FILE)
    done = peft_import(tmp_path / "peft", places[0], str(tmp_path / "again"), created=NOW)
    assert done.dtype == "float32"
    peft_export(done.uri, tmp_path / "back")
    found = load_file(tmp_path / "back" / FILE)
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values.float().numpy())


CONVERSION = "path_initial_model_for_weight_conversion"


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        ({"init_lora_weights": "pissa"}, CONVERSION),
        ({"init_lora_weights": "pissa_niter_16"}, CONVERSION),
        ({"init_lora_weights": "OLoRA"}, CONVERSION),
        ({"init_lora_weights": "corda"}, CONVERSION),
        ({"init_lora_weights": "lora_ga"}, CONVERSION),
        ({"init_lora_weights": "loftq"}, "merge the adapter with PEFT"),
        ({"init_lora_weights": "unheard"}, "merge the adapter with PEFT"),
        ({"init_lora_weights": ["pissa"]}, "merge the adapter with PEFT"),
        ({"kasa_config": {"beta": 1e-4}}, "merge the adapter with PEFT"),
        ({"alora_invocation_tokens": [5, 6]}, "train an adapter without alora_invocation_tokens"),
        ({"arrow_config": {"top_k": 3}}, "train an adapter without arrow_config"),
    ],
)
def test_adapters_of_a_changed_base_or_of_some_tokens_are_refused(config, remedy, places, tmp_path):
    base, adapters = places
    peft_export(adapters, tmp_path / "peft")
    _spoil(tmp_path / "peft", config, None)
    (field, value) = next(iter(config.items()))
    with pytest.raises(ConfigError) as refused:
        peft_import(tmp_path / "peft", base, str(tmp_path / "again"), created=NOW)
    (fault,) = refused.value.faults
    assert f"{field}={value}" in fault.fact and remedy in fault.remedy
    assert not list((tmp_path / "again").glob("**/manifest*"))


@pytest.mark.parametrize("init", [False, None, "gaussian", "Gaussian", "eva", "orthogonal", "mica"])
def test_adapters_whose_factors_alone_were_drawn_are_imported(init, places, tmp_path):
    base, adapters = places
    peft_export(adapters, tmp_path / "peft")
    _spoil(tmp_path / "peft", {"init_lora_weights": init}, None)
    again = peft_import(tmp_path / "peft", base, str(tmp_path / "again"), created=NOW)
    assert again.model.lora == LORA


def test_folders_without_a_file_are_refused(places, tmp_path):
    base, adapters = places
    peft_export(adapters, tmp_path / "peft")
    (tmp_path / "peft" / FILE).unlink()
    with pytest.raises(ConfigError, match="has no adapter_model"):
        peft_import(tmp_path / "peft", base, str(tmp_path / "again"), created=NOW)
    with pytest.raises(ConfigError, match="save_pretrained"):
        peft_import(tmp_path, base, str(tmp_path / "again"), created=NOW)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (make_model(), "has no adapters"),
        (make_model(lora=LORA, train=("final_norm.*",)), "is no adapter"),
        (
            make_model("gpt2", lora=LoraSection(r=2, target_modules=("attention.q",))),
            "parts of a layer",
        ),
    ],
)
def test_adapters_that_peft_cannot_have_are_not_exported(model, words, tmp_path):
    write_checkpoint(str(tmp_path / "ours"), model)
    with pytest.raises(ConfigError, match=words):
        peft_export(str(tmp_path / "ours"), tmp_path / "peft")
    assert not (tmp_path / "peft").exists()
