import pytest

from raymega.data.format import META_FILE, ImageMeta, local_folder, read_meta, size_faults
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


def test_a_patch_is_worth_the_bytes_of_its_colours_in_tokens_of_four():
    assert ImageMeta(size=28, num_patches=4, token_id=1).tokens_worth == 1 + 3 * 14 * 14 // 4
    several = ImageMeta(size=0, num_patches=9, token_id=1, patch_size=16, max_pixels=2304)
    assert several.tokens_worth == 1 + 3 * 16 * 16 // 4
