"""What a cluster is told: ids, command, paths, metadata; and what is refused before it is told."""

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from raymega import api
from raymega.errors import ConfigError
from raymega.orchestrate.jobs import submission
from raymega.orchestrate.jobs.client import job_server
from raymega.orchestrate.jobs.submission import (
    absolute_overrides,
    config_hash,
    credential_faults,
    git_commit,
    make_submission,
    next_attempt,
    relative_path_faults,
    shipped_sizes,
    working_dir_faults,
)
from raymega.storage.registry import open_store
from tests.support.leases import take_lease

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def _patient_git(monkeypatch):
    """It may be slow to answer on a busy machine."""
    monkeypatch.setattr(submission, "GIT_TIMEOUT_S", 100.0)


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "jobs").mkdir()
    for name in ("train.py", "verify.yaml"):
        shutil.copy(ROOT / "jobs" / name, tmp_path / "jobs" / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def submit(project, *overrides, **more):
    path = project / "jobs" / "verify.yaml"
    job = api.load_job(path, overrides)
    options = {"job_file": path, "overrides": overrides, "working_dir": project, "attempt": 2}
    return make_submission(job, **(options | more))


def test_submission_names_run_and_attempt_and_says_what_it_is(project):
    made = submit(project, "elastic.stop_timeout_s=10.5")
    assert made.submission_id == "verify-a2"
    assert made.metadata["raymega_run"] == "verify"
    assert made.metadata["raymega_attempt"] == "2"
    assert len(made.metadata["raymega_config"]) == 12
    # The save, then ninety seconds for what follows it.
    assert made.env_vars == {"RAY_JOB_STOP_WAIT_TIME_S": "101"}


def test_entrypoint_is_the_plain_command_with_absolute_paths(project):
    made = submit(project, "checkpoint.uri=my results", "run.steps=9")
    assert shlex.split(made.entrypoint) == [
        "python", "jobs/train.py", "jobs/verify.yaml",
        "--set", "run.steps=9", "--set", f"checkpoint.uri={project}/my results",
    ]  # fmt: skip


def test_without_the_script_the_nodes_command_is_used(project):
    (project / "jobs" / "train.py").unlink()
    words = shlex.split(submit(project, as_json=True).entrypoint)
    assert words == ["raymega", "train", "jobs/verify.yaml", "--json"]


def test_names_are_read_as_the_job_file_has_them(project):
    path = project / "jobs" / "verify.yaml"
    path.write_text(path.read_text().replace("name: verify", "name: 2026-11-31", 1))
    assert submit(project).submission_id == "2026-11-31-a2"


def test_job_file_outside_the_working_folder_is_refused(project):
    with pytest.raises(ConfigError, match="outside the working folder"):
        submit(project, job_file=ROOT / "jobs" / "verify.yaml")


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], 1),
        (["run-a1", "run-a10", "other-a99", "run-b-a50", "raysubmit_x"], 11),
        (["my.run-a3", "myxrun-a7"], 1),
    ],
    ids=["none", "numbers", "dots"],
)
def test_next_attempt_is_behind_the_highest(ids, expected):
    assert next_attempt("run", ids, run_uri="no-folder") == expected


def test_next_attempt_takes_a_dot_for_a_dot():
    assert next_attempt("my.run", ["my.run-a3", "myxrun-a7"], run_uri="no-folder") == 4


def test_next_attempt_is_above_those_of_the_run_itself(tmp_path):
    """The cluster may be new, and the run old."""
    lease = take_lease(open_store(str(tmp_path)))
    assert [lease.begin_attempt() for _ in range(3)] == [1, 2, 3]
    assert next_attempt("run", ["run-a1"], run_uri=str(tmp_path)) == 4
    assert next_attempt("run", ["run-a7"], run_uri=str(tmp_path)) == 8


@pytest.mark.parametrize(
    "text", ["data", "./x", "../x", "sqlite:///here.db", "~/runs"], ids=lambda text: text
)
def test_relative_paths_are_pinned_on_the_submitting_machine(project, text):
    field = "tracking.mlflow_uri" if ":" in text else "checkpoint.uri"
    (override,) = absolute_overrides(project / "jobs" / "verify.yaml", [f"{field}={text}"])
    path, _, value = override.partition("=")
    assert path == field
    assert Path(value.removeprefix("sqlite:///")).is_absolute()


@pytest.mark.parametrize(
    "override",
    ["checkpoint.uri=s3://b/x", "checkpoint.uri=/abs", "data.path=synthetic", "data.path=file:///x",
     "tracking.mlflow_uri=sqlite:////abs.db", "tracking.mlflow_uri=off", "tracking.mlflow_uri=run",
     "tracking.mlflow_uri=http://host:5000"],
    ids=lambda text: text,
)  # fmt: skip
def test_absolute_paths_are_left_as_they_are(project, override):
    path = project / "jobs" / "verify.yaml"
    assert absolute_overrides(path, [override]) == []
    assert relative_path_faults(path, [override]) == []


