"""Inputs and outputs with a fault: each is refused with its file and place, and nothing is taken for a dataset."""

import bz2
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raymega.data.format import META_FILE
from raymega.errors import ConfigError, DataError
from raymega.prepare import assembly, groups, pipeline
from raymega.prepare.output import FolderOutput
from raymega.prepare.readers import formats
from tests.unit.prepare import corpora
from tests.unit.prepare.corpora import prepared, zstd

pytestmark = pytest.mark.usefixtures("without_ray")

FINE = b'{"text": "fine"}\n'
RAW = corpora.json_lines(corpora.texts())
PAGE = b"<p>page</p>"


def _parquet(**columns):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


def _arrow(**columns):
    sink = pa.BufferOutputStream()
    table = pa.table(columns)
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _bad_strings():
    return pa.StringArray.from_buffers(
        2, pa.py_buffer(b"\0\0\0\0\3\0\0\0\5\0\0\0"), pa.py_buffer(b"abc\xff\xfe")
    )


def _damaged(raw, at):
    return raw[:at] + bytes(b ^ 0x5A for b in raw[at : at + 64]) + raw[at + 64 :]


# Name, content, and what the message has: the place and the reason.
FILES = {
    "truncated-gz": ("a.jsonl.gz", gzip.compress(RAW)[:-2000], r"@\d+ cannot .*Truncated.* bytes were read"),
    "truncated-gz-in-its-checksum": ("a.jsonl.gz", gzip.compress(FINE)[:-3], r"@0 cannot .*Truncated"),
    "truncated-zst": ("a.jsonl.zst", zstd(RAW)[:-100], r"@\d+ cannot .*Truncated.* bytes were read"),
    "truncated-bz2": ("a.jsonl.bz2", bz2.compress(RAW)[:-1], r"@\d+ cannot .*Truncated.* bytes were read"),
    "damaged-gz": ("a.jsonl.gz", _damaged(gzip.compress(RAW), 9000), r"@\d+ cannot .*inflate failed"),
    "damaged-bz2": ("a.jsonl.bz2", _damaged(bz2.compress(RAW), 900), r"@\d+ cannot "),
    "damaged-zst": ("a.jsonl.zst", _damaged(zstd(RAW), 3000), r"@\d+ (cannot|has no document)"),
    "garbage-after-gz": ("a.jsonl.gz", gzip.compress(RAW) + b"hello", r"@\d+ cannot .*header"),
    "text-called-gz": ("a.jsonl.gz", FINE, r"@0 cannot .*header"),
    "text-called-zst": ("a.jsonl.zst", FINE, r"@0 cannot .*frame"),
    "gz-called-lines": ("a.jsonl", gzip.compress(FINE), r"@0 has no .*first bytes are those of \.gz"),
    "gz-called-text": ("a.txt", gzip.compress(FINE), r"@\d has no .*first bytes are those of \.gz"),
    "empty-gz": ("a.jsonl.gz", b"", r"@0 cannot .*it is empty"),
    "bad-utf8-in-a-text": ("a.txt", b"caf\xe9 x", r"@3 has no .*0xe9 is not UTF-8"),
    "truncated-utf8-in-a-text": ("a.txt", "caf\u00e9".encode()[:-1], r"@3 has no .*not UTF-8"),
    "utf16-text": ("a.txt", "text".encode("utf-16"), r"@\d has no .*NUL byte"),
    "nul-in-a-text": ("a.py", b"print(1)\n\0\n", r"@9 has no .*NUL byte"),
    "picture-called-text": ("a.txt", b"\x89PNG\r\n\x1a\n\0\0\0", r"@\d has no .*those of \.png"),
    "bad-utf8-in-a-line": ("a.jsonl", FINE + b'{"text": "caf\xe9"}\n', r"@17 has no .*byte 13 of the line"),
    "bad-utf8-in-an-array": ("a.json", b'[{"text": "caf\xe9"}]', r"@14 cannot .*0xe9 is not UTF-8"),
    "line-that-is-cut": ("a.jsonl", FINE + b'{"text": "fi', r"@17 has no .*JSONDecodeError"),
    "line-with-nul": ("a.jsonl", FINE + b'{"text": "\0"}\n', r"@17 has no .*JSONDecodeError"),
    "line-that-is-a-number": ("a.jsonl", FINE + b"17\n", r"@17 has no .*it is a int"),
    "line-that-is-a-list": ("a.jsonl", FINE + b'["a"]\n', r"@17 has no .*it is a list"),
    "line-without-the-key": ("a.jsonl", FINE + b'{"body": "a"}\n', r"@17 has no .*its keys are body; choose"),
    "line-whose-text-is-a-number": ("a.jsonl", FINE + b'{"text": 3}\n', r"@17 has no .*'text' is a int"),
    "line-whose-text-is-a-list": ("a.jsonl", FINE + b'{"text": ["a"]}\n', r"@17 has no .*'text' is a list"),
    "line-that-is-nested-too-deep": ("a.jsonl", FINE + b"[" * 100_000, r"@17 has no .*RecursionError"),
    "line-in-gz": ("a.jsonl.gz", gzip.compress(FINE + b"{}\n"), r"@17 has no .*its keys are none"),
    "array-that-is-cut": ("a.json", b'[{"text": "a"}, {"text": ', r"@\d+ cannot .*JSONDecodeError"),
    "array-without-its-end": ("a.json", b'[{"text": "a"}', r"@14 cannot .*does not end"),
    "array-without-a-comma": ("a.json", b'[{"text": "a"} {"text": "b"}]', r"@15 cannot .*comma"),
    "array-with-more-after-it": ("a.json", b'[{"text": "a"}] x', r"@16 cannot .*more after"),
    "array-of-strings": ("a.json", b'["a", "b"]', r"@1 has no .*it is a str"),
    "object-of-settings": ("a.json", b'{"name": "a"}', r"@0 has no .*its keys are name"),
    "truncated-parquet": ("a.parquet", _parquet(text=["a"] * 99)[:-20], r"@\d+ cannot .*magic bytes"),
    "empty-parquet": ("a.parquet", b"", r"@0 cannot .*size is 0"),
    "text-called-parquet": ("a.parquet", FINE * 9, r"@153 cannot .*magic bytes"),
    "parquet-without-the-column": ("a.parquet", _parquet(body=["a"]), r"@0 cannot .*columns are body; choose"),
    "parquet-column-of-numbers": ("a.parquet", _parquet(text=[1]), r"@0 cannot .*of int64, not of strings"),
    "parquet-row-that-is-not-utf8": ("a.parquet", _parquet(text=_bad_strings()), r"@1 has no .*not UTF-8"),
    "truncated-arrow": ("a.arrow", _arrow(text=["a"] * 99)[:-20], r"@\d+ cannot .*ArrowInvalid"),
    "text-called-arrow": ("a.arrow", FINE * 9, r"@0 cannot "),
    "arrow-without-the-column": ("a.arrow", _arrow(tokens=[1]), r"@0 cannot .*columns are tokens"),
    "text-called-warc": ("a.warc", FINE * 9, r"@\d+ cannot .*(no response|WARC)"),
    "unknown-suffix": ("a.docx", FINE, r"no known suffix: \S*a\.docx; "),
    "no-suffix": ("README", FINE, r"no known suffix: \S*README; .*--include 'README'"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FILES)
def test_faulty_file_is_refused_with_its_place(fault, tmp_path):
    name, raw, told = FILES[fault]
    folder, out = tmp_path / "corpus", tmp_path / "out"
    folder.mkdir()
    (folder / "fine.txt").write_text("a fine text")
    (folder / name).write_bytes(raw)
    with pytest.raises(ConfigError, match=rf"(?s){name}{told}" if "@" in told else told) as caught:
        prepared(folder, out, valid_fraction=0.0)
    assert caught.value.exit_code == 2 and str(folder / name) in str(caught.value)
    assert not out.exists() or [path.name for path in out.iterdir()] == ["_state"]
    # Without it the same command goes through.
    done = prepared(folder, out, valid_fraction=0.0, exclude=(name,))
    assert done.meta.splits["train"].num_documents == 1
    assert (out / META_FILE).is_file() and not (out / "_state").exists()


def _put(folder, name, raw):
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(raw)


OPTIONS = {
    "text-key-that-is-empty": ({"text_key": ""}, "--text-key is empty"),
    "text-key-that-is-a-number": ({"text_key": "3"}, r"a\.jsonl@0 has no document \(it has no '3'; its keys are text"),
    "max-bad-lines-below-zero": ({"max_bad_lines": -1}, "--max-bad-lines -1"),
    "valid-fraction-of-one": ({"valid_fraction": 1.0}, r"--valid-fraction 1\.0"),
    "valid-fraction-that-is-no-number": ({"valid_fraction": float("nan")}, "--valid-fraction nan"),
}  # fmt: skip


@pytest.mark.parametrize("fault", OPTIONS)
def test_faulty_option_is_refused(fault, tmp_path):
    changes, told = OPTIONS[fault]
    _put(tmp_path / "corpus", "a.jsonl", FINE)
    with pytest.raises(ConfigError, match=told):
        prepared(tmp_path / "corpus", tmp_path / "out", **changes)


def _link_to_nothing(out):
    out.symlink_to(out.parent / "nowhere")


def _file(out):
    out.write_text("mine")


def _below_a_file(out):
    out.parent.joinpath("file").write_text("mine")
    out.symlink_to("file/below")


def _state_is_a_file(out):
    out.mkdir()
    (out / "_state").write_text("mine")


OUTPUTS = {
    "link-to-nothing": (_link_to_nothing, "cannot be written"),
    "file": (_file, "is a file"),
    "below-a-file": (_below_a_file, "cannot be written"),
    "state-that-is-a-file": (_state_is_a_file, "is not empty and is no dataset"),
}


@pytest.mark.parametrize("fault", OUTPUTS)
def test_faulty_output_is_refused_and_kept(fault, tmp_path):
    make, told = OUTPUTS[fault]
    _put(tmp_path / "corpus", "a.jsonl", FINE)
    make(tmp_path / "out")
    with pytest.raises(ConfigError, match=rf"--out \S*out {told}"):
        prepared(tmp_path / "corpus", tmp_path / "out", valid_fraction=0.0)
    mine = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "a.jsonl"]
    assert all(path.read_text() == "mine" for path in mine)


