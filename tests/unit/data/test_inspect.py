import pytest

from raymega.data.inspect import describe, inspect_dataset
from raymega.errors import DataError
from tests.unit.data.datasets import write_dataset


def _inspect(folder, *, is_verified):
    seen = []
    meta = inspect_dataset(
        str(folder), is_verified=is_verified, on_shard=lambda *at: seen.append(at)
    )
    return meta, seen


def test_whole_dataset_passes_and_reports_each_shard(tmp_path):
    meta = write_dataset(tmp_path)
    assert _inspect(tmp_path, is_verified=False) == (meta, [])
    assert _inspect(tmp_path, is_verified=True) == (meta, [(1, 3), (2, 3), (3, 3)])


def test_one_changed_bit_is_found_when_verified(tmp_path):
    write_dataset(tmp_path)
    path = tmp_path / "train/000001.arrow"
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    _inspect(tmp_path, is_verified=False)
    with pytest.raises(DataError, match=r"train/000001\.arrow has crc32"):
        _inspect(tmp_path, is_verified=True)


def test_description_is_in_plain_values(tmp_path):
    description = describe(write_dataset(tmp_path))
    train = {"documents": 2, "text_bytes": 80, "tokens": 80, "shards": 2, "bytes_per_token": 1.0}
    assert description["splits"]["train"] == train
    assert description["valid_unigram_entropy_nats"] == 1.5
