import pytest

from raymega.data.open_split import Shape, open_split
from raymega.errors import DataError
from tests.unit.data.datasets import write_dataset


def test_windows_overlap_by_one_token_and_lie_in_one_shard(tmp_path):
    write_dataset(tmp_path, train=(50, 5, 31))
    source = open_split(str(tmp_path), "train", Shape(seq_len=7), seed=0)
    starts = [*range(0, 49, 7), *range(55, 83, 7)]
    assert source.num_windows == 11 and source.shards.rows.tolist() == [7, 0, 4]
    for index, start in enumerate(starts):
        assert source.window(index).tolist() == list(range(start, start + 8))


@pytest.mark.parametrize("num_tokens, num_windows", [(8, 1), (14, 1), (15, 2)])
def test_only_whole_windows_count(tmp_path, num_tokens, num_windows):
    write_dataset(tmp_path, train=(num_tokens,))
    source = open_split(str(tmp_path), "train", Shape(seq_len=7), seed=0)
    assert source.num_windows == num_windows


def test_synthetic_needs_no_file():
    assert open_split("synthetic", "valid", Shape(seq_len=16), seed=1).window(0).shape == (17,)


def test_split_that_cannot_serve_a_window_is_refused(tmp_path):
    write_dataset(tmp_path, train=(7,), valid=())
    with pytest.raises(DataError, match=r"seq_len=7 takes 8"):
        open_split(str(tmp_path), "train", Shape(seq_len=7), seed=0)
    with pytest.raises(DataError, match="has no valid split"):
        open_split(str(tmp_path), "valid", Shape(seq_len=7), seed=0)


def test_shard_that_is_torn_is_refused_when_it_is_read(tmp_path):
    write_dataset(tmp_path)
    source = open_split(str(tmp_path), "train", Shape(seq_len=7), seed=0)
    (tmp_path / "train/000001.arrow").unlink()
    assert source.row(6).tokens[-1] == 48
    with pytest.raises(DataError, match="cannot be read"):
        source.row(7)


def test_token_outside_the_vocabulary_is_an_error_on_every_layout(tmp_path):
    write_dataset(tmp_path, vocab_size=60)  # its tokens go up to 79
    source = open_split(str(tmp_path), "train", Shape(seq_len=7), seed=0)
    assert source.window(0).max() < 60
    with pytest.raises(DataError, match="vocab_size=60"):
        source.window(9)
