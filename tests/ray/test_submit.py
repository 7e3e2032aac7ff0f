"""Jobs on a real head with a token: submitted, followed, stopped with a save, continued, refused."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from raymega.checkpoint.format.manifest import find_restore
from raymega.orchestrate.run_store.journal import read_record
from raymega.storage.registry import open_store
from tests.support.servers.ray_head import head

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
LIMIT_S = 500


@pytest.fixture(scope="module")
def cluster():
    with head() as started:
        yield started


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A user's folder: jobs, and no raymega package, for the nodes have it installed."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "jobs").mkdir()
    for name in ("jobs/train.py", "jobs/verify.yaml", ".rayignore"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@dataclass
class Client:
    cluster: object
    project: Path

    def start(self, *words, **more):
        command = [sys.executable, "-c", "from raymega.cli.main import run; run()", *words]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.project,
            env=self.cluster.env | more,
        )

    def submit(self, *words, **more):
        process = self.start("submit", "jobs/verify.yaml", *self.at(), *words, **more)
        out, err = process.communicate(timeout=LIMIT_S)
        return process.returncode, out, err

    def at(self):
        return ("--address", self.cluster.job_server)

    def ray(self, *words):
        command = [Path(sys.executable).parent / "ray", *words]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=self.project, env=self.cluster.env,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip


@pytest.fixture
def client(cluster, project):
    return Client(cluster, project)


def _settings(**values):
    return [word for key, value in values.items() for word in ("--set", key + "=" + value)]


def test_followed_job_ends_with_0_and_can_be_found(client, project):
    # RAY_ADDRESS in the environment must not win over the option.
    code, out, err = client.submit(
        "--follow", "--json",
        *_settings(**{"run.name": "whole", "run.steps": "3", "checkpoint.uri": "results",
                      "tracking.mlflow_uri": "off", "optimizer.lr_warmup_steps": "0"}),
        RAY_ADDRESS="127.0.0.1:1",
    )  # fmt: skip
    assert code == 0, out + err
    events = [json.loads(line) for line in out.splitlines()]
    assert events[0]["submission_id"] == "whole-a1"
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3]
    # The relative URI was resolved here, not in Ray's copy of the folder.
    assert (project / "results" / "whole" / "run.json").is_file()
    listed = client.ray("list", "jobs", "--address", client.cluster.job_server, "--detail")
    for fact in ("whole-a1", "raymega_config", "raymega_git", "raymega_run: whole"):
        assert fact in listed.stdout, listed.stdout + listed.stderr
    assert client.cluster.env["RAY_AUTH_TOKEN"] not in out + err + listed.stdout


@pytest.mark.wide
def test_stop_saves_and_the_same_command_continues_the_same_runs(client, tmp_path):
    settings = _settings(
        **{"run.name": "halted", "run.steps": "100000", "checkpoint.every": "50000",
           "checkpoint.uri": str(tmp_path), "tracking.console_every": "1"}
    )  # fmt: skip
    following = client.start("submit", "jobs/verify.yaml", *client.at(), "--follow", *settings)
    for line in following.stdout:
        if line.startswith("step"):
            break
    code, _, err = client.submit(*settings)
    assert code == 2 and "already at work as job 'halted-a1'" in err
    code, _, err = client.submit("--stop", *settings)
    assert code == 75, err
    following.communicate(timeout=LIMIT_S)
    assert following.returncode == 75
    record = read_record(open_store(str(tmp_path / "halted")))
    assert record.status == "preempted" and record.step > 0

    more = _settings(**{"run.steps": str(record.step + 2)})
    code, out, err = client.submit("--follow", "--json", *settings, *more)
    assert code == 0, out + err
    events = [json.loads(line) for line in out.splitlines()]
    assert events[0]["submission_id"] == "halted-a2"
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps == [record.step + 1, record.step + 2]
    with sqlite3.connect(tmp_path / "halted" / "mlflow.db") as database:
        (parents,) = database.execute(
            "select count(*) from runs where run_uuid not in "
            "(select run_uuid from tags where key = 'mlflow.parentRunId')"
        ).fetchone()
    assert parents == 1


@pytest.mark.wide
def test_run_whose_driver_and_head_are_lost_goes_on_elsewhere_in_one_mlflow_run(
    client, project, tmp_path
):
    settings = _settings(
        **{"run.name": "torn", "run.steps": "100000", "checkpoint.every": "5",
           "checkpoint.uri": str(tmp_path), "tracking.console_every": "1"}
    )  # fmt: skip
    with head() as lost:
        first = Client(lost, project)
        following = first.start("submit", "jobs/verify.yaml", *first.at(), "--follow", *settings)
        for line in following.stdout:
            if line.startswith("Checkpoint of step"):
                break
        deadline_s = time.monotonic() + LIMIT_S
        while not _attempts_in(tmp_path / "torn" / "mlflow.db"):  # MLflow is written behind the run
            assert time.monotonic() < deadline_s
            time.sleep(0.5)
        os.kill(_driver_pid("run.name=torn"), signal.SIGKILL)
        following.communicate(timeout=LIMIT_S)
        assert following.returncode == 137, "the shell's word for SIGKILL: it had no time to save"
    store = open_store(str(tmp_path / "torn"))
    assert read_record(store).status == "running"
    saved_step = find_restore(store).manifest.step

    more = _settings(**{"run.steps": str(saved_step + 2)})
    code, out, err = client.submit("--follow", "--json", *settings, *more)
    assert code == 0, out + err
    events = [json.loads(line) for line in out.splitlines()]
    assert events[0]["submission_id"] == "torn-a2", (
        "this cluster has not seen the run, its store has"
    )
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps == [saved_step + 1, saved_step + 2]
    assert _attempts_in(tmp_path / "torn" / "mlflow.db") == ["FINISHED", "KILLED"]


def _attempts_in(path):
    """Of the one run that MLflow's database has: how its attempts stand."""
    if not path.exists():
        return []
    with sqlite3.connect(path) as database, suppress(sqlite3.OperationalError):
        rows = database.execute(
            "select status from runs where run_uuid in "
            "(select run_uuid from tags where key = 'mlflow.parentRunId')"
        ).fetchall()
        (parents,) = database.execute("select count(*) from runs").fetchone()
        assert parents - len(rows) <= 1
        return sorted(status for (status,) in rows)
    return []


