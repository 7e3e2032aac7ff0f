import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raymega.errors import ConfigError
from raymega.prepare import sources
from raymega.prepare.documents import read_documents
from raymega.prepare.sources import list_files, make_groups


def _read(*paths):
    files = list_files([str(path) for path in paths], include=["*"], exclude=[])
    return [document for group in make_groups(files) for document in read_documents(group)]


def test_text_file_is_one_document_and_an_empty_one_is_none(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "empty.txt").write_text("")
    (document,) = _read(tmp_path)
    assert (document.name, document.text) == ("a.txt", "one\ntwo\n")
    assert (document.num_bytes, document.num_replaced) == (8, 0)


def test_undecodable_bytes_are_replaced_and_counted(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 \xff" + "\ufffd".encode())
    (document,) = _read(tmp_path)
    assert document.text == "caf\ufffd \ufffd\ufffd" and document.num_replaced == 2


@pytest.mark.parametrize("group_bytes", [1, 7, 40, 10_000])
def test_json_lines_are_each_read_once_however_the_file_is_cut(tmp_path, monkeypatch, group_bytes):
    texts = [f"text {i} " + "x" * (i % 30) for i in range(40)]
    lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)]
    lines.insert(3, "")
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(sources, "MIN_GROUP_BYTES", group_bytes)
    monkeypatch.setattr(sources, "MAX_GROUP_BYTES", group_bytes)
    documents = sorted(_read(tmp_path), key=lambda d: int(d.name.partition("@")[2]))
    assert [document.text for document in documents] == texts


def test_lone_surrogates_of_json_are_replaced(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n')
    (document,) = _read(tmp_path)
    assert document.text == "a\ufffd\ufffd\ufffdb" and document.num_replaced == 3


@pytest.mark.parametrize(
    "line, what",
    [
        ('{"text": 3}', "its text is a int"),
        ('{"body": "x"}', "KeyError"),
        ("[1]", "TypeError"),
        ("{", "JSONDecodeError"),
    ],
)
def test_line_without_text_is_refused_with_its_place(tmp_path, line, what):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=rf"a\.jsonl@17 has no document \({what}"):
        _read(tmp_path)


def test_parquet_rows_are_documents(tmp_path):
    table = pa.table({"text": ["one", None, "", "two"], "id": [1, 2, 3, 4]})
    pq.write_table(table, tmp_path / "a.parquet")
    documents = _read(tmp_path)
    assert [(d.name, d.text) for d in documents] == [("a.parquet@0", "one"), ("a.parquet@3", "two")]


def test_parquet_without_a_text_column_is_refused(tmp_path):
    pq.write_table(pa.table({"body": ["one"]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="its columns are body"):
        _read(tmp_path)
