import pytest

from raymega.data.open_split import Shape, open_split
from raymega.errors import DataError
from tests.unit.data.datasets import write_dataset


def test_windows_overlap_by_one_token_and_straddle_shards(tmp_path):
    write_dataset(tmp_path, train=(50, 30))
    source = open_split(str(tmp_path), "train", Shape(seq_len=7), seed=0)
    assert source.num_windows == 11  # (80 - 1) // 7
    for index in range(source.num_windows):
        assert source.window(index).tolist() == list(range(7 * index, 7 * index + 8))


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


def test_torn_dataset_is_refused_at_open(tmp_path):
    write_dataset(tmp_path)
    (tmp_path / "valid/000000.arrow").unlink()
    with pytest.raises(DataError, match="does not exist"):
        open_split(str(tmp_path), "train", Shape(seq_len=7), seed=0)


def test_token_outside_the_vocabulary_is_an_error_on_every_layout(tmp_path):
    write_dataset(tmp_path, vocab_size=60)  # its tokens go up to 79
    source = open_split(str(tmp_path), "train", Shape(seq_len=7), seed=0)
    assert source.window(0).max() < 60
    with pytest.raises(DataError, match="vocab_size=60"):
        source.window(9)
