"""Marks: which token of the micro-batch each one is that a rank holds, and whether it counts.

What a router decides over many tokens goes by these numbers, so it is the same on any layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from raymega.parallel.groups import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMarks:
    """The tokens in the order in which the rank holds them.

    Attributes:
        numbers: [S/(cp*sp), B] int64, row times S plus place in the row.
        is_counted: [S/(cp*sp), B] bool; false for what no statistic may see, such as padding.
        row_length: S.
    """

    numbers: Tensor
    is_counted: Tensor
    row_length: int

    def of_tokens(self, part: slice) -> TokenMarks:
        """Of some of the tokens, in one line."""
        return TokenMarks(
            numbers=self.numbers.flatten()[part],
            is_counted=self.is_counted.flatten()[part],
            row_length=self.row_length,
        )

    @property
    def rows(self) -> Tensor:
        """Each token's row of the micro-batch."""
        return self.numbers // self.row_length


def plain_marks(x: Tensor, micro: Group) -> TokenMarks:
    """For whole rows on one rank of which every token counts. x: [S, B, D]."""
    assert micro.size == 1, "which tokens other ranks hold must be told"
    length, num_rows = x.shape[:2]
    at = torch.arange(length, device=x.device)[:, None]
    rows = torch.arange(num_rows, device=x.device) * length
    is_counted = torch.ones(length, num_rows, dtype=torch.bool, device=x.device)
    return TokenMarks(numbers=at + rows, is_counted=is_counted, row_length=length)
