"""Merges checkpoints: adapters into the base that they were trained on, or the mean of several runs' weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from raymega.checkpoint.load.init_from import WEIGHTS, starting_manifest, upcycling_of
from raymega.checkpoint.tools.handle import Checkpoint
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.lora import LoraSection
from raymega.config.schema import CheckpointSection, ModelSection
from raymega.convert.huggingface.exporter import dtype_faults
from raymega.convert.huggingface.extra_files import bring_along
from raymega.convert.native import occupied_faults, tuned_model_of, write_weights
from raymega.convert.number_formats import Array, recast
from raymega.errors import ConfigError, Fault, raise_faults
from raymega.plan.adapters import adapter_names, is_adapter, is_target
from raymega.plan.layers.global_tensor import GlobalTensor
from raymega.plan.memory.optimizer_state import AVERAGE
from raymega.plan.tensor_table import model_tensors
from raymega.plan.upcycling import Upcycling
from raymega.storage.registry import open_store, store_faults

BASE = "checkpoint.init_from"


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """Result of a merge.

    Attributes:
        uri: Store that was written.
        key: Key of the manifest.
        dtype: Number format of the weights.
        num_parameters: Number of elements.
        num_adapters: Number of layers whose adapter was merged; 0 for a mean.
        sources: Checkpoints that were read, the base included.
    """

    uri: str
    key: str
    dtype: str
    num_parameters: int
    num_adapters: int
    sources: tuple[str, ...]


def merge(  # noqa: PLR0913  # the command is the one place that calls it
    uris: Sequence[str],
    out: str,
    *,
    created: str,
    base: str = "",
    dtype: str = "saved",
    weights: Sequence[float] = (),
    is_average: bool = False,
) -> Merged:
    """Write one checkpoint of weights from several.

    Args:
        uris: URIs of one checkpoint with adapters, or of at least two without.
        out: Store to write, without checkpoints.
        created: Time of the merge: ISO 8601, UTC.
        base: Checkpoint that the adapters change; empty for the one that the run started from.
        dtype: Number format of the result, or ``saved`` for that of the base or of the first checkpoint.
        weights: Weight of each checkpoint in the mean, relative to their sum; none are all 1.
        is_average: Whether to read the moving averages of the weights in their place; one checkpoint is enough then.

    Raises:
        ConfigError: The checkpoints do not fit together; nothing was written.
        CheckpointError: A checkpoint is not whole.
    """
    raise_faults(ConfigError, [*dtype_faults(dtype), *store_faults(out, field="--out")])
    store = open_store(out)
    raise_faults(ConfigError, occupied_faults(store))
    checkpoints = [open_checkpoint(uri) for uri in uris]
    if is_average:
        checkpoints = [_averaged(each, uri) for each, uri in zip(checkpoints, uris, strict=True)]
    models = [tuned_model_of(each.manifest) for each in checkpoints]
    if len(uris) == 1 and models[0].lora.r:
        raise_faults(ConfigError, _weight_faults(weights))
        values: _Adapted | _Mean = _adapted(checkpoints[0], models[0], base)
    else:
        faults = _mean_faults(uris, models, weights, base)
        raise_faults(ConfigError, [] if is_average and len(uris) == 1 else faults)
        values = _Mean(checkpoints, [*weights] or [1.0] * len(uris), models[0])
    target = values.dtype if dtype == "saved" else dtype
    tensors = model_tensors(values.model)
    job = {"model": values.model.model_dump(mode="json"), "precision": {"dtype": target}}
    key = write_weights(
        store,
        tensors,
        lambda tensor: recast(values.of(tensor), "float64", target),
        dtype=target,
        job=job,
        created=created,
    )
    bring_along(values.first.store, values.first.manifest, store)
    return Merged(
        uri=store.uri, key=key, dtype=target, num_adapters=values.num_adapters,
        num_parameters=sum(tensor.num_parameters for tensor in tensors),
        sources=tuple(f"{each.store.uri}/{each.manifest.key}" for each in values.checkpoints),
    )  # fmt: skip


def _averaged(checkpoint: Checkpoint, uri: str) -> Checkpoint:
    """Return a checkpoint as if it had been saved with the moving averages in the place of its weights.

    Frozen weights, and tensors that no update changes, have none and stay.
    """
    begin, boxes = f"{AVERAGE}/", checkpoint.manifest.boxes
    held = {box.tensor.removeprefix(begin) for box in boxes if box.tensor.startswith(begin)}
    if not held:
        raise ConfigError(
            fact=f"--ema, and {uri} holds no moving average",
            rule="a run keeps one with optimizer.ema_decay above 0",
            remedy="leave --ema out, or train with optimizer.ema_decay=0.999, for example",
        )
    kept = [
        replace(box, tensor=f"{WEIGHTS}/{box.tensor.removeprefix(begin)}")
        if box.tensor.startswith(begin)
        else box
        for box in boxes
        if box.tensor.removeprefix(f"{WEIGHTS}/") not in held
    ]
    return Checkpoint(checkpoint.store, replace(checkpoint.manifest, boxes=tuple(kept)))


def merged_model(model: ModelSection) -> ModelSection:
    """Return the model section without adapters, and with all of it trained."""
    return model.model_copy(update={"lora": LoraSection(), "freeze": (), "train": ()})


class _Adapted:
    """Weights of a base with adapters merged into them."""

    def __init__(
        self, base: Checkpoint, adapters: Checkpoint, model: ModelSection, upcycling: Upcycling
    ) -> None:
        self.first, self.checkpoints, self.model = base, (adapters, base), merged_model(model)
        self._upcycling = upcycling
        self._adapters, self._tuned = adapters, model
        self._saved = frozenset(adapters.names)
        self.dtype = base.dtype(base.names[0])
        self.num_adapters = sum(is_adapter(name) for name in self._saved if _is_weight(name)) // 2

    def of(self, tensor: GlobalTensor) -> NDArray[np.float64]:
        """Return the values of a tensor, float64: W + scale B A where it has an adapter."""
        name = f"{WEIGHTS}/{tensor.name}"
        if name in self._saved:
            values = self._adapters.read(name).astype(np.float64)
        else:  # as the run started with it
            values = self.first.read(name).astype(np.float64)
            values *= self._upcycling.factor(tensor.name)
        if not is_target(tensor, self._tuned):
            return values
        a, b = (
            self._adapters.read(f"{WEIGHTS}/{each}").astype(np.float64)
            for each in adapter_names(tensor.name.removesuffix(".weight"))
        )
        return values + self._tuned.lora.scale * (b @ a)


class _Mean:
    """Weighted mean of the weights of several checkpoints, summed in float64."""

    num_adapters = 0

    def __init__(
        self, checkpoints: Sequence[Checkpoint], weights: Sequence[float], model: ModelSection
    ) -> None:
        self.first, self.checkpoints, self.model = checkpoints[0], tuple(checkpoints), model
        self._shares = [weight / sum(weights) for weight in weights]
        self.dtype = self.first.dtype(f"{WEIGHTS}/{model_tensors(model)[0].name}")

    def of(self, tensor: GlobalTensor) -> Array:
        """Return the mean of a tensor, float64."""
        total = np.zeros(tensor.shape)
        for share, checkpoint in zip(self._shares, self.checkpoints, strict=True):
            total += share * checkpoint.read(f"{WEIGHTS}/{tensor.name}").astype(np.float64)
        return total


def _adapted(adapters: Checkpoint, model: ModelSection, base: str) -> _Adapted:
    """Return the weights of an adapter checkpoint and its base, under the names of this model."""
    values = adapters.manifest.job.get("checkpoint")
    told = values if isinstance(values, dict) else {}
    fields = {name: told[name] for name in CheckpointSection.model_fields if name in told}
    section = CheckpointSection.model_validate_json(json.dumps(fields))
    start = base or section.init_from
    if start == "none":
        raise ConfigError(
            fact=f"{adapters.store.uri} holds adapters, and its run had {BASE}=none",
            rule="adapters are merged into the weights that they were trained on",
            remedy="name these weights: --base URI",
        )
    store, manifest = open_checkpoint(start)
    renamed = starting_manifest(manifest, section, merged_model(model))
    found = Checkpoint(store, renamed)
    wanted = {t.name: t.shape for t in model_tensors(merged_model(model))}
    held = {box.tensor.removeprefix(f"{WEIGHTS}/"): box.global_shape for box in renamed.boxes}
    held |= {
        box.tensor.removeprefix(f"{WEIGHTS}/"): box.global_shape
        for box in adapters.manifest.boxes
        if _is_weight(box.tensor)
    }
    unlike = [name for name, shape in wanted.items() if held.get(name) != shape]
    if unlike:
        raise ConfigError(
            fact=f"{start} has no {unlike[0]} of shape {wanted[unlike[0]]}",
            rule="the base has every weight of the model that the adapters change",
            remedy=f"give the base of the adapters' run: --base {section.init_from}",
        )
    return _Adapted(found, adapters, model, upcycling_of(manifest, section, merged_model(model)))


def _weight_faults(weights: Sequence[float]) -> list[Fault]:
    if not weights:
        return []
    return [
        Fault(
            fact=f"--weight is {', '.join(f'{weight:g}' for weight in weights)}, and one checkpoint holds adapters",
            rule="weights are those of checkpoints in a mean; adapters have the scale that they were trained with",
            remedy="leave --weight out",
        )
    ]


def _mean_faults(
    uris: Sequence[str], models: Sequence[ModelSection], weights: Sequence[float], base: str
) -> list[Fault]:
    faults = []
    with_adapters = [uri for uri, model in zip(uris, models, strict=True) if model.lora.r]
    if with_adapters:
        faults.append(
            Fault(
                fact=f"{with_adapters[0]} holds adapters, beside {len(uris) - 1} other checkpoints",
                rule="a mean of factors is no mean of their products",
                remedy=f"merge each into its base first: raymega checkpoint merge {with_adapters[0]} --out MERGED",
            )
        )
    elif len(uris) < 2:
        faults.append(
            Fault(
                fact=f"{uris[0]} is one checkpoint, and holds no adapters",
                rule="a merge needs adapters, or at least two checkpoints",
                remedy="name a second checkpoint",
            )
        )
    if base and not with_adapters:
        faults.append(
            Fault(
                fact=f"--base {base} without adapters",
                rule="a base is what adapters change",
                remedy="leave --base out",
            )
        )
    if weights and (len(weights) != len(uris) or min(weights) < 0 or not sum(weights)):
        faults.append(
            Fault(
                fact=f"--weight is {', '.join(f'{weight:g}' for weight in weights)}",
                rule=f"each of {len(uris)} checkpoints has one, of at least 0, and some are above 0",
                remedy="give --weight once for each checkpoint, in their order",
            )
        )
    unlike = [
        uri
        for uri, model in zip(uris, models, strict=True)
        if _sizes(model) != _sizes(models[0]) and not with_adapters
    ]
    if unlike:
        faults.append(
            Fault(
                fact=f"{unlike[0]} has another model section than {uris[0]}",
                rule="a mean is of weights of one model",
                remedy="name checkpoints of runs of one model",
            )
        )
    return faults


def _sizes(model: ModelSection) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in model_tensors(model)}


def _is_weight(saved: str) -> bool:
    return saved.startswith(f"{WEIGHTS}/")
