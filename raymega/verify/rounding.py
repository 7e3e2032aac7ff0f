"""Comparison of layouts in a dtype below float64, against the spread of roundings on one rank.

One rank trains the same run several times in that dtype, with the batch cut in other ways, which rounds in other
places. How far these runs are from the one in float64 is the spread. It may be no more than ROUNDINGS of the dtype,
as a mistake that all layouts make would widen it. A layout may be LIMIT_OF_SPREAD times as far, quantity by quantity.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import inf, isfinite, isnan
from typing import Literal

import numpy as np

from raymega.box import Box
from raymega.config.schema import Job
from raymega.verify.compare import (
    EVAL_EMA_LOSS,
    EVAL_LOSS,
    MAIN_SCALARS,
    Array,
    Deviation,
    LayoutComparison,
    RankResult,
    Reference,
    held_nowhere,
    relative,
    slices_of,
)
from raymega.verify.launch import ForkServer
from raymega.verify.layout import Device
from raymega.verify.legal_layouts import fixed_size, is_legal, reference_layout

Precision = Literal["float64", "float32", "bfloat16", "float16"]
LIMIT_OF_SPREAD = 8.0
"""Largest distance from the reference that passes, as a multiple of the largest of one-rank runs."""
NUM_BITS = {"float32": 24, "bfloat16": 8, "float16": 11}
"""Digits of each dtype: no spread is taken for less than a rounding, however lucky the runs were."""
ROUNDINGS = {
    "float32": {"loss": 16.0, "grad_norm": 16.0, "tensor": 4000.0},
    "bfloat16": {"loss": 0.25, "grad_norm": 4.0, "tensor": 100.0},
    "float16": {"loss": 1.0, "grad_norm": 8.0, "tensor": 200.0},
}
"""Largest spread, in roundings of the dtype. Small models had at most 2.5, 1.6 and 1,100 in float32, and 0.03, 0.6 and
64 in bfloat16, with the root mean square of masters, which is more than their median."""
COUNTED = ".router.counts"
"""End of the names of tensors that count choices of experts, which roundings change by whole numbers."""
EXACT = frozenset({"lr", "tokens"})
"""Scalars that no rounding touches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Distances of the runs on one rank from the reference.

    Attributes:
        distances: Largest distance of each quantity; tensors that differ in their layer only are one.
        rounding: Relative size of one rounding of the dtype.
        seconds: Time that the runs took.
    """

    distances: Mapping[str, float]
    rounding: float
    seconds: float = 0.0

    def judge(self, precision: str, *, step: int) -> LayoutComparison:
        """Return how far the runs on one rank are, with deviations that LIMIT_OF_SPREAD limits too."""
        most = ROUNDINGS[precision]
        return _worst_of(
            Deviation(
                step=step,
                quantity=name,
                value=LIMIT_OF_SPREAD * distance / self.rounding / most[_limit_of(name)]
                if name not in EXACT
                else _multiple(name, distance, self),
            )
            for name, distance in self.distances.items()
        )


def in_precision(job: Job, precision: Precision) -> Job:
    """Return the job with another dtype."""
    section = job.precision.model_copy(update={"dtype": precision})
    return job.model_copy(update={"precision": section})


def on_device(job: Job, device: Device) -> Job:
    """Return the job with its ranks on another device."""
    section = job.cluster.model_copy(update={"device": device})
    return job.model_copy(update={"cluster": section})


def measure_spread(
    fork_server: ForkServer, job: Job, reference: Reference, *, steps: int
) -> Spread:
    """Train the job on one rank with several micro-batch sizes, and return how far the runs are.

    Raises:
        LayoutFailedError: The job does not train on one rank in its dtype.
    """
    whole, began = reference_layout(job), time.monotonic()
    sizes = {fixed_size(job)} if fixed_size(job) else {1, 2, 3, whole.micro_batch_size}
    layouts = [replace(whole, micro_batch_size=size) for size in sorted(sizes)]
    layouts += [replace(each, recompute="full") for each in layouts[:1]]
    distances: dict[str, float] = defaultdict(float)
    for layout in (each for each in layouts if is_legal(job, each)):
        with fork_server.run(job, layout, steps=steps) as results:
            for (_, name), value in _distances(results, reference).items():
                distances[name] = max(distances[name], value)
    rounding = 2.0 ** -NUM_BITS[job.precision.dtype]
    seconds = time.monotonic() - began
    return Spread(distances=dict(distances), rounding=rounding, seconds=seconds)


def compare_with_spread(
    results: Sequence[RankResult], reference: Reference, spread: Spread
) -> LayoutComparison:
    """Compare a layout's distances with the spread; deviations are multiples of it."""
    return _worst_of(
        Deviation(step=step, quantity=name, value=_multiple(name, value, spread))
        for (step, name), value in _distances(results, reference).items()
    )


