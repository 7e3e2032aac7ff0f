"""Loads one rank's micro-batches for a position in the data.

It keeps no state. `raymega.plan.batch` assigns samples to micro-batches, `raymega.data.samples`
assigns rows to samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
import torch

from raymega.data.rows import NumberedRows, Row, empty_row, later_of, positions_of
from raymega.parallel.context_parallel.context import (
    Context,
    MicroBatch,
    held_positions,
    no_context,
)
from raymega.plan.batch import BatchPlan

R = TypeVar("R", bound=NumberedRows)


class Loader(Generic[R]):
    """Loader of one rank's micro-batches, a pure function of the position in the data.

    From each row it keeps only the tokens that this rank of ``context`` holds.
    """

    def __init__(
        self,
        source: R,
        *,
        dp_rank: int,
        device: torch.device | str,
        context: Context | None = None,
        depth: int = 0,
    ) -> None:
        """Make the loader of one rank.

        Args:
            source: Rows by global sample.
            dp_rank: Data-parallel rank of the loader.
            device: Device of the micro-batches' tensors.
            context: Context-parallel context of this rank; None for whole rows.
            depth: Number of further tokens to predict, see `MicroBatch.later`; 0 for none.
        """
        self.source, self._dp_rank, self._depth = source, dp_rank, depth
        self._device, self._context = device, context or no_context()

    def micro_batches(self, batch: BatchPlan, first_sample: int) -> list[MicroBatch]:
        """Return the micro-batches of a step with ``batch`` that begins at ``first_sample``."""
        return [
            self._micro_batch(batch.samples(index, self._dp_rank, first_sample))
            for index in range(batch.num_micro_batches)
        ]

    def _micro_batch(self, samples: tuple[int, ...]) -> MicroBatch:
        rows = [self._row(sample) for sample in samples]
        # Rows with equal documents share one entry of positions.
        documents = tuple(row.documents for row in rows)
        if len(set(documents)) == 1:
            documents = documents[:1]
        # positions that this context-parallel rank holds: [1 or B, S/cp]
        held = held_positions(documents, self._context)
        mine = held.expand(len(rows), -1)

        def take(arrays: Sequence[np.ndarray], at: torch.Tensor = mine) -> torch.Tensor:
            return torch.from_numpy(np.stack(arrays)).gather(1, at).to(self._device)

        # [depth, B, S/cp]: by depth first, then by row
        def take_later() -> tuple[torch.Tensor, torch.Tensor]:
            labels, masks = zip(*(later_of(row, self._depth) for row in rows), strict=True)
            by_depth = [[row[k] for row in labels] for k in range(self._depth)]
            counts = [[row[k] for row in masks] for k in range(self._depth)]
            return torch.stack([*map(take, by_depth)]), torch.stack([*map(take, counts)]).float()

        return MicroBatch(
            tokens=take([row.tokens for row in rows]),
            # Shifted by one in the whole row: the last token of a rank's part has a label too.
            labels=take([row.labels for row in rows]),
            mask=take([row.mask for row in rows]).float(),
            samples=torch.tensor(samples, device=self._device),
            positions=take([positions_of(lengths) for lengths in documents], held),
            documents=documents,
            later=take_later() if self._depth else None,
        )

    def _row(self, sample: int) -> Row:
        """Return the row of a global sample; a masked slot gets an empty row, without labels."""
        if sample < 0:
            return empty_row(self.source.seq_len)
        return self.source.row(sample)
