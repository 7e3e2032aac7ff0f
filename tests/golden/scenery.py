"""What lies in the scratch folder before cases are asked: small texts, datasets, checkpoints, a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from isal.isal_zlib import crc32

from raymega.box import SavedBox
from raymega.checkpoint.format.epochs import LeaseGrant, LeaseHolder
from raymega.checkpoint.format.manifest import READABLE, Manifest, commit
from raymega.checkpoint.load.init_from import WEIGHTS
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.load import parse_job
from raymega.config.schema import Job, ModelSection
from raymega.convert.huggingface.importer import hf_import
from raymega.convert.huggingface.names import hf_tensors
from raymega.convert.safetensors_files import INDEX, WHOLE
from raymega.data.export import index_bytes
from raymega.data.format import META_FILE, TOKENIZER_FILE
from raymega.orchestrate.run_store.journal import open_record, write_record
from raymega.plan.tensor_table import model_tensors
from raymega.planner.calibration.measured_run import METRICS_FILE
from raymega.prepare.tokenizer.trained import byte_tokenizer
from raymega.storage.local import LocalStore
from raymega.storage.registry import open_store
from tests.support.jobs import VERIFY
from tests.unit.convert.folders import NOW, write_folder
from tests.unit.data.datasets import with_lengths, write_dataset

SMALL_DEVICE = "name: small\nlike: h100\nmemory_bytes: 1000000\n"
EXPERTS = {"num_experts": 2, "top_k": 2}
WORDS = json.dumps(
    {
        "version": "1.0",
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 2}, "unk_token": "?"},
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
        "added_tokens": [],
    }
)
"""A tokenizer.json of three words."""


def furnish(folder: Path) -> None:
    """Put everything there that the cases name."""
    (folder / "bytes.yaml").write_bytes(b"\xff\xfe")
    (folder / "small.yaml").write_text(SMALL_DEVICE)
    (folder / "raw").mkdir()
    (folder / "raw" / "a.txt").write_text("a text")
    (folder / "empty").mkdir()
    (folder / "empty" / "nothing.txt").write_text("")
    _put_datasets(folder)
    _put_weights(folder)
    _put_checkpoints(folder)
    _put_runs(folder)


def verify_job(*overrides: str) -> Job:
    """The base of all cases."""
    return parse_job(VERIFY, overrides).job()


def _put_megatron(folder: Path) -> None:
    """Megatron's files of three documents, and damaged ones."""
    folder.mkdir()
    lengths = np.array([30, 20, 9])
    index = index_bytes(lengths, "uint16")
    gaps, odd = bytearray(index), bytearray(index)
    gaps[34 + 12 + 8] = odd[34 + 36 + 8] = 99  # an offset, and a border of documents
    indices = {
        "corpus": index,
        "torn": index,
        "short": b"abc",
        "long": index + b"more",
        "other": b"x" * 40,
        "gaps": gaps,
        "odd": odd,
    }
    for name, content in indices.items():
        (folder / f"{name}.idx").write_bytes(content)
    for name in (*indices, "noidx"):
        tokens = np.arange(59 if name != "torn" else 58, dtype="<u2")
        (folder / f"{name}.bin").write_bytes(tokens.tobytes())


