"""Torch checkpoints in and out: torch itself reads and writes the other side."""

import enum
import io
import json
import os
import pickle
import pickletools
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from raymega.checkpoint.load.reader import load
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.schema import ModelSection
from raymega.convert.torch_dcp import writer
from raymega.convert.torch_dcp.exporter import dcp_export
from raymega.convert.torch_dcp.importer import BESIDE, Reading, dcp_import
from raymega.convert.torch_dcp.names import reorder_rope_rows
from raymega.convert.torch_dcp.reader import open_dcp
from raymega.errors import ConfigError
from raymega.plan.tensor_table import model_tensors
from raymega.storage.registry import open_store
from tests.unit.checkpoint.support import (
    MODELS,
    make_blocks,
    make_grid,
    same,
    save_checkpoint,
)

NOW = "2025-01-01T00:00:00+00:00"
MODEL = MODELS["llama-untied"]
PLAIN = Reading(position={})


def save_native(path, grid="tp2-pp2", dtype=torch.float32, model=MODEL):
    return save_checkpoint(open_store(str(path)), model, make_grid(grid), dtype=dtype)


def draw_state(model: ModelSection, dtype=torch.float32, steps=7.0):
    """What get_model_state_dict and get_optimizer_state_dict return for our names."""
    numbers = torch.Generator().manual_seed(3)

    def draw(shape):
        return torch.randn(shape, generator=numbers, dtype=torch.float64).to(dtype)

    table = {tensor.name: tensor.shape for tensor in model_tensors(model)}
    state = {
        name: {"exp_avg": draw(s), "exp_avg_sq": draw(s), "step": torch.tensor(steps)}
        for name, s in table.items()
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "params": list(table)}]
    return {
        "model": {name: draw(shape) for name, shape in table.items()},
        "optimizer": {"state": state, "param_groups": groups},
        "epoch": 3,
    }


def dcp_save(state, folder):
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)


