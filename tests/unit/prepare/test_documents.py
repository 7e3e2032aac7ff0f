import gzip
import json
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raymega.errors import ConfigError
from raymega.prepare import groups
from raymega.prepare.documents import read_documents
from raymega.prepare.groups import make_groups
from raymega.prepare.readers import entries
from raymega.prepare.sources import list_files


def _read(*paths):
    files = list_files([str(path) for path in paths], include=["*"], exclude=[])
    return [document for group in make_groups(files) for document in read_documents(group)]


def test_text_file_is_one_document_and_an_empty_one_is_none(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "empty.txt").write_text("")
    (document,) = _read(tmp_path)
    assert (document.name, document.text) == (f"{tmp_path}/a.txt@0", "one\ntwo\n")
    assert (document.num_bytes, document.num_replaced) == (8, 0)


@pytest.mark.parametrize("group_bytes", [1, 7, 40, 10_000])
def test_json_lines_are_each_read_once_however_the_file_is_cut(tmp_path, monkeypatch, group_bytes):
    texts = [f"text {i} " + "x" * (i % 30) for i in range(40)]
    lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)]
    lines.insert(3, "")
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(groups, "MIN_GROUP_BYTES", group_bytes)
    monkeypatch.setattr(groups, "MAX_GROUP_BYTES", group_bytes)
    documents = sorted(_read(tmp_path), key=lambda d: int(d.name.partition("@")[2]))
    assert [document.text for document in documents] == texts


def test_lone_surrogates_of_json_are_replaced(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n')
    (document,) = _read(tmp_path)
    assert document.text == "a\ufffd\ufffd\ufffdb" and document.num_replaced == 3


def test_bad_lines_are_passed_over_as_long_as_they_may_be(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "1"}\n{\n\n{"text": "2"}\n\xff\n{"text": "3"}')
    files = list_files([str(tmp_path)], include=["*"], exclude=[])
    (group,) = make_groups(files)
    documents = read_documents(group, max_bad_lines=2)
    assert [(d.text, d.row) for d in documents] == [("1", 0), ("2", 3), ("3", 5)]
    assert [line.name for line in documents.bad] == [f"{tmp_path}/a.jsonl@{at}" for at in (14, 31)]
    assert documents.num_rows == [6]
    with pytest.raises(ConfigError, match=r"a\.jsonl@14 .*a\.jsonl@31 .*--max-bad-lines allows 1;"):
        list(read_documents(group, max_bad_lines=1))


def test_rows_of_tables_are_documents(tmp_path):
    texts = ["one", None, "", "two"]
    table = pa.table({"text": pa.array(texts).dictionary_encode(), "id": [1, 2, 3, 4]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(str(tmp_path / "b.arrow"), table.schema) as writer:
        writer.write_table(
            table.cast(pa.schema([("text", pa.large_string()), ("id", pa.int64())])).cast(
                table.schema
            )
        )
    assert [(d.name.partition("/a.")[2] or d.name[-9:], d.text) for d in _read(tmp_path)] == [
        ("parquet@0", "one"),
        ("parquet@3", "two"),
        ("b.arrow@0", "one"),
        ("b.arrow@3", "two"),
    ]


def test_values_of_json_may_be_longer_than_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(entries, "BLOCK_BYTES", 7)
    texts = ["x" * 100, "\u00e9\U0001f600" * 9, "", "]}"]
    for indent in (None, 2):
        array = json.dumps([{"text": t} for t in texts], ensure_ascii=False, indent=indent)
        (tmp_path / "a.json").write_text(array)
        assert [d.text for d in _read(tmp_path)] == ["x" * 100, "\u00e9\U0001f600" * 9, "]}"]
        places = [d.name.partition("@")[2] for d in _read(tmp_path)]
        raw = array.encode()
        assert all(raw[int(place) :].startswith(b"{") for place in places)


def test_web_pages_are_read_as_their_main_text(tmp_path):
    page = (
        "<html><head><title>t</title></head><body><nav>menu</nav><p>caf\u00e9 one</p></body></html>"
    )
    (tmp_path / "a.html").write_bytes(page.encode("latin-1"))
    (document,) = _read(tmp_path)
    assert document.text == "caf\u00e9 one"
    (tmp_path / "a.html").unlink()
    (tmp_path / "b.warc.gz").write_bytes(
        b"".join(
            gzip.compress(_response(f"<p>page {i}</p>".encode(), kind))
            for i, kind in enumerate(("text/html", "image/png", "text/html; charset=utf-8"))
        )
    )
    assert [(d.text, d.row) for d in _read(tmp_path)] == [("page 0", 0), ("page 2", 2)]


def _response(page, kind, more="Connection: close"):
    fields = f"Content-Type: {kind}\r\nContent-Length: {len(page)}\r\n{more}"
    http = f"HTTP/1.1 200 OK\r\n{fields}\r\n\r\n".encode() + page
    head = (
        "WARC/1.0\r\nWARC-Type: response\r\nWARC-Record-ID: <urn:uuid:a>\r\nWARC-Target-URI: http://a/\r\n"
        f"Content-Type: application/http; msgtype=response\r\nContent-Length: {len(http)}\r\n\r\n"
    )
    return head.encode() + http + b"\r\n\r\n"


def test_names_of_rows_are_different_however_an_arrow_file_is_cut(tmp_path, monkeypatch):
    """A curation makes ids of them, by which copies are told apart."""
    monkeypatch.setattr(groups, "MIN_GROUP_BYTES", 1)
    schema = pa.schema([("text", pa.string())])
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), schema) as writer:
        for batch in range(3):
            rows = pa.array([f"batch {batch} row {row}" for row in range(2)])
            writer.write_batch(pa.record_batch([rows], schema=schema))
    found = {d.name.partition("@")[2]: d.text for d in _read(tmp_path)}
    assert found == {
        "0": "batch 0 row 0", "1": "batch 0 row 1", "1+0": "batch 1 row 0", "1+1": "batch 1 row 1",
        "2+0": "batch 2 row 0", "2+1": "batch 2 row 1",
    }  # fmt: skip


def _chunked(body):
    parts = [body[at : at + 100] for at in range(0, len(body), 100)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*parts, b""])


@pytest.mark.parametrize(
    ("headers", "encode"),
    [
        ("Transfer-Encoding: chunked", _chunked),
        ("Content-Encoding: gzip", gzip.compress),
        ("Content-Encoding: deflate", zlib.compress),
        ("Content-Encoding: br", lambda body: pa.Codec("brotli").compress(body, asbytes=True)),
        ("Transfer-Encoding: chunked\r\nContent-Encoding: gzip", lambda body: _chunked(gzip.compress(body))),
        # archives of decoded bodies
        ("Transfer-Encoding: chunked", bytes),
        ("Content-Encoding: gzip", bytes),
    ],
)  # fmt: skip
def test_response_is_read_as_a_browser_reads_it(tmp_path, headers, encode):
    text = "caf\u00e9 one " * 40
    page = f"<html><body><p>{text}</p></body></html>".encode()
    records = (
        _response(encode(page), "text/html; charset=utf-8", headers),
        _response(b"<p>two</p>", "text/html"),
    )
    (tmp_path / "a.warc").write_bytes(b"".join(records))
    assert [d.text for d in _read(tmp_path)] == [text.strip(), "two"]
