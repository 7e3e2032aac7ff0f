"""Exports a native checkpoint to a folder that transformers loads.

The folder appears whole or not at all. Memory: one tensor and the parts that it is concatenated from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from raymega.box import SavedBox
from raymega.checkpoint.format.manifest import Manifest
from raymega.checkpoint.format.manifest_builder import coverage_faults
from raymega.checkpoint.load.init_from import WEIGHTS
from raymega.checkpoint.tools.handle import Checkpoint
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.schema import ModelSection
from raymega.convert.huggingface.config import config_from
from raymega.convert.huggingface.extra_files import (
    CONFIG,
    carried_config,
    files_and_tokenizer,
    generation_files,
    has_tokenizer,
    trained_tokens,
)
from raymega.convert.huggingface.families.images.llava import (
    PREPROCESSOR,
    current_preprocessor,
    separate_preprocessor,
)
from raymega.convert.huggingface.heads import sentence_files
from raymega.convert.huggingface.names import HfTensor, exported_tensors, hf_tensors
from raymega.convert.native import model_of
from raymega.convert.number_formats import Array, common_format, recast
from raymega.convert.output_folder import folder_faults, new_folder
from raymega.convert.safetensors_files import NewTensor, write_weights
from raymega.data.format import TOKENIZER_FILE
from raymega.errors import CheckpointError, ConfigError, Fault, first_few, raise_faults
from raymega.plan.tensor_table import model_tensors

DTYPES = ("saved", "float64", "float32", "bfloat16", "float16")
MAX_FILE_BYTES = 5 * 10**9
"""Default size limit of a weight file in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HfExport:
    """Result of an export.

    Attributes:
        folder: Folder that was written.
        key: Key of the manifest that was exported.
        step: Number of completed steps of the run.
        dtype: Number format of the weights.
        num_parameters: Number of elements, a tied table counted once.
        files: Names of all files.
        notes: Differences in behaviour between raymega and transformers, one line each.
    """

    folder: Path
    key: str
    step: int
    dtype: str
    num_parameters: int
    files: tuple[str, ...]
    notes: tuple[str, ...]


def hf_export(
    uri: str,
    folder: Path,
    *,
    dtype: str = "saved",
    max_file_bytes: int = MAX_FILE_BYTES,
    tokenizer: str = "",
) -> HfExport:
    """Convert the newest checkpoint that ``uri`` names to a model in ``folder``.

    Args:
        uri: URI of a run's folder, of one of its checkpoints or of a manifest.
        folder: Folder to write, which must not exist or must be empty.
        dtype: Number format of the weights, or ``saved`` for that of the checkpoint.
        max_file_bytes: Largest weight file in bytes, unless one tensor is larger.
        tokenizer: Path of the dataset whose tokenizer is exported; empty for that of the run.

    Raises:
        ConfigError: The arguments are wrong; nothing was written.
        CheckpointError: The checkpoint is not whole; nothing was written.
    """
    # Check the arguments, and that transformers can express the model.
    raise_faults(ConfigError, [*dtype_faults(dtype), *folder_faults(folder)])
    store, manifest = checkpoint = open_checkpoint(uri)
    model = model_of(manifest)
    # A run on a dataset with other tokens than the model that it started from has the dataset's tokenizer.
    beside, found = files_and_tokenizer(store, manifest, tokenizer)
    raise_faults(ConfigError, _tokenizer_faults(tokenizer, found))
    # Before the weights are looked up: names of tensors exist only for a model with a config.json.
    told = carried_config(beside) | trained_tokens(manifest)
    config = config_from(model, dtype=dtype, carried=told)
    saved = _weights_of(manifest, model)
    if found or CONFIG not in beside:
        beside |= generation_files(found, config)
        # what the decoder was trained with is no choice of the tokenizer
        config |= trained_tokens(manifest)
    # Qwen2-VL's own processor keeps shapes: the one that it was imported with goes along
    is_said = model.vision.has_positions or model.vision.max_pixels > 0
    beside = separate_preprocessor(beside) if model.vision.is_on else beside
    if model.vision.is_on and (is_said or PREPROCESSOR in beside):
        beside[PREPROCESSOR] = current_preprocessor(model.vision, beside.get(PREPROCESSOR, b""))
    for name, content in sentence_files(model, is_readable=has_tokenizer(beside)).items():
        beside[name] = json.dumps(content, indent=2).encode()
    source = common_format({boxes[0].dtype for boxes in saved.values()})
    config["dtype"] = target = source if dtype == "saved" else dtype
    theirs = exported_tensors(model)
    raise_faults(ConfigError, _lost_faults(model, theirs, config))
    # Write weights, then config.json and the files that came with the model.
    with new_folder(folder) as partial:
        write_weights(
            partial,
            [NewTensor(name=at.name, dtype=target, shape=at.shape) for at in theirs],
            _values(checkpoint, saved, theirs, target),
            max_file_bytes=max_file_bytes,
        )
        _write_beside(partial, config, beside)
    return HfExport(
        folder=folder, key=manifest.key, step=manifest.step, dtype=target,
        num_parameters=sum(int(np.prod(at.shape)) for at in hf_tensors(model)),
        files=tuple(sorted(path.name for path in folder.iterdir())),
        notes=_notes(model, is_readable=has_tokenizer(beside)),
    )  # fmt: skip


