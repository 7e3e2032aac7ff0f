"""What a preparation refuses before Ray starts, with nothing written."""

import pytest

from raymega.errors import ConfigError
from raymega.prepare.options import PrepareOptions
from raymega.prepare.pipeline import prepare


def _refusal(**changes) -> str:
    options = PrepareOptions(**changes)
    with pytest.raises(ConfigError) as caught:
        prepare(options, on_progress=lambda *_: None)
    return str(caught.value)


def test_text_without_a_byte_is_refused(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    text = _refusal(inputs=(str(empty),), out=str(tmp_path / "out"), tokenizer="bytes")
    assert "all empty" in text and not (tmp_path / "out").exists()


def test_output_that_is_a_file_is_refused_and_kept(tmp_path):
    source, out = tmp_path / "a.txt", tmp_path / "out"
    source.write_text("text")
    out.write_text("precious")
    assert "is a file" in _refusal(inputs=(str(source),), out=str(out), tokenizer="bytes")
    assert out.read_text() == "precious"


def test_tokenizer_file_that_is_binary_is_refused(tmp_path):
    source, binary = tmp_path / "a.txt", tmp_path / "tokenizer.json"
    source.write_text("text")
    binary.write_bytes(bytes(range(256)))
    text = _refusal(inputs=(str(source),), out=str(tmp_path / "out"), tokenizer=str(binary))
    assert "`tokenizers` JSON file" in text


def test_everything_that_is_wrong_is_said_at_once(tmp_path):
    out = tmp_path / "out"
    out.write_text("precious")
    text = _refusal(
        inputs=(str(tmp_path / "missing"),), out=str(out), tokenizer="bpe:none", valid_fraction=2.0
    )
    assert text.count("\n") == 3
    for part in ("--valid-fraction 2.0", "bpe:none", "missing", "is a file"):
        assert part in text
