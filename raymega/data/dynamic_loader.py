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

from raymega.data.order import sample_window
from raymega.data.packing import PackedSource, PlacedPiece
from raymega.data.prefetch import Ahead
from raymega.data.rows import later_of, positions_of
from raymega.parallel.context_parallel.context import Context, MicroBatch, held_positions
from raymega.plan.batch import BatchPlan
from raymega.plan.packing.cost import PackCost
from raymega.plan.packing.dynamic_cp import (
    Pack,
    PackLimits,
    Round,
    imbalance,
    padded_length,
    schedule_documents,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Document:
    """A piece of a sample's row."""

    sample: int
    held: PlacedPiece


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """The documents of a step's samples, and where they go."""

    documents: Sequence[_Document]
    rounds: Sequence[Round]


class DynamicLoader:
    """The micro-batches of one rank, a pure function of the position in the data.

    In each it shares one pack with the ranks of the pack's context. The next step's schedule is made
    in a thread while a step runs.
    """

    def __init__(  # noqa: PLR0913  # build is the one place that calls it
        self,
        source: PackedSource,
        *,
        rank: int,
        contexts: Mapping[int, Context],
        limits: PackLimits,
        cost: PackCost,
        seed: int,
        device: torch.device | str,
        is_guessing: bool = False,
        timeout_s: float = 600.0,
        depth: int = 0,
    ) -> None:
        """``rank`` counts over dp * cp; ``contexts`` are by the number of their ranks.

        ``is_guessing`` makes schedules ahead; one is waited for at most ``timeout_s``. ``depth``: see
        MicroBatch.later.
        """
        self.source, self._rank, self._contexts = source, rank, contexts
        self._limits, self._cost, self._seed, self._device = limits, cost, seed, device
        self._steps = Ahead(self._schedule, is_guessing=is_guessing, timeout_s=timeout_s)
        self._depth = depth
        self._balance: dict[str, float] = {}

    def micro_batches(self, batch: BatchPlan, first_sample: int) -> list[MicroBatch]:
        """Those of a step with ``batch`` whose first global sample is ``first_sample``.

        All ranks have equally many, but not as many in every step.
        """
        step = self._steps.of(first_sample, batch.global_batch_size)
        self._balance = _balance(step.rounds, self._limits.num_ranks)
        return [self._micro_batch(self._own(packs), step.documents) for packs in step.rounds]

    def metrics(self) -> dict[str, float]:
        """Of the newest step, by the names of tracking.names."""
        return self._balance | {"data/schedule_wait_s": self._steps.waited_s}

    def _schedule(self, first_sample: int, num_samples: int) -> _Step:
        documents = [
            _Document(sample=sample, held=held)
            for sample in range(first_sample, first_sample + num_samples)
            for held in self.source.held(sample_window(self._seed, self.source.num_windows, sample))
        ]
        lengths = [document.held.length for document in documents]
        rounds = schedule_documents(lengths, self._limits, self._cost)
        return _Step(documents=documents, rounds=rounds)

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
        labels, masks = later_of(row, self._depth)

        def take(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array)[..., at].to(self._device)

        return MicroBatch(
            tokens=take(row.tokens),
            labels=take(row.labels),
            mask=take(row.mask).float(),
            samples=take(samples),
            # Padding may reach beyond what the model has positions for.
            positions=take(positions.clip(max=self.source.seq_len - 1)),
            documents=(row.documents,),
            context=context,
            row_positions=take(starts + positions),
            later=(take(labels), take(masks).float()) if self._depth else None,
        )


def _balance(rounds: Sequence[Round], num_ranks: int) -> dict[str, float]:
    packs = [pack for packs in rounds for pack in packs if pack.documents]
    tokens = sum(pack.tokens * pack.size for pack in packs)
    return {
        "data/imbalance": imbalance(rounds, num_ranks),
        "data/micro_batches": float(len(rounds)),
        "data/pack_ranks": sum(pack.tokens * pack.size**2 for pack in packs) / tokens,
        "data/most_pack_ranks": float(max(pack.size for pack in packs)),
    }
