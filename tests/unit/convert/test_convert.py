"""Import and export: every byte there and back, shards, refusals, and nothing half-written."""

import json
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from raymega.box import Box
from raymega.checkpoint.format import data_file, manifest
from raymega.checkpoint.format.data_file import MAX_BOX_BYTES
from raymega.checkpoint.format.manifest import commit
from raymega.checkpoint.tools.inspection import open_checkpoint, verify_checkpoints
from raymega.cli.convert import convert_app
from raymega.config.load import parse_mapping
from raymega.config.schema import MlaSection, MoeSection
from raymega.convert import native
from raymega.convert.huggingface.exporter import hf_export
from raymega.convert.huggingface.extra_files import bring_along, files_to_carry
from raymega.convert.huggingface.importer import hf_import, model_yaml
from raymega.convert.huggingface.names import hf_tensors
from raymega.convert.safetensors_files import open_weights
from raymega.data.format import TOKENIZER_FILE
from raymega.errors import CheckpointError, ConfigError, StorageError
from raymega.plan.grid import Grid
from raymega.storage.local import LocalStore
from tests.unit.checkpoint.support import assemble_shards, block_values, save_shards
from tests.unit.checkpoint.support import make_model as make_native_model
from tests.unit.convert.folders import NOW, draw_values, make_model, write_folder

FAMILIES = ["gpt2", "llama", "qwen2", "qwen3"]


def _import(folder, out, **options):
    return hf_import(folder, str(out), created=NOW, make_vocab_size_divisible_by=8, **options)


def _read(folder):
    return {name: entry.read() for name, entry in open_weights(folder).items()}


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_byte_comes_back(tmp_path, monkeypatch, family, is_tied):
    monkeypatch.setattr(native, "FILE_BYTES", 4000)
    monkeypatch.setattr(data_file, "MAX_BOX_BYTES", 1000)
    model = make_model(family, tie_word_embeddings=is_tied)
    folder = write_folder(tmp_path / "theirs", model, max_file_bytes=3000)
    assert (folder / "model.safetensors.index.json").exists()
    done = _import(folder, tmp_path / "ours")
    assert done.model == model and done.carried == ("config.json", "tokenizer.json")
    (summary,) = verify_checkpoints(str(tmp_path / "ours"))
    assert not summary.faults and summary.num_files > 2
    back = hf_export(done.uri, tmp_path / "back", max_file_bytes=3000)
    assert back.num_parameters == done.num_parameters
    wanted, found = _read(folder), _read(tmp_path / "back")
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    assert "tokenizer.json" in back.files and "notes.txt" not in back.files
    assert json.loads((tmp_path / "back/config.json").read_text())["bos_token_id"] == 7


def test_yaml_of_the_model_is_a_job_files_section():
    model = make_model("qwen3", norm_eps=1e-6)
    raw = yaml.safe_load(model_yaml(model))
    values = parse_mapping(raw).values
    assert all(values[f"model.{name}"] == value for name, value in model)


@pytest.mark.parametrize(("stored", "ours"), [("bfloat16", "bfloat16"), ("float16", "float32")])
def test_narrow_formats_are_kept_or_widened(tmp_path, stored, ours):
    model = make_model()
    folder = write_folder(tmp_path / "theirs", model, dtype=stored)
    done = _import(folder, tmp_path / "ours")
    assert done.dtype == ours
    hf_export(done.uri, tmp_path / "back", dtype=stored)
    for name, values in _read(folder).items():
        np.testing.assert_array_equal(_read(tmp_path / "back")[name], values)


def test_old_names_buffers_and_a_doubled_head_are_understood(tmp_path):
    model = make_model("gpt2")
    values = draw_values(model)
    old = {name.removeprefix("transformer."): array for name, array in values.items()}
    old["h.0.attn.bias"] = np.ones((1, 1, 12, 12), "f4")
    old["lm_head.weight"] = old["wte.weight"]
    folder = write_folder(tmp_path / "theirs", model, values=old)
    hf_export(_import(folder, tmp_path / "ours").uri, tmp_path / "back")
    assert _read(tmp_path / "back").keys() == values.keys()


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("embeddings.position_ids", "I64"),
        ("transformer.h.0.attn.bias", "BOOL"),
        ("gpt_neox.layers.0.attention.bias", "U8"),
    ],
)
def test_buffers_that_are_left_out_may_have_any_format(tmp_path, name, code):
    model = make_model("gpt2")
    folder = write_folder(tmp_path / "theirs", model)
    file = folder / "model.safetensors"
    _add_tensor(file, name, code)
    hf_export(_import(folder, tmp_path / "ours").uri, tmp_path / "back")
    assert _read(tmp_path / "back").keys() == draw_values(model).keys()
    _add_tensor(file, "transformer.extra", code)
    with pytest.raises(ConfigError, match=f"a tensor of format {code}|transformer.extra"):
        _import(folder, tmp_path / "again")


