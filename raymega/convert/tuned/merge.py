"""Merges checkpoints: adapters into their base or into one adapter, or the mean of several runs' weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from shlex import quote
from typing import Any, Literal

import numpy as np

from raymega.checkpoint.load.fingerprint import SOURCES
from raymega.checkpoint.load.init_from import WEIGHTS
from raymega.checkpoint.tools.handle import Checkpoint
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.schema import ModelSection
from raymega.convert.huggingface.exporter import dtype_faults
from raymega.convert.huggingface.extra_files import bring_along
from raymega.convert.native import occupied_faults, tuned_model_of, write_weights
from raymega.convert.number_formats import Array, common_format, recast
from raymega.convert.tuned.adapted_weights import (
    AdaptedWeights,
    AdapterPart,
    CombinationType,
    CombinedAdapters,
)
from raymega.errors import ConfigError, Fault, raise_faults
from raymega.plan.layers.global_tensor import GlobalTensor
from raymega.plan.memory.optimizer_state import AVERAGE
from raymega.plan.tensor_table import model_tensors, saved_tensors
from raymega.storage.registry import open_store, store_faults

NO_BASE = "none"
"""Base of a checkpoint that holds no adapters, as checkpoint.init_from has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """Result of a merge.

    Attributes:
        uri: Store that was written.
        key: Key of the manifest.
        dtype: Number format of the weights.
        num_parameters: Number of elements.
        num_adapters: Number of layers whose adapters were merged; 0 for a mean.
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
    combination_type: CombinationType | Literal[""] = "",
) -> Merged:
    """Write one checkpoint from several.

    Args:
        uris: URIs of checkpoints with adapters of one base, or of at least two without.
        out: Store to write, without checkpoints.
        created: Time of the merge: ISO 8601, UTC.
        base: Checkpoint that the adapters change; empty for the one that their runs started from.
        dtype: Number format of the result, or ``saved`` for that of the base or of the first checkpoint.
        weights: Weight of each checkpoint in the mean, relative to their sum, or factor on what each adapter adds;
            none are all 1.
        is_average: Whether to read the moving averages of the weights in their place; one checkpoint is enough then.
        combination_type: Way to combine adapters into one; empty merges them into their base.

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
    has_adapters = all(model.lora.r for model in models)
    # what to write: a base with adapters, one adapter, or a mean
    raise_faults(ConfigError, [*_weight_faults(uris, weights, may_be_negative=has_adapters)])
    shares = [*weights] or [1.0] * len(uris)
    values: AdaptedWeights | CombinedAdapters | _Mean
    if has_adapters:
        parts = [
            AdapterPart(checkpoint=each, model=model, weight=weight)
            for each, model, weight in zip(checkpoints, models, shares, strict=True)
        ]
        if combination_type:
            values = CombinedAdapters(parts, combination_type, base)
        else:
            values = AdaptedWeights(parts, base)
    else:
        faults = _mean_faults(uris, models, base, combination_type)
        raise_faults(ConfigError, [] if is_average and len(uris) == 1 else faults)
        values = _Mean(checkpoints, shares, models[0])
    target = values.dtype if dtype == "saved" else dtype
    tensors = saved_tensors(values.model)
    job: dict[str, Any] = {
        "model": values.model.model_dump(mode="json"),
        "precision": {"dtype": target},
    }
    if isinstance(values, CombinedAdapters):
        job |= {"checkpoint": values.start, SOURCES: values.sources}
    key = write_weights(
        store,
        tensors,
        lambda tensor: recast(values.of(tensor), "float64", target),
        dtype=target,
        job=job,
        created=created,
    )
    if not isinstance(values, CombinedAdapters):
        bring_along(values.first.store, values.first.manifest, store)
    return Merged(
        uri=store.uri, key=key, dtype=target, num_adapters=values.num_adapters,
        num_parameters=sum(tensor.num_parameters for tensor in tensors),
        sources=tuple(f"{each.store.uri}/{each.manifest.key}" for each in values.checkpoints),
    )  # fmt: skip


@contextmanager
def whole_weights(checkpoint: Checkpoint, base: str) -> Iterator[str]:
    """Yield the URI of a checkpoint's whole weights: its own, or a temporary merge of its adapters into ``base``.

    Args:
        checkpoint: Checkpoint of a model, or of adapters.
        base: URI of the weights under adapters; NO_BASE without them.
    """
    source = f"{checkpoint.store.uri}/{checkpoint.manifest.key}"
    if base == NO_BASE:
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="raymega-merge-") as place:
        created = checkpoint.manifest.created
        yield merge([source], f"{place}/merged", created=created, base=base).uri


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


class _Mean:
    """Weighted mean of the weights of several checkpoints, summed in float64."""

    num_adapters = 0

    def __init__(
        self, checkpoints: Sequence[Checkpoint], weights: Sequence[float], model: ModelSection
    ) -> None:
        self.first, self.checkpoints, self.model = checkpoints[0], tuple(checkpoints), model
        self._shares = [weight / sum(weights) for weight in weights]
        boxes, begin = self.first.manifest.boxes, f"{WEIGHTS}/"
        self.dtype = common_format({box.dtype for box in boxes if box.tensor.startswith(begin)})

    def of(self, tensor: GlobalTensor) -> Array:
        """Return the mean of a tensor, float64."""
        total = np.zeros(tensor.shape)
        for share, checkpoint in zip(self._shares, self.checkpoints, strict=True):
            total += share * checkpoint.read(f"{WEIGHTS}/{tensor.name}").astype(np.float64)
        return total


def _weight_faults(
    uris: Sequence[str], weights: Sequence[float], *, may_be_negative: bool
) -> Iterator[Fault]:
    is_wrong = bool(weights) and (len(weights) != len(uris) or not any(weights))
    if is_wrong or (weights and min(weights) < 0 and not may_be_negative):
        least = "" if may_be_negative else " of at least 0,"
        yield Fault(
            fact=f"--weight is {', '.join(f'{weight:g}' for weight in weights)}",
            rule=f"each of {len(uris)} checkpoints has one,{least} and some are not 0",
            remedy="give --weight once for each checkpoint, in their order",
        )


def _mean_faults(
    uris: Sequence[str], models: Sequence[ModelSection], base: str, combination_type: str
) -> list[Fault]:
    faults = []
    with_adapters = [uri for uri, model in zip(uris, models, strict=True) if model.lora.r]
    if with_adapters:
        faults.append(
            Fault(
                fact=f"{with_adapters[0]} holds adapters, and others of {len(uris)} checkpoints hold none",
                rule="a mean is of whole weights, and a mean of factors is none of their products",
                remedy=f"merge it into its base first: raymega checkpoint merge {quote(with_adapters[0])} --out MERGED",
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
    if combination_type and not with_adapters:
        faults.append(
            Fault(
                fact=f"--combination-type {combination_type} without adapters",
                rule="it combines adapters into one",
                remedy="leave --combination-type out",
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