def test_read_only_output_is_refused(tmp_path):
    _put(tmp_path / "corpus", "a.jsonl", FINE)
    # A file system that root cannot write to either.
    with pytest.raises(ConfigError, match=r"--out /proc/out cannot be written"):
        prepared(tmp_path / "corpus", "/proc/out", valid_fraction=0.0)


def test_output_that_breaks_during_the_work_is_refused_and_finished_groups_are_kept(
    tmp_path, monkeypatch
):
    _put(tmp_path / "corpus", "a.jsonl", FINE)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(FolderOutput, "put_record", full)
        with pytest.raises(ConfigError, match=r"No space left.*room for twice the tokens"):
            prepared(tmp_path / "corpus", tmp_path / "out", valid_fraction=0.0)
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "write_shard", lambda *_, **__: full())
        with pytest.raises(ConfigError, match=r"No space left.*room for twice the tokens"):
            prepared(tmp_path / "corpus", tmp_path / "out", valid_fraction=0.0)
    assert len(list((tmp_path / "out").glob("_state/groups/*.json"))) == 1
    # Tokens that change on the disk are not joined.
    with monkeypatch.context() as patched:
        patched.setattr(assembly, "file_crc32", lambda _: 0)
        with pytest.raises(DataError, match=r"_state/train/\w+\.arrow is not what its task wrote"):
            prepared(tmp_path / "corpus", tmp_path / "out", valid_fraction=0.0)


