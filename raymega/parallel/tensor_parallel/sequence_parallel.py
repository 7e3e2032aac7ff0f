"""SequenceParallel: how the residual stream lies on the tensor-parallel ranks between cut layers.

Without sequence parallelism every rank holds all S positions of it. With it each rank holds its own
S/tp, so that norms, residual sums and dropout are cut too. Layers are handed this value instead of
a group and never ask which of the two it is; shapes call what a rank holds S/sp.
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
    """The tensor-parallel ranks, and whether the positions are cut over them.

    Attributes:
        tp: The tensor-parallel ranks.
        is_sequence_parallel: Each holds S/tp positions; with one rank it changes nothing.
    """

    tp: Group
    is_sequence_parallel: bool = False

    @property
    def degree(self) -> int:
        """sp: into how many parts the positions are cut."""
        return self.tp.size if self.is_sequence_parallel else 1

    def own(self, whole: Tensor) -> Tensor:
        """This rank's positions: [S, ...] -> [S/sp, ...], a view."""
        return whole.chunk(self.degree)[self.tp.index] if self.degree > 1 else whole

    def share(self, tokens: Tensor) -> Tensor:
        """Of equal tokens on all ranks this rank's part: [T, ...] -> [T/tp, ...], a view.

        What sequence parallelism has cut is a rank's own already.
        """
        if self.is_sequence_parallel or self.tp.size == 1:
            return tokens
        return tokens.chunk(self.tp.size)[self.tp.index]

    def enter(self, x: Tensor) -> Tensor:
        """Go from the stream into work that is cut over tp: [S/sp, ...] -> [S, ...] on every rank.

        Backward sums the gradients of all ranks, which are terms.
        """
        return gather_positions(x, self.tp) if self.is_sequence_parallel else copy_to_tp(x, self.tp)

    def start_gather(self, x: Tensor) -> tuple[Tensor, Work]:
        """Begin to bring all positions together: [S/sp, B, D] -> [S, B, D]; autograd is not told.

        The result may be read when it was waited for. It is ``x`` itself where nothing is cut.
        """
        if self.is_sequence_parallel:
            return start_all_gather(x, self.tp)
        return x, nothing_pending()

    def start_sum(self, y: Tensor) -> tuple[Tensor, Work]:
        """Begin what :meth:`sum` does, unseen by autograd; for gradients.

        Args:
            y: [S, B, D], this rank's term, to be left alone from now on.

        Returns:
            [S/sp, B, D], which may be read when it was waited for.
        """
        if self.is_sequence_parallel:
            return start_reduce_scatter(y, self.tp)
        return y, start_all_reduce(y, self.tp)

    def sum(self, y: Tensor) -> Tensor:
        """Return from work that is cut over tp to the stream: the sum of all ranks' terms.

        Args:
            y: [S, B, D], this rank's term; may be overwritten.

        Returns:
            [S/sp, B, D].
        """
        if self.is_sequence_parallel:
            return scatter_to_positions(y, self.tp)
        return reduce_from_tp(y, self.tp)
