"""`raymega runs`: what each run's own records say, whoever left them; and runs that are finished."""

import json
from dataclasses import replace

import pytest

from raymega.config.load import parse_job
from raymega.errors import ConfigError, StorageError
from raymega.orchestrate.run_store.finished_run import finished_run
from raymega.orchestrate.run_store.journal import open_record, write_record
from raymega.orchestrate.run_store.lease import Lease
from raymega.orchestrate.run_store.lease_holder import this_process
from raymega.orchestrate.run_store.list_runs import list_runs
from raymega.storage.local import LocalStore
from tests.support.fakes import FakeClock
from tests.support.jobs import VERIFY
from tests.unit.checkpoint.format.test_epochs import save

NOW = "2026-01-01T00:00:00+00:00"


def put_run(root, name, **changes):
    job = parse_job(VERIFY, [f"run.name={name}"]).job()
    store = LocalStore(root / name)
    write_record(store, replace(open_record(store, job, now=NOW), **changes))
    return store


def told(root):
    return {run.name: run for run in list_runs(str(root), now=NOW)}


def test_each_run_is_listed_with_its_state_step_and_loss(tmp_path):
    put_run(tmp_path, "done", status="finished", step=20, num_attempts=1)
    put_run(tmp_path, "killed", status="running", step=10, num_attempts=2)
    lines = [{"event": "step", "step": 12, "loss": 3.5}, {"event": "recovered"}]
    metrics = "".join(f"{json.dumps(line)}\n" for line in lines)
    (tmp_path / "killed" / "metrics.jsonl").write_text(metrics)
    (tmp_path / "other-folder").mkdir()
    found = told(tmp_path)
    assert set(found) == {"done", "killed"}
    assert found["done"].state == "finished" and found["done"].loss is None
    killed = found["killed"]
    assert (killed.state, killed.step, killed.loss, killed.attempts) == ("interrupted", 12, 3.5, 2)
    assert killed.total_steps == 20 and killed.uri == str(tmp_path / "killed")


def test_run_with_a_driver_names_it(tmp_path):
    store = put_run(tmp_path, "live", status="running", num_attempts=1)
    Lease(store, holder=this_process(), duration_s=30.0, clock=FakeClock()).acquire()
    live = told(tmp_path)["live"]
    assert live.state == "running" and live.driver == str(this_process())


def test_record_that_cannot_be_read_hides_no_other_run(tmp_path):
    put_run(tmp_path, "good", status="finished")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text("{")
    (tmp_path / "later").mkdir()
    later = (tmp_path / "good" / "run.json").read_text().replace('"version": 1', '"version": 2')
    (tmp_path / "later" / "run.json").write_text(later)
    found = {name: run.state for name, run in told(tmp_path).items()}
    assert found == {"good": "finished", "torn": "imported", "later": "unreadable"}


def test_one_run_is_listed_by_its_own_folder(tmp_path):
    put_run(tmp_path, "done", status="finished")
    assert [run.name for run in list_runs(str(tmp_path / "done"), now=NOW)] == ["done"]
    with pytest.raises(ConfigError, match="there is nothing at"):
        list_runs(str(tmp_path / "none"), now=NOW)


def test_finished_run_is_told_from_its_store_and_an_unfinished_one_is_not(tmp_path):
    store = put_run(tmp_path, "done", status="finished", step=20, num_attempts=1)
    job = parse_job(VERIFY, ["run.name=done"]).job()
    assert finished_run(store, open_record(store, job, now=NOW)) is None, "its checkpoint is gone"
    key = save(store, 1, 20)
    started, ended = finished_run(store, open_record(store, job, now=NOW))
    assert (started.step, ended.status, ended.step) == (20, "finished", 20)
    assert ended.checkpoint_uri.endswith(key) and "nothing is left to do" in ended.reason
    longer = parse_job(VERIFY, ["run.name=done", "run.steps=40"]).job()
    assert finished_run(store, open_record(store, longer, now=NOW)) is None


def test_folder_that_cannot_be_read_hides_no_other_run(tmp_path, monkeypatch):
    put_run(tmp_path, "good", status="finished")
    put_run(tmp_path, "theirs", status="running")
    listed = LocalStore.list

    def refused(store, prefix=""):
        if store.uri.endswith("theirs"):
            raise StorageError("could not list: Permission denied")
        return listed(store, prefix)

    monkeypatch.setattr(LocalStore, "list", refused)
    found = {name: run.state for name, run in told(tmp_path).items()}
    assert found == {"good": "finished", "theirs": "unreadable"}
