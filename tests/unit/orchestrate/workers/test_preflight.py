"""The round before workers train: what each node must see and write, and what is said if not."""

import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from raymega.data.synthetic import SYNTHETIC_PATH
from raymega.errors import ConfigError, StorageError
from raymega.orchestrate.workers import preflight
from raymega.orchestrate.workers.preflight import Preflight, answer_question
from raymega.storage.local import LocalStore
from raymega.storage.registry import open_store
from tests.support.outside_package import write_package
from tests.unit.data.datasets import write_dataset

NODES = {"a": "10.0.0.1", "b": "10.0.0.2"}


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "runs" / "run"))


@pytest.fixture
def make(store):
    def make(*data_paths, driver_node="a"):
        return Preflight(
            store=store, data_paths=data_paths or (SYNTHETIC_PATH,), driver_node=driver_node
        )

    return make


def refusal(check, preflight_check, **changed):
    """What is said when node b answers a question of its own."""
    check.add("a", answer_question(preflight_check, "a"))
    with pytest.raises(ConfigError) as caught:
        check.add("b", answer_question(replace(preflight_check, **changed), "b"))
    return "\n".join(map(str, caught.value.faults))


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_sound_nodes_pass_once_and_leave_nothing(make, tmp_path):
    check = make()
    preflight_check, asked = check.begin(NODES)
    assert asked == ["a", "b"] and check.is_open
    assert check.add("b", answer_question(preflight_check, "b")) == []
    (report,) = check.add("a", answer_question(preflight_check, "a"))
    assert report.detail == "versions and the run's store are right on 2 nodes"
    assert not check.is_open and files(tmp_path) == []
    assert check.begin(NODES)[1] == [] and not check.is_open
    assert check.begin(NODES | {"c": "10.0.0.3"})[1] == ["c"], "a node that joined later"


def test_local_paths_on_the_drivers_node_are_not_probed_and_that_is_said(make, tmp_path):
    check = make(str(tmp_path / "data"), SYNTHETIC_PATH)
    preflight_check, _ = check.begin({"a": "10.0.0.1"})
    (report,) = check.add("a", answer_question(preflight_check, "a"))
    assert "local paths on the driver's own node were not probed" in report.detail
    assert not (tmp_path / "runs").exists()


def test_folder_that_a_node_does_not_share_is_refused_and_not_made_there(make, tmp_path):
    check = make()
    preflight_check, _ = check.begin(NODES)
    said = refusal(check, preflight_check, store_uri=str(tmp_path / "elsewhere"))
    assert "node 10.0.0.2 does not see what the driver wrote" in said
    assert "checkpoint.uri to an object store" in said
    assert not (tmp_path / "elsewhere").exists() and files(tmp_path) == []


def test_object_that_the_driver_does_not_see_is_refused(make, tmp_path):
    """A node that reads the driver's file system through one mount and writes through another."""
    check = make()
    preflight_check, _ = check.begin(NODES)
    check.add("a", answer_question(preflight_check, "a"))
    node_result = answer_question(preflight_check, "b")
    (tmp_path / "runs" / "run" / preflight_check.folder / "b").unlink()
    with pytest.raises(ConfigError, match=r"driver does not see what node 10\.0\.0\.2 wrote"):
        check.add("b", node_result)


def test_store_that_a_node_may_read_but_not_write_is_refused(make, monkeypatch):
    check = make()
    preflight_check, _ = check.begin(NODES)
    check.add("a", answer_question(preflight_check, "a"))

    def refuse(*_args, **_more):
        raise StorageError("AccessDenied")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "put", refuse)
        node_result = answer_question(preflight_check, "b")
    with pytest.raises(ConfigError, match=r"10\.0\.0\.2 cannot write to .*AccessDenied"):
        check.add("b", node_result)


def test_fault_of_the_datas_store_that_passes_refuses_no_node(make, monkeypatch):
    """The driver reads the data's description too, and a fault there would end the run."""
    path, fails, slept = "s3://data/corpus", [False, True], []

    def identity(_path):
        if fails.pop():
            raise StorageError("ReadTimeoutError")
        return "1"

    once = replace(preflight.RETRY_ONCE, sleep=slept.append)
    monkeypatch.setattr(preflight, "RETRY_ONCE", once)
    monkeypatch.setattr(preflight, "dataset_identity", identity)
    check = make(path)
    preflight_check, _ = check.begin({"a": "10.0.0.1"})
    fails[:] = [False, True]
    (report,) = check.add("a", answer_question(preflight_check, "a"))
    assert slept == [1.0, 1.0] and report.detail == "versions and the data are right on 1 node"


@pytest.mark.parametrize("method", ["get", "put"])
def test_fault_of_the_store_that_passes_refuses_no_node(method, make, monkeypatch):
    """A node may join a run that has trained for weeks."""
    check = make()
    preflight_check, _ = check.begin(NODES)
    check.add("a", answer_question(preflight_check, "a"))
    whole, slept = getattr(LocalStore, method), []

    def fail_once(*args, **more):
        if not slept:
            raise StorageError("Stale file handle")
        return whole(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, method, fail_once)
        once = replace(preflight.RETRY_ONCE, sleep=slept.append)
        patch.setattr(preflight, "RETRY_ONCE", once)
        result = answer_question(preflight_check, "b")
    (report,) = check.add("b", result)
    assert slept == [1.0] and report.detail.endswith("right on 2 nodes")


@pytest.mark.parametrize("fault", ["absent", "torn", "other"])
def test_data_that_a_node_does_not_see_are_refused(make, tmp_path, fault):
    for split in ("train", "valid"):
        (tmp_path / "data" / split).mkdir(parents=True)
    write_dataset(tmp_path / "data")
    check = make(str(tmp_path / "data"), SYNTHETIC_PATH)
    preflight_check, _ = check.begin(NODES)
    ((path, identity),) = preflight_check.data.items()
    theirs = tmp_path / "theirs"
    if fault != "absent":
        shutil.copytree(tmp_path / "data", theirs)
    if fault == "torn":
        next(theirs.rglob("*.arrow")).write_bytes(b"")
    changed = {path: "0"} if fault == "other" else {str(theirs): identity}
    check.add("a", answer_question(preflight_check, "a"))
    with pytest.raises(ConfigError, match=r"10\.0\.0\.2 does not see the dataset '/"):
        check.add("b", answer_question(replace(preflight_check, data=changed), "b"))


def test_other_versions_are_refused(make, monkeypatch):
    check = make()
    preflight_check, _ = check.begin(NODES)
    check.add("a", answer_question(preflight_check, "a"))
    other = replace(
        answer_question(preflight_check, "b"), versions=preflight.local_versions() | {"ray": "1"}
    )
    with pytest.raises(ConfigError, match=r"node 10\.0\.0\.2 has ray 1; the driver has ray"):
        check.add("b", other)


def test_round_that_is_cancelled_is_asked_again(make, tmp_path):
    check = make()
    check.begin(NODES)
    check.cancel()
    assert not check.is_open and files(tmp_path) == []
    assert check.begin(NODES)[1] == ["a", "b"]


def test_node_knows_the_store_of_a_plug_in(tmp_path):
    """The check is the first that a worker does: it has no job yet."""
    write_package(tmp_path)
    code = (
        "from raymega.orchestrate.workers.preflight import PreflightCheck, answer_question; "
        f"print(answer_question(PreflightCheck(store_uri='acme.sqlite://{tmp_path}/r', folder='f', data={{}}, "
        "modules=('acme.plugins',)), 'n').sees_driver)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "unknown" not in done.stdout, done.stderr