def as_tensor(array, dtype):
    return torch.from_numpy(np.array(array)).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_what_torch_wrote_is_taken_bit_for_bit(tmp_path, dtype):
    state = draw_state(MODEL, dtype)
    dcp_save(state, tmp_path / "theirs")
    done = dcp_import(tmp_path / "theirs", str(tmp_path / "ours"), PLAIN, created=NOW)
    assert done.kinds == ("model", "adam.exp_avg", "adam.exp_avg_sq")
    assert done.state == {"step": 7, "samples": 0, "tokens": 0}
    assert "epoch" in done.left_out
    _, manifest = checkpoint = open_checkpoint(done.uri)
    tensors = manifest.tensors()
    for name, values in state["model"].items():
        ours = checkpoint.read_bits_of(tensors[f"model/{name}"])
        assert torch.equal(as_tensor(ours, dtype), values), name
        for slot in ("exp_avg", "exp_avg_sq"):
            ours = checkpoint.read_bits_of(tensors[f"adam.{slot}/{name}"])
            assert torch.equal(as_tensor(ours, dtype), state["optimizer"]["state"][name][slot])
    assert manifest.job["precision"] == {"dtype": str(dtype).removeprefix("torch.")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_torch_loads_what_was_exported_bit_for_bit(tmp_path, dtype):
    manifest = save_native(tmp_path / "ours", "tp2-pp2-dp2", dtype)
    done = dcp_export(str(tmp_path / "ours"), tmp_path / "theirs")
    assert done.step == manifest.step and set(done.files) == {
        at.name for at in (tmp_path / "theirs").iterdir()
    }
    state = draw_state(MODEL, dtype)
    del state["optimizer"]["param_groups"], state["epoch"]
    dcp.load(state, checkpoint_id=str(tmp_path / "theirs"), no_dist=True)
    for block in make_blocks(MODEL, make_grid("tp1"), 0, dtype=dtype):
        kind, name = block.kind, block.tensor.name
        theirs = state["model"] if kind == "model" else state["optimizer"]["state"][name]
        key = name if kind == "model" else kind.removeprefix("adam.")
        held = theirs[key][block.box.within(block.tensor.whole)]
        assert torch.equal(held, block.values), block.name
    steps = {float(slots["step"]) for slots in state["optimizer"]["state"].values()}
    assert steps == {float(manifest.step)}


def test_torchs_own_tool_reads_an_export_without_knowing_its_tensors(tmp_path):
    save_native(tmp_path / "ours")
    dcp_export(str(tmp_path / "ours"), tmp_path / "theirs")
    dcp_to_torch_save(tmp_path / "theirs", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert set(whole) == {"model", "optimizer"}
    assert set(whole["model"]) == {tensor.name for tensor in model_tensors(MODEL)}
    assert set(whole["optimizer"]["state"]["final_norm.weight"]) == {
        "exp_avg",
        "exp_avg_sq",
        "step",
    }


@pytest.mark.parametrize("names", ["raymega", "torchtitan"])
def test_round_trip_ends_where_it_began(tmp_path, monkeypatch, names):
    """Bits, position, job; several files, boxes of several ranks."""
    monkeypatch.setattr(writer, "FILE_BYTES", 2000)
    manifest = save_native(tmp_path / "ours", "tp2-pp2-dp2")
    model = MODEL.model_dump(mode="json")
    named = {**manifest.job, "model": model, "precision": {"dtype": "float32"}}
    monkeypatch.setattr(
        "raymega.convert.torch_dcp.exporter.open_checkpoint", lambda uri: _with_job(uri, named)
    )
    done = dcp_export(str(tmp_path / "ours"), tmp_path / "theirs", names=names)
    assert len(done.files) > 5
    reading = Reading(names=names, position={})
    back = dcp_import(tmp_path / "theirs", str(tmp_path / "back"), reading, created=NOW)
    store, again = open_checkpoint(back.uri)
    assert (again.state, again.job, again.grid) == (manifest.state, named, manifest.grid)
    blocks = make_blocks(MODEL, make_grid("tp1"), 0, is_filled=False)
    load(store, again, blocks, expected={block.name for block in blocks})
    wanted = make_blocks(MODEL, make_grid("tp1"), 0)
    if names == "torchtitan":  # padded rows are zero in a run; theirs are not known
        blocks, wanted = (
            [b for b in side if not b.tensor.padded_rows] for side in (blocks, wanted)
        )
    assert same(blocks, wanted)


def _with_job(uri, job):
    from dataclasses import replace

    checkpoint = open_checkpoint(uri)
    return checkpoint._replace(manifest=replace(checkpoint.manifest, job=job))


def titan_state(model):
    """Names and order of rows as torchtitan's llama3 has them, from one that has ours."""
    names = {
        "embedding.tokens": "tok_embeddings", "final_norm": "norm", "head": "output",
        "attention.q": "attention.wq", "attention.k": "attention.wk", "attention.v": "attention.wv",
        "attention.out": "attention.wo", "mlp.gate": "feed_forward.w1",
        "mlp.down": "feed_forward.w2", "mlp.up": "feed_forward.w3", "mlp_norm": "ffn_norm",
    }  # fmt: skip
    ours = draw_state(model)

    def theirs(name):
        for old, new in names.items():
            name = name.replace(f"{old}.weight", f"{new}.weight")
        return name

    def turned(name, values):
        if values.ndim and ("attention.q." in name or "attention.k." in name):
            # Meta's order, by the formula that Hugging Face's conversion inverts.
            heads = values.view(-1, 2, model.head_width // 2, values.shape[1])
            return heads.transpose(1, 2).reshape(values.shape)
        return values[: model.vocab_size] if values.ndim and values.shape[0] == 40 else values

    state = {theirs(name): turned(name, v) for name, v in ours["model"].items()}
    state["optimizer"] = {
        **{
            f"state.{theirs(name)}.{slot}": turned(name, v)
            for name, slots in ours["optimizer"]["state"].items()
            for slot, v in slots.items()
        },
        **{f"param_groups.{theirs(name)}.lr": 1e-3 for name in ours["model"]},
    }
    state["lr_scheduler"] = {"last_epoch": 7}
    state["train_state"] = {"step": torch.tensor(7, dtype=torch.int32)}
    return state, ours


def test_names_rows_and_padding_of_torchtitan(tmp_path):
    model = MODEL.model_copy(update={"vocab_size": 37})
    theirs, ours = titan_state(model)
    dcp_save(theirs, tmp_path / "theirs")
    reading = Reading(
        names="torchtitan", model=model, position={"samples": 56}, ignore=("train_state.*",)
    )
    done = dcp_import(tmp_path / "theirs", str(tmp_path / "ours"), reading, created=NOW)
    assert done.state == {"step": 7, "samples": 56, "tokens": 0}
    _, manifest = checkpoint = open_checkpoint(done.uri)
    for name, boxes in manifest.tensors().items():
        kind, _, weight = name.partition("/")
        wanted = ours["model"][weight]
        if kind != "model":
            wanted = ours["optimizer"]["state"][weight][kind.removeprefix("adam.")]
        values = torch.from_numpy(np.array(checkpoint.read_bits_of(boxes)))
        assert torch.equal(values[:37], wanted[:37]), name
        assert values.shape[0] != 40 or not values[37:].any(), name
    dcp_export(str(tmp_path / "ours"), tmp_path / "again", names="torchtitan")
    weights = {name: torch.empty_like(v) for name, v in theirs.items() if torch.is_tensor(v)}
    dcp.load(weights, checkpoint_id=str(tmp_path / "again"), no_dist=True)
    assert all(torch.equal(weights[name], theirs[name]) for name in weights)


def test_pairs_of_rope_turn_and_turn_back():
    rows = np.arange(24).reshape(12, 2)
    ours = reorder_rope_rows(rows, 6, to_ours=True)
    assert ours[:6, 0].tolist() == [0, 4, 8, 2, 6, 10]
    assert (reorder_rope_rows(ours, 6, to_ours=False) == rows).all()


@pytest.mark.parametrize(
    ("change", "reading", "fact"),
    [
        (lambda s: s["model"].pop("final_norm.weight"), {}, "final_norm.weight as (16,) instead"),
        (lambda s: s["model"].update(extra=torch.ones(3)), {}, "extra as nothing instead of (3,)"),
        (lambda s: s["model"].update(n=torch.ones(3).long()), {}, "model.n is int64 (3,)"),
        (lambda s: None, {"model": MODELS["gpt2-tied"]}, "embedding.positions.weight as nothing instead of"),
        (lambda s: None, {"names": "torchtitan"}, "torchtitan with no model section"),
        (lambda s: None, {"names": "nobody"}, "--names 'nobody'"),
        (lambda s: None, {"rename": ("a",)}, "--rename has 'a'"),
        (
            lambda s: s["optimizer"]["state"]["final_norm.weight"].update(step=torch.tensor(6.0)),
            {}, "6 updates of some tensors and 7 of others",
        ),
    ],
    ids=["moment without weight", "moment missing", "type", "model", "no model", "names", "rename", "steps"],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_nothing_is_written(tmp_path, change, reading, fact):
    state = draw_state(MODEL)
    change(state)
    dcp_save(state, tmp_path / "theirs")
    with pytest.raises(ConfigError) as caught:
        dcp_import(
            tmp_path / "theirs",
            str(tmp_path / "ours"),
            Reading(position={}, **reading),
            created=NOW,
        )
    assert fact in str(caught.value)
    assert not (tmp_path / "ours" / "checkpoints").exists()


def test_weights_alone_and_other_names_by_rules(tmp_path):
    state = {"gpt": {f"net.{n}": v for n, v in draw_state(MODEL)["model"].items()}}
    dcp_save(state, tmp_path / "theirs")
    reading = Reading(rename=("gpt.net.layers=layers", "gpt.net=net"), ignore=("*head*",), position={})  # fmt: skip
    done = dcp_import(tmp_path / "theirs", str(tmp_path / "ours"), reading, created=NOW)
    names = set(open_checkpoint(done.uri)[1].tensors())
    assert "model/layers.0.mlp.up.weight" in names and "model/net.final_norm.weight" in names
    assert done.left_out == ("gpt.net.head.weight",) and done.state["step"] == 0


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def in_metadata(folder, bomb):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = {"x": bomb}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_tensor(folder, bomb):
    """The bomb in place of the tensor's pickle, padded so that all places stay."""
    tensor = next(t for t in open_dcp(folder).tensors.values() if t.shape == (16,))
    (block,) = tensor.blocks
    data = bytearray(block.file.read_bytes())
    item = bytes(data[block.start : block.start + block.num_bytes])
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(item)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, pickle.dumps(bomb) if name.endswith("data.pkl") else content)
    changed = stream.getvalue()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for index, place in metadata.storage_data.items():
        if index.fqn == tensor.name:
            place.relative_path, place.offset, place.length = "bomb.distcp", 0, len(changed)
    (folder / "bomb.distcp").write_bytes(changed)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("plant", [in_metadata, in_tensor])
def test_malicious_folder_is_refused_by_the_name_it_calls_and_runs_nothing(tmp_path, plant):
    dcp_save(draw_state(MODEL), tmp_path / "theirs")
    plant(tmp_path / "theirs", Bomb(tmp_path / "ran"))
    with pytest.raises(ConfigError, match=r"posix\.mkdir"):
        dcp_import(tmp_path / "theirs", str(tmp_path / "ours"), PLAIN, created=NOW)
    assert not (tmp_path / "ran").exists()
    assert not list((tmp_path / "ours").rglob("*.safetensors"))


def test_every_name_that_torch_itself_gives_is_admitted_and_hardly_more(tmp_path):
    """Each global of a real .metadata has a stand-in; builtins, os and torch's loaders have none."""
    dcp_save(draw_state(MODEL), tmp_path / "theirs")
    data = (tmp_path / "theirs" / ".metadata").read_bytes()
    assert "torch.distributed.checkpoint.metadata" in {
        arg for _, arg, _ in pickletools.genops(data) if isinstance(arg, str)
    }
    open_dcp(tmp_path / "theirs")
    for module, name in (
        ("builtins", "eval"), ("builtins", "setattr"), ("os", "system"), ("posix", "system"),
        ("torch", "load"), ("torch.serialization", "load"), ("functools", "partial"),
        ("torch._utils", "_rebuild_parameter"), ("torch.distributed.checkpoint.metadata", "os"),
        ("torch.distributed.checkpoint.metadata", "torch.load"), ("collections", "Counter"),
    ):  # fmt: skip
        code = f"c{module}\n{name}\n.".encode()
        (tmp_path / "theirs" / ".metadata").write_bytes(code)
        with pytest.raises(ConfigError, match=f"names {module}.{name}"):
            open_dcp(tmp_path / "theirs")


def test_enumerations_are_read_as_older_pythons_write_them(tmp_path, monkeypatch):
    """Before 3.11.4 a member is pickled as an attribute of its class."""
    monkeypatch.setattr(
        enum.Enum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name))
    )
    dcp_save(draw_state(MODEL), tmp_path / "theirs")
    assert b"getattr" in (tmp_path / "theirs" / ".metadata").read_bytes()
    open_dcp(tmp_path / "theirs")


@pytest.mark.parametrize("of", ["torch\nSize", "torch.distributed.checkpoint.metadata\nMetadata"])
def test_attributes_of_anything_else_are_refused(tmp_path, of):
    (tmp_path / "theirs").mkdir()
    code = f"cbuiltins\ngetattr\n(c{of}\nS'__class__'\ntR."
    (tmp_path / "theirs" / ".metadata").write_bytes(code.encode())
    with pytest.raises(ConfigError, match="is no member"):
        open_dcp(tmp_path / "theirs")


@pytest.mark.parametrize(
    "code",
    [
        b"", b"garbage", b"N.", b"c", b"\x80\x04",
        # A state for a class: would change the stand-in for every later reading.
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}X\x01\x00\x00\x00aNstb.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81N" + b"b.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81.",
    ],
    ids=["empty", "garbage", "none", "torn", "no end", "class state", "no dict", "no attributes"],
)  # fmt: skip
def test_metadata_that_is_none_is_refused(tmp_path, code):
    (tmp_path / ".metadata").write_bytes(code)
    with pytest.raises(ConfigError, match="metadata"):
        open_dcp(tmp_path)


