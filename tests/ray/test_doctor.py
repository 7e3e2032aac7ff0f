"""The doctor on a living cluster: a sound one, a store that refuses, and what it leaves behind."""

import pytest

from raymega.config.schema import ClusterSection
from raymega.orchestrate.cluster.node_inventory import list_nodes
from raymega.orchestrate.diagnostics.calibrate import calibrate_cluster
from raymega.orchestrate.diagnostics.checks import check_bandwidth, check_store, examine
from raymega.plan.hardware.catalog import CATALOGUE
from raymega.plan.hardware.catalog_file import find_accelerator
from raymega.planner.calibration.fit import accelerator_yaml
from raymega.planner.cost.step_time import step_time
from tests.support.jobs import make_test_plan
from tests.support.local_ray import leftovers

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


def test_sound_cluster_has_no_problems_and_every_axis_is_measured(tmp_path):
    plan = make_test_plan("parallel.tp=2", "parallel.pp=2", "parallel.dp=1")
    findings = list(examine(plan, store_uri=str(tmp_path)))
    # How even links are depends on what else this machine does: an axis whose groups differ has a second finding.
    problems = [f.fact for f in findings if f.status == "problem" and f.check != "bandwidth"]
    assert problems == []
    by_check = {finding.check: finding for finding in findings}
    assert set(by_check) == {"resources", "versions", "gpus", "clocks", "store", "bandwidth"}
    assert by_check["resources"].values["cpus"] == 4
    measured = [f for f in findings if f.check == "bandwidth" and f.status == "ok"]
    assert [f.values["axis"] for f in measured] == ["world", "tp", "pp"]
    assert all(f.values["bytes_per_s"] > 1e6 for f in measured)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert leftovers() == []


def test_grid_without_room_is_a_problem_of_resources_and_bandwidth():
    plan = make_test_plan("parallel.tp=4", "parallel.pp=4", "cluster.cpus_per_worker=2")
    (finding,) = check_bandwidth(plan)
    assert finding.status == "problem" and "needs 16 workers" in finding.fact
    assert leftovers() == []


def test_store_that_cannot_be_written_is_a_problem(tmp_path):
    (tmp_path / "file").write_text("in the way")
    nodes = {node.node_id: node.address for node in list_nodes(ClusterSection())}
    finding, *_ = check_store(list(nodes), nodes, str(tmp_path / "file"))
    assert finding.status == "problem" and finding.remedy


@pytest.mark.wide
def test_calibration_measures_the_cluster_and_makes_an_accelerator_of_it(tmp_path):
    plan = make_test_plan("parallel.tp=2", "parallel.pp=1", "parallel.dp=1")
    found = calibrate_cluster(plan, CATALOGUE["cpu"], name="here")
    assert found.name == "here" and "Measured kernels and transfers" in found.known_error
    assert 1 <= found.shared_cores <= 2, "of two workers"
    assert found.link_bytes_per_s > 1e7 and found.memory_bytes_per_s > 1e8
    assert found.fitted.launch_s != CATALOGUE["cpu"].fitted.launch_s
    path = tmp_path / "here.yaml"
    path.write_text(accelerator_yaml(found, like="cpu", comment="a test"))
    again = step_time(plan, find_accelerator(str(path))).total_s
    assert again == pytest.approx(step_time(plan, found).total_s, rel=0.01)
    assert leftovers() == []
