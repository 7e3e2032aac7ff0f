"""Numbers the answers of a micro-batch's tokens, and counts the labels of each whole answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from raymega.data.preference.pairs import ANSWERS
from raymega.data.rows import Ints, Row
from raymega.parallel.context_parallel.context import Context, PairBatch

Floats = npt.NDArray[np.float64]


def pair_batch(rows: Sequence[Row], held: torch.Tensor, context: Context) -> PairBatch:
    """Return the pairs of a micro-batch's rows.

    Args:
        rows: Rows of the micro-batch, [B].
        held: Positions that this rank holds in its rows, [1 or B, S/cp].
        context: Ranks that share the rows.
    """
    numbers, counts, references = list[Ints](), list[Floats](), list[Floats]()
    first, total = 0, ANSWERS * sum(row.num_pairs for row in rows)
    for row in rows:
        num_answers = ANSWERS * row.num_pairs
        # number of each token's answer; what follows the answers is padding
        each = np.arange(len(row.documents), dtype=np.int64)
        each = np.where(each < num_answers, first + each, total)
        numbers.append(np.repeat(each, row.documents))
        starts = np.cumsum([0, *row.documents])[:num_answers]
        if num_answers:
            # the last answer's sum goes to the end of the row, where nothing else counts
            counts.append(np.add.reduceat(row.mask.astype(np.float64), starts))
        if row.reference is not None:
            references.append(row.reference)
        first += num_answers
    # this rank's positions of the answers' numbers; counts are of whole answers
    mine = held.expand(len(rows), -1).numpy()
    by_pair = torch.from_numpy(np.concatenate(counts)).view(-1, ANSWERS)
    labels = [row.classes for row in rows if row.classes is not None]
    # of an answer with a label of its own, the one to another prompt need not count
    is_counted = (by_pair[:, 0] > 0 if labels else (by_pair > 0).all(1)).double()
    return PairBatch(
        answers=torch.from_numpy(np.take_along_axis(np.stack(numbers), mine, axis=1)),
        counts=by_pair.flatten(),
        is_counted=is_counted,
        num_counted=int(is_counted.sum()) if context.index == 0 else 0,
        reference=torch.from_numpy(np.concatenate(references)) if references else None,
        is_desirable=torch.from_numpy(np.concatenate(labels)).double() if labels else None,
    )