@pytest.mark.parametrize("path", ["../outside.distcp", "/etc/passwd"])
def test_files_outside_the_folder_are_refused(tmp_path, path):
    dcp_save(draw_state(MODEL), tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = path
    for place in metadata.storage_data.values():
        place.relative_path = path
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConfigError, match="outside the folder"):
        open_dcp(tmp_path)


def test_flipped_and_torn_data_are_noticed(tmp_path):
    dcp_save(draw_state(MODEL), tmp_path / "theirs")
    (file,) = (tmp_path / "theirs").glob("*.distcp")
    block = open_dcp(tmp_path / "theirs").tensors["model.head.weight"].blocks[0]
    data = bytearray(file.read_bytes())
    data[block.start + block.num_bytes // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ConfigError, match="CRC"):
        block.read()
    file.write_bytes(data[: block.start + 100])
    with pytest.raises(ConfigError, match="cannot be read"):
        block.read()


def test_position_beside_an_export_must_be_whole(tmp_path):
    save_native(tmp_path / "ours")
    dcp_export(str(tmp_path / "ours"), tmp_path / "theirs")
    (tmp_path / "theirs" / BESIDE).write_text("{}")
    with pytest.raises(ConfigError, match=r"raymega\.json"):
        dcp_import(tmp_path / "theirs", str(tmp_path / "back"), PLAIN, created=NOW)


def test_commands_and_no_torch_in_them(tmp_path):
    save_native(tmp_path / "ours")
    code = (
        "import sys; from raymega.cli.main import run\n"
        "try: run()\nexcept SystemExit as e: assert not e.code, e.code\n"
        "sys.exit('torch was loaded' if 'torch' in sys.modules else 0)"
    )

    def call(*args):
        done = subprocess.run(
            [sys.executable, "-c", code, "convert", *map(str, args), "--json"],
            capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    exported = call("dcp-export", tmp_path / "ours", "--out", tmp_path / "theirs")
    assert exported["step"] == 100
    imported = call("dcp-import", tmp_path / "theirs", "--out", tmp_path / "back", "--samples", 5)
    assert imported["state"]["samples"] == 5 and imported["state"]["step"] == 100
