"""Keys of the random numbers of a micro-batch's tokens: a function of seed, sample and position."""

from __future__ import annotations

from torch import Tensor

from raymega.parallel.context_parallel.context import whole_rows
from raymega.parallel.core.dropout import TokenKeys, row_keys
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel


def token_keys(
    seed: int, samples: Tensor, at: Tensor, sp: SequenceParallel, *, row_length: int
) -> TokenKeys:
    """Return the dropout keys of a rank's tokens.

    Args:
        seed: Seed of the run.
        samples: Global sample indices, [B] or [B, S/cp].
        at: Positions of the tokens in their samples, [B, S/cp] or [1, S/cp].
        sp: Placement of the residual stream on the tensor-parallel ranks.
        row_length: Tokens of a whole row, where attention weights are dropped: a query's weights span the keys of
            all ranks. 0 where they are not.
    """
    held = row_keys(seed, samples.t(), at.t())
    own = sp.own(held)
    if not row_length:
        return TokenKeys(own=own, everywhere=held)
    everywhere = whole_rows(row_length, samples.device).positions.t()
    return TokenKeys(own=own, everywhere=held, rows=row_keys(seed, samples, everywhere))