def test_web_pages_without_the_library_are_refused_with_its_line(tmp_path, monkeypatch):
    _put(tmp_path / "corpus", "a.html", PAGE)
    monkeypatch.setattr(formats, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'raymega\[web\]'"):
        prepared(tmp_path / "corpus", tmp_path / "out", valid_fraction=0.0)


def test_large_file_that_cannot_be_opened_is_refused(tmp_path, monkeypatch, small_groups):
    _put(tmp_path / "corpus", "a.parquet", _parquet(text=[str(i) * 9 for i in range(9999)]))

    def forbidden(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(groups, "open_root", forbidden)
    with pytest.raises(ConfigError, match=r"a large file cannot be cut: .*Permission denied"):
        prepared(tmp_path / "corpus", tmp_path / "out", valid_fraction=0.0)


def test_folder_that_was_refused_is_no_input(tmp_path):
    _put(tmp_path / "corpus", "a.jsonl", FINE + b"{\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl@17"):
        prepared(tmp_path / "corpus", tmp_path / "out", valid_fraction=0.0)
    assert (
        json.loads((tmp_path / "out" / "_state" / "recipe.json").read_text())["text_key"] == "text"
    )
    with pytest.raises(ConfigError, match="no file is left"):
        prepared(tmp_path / "out", tmp_path / "again", valid_fraction=0.0)


def test_all_bad_lines_are_counted_and_told(tmp_path, caplog):
    lines = b"".join(FINE + (b"{\n" if i % 3 == 0 else b"") for i in range(9))
    _put(tmp_path / "corpus", "a.jsonl", lines)
    _put(tmp_path / "corpus", "b.txt", b"\xff")
    with pytest.raises(ConfigError, match=r"--max-bad-lines allows 3; .*--max-bad-lines 4"):
        prepared(tmp_path / "corpus", tmp_path / "out", valid_fraction=0.0, max_bad_lines=3)
    done = prepared(tmp_path / "corpus", tmp_path / "out", valid_fraction=0.0, max_bad_lines=4)
    assert done.meta.source.num_bad_lines == 4
    assert done.meta.splits["train"].num_documents == 9
    told = [message for message in caplog.messages if "bad line left out" in message]
    assert len(told) == 4 and "a.jsonl@17 has no document" in told[0]
