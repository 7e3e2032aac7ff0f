import json

import numpy as np

from raymega.data.arrow import TokenStream
from raymega.data.format import TOKENIZER_FILE, SplitMeta
from raymega.prepare.groups import make_groups
from raymega.prepare.records import decode_record, encode_record
from raymega.prepare.shards import write_group
from raymega.prepare.sources import list_files, split_of
from raymega.prepare.tokenizer.encoder import (
    Encoder,
    EncodingRules,
    EnginesDifferError,
    open_encoder,
)
from raymega.prepare.tokenizer.trained import byte_tokenizer

RULES = EncodingRules(eod_id=256)


def _group(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.txt").write_bytes(text)
    (group,) = make_groups(list_files([str(folder)], include=["*.txt"], exclude=[]))
    return group


def _prepare_folder(path):
    path.mkdir()
    (path / TOKENIZER_FILE).write_text(byte_tokenizer())
    return path


def test_group_writes_each_document_to_its_split_closed_and_counted(tmp_path):
    texts = {f"t{i}": f"document {i}".encode() for i in range(20)}
    group = _group(tmp_path, **texts)
    out = _prepare_folder(tmp_path / "out")
    done = write_group(group, folder=out, valid_fraction=0.3, rules=RULES)
    assert done.faults == () and set(done.parts) == {"train", "valid"}
    for name, part in done.parts.items():
        split = SplitMeta(shards=(part.shard,), num_text_bytes=part.num_text_bytes)
        tokens = TokenStream(out, split).read(0, split.num_tokens)
        documents = "".join(chr(t) if t < 256 else "|" for t in tokens).split("|")[:-1]
        expected = [t for t in map(bytes.decode, texts.values()) if split_of(t, 0.3) == name]
        assert sorted(documents) == sorted(expected)
        assert part.num_text_bytes == sum(map(len, documents))
        assert part.counts.tolist() == np.bincount(tokens, minlength=257).tolist()


def test_same_group_gives_the_same_bytes(tmp_path):
    group = _group(tmp_path, a=b"one", b=b"two", c=b"three")
    first, second = _prepare_folder(tmp_path / "1"), _prepare_folder(tmp_path / "2")
    done = write_group(group, folder=first, valid_fraction=0.0, rules=RULES)
    assert done.num_rows == (1, 1, 1) and set(done.parts) == {"train"}
    again = write_group(group, folder=second, valid_fraction=0.0, rules=RULES)
    assert again.parts["train"].shard == done.parts["train"].shard


def test_failures_come_back_as_values_and_leave_no_shard(tmp_path):
    group = _group(tmp_path, a=b"one", b=b"two")
    out = _prepare_folder(tmp_path / "out")
    (tmp_path / "b.txt").unlink()
    done = write_group(group, folder=out, valid_fraction=0.0, rules=RULES)
    assert "FileNotFoundError" in done.faults[0].fact and "b.txt" in done.faults[0].fact
    assert not done.parts and list(out.rglob("*.arrow")) == []


def test_group_on_which_the_engines_differ_is_not_written(tmp_path, monkeypatch):
    group, out = _group(tmp_path, a=b"one"), _prepare_folder(tmp_path / "out")

    def differs(*_):
        raise EnginesDifferError

    monkeypatch.setattr(Encoder, "encode_batch", differs)
    done = write_group(group, folder=out, valid_fraction=0.0, rules=RULES)
    assert done.is_disproved and not done.parts and not done.faults
    assert list(out.rglob("*.arrow")) == list(out.rglob("*.partial")) == []


def test_bad_text_is_left_out_or_fails_the_group(tmp_path):
    group = _group(tmp_path, a=b"one", b=b"caf\xe9")
    out = _prepare_folder(tmp_path / "out")
    (fault,) = write_group(group, folder=out, valid_fraction=0.0, rules=RULES).faults
    assert f"{tmp_path}/b.txt@3 has no document (byte 0xe9 is not UTF-8)" in fault.fact
    done = write_group(group, folder=out, valid_fraction=0.0, rules=RULES, max_bad_lines=1)
    assert not done.faults and [line.name for line in done.bad] == [f"{tmp_path}/b.txt@3"]
    assert done.parts["train"].shard.num_documents == 1


def test_record_of_a_report_is_read_back(tmp_path):
    group = _group(tmp_path, a=b"one", b=b"\xff")
    out = _prepare_folder(tmp_path / "out")
    done = write_group(group, folder=out, valid_fraction=0.0, rules=RULES, max_bad_lines=1)
    again = decode_record(encode_record(done), index=4)
    assert again.parts["train"].counts.tolist() == done.parts["train"].counts.tolist()
    assert (again.index, again.bad, again.num_rows) == (4, done.bad, done.num_rows)
    assert again.engine == done.engine == open_encoder(byte_tokenizer(), RULES).engine
    assert again.parts["train"].shard == done.parts["train"].shard
    # a damaged record is none, so that its group is done again
    whole = encode_record(done)
    values = json.loads(whole)
    damaged = [b"", whole[:-9], b"null", b"7", b"[]", b"{}", bytes(range(128, 256)), b"[" * 100_000]
    damaged += [
        json.dumps(values | {field: wrong}).encode()
        for field in values
        for wrong in (None, -1.5, "text", {"a": 1}, [[]])
    ]
    assert [decode_record(content, index=4) for content in damaged] == [None] * len(damaged)
