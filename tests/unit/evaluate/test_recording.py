"""Where an evaluation is recorded, by the run's record and tracking settings."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from raymega.cli import evaluate as command
from raymega.cli.main import app
from raymega.errors import ConfigError
from raymega.evaluate.recording import find_mlflow_run, recorded
from raymega.evaluate.report import EvalReport
from raymega.storage.local import LocalStore

IDENTITY = {part: {} for part in ("model", "data", "run", "optimizer")}
REPORT = EvalReport(
    task="lambada", checkpoint="runs/demo/step-4", step=4, metrics={"accuracy": 0.25},
    documents=8, tokens=12, words=0, grid={"tp": 1}, samples=[{"is_right": True}], notes=("all",),
    seconds=1.5,
)  # fmt: skip


def _checkpoint(folder, tracking, *, has_run=True):
    store = LocalStore(folder)
    if has_run:
        record = {
            "run_id": "r7", "name": "demo", "identity": IDENTITY, "status": "finished", "total_steps": 4,
            "updated": "now",
        }  # fmt: skip
        store.put("run.json", [json.dumps(record).encode()], overwrite=True)
    return SimpleNamespace(store=store, manifest=SimpleNamespace(job={"tracking": tracking}))


def _found(checkpoint, setting):
    return find_mlflow_run((checkpoint.store, checkpoint.manifest), setting)


def test_metrics_go_to_the_run_of_the_checkpoint_as_its_job_says(tmp_path):
    server = {"mlflow_uri": "http://there:5000", "experiment": "mine"}
    at = _checkpoint(tmp_path / "a", server)
    found = _found(at, "run")
    assert (found.uri, found.experiment) == ("http://there:5000", "mine")
    assert (found.run_id, found.name) == ("r7", "demo")
    assert _found(at, "off") is None
    assert _found(at, "sqlite:///other.db").uri == "sqlite:///other.db"
    # tracking off; a sqlite file of a driver on another machine
    assert _found(_checkpoint(tmp_path / "b", {"mlflow_uri": "off"}), "run") is None
    here = _checkpoint(tmp_path / "c", {"mlflow_uri": "run"})
    assert _found(here, "run") is None
    (tmp_path / "c" / "mlflow.db").touch()
    assert _found(here, "run").uri == f"sqlite:///{tmp_path / 'c' / 'mlflow.db'}"


def test_a_converted_model_has_no_run(tmp_path):
    at = _checkpoint(tmp_path, {}, has_run=False)
    assert _found(at, "run") is None
    with pytest.raises(ConfigError) as error:
        _found(at, "http://there:5000")
    assert "has no run.json" in str(error.value)


def test_a_result_is_recorded_with_its_notes_and_samples_or_says_why_not(tmp_path):
    at = _checkpoint(tmp_path, {})
    run = _found(at, f"sqlite:///{tmp_path / 'mlflow.db'}")
    report = recorded(REPORT, run)
    assert report.notes[-1].endswith("run demo, step 4")
    client = MlflowClient(run.uri)
    experiment = client.get_experiment_by_name("raymega").experiment_id
    (found,) = client.search_runs([experiment])
    assert found.data.metrics == {"eval/task/lambada/accuracy": 0.25}
    names = [file.path for file in client.list_artifacts(found.info.run_id, "evaluations")]
    stem = "evaluations/lambada-step-00000004"
    assert names == [f"{stem}.json", f"{stem}.samples.jsonl"]
    lost = recorded(REPORT, replace(run, uri="nonsense://"))
    assert lost.metrics == REPORT.metrics and "not recorded in MLflow" in lost.notes[-1]


def test_several_checkpoints_make_one_table_that_says_what_cannot_be_compared(
    monkeypatch, tmp_path
):
    other = replace(
        REPORT, checkpoint="runs/other/step-8", step=8, tokens=13, metrics={"accuracy": 0.5}
    )
    reports = [REPORT, other]
    monkeypatch.setattr(command, "evaluate_each", lambda uris, *_, **__: reports[: len(uris)])
    words = ["eval", "a", "b", "--task", "lambada", "--data", "x", "--samples", str(tmp_path / "s")]
    text = CliRunner().invoke(app, words, catch_exceptions=False).output
    assert [line.split() for line in text.splitlines()[2:4]] == [
        ["runs/demo/step-4", "4", "0.25"],
        ["runs/other/step-8", "8", "0.5"],
    ]
    assert "not those of tokens" in text
    samples = [json.loads(line) for line in (tmp_path / "s").read_text().splitlines()]
    assert [each["checkpoint"] for each in samples] == ["runs/demo/step-4", "runs/other/step-8"]
    reports[1] = replace(other, tokens=12)
    text = CliRunner().invoke(app, words, catch_exceptions=False).output
    assert "not those of tokens" not in text
    lines = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False).output.splitlines()
    assert [json.loads(line)["step"] for line in lines] == [4, 8]
