"""Tokens are traced to their documents, against a plain search."""

import numpy as np
import pytest

from raymega.data.arrow import TokenStream
from raymega.data.format import read_meta
from raymega.errors import ConfigError
from raymega.prepare.origins import Origin, decode_origins, encode_origins, trace
from tests.unit.data.datasets import write_dataset
from tests.unit.prepare import corpora


def test_origins_are_read_back_and_small():
    rows = np.array([[0, 5], [0, 6], [0, 9], [3, 0], [3, 1]])
    assert decode_origins(encode_origins(rows)).tolist() == rows.tolist()
    many = np.stack([np.zeros(100_000, dtype=np.int64), np.arange(100_000)], axis=1)
    assert len(encode_origins(many)) < 30_000


def test_every_token_leads_to_its_row_and_place(tmp_path, without_ray, small_groups):
    texts = corpora.texts()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.jsonl").write_bytes(corpora.json_lines(texts[:30]))
    corpora.write_parquet(texts[30:], "two.parquet")(tmp_path / "a")
    corpora.prepared(tmp_path / "a", tmp_path / "out")
    meta = read_meta(tmp_path / "out")
    num_shards = {name: len(split.shards) for name, split in meta.splits.items()}
    assert num_shards["train"] > 1
    files = {f"{tmp_path}/a/one.jsonl": texts[:30], f"{tmp_path}/a/two.parquet": texts[30:]}
    for name, split in meta.splits.items():
        stream = TokenStream(tmp_path / "out", split)
        for token in range(0, split.num_tokens, 997):
            found = trace(str(tmp_path / "out"), meta, split=name, token=token)
            raw = [*files[found.file][found.row].encode(), meta.eod_id]
            assert stream.read(token, token + 1).tolist() == [raw[found.offset]]
            length = min(len(raw) - found.offset, split.num_tokens - token)
            assert stream.read(token, token + length).tolist() == raw[found.offset :][:length]


def test_first_and_last_token_and_those_beyond(tmp_path, without_ray):
    (tmp_path / "a.txt").write_text("abc")
    corpora.prepared(tmp_path / "a.txt", tmp_path / "out", valid_fraction=0.0)
    uri, meta = str(tmp_path / "out"), read_meta(tmp_path / "out")
    expected = [Origin(document=0, file=f"{tmp_path}/a.txt", row=0, offset=i) for i in range(4)]
    assert [trace(uri, meta, split="train", token=i) for i in range(4)] == expected
    for split, token in (("train", 4), ("train", -1), ("valid", 0)):
        with pytest.raises(ConfigError, match=f"--token {token} of split {split}"):
            trace(uri, meta, split=split, token=token)


def test_dataset_without_origins_says_so(tmp_path):
    meta = write_dataset(tmp_path)
    with pytest.raises(ConfigError, match=r"has no 'train/000000\.origins'"):
        trace(str(tmp_path), meta, split="train", token=0)