def _add_tensor(file, name, code):
    """Append a tensor of 8 bytes in the format ``code``."""
    content = file.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:size])
    at = len(content) - size
    count = {"I64": 1, "BOOL": 8, "U8": 8}[code]
    header[name] = {"dtype": code, "shape": [count], "data_offsets": [at, at + 8]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[size:] + bytes(8))


DEEPSEEK = {
    "num_kv_heads": "num_heads", "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "norm_eps": 1e-6,
    "mla": MlaSection(kv_lora_rank=8, q_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3),
    "moe": MoeSection(
        num_experts=4, intermediate_size=12, first_k_dense_replace=1, shared_expert_intermediate_size=12, router_score_function="sigmoid", expert_bias=True,
        n_group=2, topk_group=1, group_score="top2",
    ),
}  # fmt: skip


def test_blocks_that_predict_further_ahead_come_and_go(tmp_path):
    """They follow the last block over there, with a table and a head of their own that are copies."""
    model = make_model(**DEEPSEEK)
    values = draw_values(model)
    assert "model.layers.2.mlp.experts.3.up_proj.weight" in values
    assert values["model.layers.2.eh_proj.weight"].shape == (16, 32)
    copies = {
        "model.layers.2.embed_tokens.weight": values["model.embed_tokens.weight"],
        "model.layers.2.shared_head.head.weight": values["lm_head.weight"],
    }
    folder = write_folder(tmp_path / "theirs", model, values=values | copies)
    done = _import(folder, tmp_path / "ours")
    assert done.model == model
    hf_export(done.uri, tmp_path / "back")
    found = _read(tmp_path / "back")
    assert found.keys() == values.keys()
    for name, array in values.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    copies["model.layers.2.embed_tokens.weight"] = values["model.embed_tokens.weight"] + 1
    other = write_folder(tmp_path / "other", model, values=values | copies)
    with pytest.raises(ConfigError, match=r"layers.2.embed_tokens.weight differs from model.embed"):
        _import(other, tmp_path / "ours2")


def _drop(values):
    del values["model.norm.weight"], values["model.layers.1.mlp.up_proj.weight"]


def _add(values):
    values["model.layers.2.mlp.up_proj.weight"] = np.zeros(3, "f4")


def _reshape(values):
    values["model.norm.weight"] = np.zeros(15, "f4")


def _untie(values):
    values["lm_head.weight"] = values["model.embed_tokens.weight"] + 1


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (_drop, ["the weights lack model.layers.1.mlp.up_proj.weight, model.norm.weight;"]),
        (_add, ["have, beside the model's, model.layers.2.mlp.up_proj.weight;"]),
        (_reshape, ["model.norm.weight is (15,) in model.safetensors; by config.json it is (16,)"]),
        (_untie, ["lm_head.weight differs from the token table"]),
    ],
    ids=["missing", "unexpected", "shape", "untied"],
)
def test_weights_of_another_network_are_refused(tmp_path, change, facts):
    values = draw_values(make_model())
    change(values)
    folder = write_folder(tmp_path / "theirs", make_model(), values=values)
    with pytest.raises(ConfigError) as caught:
        _import(folder, tmp_path / "ours")
    assert all(fact in str(caught.value) for fact in facts)
    assert not (tmp_path / "ours").exists()


