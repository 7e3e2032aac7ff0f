"""A curation on several nodes and in an object store, killed on its way: its bytes are those of one process."""

import json
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
import ray
from ray.cluster_utils import Cluster

from raymega import ray_private
from raymega.curate import pipeline
from raymega.curate.checks import CurateOptions
from raymega.session import close_session, open_session
from raymega.storage.registry import open_store
from tests.support.servers.s3_server import BUCKET, environment, exported, moto_server
from tests.unit.curate.corpora import edited, in_this_process, prose

pytestmark = [pytest.mark.ray, pytest.mark.wide]

CORPUS, OUT = f"s3://{BUCKET}/raw", f"s3://{BUCKET}/curated"
STEPS = ["personal", "exact", "near", "lines"]
SEEN_S = 120.0


@pytest.fixture
def store(monkeypatch):
    """An object store with a corpus of several groups in two files."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray_private.reread_environment()
    texts = [f"Text {seed}.\n{edited(text, 0.4, seed)}" for seed in range(110) for text in prose()]  # fmt: skip
    with moto_server() as endpoint, exported(environment(endpoint)):
        corpus = open_store(CORPUS)
        for name, part in (("a", texts[::2]), ("b", [*texts[1::2], *texts[:100]])):
            lines = "".join(json.dumps({"text": text}) + "\n" for text in part)
            corpus.put(f"{name}.jsonl", [lines.encode()], overwrite=False)
        yield open_store(OUT)
    monkeypatch.undo()
    ray_private.reread_environment()


@pytest.fixture
def address(store):
    """A head without CPUs and two nodes with one each, whose agents report every second."""
    head = {"num_cpus": 0, "_system_config": {"metrics_report_interval_ms": 1000}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        yield cluster.address
    finally:
        close_session()
        cluster.shutdown()


def test_curation_killed_on_two_nodes_continues_in_the_store(store, address, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"steps": STEPS}))
    words = [CORPUS, "--out", OUT, "--recipe", str(recipe), "--address", address]
    with subprocess.Popen([sys.executable, "-m", "raymega", "data", "curate", *words]) as process:
        while not (kept := _records(store)):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    # The command goes on behind the groups that were done.
    open_session(address)
    seen = []
    options = {"inputs": (CORPUS,), "recipe": str(recipe), "address": address}
    done = pipeline.curate(
        CurateOptions(out=OUT, **options), on_progress=lambda *at: seen.append(at)
    )
    _, num_done, num_groups = next(at for at in seen if at[0] == "read, personal")
    assert num_groups > 3 and num_done >= len(kept)
    _check_output(store, done, CurateOptions(out=str(tmp_path / "out"), **options))
    _check_metrics(done)


def _records(store):
    return [key for key in store.list("_state/stages/0-") if "/done/" in key]


def _check_output(store, done, alone):
    """The files in the store are those of one process, and nothing else lies there."""
    keys = list(store.list(""))
    assert {key.partition("/")[0] for key in keys} == {"_report", "_state", *done.files}
    assert not any("/stages/" in key or "/assets/" in key for key in keys)
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in in_this_process():
            patch.setattr(module, name, value)
        expected = pipeline.curate(alone, on_progress=lambda *_: None)
    assert done.counts == expected.counts and done.files == expected.files
    there = open_store(expected.uri)
    for name in done.files:
        assert store.get(name) == there.get(name)


def _check_metrics(done):
    """Each step's documents, bytes and seconds are among the metrics of the driver's node."""
    here = ray.get_runtime_context().get_node_id()
    (node,) = (node for node in ray.nodes() if node["NodeID"] == here)
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    wanted = {f"ray_raymega_curate_{kind}" for kind in ("text_bytes", "documents", "cpu_seconds")}
    deadline, text = time.monotonic() + SEEN_S, ""
    while not all(_has(text, name, step) for name in wanted for step in STEPS):
        assert time.monotonic() < deadline, text
        time.sleep(0.2)
        with urllib.request.urlopen(url, timeout=SEEN_S) as answer:
            text = answer.read().decode()
    assert done.counts["steps"][0]["name"] == "read"


def _has(text, name, step):
    return any(
        line.startswith((f"{name}{{", f"{name}_total{{")) and f'step="{step}"' in line
        for line in text.splitlines()
    )
