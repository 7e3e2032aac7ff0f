"""Exports a run's LoRA adapters in the format of Hugging Face's PEFT."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from shlex import quote
from typing import Any

from raymega.checkpoint.load.init_from import WEIGHTS
from raymega.checkpoint.tools.handle import Checkpoint
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.schema import ModelSection
from raymega.convert.native import tuned_model_of
from raymega.convert.number_formats import Array
from raymega.convert.output_folder import folder_faults, new_folder
from raymega.convert.safetensors_files import NewTensor, write_file
from raymega.convert.tuned.peft_names import (
    CONFIG,
    WEIGHTS_FILE,
    adapter_tensors,
    expression_faults,
    linear_modules,
    target_modules,
)
from raymega.errors import ConfigError, Fault, raise_faults
from raymega.plan.adapters import adapter_names, is_adapter
from raymega.plan.layers.family_parts import parts_of
from raymega.plan.tensor_table import saved_tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftExport:
    """Result of an export.

    Attributes:
        folder: Folder that was written.
        key: Key of the manifest that was exported.
        step: Number of completed steps of the run.
        num_adapters: Number of adapted layers.
        num_parameters: Number of elements of their tensors.
        files: Names of all files.
    """

    folder: Path
    key: str
    step: int
    num_adapters: int
    num_parameters: int
    files: tuple[str, ...]


def peft_export(uri: str, folder: Path, *, base: str = "") -> PeftExport:
    """Write the adapters of a checkpoint to ``folder``, with PEFT's config.

    Args:
        uri: URI of a run's folder, of one of its checkpoints or of a manifest.
        folder: Folder to write, which must not exist or must be empty.
        base: Folder or hub name of transformers' model that PEFT loads as the base.

    Raises:
        ConfigError: The checkpoint has no adapters, or some that PEFT cannot express; nothing was written.
    """
    raise_faults(ConfigError, folder_faults(folder))
    checkpoint = open_checkpoint(uri)
    model = tuned_model_of(checkpoint.manifest)
    raise_faults(ConfigError, _faults(uri, model))
    # PEFT's names of the adapted modules, in our order
    saved, modules = set(checkpoint.names), linear_modules(model)
    adapted = {
        theirs: ours
        for theirs, ours in modules.items()
        if f"{WEIGHTS}/{adapter_names(ours)[0]}" in saved
    }
    places = [
        (name, f"{WEIGHTS}/{own}")
        for theirs, ours in adapted.items()
        for name, own in adapter_tensors(theirs, ours, use_dora=model.lora.use_dora).items()
    ]
    config = _config(model, target_modules(list(adapted), list(modules)), base)
    with new_folder(folder) as partial:
        write_file(
            partial / WEIGHTS_FILE,
            [
                NewTensor(name=name, dtype=checkpoint.dtype(ours), shape=checkpoint.shape(ours))
                for name, ours in places
            ],
            _values(checkpoint, [ours for _, ours in places]),
        )
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (partial / CONFIG).write_text(text, encoding="utf-8")
    return PeftExport(
        folder=folder, key=checkpoint.manifest.key, step=checkpoint.step, num_adapters=len(adapted),
        num_parameters=sum(_size(checkpoint.shape(ours)) for _, ours in places),
        files=tuple(sorted(path.name for path in folder.iterdir())),
    )  # fmt: skip


def _values(checkpoint: Checkpoint, names: list[str]) -> Iterator[Array]:
    boxes = checkpoint.manifest.tensors()
    for name in names:
        yield checkpoint.read_bits_of(boxes[name])


def _size(shape: tuple[int, ...]) -> int:
    return prod(shape)


def _config(model: ModelSection, targets: list[str], base: str) -> dict[str, Any]:
    lora = model.lora
    return {
        "peft_type": "LORA",
        "task_type": _task_of(model),
        "base_model_name_or_path": base or None,
        "bias": "none",
        "fan_in_fan_out": model.family == "gpt2",
        "inference_mode": True,
        "lora_alpha": int(lora.lora_alpha) if lora.lora_alpha.is_integer() else lora.lora_alpha,
        "lora_dropout": lora.lora_dropout,
        "modules_to_save": None,
        "r": lora.r,
        "target_modules": targets,
        "use_dora": lora.use_dora,
        "use_rslora": lora.use_rslora,
    }


def _task_of(model: ModelSection) -> str | None:
    """Return PEFT's name of what the model is for, by which its Auto classes choose transformers'; None of others."""
    parts = parts_of(model)
    if parts.is_encoder_decoder:
        return "SEQ_2_SEQ_LM"
    return "CAUSAL_LM" if parts.is_causal and not model.head.is_on else None


def _faults(uri: str, model: ModelSection) -> Iterator[Fault]:
    if not model.lora.r:
        yield Fault(
            fact=f"{uri} has no adapters",
            rule="PEFT's format holds adapters of a run with model.lora.r above 0",
            remedy=f"use raymega convert hf-export {quote(uri)}",
        )
        return
    yield from expression_faults(model)
    # state of routers is the base's as long as nothing moves it
    is_moved = model.moe.expert_bias and model.moe.expert_bias_update_rate > 0
    own = [t for t in saved_tensors(model) if not is_adapter(t.name)]
    others = [t.name for t in own if t.is_trained or (is_moved and t.name.endswith(".router.bias"))]
    if others:
        yield Fault(
            fact=f"{uri} also holds {others[0]}, which is no adapter",
            rule="the exported file has adapters alone",
            remedy="merge all of it: raymega checkpoint merge URI --out MERGED, then raymega convert hf-export",
        )
