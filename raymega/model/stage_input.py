"""Tokens: what a pipeline stage reads of a micro-batch, whoever made it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from raymega.model.mtp import FutureLabels
from raymega.parallel.context_parallel.context import Context, Rows


class Tokens(Protocol):
    """The parts of a micro-batch that a stage reads; tensors are [B, S/cp] where nothing else is said."""

    @property
    def tokens(self) -> Tensor:
        """int64."""

    @property
    def labels(self) -> Tensor:
        """int64; any number where the mask is 0."""

    @property
    def mask(self) -> Tensor:
        """1 where the token's loss counts, else 0."""

    @property
    def samples(self) -> Tensor:
        """[B] int64, global sample indices; or one a token."""

    @property
    def positions(self) -> Tensor:
        """int64, in the tokens' documents; [1, S/cp] where all rows have the same."""

    @property
    def documents(self) -> Sequence[Sequence[int]]:
        """Lengths of each row's whole documents; a single entry stands for all rows."""

    @property
    def context(self) -> Context | None:
        """The ranks that share the rows, where that differs between micro-batches."""

    @property
    def row_positions(self) -> Tensor | None:
        """[B, S/cp] int64, of the tokens in their samples; None where documents tell."""

    @property
    def later(self) -> FutureLabels | None:
        """Labels and mask further ahead, [depth, B, S/cp] each; None where none are predicted."""


def rows_of(micro_batch: Tokens) -> Rows:
    """Return what the rows of ``micro_batch`` are made of."""
    return Rows(
        micro_batch.positions, micro_batch.documents, micro_batch.context, micro_batch.row_positions
    )