def _worst_of(deviations: Iterable[Deviation]) -> LayoutComparison:
    """Return the largest deviation of each kind, and the first one above the limit."""
    found = list(deviations)
    by_kind: dict[str, list[Deviation]] = defaultdict(list)
    for deviation in found:
        by_kind[_kind(deviation.quantity)].append(deviation)
    too_far = [deviation for deviation in found if deviation.value > LIMIT_OF_SPREAD]
    worst = {kind: max(some, key=lambda each: each.value) for kind, some in by_kind.items()}
    return LayoutComparison(
        loss=worst["loss"], grad_norm=worst["grad_norm"], other=worst["other"], tensor=worst["tensor"],
        first=min(too_far, key=lambda each: (each.step, -each.value), default=None),
        eval_loss=worst.get("eval_loss"),
    )  # fmt: skip


def _limit_of(name: str) -> str:
    """Return the entry of ROUNDINGS that bounds a quantity."""
    kind = _kind(name)
    return kind if kind in ("grad_norm", "tensor") else "loss"


def _kind(quantity: str) -> str:
    if quantity in MAIN_SCALARS:
        return quantity
    if quantity.startswith((EVAL_LOSS, EVAL_EMA_LOSS)):
        return "eval_loss"
    return "other" if quantity in (*EXACT, "mtp_loss", "pair_loss") else "tensor"


def _multiple(name: str, distance: float, spread: Spread) -> float:
    """Return a distance as a multiple of the spread; infinite where none may be."""
    if name in EXACT:
        return 0.0 if distance == 0 else inf
    # a few roundings are no spread: a mean of thousands of losses may be lucky
    usual = max(spread.distances.get(name, 0.0), spread.rounding / 8)
    return distance / usual if isfinite(distance) else inf


def _distances(results: Sequence[RankResult], reference: Reference) -> dict[tuple[int, str], float]:
    """Return how far a run is from the reference, by step and quantity.

    Scalars relatively; optimizer state by the root mean square of its differences, over that of the reference;
    masters by the median difference, over the learning rates so far. Expert loads are left out: roundings choose other experts.
    """
    far: dict[tuple[int, str], float] = defaultdict(float)
    for result in results:
        first = result.first_step
        pairs = zip(result.curve, reference.curve[first - 1 :], strict=True)
        for step, (values, wanted) in enumerate(pairs, start=first):
            others = values.scalars()
            for name, numbers in wanted.scalars().items():
                if len(numbers) == 1 and not (isnan(numbers[0]) and isnan(others[name][0])):
                    far[step, name] = max(far[step, name], relative(others[name][0], numbers[0]))
        for name, loss in reference.eval_losses.items():
            key = len(reference.curve), name
            far[key] = max(far[key], relative(result.eval_losses.get(name, inf), loss))
    return dict(far) | _tensor_distances(results, reference)


def _tensor_distances(
    results: Sequence[RankResult], reference: Reference
) -> dict[tuple[int, str], float]:
    """Return how far each tensor's worst copy is; infinite if an element is missing."""
    is_held = held_nowhere(reference, results[0].first_step)
    offs: dict[tuple[int, str], dict[Box, list[Array]]] = defaultdict(lambda: defaultdict(list))
    for block in (block for result in results for block in result.blocks):
        key, place = (block.step, block.name), slices_of(block.box)
        is_held[key][place] = True
        if not block.name.endswith(COUNTED):
            off = block.values.astype(np.float64) - reference.tensors[key][place]
            offs[key][block.box].append(np.abs(off).ravel())
    far: dict[tuple[int, str], float] = defaultdict(float)
    for (step, name), held in is_held.items():
        key = step, re.sub(r"\.\d+\.", ".*.", name)
        scale = _scale(reference, step, name)
        # each copy by itself: sound ones would hide a replica that is wrong
        for copy in zip_longest(*offs[step, name].values(), fillvalue=np.empty(0)):
            size = _size(np.concatenate(copy), name)
            far[key] = max(far[key], inf if isnan(size) else size / scale if scale else 0.0)
        if not held.all():
            far[key] = inf
    return dict(far)


def _size(off: Array, name: str) -> float:
    """Return the size of a copy's differences."""
    if not off.size:
        return 0.0
    # Of masters the median: where a gradient is nearly zero, rounding turns its sign and so the whole update.
    return _root_mean_square(off) if "/" in name else float(np.median(off))


def _scale(reference: Reference, step: int, name: str) -> float:
    """Return what a tensor's difference is a share of; 0 where its moments are rounding noise."""
    values = reference.tensors[step, name]
    kind, slash, weight = name.partition("/")
    if slash:
        size = _root_mean_square(values)
        return (
            size
            if weight not in reference.undecided and size > 1e-6 * reference.state_sizes[kind]
            else 0.0
        )
    if name in reference.undecided:
        return 0.0
    moved = sum(each.lr for each in reference.curve[:step]) * reference.lr_scales.get(name, 1.0)
    return moved or _root_mean_square(values)


def _root_mean_square(values: Array) -> float:
    return float(np.sqrt(np.square(values).mean())) if values.size else 0.0
