"""What a new node asks of a real object store before its first packed row, and that its rows are those of a folder."""

from collections import Counter
from unittest.mock import patch
from uuid import uuid4

import numpy as np
import pytest
from botocore.client import BaseClient

from raymega.config.load import parse_job
from raymega.data.format import META_FILE, encode_meta
from raymega.data.samples import known_datasets, open_samples
from raymega.storage.registry import open_store
from tests.support.jobs import VERIFY
from tests.support.servers.s3_server import BUCKET
from tests.unit.data.datasets import with_lengths, write_documents

pytestmark = pytest.mark.wide

NUM_SHARDS, PER_SHARD, LONGEST, RESUMED = 400, 100, 300, 3001
LENGTHS_BYTES = 4 * NUM_SHARDS * PER_SHARD


@pytest.fixture(scope="module")
def corpus(ceph, tmp_path_factory):
    """Folders and URIs of a corpus as it was prepared without the file of lengths, and with it."""
    folder, found = tmp_path_factory.mktemp("made"), {}
    meta = write_documents(folder, num_shards=NUM_SHARDS, per_shard=PER_SHARD, longest=LONGEST)
    for name, each in (("old", meta), ("new", with_lengths(folder, meta))):
        uri = f"s3://{BUCKET}/{uuid4().hex}/tokens"
        store = open_store(uri)
        for file in each.splits["train"].files:
            store.put(file.file, [(folder / file.file).read_bytes()], overwrite=False)
        store.put(META_FILE, [encode_meta(each)], overwrite=False)
        found[name] = uri
    # of the folder the lengths are read from the shards
    (folder / META_FILE).write_bytes(encode_meta(meta))
    return str(folder), found, sum(shard.num_bytes for shard in meta.splits["train"].shards)


def _samples(path, num_bytes):
    settings = [
        f"data.path={path}", "data.seq_len=512", "data.packing=best_fit", "data.packing_window=64",
        "run.eval_samples=0", f"data.shuffle_block_bytes={num_bytes // 40}", f"data.cache_bytes={num_bytes // 20}",
    ]  # fmt: skip
    job = parse_job(VERIFY, settings).job()
    return open_samples(job, known_datasets(job))


def _first_row(path, num_bytes, sample):
    """A new node's samples, and its requests and bytes until they are opened, and until the row is there."""
    asked, ask = Counter(), BaseClient._make_api_call

    def count(client, operation, arguments):
        found = ask(client, operation, arguments)
        asked["requests"] += 1
        asked["bytes"] += found.get("ContentLength", 0) if operation == "GetObject" else 0
        return found

    with patch.object(BaseClient, "_make_api_call", count):
        samples = _samples(path, num_bytes)
        opened = Counter(asked)
        samples.row(sample)
    return samples, opened, Counter(asked)


@pytest.mark.parametrize("first", [0, RESUMED], ids=["new-run", "resumed"])
def test_new_node_reads_the_lengths_and_no_shard(
    ceph, corpus, first, tmp_path, monkeypatch, report_rates
):
    folder, uris, num_bytes = corpus
    monkeypatch.setenv("HOME", str(tmp_path / "here"))
    near, opened, read = _samples(folder, num_bytes), {}, {}
    for name, uri in uris.items():
        monkeypatch.setenv("HOME", str(tmp_path / name))
        far, opened[name], read[name] = _first_row(uri, num_bytes, first)
        for sample in range(first, first + 16):
            one, other = far.row(sample), near.row(sample)
            assert one.documents == other.documents
            for field in ("tokens", "labels", "mask"):
                assert np.array_equal(getattr(one, field), getattr(other, field))
    report_rates(f"opened by {opened}, first row by {read}, of {num_bytes} bytes of shards")
    described = opened["new"]["bytes"] - LENGTHS_BYTES
    # the description, twice: for its digest and as it is opened
    assert opened["new"]["requests"] <= 3 and 0 < described < 0.1 * num_bytes
    assert opened["old"]["requests"] >= NUM_SHARDS and opened["old"]["bytes"] >= num_bytes
