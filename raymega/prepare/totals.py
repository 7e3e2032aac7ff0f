"""Sums the reports of all tasks, and computes the unigram cross entropy of the valid split.

It owns the splits' totals and the smoothing of frequencies. Tokens are counted by
`raymega.prepare.shards`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from raymega.data.format import SPLITS, ShardMeta, SplitMeta
from raymega.errors import Fault
from raymega.prepare.documents import too_many_bad
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


def zeros_of(size: int) -> Counts:
    """Return counts of nothing, [size]."""
    return np.zeros(size, dtype=np.int64)


class Totals:
    """Sums over the finished groups, independent of the order in which they finish.

    Attributes:
        reports: Reports of the groups without faults, by index; without their counts.
        faulty: Reports of the others.
        counts: Occurrences of each token by split, [V].
        num_replaced: Number of replacement characters.
        num_bad: Number of bad lines.
        engines: Number of groups that each engine encoded.
    """

    def __init__(self, vocab_size: int, *, max_bad_lines: int = 0) -> None:
        self.num_replaced = self.num_bad = 0
        self.reports: dict[int, GroupDone] = {}
        self.faulty: list[GroupDone] = []
        self.counts: dict[str, Counts] = {}
        self.engines: dict[str, int] = {}
        self._vocab_size, self._max_bad_lines = vocab_size, max_bad_lines
        self._num_text_bytes = dict.fromkeys(SPLITS, 0)

    @property
    def num_groups(self) -> int:
        """Number of groups that were added."""
        return len(self.reports) + len(self.faulty)

    def add(self, done: GroupDone) -> None:
        """Add one task's report."""
        self.num_bad += len(done.bad)
        if done.faults:
            self.faulty.append(done)
            return
        self.num_replaced += done.num_replaced
        if done.parts:
            self.engines[done.engine] = self.engines.get(done.engine, 0) + 1
        for name, part in done.parts.items():
            zeros = zeros_of(self._vocab_size)
            self.counts[name] = self.counts.get(name, zeros) + part.counts
            self._num_text_bytes[name] += part.num_text_bytes
        # Counts of every group would not fit in memory.
        parts = {name: replace(part, counts=zeros_of(0)) for name, part in done.parts.items()}
        self.reports[done.index] = replace(done, parts=parts)

    @property
    def has_too_many_bad(self) -> bool:
        """True if there are more bad lines than allowed."""
        return self.num_bad > self._max_bad_lines

    def faults(self) -> list[Fault]:
        """Return one fault for too many bad lines, and those of all groups in their order."""
        faulty = sorted(self.faulty, key=lambda done: done.index)
        ordered = sorted([*self.reports.values(), *faulty], key=lambda done: done.index)
        bad = [line for done in ordered for line in done.bad]
        found = [too_many_bad(bad, self._max_bad_lines)] if self.has_too_many_bad else []
        # A group that failed for its bad lines has none but these.
        damaged = [done for done in faulty if len(done.bad) <= self._max_bad_lines]
        return [*found, *(fault for done in damaged for fault in done.faults)]

    def splits(self, shards: Sequence[ShardMeta]) -> dict[str, SplitMeta]:
        """Return the splits that have documents, with their shards in order."""
        ordered = sorted(shards, key=lambda shard: shard.file)
        return {
            name: SplitMeta(
                shards=tuple(shard for shard in ordered if shard.file.startswith(f"{name}/")),
                num_text_bytes=self._num_text_bytes[name],
            )
            for name in SPLITS
            if name in self.counts
        }

    def valid_entropy(self) -> float:
        """Return `DatasetMeta.valid_entropy`, in nats per token; -1 without a valid split."""
        if "valid" not in self.counts:
            return -1.0
        return cross_entropy(self.counts["valid"], under=self.counts["train"])

    def split_faults(self, valid_fraction: float) -> list[Fault]:
        """Return a fault for each requested split that has no document."""
        if not self.counts:
            return [
                Fault(
                    fact="all documents are empty",
                    rule="a dataset needs text",
                    remedy="give files with text in them, or the key of the text by --text-key",
                )
            ]
        wanted = SPLITS if valid_fraction else SPLITS[:1]
        return [
            Fault(
                fact=f"the {name} split is empty",
                rule=f"--valid-fraction {valid_fraction} chooses documents by a hash of their text",
                remedy="prepare more documents, change --valid-fraction, or set it to 0",
            )
            for name in wanted
            if name not in self.counts
        ]
