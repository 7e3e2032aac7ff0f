"""Pairs of answers: whole in a row, padded, cut at half a row, and what of them counts."""

import numpy as np

from raymega.data.preference.pair_batch import pair_batch
from raymega.data.preference.pairs import PairDocuments, PairedSource
from raymega.parallel.context_parallel.context import held_positions, no_context

LENGTHS = [3, 5, 9, 2, 1, 4]


class _Answers:
    """Six answers; the tokens of answer d are 100 d, 100 d + 1, ...; the last two of each count."""

    lengths = np.array(LENGTHS)
    shards = ((6, 60),)
    is_truncated = True

    def need(self, shards):
        pass

    def read(self, document, start, stop):
        return 100 * document + np.arange(start, stop)

    def counted(self, document, start, stop):
        return np.arange(start, stop) >= LENGTHS[document] - 2


def _source(window=64, multiple=2):
    pairs = PairDocuments(_Answers(), seq_len=12, multiple=multiple)
    return PairedSource(pairs, window=window)


def test_answers_are_cut_at_half_a_row_and_padded_apart():
    pairs = _source().pairs
    assert pairs.cut.tolist() == [[3, 5], [6, 2], [1, 4]]
    assert pairs.lengths.tolist() == [4 + 6, 6 + 2, 2 + 4]
    assert pairs.read(0, 0, 10).tolist() == [0, 1, 2, 0, 100, 101, 102, 103, 104, 0]
    # answer 2 has lost its labels with its end; a first token is never a label
    assert pairs.counted(0, 0, 10).tolist() == [0, 1, 1, 0, 0, 0, 0, 1, 1, 0]
    assert pairs.counted(1, 0, 8).tolist() == [0, 0, 0, 0, 0, 0, 0, 1]
    assert pairs.counted(2, 0, 6).tolist() == [0, 0, 0, 0, 1, 1]


def test_rows_hold_whole_pairs_the_chosen_answer_first():
    source = _source(window=1)
    assert source.num_windows == 3
    source.reference = np.array([[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0]])
    row = source.row(0)
    assert (row.num_pairs, row.documents) == (1, (4, 6, 2))
    assert row.reference.tolist() == [-1.0, -2.0]
    counted = row.labels[row.mask]
    assert counted.tolist() == [1, 2, 103, 104]


def test_lengths_that_speeds_are_reckoned_by_are_those_of_answers():
    source = _source()
    lengths = source.pairs.cut.flatten()
    assert source.efficiency == lengths.sum() / (3 * 12)
    assert source.context == (lengths**2).sum() / lengths.sum()


def test_a_batch_numbers_answers_and_counts_pairs_that_have_both_labels():
    source = _source(window=1)
    rows = [source.row(number) for number in range(3)]
    whole = no_context()
    held = held_positions([row.documents for row in rows], whole)
    batch = pair_batch(rows, held, whole)
    assert batch.answers[0].tolist() == [0] * 4 + [1] * 6 + [6] * 2
    assert batch.answers[2].tolist() == [4] * 2 + [5] * 4 + [6] * 6
    assert batch.counts.tolist() == [2, 2, 0, 1, 0, 2]
    assert batch.is_counted.tolist() == [1, 0, 0]
    assert batch.num_counted == 1
    assert batch.reference is None


def test_pairs_that_lie_in_two_shards_are_all_there():
    class Uneven(_Answers):
        shards = ((3, 30), (3, 30))

    pairs = PairDocuments(Uneven(), seq_len=12, multiple=2)
    assert pairs.shards == ((1, 30), (2, 30))
    source = PairedSource(pairs, window=1)
    assert source.num_windows == 3
    assert [source.held(row)[0].document for row in range(3)] == [0, 1, 2]
