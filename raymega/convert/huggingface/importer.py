"""Imports a folder of Hugging Face weights as a native checkpoint that a run can start from.

Everything is checked before the first byte is written, and what was written is removed when something
fails later. Memory: one tensor in its old and its new form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from raymega.config.hub import download, hub_name
from raymega.config.schema import ModelSection
from raymega.convert.huggingface.architectures import architecture_of
from raymega.convert.huggingface.buffers import is_buffer
from raymega.convert.huggingface.config import model_from
from raymega.convert.huggingface.extra_files import CONFIG, PREFIX, files_to_carry
from raymega.convert.huggingface.families.bert import PAIRS, POOLERS, UNREAD_BIASES
from raymega.convert.huggingface.families.images.image_families import image_family_of
from raymega.convert.huggingface.families.images.llava import with_pixels
from raymega.convert.huggingface.heads import with_headless_pooling
from raymega.convert.huggingface.names import (
    HEAD,
    HEADS,
    HfTensor,
    has_own_table,
    head_name,
    hf_tensors,
    num_further,
    original_of,
)
from raymega.convert.native import occupied_faults, write_weights
from raymega.convert.number_formats import Array, recast
from raymega.convert.quantized_weights import common_dtype, plain_entries
from raymega.convert.safetensors_files import WeightEntry, open_weights
from raymega.errors import ConfigError, Fault, first_few, raise_faults
from raymega.plan.layers.family_parts import parts_of
from raymega.plan.layers.global_tensor import GlobalTensor
from raymega.plan.tensor_table import model_tensors
from raymega.plugins import registry_of, with_versions
from raymega.storage.registry import open_store, store_faults

MODEL_FILE = "model.yaml"
SAVED = "saved"
DTYPES = (SAVED, "float64", "float32", "bfloat16")
FIRST_PREFIX = {
    "gpt2": "transformer.", "gpt_neox": "gpt_neox.", "bert": "bert.", "megatron_bert": "bert.",
    "roberta": "roberta.", "t5": "", "t5_v1_1": "", "nemotron_h": "backbone.", "openelm": "transformer.",
}  # fmt: skip
"""Outermost prefix of names by family or model_type, where it is not Llama's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HfImport:
    """Result of an import.

    Attributes:
        uri: URI of the store that was written.
        key: Key of the manifest.
        dtype: Number format of the weights.
        model: Model section for the job file.
        num_parameters: Number of elements, without padded rows.
        carried: Names of the accompanying files that were kept.
    """

    uri: str
    key: str
    dtype: str
    model: ModelSection
    num_parameters: int
    carried: tuple[str, ...]


def hf_import(
    folder: Path,
    uri: str,
    *,
    created: str,
    make_vocab_size_divisible_by: int | None = None,
    dtype: str = SAVED,
    plugins: Sequence[str] = (),
) -> HfImport:
    """Convert the model in ``folder`` to a checkpoint in the store at ``uri``.

    Args:
        folder: Folder with config.json and safetensors files.
        uri: URI of a store without checkpoints.
        created: Time of the import: ISO 8601, UTC.
        make_vocab_size_divisible_by: Number of which the padded vocabulary is a multiple; None is the
            job file's default.
        dtype: Number format of the checkpoint, one of DTYPES; ``saved`` is one that rounds no plain
            weight of the folder, and bfloat16 for those that are quantised.
        plugins: Modules of plug-ins, as ``plugins.modules``; one may have the model's family.

    Raises:
        ConfigError: The model or the arguments are refused, with all reasons; nothing was written.
        StorageError: The store cannot be used.
    """
    # The model section, by config.json and by the tensors that are there.
    raise_faults(ConfigError, _dtype_faults(dtype))
    modules = with_versions(plugins)
    registry_of(modules)
    config = _read_config(folder)
    model = model_from(config)
    if make_vocab_size_divisible_by is not None:
        model = model.model_copy(
            update={"make_vocab_size_divisible_by": make_vocab_size_divisible_by}
        )
    entries = _known(_open(folder, config), model)
    model = _with_further_blocks(model, entries, folder)
    entries = _without_copies(entries, model)
    # Check the weights and the store.
    raise_faults(ConfigError, _weight_faults(entries, model))
    raise_faults(ConfigError, store_faults(uri, field="--out"))
    store = open_store(uri)
    raise_faults(ConfigError, occupied_faults(store))
    # Write the accompanying files, then the weights; remove both when something fails.
    carried = files_to_carry(folder)
    dtype = common_dtype(entries) if dtype == SAVED else dtype
    beside = {f"{PREFIX}{path.name}": path.read_bytes() for path in carried}
    beside[MODEL_FILE] = model_yaml(model).encode()
    tensors = model_tensors(model)
    try:
        for key, content in beside.items():
            store.put(key, [content], overwrite=True)
        key = write_weights(
            store,
            tensors,
            partial(_values, entries, _places(model), dtype),
            dtype=dtype,
            job={
                "model": model.model_dump(mode="json"),
                "precision": {"dtype": dtype},
                **({"plugins": {"modules": list(modules)}} if modules else {}),
            },
            created=created,
        )
    except BaseException:
        for key in beside:
            store.delete(key)
        raise
    return HfImport(
        uri=store.uri, key=key, model=model, dtype=dtype,
        num_parameters=sum(tensor.num_parameters for tensor in tensors),
        carried=tuple(path.name for path in carried),
    )  # fmt: skip


