"""A run on Ray that evaluates tasks: on its own grid, and on workers beside it; `raymega eval` agrees."""

import json
import subprocess
import sys

import pytest

from tests.support.jobs import VERIFY

pytestmark = [pytest.mark.ray, pytest.mark.wide]
SETTINGS = (
    "run.steps=4", "run.eval_tasks_every=2", "checkpoint.every=2", "model.vocab_size=257",
    "run.eval_samples=0", "tracking.mlflow_uri=off", "parallel.tp=1", "parallel.pp=2",
)  # fmt: skip


def _raymega(*words):
    command = [sys.executable, "-m", "raymega", *words, "--address", "local"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _train(folder, name, *more):
    """The lines of a run's metrics.jsonl."""
    task = f"{{task: lambada, path: {folder}/passages.jsonl}}"
    settings = (
        f"run.name={name}", f"checkpoint.uri={folder}/runs", f"data.path={folder}/tokens",
        f"run.eval_tasks=[{task}]", *SETTINGS, *more,
    )  # fmt: skip
    _raymega("train", str(VERIFY), *[word for each in settings for word in ("--set", each)])
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _tasks(lines):
    return {
        line["step"]: {name: value for name, value in line.items() if name.startswith("task/")}
        for line in lines
        if line["event"] == "tasks"
    }


def test_tasks_are_evaluated_on_the_grid_and_beside_with_the_same_metrics(tmp_path):
    text = "".join(
        json.dumps({"text": f"a cat and {n} hats sat on a mat"}) + "\n" for n in range(40)
    )
    (tmp_path / "passages.jsonl").write_text(text)
    _raymega(
        "data", "prepare", str(tmp_path / "passages.jsonl"), "--out", str(tmp_path / "tokens"),
        "--tokenizer", "bytes", "--valid-fraction", "0.1",
    )  # fmt: skip
    grid = _train(tmp_path, "grid")
    beside = _train(tmp_path, "beside", "run.eval_tasks_on=beside", "run.eval_tasks_grid=tp=2")
    plain = _train(tmp_path, "plain", "run.eval_tasks=[]", "run.eval_tasks_every=0")
    # the same run, bit for bit
    losses = [
        [line["loss"] for line in lines if line["event"] == "step"]
        for lines in (grid, beside, plain)
    ]
    assert losses[0] == losses[1] == losses[2]
    # the last step always; an earlier one beside unless a newer checkpoint was there already
    found, others = _tasks(grid), _tasks(beside)
    assert set(found) == {2, 4} and 4 in others
    for step, metrics in others.items():
        assert metrics == pytest.approx(found[step], rel=1e-9)
    # the command, later
    told = json.loads(
        _raymega(
            "eval",
            str(tmp_path / "runs" / "grid"),
            "--task",
            "lambada",
            "--data",
            str(tmp_path / "passages.jsonl"),
            "--json",
        )
    )
    metrics = {f"task/lambada/{name}": value for name, value in told["metrics"].items()}
    assert metrics == pytest.approx(found[4], rel=1e-9)
