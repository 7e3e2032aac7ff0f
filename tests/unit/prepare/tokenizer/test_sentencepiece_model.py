import json
from dataclasses import replace

import pytest

from raymega.errors import ConfigError
from raymega.prepare.tokenizer import choice
from raymega.prepare.tokenizer.choice import TokenizerOptions, choose_tokenizer, make_tokenizer
from raymega.prepare.tokenizer.encoder import Encoder
from tests.unit.prepare.tokenizer.files import ODD, TEXT, write_sentencepiece

pytest.importorskip("sentencepiece")

KINDS = {
    "llama2": {},
    "bpe-that-normalises": {
        "normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True,
        "byte_fallback": False, "vocab_size": 80,
    },
    "unigram": {"model_type": "unigram"},
    "unigram-without-bytes": {"model_type": "unigram", "byte_fallback": False, "vocab_size": 60,
                              "remove_extra_whitespaces": True},
    "no-prefix": {"add_dummy_prefix": False},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_sentencepiece(tmp_path, kind):
    import sentencepiece

    path = write_sentencepiece(tmp_path / "tokenizer.model", **KINDS[kind])
    chosen = choose_tokenizer(TokenizerOptions(name=str(path)))
    made = make_tokenizer(chosen, [TEXT, *ODD])
    original = sentencepiece.SentencePieceProcessor(model_file=str(path))
    encoder = Encoder(made.json, made.rules)
    for text in [TEXT, *ODD]:
        tokens = encoder.encode_batch([text]).tokens.tolist()
        assert tokens == [*original.encode(text), original.eos_id()], text
    assert made.vocab_size == original.vocab_size() and made.meta.eod_token == "</s>"
    assert made.files["tokenizer.model"] == path.read_bytes()


def test_begin_is_the_models_own(tmp_path):
    path = write_sentencepiece(tmp_path / "tokenizer.model")
    made = make_tokenizer(choose_tokenizer(TokenizerOptions(name=str(path), add_bos=True)), [])
    assert made.rules.bos_id == 1


def test_settings_beside_the_model_come_first(tmp_path):
    path = write_sentencepiece(tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<s>"}))
    assert choose_tokenizer(TokenizerOptions(name=str(path))).recipe["eod_token"] == "<s>"


def test_conversion_that_differs_on_the_corpus_is_refused(tmp_path):
    path = write_sentencepiece(tmp_path / "tokenizer.model")
    chosen = choose_tokenizer(TokenizerOptions(name=str(path)))
    assert chosen.sample_bytes == choice.WITNESS_BYTES and not chosen.is_trained
    other = choose_tokenizer(
        TokenizerOptions(name=str(write_sentencepiece(tmp_path / "b.model", vocab_size=300)))
    )
    swapped = replace(chosen, source=replace(chosen.source, witness=other.source.witness))
    with pytest.raises(
        ConfigError, match="other ids than sentencepiece for a document that begins"
    ):
        make_tokenizer(swapped, [TEXT])


def test_model_of_another_type_is_refused(tmp_path):
    path = write_sentencepiece(tmp_path / "t.model", model_type="char", byte_fallback=False)
    with pytest.raises(ConfigError, match="another type"):
        choose_tokenizer(TokenizerOptions(name=str(path)))


def test_file_that_is_no_model_is_refused(tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"\nnot a model")
    with pytest.raises(ConfigError, match="no sentencepiece model"):
        choose_tokenizer(TokenizerOptions(name=str(path)))
