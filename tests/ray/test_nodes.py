"""The driver on a cluster of several nodes, which share one machine and one address."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from ray.experimental import internal_kv
from ray.util.placement_group import placement_group_table

from raymega import ray_private, session
from raymega.errors import CapacityError, ConfigError, PreemptedError
from raymega.events import AttemptFailed, NodesChecked, StepFinished, WorkersStarted
from raymega.orchestrate.cluster.node_inventory import find_device, list_nodes
from raymega.orchestrate.core.clock import SystemClock
from raymega.orchestrate.driver.controller import Controller
from raymega.orchestrate.driver.run_context import RunContext
from raymega.orchestrate.run_store.journal import AttemptRecord
from raymega.orchestrate.workers.preflight import Preflight
from raymega.orchestrate.workers.ray_worker_group import RayWorkerGroup
from raymega.storage.registry import open_store
from tests.support.fakes import MemorySink
from tests.support.jobs import make_test_plan
from tests.support.leases import take_lease
from tests.support.local_ray import leftovers

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

GRID = ("parallel.tp=2", "parallel.pp=1", "parallel.dp=2", "cluster.cpus_per_worker=1.0")
SMALL = (*GRID, "run.steps=12", "checkpoint.every=4", "optimizer.lr_warmup_steps=0")


@pytest.fixture(scope="module")
def cluster():
    """A head without slots and three nodes with 3 slots each: room for one tp pair a node."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        ray_private.reread_environment()
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        try:
            session.open_session(cluster.address)
            cluster.workers = [cluster.add_node(num_cpus=3) for _ in range(3)]
            cluster.wait_for_nodes()
            yield cluster
            session.close_session()
        finally:
            cluster.shutdown()
    ray_private.reread_environment()


@pytest.fixture
def make_controller(tmp_path):
    def make(name, *overrides):
        plan = make_test_plan(*SMALL, f"run.name={name}", *overrides)
        store = open_store(str(tmp_path / name))
        group = RayWorkerGroup(
            plan,
            log_dir=tmp_path,
            can_grow=True,
            entry="tests.support.entries",
            preflight=Preflight(
                store=store,
                data_paths=plan.job.dataset_paths,
                driver_node=ray.get_runtime_context().get_node_id(),
            ),
        )
        make.plan = plan
        return Controller(
            RunContext(
                plan,
                lease=take_lease(store),
                group=group,
                sink=make.sink,
                clock=SystemClock(),
                executor=executor,
            )
        )

    make.sink = MemorySink()
    with ThreadPoolExecutor(1) as executor:
        yield make
    assert leftovers() == []


def nodes_of_tp_groups(plan, workers):
    return [{workers.nodes[rank] for rank in group} for group in plan.grid.groups("tp")]


def test_inventory_counts_slots_by_node_id():
    section = make_test_plan(*SMALL).job.cluster
    nodes = list_nodes(section)
    assert sorted(node.num_slots for node in nodes) == [0, 3, 3, 3]
    assert len({node.node_id for node in nodes}) == 4
    assert find_device(section.model_copy(update={"device": "auto"})) == "cpu"


def test_auto_asks_for_gpus_when_a_node_type_has_them_and_no_node_lives(cluster):
    section = make_test_plan(*SMALL, "cluster.device=auto").job.cluster
    where = {
        "key": ray._raylet.GCS_AUTOSCALER_CLUSTER_CONFIG_KEY.encode(),
        "namespace": ray._raylet.GCS_AUTOSCALER_STATE_NAMESPACE.encode(),
    }
    config = autoscaler_pb2.ClusterConfig()
    config.node_group_configs.add(name="gpu", max_count=2).resources["GPU"] = 8
    internal_kv._internal_kv_put(value=config.SerializeToString(), **where)
    try:
        assert find_device(section) == "cuda"
        assert {node.num_slots for node in list_nodes(section)} == {0}
    finally:
        internal_kv._internal_kv_del(**where)
    assert find_device(section) == "cpu"


def test_tp_groups_stay_on_one_node(make_controller, record_property):
    assert make_controller("calm").run().status == "finished"
    (workers,) = make_controller.sink.of(WorkersStarted)
    homes = nodes_of_tp_groups(make_controller.plan, workers)
    assert [len(home) for home in homes] == [1, 1]
    assert len(set.union(*homes)) == 2, "3 slots hold one pair, so two nodes are at work"
    (passed,) = make_controller.sink.of(NodesChecked)
    assert passed.detail == "versions and the run's store are right on 2 nodes"
    record_property("preflight_s", passed.seconds)


def test_run_that_fits_only_in_torn_groups_waits_and_gives_up(make_controller):
    overrides = ("parallel.dp=4", "cluster.capacity_timeout_s=0.5")
    with pytest.raises(CapacityError, match=r"in tp groups of 2.*there is room for 6"):
        make_controller("torn", *overrides).run()


