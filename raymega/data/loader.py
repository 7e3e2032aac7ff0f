"""Turns a position in the data into one rank's micro-batches.

It owns nothing that changes: which samples they are is plan.batch's, which windows data.order's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from raymega.data.open import Source
from raymega.data.order import sample_window
from raymega.plan.batch import BatchPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """What one forward reads.

    Attributes:
        tokens: [B, S] int64.
        labels: [B, S] int64, the token after each token.
        mask: [B, S] float32, 1 where the label counts; a slot without a sample is all 0.
        samples: [B] int64, global sample indices, counted from the start of the run; -1 without.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    samples: torch.Tensor


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
        self._source, self._dp_rank = source, dp_rank
        self._seed, self._device = seed, device

    def micro_batches(self, batch: BatchPlan, first_sample: int) -> list[MicroBatch]:
        """Those of a step with ``batch`` whose first global sample is ``first_sample``."""
        return [
            self._micro_batch(batch.samples(index, self._dp_rank, first_sample))
            for index in range(batch.num_micro_batches)
        ]

    def _micro_batch(self, samples: tuple[int, ...]) -> MicroBatch:
        windows = np.stack([self._window(sample) for sample in samples])
        rows = torch.from_numpy(windows).to(self._device)
        indices = torch.tensor(samples, device=self._device)
        labels = rows[:, 1:].contiguous()
        return MicroBatch(
            tokens=rows[:, :-1].contiguous(),
            labels=labels,
            mask=(indices >= 0)[:, None].expand_as(labels).float(),
            samples=indices,
        )

    def _window(self, sample: int) -> np.ndarray:
        """Tokens of a global sample: [S + 1]; zeros for a masked slot."""
        if sample < 0:
            return np.zeros_like(self._source.window(0))
        num_windows = self._source.num_windows
        return self._source.window(sample_window(self._seed, num_windows, sample))
