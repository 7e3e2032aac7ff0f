"""Rows: labels further ahead, looked up in the documents token by token, where documents are cut."""

from itertools import accumulate

import pytest

from raymega.data.packing import PackedSource
from raymega.data.rows import later_of
from tests.unit.data.test_dynamic_loader import Counting

SEQ_LEN = 20


def _end_of_piece(row, index):
    """Where the piece of a document that token ``index`` is in ends in the row."""
    return next(end for end in accumulate(row.documents) if end > index)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("lengths", [[45], [20, 6, 7, 8, 53], [21, 19], [2, 1, 40]], ids=str)
def test_labels_further_ahead_are_those_tokens_of_the_same_piece(lengths, depth):
    """Token i of document d is 1000 d + i + 1: a label k tokens further is as many more, or masked."""
    source = PackedSource(Counting(lengths), seq_len=SEQ_LEN, window=64)
    for row in (source.row(number) for number in range(source.num_windows)):
        labels, masks = later_of(row, depth)
        for k, at in ((k, at) for k in range(1, depth + 1) for at in range(SEQ_LEN)):
            document, place = divmod(int(row.tokens[at]) - 1, 1000)
            end = _end_of_piece(row, at)
            # the label of a piece's last token is the document's next one, and nothing lies behind it
            is_there = row.tokens[at] > 0 and at + k < end and place + 1 + k < lengths[document]
            assert masks[k - 1, at] == is_there, (row.documents, k, at)
            if is_there:
                assert labels[k - 1, at] == 1000 * document + place + 1 + k + 1
