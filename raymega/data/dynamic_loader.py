"""The micro-batches of one rank under dynamic context parallelism.

The samples of a step are the rows that any layout reads. Here their documents are shared out anew
over dp * cp ranks, as plan.dynamic_cp says; every rank computes the same schedule and reads only the
documents of its own packs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from raymega.data.loader import MicroBatch
from raymega.data.order import sample_window
from raymega.data.packing import Held, PackedSource
from raymega.data.rows import positions_of
from raymega.parallel.context import Context, held_positions
from raymega.plan.batch import BatchPlan
from raymega.plan.dynamic_cp import Limits, Pack, padded_length, schedule_documents
from raymega.plan.pack_cost import PackCost


@dataclass(frozen=True, kw_only=True, slots=True)
class _Document:
    """A piece of a sample's row."""

    sample: int
    held: Held


class DynamicLoader:
    """The micro-batches of one rank, a pure function of the position in the data.

    In each it shares one pack with the ranks of the pack's context.
    """

    def __init__(  # noqa: PLR0913  # build is the one place that calls it
        self,
        source: PackedSource,
        *,
        rank: int,
        contexts: Mapping[int, Context],
        limits: Limits,
        cost: PackCost,
        seed: int,
        device: torch.device | str,
    ) -> None:
        """``rank`` counts over dp * cp; ``contexts`` are by the number of their ranks."""
        self.source, self._rank, self._contexts = source, rank, contexts
        self._limits, self._cost, self._seed, self._device = limits, cost, seed, device

    def micro_batches(self, batch: BatchPlan, first_sample: int) -> list[MicroBatch]:
        """Those of a step with ``batch`` whose first global sample is ``first_sample``.

        All ranks have equally many, but not as many in every step.
        """
        samples = range(first_sample, first_sample + batch.global_batch_size)
        documents = [
            _Document(sample=sample, held=held)
            for sample in samples
            for held in self.source.held(sample_window(self._seed, self.source.num_windows, sample))
        ]
        lengths = [document.held.length for document in documents]
        rounds = schedule_documents(lengths, self._limits, self._cost)
        return [self._micro_batch(self._own(packs), documents) for packs in rounds]

    def _own(self, packs: Sequence[Pack]) -> Pack:
        return next(p for p in packs if p.first_rank <= self._rank < p.first_rank + p.size)

    def _micro_batch(self, pack: Pack, documents: Sequence[_Document]) -> MicroBatch:
        context, mine = self._contexts[pack.size], [documents[i] for i in pack.documents]
        pieces = [
            replace(one.held, padded=padded_length(one.held.length, pack.size)) for one in mine
        ]
        row = self.source.join(pieces, pack.tokens * pack.size)
        positions = positions_of(row.documents)
        padding = len(row.documents) - len(pieces)
        samples = np.repeat([*(one.sample for one in mine), *[-1] * padding], row.documents)
        starts = np.repeat([*(held.start for held in pieces), *[0] * padding], row.documents)
        at = held_positions((row.documents,), context)

        def take(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array)[at].to(self._device)

        return MicroBatch(
            tokens=take(row.tokens),
            labels=take(row.labels),
            mask=take(row.mask).float(),
            samples=take(samples),
            # Padding may reach beyond what the model has positions for.
            positions=take(positions.clip(max=self.source.seq_len - 1)),
            documents=(row.documents,),
            context=context,
            places=take(starts + positions),
        )
