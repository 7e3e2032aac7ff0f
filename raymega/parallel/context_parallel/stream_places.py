"""Places: documents and positions of the tokens of one stream of an encoder-decoder model, cut over context-parallel ranks.

`model/attention/relative_attention.py` makes biases and masks of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raymega.plan.cp_layout import rank_ranges


class Places(NamedTuple):
    """Documents and positions of one stream's tokens.

    Attributes:
        documents: Document of each of this rank's tokens, [B or 1, S/cp] int64; -1 of padding.
        positions: Position of each of them in its document, [B or 1, S/cp] int64.
        key_documents: Documents of the tokens of all context-parallel ranks, end to end by rank, [B or 1, S].
        key_positions: Positions of the tokens of all context-parallel ranks, [B or 1, S].
    """

    documents: Tensor
    positions: Tensor
    key_documents: Tensor
    key_positions: Tensor


def stream_places(
    documents: Tensor, positions: Tensor, lengths: Sequence[int], *, cp: int, cp_rank: int
) -> tuple[Places, Places]:
    """Return the places of encoder and decoder on a context-parallel rank.

    Args:
        documents: Document of each token of whole rows, [B or 1, S] int64; -1 of padding.
        positions: Position of each token in its document's part of its stream, [B or 1, S] int64.
        lengths: Tokens of the encoder and of the decoder in a row, which add up to S.
        cp: Degree of context parallelism.
        cp_rank: Coordinate of the rank on the cp axis.
    """
    found, begin = [], 0
    for length in lengths:
        ranges = [rank_ranges((length,), cp=cp, cp_rank=rank) for rank in range(cp)]
        held = [torch.cat([torch.arange(r.start, r.stop) for r in parts]) for parts in ranges]
        # this rank's tokens, then those of all ranks, which gathered keys have in this order
        own, every = begin + held[cp_rank], begin + torch.cat(held)
        found.append(
            Places(documents[:, own], positions[:, own], documents[:, every], positions[:, every])
        )
        begin += length
    return found[0], found[1]
