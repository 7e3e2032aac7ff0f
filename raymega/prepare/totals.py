"""Sums the reports of all tasks, and computes the unigram cross entropy of the valid split.

It owns the splits' totals and the smoothing of frequencies. Tokens are counted by
`raymega.prepare.shards`.
"""

from __future__ import annotations

import numpy as np

from raymega.data.format import SPLITS, ShardMeta, SplitMeta
from raymega.errors import Fault
from raymega.prepare.shards import Counts, GroupDone


def cross_entropy(counts: Counts, *, under: Counts) -> float:
    """Return the mean of -ln q(token) over the tokens in ``counts``, in nats per token.

    q is the distribution of ``under`` with one added to every count, so that a token that never
    occurs there has a finite loss.

    Args:
        counts: Number of occurrences of each token, [V].
        under: Number of occurrences of each token that q is made from, [V].
    """
    # ln of (n + 1) / (N + V).
    log_q = np.log(under + 1) - np.log(under.sum() + len(under))
    return float(-(counts * log_q).sum() / counts.sum())


class Totals:
    """Sums over the finished groups, independent of the order in which they finish."""

    def __init__(self, vocab_size: int) -> None:
        self.num_groups = self.num_replaced = 0
        self.faults: list[Fault] = []
        self.counts: dict[str, Counts] = {}
        self.engines: dict[str, int] = {}
        self._vocab_size = vocab_size
        self._num_text_bytes = dict.fromkeys(SPLITS, 0)
        self._shards: dict[str, list[ShardMeta]] = {name: [] for name in SPLITS}

    def add(self, done: GroupDone) -> None:
        """Add one task's report."""
        self.num_groups += 1
        self.num_replaced += done.num_replaced
        self.faults += done.faults
        if done.parts:
            self.engines[done.engine] = self.engines.get(done.engine, 0) + 1
        for name, part in done.parts.items():
            zeros = np.zeros(self._vocab_size, dtype=np.int64)
            self.counts[name] = self.counts.get(name, zeros) + part.counts
            self._num_text_bytes[name] += part.num_text_bytes
            self._shards[name].append(part.shard)

    def splits(self) -> dict[str, SplitMeta]:
        """Return the splits that have documents, with shards in order of their groups."""
        return {
            name: SplitMeta(
                shards=tuple(sorted(self._shards[name], key=lambda shard: shard.file)),
                num_text_bytes=self._num_text_bytes[name],
            )
            for name in SPLITS
            if self._shards[name]
        }

    def valid_entropy(self) -> float:
        """Return `DatasetMeta.valid_entropy`, in nats per token; -1 without a valid split."""
        if "valid" not in self.counts:
            return -1.0
        return cross_entropy(self.counts["valid"], under=self.counts["train"])

    def split_faults(self, valid_fraction: float) -> list[Fault]:
        """Return a fault for each requested split that has no document."""
        wanted = SPLITS if valid_fraction else SPLITS[:1]
        return [
            Fault(
                fact=f"the {name} split is empty",
                rule=f"--valid-fraction {valid_fraction} chooses documents by a hash of their names",
                remedy="prepare more documents, change --valid-fraction, or set it to 0",
            )
            for name in wanted
            if name not in self.counts
        ]
