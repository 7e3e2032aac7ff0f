import os
import signal
import subprocess
import sys
import time

import pytest
import ray
from ray.cluster_utils import Cluster

from raymega.data.inspect import inspect_dataset
from raymega.data.open_split import Shape, open_split
from raymega.errors import ConfigError
from raymega.prepare import groups
from raymega.prepare.options import PrepareOptions
from raymega.prepare.pipeline import prepare
from raymega.session import close_session, open_session

pytestmark = pytest.mark.ray

NUM_FILES = 30


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(groups, "MIN_GROUP_BYTES", 512)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(NUM_FILES):
        (folder / f"{i}.txt").write_text(f"the text of file {i}, " * (i % 5 + 3))
    return folder


def _options(corpus, out, **changes):
    values = {"tokenizer": "bpe:280", "valid_fraction": 0.2, "address": "local"} | changes
    return PrepareOptions(inputs=(str(corpus),), out=str(out), **values)


def _prepare(*args, **changes):
    seen = []
    done = prepare(_options(*args, **changes), on_progress=lambda *at: seen.append(at))
    return done, seen


def _content(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_shards_are_the_same_on_a_private_instance_and_on_a_cluster_of_another_size(
    corpus, tmp_path, monkeypatch
):
    opened = open_session("local", num_cpus=2)
    try:
        assert opened.is_private and ray.cluster_resources()["CPU"] == 2
        assert os.environ["RAY_AUTH_MODE"] in ("token", "disabled")
        first, seen = _prepare(corpus, tmp_path / "first")
        _check_faults(tmp_path)
        assert ray.is_initialized()
    finally:
        close_session()
    _, num_done, num_groups = [at for at in seen if at[0] == "tokenising"][-1]
    assert num_done == num_groups > 4 and seen[-1] == ("joining", 2, 2)

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        joined = open_session("auto")
        assert (joined.address, joined.is_private) == (cluster.address, False)
        _prepare(corpus, tmp_path / "second", address="auto")
    finally:
        close_session()
        cluster.shutdown()
    assert _content(tmp_path / "first") == _content(tmp_path / "second")
    _check_dataset(first.meta, tmp_path / "first")
    _check_second_time(corpus, tmp_path / "first", first.meta)


def _check_dataset(meta, out):
    assert inspect_dataset(str(out), is_verified=True, on_shard=lambda *_: None) == meta
    assert sum(split.num_documents for split in meta.splits.values()) == NUM_FILES
    num_bytes = sum(split.num_text_bytes for split in meta.splits.values())
    assert num_bytes == meta.source.num_bytes and meta.valid_entropy > 1
    source = open_split(str(out), "train", Shape(seq_len=16), seed=0)
    windows = [source.window(i) for i in range(source.num_windows)]
    num_ends = sum((window[:-1] == meta.eod_id).sum() for window in windows)
    num_train = meta.splits["train"].num_documents
    assert num_train - 1 <= num_ends <= num_train  # the last may lie behind the last window


def _check_second_time(corpus, out, meta):
    before = _content(out)
    again, seen = _prepare(corpus, out)
    assert again.is_cached and again.meta == meta and seen == []
    with pytest.raises(ConfigError, match="bpe:280 there, bytes here"):
        _prepare(corpus, out, tokenizer="bytes")
    (corpus / "new.txt").write_text("more")
    with pytest.raises(ConfigError, match="dataset of another recipe"):
        _prepare(corpus, out)
    assert not ray.is_initialized() and _content(out) == before


def _check_faults(tmp_path):
    corpus, out = tmp_path / "bad", tmp_path / "bad-out"
    corpus.mkdir()
    (corpus / "a.jsonl").write_text('{"text": "fine"}\n{"body": "not"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl@17 has no document"):
        _prepare(corpus, out, tokenizer="bytes")
    assert [path.name for path in out.iterdir()] == ["_state"]


@pytest.mark.wide
def test_command_that_is_killed_is_continued_and_gives_the_same_bytes(tmp_path):
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "out"
    with corpus.open("w") as file:
        for i in range(6000):
            file.write(f'{{"text": "{i} {"word " * 200}"}}\n')
    # One CPU: the groups run one after the other.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        words = ["data", "prepare", str(corpus), "--out", str(out), "--tokenizer", "bytes"]
        with subprocess.Popen(
            [sys.executable, "-m", "raymega", *words, "--address", cluster.address]
        ) as process:
            while not list(out.glob("_state/groups/*.json")):
                assert process.poll() is None
                time.sleep(0.01)
            process.kill()
        assert process.returncode == -signal.SIGKILL
        assert [path.name for path in out.iterdir()] == ["_state"]
        num_kept = len(list(out.glob("_state/groups/*.json")))
        _, seen = _prepare(
            corpus, out, tokenizer="bytes", valid_fraction=0.02, address=cluster.address
        )
        _prepare(
            corpus,
            tmp_path / "undisturbed",
            tokenizer="bytes",
            valid_fraction=0.02,
            address=cluster.address,
        )
    finally:
        close_session()
        cluster.shutdown()
    _, num_done, num_groups = next(at for at in seen if at[0] == "tokenising")
    assert num_groups > num_done >= num_kept > 0
    assert _content(out) == _content(tmp_path / "undisturbed")
