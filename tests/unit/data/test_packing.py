import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymega.data import packing, row_counts
from raymega.data.arrow import ShardWriter, TokenStream
from raymega.data.open_split import Shape, open_split
from raymega.data.packing import PackedSource, best_fit, cut_documents, window_rows
from raymega.data.row_counts import count_rows
from raymega.data.rows import positions_of
from raymega.data.synthetic import SyntheticDocuments
from raymega.errors import DataError
from tests.unit.data.datasets import write_dataset

CORPORA = st.lists(st.integers(1, 60), min_size=1, max_size=80)


class Counting:
    """Token i of document d is 1000 d + i + 1; every shard has ``per_shard`` documents."""

    def __init__(self, lengths, per_shard=1 << 40):
        self.lengths = np.array(lengths, dtype=np.int64)
        counts = [
            len(lengths[first : first + per_shard]) for first in range(0, len(lengths), per_shard)
        ]
        self.shards = [(count, 8) for count in counts]

    def need(self, shards):
        pass

    is_truncated = False

    def counted(self, document, start, stop):
        return None

    def read(self, document, start, stop):
        assert 0 <= start < stop <= self.lengths[document]
        return 1000 * document + np.arange(start, stop) + 1


def _source(lengths, *, seq_len=24, window=16, multiple=1, per_shard=1 << 40):
    documents = Counting(lengths, per_shard)
    return PackedSource(documents, seq_len=seq_len, window=window, multiple=multiple)


def _rows(source):
    return [source.row(index) for index in range(source.num_windows)]


@settings(deadline=None)
@given(
    CORPORA, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 5, 100]), st.sampled_from([3, 99])
)
def test_every_token_is_read_once(lengths, multiple, window, per_shard):
    source = _source(lengths, multiple=multiple, window=window, per_shard=per_shard)
    rows = _rows(source)
    assert int(source.shards.rows.sum()) == len(rows)
    found = sorted(int(token) for row in rows for token in row.tokens if token)
    assert found == [1000 * d + i + 1 for d, length in enumerate(lengths) for i in range(length)]


@settings(deadline=None)
@given(CORPORA, st.sampled_from([1, 2, 4, 8]))
def test_every_token_but_the_first_of_a_document_is_predicted_once(lengths, multiple):
    rows = _rows(_source(lengths, multiple=multiple))
    found = sorted(int(label) for row in rows for label in row.labels[row.mask])
    wanted = [1000 * d + i + 1 for d, length in enumerate(lengths) for i in range(1, length)]
    assert found == wanted
    for row in rows:
        assert (row.labels[row.mask] == row.tokens[row.mask] + 1).all()
        assert (row.labels[~row.mask] == 0).all()