def test_pickles_torn_files_and_missing_ones_are_refused(tmp_path):
    folder = write_folder(tmp_path / "theirs", make_model())
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for content, fact in (
        (whole[:-8], "is not a whole safetensors"),
        (b"\xff" * 64, "a header of"),
    ):
        weights.write_bytes(content)
        with pytest.raises(ConfigError, match=fact):
            _import(folder, tmp_path / "ours")
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"holds pytorch_model.bin.*save_pretrained"):
        _import(folder, tmp_path / "ours")
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match="holds neither model"):
        _import(folder, tmp_path / "ours")
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config.json' cannot be read"):
        _import(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_folders_in_use_are_not_touched(tmp_path):
    folder = write_folder(tmp_path / "theirs", make_model())
    done = _import(folder, tmp_path / "ours")
    with pytest.raises(ConfigError, match="holds checkpoints/step-00000000"):
        _import(folder, tmp_path / "ours")
    with pytest.raises(ConfigError, match="is not an empty folder"):
        hf_export(done.uri, folder)
    with pytest.raises(ConfigError, match="--dtype 'int8'"):
        hf_export(done.uri, tmp_path / "back", dtype="int8")


def test_failed_import_leaves_nothing(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "theirs", make_model())
    put = LocalStore.put

    def fail_late(store, key, chunks, *, overwrite):
        if "manifest" in key:
            raise StorageError("disk full")
        put(store, key, chunks, overwrite=overwrite)

    monkeypatch.setattr(LocalStore, "put", fail_late)
    with pytest.raises(StorageError):
        _import(folder, tmp_path / "ours")
    assert [path for path in (tmp_path / "ours").rglob("*") if path.is_file()] == []


def test_import_stopped_after_its_commit_leaves_neither_entry_nor_index(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "INLINE_BOXES", 4)

    def commit_and_stop(*of_commit):
        commit(*of_commit)
        raise KeyboardInterrupt

    monkeypatch.setattr(native, "commit", commit_and_stop)
    with pytest.raises(KeyboardInterrupt):
        _import(write_folder(tmp_path / "theirs", make_model()), tmp_path / "ours")
    assert not list(LocalStore(tmp_path / "ours").list("checkpoints/"))


def test_failed_export_leaves_nothing(tmp_path):
    model = make_model()
    values = draw_values(model)
    values["model.norm.weight"][3] = 1e30
    done = _import(write_folder(tmp_path / "theirs", model, values=values), tmp_path / "ours")
    with pytest.raises(CheckpointError, match="not finite in float16"), np.errstate(over="ignore"):
        hf_export(done.uri, tmp_path / "back", dtype="float16")
    store, manifest = open_checkpoint(done.uri)
    data = Path(store.uri) / manifest.file_key(manifest.boxes[0])
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match="their crc32 is"):
        hf_export(done.uri, tmp_path / "back")
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "ours"}


@pytest.mark.parametrize("part", ["", "/checkpoints/step-00000099/manifest-a0000.json"])
def test_files_are_found_where_a_run_started_from(part, tmp_path):
    """A manifest that it names may be deleted by now: that run has been trained further."""
    folder = write_folder(tmp_path / "theirs", make_model())
    done = _import(folder, tmp_path / "ours")
    _, manifest = open_checkpoint(done.uri)
    job = {**manifest.job, "checkpoint": {"init_from": done.uri + part}}
    shutil.copytree(tmp_path / "ours/checkpoints", tmp_path / "run/checkpoints")
    run = LocalStore(tmp_path / "run")
    run.put(manifest.key, [replace(manifest, job=job).to_json().encode()], overwrite=True)
    assert "tokenizer.json" in hf_export(run.uri, tmp_path / "back").files

    # A copy has them although its origin is out of reach from there, and keeps what it has.
    kept = LocalStore(tmp_path / "copy")
    kept.put("hf/generation_config.json", [b"{}"], overwrite=True)
    _, manifest = open_checkpoint(run.uri)
    kept.put(f"tokenizer/{TOKENIZER_FILE}", [b"its own"], overwrite=True)
    written = bring_along(run, manifest, kept)
    shutil.rmtree(tmp_path / "ours")
    found = {key.removeprefix("hf/") for key in kept.list("hf/")}
    assert {path.name for path in files_to_carry(folder)} <= found and written >= len(found) - 1
    assert kept.get("hf/generation_config.json") == b"{}"
    assert kept.get(f"tokenizer/{TOKENIZER_FILE}") == b"its own"
    assert bring_along(run, manifest, kept) == 0


