"""Marks: which token of the micro-batch each one is that a rank routes, and whether it counts.

What a router decides over many tokens goes by these numbers, so it is the same on any layout.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from raymega.parallel.comm.process_groups import Group


@dataclass(frozen=True, kw_only=True)
class TokenIds:
    """The tokens that the rank routes, in the order in which it holds them; what follows is made once.

    Attributes:
        numbers: [T] int64, row times S plus place in the row.
        is_counted: [T] bool; false for what no statistic may see, such as padding.
        row_length: S.
    """

    numbers: Tensor
    is_counted: Tensor
    row_length: int
    _repeated: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def rows(self) -> Tensor:
        """Each token's row of the micro-batch: [T]."""
        return self.numbers // self.row_length

    @cached_property
    def counted(self) -> Tensor:
        """1 for a token that counts, else 0: [T] float64."""
        return self.is_counted.to(torch.float64)

    @cached_property
    def num_counted(self) -> Tensor:
        """A scalar."""
        return self.counted.sum()

    def counted_choices(self, top_k: int) -> Tensor:
        """``counted`` for each choice of each token: [T * k]."""
        if top_k not in self._repeated:
            self._repeated[top_k] = self.counted.repeat_interleave(top_k)
        return self._repeated[top_k]


def plain_token_ids(x: Tensor, micro: Group) -> TokenIds:
    """For whole rows on one rank of which every token counts. x: [S, B, D]."""
    assert micro.size == 1, "which tokens other ranks hold must be told"
    length, num_rows = x.shape[:2]
    at = torch.arange(length, device=x.device)[:, None]
    numbers = at + torch.arange(num_rows, device=x.device) * length
    is_counted = torch.ones(length * num_rows, dtype=torch.bool, device=x.device)
    return TokenIds(numbers=numbers.flatten(), is_counted=is_counted, row_length=length)
