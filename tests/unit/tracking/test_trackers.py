"""Trackers with files: drivers are killed for real, and each format's own reader finds each step once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.docs.blocks import ROOT
from tests.support.servers.wandb_server import wandb_server

STEPS = list(range(1, 13))
LOSSES = [10.0 / step for step in STEPS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of twelve steps by four drivers: two are killed, with records on their way and without."""
    folder = tmp_path_factory.mktemp("run")
    drivers = ((0, 3, "finished"), (3, 7, "killed"), (5, 9, "flushed"), (8, 12, "finished"))
    for first, last, end in drivers:
        command = [sys.executable, "-m", "tests.support.tracked_driver", folder, first, last, end]
        done = subprocess.run([*map(str, command)], cwd=ROOT, env=environment(), timeout=500)
        assert done.returncode == (0 if end == "finished" else -9)
    return folder


def environment(**more):
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more


def test_jsonl_has_each_step_once(folder):
    rows = [json.loads(line) for line in (folder / "curves.jsonl").read_text().splitlines()]
    curve = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert curve == list(zip(STEPS, LOSSES, strict=True))


def test_tensorboard_reads_each_step_once(folder):
    reader = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    loss = reader.Scalars("train/loss")
    assert [event.step for event in loss] == STEPS
    assert [event.value for event in loss] == pytest.approx(LOSSES, rel=1e-7), "float32"


def test_wandb_uploads_each_step_once(folder):
    """wandb's own program reads the files of all drivers; the server gets the rows of one run."""
    with wandb_server() as server:
        sync = [Path(sys.executable).with_name("wandb"), "sync", "--yes"]
        runs = sorted((folder / "wandb").glob("offline-run-*"))
        done = subprocess.run(
            [*map(str, [*sync, *runs])],
            env=environment(WANDB_BASE_URL=server.uri, WANDB_API_KEY="a" * 40, HOME=str(folder)),
            capture_output=True, text=True, timeout=500,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    rows = [row for row in server.history if "train/loss" in row]
    assert [row["_step"] for row in rows] == STEPS
    assert [row["train/loss"] for row in rows] == LOSSES