def _notes(model: ModelSection, *, is_readable: bool) -> tuple[str, ...]:
    notes = []
    factor = model.moe.capacity_factor
    if model.moe.num_experts and factor:
        notes.append(
            f"model.moe.capacity_factor={factor:g}: raymega drops choices of a full expert in evaluation too, "
            "transformers drops none"
        )
    if not is_readable:
        notes.append("no tokenizer: the run's data has none; name a dataset by --tokenizer")
    return tuple(notes)


def _lost_faults(
    model: ModelSection, theirs: Sequence[HfTensor], config: Mapping[str, Any]
) -> list[Fault]:
    """Return the fault of weights that no tensor of theirs has, such as multi-token prediction of GPT-2."""
    named = {part.name for tensor in theirs for part in tensor.parts}
    lost = [each.name for each in model_tensors(model) if each.is_weight and each.name not in named]
    if not lost:
        return []
    return [
        Fault(
            fact=f"{config['architectures'][0]} has no {first_few(lost)}",
            rule="each weight of the model is exported, and read back by an import",
            remedy="export it with dcp-export, which keeps raymega's names",
        )
    ]


def _tokenizer_faults(path: str, found: Mapping[str, bytes]) -> list[Fault]:
    if not path or TOKENIZER_FILE in found:
        return []
    return [
        Fault(
            fact=f"--tokenizer {path!r} is no dataset with a {TOKENIZER_FILE}",
            rule="the tokenizer is taken from a dataset of `raymega data prepare`",
            remedy="name the dataset that the run was trained on",
        )
    ]


def dtype_faults(dtype: str) -> Iterator[Fault]:
    """Yield the fault of a number format that is none of DTYPES."""
    if dtype in DTYPES:
        return
    rule = f"it is one of {', '.join(DTYPES)}"
    near = get_close_matches(dtype, DTYPES, n=1, cutoff=0.5)
    yield Fault(
        fact=f"--dtype {dtype!r}", rule=rule, remedy=f"use --dtype {next(iter(near), 'saved')}"
    )


def _weights_of(manifest: Manifest, model: ModelSection) -> dict[str, list[SavedBox]]:
    """Return the boxes of each weight of the model, by name.

    Raises:
        CheckpointError: A weight is missing, has another shape, or is not covered once by its boxes.
    """
    raise_faults(CheckpointError, coverage_faults(manifest))
    boxes = manifest.tensors()
    saved, faults = {}, []
    for tensor in (part for theirs in hf_tensors(model) for part in theirs.parts):
        held = boxes.get(f"{WEIGHTS}/{tensor.name}")
        shape = held[0].global_shape if held else None
        if held and shape == tensor.shape:
            saved[tensor.name] = held
            continue
        fact = f"has it as {shape}" if held else "has none"
        faults.append(
            Fault(
                fact=f"{manifest.key} {fact}: {tensor.name}",
                rule=f"by its model section it is {tensor.shape}",
                remedy="use the raymega that wrote it",
            )
        )
    raise_faults(CheckpointError, faults)
    return saved


def _values(
    checkpoint: Checkpoint,
    saved: Mapping[str, Sequence[SavedBox]],
    theirs: Sequence[HfTensor],
    target: str,
) -> Iterator[Array]:
    held, stack = "", np.empty(0)
    for tensor in theirs:
        # Read our parts; experts of one tensor follow one another, so it is read once.
        if tensor.parts[0].name != held:
            held, stack = tensor.parts[0].name, np.empty(0)
            parts = [checkpoint.read_bits_of(saved[part.name]) for part in tensor.parts]
            if tensor.is_of_all_experts:
                stack = tensor.of_experts(parts)
            else:
                stack = parts[0] if len(parts) == 1 else tensor.by_head(np.concatenate(parts))
        # Cut out the expert, or cut off the padded rows; then rescale (muP), convert and transpose.
        rows = stack[tensor.expert] if tensor.expert >= 0 else stack[: tensor.num_rows]
        source = saved[tensor.parts[0].name][0].dtype
        if tensor.divisor != 1.0:
            rows, source = recast(rows, source, "float64") / tensor.divisor, "float64"
        values = recast(rows, source, target)
        if target == "float16" and not np.isfinite(values).all():
            raise CheckpointError(
                fact=f"{tensor.name} has values that are not finite in float16",
                rule="float16 ends at 65504",
                remedy="export with --dtype bfloat16 or float32",
            )
        values = values.reshape(tensor.shape) if tensor.unfolded else values
        yield values.T if tensor.is_transposed else values


def _write_beside(folder: Path, config: dict[str, Any], beside: Mapping[str, bytes]) -> None:
    for name, content in beside.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