def test_relative_path_inside_a_ray_job_is_refused_beside_other_faults(project):
    with pytest.raises(ConfigError) as refused:
        api.load_job(
            project / "jobs" / "verify.yaml",
            ["checkpoint.uri=results", "run.steps=0"],
            is_in_ray_job=True,
        )
    text = str(refused.value)
    assert "checkpoint.uri='results' is relative" in text and "raymega submit" in text
    assert "run.steps=0" in text


@pytest.mark.parametrize(
    "uri", ["http://me:hidden@host:5000", "postgresql://me:hidden@db/x", "https://hidden@host"]
)
def test_credentials_in_a_uri_are_refused_and_not_repeated(project, uri):
    with pytest.raises(ConfigError, match=r"tracking.mlflow_uri holds a user name") as refused:
        submit(project, f"tracking.mlflow_uri={uri}")
    assert "hidden" not in str(refused.value)
    assert credential_faults({"a": "s3://bucket/a@b", "b": 3}) == []


def test_datasets_of_a_blend_are_pinned_and_checked_like_one(project):
    path = project / "jobs" / "verify.yaml"
    given = [
        "data.path=none",
        "data.sources=[{path: a}, {path: synthetic:x}, {path: 'megatron:b'}]",
    ]
    (override,) = absolute_overrides(path, given)
    field, _, text = override.partition("=")
    paths = [entry["path"] for entry in json.loads(text)]
    assert field == "data.sources" and paths[0].endswith("/a") and paths[0].startswith("/")
    assert paths[1] == "synthetic:x" and paths[2].startswith("megatron:/")
    assert absolute_overrides(path, [*given, override]) == []
    facts = [fault.fact for fault in relative_path_faults(path, given)]
    assert facts == [
        "data.sources[0].path='a' is relative",
        "data.sources[2].path='megatron:b' is relative",
    ]
    stages = "data.stages=[{from_tokens: 9, sources: [{path: 's3://me:hidden@b/x'}]}]"
    with pytest.raises(ConfigError, match=r"data.stages\[0\].sources\[0\].path holds a user name"):
        api.load_job(path, [*given, stages])


def test_config_hash_follows_every_field(project):
    path = project / "jobs" / "verify.yaml"
    assert config_hash(api.load_job(path)) == config_hash(api.load_job(path))
    assert config_hash(api.load_job(path)) != config_hash(api.load_job(path, ["run.steps=21"]))


def test_git_commit_says_when_files_differ(tmp_path):
    assert git_commit(tmp_path) == "none"

    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
            cwd=tmp_path, check=True, capture_output=True, timeout=100,
        )  # fmt: skip

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    commit = git_commit(tmp_path)
    assert len(commit) == 40
    (tmp_path / "file").write_text("2")
    assert git_commit(tmp_path) == commit + "-dirty"


def test_ignored_files_are_not_shipped_and_large_ones_are_named(project, monkeypatch):
    (project / ".gitignore").write_text("kept-out/\n")
    (project / ".rayignore").write_text("*.pt\n")
    for name in ("kept-out/a", ".git/b", ".venv/c", "big/d", "model.pt"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_bytes(bytes(5000))
    sizes = shipped_sizes(project)
    assert set(sizes) == {".gitignore", ".rayignore", "big", "jobs"} and sizes["big"] == 5000
    assert not list(working_dir_faults(project))
    monkeypatch.setattr(submission, "MAX_WORKING_DIR_BYTES", 5000)
    (fault,) = working_dir_faults(project)
    assert "in big (" in fault.fact and ".rayignore" in fault.remedy


def test_repository_ships_little():
    sizes = shipped_sizes(ROOT)
    assert {"raymega", "jobs"} <= set(sizes)
    assert not {"tests", "docs", "runs", "demo-out"} & set(sizes)
    assert sum(sizes.values()) < 6 * 2**20


@pytest.mark.parametrize(
    ("address", "server"),
    [
        ("http://head:8265", "http://head:8265"),
        ("https://head/", "https://head"),
        ("head:8265", "http://head:8265"),
        ("auto", "http://127.0.0.1:8265"),
    ],
)
def test_job_server_addresses(address, server):
    assert job_server(address) == server


@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        ("ray://head:10001", "use http://head:8265"),
        ("local", "raymega train"),
        ("head", "http://HOST:8265"),
        ("http://me:hidden@head:8265", "http://HOST:8265"),
    ],
)
def test_addresses_of_nothing_that_takes_jobs_are_refused(address, remedy):
    with pytest.raises(ConfigError) as refused:
        job_server(address)
    assert remedy in str(refused.value) and "hidden" not in str(refused.value)
