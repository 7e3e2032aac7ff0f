import pytest
from tokenizers import Tokenizer, models

from raymega.errors import ConfigError
from raymega.prepare.tokenizer import Encoder, check_tokenizer, make_tokenizer

TEXT = "def f(x):\n    return x  # caf\u00e9 \U0001f600\n" * 20


@pytest.fixture(scope="module")
def bpe():
    return make_tokenizer("bpe:270", [TEXT])


def test_bytes_tokens_are_the_bytes_and_256_ends():
    encoder = Encoder(make_tokenizer("bytes", []))
    assert (encoder.vocab_size, encoder.eod_id, encoder.dtype) == (257, 256, "uint16")
    text = TEXT + "".join(map(chr, range(0x180)))
    assert encoder.encode(text).tolist() == [*text.encode(), 256]


def test_bpe_is_trained_to_size_and_gives_the_text_back(bpe):
    encoder = Encoder(bpe)
    assert encoder.vocab_size == 270
    tokens = encoder.encode(TEXT).tolist()
    assert tokens[-1] == encoder.eod_id and len(tokens) < len(TEXT)
    assert Tokenizer.from_str(bpe).decode(tokens[:-1]) == TEXT


def test_bpe_is_the_same_each_time(bpe):
    assert make_tokenizer("bpe:270", [TEXT]) == bpe


@pytest.mark.parametrize("name", ["bytes", "bpe:270"])
def test_text_cannot_end_its_document(name):
    encoder = Encoder(make_tokenizer(name, [TEXT]))
    tokens = encoder.encode("a<|endoftext|>b").tolist()
    assert tokens.index(encoder.eod_id) == len(tokens) - 1


def test_given_file_is_used_and_told_apart_by_content(tmp_path, bpe):
    path = tmp_path / "tokenizer.json"
    path.write_text(bpe)
    first = check_tokenizer(str(path))
    assert make_tokenizer(str(path), []) == bpe
    path.write_text(make_tokenizer("bytes", []))
    assert first.startswith("file:") and check_tokenizer(str(path)) != first


def test_given_file_is_not_truncated(bpe):
    tokenizer = Tokenizer.from_str(bpe)
    tokenizer.enable_truncation(4)
    assert len(Encoder(tokenizer.to_str()).encode(TEXT)) > 100


@pytest.mark.parametrize(
    "name, rule",
    [("bpe:256", "at least 257"), ("bpe:x", "at least 257"), ("none.json", "an existing file")],
)
def test_unknown_names_are_refused(name, rule):
    with pytest.raises(ConfigError, match=rule):
        check_tokenizer(name)


def test_files_that_cannot_serve_are_refused(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("no json")
    with pytest.raises(ConfigError, match="must be a `tokenizers` JSON file"):
        check_tokenizer(str(path))
    path.write_text(Tokenizer(models.BPE()).to_str())
    with pytest.raises(ConfigError, match=r"must have a token <\|endoftext\|>"):
        check_tokenizer(str(path))
