"""Folders of Hugging Face weights, written without transformers, and checkpoints of drawn weights."""

import json

import numpy as np

from raymega.config.schema import ModelSection
from raymega.convert.huggingface.config import config_from
from raymega.convert.huggingface.names import hf_tensors
from raymega.convert.native import write_weights as write_native_weights
from raymega.convert.number_formats import recast
from raymega.convert.safetensors_files import NewTensor, write_weights
from raymega.plan.tensor_table import saved_tensors
from raymega.storage.registry import open_store

NOW = "2025-01-01T00:00:00+00:00"


def make_model(family="llama", **changes) -> ModelSection:
    sizes = {
        "num_layers": 2, "hidden_size": 16, "num_heads": 4, "ffn_hidden_size": 24, "vocab_size": 50,
        "max_positions": 12, "make_vocab_size_divisible_by": 8,
        "num_kv_heads": "num_heads" if family == "gpt2" else 2,
        "head_dim": 6 if family == "qwen3" else "hidden_size / num_heads",
    }  # fmt: skip
    return ModelSection(family=family, **{**sizes, **changes})


def draw_values(model, dtype="float32", seed=0):
    """Their name to values of every tensor."""
    numbers = np.random.default_rng(seed)
    return {
        at.name: recast(numbers.normal(size=at.shape).astype("f8"), "float64", dtype)
        for at in hf_tensors(model)
    }


def write_folder(folder, model, *, values=None, dtype="float32", max_file_bytes=10**9, **config):
    """The folder, with a tokenizer that is none."""
    folder.mkdir()
    values = draw_values(model, dtype) if values is None else values
    tensors = [NewTensor(name=name, dtype=dtype, shape=v.shape) for name, v in values.items()]
    write_weights(folder, tensors, values.values(), max_file_bytes=max_file_bytes)
    whole = config_from(model, dtype=dtype, carried={"bos_token_id": 7}) | config
    (folder / "config.json").write_text(json.dumps(whole))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.txt").write_text("stays behind")
    return folder


def write_checkpoint(uri, model, *, base="none", seed=3, **job):
    """Write drawn float64 weights of what a run of ``model`` on ``base`` saves; return ``uri``."""
    numbers = np.random.default_rng(seed)
    job = {"model": model.model_dump(mode="json"), "checkpoint": {"init_from": base}, **job}
    write_native_weights(
        open_store(uri), saved_tensors(model), lambda tensor: numbers.normal(size=tensor.shape),
        dtype="float64", job=job, created=NOW,
    )  # fmt: skip
    return uri