def model_of_folder(folder: Path) -> ModelSection:
    """Return the model section of a folder with a config.json; weights may be missing.

    Raises:
        ConfigError: The model is refused, with all reasons.
    """
    config = _read_config(folder)
    model = model_from(config)
    if not any(folder.glob("*.safetensors")):
        return model
    return _with_further_blocks(model, _known(_open(folder, config), model), folder)


def _open(folder: Path, config: Mapping[str, Any]) -> dict[str, WeightEntry]:
    """Return the location of every weight of ``folder``, quantised or not, without the buffers that old files hold."""
    found = open_weights(folder, may_be_coded=True, is_left_out=is_buffer)
    return plain_entries(found, config)


def _dtype_faults(dtype: str) -> Iterator[Fault]:
    if dtype not in DTYPES:
        yield Fault(
            fact=f"--dtype {dtype!r}",
            rule=f"it is one of {', '.join(DTYPES)}",
            remedy=f"use --dtype {SAVED}",
        )


def _with_further_blocks(
    model: ModelSection, entries: Mapping[str, WeightEntry], folder: Path
) -> ModelSection:
    """Return the model with the multi-token-prediction blocks, the head for pairs or the pooler that its weights hold."""
    if model.head.kind == "none":
        has_pooler = any(name.startswith(POOLERS) for name in entries)
        return with_headless_pooling(model, folder, has_pooler=has_pooler)
    if not parts_of(model).is_causal:
        kind = "next_sentence" if PAIRS in entries else "none"
        encoder = model.encoder.model_copy(update={"sentence_loss": kind})
        return model.model_copy(update={"encoder": encoder})
    return model.model_copy(
        update={"num_nextn_predict_layers": num_further(entries, model.num_layers)}
    )


def model_yaml(model: ModelSection) -> str:
    """Return the ``model:`` section of a job file, without fields that have their default."""
    values = model.model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump({"model": values}, sort_keys=False)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(_unreadable(folder, f"cannot be read: {error}")) from error
    if not isinstance(config, dict):
        raise ConfigError(_unreadable(folder, f"is no object, but {str(config)[:40]}"))
    return with_pixels(config, folder)


def _unreadable(folder: Path, problem: str) -> Fault:
    return Fault(
        fact=f"{str(folder / CONFIG)!r} {problem}",
        rule="it says what network the weights belong to",
        remedy=f"download the repository: `{download(name, 'model')[0]}`, and give that folder"
        if (name := hub_name(str(folder)))
        else "give a folder that transformers' save_pretrained wrote, or a download of a model "
        "repository, such as: hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B",
    )


def _known(entries: Mapping[str, WeightEntry], model: ModelSection) -> dict[str, WeightEntry]:
    """Return the weights by their current names."""
    if model.vision.is_on:
        return {
            image_family_of(model.vision).known_name(name): entry for name, entry in entries.items()
        }
    # Files of a model saved without its language-model head lack the outermost prefix.
    own = FIRST_PREFIX.get(architecture_of(model))
    prefix = own or FIRST_PREFIX.get(model.family, "model.")
    has_prefix = any(name.startswith(prefix) for name in entries)
    return {
        _renamed(name) if has_prefix or name in HEADS else f"{prefix}{_renamed(name)}": entry
        for name, entry in entries.items()
    }


