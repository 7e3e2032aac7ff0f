"""Files of a model: those that it was imported with, and the tokenizer and template that its run was trained with."""

import json
from types import SimpleNamespace

import pytest

from raymega.convert.huggingface.extra_files import files_of_model
from raymega.data.tokenizer_files import template_of
from raymega.evaluate.tokenizer import tokenizer_in
from raymega.prepare.tokenizer.trained import byte_tokenizer
from tests.support.memory_store import MemoryStore

NEW = "<|new|>"
CONFIG = {"eos_token_id": 7, "model_type": "llama"}
BASE = {
    "tokenizer.json": byte_tokenizer(),
    "tokenizer_config.json": json.dumps({"eos_token": "<|endoftext|>", "padding_side": "left"}),
    "special_tokens_map.json": "{}",
    "generation_config.json": json.dumps({"eos_token_id": [7, 9]}),
    "config.json": json.dumps(CONFIG),
}
SETTINGS = json.dumps({"eos_token": "<|endoftext|>"})
SAME = {"tokenizer.json": byte_tokenizer(), "tokenizer_config.json": SETTINGS}
OTHER = SAME | {"tokenizer.json": byte_tokenizer(NEW)}
TEMPLATE = {"chat_template.jinja": "{{ messages }}"}


def _files(carried, own):
    """The files of a checkpoint whose run has ``carried`` and, from its dataset, ``own``."""
    store = MemoryStore()
    for prefix, files in (("hf/", carried), ("tokenizer/", own)):
        for name, content in files.items():
            store.put(prefix + name, [content.encode()], overwrite=True)
    found = files_of_model(store, SimpleNamespace(job={}))
    return {name: content.decode() for name, content in found.items()}


def test_a_dataset_with_the_tokens_of_the_model_leaves_the_models_files():
    assert _files(BASE, SAME) == _files(BASE, {}) == BASE


def test_a_dataset_with_other_tokens_brings_its_tokenizer_and_ends():
    found = _files(BASE, OTHER)
    assert found["tokenizer.json"] == OTHER["tokenizer.json"]
    assert found["tokenizer_config.json"] == SETTINGS and "special_tokens_map.json" not in found
    end = json.loads(OTHER["tokenizer.json"])["added_tokens"][0]["id"]
    assert json.loads(found["config.json"]) == CONFIG | {"eos_token_id": end, "bos_token_id": None}
    assert json.loads(found["generation_config.json"])["eos_token_id"] == end


@pytest.mark.parametrize("own", [SAME | TEMPLATE, OTHER | TEMPLATE, TEMPLATE])
@pytest.mark.parametrize("carried", [BASE, BASE | {"chat_template.jinja": "another"}])
def test_answers_are_asked_by_the_template_that_they_were_trained_with(carried, own):
    assert _files(carried, own)["chat_template.jinja"] == TEMPLATE["chat_template.jinja"]


@pytest.mark.parametrize("own", [{}, SAME, OTHER])
def test_the_models_template_stays_where_the_dataset_has_none(own):
    assert _files(BASE | TEMPLATE, own)["chat_template.jinja"] == TEMPLATE["chat_template.jinja"]
    bare = {name: BASE[name] for name in ("config.json", "generation_config.json")}
    assert _files(bare | TEMPLATE, own)["chat_template.jinja"] == TEMPLATE["chat_template.jinja"]


def test_a_model_without_a_tokenizer_takes_that_of_the_dataset():
    assert _files({}, SAME).keys() >= SAME.keys()
    assert _files({}, {}) == {}


def test_token_zero_ends_documents_as_any_other_does():
    """The end of `--tokenizer bpe:N` is token 0, which counted as none: first tokens were not scored."""
    content = json.loads(byte_tokenizer())
    content["added_tokens"][0]["id"] = 0
    content["model"]["vocab"] = {token: n + 1 for token, n in content["model"]["vocab"].items()}
    files = {
        "tokenizer.json": json.dumps(content).encode(),
        "tokenizer_config.json": SETTINGS.encode(),
    }
    assert tokenizer_in(files, "a test").eod_id == 0


def test_template_is_that_of_the_file_or_of_the_settings():
    named = [{"name": "tools", "template": "b"}, {"name": "default", "template": "a"}]
    for setting, text in (("a", "a"), (named, "a"), (None, "")):
        settings = json.dumps({"chat_template": setting}).encode()
        assert template_of({"tokenizer_config.json": settings}) == text
        files = {"tokenizer_config.json": settings, "chat_template.jinja": b"c"}
        assert template_of(files) == "c"
