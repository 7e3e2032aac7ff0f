"""Deviations of one run from the reference run, and the first one that is too large.

It knows arrays and numbers only. Loss and gradient norm deviate relatively; a weight by
max|a - b| / (max|b| + sum of its learning rates so far), because a value that starts at zero is as
large as what the optimizer has added; what the optimizer keeps (``kind/weight``) by
max|a - b| / max|b over all weights|, because the moments of a gradient that is zero are noise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan

import numpy as np
import numpy.typing as npt

from raymega.messages import Box

Array = npt.NDArray[np.float64]
LIMIT = 1e-9
SIZELESS_KINDS = frozenset({"lion.exp_avg", "adam.exp_avg"})
"""State of which an update takes the direction but not the size, so that noise moves a weight too."""
NOISE = 1e-12
"""A share of the largest of its kind: what a moment has at the most whose gradient is zero but for
rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepValues:
    """Scalars of one step as one rank has them."""

    loss: float
    grad_norm: float
    lr: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedBlock:
    """A rank's part of a tensor after step ``step`` (from 1)."""

    step: int
    name: str
    box: Box
    values: Array


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """What one rank brings back; ``router_margin`` is by how much its closest choice of an expert was
    won, ``fp8_margin`` how near a number came to another rounding, infinite where there was none.
    ``lr_scales`` has for each weight what its learning rate is of the step's; 1 where it is silent.
    """

    curve: tuple[StepValues, ...]
    blocks: Iterable[ComparedBlock]
    lr_scales: Mapping[str, float] = field(default_factory=dict)
    router_margin: float = inf
    fp8_margin: float = inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """The run on one rank: scalars by step, tensors by (step, name), and what a kind of optimizer
    state has as its largest value. Weights that are ``undecided`` may differ by what noise can have
    moved them: their gradient is zero but for rounding, because the loss does not depend on them.
    """

    curve: tuple[StepValues, ...]
    tensors: Mapping[tuple[int, str], Array]
    state_sizes: Mapping[str, float]
    lr_scales: Mapping[str, float]
    router_margin: float = inf
    undecided: frozenset[str] = frozenset()
    fp8_margin: float = inf

    def deviation(self, step: int, name: str, off: float) -> float:
        """What ``off``, the largest difference of the tensor after ``step``, is of its scale."""
        kind, slash, _ = name.partition("/")
        if slash:
            return _share(off, self.state_sizes[kind])
        moved = sum(values.lr for values in self.curve[:step]) * self.lr_scales.get(name, 1.0)
        if name in self.undecided:  # one way here, the other way there; rounding comes on top
            off = 0.0 if off <= 2 * moved else off - 2 * moved
        return _share(off, float(np.abs(self.tensors[step, name]).max()) + moved)


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """How far ``quantity`` (``loss``, ``grad_norm`` or a tensor's name) is off after ``step``."""

    step: int
    quantity: str
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutComparison:
    """The largest deviation of each kind, and the first above the limit, if any is."""

    loss: Deviation
    grad_norm: Deviation
    tensor: Deviation
    first: Deviation | None

    @property
    def largest(self) -> Deviation:
        """The worst of all."""
        return max((self.loss, self.grad_norm, self.tensor), key=lambda found: found.value)


def make_reference(result: RankResult) -> Reference:
    """The reference from its only rank."""
    tensors = _put_together(result.blocks)
    sizes: dict[str, float] = defaultdict(float)
    for (_, name), values in tensors.items():
        kind, slash, _ = name.partition("/")
        if slash:
            sizes[kind] = max(sizes[kind], float(np.abs(values).max()))
    return Reference(
        curve=result.curve, tensors=tensors, state_sizes=dict(sizes), lr_scales=result.lr_scales,
        router_margin=result.router_margin, fp8_margin=result.fp8_margin,
        undecided=_undecided(tensors, sizes),
    )  # fmt: skip


def compare(
    results: Sequence[RankResult], reference: Reference, *, limit: float
) -> LayoutComparison:
    """Hold every rank's scalars and blocks, replicas included, against the reference."""
    curves = [deviation for result in results for deviation in _curve_deviations(result, reference)]
    tensors = _tensor_deviations(results, reference)
    return LayoutComparison(
        loss=_worst(found for found in curves if found.quantity == "loss"),
        grad_norm=_worst(found for found in curves if found.quantity == "grad_norm"),
        tensor=_worst(tensors),
        first=_first([*curves, *tensors], limit),
    )


def _undecided(
    tensors: Mapping[tuple[int, str], Array], state_sizes: Mapping[str, float]
) -> frozenset[str]:
    kinds = {key: key[1].partition("/") for key in tensors}
    return frozenset(
        name
        for key, (kind, _, name) in kinds.items()
        if kind in SIZELESS_KINDS and float(np.abs(tensors[key]).max()) <= NOISE * state_sizes[kind]
    )


def relative(value: float, wanted: float) -> float:
    """|value - wanted| / |wanted|; infinite when it is not a number."""
    return 0.0 if value == wanted else _share(abs(value - wanted), abs(wanted))


def _curve_deviations(result: RankResult, reference: Reference) -> list[Deviation]:
    return [
        Deviation(
            step=step,
            quantity=quantity,
            value=relative(getattr(values, quantity), getattr(wanted, quantity)),
        )
        for step, (values, wanted) in enumerate(
            zip(result.curve, reference.curve, strict=True), start=1
        )
        for quantity in ("loss", "grad_norm")
    ]


def _tensor_deviations(results: Sequence[RankResult], reference: Reference) -> list[Deviation]:
    """One a step and tensor: the worst block, infinite when no rank holds some element."""
    worst = dict.fromkeys(reference.tensors, 0.0)
    is_held = {key: np.zeros(values.shape, dtype=bool) for key, values in reference.tensors.items()}
    for block in (block for result in results for block in result.blocks):
        key, place = (block.step, block.name), _slices(block.box)
        off = np.abs(block.values - reference.tensors[key][place]).max(initial=0.0)
        worst[key] = max(worst[key], reference.deviation(*key, float(off)))
        is_held[key][place] = True
    return [
        Deviation(step=step, quantity=name, value=value if is_held[step, name].all() else inf)
        for (step, name), value in worst.items()
    ]


def _put_together(blocks: Iterable[ComparedBlock]) -> dict[tuple[int, str], Array]:
    """Whole tensors from all their blocks; one that is stacked with others comes in several."""
    parts: dict[tuple[int, str], list[ComparedBlock]] = defaultdict(list)
    for block in blocks:
        parts[block.step, block.name].append(block)
    tensors = {}
    for key, found in parts.items():
        ends = [[o + n for o, n in zip(b.box.offset, b.box.shape, strict=True)] for b in found]
        tensors[key] = np.full([max(dims) for dims in zip(*ends, strict=True)], np.nan)
        for block in found:
            tensors[key][_slices(block.box)] = block.values
    return tensors


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))


def _worst(deviations: Iterable[Deviation]) -> Deviation:
    return max(deviations, key=lambda found: found.value)


def _first(deviations: Sequence[Deviation], limit: float) -> Deviation | None:
    """Of the first step that has any, the largest."""
    too_large = [found for found in deviations if found.value > limit]
    return min(too_large, key=lambda found: (found.step, -found.value), default=None)


def _share(off: float, scale: float) -> float:
    if off == 0:
        return 0.0
    return off / scale if scale and not isnan(off / scale) else inf
