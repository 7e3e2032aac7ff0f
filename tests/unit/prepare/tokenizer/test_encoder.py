import numpy as np
import pytest

from raymega.prepare.tokenizer import encoder as module
from raymega.prepare.tokenizer.choice import TokenizerOptions, choose_tokenizer, make_tokenizer
from raymega.prepare.tokenizer.encoder import (
    Encoder,
    EncodingRules,
    EnginesDifferError,
    open_encoder,
)
from tests.unit.prepare.tokenizer.files import ODD, TEXT, write_llama3_like, write_sentencepiece


def _made(name, **options):
    return make_tokenizer(choose_tokenizer(TokenizerOptions(name=str(name), **options)), [TEXT])


def test_batch_is_its_documents_one_after_the_other():
    made = _made("bpe:270")
    encoder = Encoder(made.json, made.rules)
    batch = encoder.encode_batch(ODD)
    alone = [encoder.encode_batch([text]).tokens for text in ODD]
    assert batch.tokens.tolist() == np.concatenate(alone).tolist()
    assert list(batch.lengths) == [len(tokens) for tokens in alone]
    assert batch.tokens.dtype == encoder.dtype == "uint16"
    assert (batch.tokens == made.rules.eod_id).sum() == len(ODD)


def test_text_of_one_character_and_of_none_end_too():
    made = _made("bytes")
    batch = Encoder(made.json, made.rules).encode_batch(["", "a"])
    assert batch.tokens.tolist() == [256, 97, 256] and batch.lengths == (1, 2)


@pytest.mark.parametrize("is_parsed", [False, True], ids=["text", "parsed"])
@pytest.mark.parametrize("kind", ["bytes", "bpe:270", "llama3", "llama2"])
def test_engines_give_the_same_tokens(tmp_path, kind, is_parsed):
    pytest.importorskip("gigatoken")
    if kind == "llama3":
        kind = write_llama3_like(tmp_path / "t")
    elif kind == "llama2":
        pytest.importorskip("sentencepiece")
        kind = write_sentencepiece(tmp_path / "tokenizer.model")
    made = _made(kind, parse_special_tokens=is_parsed)
    texts = [*ODD, "a<|endoftext|>b", "a<end>b</s>c<turn>"]
    fast = Encoder(made.json, made.rules, engine="gigatoken").encode_batch(texts)
    slow = Encoder(made.json, made.rules).encode_batch(texts)
    assert fast.tokens.tolist() == slow.tokens.tolist() and fast.lengths == slow.lengths


def test_engine_that_differs_in_one_place_is_found_out(monkeypatch):
    made = _made("bytes")
    honest = Encoder(made.json, made.rules).encode_batch

    def liar(text):
        ids = honest([text]).tokens[:-1].copy()
        return np.where(ids == ord("z"), ord("y"), ids)

    monkeypatch.setattr(module, "_gigatoken", lambda *_, **__: liar)
    encoder = Encoder(made.json, made.rules, engine="gigatoken")
    encoder.encode_batch(["without that letter"] * 9)
    with pytest.raises(EnginesDifferError):
        encoder.encode_batch(["a z"])


def test_share_of_a_large_group_that_both_engines_encode_is_small_and_from_all_parts(monkeypatch):
    made = _made("bytes")
    reference, seen = Encoder(made.json, made.rules), []

    def spy(text):
        seen.append(text)
        return reference.encode_batch([text]).tokens[:-1]

    monkeypatch.setattr(module, "_gigatoken", lambda *_, **__: spy)
    encoder = Encoder(made.json, made.rules, engine="gigatoken")
    text = "b" * 4000 + "m" * 4000 + "e" * 4000
    for _ in range(100):
        encoder.encode_batch([text])
    pieces = [piece for piece in seen if piece != text]
    assert {piece[0] for piece in pieces} >= {"b", "m", "e"}
    total = sum(map(len, pieces))
    assert module.MIN_CHECKED < total < module.MIN_CHECKED + 2 * module.CHECKED_CHARACTERS + 1200


def test_without_the_fast_engine_the_other_is_taken(monkeypatch):
    made = _made("bytes")
    open_encoder.cache_clear()
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    assert open_encoder(made.json, made.rules).engine == "tokenizers"
    monkeypatch.undo()
    open_encoder.cache_clear()

    def refuses(*_, **__):
        raise ValueError("unsupported")

    monkeypatch.setattr(module, "find_spec", lambda _: True)
    monkeypatch.setattr(module, "_gigatoken", refuses)
    assert open_encoder(made.json, made.rules).engine == "tokenizers"


def test_words_that_the_fast_engine_keeps_are_bounded(monkeypatch):
    made, engines = _made("bytes"), []
    reference = Encoder(made.json, made.rules)

    def engine(*_, **__):
        engines.append(len(engines))
        return lambda text: reference.encode_batch([text]).tokens[:-1]

    monkeypatch.setattr(module, "_gigatoken", engine)
    monkeypatch.setattr(module, "CACHE_CHARACTERS", 100)
    encoder = Encoder(made.json, made.rules, engine="gigatoken")
    for _ in range(10):
        encoder.encode_batch(["a" * 60])
    assert len(engines) == 6


def test_large_vocabulary_has_wider_tokens():
    rules = EncodingRules(eod_id=0)
    assert Encoder(_made("bpe:300").json, rules).dtype == "uint16"
