"""TokenIds: the numbers in the micro-batch of the tokens that a rank routes, and whether each counts.

A router's decisions over many tokens use these numbers, so they are the same on every layout.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from raymega.parallel.comm.process_groups import Group


@dataclass(frozen=True, kw_only=True)
class TokenIds:
    """Numbers of the tokens that the rank routes, in its order; derived values are cached.

    Attributes:
        numbers: Number of each token, row * S + position in the row, [T] int64.
        is_counted: Mask [T] bool; False for tokens that statistics must ignore, such as padding.
        row_length: Number of tokens of a whole row, S.
    """

    numbers: Tensor
    is_counted: Tensor
    row_length: int
    _repeated: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def rows(self) -> Tensor:
        """Row of the micro-batch of each token, [T]."""
        return self.numbers // self.row_length

    @cached_property
    def counted(self) -> Tensor:
        """Mask of the tokens that count, as 1 and 0, [T] float64."""
        return self.is_counted.to(torch.float64)

    @cached_property
    def num_counted(self) -> Tensor:
        """Number of tokens that count, a scalar tensor."""
        return self.counted.sum()

    def counted_choices(self, top_k: int) -> Tensor:
        """Return ``counted`` for each choice of each token, [T * k]."""
        if top_k not in self._repeated:
            self._repeated[top_k] = self.counted.repeat_interleave(top_k)
        return self._repeated[top_k]


def plain_token_ids(x: Tensor, micro: Group) -> TokenIds:
    """Return the ids of whole rows x [S, B, D] on one rank, of which every token counts."""
    assert micro.size == 1, "which tokens other ranks hold must be told"
    length, num_rows = x.shape[:2]
    at = torch.arange(length, device=x.device)[:, None]
    # x is [S, B, D], so neighbours in memory are of different rows
    numbers = at + torch.arange(num_rows, device=x.device) * length
    is_counted = torch.ones(length * num_rows, dtype=torch.bool, device=x.device)
    return TokenIds(numbers=numbers.flatten(), is_counted=is_counted, row_length=length)
