"""Finds the tokens of a micro-batch that a head's scores are read at, and numbers their documents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from raymega.config.heads.section import Pooling
from raymega.data.rows import Row
from raymega.parallel.context_parallel.context import Context, ScoreBatch


def score_batch(
    rows: Sequence[Row], held: torch.Tensor, context: Context, *, pooling: Pooling
) -> ScoreBatch:
    """Return the scored documents of a micro-batch's rows; the batch has none where no row has any.

    Args:
        rows: Rows of the micro-batch, [B].
        held: Positions that this rank holds in its rows, [1 or B, S/cp].
        context: Ranks that share the rows.
        pooling: Tokens of a document that count.
    """
    places, documents, weights, classes, first = [], [], [], [], 0
    mine = held.expand(len(rows), -1).numpy()
    for number, row in enumerate(rows):
        # place of each position of the row on this rank, -1 on others
        here = np.full(len(row.tokens), -1)
        here[mine[number]] = np.arange(mine.shape[1])
        starts = np.cumsum([0, *row.documents])[: len(row.lengths)]
        for start, length in zip(starts.tolist(), row.lengths, strict=True):
            at = {"last": slice(length - 1, length), "first": slice(0, 1), "mean": slice(0, length)}
            found = here[start : start + length][at[pooling]]
            weight = 1.0 / len(found)
            found = found[found >= 0]
            places.append(found * len(rows) + number)
            documents.append(np.full(len(found), first))
            weights.append(np.full(len(found), weight))
            first += 1
        if row.num_pairs:
            labels = np.zeros(row.num_pairs, np.int64) if row.classes is None else row.classes
            classes.append(labels)
    labels = np.concatenate(classes) if classes else np.zeros(0, np.int64)
    # a class below 0 is none; a value may be
    if labels.dtype == np.int64:
        is_counted = torch.from_numpy(labels >= 0).double()
        labels = np.maximum(labels, 0)
    else:
        is_counted = torch.ones(len(labels), dtype=torch.float64)
    whole = np.concatenate([np.zeros(0, np.int64), *places])
    return ScoreBatch(
        places=torch.from_numpy(whole),
        documents=torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *documents])),
        weights=torch.from_numpy(np.concatenate([np.zeros(0), *weights])),
        labels=torch.from_numpy(labels),
        is_counted=is_counted,
        num_documents=first,
        num_counted=int(is_counted.sum()) if context.index == 0 else 0,
    )
