import pytest
import regex

from raymega import extras
from raymega.errors import ConfigError
from raymega.prepare.tokenizer.choice import TokenizerOptions, choose_tokenizer, make_tokenizer
from raymega.prepare.tokenizer.encoder import Encoder
from raymega.prepare.tokenizer.tiktoken_ranks import ENCODINGS
from tests.unit.prepare.tokenizer.files import ODD, TEXT, write_tiktoken


@pytest.mark.parametrize("name", ENCODINGS)
def test_ids_are_those_of_tiktoken(tmp_path, name):
    tiktoken, load = pytest.importorskip("tiktoken"), pytest.importorskip("tiktoken.load")
    path = write_tiktoken(
        tmp_path / f"{name}.tiktoken", b" return", b"caf\xc3\xa9", b"    ", b"12", b"'ll"
    )
    chosen = choose_tokenizer(TokenizerOptions(name=str(path)))
    made = make_tokenizer(chosen, [TEXT, *ODD])
    encoder = Encoder(made.json, made.rules)
    ranks = load.load_tiktoken_bpe(str(path))
    encoding = ENCODINGS[name]
    original = tiktoken.Encoding(
        name, pat_str=encoding.pattern, mergeable_ranks=ranks, special_tokens=dict(encoding.special)
    )
    for text in [TEXT, *ODD]:
        tokens = encoder.encode_batch([text]).tokens.tolist()
        assert tokens == [*original.encode_ordinary(text), original.eot_token], text
    assert made.files[path.name] == path.read_bytes()


@pytest.mark.parametrize("name", [name for name in ENCODINGS if name != "qwen"])
def test_patterns_and_special_tokens_are_those_that_tiktoken_publishes(monkeypatch, name):
    public = pytest.importorskip("tiktoken_ext.openai_public")
    ranks = {bytes([byte]): byte for byte in range(256)}
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *_, **__: ranks)
    published, ours = getattr(public, name)(), ENCODINGS[name]
    assert published["special_tokens"] == dict(ours.special)
    # The published pattern is a faster form: it cuts the same words.
    texts = [
        TEXT,
        *ODD,
        "x" * 50 + " " * 20 + "\r\n\n  y",
        "ABC's 1234567 \u00c9t\u00e9\u0301 !?\n",
    ]
    for text in texts:
        assert regex.findall(published["pat_str"], text) == regex.findall(ours.pattern, text)


@pytest.mark.parametrize("name, words", [("qwen", 5), ("cl100k_base", 2), ("r50k_base", 1)])
def test_encodings_cut_digits_as_their_models_do(tmp_path, name, words):
    pytest.importorskip("tiktoken")
    path = write_tiktoken(tmp_path / f"{name}.tiktoken", b"12345", b"45")
    made = make_tokenizer(choose_tokenizer(TokenizerOptions(name=str(path))), [])
    tokens = Encoder(made.json, made.rules).encode_batch(["12345"]).tokens
    assert len(tokens) - 1 == words


def test_unknown_name_and_torn_file_are_refused(tmp_path):
    path = write_tiktoken(tmp_path / "mine.tiktoken")
    with pytest.raises(ConfigError, match=r"does not say how text is cut.*cl100k_base"):
        choose_tokenizer(TokenizerOptions(name=str(path)))
    path = tmp_path / "qwen.tiktoken"
    for text, why in [
        ("AA== 0\n", "lacks some of the 256"),
        ("no base64\n", "is no file of ranks"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=why):
            choose_tokenizer(TokenizerOptions(name=str(path)))


def test_missing_package_is_told_with_the_line_that_installs_it(tmp_path, monkeypatch):
    def lacks(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(extras, "import_module", lacks)
    path = write_tiktoken(tmp_path / "qwen.tiktoken")
    with pytest.raises(
        ConfigError, match=r"needs the package tiktoken.*pip install 'raymega\[hf\]'"
    ) as caught:
        choose_tokenizer(TokenizerOptions(name=str(path)))
    assert caught.value.exit_code == 2
