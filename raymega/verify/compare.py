"""Deviations of a layout's run from the reference run, and the first one above the limit.

Losses, gradient norm, learning rate, tokens and the load of experts deviate relatively. A weight deviates by max|a - b| / (max|b| + sum of
its learning rates so far), because a weight that starts at zero is only as large as its updates. Optimizer
state (``kind/weight``) deviates by max|a - b| / max|b over all weights|, because the moments of a zero
gradient are rounding noise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan, nan

import numpy as np
import numpy.typing as npt

from raymega.box import Box

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
LIMIT = 1e-9
MAIN_SCALARS = ("loss", "grad_norm")
"""Scalars of a step that the report has a column for; the others share one."""
EVAL_LOSS = "eval_loss"
"""Name of the run's held-out loss; that of a named validation set is followed by `/` and its name."""
EVAL_EMA_LOSS = "eval_ema_loss"
"""Name of the held-out loss of the weights' moving average, as of EVAL_LOSS."""
SIZELESS_KINDS = frozenset({"lion.exp_avg", "adam.exp_avg"})
"""Kinds of state whose size an update divides away, so that rounding noise moves a weight too."""
NOISE = 1e-12
"""Upper bound on a moment of rounding noise alone, as a share of the largest moment of its kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepValues:
    """Scalars of one step on one rank.

    Attributes:
        loss: Mean loss in nats per token.
        grad_norm: Global gradient norm before clipping.
        lr: Learning rate of the update.
        tokens: Number of unmasked tokens of the batch.
        mtp_loss: Loss of multi-token prediction; None without it.
        pair_loss: Loss of an encoder's pairs of segments; None without them.
        loads: Sums of each layer's routing by its number: choices by expert, then the rest of a load.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int = 0
    mtp_loss: float | None = None
    pair_loss: float | None = None
    loads: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def scalars(self) -> dict[str, Sequence[float]]:
        """Return the compared numbers by name; an absent one is NaN, which differs from any number."""
        found: dict[str, Sequence[float]] = {
            name: (getattr(self, name),) for name in (*MAIN_SCALARS, "lr", "tokens")
        }
        for name, value in (("mtp_loss", self.mtp_loss), ("pair_loss", self.pair_loss)):
            found[name] = (nan if value is None else value,)
        return found | {f"expert load of layer {layer}": sums for layer, sums in self.loads.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedBlock:
    """Part of a tensor that a rank holds after step ``step`` (from 1)."""

    step: int
    name: str
    box: Box
    values: Array


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """Result of one rank.

    Attributes:
        curve: Scalars by step, from ``first_step`` on.
        blocks: Parts of tensors that the rank holds.
        first_step: Number of the first step, which is more than 1 after a restore.
        manifest: Manifest, as JSON, of what the rank alone saved; empty where nothing was saved.
        eval_losses: Held-out losses after the last step by name; empty where the job does not evaluate.
        plain_eval_losses: The same computed a second way (`plain_evaluation.py`), on one rank only.
        lr_scales: Factor of each weight's learning rate on the step's; 1 for weights left out.
        router_margin: Least margin of a routing decision; infinite without experts.
        fp8_margin: Least distance of a number to another fp8 rounding; infinite without fp8.
    """

    curve: tuple[StepValues, ...]
    blocks: Iterable[ComparedBlock]
    first_step: int = 1
    manifest: str = ""
    eval_losses: Mapping[str, float] = field(default_factory=dict)
    plain_eval_losses: Mapping[str, float] = field(default_factory=dict)
    lr_scales: Mapping[str, float] = field(default_factory=dict)
    router_margin: float = inf
    fp8_margin: float = inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """Result of the run on one rank, which all layouts are compared with.

    ``eval_losses`` are computed the plain way where the job allows it.
    ``tensors`` are by (step, name); ``state_sizes`` has the largest value of each kind of optimizer state.
    ``undecided`` weights have a gradient of rounding noise, because the loss does not depend on them, so
    they may differ by as much as noise can move them.
    """

    curve: tuple[StepValues, ...]
    tensors: Mapping[tuple[int, str], Array]
    state_sizes: Mapping[str, float]
    lr_scales: Mapping[str, float]
    eval_losses: Mapping[str, float] = field(default_factory=dict)
    router_margin: float = inf
    undecided: frozenset[str] = frozenset()
    fp8_margin: float = inf

    def deviation(self, step: int, name: str, off: float) -> float:
        """Return ``off``, the largest difference of a tensor after ``step``, as a share of its scale."""
        kind, slash, _ = name.partition("/")
        if slash:
            return _share(off, self.state_sizes[kind])
        moved = sum(values.lr for values in self.curve[:step]) * self.lr_scales.get(name, 1.0)
        if (
            name in self.undecided
        ):  # noise may move one run up and the other down, by ``moved`` each
            off = 0.0 if off <= 2 * moved else off - 2 * moved
        return _share(off, float(np.abs(self.tensors[step, name]).max()) + moved)


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """Deviation of ``quantity`` (a scalar's name or a tensor's) after ``step``."""

    step: int
    quantity: str
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutComparison:
    """Largest deviation of each kind, and the first one above the limit, if any.

    ``other`` is that of learning rate, tokens, expert loads and the loss of multi-token prediction.
    ``eval_loss`` is None where the job does not evaluate.
    """

    loss: Deviation
    grad_norm: Deviation
    other: Deviation
    tensor: Deviation
    first: Deviation | None
    eval_loss: Deviation | None = None

    @property
    def largest(self) -> Deviation:
        """Largest deviation of all kinds."""
        found = (self.loss, self.grad_norm, self.other, self.tensor, self.eval_loss)
        return max(filter(None, found), key=lambda deviation: deviation.value)


def make_reference(result: RankResult) -> Reference:
    """Return the reference of the one-rank run's result."""
    tensors = _put_together(result.blocks)
    # largest value of each kind of optimizer state, over all weights and steps
    sizes: dict[str, float] = defaultdict(float)
    for (_, name), values in tensors.items():
        kind, slash, _ = name.partition("/")
        if slash:
            sizes[kind] = max(sizes[kind], float(np.abs(values).max()))
    return Reference(
        curve=result.curve, tensors=tensors, state_sizes=dict(sizes), lr_scales=result.lr_scales,
        router_margin=result.router_margin, fp8_margin=result.fp8_margin,
        eval_losses={**result.eval_losses, **result.plain_eval_losses},
        undecided=_undecided(tensors, sizes),
    )  # fmt: skip


def compare(
    results: Sequence[RankResult], reference: Reference, *, limit: float
) -> LayoutComparison:
    """Compare every rank's scalars and blocks, replicas included, with the reference."""
    # scalars on every rank, tensors over all ranks
    curves = [deviation for result in results for deviation in _curve_deviations(result, reference)]
    evaluated = [found for result in results for found in _eval_deviations(result, reference)]
    tensors = _tensor_deviations(results, reference)
    return LayoutComparison(
        loss=_worst(found for found in curves if found.quantity == "loss"),
        grad_norm=_worst(found for found in curves if found.quantity == "grad_norm"),
        other=_worst(found for found in curves if found.quantity not in MAIN_SCALARS),
        tensor=_worst(tensors),
        first=_first([*curves, *tensors, *evaluated], limit),
        eval_loss=_worst(evaluated) if evaluated else None,
    )


def _undecided(
    tensors: Mapping[tuple[int, str], Array], state_sizes: Mapping[str, float]
) -> frozenset[str]:
    """Return the weights whose moment is rounding noise after every step.

    One step does not tell: an expert that no token has chosen yet has a moment of zero.
    """
    largest: dict[tuple[str, str], float] = defaultdict(float)
    for (_, key), values in tensors.items():
        kind, _, name = key.partition("/")
        if kind in SIZELESS_KINDS:
            largest[kind, name] = max(largest[kind, name], float(np.abs(values).max()))
    return frozenset(
        name for (kind, name), size in largest.items() if size <= NOISE * state_sizes[kind]
    )


def relative(value: float, wanted: float) -> float:
    """Return |value - wanted| / |wanted|; infinite if that is NaN."""
    return 0.0 if value == wanted else _share(abs(value - wanted), abs(wanted))


def _curve_deviations(result: RankResult, reference: Reference) -> list[Deviation]:
    return [
        Deviation(step=step, quantity=name, value=_furthest(values.scalars().get(name, ()), wanted))
        for step, (values, others) in enumerate(
            zip(result.curve, reference.curve[result.first_step - 1 :], strict=True),
            start=result.first_step,
        )
        for name, wanted in others.scalars().items()
    ]


def _furthest(values: Sequence[float], wanted: Sequence[float]) -> float:
    """Return the largest relative deviation of any number; infinite if there are others or fewer."""
    if len(values) != len(wanted):
        return inf
    pairs = zip(values, wanted, strict=True)
    # a quantity that neither run has is NaN in both
    return max((relative(a, b) for a, b in pairs if not (isnan(a) and isnan(b))), default=0.0)


def _eval_deviations(result: RankResult, reference: Reference) -> list[Deviation]:
    return [
        Deviation(
            step=len(reference.curve),
            quantity=name,
            value=relative(result.eval_losses.get(name, nan), wanted),
        )
        for name, wanted in reference.eval_losses.items()
    ]


def _tensor_deviations(results: Sequence[RankResult], reference: Reference) -> list[Deviation]:
    """Return the worst block's deviation of each step and tensor; infinite if an element is missing."""
    # each tensor must be covered: a layout that loses a shard must not pass
    is_held = held_nowhere(reference, results[0].first_step)
    worst = dict.fromkeys(is_held, 0.0)
    for block in (block for result in results for block in result.blocks):
        key, place = (block.step, block.name), slices_of(block.box)
        off = np.abs(block.values - reference.tensors[key][place]).max(initial=0.0)
        worst[key] = max(worst[key], reference.deviation(*key, float(off)))
        is_held[key][place] = True
    return [
        Deviation(step=step, quantity=name, value=value if is_held[step, name].all() else inf)
        for (step, name), value in worst.items()
    ]


def held_nowhere(reference: Reference, first_step: int) -> dict[tuple[int, str], Flags]:
    """Return False for each element of the tensors from ``first_step`` on, which some rank must hold."""
    return {
        key: np.zeros(values.shape, dtype=bool)
        for key, values in reference.tensors.items()
        if key[0] >= first_step
    }


def _put_together(blocks: Iterable[ComparedBlock]) -> dict[tuple[int, str], Array]:
    """Assemble whole tensors from blocks; a tensor that is part of a fused one has several."""
    parts: dict[tuple[int, str], list[ComparedBlock]] = defaultdict(list)
    for block in blocks:
        parts[block.step, block.name].append(block)
    tensors = {}
    for key, found in parts.items():
        # The global shape is the largest end of any block along each dim.
        ends = [[o + n for o, n in zip(b.box.offset, b.box.shape, strict=True)] for b in found]
        tensors[key] = np.full([max(dims) for dims in zip(*ends, strict=True)], np.nan)
        for block in found:
            tensors[key][slices_of(block.box)] = block.values
    return tensors


def slices_of(box: Box) -> tuple[slice, ...]:
    """Return the place of a box in the whole tensor."""
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))


def _worst(deviations: Iterable[Deviation]) -> Deviation:
    return max(deviations, key=lambda found: found.value)


def _first(deviations: Sequence[Deviation], limit: float) -> Deviation | None:
    """Return the largest deviation above ``limit`` of the first step that has any."""
    too_large = [found for found in deviations if found.value > limit]
    return min(too_large, key=lambda found: (found.step, -found.value), default=None)


def _share(off: float, scale: float) -> float:
    # 0 / 0 is no deviation; any difference from a zero scale is infinite.
    if off == 0:
        return 0.0
    return off / scale if scale and not isnan(off / scale) else inf
