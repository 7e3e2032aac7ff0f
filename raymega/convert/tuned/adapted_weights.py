"""Weights of adapters put together: merged into the base that they change, or combined into one adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import copysign, sqrt
from shlex import quote
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from raymega.checkpoint.load.adapted_base import AdaptedBase, open_base, start_of
from raymega.checkpoint.load.fingerprint import BASE, fingerprint_at
from raymega.checkpoint.load.init_from import WEIGHTS
from raymega.checkpoint.tools.handle import Checkpoint
from raymega.config.lora import LoraSection
from raymega.config.schema import ModelSection
from raymega.convert.number_formats import common_format, recast
from raymega.convert.tuned.coded_base import through_blocks
from raymega.errors import ConfigError, Fault, raise_faults
from raymega.plan.adapters import LORA_A, adapter_names, is_adapter, linear_of, magnitude_name
from raymega.plan.layers.base_blocks import is_in_blocks
from raymega.plan.layers.global_tensor import GlobalTensor

CombinationType = Literal["cat", "linear"]
COMBINATION_TYPES = ("cat", "linear")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterPart:
    """Part of a sum of adapters.

    Attributes:
        checkpoint: Checkpoint of the adapter.
        model: Model with it.
        weight: Factor on what it adds.
    """

    checkpoint: Checkpoint
    model: ModelSection
    weight: float

    @property
    def names(self) -> set[str]:
        """Names of the tensors that it holds, optimizer state left out."""
        begin = f"{WEIGHTS}/"
        return {n.removeprefix(begin) for n in self.checkpoint.names if n.startswith(begin)}

    @property
    def uri(self) -> str:
        """URI of the checkpoint's manifest."""
        return f"{self.checkpoint.store.uri}/{self.checkpoint.manifest.key}"

    def read(self, name: str) -> NDArray[np.float64]:
        """Return one of its tensors, float64."""
        return self.checkpoint.read(f"{WEIGHTS}/{name}").astype(np.float64)

    def factors(self, linear: str) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """Return A and B of a linear layer, or None where it has none of this adapter."""
        names = adapter_names(linear)
        return (self.read(names[0]), self.read(names[1])) if names[0] in self.names else None


def merged_model(model: ModelSection) -> ModelSection:
    """Return the model section without adapters, and with all of it trained."""
    return model.model_copy(update={"lora": LoraSection(), "freeze": (), "train": ()})