def _put_datasets(folder: Path) -> None:
    sizes = {"tokens": (400,), "old": (400,), "torn": (400,), "lost": (400,), "flipped": (400,)}
    for name, train in sizes.items():
        (folder / name).mkdir()
        write_dataset(folder / name, train=train, valid=(40,), version=1 if name == "old" else 2)
    (folder / "novalid").mkdir()
    write_dataset(folder / "novalid", train=(20,), valid=())
    for name in ("words", "letters"):
        (folder / name).mkdir()
        write_dataset(folder / name, train=(20 + len(name),), valid=())
        (folder / name / TOKENIZER_FILE).write_text(name)
    shutil.copytree(folder / "tokens", folder / "spelled-tokens")
    (folder / "spelled-tokens" / TOKENIZER_FILE).write_text(byte_tokenizer())
    _put_megatron(folder / "theirs-bin")
    (shard,) = (folder / "torn" / "train").iterdir()
    shard.write_bytes(shard.read_bytes()[:-1])
    (shard,) = (folder / "lost" / "train").iterdir()
    shard.unlink()
    (shard,) = (folder / "flipped" / "train").iterdir()
    whole = bytearray(shard.read_bytes())
    whole[len(whole) // 2] ^= 1
    shard.write_bytes(whole)
    (folder / "strange-tokens").mkdir()
    write_dataset(folder / "strange-tokens", train=(400,), vocab_size=10)
    shutil.copytree(folder / "tokens", folder / "zeros")
    (shard,) = (folder / "zeros" / "train").iterdir()
    shard.write_bytes(bytes(shard.stat().st_size))
    (folder / "miscounted").mkdir()
    meta = with_lengths(folder / "miscounted", write_dataset(folder / "miscounted"))
    for split in meta.splits.values():
        (folder / "miscounted" / split.files[-1].file).write_bytes(bytes(split.files[-1].num_bytes))
    (folder / "strange").mkdir()
    (folder / "strange" / META_FILE).write_text("{}")


def _put_weights(folder: Path) -> None:
    """``theirs``: the verify job's model as Hugging Face has it; and folders that differ from it."""
    model = verify_job().model
    values = _known_values(model)
    write_folder(folder / "theirs", model, values=values)
    head = next(iter(values.values())) + 1
    write_folder(folder / "headed", model, values=values | {"lm_head.weight": head})
    for name in ("twice", "quantised", "cut"):
        shutil.copytree(folder / "theirs", folder / name)
    shutil.copy(folder / "twice" / WHOLE, folder / "twice" / "copy.safetensors")
    index = {"weight_map": {"a": WHOLE, "b": "copy.safetensors"}}
    (folder / "twice" / INDEX).write_text(json.dumps(index))
    whole = (folder / "theirs" / WHOLE).read_bytes()
    (folder / "cut" / WHOLE).write_bytes(whole[:-1])
    (folder / "quantised" / WHOLE).write_bytes(whole.replace(b'"F32"', b'"I4" ', 1))


def _put_checkpoints(folder: Path) -> None:
    """``ours``: the checkpoint of those weights; and copies with something about them that is not right."""
    model = verify_job().model
    hf_import(folder / "theirs", str(folder / "ours"), created=NOW)
    hf_import(folder / "theirs", str(folder / "resumed" / "verify"), created=NOW)
    store, manifest = open_checkpoint(str(folder / "ours"))
    trained = {"schedule": {"micro_batch_size": 4}, "precision": {"fp8": "tensorwise"}}
    changes: dict[str, dict[str, Any]] = {
        "gap": {"boxes": manifest.boxes[1:]},
        "half": {"boxes": (_upper_half(manifest.boxes[0]), *manifest.boxes[1:])},
        "mixed": {"boxes": (*manifest.boxes, replace(manifest.boxes[0], dtype="float64"))},
        "outside": {"boxes": (_moved_down(manifest.boxes[0]), *manifest.boxes[1:])},
        "moments": {"boxes": (*manifest.boxes, replace(manifest.boxes[0], tensor="adam8/x"))},
        "unread": {"job": {"model": {"family": "mamba"}}},
        "other": {"job": {"model": manifest.job["model"] | {"num_layers": 3}}},
        "nameless": {"job": {}},
        "mup": {"job": {"model": model.model_dump() | {"mup_base_width": 16}}},
        "reshaped": {"job": {"model": model.model_dump() | {"ffn_hidden_size": 128}}},
        "kindless": {"job": {"model": model.model_dump() | {"family": "gpt2", "moe": EXPERTS}}},
        "scaled/verify": {"job": manifest.job | trained},
        "routed/verify": {"job": manifest.job | trained, "boxes": _boxes_of(manifest, EXPERTS)},
    }
    for name, tokenizer in {"spoken": WORDS, "spelled": byte_tokenizer()}.items():
        shutil.copytree(folder / "ours", folder / name)
        (folder / name / "hf" / TOKENIZER_FILE).write_text(tokenizer)
    for name, change in changes.items():
        shutil.copytree(folder / "ours", folder / name)
        (folder / name / manifest.key).unlink()
        commit(open_store(str(folder / name)), replace(manifest, **change))
    for name in ("broken", "corrupt", "fileless", "damaged", "newer", "illegible", "odd-manifest"):
        shutil.copytree(folder / "ours", folder / name)
    data = manifest.file_key(manifest.boxes[0])
    whole = store.get(data)
    (folder / "broken" / data).write_bytes(whole[:-1])
    (folder / "corrupt" / data).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    (folder / "fileless" / data).unlink()
    text = store.get(manifest.key).decode()
    (folder / "damaged" / manifest.key).write_text(text.replace('"step":0', '"step":1'))
    (folder / "newer" / manifest.key).write_text(text.replace('"version": 3', '"version": 5'))
    (folder / "illegible" / manifest.key).write_text(text[:100])
    odd = {"version": max(READABLE), "crc32": crc32(b"{}"), "checkpoint": {}}
    (folder / "odd-manifest" / manifest.key).write_text(json.dumps(odd))
    for name, grant in (("fenced", _grant().to_json()), ("unleased", b"{}")):
        shutil.copytree(folder / "ours", folder / name)
        open_store(str(folder / name)).put(_grant().key, [grant], overwrite=False)
    (folder / "fenced" / manifest.key).unlink()


def _grant() -> LeaseGrant:
    holder = LeaseHolder(host="h", pid=1, machine="m", started="0", token="t")
    return LeaseGrant(epoch=3, holder=holder, since=NOW, renewed=NOW, expires=NOW, duration_s=30.0)


def _upper_half(box: SavedBox) -> SavedBox:
    rows, *others = box.box.shape
    upper = replace(box.box, shape=(rows // 2, *others))
    return replace(box, box=upper, num_bytes=box.num_bytes // 2)


def _moved_down(box: SavedBox) -> SavedBox:
    first, *others = box.box.offset
    return replace(box, box=replace(box.box, offset=(first + 1, *others)))


def _boxes_of(manifest: Manifest, experts: Mapping[str, object]) -> tuple[SavedBox, ...]:
    """Of the verify job's model with ``experts``; their bytes are nobody's."""
    last = max(manifest.boxes, key=lambda box: box.start)
    job = verify_job(*(f"model.moe.{name}={value}" for name, value in experts.items()))
    return tuple(
        replace(last, tensor=f"{WEIGHTS}/{tensor.name}", global_shape=tensor.shape)
        for tensor in model_tensors(job.model)
    )


def _known_values(model: ModelSection) -> dict[str, np.ndarray]:
    """Of each of transformers' tensors, numbers that every machine makes alike."""
    return {
        each.name: np.arange(prod(each.shape), dtype="f4").reshape(each.shape) * 16
        for each in hf_tensors(model)
    }


def _put_runs(folder: Path) -> None:
    """Records of runs of the verify job: begun with another seed, at work, ended, unreadable."""
    job = verify_job("run.seed=1")
    record = open_record(LocalStore(folder / "none"), job, now=NOW)
    for name, status in (("runs", "new"), ("live", "running"), ("ended", "finished")):
        known = replace(record, run_id="0" * 12, status=status)
        write_record(LocalStore(folder / name / job.run.name), known)
    write_record(LocalStore(folder / "later" / job.run.name), replace(record, version=2))
    (folder / "short").mkdir()
    lines = [{"event": "run", "job": job.model_dump(mode="json")}, {"event": "attempt", "grid": {}}]
    (folder / "short" / METRICS_FILE).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "torn-metrics").mkdir()
    (folder / "torn-metrics" / METRICS_FILE).write_text("{")
