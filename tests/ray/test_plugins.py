"""The package of docs/extending.md, installed by pip: trains, is killed, resumes on another grid, verifies."""

import os
import signal
import subprocess
import sys

import pytest

from tests.docs.blocks import ROOT
from tests.support.command import RAYMEGA, train
from tests.support.jobs import VERIFY
from tests.support.outside_package import USES, options, write_package

pytestmark = [pytest.mark.ray, pytest.mark.wide]
STEPS = 12


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder with the installed package; the working folder is another one."""
    (tmp_path / "source").mkdir()
    write_package(tmp_path / "source")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    target = tmp_path / "target"
    subprocess.run([*pip, "--target", str(target), str(tmp_path / "source")], check=True)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(target)]))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def settings_of(folder, name):
    return (
        *USES, options(f"{folder}/runs"), f"checkpoint.uri={folder}/runs", f"run.name={name}", f"run.steps={STEPS}",
        "checkpoint.every=4", "run.eval_every=6", "optimizer.lr_warmup_steps=0", "tracking.console_every=1",
    )  # fmt: skip


def run(folder, name, *more, on_step=lambda *_: None):
    return train(*settings_of(folder, name), *more, address="local", on_step=on_step)


def kill_driver_at_6(running, step):
    if step == 6:
        running.signal_driver(signal.SIGKILL)


def test_outside_package_trains_is_killed_and_resumes_on_another_grid(installed):
    (installed / "runs").mkdir()
    whole = run(installed, "whole")
    assert whole.code == 0, whole.stderr[-3000:]
    killed = run(installed, "killed", on_step=kill_driver_at_6)
    assert killed.code == -signal.SIGKILL
    resumed = run(installed, "killed", "parallel.tp=2", "parallel.pp=1", "parallel.dp=2")
    assert resumed.code == 0, resumed.stderr[-3000:]
    losses = killed.losses | resumed.losses
    assert losses == pytest.approx(whole.losses, rel=1e-6), "float32, on another grid"
    # each part was there: the metric and the schedule in the lines, the callback on every rank, the tracker
    for event in whole.all("step"):
        assert event["metric/acme.bits"] == pytest.approx(event["loss"] / 0.6931471805599453)
        assert event["lr"] == pytest.approx(3e-3 * (1 - abs(event["step"] / 6 - 1)))
    for rank in range(4):
        calls = (installed / "runs" / f"calls-killed-{rank}.txt").read_text()
        assert f"begin {STEPS}\n" in calls and f"checkpoint {STEPS}\n" in calls
    rows = (installed / "runs" / "whole" / "loss.csv").read_text().splitlines()
    assert [int(row.partition(",")[0]) for row in rows] == list(range(1, STEPS + 1))
    manifests = sorted((installed / "runs" / "whole" / "checkpoints").glob("*/manifest-*.json"))
    assert all('"acme.plugins==1.2"' in manifest.read_text() for manifest in manifests)


def test_outside_package_verifies(installed):
    words = [word for each in settings_of(installed, "v") for word in ("--set", each)]
    command = [*RAYMEGA, "verify", str(VERIFY), "--layouts", "2", "--max-ranks", "4", *words]
    (installed / "runs").mkdir()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_part_that_raises_ends_the_run_with_its_line(installed):
    (installed / "runs").mkdir()
    (parts,) = (installed / "target" / "acme").glob("parts.py")
    text = parts.read_text()
    parts.write_text(text.replace('self._write(f"begin {step}")', "self._write(begin[step])"))
    outcome = run(installed, "faulty")
    assert outcome.code == 2
    number = text[: text.index('self._write(f"begin')].count("\n") + 1
    assert f"callback acme.steps raised NameError at {parts}:{number}" in outcome.stderr
    assert len(outcome.all("attempt")) == 1, "it is not tried again"
