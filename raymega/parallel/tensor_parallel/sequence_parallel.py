"""SequenceParallel: the placement of the residual stream on the tensor-parallel ranks between layers.

Without sequence parallelism every rank holds all S positions. With it each rank holds its own S/tp, so
that norms, residual sums and dropout are cut too. Layers get this value instead of a group, and need
not know which of the two holds; shapes write S/sp for what a rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from raymega.parallel.comm.collectives import (
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.comm.work import Work, nothing_pending
from raymega.parallel.tensor_parallel.mappings import (
    copy_to_tp,
    gather_positions,
    reduce_from_tp,
    scatter_to_positions,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceParallel:
    """The tensor-parallel ranks, and whether they cut the positions.

    Attributes:
        tp: Tensor-parallel ranks.
        is_sequence_parallel: True where each rank holds S/tp positions; no effect with one rank.
        is_overlapped: True where positions are gathered and summed in blocks, beside products
            (`overlap.py`); no effect unless positions are cut.
    """

    tp: Group
    is_sequence_parallel: bool = False
    is_overlapped: bool = False

    @property
    def degree(self) -> int:
        """Number of parts of the positions, sp."""
        return self.tp.size if self.is_sequence_parallel else 1

    @property
    def overlaps(self) -> bool:
        """True where linear layers let messages and products overlap block by block."""
        return self.is_overlapped and self.degree > 1

    def own(self, whole: Tensor) -> Tensor:
        """Return a view of this rank's positions: [S, ...] -> [S/sp, ...]."""
        return whole.chunk(self.degree)[self.tp.index] if self.degree > 1 else whole

    def share(self, tokens: Tensor) -> Tensor:
        """Return a view of this rank's share of tokens that tp ranks hold alike: [T, ...] -> [T/tp, ...].

        With sequence parallelism all ``tokens`` are returned: they are the rank's own already.
        """
        if self.is_sequence_parallel or self.tp.size == 1:
            return tokens
        return tokens.chunk(self.tp.size)[self.tp.index]

    def enter(self, x: Tensor) -> Tensor:
        """Enter tensor-parallel work from the stream: [S/sp, ...] -> [S, ...] on every rank.

        Backward sums the ranks' gradients, which are terms.
        """
        return gather_positions(x, self.tp) if self.is_sequence_parallel else copy_to_tp(x, self.tp)

    def start_gather(self, x: Tensor) -> tuple[Tensor, Work]:
        """Start to gather all positions, [S/sp, B, D] -> [S, B, D], without autograd.

        Read the result only after the wait. It is ``x`` itself where the positions are not cut.
        """
        if self.is_sequence_parallel:
            return start_all_gather(x, self.tp)
        return x, nothing_pending()

    def start_sum(self, y: Tensor) -> tuple[Tensor, Work]:
        """Start :meth:`sum` without autograd, for gradients.

        Args:
            y: Term of this rank, [S, B, D]; the caller must not use it any more.

        Returns:
            Sum [S/sp, B, D], to read only after the wait, and the pending operation.
        """
        if self.is_sequence_parallel:
            return start_reduce_scatter(y, self.tp)
        return y, start_all_reduce(y, self.tp)

    def sum(self, y: Tensor) -> Tensor:
        """Leave tensor-parallel work for the stream: return the sum of all ranks' terms.

        Args:
            y: Term of this rank, [S, B, D]; may be overwritten.

        Returns:
            Sum [S/sp, B, D].
        """
        if self.is_sequence_parallel:
            return scatter_to_positions(y, self.tp)
        return reduce_from_tp(y, self.tp)
