import json

from raymega.data.format import META_FILE, encode_meta
from raymega.data.tokenizer_files import (
    keep_tokenizer,
    kept_tokenizer,
    special_ids,
    tokenizer_of_dataset,
)
from raymega.storage.local import LocalStore
from tests.unit.data.datasets import write_dataset

JSON = json.dumps({"added_tokens": [{"id": 256, "content": "<|endoftext|>", "special": True}]})


def _dataset(folder, *, is_named=True):
    folder.mkdir()
    meta = write_dataset(folder)
    if not is_named:
        plain = json.loads(encode_meta(meta))
        del plain["tokenizer"]
        (folder / META_FILE).write_text(json.dumps(plain))
    (folder / "tokenizer.json").write_text(JSON)
    return folder


def test_run_keeps_the_tokenizer_after_its_dataset_is_gone(tmp_path):
    folder, run = _dataset(tmp_path / "data"), LocalStore(tmp_path / "run")
    keep_tokenizer(run, str(folder))
    kept = kept_tokenizer(run)
    assert kept == tokenizer_of_dataset(str(folder)) and kept["tokenizer.json"] == JSON.encode()
    # A run that continues keeps what it began with.
    (folder / "tokenizer.json").write_text("{}")
    keep_tokenizer(run, str(folder))
    assert kept_tokenizer(run) == kept


def test_dataset_from_before_settings_were_written_gets_those_that_load_it(tmp_path):
    found = tokenizer_of_dataset(str(_dataset(tmp_path / "old", is_named=False)))
    settings = json.loads(found["tokenizer_config.json"])
    assert settings["eos_token"] == settings["bos_token"] == "<|endoftext|>"
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    ids = special_ids(found)
    assert (ids.bos, ids.eos) == (256, 256)


def test_data_without_a_tokenizer_is_no_error(tmp_path):
    run = LocalStore(tmp_path / "run")
    bare = tmp_path / "bare"
    bare.mkdir()
    write_dataset(bare)
    for path in ("synthetic", str(tmp_path / "nowhere"), str(bare)):
        keep_tokenizer(run, path)
    assert kept_tokenizer(run) == {}
    assert special_ids({}).eos is None


def test_older_settings_describe_a_token_by_an_object():
    settings = {"eos_token": {"__type": "AddedToken", "content": "<|endoftext|>", "lstrip": False}}
    files = {
        "tokenizer.json": JSON.encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
    }
    ids = special_ids(files)
    assert (ids.bos, ids.eos) == (None, 256)