@settings(deadline=None)
@given(CORPORA, st.sampled_from([1, 2, 4, 8]))
def test_documents_are_apart_and_positions_begin_anew(lengths, multiple):
    for row in _rows(_source(lengths, multiple=multiple)):
        assert sum(row.documents) == len(row.tokens) == 24
        assert all(length % multiple == 0 for length in row.documents)
        ends = np.cumsum(row.documents)
        for start, end in zip(ends - row.documents, ends, strict=True):
            words = row.tokens[start:end]
            words = words[words > 0]
            assert len({int(word) // 1000 for word in words}) <= 1
            assert (np.diff(words) == 1).all()
            # A piece begins its document, or where the piece before ended.
            assert len(words) == 0 or (words[0] % 1000 - 1) % 24 == 0
            assert positions_of(row.documents)[start:end].tolist() == list(range(end - start))


@settings(deadline=None)
@given(CORPORA)
def test_the_mask_ends_where_the_document_ends(lengths):
    for row in _rows(_source(lengths)):
        for token, counts in zip(row.tokens.tolist(), row.mask.tolist(), strict=True):
            is_last = token > 0 and token % 1000 == lengths[token // 1000]
            assert counts == (token > 0 and not is_last)


@settings(deadline=None)
@given(CORPORA, st.integers(1, 40))
def test_rows_hold_no_more_than_they_can(lengths, window):
    lengths = np.minimum(np.array(lengths), 24)
    rows = best_fit(lengths[:window].tolist(), 24)
    assert sorted(piece for row in rows for piece in row) == list(range(len(lengths[:window])))
    for row in rows:
        assert 0 < lengths[row].sum() <= 24
        assert (np.diff(row) > 0).all()


def test_best_fit_takes_the_row_that_is_left_fullest():
    # Longest first: 6 | 5 | 4 goes to 6's row (room 4), 3 to 5's, 2 to what 3 leaves.
    assert best_fit([2, 3, 4, 5, 6], 10) == [[2, 4], [0, 1, 3]]


@pytest.mark.parametrize("seq_len", [1, 24, 63, 64, 65, 900, 5000, 70_000])
def test_rows_are_counted_as_best_fit_makes_them(seq_len):
    random = np.random.default_rng(seq_len)
    lengths = random.integers(0, seq_len + 1, (20, 50))
    lengths[:, 40:] //= 9  # enough short ones for what is left
    lengths[3] = 0
    wanted = [len(best_fit([n for n in row.tolist() if n], seq_len)) for row in lengths]
    assert count_rows(lengths, seq_len).tolist() == wanted


def test_memory_of_the_count_does_not_grow_with_the_documents_of_short_rows(monkeypatch):
    pieces, counted = np.arange(1000) % 8 + 1, []

    def count(lengths, seq_len):
        counted.append(lengths.size)
        return count_rows(lengths, seq_len)

    def rows():
        return window_rows(iter([(pieces, pieces)] * 5), 8, window=10).rows.tolist()

    wanted = rows()
    monkeypatch.setattr(row_counts, "MOST_PIECES", 200)
    monkeypatch.setattr(packing, "count_rows", count)
    assert rows() == wanted and len(wanted) == 500
    assert max(counted) == 200


def test_documents_are_cut_after_every_s_tokens():
    pieces = cut_documents(np.array([5, 24, 50]), 24)
    assert pieces.document.tolist() == [0, 1, 2, 2, 2]
    assert pieces.start.tolist() == [0, 0, 0, 24, 48]
    assert pieces.length.tolist() == [5, 24, 24, 24, 2]


def test_document_of_more_tokens_than_32_bits_count_is_read_where_it_is():
    """As Megatron's files of one document without borders."""
    source = _source([(1 << 31) + (1 << 20)], seq_len=1 << 20)
    assert max(source.held(row)[0].first for row in range(source.num_windows)) == 1 << 31


def test_efficiency_is_the_share_that_is_no_padding():
    source = _source([12, 6, 6, 12])
    assert source.num_windows == 2 and source.efficiency == 36 / 48
    assert source.context == (2 * 144 + 2 * 36) / 36


def test_many_short_documents_leave_little_padding():
    lengths = np.random.default_rng(0).lognormal(4.6, 1.0, 5000).astype(int) + 1
    source = PackedSource(Counting(np.minimum(lengths, 999)), seq_len=1024, window=4096)
    assert source.efficiency > 0.99


def test_prepared_documents_are_packed(tmp_path):
    write_dataset(tmp_path, train=(10, 7), valid=())  # a document a shard; tokens 0 to 16
    source = open_split(
        str(tmp_path), "train", Shape(seq_len=20, packing="best_fit", window=8), seed=0
    )
    # a row has documents of one shard
    assert source.num_windows == 2
    row = source.row(1)
    assert row.documents == (7, 13)
    assert row.tokens.tolist() == [*range(10, 17), *[0] * 13]
    assert np.flatnonzero(~row.mask).tolist() == [6, *range(7, 20)]


def test_dataset_without_boundaries_cannot_be_packed(tmp_path):
    write_dataset(tmp_path, version=1)
    shape = Shape(seq_len=16, packing="best_fit", window=8)
    with pytest.raises(DataError, match="data prepare` again"):
        open_split(str(tmp_path), "train", shape, seed=0)
    assert open_split(str(tmp_path), "train", Shape(seq_len=16), seed=0).num_windows == 4


def test_boundaries_that_do_not_add_up_are_refused(tmp_path):
    meta = write_dataset(tmp_path, train=(10, 7))
    with ShardWriter(tmp_path, "train/000001.arrow", dtype="uint16") as writer:
        writer.append(np.arange(5, dtype=np.uint16))
        writer.close()
    with pytest.raises(DataError, match="have 5 tokens"):
        TokenStream(tmp_path, meta.splits["train"]).document_lengths()


def test_synthetic_documents_are_longer_and_shorter_than_a_row():
    documents = SyntheticDocuments(split="train", seq_len=64, seed=1)
    assert documents.lengths.max() > 64 and documents.lengths.min() < 8
    assert len(documents.read(3, 0, int(documents.lengths[3]))) == documents.lengths[3]
