"""`raymega checkpoint now` against a run at work on a real head: by folder, by name, by job server."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from raymega.checkpoint.tools.inspection import verify_checkpoints
from raymega.storage.registry import open_store
from tests.support.command import RAYMEGA, VERIFY
from tests.support.servers.ray_head import head

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.wide]

LIMIT_S = 500


@pytest.fixture(scope="module")
def cluster():
    with head() as started:
        yield started


@contextmanager
def _training(cluster, root):
    """A run of no end that has done a step, and saves nothing by itself."""
    values = {"run.steps": "1000000", "checkpoint.every": "0", "checkpoint.uri": str(root),
              "tracking.mlflow_uri": "off", "optimizer.lr_decay_steps": "100",
              "run.name": "asked"}  # fmt: skip
    words = [word for pair in values.items() for word in ("--set", "=".join(pair))]
    command = [*RAYMEGA, "train", str(VERIFY), "--json", "--address", cluster.address, *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=cluster.env
    )
    try:
        for line in process.stdout:
            if json.loads(line)["event"] == "step":
                break
        else:
            raise AssertionError("the run ended before its first step")
        # What nobody reads would fill the pipe and hold the driver up.
        drain = subprocess.Popen(["cat"], stdin=process.stdout, stdout=subprocess.DEVNULL)
        yield process
    finally:
        process.kill()
        process.wait(100)
        drain.wait(100)


def _now(cluster, *words):
    return subprocess.run(
        [*RAYMEGA, "checkpoint", "now", *words], capture_output=True, text=True, check=False,
        env=cluster.env, timeout=LIMIT_S,
    )  # fmt: skip


def test_running_run_saves_when_it_is_asked_in_any_way(cluster, tmp_path):
    run = tmp_path / "asked"
    steps = []
    with _training(cluster, tmp_path):
        for words in (
            [str(run)],
            ["asked", "--address", cluster.address],
            ["asked", "--address", cluster.job_server],
        ):
            done = _now(cluster, *words, "--json")
            assert done.returncode == 0, done.stderr
            answer = json.loads(done.stdout)
            store = open_store(str(run))
            key = answer["uri"].removeprefix(f"{store.uri}/")
            assert store.size(key) > 0, "the checkpoint is committed when the command says so"
            steps.append(answer["step"])
        assert steps == sorted(set(steps)), "each time of a newer step"
        nobody = _now(cluster, "nobody", "--address", cluster.address)
        assert nobody.returncode == 2 and "no run 'nobody' is at work" in nobody.stderr
    assert [each.step for each in verify_checkpoints(str(run))] == sorted(steps, reverse=True)
    assert not any(each.faults for each in verify_checkpoints(str(run)))
    assert [key for key in store.list("") if key.startswith(("requests/", "answers/"))] == []
    late = _now(cluster, str(run), "--timeout", "3")
    assert late.returncode == 1 and "has not answered for 3 s" in late.stderr


def test_run_that_was_never_begun_is_a_mistake_of_the_user(tmp_path):
    done = subprocess.run(
        [*RAYMEGA, "checkpoint", "now", str(tmp_path / "no")], capture_output=True, text=True,
        check=False, env=dict(os.environ), timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 2 and "was never begun" in done.stderr
    assert sys.executable in RAYMEGA and list(tmp_path.iterdir()) == []