def _known(tensor):
    whole = Box(offset=(0,) * len(tensor.shape), shape=tensor.shape)
    return block_values(f"model/{tensor.name}", tensor.shape, whole, torch.float32).numpy()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_checkpoint_of_many_ranks_becomes_one_model(tmp_path, family):
    model = make_native_model(family, is_tied=False)
    if family == "gpt2":  # which has no shared key heads over there
        model = model.model_copy(update={"num_kv_heads": "num_heads"})
    store = LocalStore(tmp_path / "run")
    grid = Grid(tp=2, pp=2, dp=2)
    manifest = assemble_shards(save_shards(store, model, grid), grid)
    commit(store, replace(manifest, job={"model": model.model_dump(mode="json")}))
    hf_export(store.uri, tmp_path / "back")
    found = _read(tmp_path / "back")
    for at in hf_tensors(model):
        stack = np.concatenate([_known(part) for part in at.parts])[: at.num_rows]
        np.testing.assert_array_equal(found[at.name], stack.T if at.is_transposed else stack)


def test_model_that_their_config_cannot_say_is_refused(tmp_path):
    model = make_native_model("gpt2", is_tied=False)
    store, grid = LocalStore(tmp_path / "run"), Grid()
    manifest = assemble_shards(save_shards(store, model, grid), grid)
    commit(store, replace(manifest, job={"model": model.model_dump(mode="json")}))
    with pytest.raises(
        ConfigError, match=r"model\.num_kv_heads=\d+; GPT2LMHeadModel has no such thing"
    ):
        hf_export(store.uri, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_experts_of_a_gpt2_are_refused_before_anything_is_written(tmp_path):
    model = make_native_model("gpt2", is_tied=False)
    store, grid = LocalStore(tmp_path / "run"), Grid()
    manifest = assemble_shards(save_shards(store, model, grid), grid)
    section = model.model_copy(update={"moe": MoeSection(num_experts=4, intermediate_size=12)})
    commit(store, replace(manifest, job={"model": section.model_dump(mode="json")}))
    with pytest.raises(
        ConfigError, match=r"model\.moe\.num_experts=4; GPT2LMHeadModel has no such"
    ):
        hf_export(store.uri, tmp_path / "back")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_config_that_is_no_object_is_refused(tmp_path):
    folder = write_folder(tmp_path / "theirs", make_model())
    (folder / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"theirs/config.json' is no object, but \[\];"):
        _import(folder, tmp_path / "ours")


@pytest.mark.parametrize("verb", ["hf-export", "dcp-export"])
@pytest.mark.parametrize("out", ["s3://nope/b", "ftp://nope/b"])
def test_exports_write_no_folder_that_is_called_like_a_store(tmp_path, monkeypatch, verb, out):
    done = _import(write_folder(tmp_path / "theirs", make_model()), tmp_path / "ours")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"--out='{out}'"):
        convert_app([verb, done.uri, "--out", out], standalone_mode=False)
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "ours"}


def test_memory_is_bounded_by_the_largest_tensor(tmp_path):
    model = make_model(
        num_layers=24, hidden_size=64, num_heads=4, ffn_hidden_size=4096, vocab_size=512
    )
    folder = write_folder(tmp_path / "theirs", model)
    whole = (folder / "model.safetensors").stat().st_size
    largest = max(entry.num_bytes for entry in open_weights(folder).values())
    assert largest < MAX_BOX_BYTES and whole > 60 * largest
    tracemalloc.start()
    done = _import(folder, tmp_path / "ours")
    hf_export(done.uri, tmp_path / "back", dtype="bfloat16")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * largest + 500_000  # headers and the manifest are the rest


@pytest.mark.parametrize(("factor", "notes"), [(0.0, 0), (1.5, 1)])
def test_export_says_that_transformers_drops_no_choices(tmp_path, factor, notes):
    moe = MoeSection(num_experts=4, intermediate_size=24, capacity_factor=factor)
    model = make_model(moe=moe, norm_eps=1e-5)
    done = _import(write_folder(tmp_path / "theirs", model), tmp_path / "ours")
    store, manifest = open_checkpoint(done.uri)
    store.delete(manifest.key)  # what training with a capacity would have saved
    commit(store, replace(manifest, job={"model": model.model_dump(mode="json")}))
    back = hf_export(done.uri, tmp_path / "back")
    assert len(back.notes) == notes
    assert all("capacity_factor=1.5" in note for note in back.notes)
