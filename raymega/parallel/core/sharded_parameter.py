"""ShardedParameter: a parameter with its place in the whole model, and its initial values.

The place is a ShardSpec (`shard_spec.py`); the random numbers come from `rng.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import log, prod
from typing import Protocol

import torch

from raymega.box import Box
from raymega.errors import Fault, InternalError, raise_faults
from raymega.parallel.core import rng
from raymega.parallel.core.shard_spec import Piece, ShardSpec
from raymega.plan.layers.global_tensor import GlobalTensor

DRAWN_AT_ONCE = 2**20
"""Initial values that exist in float64 at a time, unless one row or one expert has more."""
LEAST_DECAY, MOST_DECAY = 0.01, 16.0
"""Bounds of the numbers whose logarithms ``log_uniform`` draws; 0 would have none."""
LEAST_STEP, MOST_STEP = 1e-3, 0.1
"""Bounds of the time steps that ``step`` draws."""


class GradientIntake(Protocol):
    """The interface of what sums a parameter's gradients: `data_parallel/grad_accumulator.py`."""

    def place(self, param: ShardedParameter) -> tuple[torch.Tensor, bool]:
        """Return the tensor to add a term to, and whether that term is the first and overwrites."""

    def collect(self, param: torch.Tensor) -> None:
        """Note that a backward has passed all uses of the parameter."""


class ShardedParameter(torch.nn.Parameter):
    """A rank's part of one or several global tensors.

    Attributes:
        spec: Place in the whole model: which part, which ranks hold it too, and which one counts.
        grad_sink: Receiver of the terms of its gradient; None leaves them to autograd.
    """

    spec: ShardSpec
    grad_sink: GradientIntake | None

    # torch's __hash__ also uses the identity, but in Python; every backward looks up parameters.
    __hash__ = object.__hash__

    def __new__(cls, data: torch.Tensor, spec: ShardSpec) -> ShardedParameter:
        """Wrap ``data`` of shape ``spec.shape``; its values stay as they are."""
        param = super().__new__(cls, data)
        param.spec = spec
        param.grad_sink = None
        return param


def initialise(param: ShardedParameter, seed: int) -> None:
    """Fill each piece with the initial values of its block of the whole tensor, alike on any layout.

    They are drawn in float64, some rows at a time.
    """
    for piece in param.spec.pieces:
        place, (num_rows, *row) = param.detach()[piece.place], piece.box.shape
        behind = piece.tensor.rows_of
        drawn = prod(row) * (behind.shape[-1] if behind is not None else 1)
        step = max(1, DRAWN_AT_ONCE // drawn)
        for first in range(0, num_rows, step):
            box = piece.box.rows(first, min(step, num_rows - first))
            values = initial_values(piece.tensor, box, seed=seed, device=param.device)
            place[first : first + step].copy_(values)


def initial_values(
    tensor: GlobalTensor, box: Box, *, seed: int, device: torch.device
) -> torch.Tensor:
    """Return the initial values of a block of a global tensor: [*box.shape], float64."""
    constants = {"zeros": 0.0, "ones": 1.0}
    if tensor.init in constants:
        return torch.full(box.shape, constants[tensor.init], dtype=torch.float64, device=device)
    if tensor.rows_of is not None:
        rows = initial_values(tensor.rows_of, rows_behind(tensor, box), seed=seed, device=device)
        return torch.linalg.vector_norm(rows, dim=-1)
    stream = rng.key(seed, "init", tensor.name)
    values = rng.normal(stream, box, tensor.shape, torch.float64, device=device)
    if tensor.init == "normal":
        # padding rows of the vocabulary start at zero and stay there
        values[max(tensor.real_rows - box.offset[0], 0) :] = 0.0
        return values.mul_(tensor.initializer_range)
    # uniform, by the share of the normal distribution below each value
    share = torch.special.ndtr(values)
    if tensor.init == "log_uniform":
        return share.mul_(MOST_DECAY - LEAST_DECAY).add_(LEAST_DECAY).log_()
    # time steps, uniform in their logarithm, before softplus (Mamba)
    steps = share.mul_(log(MOST_STEP / LEAST_STEP)).add_(log(LEAST_STEP)).exp_()
    return steps + (-torch.expm1(-steps)).log_()


def rows_behind(tensor: GlobalTensor, box: Box) -> Box:
    """Return the box of ``tensor.rows_of`` whose rows, whole, have their norms in ``box`` of ``tensor``."""
    assert tensor.rows_of is not None, f"{tensor.name} has no norms of rows"
    return Box(offset=(*box.offset, 0), shape=(*box.shape, tensor.rows_of.shape[-1]))


def check_specs(params: Sequence[ShardedParameter]) -> None:
    """Check every spec against its parameter, and the parameters against each other.

    Raises:
        InternalError: Shapes disagree, pieces do not tile a parameter, or a block is held twice.
    """
    faults = [fault for param in params for fault in _spec_faults(param)]
    pieces = [piece for param in params for piece in param.spec.pieces]
    raise_faults(InternalError, faults + _overlap_faults(pieces))


def _spec_faults(param: ShardedParameter) -> list[Fault]:
    spec, shape = param.spec, tuple(param.shape)
    whole = Box.whole(shape)
    faults = []
    # the parameter against its spec
    if shape != spec.shape:
        faults.append(
            _fault(spec.name, f"shape {shape}", f"its spec says {spec.shape}", "build it from spec")
        )
    # the pieces tile the parameter
    if sum(piece.local.num_elements for piece in spec.pieces) != param.numel() or any(
        piece.local.intersect(whole) != piece.local for piece in spec.pieces
    ):
        faults.append(
            _fault(spec.name, f"shape {shape}", "pieces must tile it", "cut it with make_spec")
        )
    # each block lies inside its global tensor
    for piece in spec.pieces:
        whole_tensor = piece.tensor.whole
        if piece.box.shape != piece.local.shape or piece.box.intersect(whole_tensor) != piece.box:
            what = f"block {piece.box} of shape {piece.tensor.shape}"
            rule = f"it must lie inside and be as large as its local block {piece.local}"
            faults.append(_fault(piece.tensor.name, what, rule, "cut it with make_spec"))
    return faults


def _overlap_faults(pieces: Sequence[Piece]) -> list[Fault]:
    by_tensor: dict[str, list[Box]] = {}
    for piece in pieces:
        by_tensor.setdefault(piece.tensor.name, []).append(piece.box)
    return [
        _fault(name, f"blocks {a} and {b}", "a rank holds each element once", "share the parameter")
        for name, boxes in by_tensor.items()
        for a, b in combinations(boxes, 2)
        if a.intersect(b) is not None
    ]


def _fault(name: str, fact: str, rule: str, remedy: str) -> Fault:
    return Fault(fact=f"parameter {name}: {fact}", rule=rule, remedy=remedy)
