"""LoRA's adapters of linear layers: y = W x + scale B A x, with W frozen.

An adapter is cut as its layer is. Behind a column-parallel W, A is whole on every rank and B is cut, so
that r features a token are gathered. Behind a row-parallel W, A is cut, and r features a token are summed.
`plan/adapters.py` has the names and cuts of the factors, `magnitudes.py` what DoRA adds.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raymega.config.lora import LoraSection
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.core.dropout import TokenKeys, dropout, place_key
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.parallel.tensor_parallel.magnitudes import rescaled, row_norms
from raymega.plan.adapters import adapter_names, magnitude_name

Product = Callable[[Tensor, Tensor], Tensor]
"""Linear layer of `layers.py` on an input and a weight."""


@dataclass(slots=True)
class AdapterSettings:
    """Settings of all adapters of a stage.

    Attributes:
        scale: Factor on an adapter's output.
        rate: Share of the input features to drop in training.
        seed: Seed of the dropout.
        keys: Keys of the tokens of the micro-batch whose forward runs; None drops nothing.
        is_off: True while the layers compute without their adapters.
    """

    scale: float = 1.0
    rate: float = 0.0
    seed: int = 0
    keys: TokenKeys | None = None
    is_off: bool = False


def adapter_settings(lora: LoraSection, seed: int) -> AdapterSettings:
    """Return the settings of a job's adapters."""
    scale = lora.scale if lora.r else 1.0
    return AdapterSettings(scale=scale, rate=lora.lora_dropout, seed=seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearPlace:
    """Products of an adapter, as its layer is cut.

    Attributes:
        first: Product with A.
        second: Product with B.
        base: Product with the layer's own weight.
        is_stream: True where the input is the rank's part of the residual stream, false where it is
            the rank's features of all tokens.
        inner: Ranks that hold the weight's other input features; None where each rank has all.
    """

    first: Product
    second: Product
    base: Product
    is_stream: bool
    inner: Group | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseLayer:
    """Linear layer under one adapter, or one part of a fused layer.

    Attributes:
        weight: W [out, in], this rank's part; without DoRA that of all parts.
        bias: Bias [out] that the output has; None without.
        output: Output of the layer without its adapter.
    """

    weight: Tensor
    bias: Tensor | None
    output: Tensor


class Adapter(nn.Module):
    """The adapter of one linear layer, or of one part of a fused layer."""

    def __init__(
        self,
        a: ShardedParameter,
        b: ShardedParameter,
        settings: AdapterSettings,
        place: LinearPlace,
        magnitude: ShardedParameter | None = None,
    ) -> None:
        super().__init__()
        self.a, self.b, self.magnitude = a, b, magnitude
        self.settings, self.place = settings, place
        self.place_key = place_key(settings.seed, a.spec.name)

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the layer's output with the adapter's, for x as the layer gets it."""
        dropped, y = self._dropped(x), base.output
        inner = self.place.first(dropped, self.a)
        added = self.place.second(inner * self.settings.scale, self.b)
        if self.magnitude is None:
            return y + added
        # DoRA rescales W x too, of the input that was dropped; the bias is left out
        if dropped is not x:
            own = self.place.base(dropped, base.weight)
        else:
            own = y if base.bias is None else y - base.bias
        norms = row_norms(base.weight, self.a, self.b, self.settings.scale, self.place.inner)
        scaled = rescaled(own + added, self.magnitude, norms)
        if dropped is not x:
            return y - own + scaled
        return scaled if base.bias is None else scaled + base.bias

    def _dropped(self, x: Tensor) -> Tensor:
        """Drop input features, by the number that each has in the whole layer."""
        settings = self.settings
        if settings.keys is None or not settings.rate:
            return x
        keys = settings.keys.own if self.place.is_stream else settings.keys.everywhere
        first = self.a.spec.pieces[0].box.offset[-1]
        return dropout(x, keys + self.place_key, rate=settings.rate, first=first)


class Adapters(nn.Module):
    """Adapters of the linear layers that are fused into one; some of them may have none."""

    def __init__(
        self, parts: Sequence[Adapter | None], widths: Sequence[int], settings: AdapterSettings
    ) -> None:
        super().__init__()
        self.settings = settings
        self.parts = nn.ModuleList(part for part in parts if part is not None)
        self.is_rescaled = any(part is not None and part.magnitude is not None for part in parts)
        self.has_part, self.widths = [part is not None for part in parts], list(widths)

    def forward(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the layer's output y with the adapters' outputs; both have the parts side by side in the last dim.

        Args:
            x: Input of the layer.
            y: Output of the layer without adapters.
            weight: Weight of all parts, [out, in], frozen.
            bias: Bias that y has, [out], frozen; None without.
        """
        if self.settings.is_off:
            return y
        # weights and biases of the parts, which DoRA alone reads
        weights: Sequence[Tensor] = [weight] * len(self.widths)
        biases: Sequence[Tensor | None] = [None] * len(self.widths)
        if self.is_rescaled:
            weights = weight.detach().split(self.widths)
            biases = biases if bias is None else bias.detach().split(self.widths)
        parts, outputs = iter(self.parts), y.split(self.widths, dim=-1)
        layers = [
            BaseLayer(weight=rows, bias=each, output=own)
            for rows, each, own in zip(weights, biases, outputs, strict=True)
        ]
        results = [
            next(parts)(x, layer) if has_part else layer.output
            for layer, has_part in zip(layers, self.has_part, strict=True)
        ]
        return results[0] if len(results) == 1 else torch.cat(results, dim=-1)


def make_adapters(  # what layers have apart
    make: Callable[..., ShardedParameter],
    table: Container[str],
    names: Sequence[str],
    widths: Sequence[int],
    settings: AdapterSettings,
    place: LinearPlace,
) -> Adapters | None:
    """Return the adapters of the fused layers ``names``; None if none of them has one.

    Args:
        make: Function that makes a parameter from a tensor's name.
        table: Names of the stage's tensors.
        names: Names of the layers.
        widths: Output features of each layer on this rank.
        settings: Settings of the stage's adapters.
        place: Cut of the fused layer.
    """
    parts: list[Adapter | None] = []
    for name in names:
        (a, b), magnitude = adapter_names(name), magnitude_name(name)
        if a not in table:
            parts.append(None)
            continue
        norms = make(magnitude) if magnitude in table else None
        parts.append(Adapter(make(a), make(b), settings, place, norms))
    return Adapters(parts, widths, settings) if any(parts) else None