def _renamed(name: str) -> str:
    """Return the current name of a norm's tensors, which BERT's first files call gamma and beta."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
        "LayerNorm.beta", "LayerNorm.bias"
    )


def _without_copies(
    entries: Mapping[str, WeightEntry], model: ModelSection
) -> dict[str, WeightEntry]:
    """Return the weights without the copies of token table and head, and without an encoder's unused pooler.

    Raises:
        ConfigError: Such a copy differs from the model's own tensor.
    """
    kept, faults = dict(entries), []
    # a pooler that no head reads changes no output
    is_pooled = model.encoder.has_pairs or model.head.has_pooler(is_causal=False)
    if not parts_of(model).is_causal and not is_pooled:
        kept = {name: entry for name, entry in kept.items() if not name.startswith(POOLERS)}
    if has_own_table(model):
        for read, old in UNREAD_BIASES.items():
            if old in kept:
                kept.setdefault(read, kept[old])
                del kept[old]
    for name in tuple(kept):
        original = original_of(name, model)
        if original is None:
            continue
        copy, whole = kept.pop(name), entries.get(original)
        if whole is None or not np.array_equal(copy.read(), whole.read()):
            faults.append(_other_copy(name, original))
    raise_faults(ConfigError, faults)
    return kept


def _other_copy(name: str, original: str) -> Fault:
    return Fault(
        fact=f"{name} differs from {original}",
        rule="what reads and predicts tokens, further ahead too, is the model's own table and head",
        remedy="leave the copy out of the folder, with its block if that lies behind the last one",
    )


def _weight_faults(entries: Mapping[str, WeightEntry], model: ModelSection) -> Iterator[Fault]:
    # A tied head beside its table, missing and surplus tensors, then shapes.
    wanted = {tensor.name: tensor for tensor in hf_tensors(model)}
    found = dict(entries)
    head = head_name(model)
    if head in found and model.tie_word_embeddings:
        yield from _tied_head_faults(found.pop(head), found, model)
    yield from _count_faults(
        sorted(wanted.keys() - found.keys()), "lack", "take them from one place"
    )
    yield from _count_faults(
        sorted(found.keys() - wanted.keys()), "have, beside the model's,", "look for another config"
    )
    for name in sorted(wanted.keys() & found.keys()):
        if found[name].shape != wanted[name].shape:
            yield Fault(
                fact=f"{name} is {found[name].shape} in {found[name].file.name}",
                rule=f"by config.json it is {wanted[name].shape}",
                remedy="take config.json from the same place as the weights",
            )


def _count_faults(names: list[str], verb: str, remedy: str) -> Iterator[Fault]:
    if names:
        yield Fault(
            fact=f"the weights {verb} {first_few(names)}",
            rule="a model's tensors must be exactly those of its config.json",
            remedy=remedy,
        )


def _tied_head_faults(
    head: WeightEntry, entries: Mapping[str, WeightEntry], model: ModelSection
) -> Iterator[Fault]:
    """Return the fault of a tied head that is stored and differs from the token table."""
    table = entries.get(hf_tensors(model)[0].name)
    if table is None or (
        head.dtype == table.dtype
        and head.shape == table.shape
        and np.array_equal(head.read(), table.read())
    ):
        return
    yield Fault(
        fact=f"{HEAD} differs from the token table",
        rule="config.json has tie_word_embeddings=true, which makes them one",
        remedy="set tie_word_embeddings to false in config.json, or remove the tensor",
    )


def _places(model: ModelSection) -> dict[str, list[tuple[HfTensor, int]]]:
    """Return, by name of our tensor, their tensors that hold it, each with the first row there.

    A tensor of all experts has one entry an expert; every other tensor has one entry.
    """
    places: dict[str, list[tuple[HfTensor, int]]] = {}
    for theirs in hf_tensors(model):
        row = 0
        for part in theirs.parts:
            places.setdefault(part.name, []).append((theirs, row))
            row += part.shape[0]
    return places


def _values(
    entries: Mapping[str, WeightEntry],
    places: Mapping[str, Sequence[tuple[HfTensor, int]]],
    dtype: str,
    tensor: GlobalTensor,
) -> Array:
    # All experts: theirs are separate tensors, ours is their stack.
    if places[tensor.name][0][0].expert >= 0:
        of_experts = [entries[theirs.name] for theirs, _ in places[tensor.name]]
        return np.stack([recast(entry.read(), entry.dtype, dtype) for entry in of_experts])
    # Otherwise ours is a range of rows of theirs (q, k and v of GPT-2), padded in token tables.
    ((theirs, row),) = places[tensor.name]
    entry = entries[theirs.name]
    stack = entry.read().reshape(theirs.parts[0].shape) if theirs.unfolded else entry.read()
    if theirs.is_of_all_experts:
        return recast(theirs.part_of_experts(stack, tensor.name), entry.dtype, dtype)
    if theirs.is_transposed:
        stack = stack.T
    stack = theirs.by_part(stack)
    rows = recast(stack[row : row + tensor.shape[0]], entry.dtype, dtype)
    if rows.shape == tensor.shape:
        return rows
    padded = np.zeros(tensor.shape, rows.dtype)
    padded[: len(rows)] = rows
    return padded
