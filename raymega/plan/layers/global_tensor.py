"""Define a tensor of the whole model: name, shape, role, cut by tp, and the box of each rank.

The module holds no data. `plan/tensor_table.py` lists the tensors of a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from raymega.box import Box
from raymega.plan.grid import ExpertPlace
from raymega.plan.layers.base_blocks import COMPUTE

Role = Literal["embedding", "head", "matrix", "filter", "norm", "bias", "state"]
VECTOR_ROLES = ("filter", "norm", "bias")
"""Roles of small weights: sharding of gradients and of weights leaves them whole."""

BELOW = -2
"""Layer of what lies below all blocks: tables, norms of what they give, a vision tower."""
WHOLE_EXPERTS = ExpertPlace()
"""Place of a rank that holds all experts whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalTensor:
    """Named tensor of the whole model.

    Attributes:
        name: Name of the tensor, such as ``layers.3.attention.q.weight``.
        shape: Global shape; a linear weight is [out, in].
        tp_dim: Dim that tensor parallelism cuts evenly, or -1 when every tp rank holds all of it.
        init: Kind of initial values: ``normal``, ``zeros``, ``ones``, ``log_uniform``, the logarithm of
            numbers between 0.01 and 16, ``step``, whose softplus is between 0.001 and 0.1, or ``row_norms``,
            the norms of the rows of ``rows_of``.
        initializer_range: Standard deviation when ``init`` is ``normal``.
        role: Role for the optimizer; ``matrix`` is every weight inside a block, ``embedding`` a
            table, a tied head's included; ``filter`` is a convolution's, of which each channel is apart;
            ``state`` is no weight: it has no gradient, and is saved
            and restored with the weights.
        tp_units: Most blocks into which tp may cut it, 0 for no limit; with more ranks, neighbours
            share a block. Key and value heads have such a limit.
        serves_heads: Whether it is used on the query heads of each tp rank apart, so that the
            gradients of ranks that share a block are terms of a sum.
        serves_tokens: Whether it is used on each tp rank's own tokens, even where the stream is not
            cut between layers, so that its gradients are terms of a sum as well.
        padded_rows: Number of its last rows that are padding and always zero.
        etp_dim: Dim of the features of an expert tensor, which etp cuts; -1 of all others. Dim 0 of
            an expert tensor is the experts, which ep cuts evenly.
        is_wide: Whether it is kept in float32 or better.
        is_frozen: Whether the job trains other tensors only; `adapters.py` decides.
        base_dtype: Format of a frozen weight that is held as codes, `nf4` or `fp8`; `compute` of all others.
        is_carried: Whether no layer reads it: it is kept, frozen, for what is exported.
        layer: Number of its block, from 0; BELOW before the first, -1 elsewhere.
        rows_of: Tensor with one dim more, of whose rows these are norms at the start; None of all others.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int
    init: str
    initializer_range: float
    role: Role
    tp_units: int = 0
    serves_heads: bool = False
    serves_tokens: bool = False
    padded_rows: int = 0
    etp_dim: int = -1
    is_wide: bool = False
    is_frozen: bool = False
    base_dtype: str = COMPUTE
    is_carried: bool = False
    layer: int = -1
    rows_of: GlobalTensor | None = None

    @property
    def is_expert(self) -> bool:
        """True where its parts are placed by the experts' view of the grid."""
        return self.etp_dim >= 0

    @property
    def is_trained(self) -> bool:
        """True where the optimizer updates it, and keeps moments of it."""
        return self.role != "state" and not self.is_frozen

    @property
    def is_weight(self) -> bool:
        """True of all but states, such as a router's counts."""
        return self.role != "state"

    @property
    def num_elements(self) -> int:
        """Number of elements of the whole tensor."""
        return prod(self.shape)

    @property
    def num_parameters(self) -> int:
        """Number of elements that are weights, frozen or not: all but padding, and none of a state."""
        return self.num_elements // self.shape[0] * self.real_rows if self.role != "state" else 0

    @property
    def real_rows(self) -> int:
        """Number of rows that are no padding."""
        return self.shape[0] - self.padded_rows

    @property
    def whole(self) -> Box:
        """Box of the whole tensor."""
        return Box.whole(self.shape)

    def sharers(self, *, tp: int) -> int:
        """Return how many neighbouring tp ranks hold the same block; 1 for an expert tensor."""
        if self.is_expert:
            return 1
        if self.tp_dim < 0:
            return tp
        return max(1, tp // self.tp_units) if self.tp_units else 1

    def box(self, *, tp: int, tp_rank: int, experts: ExpertPlace = WHOLE_EXPERTS) -> Box:
        """Return the block of a rank, by its place on tp or, of an expert tensor, among experts."""
        offset, shape = [0] * len(self.shape), list(self.shape)
        # experts over ep, features over etp
        if self.is_expert:
            shape[0] //= experts.ep
            shape[self.etp_dim] //= experts.etp
            offset[0] = shape[0] * experts.ep_rank
            offset[self.etp_dim] = shape[self.etp_dim] * experts.etp_rank
        # tp, with neighbours that share a key or value head
        if self.tp_dim >= 0:
            sharers = self.sharers(tp=tp)
            shape[self.tp_dim] //= tp // sharers
            offset[self.tp_dim] = shape[self.tp_dim] * (tp_rank // sharers)
        return Box(offset=tuple(offset), shape=tuple(shape))
