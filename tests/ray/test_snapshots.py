"""Workers, nodes and snapshot servers are killed for real, and the run goes on from other nodes' memory."""

import os
import signal
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from tests.support.command import Running, train

pytestmark = [pytest.mark.ray, pytest.mark.wide]

STEPS = 12
KILL_STEP = 7
HEALTH = {  # a dead node is known after 1.5 s instead of 14, as it refuses; one that is only slow has 30 s
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 10000,
    "health_check_failure_threshold": 3,
}


@pytest.fixture(scope="module")
def cluster():
    """A head without slots and four nodes with room for one tp pair each."""
    head = {"num_cpus": 0, "_system_config": HEALTH}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.workers = [cluster.add_node(num_cpus=2) for _ in range(4)]
    yield cluster
    cluster.shutdown()


@pytest.fixture
def run(cluster, tmp_path):
    """A run of tp2-dp2 on two of the four nodes; without checkpoints before its end."""

    def start(*more, on_step=lambda _running, _step: None):
        settings = (
            "run.name=kept",
            f"checkpoint.uri={tmp_path}",
            f"run.steps={STEPS}",
            "run.eval_samples=0",
            "checkpoint.every=0",
            "optimizer.lr_decay_steps=100",
            "tracking.mlflow_uri=off",
            "parallel.tp=2",
            "parallel.pp=1",
            "parallel.dp=2",
            "cluster.cpus_per_worker=1.0",
            "elastic.snapshot_every=1",
        )
        outcome = train(*settings, *more, address=cluster.address, on_step=on_step)
        assert outcome.code == 0, outcome.stderr
        assert server_pids(cluster) == [], "snapshot servers end with their run"
        return outcome

    return start


@pytest.fixture(scope="module")
def calm(cluster, tmp_path_factory):
    """The undisturbed run, without snapshots."""
    settings = (
        f"checkpoint.uri={tmp_path_factory.mktemp('calm')}", f"run.steps={STEPS}",
        "run.eval_samples=0", "checkpoint.every=0", "optimizer.lr_decay_steps=100",
        "tracking.mlflow_uri=off", "parallel.tp=2", "parallel.pp=1", "parallel.dp=2",
        "cluster.cpus_per_worker=1.0",
    )  # fmt: skip
    outcome = train(*settings, address=cluster.address)
    assert outcome.code == 0, outcome.stderr
    return outcome


def raylet_of(node):
    return node.all_processes["raylet"][0].process.pid


def server_pids(cluster):
    """Processes of this cluster's snapshot servers; other clusters may live on this machine."""
    raylets = {raylet_of(node) for node in cluster.workers}
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and is_server(entry, raylets)
    ]


def is_server(process, raylets):
    try:
        parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        return parent in raylets and b"SnapshotServerActor" in (process / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def at_steps(**actions):
    """Call each action at the first sight of its step."""
    left = {int(name.removeprefix("step")): action for name, action in actions.items()}

    def on_step(running: Running, step: int) -> None:
        if step in left:
            left.pop(step)(running)

    return on_step


def recoveries(outcome):
    return [(event["source"], event["restored_step"]) for event in outcome.all("recovered")]


def test_killed_worker_is_made_up_for_from_memory_to_the_bit(run, calm, record_property):
    outcome = run(on_step=at_steps(step7=lambda running: running.kill_worker(3)))
    ((source, step),) = recoveries(outcome)
    record_property("recovery_s", outcome.all("recovered")[0]["recovery_s"])
    assert source == "memory" and step >= KILL_STEP - 1
    assert outcome.losses == calm.losses
    assert [event["source"] for event in outcome.all("attempt")] == ["nothing", "memory"]
    assert {event["snapshot_lacking"] for event in outcome.all("step")} == {0}


def test_killed_node_is_made_up_for_from_its_partners_memory(run, calm, cluster, record_property):
    lost = []

    def kill_node(running):
        node = next(n for n in cluster.workers if n.node_id == running.nodes["0"])
        lost.append(node.node_id)
        cluster.workers.remove(node)
        cluster.remove_node(node, allow_graceful=False)

    outcome = run(on_step=at_steps(step7=kill_node))
    ((source, step),) = recoveries(outcome)
    record_property("recovery_s", outcome.all("recovered")[0]["recovery_s"])
    assert source == "memory" and step >= KILL_STEP - 1
    assert outcome.losses == calm.losses
    assert lost[0] not in outcome.all("workers")[-1]["nodes"].values()


def test_killed_servers_stop_nothing_and_come_back_with_the_next_attempt(run, calm, cluster):
    def kill_servers(_running):
        for pid in server_pids(cluster):
            os.kill(pid, signal.SIGKILL)

    def kill_worker(running):
        running.kill_worker(1)

    outcome = run(
        "checkpoint.every=4",
        on_step=at_steps(step5=kill_servers, step7=kill_worker, step10=kill_worker),
    )
    (first, restored), second = recoveries(outcome)
    assert (first, restored) == ("store", 4)
    assert second[0] == "memory" and second[1] >= 9
    assert outcome.losses == calm.losses
    lacking = {event["step"]: event["snapshot_lacking"] for event in outcome.all("step")}
    assert lacking[12] == 0