def _driver_pid(setting):
    """The driver, not the shell that the job server puts before it."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if setting in words and {"train", "jobs/train.py"} & set(words):
                return int(path.parent.name)
    raise AssertionError(f"no driver with {setting}")


def test_mistakes_are_refused_before_anything_is_submitted(client):
    code, out, err = client.submit("--set", "run.steps=0", "--set", "parallel.tp=3")
    assert code == 2 and out == ""
    assert "run.steps=0" in err and "parallel.tp=3" in err
    code, _, err = client.submit(RAY_AUTH_TOKEN="x" * 64)
    assert code == 2 and "refused the token" in err


@pytest.mark.wide
def test_mistakes_that_only_the_cluster_sees_end_with_2(client, tmp_path):
    settings = _settings(**{"run.name": "lost", "data.path": str(tmp_path / "nowhere")})
    submitted = client.start("submit", "jobs/verify.yaml", *client.at(), "--follow", *settings)
    plain = client.ray(
        "job", "submit", "--address", client.cluster.job_server, "--working-dir", ".",
        "--submission-id", "plain", "--",
        "python", "jobs/train.py", "jobs/verify.yaml", "--set", "checkpoint.uri=results",
    )  # fmt: skip
    said = plain.stdout + plain.stderr
    # Ray's own command knows only 0 and 1; the driver's code is in what it prints.
    assert plain.returncode == 1 and "exit code 2" in said, said
    assert "checkpoint.uri='results' is relative" in said
    out, err = submitted.communicate(timeout=LIMIT_S)
    assert submitted.returncode == 2, out + err
    assert "nowhere" in out
