"""LoRA's adapters of linear layers: y = W x + scale B A x, with W frozen.

An adapter is cut as its layer is. Behind a column-parallel W, A is whole on every rank and B is cut, so
that r features a token are gathered. Behind a row-parallel W, A is cut, and r features a token are summed.
`plan/adapters.py` has the names and cuts of the factors.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raymega.config.lora import LoraSection
from raymega.parallel.core.dropout import TokenKeys, dropout, place_key
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.plan.adapters import adapter_names

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
        is_stream: True where the input is the rank's part of the residual stream, false where it is
            the rank's features of all tokens.
    """

    first: Product
    second: Product
    is_stream: bool


class Adapter(nn.Module):
    """The adapter of one linear layer, or of one part of a fused layer."""

    def __init__(
        self,
        a: ShardedParameter,
        b: ShardedParameter,
        settings: AdapterSettings,
        place: LinearPlace,
    ) -> None:
        super().__init__()
        self.a, self.b = a, b
        self.settings, self.place = settings, place
        self.place_key = place_key(settings.seed, a.spec.name)

    def forward(self, x: Tensor) -> Tensor:
        """Return scale B A x, for x as the layer gets it and a result as the layer returns it."""
        inner = self.place.first(self._dropped(x), self.a)
        return self.place.second(inner * self.settings.scale, self.b)

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
        self.has_part, self.widths = [part is not None for part in parts], list(widths)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return y with the adapters' outputs added; both have the parts side by side in the last dim."""
        if self.settings.is_off:
            return y
        if len(self.widths) == 1:
            return y + self.parts[0](x)
        parts, outputs = iter(self.parts), y.split(self.widths, dim=-1)
        return torch.cat(
            [
                own + next(parts)(x) if has_part else own
                for own, has_part in zip(outputs, self.has_part, strict=True)
            ],
            dim=-1,
        )


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
    parts = []
    for name in names:
        a, b = adapter_names(name)
        parts.append(Adapter(make(a), make(b), settings, place) if a in table else None)
    return Adapters(parts, widths, settings) if any(parts) else None
