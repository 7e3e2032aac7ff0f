import pytest

from raymega.data.format import META_FILE, local_folder, read_meta, size_faults
from raymega.errors import ConfigError, DataError
from tests.unit.data.datasets import write_dataset


def test_meta_reads_back_as_it_was_written(tmp_path):
    meta = write_dataset(tmp_path)
    assert read_meta(tmp_path) == meta
    assert (meta.splits["train"].num_tokens, meta.splits["train"].num_documents) == (80, 2)


@pytest.mark.parametrize("content", ["", "{}", '{"version": 2}'])
def test_unreadable_meta_is_named(tmp_path, content):
    (tmp_path / META_FILE).write_text(content)
    with pytest.raises(DataError, match=r"dataset\.json is not a description of version 1 to 3"):
        read_meta(tmp_path)


def test_missing_and_cut_shards_are_all_reported(tmp_path):
    meta = write_dataset(tmp_path)
    (tmp_path / "train/000000.arrow").unlink()
    with (tmp_path / "valid/000000.arrow").open("ab") as shard:
        shard.truncate(10)
    facts = [fault.fact for fault in size_faults(tmp_path, meta)]
    assert facts == [
        f"{tmp_path}/train/000000.arrow does not exist",
        f"{tmp_path}/valid/000000.arrow has 10 bytes",
    ]


def test_uris_name_local_folders_only():
    assert str(local_folder("file:///a/b")) == "/a/b"
    assert str(local_folder("file://localhost/a%20b")) == "/a b"
    assert str(local_folder("a/b")) == "a/b"
    with pytest.raises(ConfigError, match="file://a is none"):
        local_folder("file://a/b")
    with pytest.raises(ConfigError, match="s3:// is none"):
        local_folder("s3://bucket/tokens")
