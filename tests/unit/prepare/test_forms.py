"""Every form of one corpus gives the same dataset."""

import gzip
import json
from dataclasses import replace

import pytest

from raymega.data.arrow import TokenStream
from raymega.data.format import META_FILE, SPLITS, TOKENIZER_FILE
from raymega.data.inspect import inspect_dataset
from raymega.errors import ConfigError
from raymega.prepare.groups import make_groups
from raymega.prepare.origins import SOURCES_FILE
from raymega.prepare.sources import list_files
from raymega.prepare.tokenizer import choice
from tests.unit.prepare import corpora
from tests.unit.prepare.corpora import content, prepared

FORMS = corpora.every_form(corpora.texts())
# They name the files of the form.
NAMING = (META_FILE, SOURCES_FILE)
CUT = {
    "jsonl", "jsonl-bgzip", "jsonl-zst-frames", "jsonl-bz2-streams", "parquet", "arrow-file",
    "datasets-folder", "texts",
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("without_ray", "small_groups")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return {}


def _write(form, folder):
    folder.mkdir()
    FORMS[form](folder)
    return folder


def _groups(folder):
    return make_groups(list_files([str(folder)], include=["*"], exclude=[]))


@pytest.mark.parametrize("form", FORMS)
def test_form_gives_the_same_bytes_as_json_lines(form, tmp_path, expected):
    if not expected:
        prepared(_write("jsonl", tmp_path / "first"), tmp_path / "first-out")
        expected |= content(tmp_path / "first-out", but=NAMING)
        assert sum(name.endswith(".arrow") for name in expected) > 3
    folder = _write(form, tmp_path / "corpus")
    done = prepared(folder, tmp_path / "out")
    found = content(tmp_path / "out", but=NAMING)
    if form in ("texts", "datasets-folder"):
        # These have several files: the origins differ.
        found = {name: raw for name, raw in found.items() if not name.endswith(".origins")}
        assert found.items() <= expected.items() and len(found) < len(expected)
    else:
        assert found == expected
    assert inspect_dataset(done.uri, is_verified=True, on_shard=lambda *_: None) == done.meta


def test_files_of_lengths_say_what_the_shards_do(tmp_path):
    done = prepared(_write("jsonl", tmp_path / "corpus"), tmp_path / "out")
    assert len(done.meta.splits["train"].shards) > 1 and set(done.meta.splits) == set(SPLITS)
    for split in done.meta.splits.values():
        stored = TokenStream(tmp_path / "out", replace(split, lengths=None)).document_lengths()
        (tmp_path / "out" / split.shards[0].file).unlink()
        found = TokenStream(tmp_path / "out", split).document_lengths()
        assert found.tolist() == stored.tolist() and len(found) == split.num_documents


def test_tokenizer_is_trained_the_same_from_every_form(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "TRAINING_BYTES", 20_000)
    found = set()
    for form in ("jsonl", "jsonl-gz", "parquet"):
        prepared(_write(form, tmp_path / form), tmp_path / f"{form}-out", tokenizer="bpe:300")
        found.add((tmp_path / f"{form}-out" / TOKENIZER_FILE).read_bytes())
    assert len(found) == 1


@pytest.mark.parametrize("form", sorted(CUT))
def test_large_file_is_many_tasks(form, tmp_path):
    assert len(_groups(_write(form, tmp_path / "corpus"))) > 1


@pytest.mark.parametrize("form", ["jsonl-gz", "jsonl-zst", "jsonl-bz2", "json-array"])
def test_file_of_one_frame_is_one_task(form, tmp_path):
    assert len(_groups(_write(form, tmp_path / "corpus"))) == 1


def test_texts_may_be_compressed(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "packed").mkdir()
    for name in ("a.txt", "b.md", "c.py"):
        (tmp_path / "raw" / name).write_text(f"the text of {name}")
        (tmp_path / "packed" / f"{name}.gz").write_bytes(
            gzip.compress(f"the text of {name}".encode())
        )
    for name in ("raw", "packed"):
        prepared(tmp_path / name, tmp_path / f"{name}-out", valid_fraction=0.0)
    assert content(tmp_path / "raw-out", but=NAMING) == content(tmp_path / "packed-out", but=NAMING)


def test_key_of_the_text_is_chosen(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "no", "content": "yes"}\n')
    done = prepared(tmp_path / "a.jsonl", tmp_path / "out", text_key="content", valid_fraction=0.0)
    assert done.meta.splits["train"].num_text_bytes == 3
    assert done.meta.recipe["text_key"] == "content"


def test_splits_of_a_datasets_folder_are_read_one_at_a_time(tmp_path):
    """All of them as one input would put the test's documents into the training."""
    hf = tmp_path / "in" / "hf"
    for split in ("train", "test"):
        (hf / split).mkdir(parents=True)
        FORMS["datasets-folder"](hf / split)
    (hf / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    for name in (hf, tmp_path / "in"):
        with pytest.raises(
            ConfigError, match=f"{hf}/ is a DatasetDict with the splits test, train"
        ):
            prepared(name, tmp_path / "refused")
    with_test_left_out = [
        file.name for file in list_files([str(hf)], include=["*"], exclude=["test"])
    ]
    assert with_test_left_out == [f"train/data-{i:05d}-of-00002.arrow" for i in range(2)]
    joined = list_files([f"{hf}/train", f"{hf}/test"], include=["*"], exclude=[])
    assert len(joined) == 4
    done = prepared(hf / "train", tmp_path / "out")
    assert sum(each.num_documents for each in done.meta.splits.values()) == corpora.NUM_TEXTS - 1


def test_held_out_documents_are_the_same_in_every_order(tmp_path):
    found = corpora.texts()
    (tmp_path / "a.jsonl").write_bytes(corpora.json_lines(found))
    (tmp_path / "b.jsonl").write_bytes(corpora.json_lines(found[::-1], source="again"))
    sizes = [
        prepared(tmp_path / name, tmp_path / f"{name}-out").meta.splits["valid"].num_text_bytes
        for name in ("a.jsonl", "b.jsonl")
    ]
    assert sizes[0] == sizes[1] > 0
