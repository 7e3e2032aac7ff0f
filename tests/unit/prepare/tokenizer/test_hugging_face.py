import json

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from raymega.prepare.tokenizer.choice import TokenizerOptions, choose_tokenizer, make_tokenizer
from raymega.prepare.tokenizer.encoder import Encoder
from raymega.prepare.tokenizer.hugging_face import loadable, mark_special
from tests.unit.prepare.tokenizer.files import TEXT, write_all, write_llama3_like

TEXTS = [TEXT, "  two  spaces ", "caf\u00e9 \U0001f600", "a"]


@pytest.mark.parametrize("add_bos", [False, True], ids=["plain", "begins"])
def test_autotokenizer_gives_the_ids_of_the_dataset(tmp_path, add_bos):
    folder = write_llama3_like(tmp_path / "theirs")
    chosen = choose_tokenizer(TokenizerOptions(name=str(folder), add_bos=add_bos))
    made = make_tokenizer(chosen, [])
    loaded = AutoTokenizer.from_pretrained(write_all(made.files, tmp_path / "ours"))
    encoder = Encoder(made.json, made.rules)
    for text in TEXTS:
        ids = [*loaded(text).input_ids, loaded.eos_token_id]
        assert ids == encoder.encode_batch([text]).tokens.tolist()
        assert loaded.decode(ids, skip_special_tokens=True) == text
    assert len(loaded) == made.vocab_size and loaded.eos_token == "<end>"
    assert loaded.bos_token == ("<begin>" if add_bos else "<end>")


def test_json_that_needs_no_edit_keeps_its_bytes(tmp_path):
    text = (write_llama3_like(tmp_path / "t") / "tokenizer.json").read_text()
    assert loadable(text, bos="<begin>") == text
    assert mark_special(text, {"<end>": 281}) == text


def test_begin_is_taken_out_and_put_in_beside_the_processors_that_stay(tmp_path):
    text = (write_llama3_like(tmp_path / "t") / "tokenizer.json").read_text()
    without = loadable(text, bos="")
    assert json.loads(without)["post_processor"]["type"] == "ByteLevel"
    other = Tokenizer.from_str(loadable(without, bos="<turn>"))
    assert other.encode("a").tokens == ["<turn>", "a"]
    assert other.encode("a", "b").tokens == ["<turn>", "a", "<turn>", "b"]