def test_next_driver_goes_on_with_as_many_workers_as_the_run_had(make_controller, tmp_path):
    torn_away = AttemptRecord(
        attempt=1, grid={}, world_size=4, num_micro_batches=1, spares=0, restored="", state="running"
    )  # fmt: skip
    store = open_store(str(tmp_path / "fewer"))
    store.put(torn_away.key, [torn_away.to_json()], overwrite=False)
    controller = make_controller("fewer", "parallel.dp=4", "elastic.replan_after_s=0.5")
    assert controller.run().status == "finished"
    (workers,) = make_controller.sink.of(WorkersStarted)
    assert len(workers.pids) == 4, "there is no room for 8"


def test_lost_node_is_replaced_by_a_spare_one_and_survivors_stay(cluster, make_controller):
    controller = make_controller("lost", "run.steps=100000", "checkpoint.every=20")
    sink, lost = make_controller.sink, []
    emit = sink.emit

    def lose_a_node_at_step_30(event):
        emit(event)
        if isinstance(event, StepFinished) and (event.step, event.attempt) == (30, 1):
            home = sink.of(WorkersStarted)[0].nodes[0]
            lost.append(next(node for node in cluster.workers if node.node_id == home))
            cluster.remove_node(lost[0], allow_graceful=True)
        if isinstance(event, StepFinished) and event.attempt == 2:
            controller.request_stop()

    sink.emit = lose_a_node_at_step_30
    with pytest.raises(PreemptedError):
        controller.run()
    assert "node has died" in sink.of(AttemptFailed)[0].cause
    first, second = sink.of(WorkersStarted)
    assert lost[0].node_id not in second.nodes.values()
    assert [len(home) for home in nodes_of_tp_groups(make_controller.plan, second)] == [1, 1]
    survivors = {pid for rank, pid in first.pids.items() if first.nodes[rank] != lost[0].node_id}
    assert len(survivors) == 2 and survivors < set(second.pids.values())


def test_head_rests_while_there_is_no_room_for_lost_slots(cluster, make_controller):
    """Ray would look for room for a group that is RESCHEDULING without a pause, with all of a CPU."""
    controller = make_controller(
        "rest", "run.steps=100000", "checkpoint.every=20", "elastic.replan_after_s=0.5"
    )
    living = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    workers = [node for node in cluster.workers if node.node_id in living]
    for node in workers[2:]:
        cluster.remove_node(node, allow_graceful=True)
    sink, states = make_controller.sink, []
    emit = sink.emit

    def lose_a_node_and_look_at_the_head(event):
        emit(event)
        if isinstance(event, StepFinished) and (event.step, event.attempt) == (30, 1):
            home = sink.of(WorkersStarted)[0].nodes[0]
            lost = next(node for node in workers if node.node_id == home)
            cluster.remove_node(lost, allow_graceful=True)
        if not isinstance(event, StepFinished) or event.attempt != 2:
            return
        states[:] = [group["state"] for group in placement_group_table().values()]
        is_asked_anew = "PENDING" in states and "RESCHEDULING" not in states
        if is_asked_anew or event.step > 5000:
            controller.request_stop()

    sink.emit = lose_a_node_and_look_at_the_head
    with pytest.raises(PreemptedError):
        controller.run()
    assert len(sink.of(WorkersStarted)[1].pids) == 2, "one tp pair is left"
    assert "PENDING" in states, "lost slots are asked for anew"
    assert "RESCHEDULING" not in states, "as pending ones"


@pytest.fixture
def secluded(cluster, tmp_path):
    """A node with 8 slots in a mount namespace of its own, where ``tmp_path`` is an empty disk."""
    can = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    if can.returncode:
        pytest.skip("no mount namespaces for this user")
    ray_start = f"{sys.executable} -m ray.scripts.scripts start --block --disable-usage-stats"
    script = f"mount -t tmpfs none {tmp_path} && exec {ray_start} --address={cluster.address} "
    script += "--num-cpus=8 --metrics-export-port=0 --dashboard-agent-listen-port=0"
    before = {node["NodeID"] for node in ray.nodes()}
    process = subprocess.Popen(
        ["unshare", "-m", "bash", "-c", script],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline_s, joined = time.monotonic() + 200, set()
    while not joined:
        assert process.poll() is None and time.monotonic() < deadline_s, "the node does not join"
        joined = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - before
        time.sleep(0.2)
    yield joined.pop()
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(100)


@pytest.mark.wide
def test_node_that_does_not_share_the_store_is_refused_before_it_trains(secluded, make_controller):
    controller = make_controller("apart", "parallel.dp=4")
    with pytest.raises(ConfigError, match=r"does not see what the driver wrote") as caught:
        controller.run()
    assert caught.value.exit_code == 2
    assert make_controller.sink.of(StepFinished) == []
    (workers,) = make_controller.sink.of(WorkersStarted)
    assert secluded in workers.nodes.values()
