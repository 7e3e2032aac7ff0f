"""Loads the micro-batches of one rank under dynamic context parallelism.

The samples of a step are the same rows that any layout reads. Here their documents are distributed
anew over the dp * cp ranks by `raymega.plan.packing.dynamic_cp`. Every rank computes the same
schedule and reads only the documents of its own packs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from raymega.data.batch_copy import PackedBatches, pack_batches
from raymega.data.packing import PlacedPiece, join
from raymega.data.prefetch import Ahead
from raymega.data.rows import later_of, positions_of
from raymega.data.samples import Samples
from raymega.parallel.context_parallel.context import (
    Context,
    MicroBatch,
    Rows,
    complete_rows,
    held_positions,
)
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
    """A piece of a document in a sample's row."""

    sample: int
    held: PlacedPiece


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """Rank's micro-batches of a step, and the rounds of packs that distribute its documents."""

    batches: PackedBatches
    rounds: Sequence[Round]


class DynamicLoader:
    """Loader of one rank's micro-batches, a pure function of the position in the data.

    In each micro-batch the rank shares one pack with the other ranks of the pack's context. A thread
    schedules and loads the next step while a step runs.
    """

    def __init__(  # noqa: PLR0913  # raymega.train.build is the only caller
        self,
        source: Samples,
        *,
        rank: int,
        contexts: Mapping[int, Context],
        limits: PackLimits,
        cost: PackCost,
        device: torch.device | str,
        is_guessing: bool = False,
        timeout_s: float = 600.0,
        depth: int = 0,
    ) -> None:
        """Make the loader of one rank.

        Args:
            source: Packed rows of the split, by global sample.
            rank: Rank of the dp * cp ranks that share a step's documents.
            contexts: Context-parallel contexts by the number of their ranks.
            limits: Limits of packs and ranks.
            cost: Cost model by which packs are balanced.
            device: Device of the micro-batches' tensors.
            is_guessing: True to load the next step while a step runs.
            timeout_s: Longest wait for a step's micro-batches, in seconds.
            depth: Number of further tokens to predict, see `MicroBatch.later`; 0 for none.
        """
        self.source, self._rank, self._contexts = source, rank, contexts
        self._limits, self._cost, self._device = limits, cost, device
        self._steps = Ahead[_Step](is_guessing=is_guessing, timeout_s=timeout_s)
        self._depth = depth
        self._balance: dict[str, float] = {}

    def begin(self, batch: BatchPlan, first_sample: int) -> None:
        """Begin to load the micro-batches of a step, as soon as it is known which one is the first."""
        self._steps.begin(self._load, batch, first_sample)

    def micro_batches(self, batch: BatchPlan, first_sample: int) -> list[MicroBatch]:
        """Return the micro-batches of a step with ``batch`` that begins at ``first_sample``.

        All ranks have the same number of them, which differs from step to step.
        """
        step = self._steps.of(self._load, batch, first_sample)
        self._balance = _balance(step.rounds, self._limits.num_ranks)
        return step.batches.on_device(self._device)

    @property
    def waited_s(self) -> float:
        """Seconds for which the newest step's micro-batches were waited for."""
        return self._steps.waited_s

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the newest step by their names in `raymega.tracking.names`."""
        return self._balance | {"data/schedule_wait_s": self._steps.waited_s}

    def _load(self, batch: BatchPlan, first_sample: int) -> _Step:
        documents = [
            _Document(sample=sample, held=held)
            for sample in range(first_sample, first_sample + batch.global_batch_size)
            for held in self.source.held(sample)
        ]
        # All ranks compute this schedule from the same lengths, without communication.
        lengths = [document.held.length for document in documents]
        rounds = schedule_documents(lengths, self._limits, self._cost)
        mine = [self._micro_batch(self._own(packs), documents) for packs in rounds]
        return _Step(batches=pack_batches(mine, self._device), rounds=rounds)

    def _own(self, packs: Sequence[Pack]) -> Pack:
        return next(p for p in packs if p.first_rank <= self._rank < p.first_rank + p.size)

    def _micro_batch(self, pack: Pack, documents: Sequence[_Document]) -> MicroBatch:
        # pad each piece so that the pack's ranks get equal shares
        context, mine = self._contexts[pack.size], [documents[i] for i in pack.documents]
        pieces = [
            replace(one.held, padded=padded_length(one.held.length, pack.size)) for one in mine
        ]
        # The whole pack as one row; samples and starts are per token of it.
        row = join(pieces, pack.tokens * pack.size)
        positions = positions_of(row.documents)
        padding = len(row.documents) - len(pieces)
        samples = np.repeat([*(one.sample for one in mine), *[-1] * padding], row.documents)
        starts = np.repeat([*(held.start for held in pieces), *[0] * padding], row.documents)
        # Keep only the tokens that this rank of the context holds.
        at = held_positions((row.documents,), context)
        labels, masks = later_of(row, self._depth)

        def take(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array)[..., at]

        mask = take(row.mask).float()
        rows = Rows(
            # Padding may reach beyond what the model has positions for.
            take(positions.clip(max=self.source.seq_len - 1)),
            documents=(row.documents,),
            context=context,
            row_positions=take(starts + positions),
        )
        return MicroBatch(
            tokens=take(row.tokens),
            labels=take(row.labels),
            mask=mask,
            num_counted=int(mask.sum()),
            samples=take(samples),
            rows=complete_rows(rows, context),
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
