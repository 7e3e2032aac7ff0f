"""Places of the tokens that scores are read at: on one rank, and on ranks that hold parts of a row."""

import numpy as np
import pytest
import torch

from raymega.data.heads.score_batch import score_batch
from raymega.data.rows import Row, empty_row
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.context_parallel.context import Context, held_positions, no_context

DOCUMENTS, LENGTHS = (8, 4, 4), (5, 3)
ROW = Row(
    tokens=np.arange(16), labels=np.zeros(16, np.int64), mask=np.ones(16, np.bool_), documents=DOCUMENTS,
    num_pairs=2, lengths=LENGTHS, classes=np.array([2, 0]),
)  # fmt: skip
TOKENS = {"last": [4, 10], "first": [0, 8], "mean": [0, 1, 2, 3, 4, 8, 9, 10]}


def _contexts(size):
    alone = no_context().inner
    for index in range(size):
        group = Group(name="cp", ranks=tuple(range(size)), index=index, timeout_s=60, handle=None)
        yield Context(inner=alone, outer=group)


@pytest.mark.parametrize("pooling", TOKENS)
def test_padding_is_never_read(pooling):
    rows, context = [empty_row(16), ROW], no_context()
    held = held_positions(((16,), DOCUMENTS), context)
    batch = score_batch(rows, held, context, pooling=pooling)
    assert (batch.places // 2).tolist() == TOKENS[pooling]
    assert set((batch.places % 2).tolist()) == {1}, "of the second row"
    assert (
        torch.zeros(2).double().index_add(0, batch.documents, batch.weights).tolist()
        == [pytest.approx(1)] * 2
    )
    assert (batch.labels.tolist(), batch.num_counted, batch.num_documents) == ([2, 0], 2, 2)


@pytest.mark.parametrize("pooling", TOKENS)
def test_ranks_share_the_tokens_and_one_counts(pooling):
    found, counted, weights = [], [], torch.zeros(2).double()
    for context in _contexts(2):
        held = held_positions((DOCUMENTS,), context)
        batch = score_batch([ROW], held, context, pooling=pooling)
        found += held[0][batch.places].tolist()
        counted.append(batch.num_counted)
        weights = weights.index_add(0, batch.documents, batch.weights)
    assert sorted(found) == TOKENS[pooling]
    assert counted == [2, 0]
    assert weights.tolist() == [pytest.approx(1)] * 2


def test_a_batch_of_empty_rows_has_no_document():
    batch = score_batch([empty_row(8)], torch.arange(8)[None], no_context(), pooling="mean")
    assert (batch.num_documents, batch.num_counted, len(batch.places)) == (0, 0, 0)
