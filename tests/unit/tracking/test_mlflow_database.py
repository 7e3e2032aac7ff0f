"""mlflow_database: the first run keeps an empty database, later ones copy it and MLflow takes it as its own."""

import sqlite3
from contextlib import closing

import pytest
from mlflow import MlflowClient

from raymega.tracking.mlflow_database import prepare_database


def _make(path):
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE experiments (name TEXT)")
        database.execute("INSERT INTO experiments VALUES ('Default')")
        database.commit()


def _names(path):
    with closing(sqlite3.connect(path)) as database:
        return [name for (name,) in database.execute("SELECT name FROM experiments")]


def test_the_first_database_is_made_and_kept_without_its_experiments(tmp_path):
    own, kept = tmp_path / "mlflow.db", tmp_path / "home" / "kept.db"
    prepare_database(f"sqlite:///{own}", lambda: _make(own), kept=kept)
    assert _names(own) == ["Default"]
    assert _names(kept) == []
    assert [path.name for path in kept.parent.iterdir()] == ["kept.db"]


def test_the_next_one_is_a_copy(tmp_path):
    own, kept = tmp_path / "mlflow.db", tmp_path / "kept.db"
    _make(kept)
    prepare_database(f"sqlite:///{own}", pytest.fail, kept=kept)
    assert own.read_bytes() == kept.read_bytes()


@pytest.mark.parametrize("uri", ["http://127.0.0.1:5000", "sqlite:///{own}"])
def test_a_server_and_a_database_with_records_are_left_alone(tmp_path, uri):
    own, kept = tmp_path / "mlflow.db", tmp_path / "kept.db"
    _make(own)
    before = own.read_bytes()
    prepare_database(uri.format(own=own), pytest.fail, kept=kept)
    assert own.read_bytes() == before
    assert not kept.exists()


def test_a_home_that_cannot_be_written_costs_only_time(tmp_path):
    own, barrier = tmp_path / "mlflow.db", tmp_path / "file"
    barrier.touch()
    prepare_database(f"sqlite:///{own}", lambda: _make(own), kept=barrier / "kept.db")
    assert _names(own) == ["Default"]


@pytest.mark.wide  # MLflow's migrations, two seconds of CPU time
def test_mlflow_uses_the_copy_and_gives_it_a_default_experiment_of_its_own(tmp_path, monkeypatch):
    kept, clients = tmp_path / "kept.db", {}
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        uri = f"sqlite:///{tmp_path / name / 'mlflow.db'}"
        client = clients[name] = MlflowClient(uri)
        prepare_database(uri, client.search_experiments, kept=kept)
        client.create_run(client.create_experiment("e"), run_name=name)
    (default,) = (e for e in clients["second"].search_experiments() if e.name == "Default")
    assert "/second/" in default.artifact_location
    found = clients["second"].search_runs(
        [clients["second"].get_experiment_by_name("e").experiment_id]
    )
    assert [run.info.run_name for run in found] == ["second"]