class AdaptedWeights:
    """Weights of a base with adapters merged into them: W + the sum of weight scale B A, with DoRA's norms.

    Args:
        parts: Adapters, all of one base.
        base: URI of the base; empty for that of their runs.

    Raises:
        ConfigError: The adapters do not fit each other or the base.
    """

    def __init__(self, parts: Sequence[AdapterPart], base: str) -> None:
        raise_faults(ConfigError, [*_faults(parts, base)])
        self._parts = parts
        # each of them was trained on these weights
        self._base, *_ = (_open(part, base) for part in parts)
        self.first = self._base.checkpoint
        self.checkpoints = (*(part.checkpoint for part in parts), self.first)
        self.model = merged_model(parts[0].model)
        self.dtype = common_format({box.dtype for box in self.first.manifest.boxes})
        self.num_adapters = len(_linears(parts))

    def of(self, tensor: GlobalTensor) -> NDArray[np.float64]:
        """Return the values of a tensor, float64."""
        first = self._parts[0]
        if tensor.name in first.names:  # trained whole beside the adapters
            values = first.read(tensor.name)
        else:  # as the run started with it
            values = self.first.read(f"{WEIGHTS}/{tensor.name}").astype(np.float64)
            values *= self._base.upcycling.factor(tensor.name)
            values = self._as_trained(tensor, values)
        linear = tensor.name.removesuffix(".weight")
        for part in self._parts:
            factors = part.factors(linear)
            if factors is not None:
                a, b = factors
                values = values + part.weight * part.model.lora.scale * (b @ a)
        if magnitude_name(linear) not in first.names:
            return values
        norms = np.linalg.norm(values, axis=-1).clip(np.finfo(np.float64).tiny)
        return (first.read(magnitude_name(linear)) / norms)[..., None] * values

    def _as_trained(self, tensor: GlobalTensor, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return a weight of the base as the runs computed with it: through the codes that they held, if any."""
        base_dtype = self._parts[0].model.lora.base_dtype
        if not is_in_blocks(tensor, base_dtype):
            return values
        told = self._parts[0].checkpoint.manifest.job.get("precision")
        dtype = told.get("dtype", "float32") if isinstance(told, dict) else "float32"
        # as the run read it, in its compute dtype, and as it decoded it
        held = recast(recast(values, "float64", dtype), dtype, "float64")
        coded = through_blocks(held, base_dtype)
        return recast(recast(coded, "float64", dtype), dtype, "float64")


class CombinedAdapters:
    """Adapter of scale 1 made of several ones, as by PEFT's add_weighted_adapter.

    ``cat`` puts the factors side by side: it adds just what all of them add, and its rank is the sum of theirs.
    ``linear`` adds up the factors, each with the root of its weight: of one rank, and another function.

    Args:
        parts: Adapters, all of one base.
        kind: Way to combine them.
        base: URI of the base; empty for that of their runs.

    Raises:
        ConfigError: The adapters do not fit each other or the base.
    """

    def __init__(self, parts: Sequence[AdapterPart], kind: CombinationType, base: str) -> None:
        faults = [*_faults(parts, base)] or [*_combination_faults(parts, kind)]
        raise_faults(ConfigError, faults)
        self._parts, self._kind, first = parts, kind, parts[0]
        (store, manifest), *_ = (_open(part, base).checkpoint for part in parts)
        ranks = [part.model.lora.r for part in parts]
        self.rank = sum(ranks) if kind == "cat" else ranks[0]
        targets = dict.fromkeys(t for part in parts for t in part.model.lora.target_modules)
        lora = LoraSection(
            r=self.rank, lora_alpha=float(self.rank), target_modules=tuple(targets),
            lora_dropout=first.model.lora.lora_dropout, base_dtype=first.model.lora.base_dtype,
        )  # fmt: skip
        self.model = first.model.model_copy(update={"lora": lora})
        self.start: dict[str, Any] = start_of(first.checkpoint.manifest)
        # this very checkpoint: a run may be trained further
        self.start["init_from"] = f"{store.uri}/{manifest.key}"
        self.sources = {BASE: fingerprint_at(self.start["init_from"])}
        self.first = first.checkpoint
        self.checkpoints = tuple(part.checkpoint for part in parts)
        self.dtype = self.first.dtype(f"{WEIGHTS}/{min(filter(is_adapter, first.names))}")
        self.num_adapters = len(_linears(parts))

    def of(self, tensor: GlobalTensor) -> NDArray[np.float64]:
        """Return the values of a tensor, float64: a factor, or a state of the first adapter's run."""
        if not is_adapter(tensor.name):
            return self._parts[0].read(tensor.name)
        linear, is_a = linear_of(tensor.name).removesuffix(".weight"), tensor.name.endswith(LORA_A)
        total, at = np.zeros(tensor.shape), 0
        # A has the rank in its last dim but one, B in its last
        by_rank = total if is_a else total.swapaxes(-1, -2)
        for part in self._parts:
            factors = part.factors(linear)
            if factors is None:
                continue
            factor = factors[0] if is_a else factors[1].swapaxes(-1, -2)
            weight, rank = part.weight * part.model.lora.scale, part.model.lora.r
            if self._kind == "cat":
                by_rank[..., at : at + rank, :] = factor * (weight if is_a else 1.0)
                at += rank
            else:
                by_rank += factor * (copysign(sqrt(abs(weight)), weight if is_a else 1.0))
        return total


def _linears(parts: Sequence[AdapterPart]) -> set[str]:
    return {linear_of(name) for part in parts for name in part.names if is_adapter(name)}


def _open(part: AdapterPart, base: str) -> AdaptedBase:
    start = start_of(part.checkpoint.manifest)
    model = merged_model(part.model)
    own = start.get("init_from", "none")
    remedy = f"give the base of the adapters' run: --base {own}"
    if not base and own == "none":
        remedy = "name these weights: --base URI"
    elif not base:
        remedy = "name its copy: --base URI"
    return open_base(
        part.checkpoint, model, start=start | ({"init_from": base} if base else {}), remedy=remedy
    )


def _faults(parts: Sequence[AdapterPart], base: str) -> Iterator[Fault]:
    """Yield the faults of adapters that cannot be added up."""
    if len(parts) == 1 and parts[0].weight == 1:
        return
    dora = [part.uri for part in parts if part.model.lora.use_dora]
    if dora:
        yield Fault(
            fact=f"{dora[0]} has model.lora.use_dora=true",
            rule="its magnitudes are norms of one adapter's sum with the base, with its whole weight",
            remedy="merge it alone, without --weight",
        )
    starts = [start_of(part.checkpoint.manifest).get("init_from", "none") for part in parts]
    unlike = [n for n, start in enumerate(starts) if start != starts[0]]
    if unlike and not base:
        yield Fault(
            fact=f"{parts[0].uri} changes {starts[0]}, and {parts[unlike[0]].uri} changes {starts[unlike[0]]}",
            rule="adapters that are added up change the same weights",
            remedy="name these weights if both are copies of them: --base URI",
        )
    for part in parts[1:]:
        if merged_model(part.model) != merged_model(parts[0].model):
            yield Fault(
                fact=f"{part.uri} has another model section than {parts[0].uri}",
                rule="adapters that are added up are of one model, whatever their model.lora",
                remedy="name adapters of one base",
            )
    formats = [part.model.lora.base_dtype for part in parts]
    if len(set(formats)) > 1:
        yield Fault(
            fact=f"adapters over bases with model.lora.base_dtype={', '.join(formats)}",
            rule="adapters that are added up change the same weights, and codes are other weights than their source",
            remedy="merge each into its base, then take the mean",
        )
    beside = [name for part in parts for name in sorted(part.names) if not _is_common(name)]
    if beside and len(parts) > 1:
        yield Fault(
            fact=f"one of {len(parts)} checkpoints also holds {beside[0]}, which is no adapter",
            rule="of what was trained whole, a model has one",
            remedy=f"merge each into the base, then take the mean: raymega checkpoint merge {quote(parts[0].uri)} --out MERGED",
        )


def _combination_faults(parts: Sequence[AdapterPart], kind: CombinationType) -> Iterator[Fault]:
    ranks = [part.model.lora.r for part in parts]
    if kind == "linear" and len(set(ranks)) > 1:
        yield Fault(
            fact=f"--combination-type linear of adapters with model.lora.r={', '.join(map(str, ranks))}",
            rule="factors are added up element by element, so their ranks are equal",
            remedy="give --combination-type cat",
        )
    if any(part.model.lora.use_dora for part in parts):
        yield Fault(
            fact="--combination-type with model.lora.use_dora=true",
            rule="an adapter of scale 1 from factors has no magnitudes",
            remedy="leave --combination-type out, which merges the adapter into its base",
        )
    trained = [name for part in parts for name in sorted(part.names) if not _is_common(name)]
    if trained and len(parts) == 1:
        yield Fault(
            fact=f"{parts[0].uri} also holds {trained[0]}, which is no adapter",
            rule="a combined adapter has factors alone",
            remedy="leave --combination-type out, which merges all of it into the base",
        )


def _is_common(name: str) -> bool:
    """Return whether adapters may have a tensor in common: factors, and routers' state, which is the base's."""
    return is_adapter(name) or name.endswith((".router.bias", ".router.counts"))
