"""Turns a position in the data into one rank's micro-batches.

It owns nothing that changes: which samples they are is plan.batch's, which rows data.order's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from raymega.data.order import sample_window
from raymega.data.rows import Row, Source, empty_row, positions_of
from raymega.plan.batch import BatchPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """What one forward reads.

    Attributes:
        tokens: [B, S] int64.
        labels: [B, S] int64, the token after each token.
        mask: [B, S] float32, 1 where the label counts; a slot without a sample is all 0.
        samples: [B] int64, global sample indices, counted from the start of the run; -1 without.
        positions: [B, S] int64, place of each token in its document.
        documents: By row, lengths of its documents end to end; they add up to S.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    samples: torch.Tensor
    positions: torch.Tensor
    documents: tuple[tuple[int, ...], ...]


class Loader:
    """The micro-batches of one data-parallel rank, a pure function of the position in the data."""

    def __init__(
        self,
        source: Source,
        *,
        dp_rank: int,
        seed: int,
        device: torch.device | str,
    ) -> None:
        """``seed`` orders the data; all ranks of a run share it."""
        self.source, self._dp_rank = source, dp_rank
        self._seed, self._device = seed, device

    def micro_batches(self, batch: BatchPlan, first_sample: int) -> list[MicroBatch]:
        """Those of a step with ``batch`` whose first global sample is ``first_sample``."""
        return [
            self._micro_batch(batch.samples(index, self._dp_rank, first_sample))
            for index in range(batch.num_micro_batches)
        ]

    def _micro_batch(self, samples: tuple[int, ...]) -> MicroBatch:
        rows = [self._row(sample) for sample in samples]
        return MicroBatch(
            tokens=self._stack([row.tokens for row in rows]),
            labels=self._stack([row.labels for row in rows]),
            mask=self._stack([row.mask for row in rows]).float(),
            samples=torch.tensor(samples, device=self._device),
            positions=self._stack([positions_of(row.documents) for row in rows]),
            documents=tuple(row.documents for row in rows),
        )

    def _stack(self, arrays: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.stack(arrays)).to(self._device)

    def _row(self, sample: int) -> Row:
        """The row of a global sample; for a masked slot one that counts nowhere."""
        if sample < 0:
            return empty_row(self.source.seq_len)
        return self.source.row(self._window(sample))

    def _window(self, sample: int) -> int:
        return sample_window(self._seed, self.source.num_windows, sample)
