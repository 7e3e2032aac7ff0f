"""Imports LoRA adapters from a folder of Hugging Face's PEFT, for a run on any grid to start with."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from raymega.checkpoint.load.fingerprint import BASE, SOURCES, fingerprint_at
from raymega.checkpoint.load.init_from import WEIGHTS
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.lora import LoraSection
from raymega.config.schema import ModelSection
from raymega.convert.native import model_of, occupied_faults, write_weights
from raymega.convert.number_formats import Array, common_format, recast
from raymega.convert.quantized_weights import common_dtype
from raymega.convert.safetensors_files import WeightEntry, read_header
from raymega.convert.tuned.adapted_weights import merged_model
from raymega.convert.tuned.peft_names import CONFIG, WEIGHTS_FILE, adapter_tensors, linear_modules
from raymega.errors import ConfigError, Fault, first_few, raise_faults
from raymega.plan.adapters import adapter_names
from raymega.plan.layers.global_tensor import GlobalTensor
from raymega.plan.tensor_table import saved_tensors
from raymega.storage.registry import open_store, store_faults

LEFT_OUT: Mapping[str, object] = {
    "bias": "none", "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None,
    "lora_bias": False, "layer_replication": None, "target_parameters": None, "trainable_token_indices": None,
    "kasa_config": None, "alora_invocation_tokens": None, "arrow_config": None,
}  # fmt: skip
"""Fields of PEFT's config whose other values change what an adapter computes, with the value that is read."""
BY_TOKEN = ("alora_invocation_tokens", "arrow_config")
"""Fields of LEFT_OUT that choose by its tokens where an adapter acts, so that no merge holds it."""
INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Values of init_lora_weights that draw the factors and leave the base as it is."""
CHANGED_BASE = ("pissa", "olora", "corda", "lora_ga")
"""Beginnings of values whose factors start as a part that the base loses; PEFT can give it back."""
MERGE = "merge the adapter with PEFT, then use raymega convert hf-import"


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftImport:
    """Result of an import.

    Attributes:
        uri: Store that was written.
        key: Key of the manifest.
        model: Model section, with its adapters.
        base: Checkpoint of the base.
        dtype: Number format of the factors.
        num_adapters: Number of adapted layers.
    """

    uri: str
    key: str
    model: ModelSection
    base: str
    dtype: str
    num_adapters: int


def peft_import(folder: Path, base: str, uri: str, *, created: str) -> PeftImport:
    """Convert the adapters in ``folder`` to a checkpoint in the store at ``uri``.

    Args:
        folder: Folder with adapter_config.json and adapter_model.safetensors.
        base: Checkpoint of the model that the adapters change.
        uri: URI of a store without checkpoints.
        created: Time of the import: ISO 8601, UTC.

    Raises:
        ConfigError: The adapters do not fit the base, or compute what raymega has not; nothing was written.
    """
    raise_faults(ConfigError, store_faults(uri, field="--out"))
    store = open_store(uri)
    raise_faults(ConfigError, occupied_faults(store))
    config = _read_config(folder)
    started = open_checkpoint(base)
    model = merged_model(model_of(started.manifest))
    # factors by our names
    entries, modules = _entries(folder), linear_modules(model)
    use_dora = bool(config.get("use_dora", False))
    ours = {
        name: entries[given]
        for theirs, linear in modules.items()
        for given, name in adapter_tensors(theirs, linear, use_dora=use_dora).items()
        if given in entries
    }
    if len(ours) != len(entries):
        known = {id(entry) for entry in ours.values()}
        left = [name for name, entry in entries.items() if id(entry) not in known]
        raise ConfigError(
            fact=f"{folder / WEIGHTS_FILE} has {first_few(left, 2)}, and {base} no such layer",
            rule="every factor belongs to a linear layer of the base",
            remedy="name the base of the adapters: --base URI",
        )
    if not ours:
        raise ConfigError(
            fact=f"{folder / WEIGHTS_FILE} has no tensor",
            rule="an adapter has at least one layer",
            remedy="save the adapter again with PEFT",
        )
    adapted = [linear for linear in modules.values() if adapter_names(linear)[0] in ours]
    model = model.model_copy(update={"lora": _lora(config, adapted, list(modules.values()))})
    # routers' state comes from the base
    tensors = saved_tensors(model)
    raise_faults(ConfigError, _shape_faults(folder, tensors, ours))
    states = {f"{WEIGHTS}/{each.name}" for each in tensors if not each.is_trained}
    dtype = common_format({common_dtype(ours), *map(started.dtype, states)})

    def values(tensor: GlobalTensor) -> Array:
        if tensor.name not in ours:
            return recast(started.read(f"{WEIGHTS}/{tensor.name}").astype("f8"), "float64", dtype)
        entry = ours[tensor.name]
        return recast(entry.read(), entry.dtype, dtype)

    uri = f"{started.store.uri}/{started.manifest.key}"
    job = {
        "model": model.model_dump(mode="json"),
        "precision": {"dtype": dtype},
        # this very checkpoint: a run may be trained further
        "checkpoint": {"init_from": uri},
        SOURCES: {BASE: fingerprint_at(uri)},
    }
    key = write_weights(store, tensors, values, dtype=dtype, job=job, created=created)
    return PeftImport(
        uri=store.uri, key=key, model=model, base=base, dtype=dtype, num_adapters=len(adapted)
    )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            fact=f"{path} cannot be read ({error})",
            rule=f"a folder of PEFT has {CONFIG} and {WEIGHTS_FILE}",
            remedy="name the folder that save_pretrained wrote",
        ) from error
    raise_faults(ConfigError, _config_faults(path, config))
    return dict(config)


def _config_faults(path: Path, config: Mapping[str, Any]) -> Iterator[Fault]:
    if config.get("peft_type") != "LORA":
        yield Fault(
            fact=f"{path} has peft_type={config.get('peft_type')}",
            rule="adapters of type LORA are read",
            remedy=MERGE,
        )
    init = config.get("init_lora_weights", True)
    name = str(init).lower()
    if init not in INITS and name not in INITS:
        yield Fault(
            fact=f"{path} has init_lora_weights={init}",
            rule=f"the base stays as it is: init_lora_weights is one of {', '.join(map(str, INITS))}",
            remedy="save it for the unchanged base: model.save_pretrained(FOLDER, "
            f"path_initial_model_for_weight_conversion=FOLDER_BEFORE_TRAINING); or {MERGE}"
            if name.startswith(CHANGED_BASE)
            else MERGE,
        )
    for field, plain in LEFT_OUT.items():
        value = config.get(field, plain)
        if value != plain and value:
            yield Fault(
                fact=f"{path} has {field}={value}",
                rule=f"adapters with {field}={plain} are read",
                remedy=f"train an adapter without {field}" if field in BY_TOKEN else MERGE,
            )


def _entries(folder: Path) -> dict[str, WeightEntry]:
    if not (folder / WEIGHTS_FILE).is_file():
        raise ConfigError(
            fact=f"{folder} has no {WEIGHTS_FILE}",
            rule="factors are read from safetensors; pickled files are not trusted",
            remedy="save the adapter with safe_serialization=True",
        )
    return read_header(folder / WEIGHTS_FILE)


def _lora(config: Mapping[str, Any], adapted: list[str], linears: list[str]) -> LoraSection:
    """Return the section: a kind of layer that is adapted in all blocks by its short name, others in full."""
    of_kind: dict[str, list[str]] = defaultdict(list)
    for name in linears:
        if name.startswith("layers."):
            of_kind[name.split(".", 2)[2]].append(name)
    targets: list[str] = []
    for kind, names in of_kind.items():
        found = [name for name in names if name in adapted]
        targets += [kind] if found == names else found
    try:
        return LoraSection(
            r=config["r"],
            lora_alpha=float(config["lora_alpha"]),
            use_rslora=bool(config.get("use_rslora", False)),
            use_dora=bool(config.get("use_dora", False)),
            lora_dropout=float(config.get("lora_dropout", 0.0)),
            target_modules=tuple(targets),
        )
    except (KeyError, TypeError, ValidationError) as error:
        raise ConfigError(
            fact=f"{CONFIG} has r={config.get('r')}, lora_alpha={config.get('lora_alpha')}",
            rule="both are numbers above 0",
            remedy="save the adapter again with PEFT",
        ) from error


def _shape_faults(
    folder: Path, tensors: list[GlobalTensor], ours: Mapping[str, WeightEntry]
) -> Iterator[Fault]:
    # such as a router's, a head's or a vision tower's
    left = sorted(ours.keys() - {each.name for each in tensors})
    if left:
        yield Fault(
            fact=f"{folder / WEIGHTS_FILE} adapts {first_few(left, 2)}",
            rule="adapters are of linear layers inside the language model's blocks",
            remedy=MERGE,
        )
    for tensor in (each for each in tensors if each.is_trained):
        found = ours[tensor.name].shape if tensor.name in ours else "nothing"
        if found != tensor.shape:
            yield Fault(
                fact=f"{folder / WEIGHTS_FILE} has {found} for {tensor.name}",
                rule=f"by {CONFIG} and the base it is {tensor.shape}",
                remedy="name the base of the adapters: --base URI",
            )
