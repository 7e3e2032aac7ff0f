"""The recovery ladder for real: a spare takes a lost rank, a lost node makes the grid smaller, a new one larger."""

import signal
import time

import pytest
from ray.cluster_utils import Cluster

from tests.ray.test_snapshots import HEALTH
from tests.support.command import runs_in

pytestmark = [pytest.mark.ray, pytest.mark.wide]

COMMON = (
    "run.eval_samples=0", "checkpoint.every=0", "optimizer.lr_decay_steps=100",
    "tracking.mlflow_uri=off", "parallel.tp=2", "parallel.pp=1", "parallel.dp=2",
    "cluster.cpus_per_worker=1.0", "elastic.snapshot_every=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster():
    """A head without slots and three nodes with room for one tp pair each."""
    head = {"num_cpus": 0, "_system_config": HEALTH}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.workers = [cluster.add_node(num_cpus=2) for _ in range(3)]
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def run(cluster, tmp_path_factory):
    return runs_in(tmp_path_factory.mktemp("runs"), cluster.address, *COMMON)


@pytest.fixture(scope="module")
def calm_losses(run):
    """By step the undisturbed run's, which goes on where the test before has left it."""
    losses = {}

    def up_to(last):
        if last > max(losses, default=0):
            losses.update(run("calm", f"run.steps={last}", "elastic.snapshot_every=0").losses)
        return losses

    return up_to


def kill_node_of(cluster, running, rank):
    node = next(node for node in cluster.workers if node.node_id == running.nodes[str(rank)])
    cluster.workers.remove(node)
    cluster.remove_node(node, allow_graceful=False)


def have_nodes(cluster, number):
    while len(cluster.workers) < number:
        cluster.workers.append(cluster.add_node(num_cpus=2))
    while len(cluster.workers) > number:
        cluster.remove_node(cluster.workers.pop(), allow_graceful=False)


def test_spares_take_the_ranks_of_the_worker_that_hosts_the_rendezvous(
    run, calm_losses, record_property
):
    """Rank 0, twice: the second time by the process that was started behind the first spare."""
    done = set()

    def kill(running, step):
        is_time = running.attempt == 3 or (step > 5 and running.last["spares"] == 2)
        if is_time and running.attempt not in done:
            done.add(running.attempt)
            if running.attempt == 3:
                running.signal_driver(signal.SIGTERM)
            else:
                running.kill_worker(0)

    outcome = run("spare", "run.steps=100000", "elastic.spares=2", on_step=kill)
    assert outcome.code == 75, outcome.stderr
    first, second, _third = outcome.all("workers")
    kept = {rank for rank in first["pids"] if first["pids"][rank] == second["pids"][rank]}
    assert kept == {"2", "3"}, "a tp pair moves as a whole to the spares' node"
    for event in outcome.all("recovered"):
        assert event["source"] == "memory" and event["lost_steps"] <= 1
        assert list(event["phases"])[:4] == ["abort", "find", "reserve", "rendezvous"]
        record_property("recovery_s", event["recovery_s"])
    calm = calm_losses(max(outcome.losses))
    assert outcome.losses == {step: calm[step] for step in outcome.losses}


def test_lost_node_makes_the_grid_smaller_and_a_new_one_larger_again(
    run, calm_losses, cluster, record_property
):
    seen = {}
    have_nodes(cluster, 2)

    def act(running, step):
        seen.setdefault(running.attempt, (step, time.monotonic()))
        begun = seen[running.attempt][0]
        if (running.attempt, step) == (1, 5):
            kill_node_of(cluster, running, 0)
        if running.attempt == 2 and step == begun + 5:
            cluster.workers.append(cluster.add_node(num_cpus=2))
            seen["back"] = time.monotonic()
        if running.attempt == 3 and step == begun + 5:
            running.signal_driver(signal.SIGTERM)

    more = ("elastic.replan_after_s=1.0", "run.steps=100000", "elastic.scale_up_horizon_s=1e6")
    outcome = run("change", *more, on_step=act)
    assert outcome.code == 75, outcome.stderr
    grids = [event["grid"] for event in outcome.all("attempt")]
    assert [(grid["tp"], grid["dp"]) for grid in grids] == [(2, 2), (2, 1), (2, 2)]
    assert [event["source"] for event in outcome.all("attempt")] == ["nothing", "memory", "store"]
    (recovered,) = outcome.all("recovered")
    assert recovered["lost_steps"] <= 1
    record_property("replanned_s", recovered["recovery_s"])
    record_property("grown_s", seen[3][1] - seen["back"])
    steps = [event["step"] for event in outcome.all("step") if event["attempt"] == 3]
    assert steps[0] == seen[2][0] + len(
        [event for event in outcome.all("step") if event["attempt"] == 2]
    ), "growing costs no step"
    calm = calm_losses(max(outcome.losses))
    for step, loss in outcome.losses.items():
        assert loss == pytest.approx(calm[step], rel=1e-9), step


def test_driver_that_takes_up_a_run_with_fewer_workers_grows_back(
    run, calm_losses, cluster, record_property
):
    """A node is lost, then the driver; the next one has the workers that are left, until a node comes."""
    have_nodes(cluster, 2)
    more = (
        "elastic.replan_after_s=1.0", "run.steps=100000", "elastic.scale_up_horizon_s=1e6",
        "checkpoint.every=2",
    )  # fmt: skip
    seen = {}

    def lose(running, step):
        begun = seen.setdefault(running.attempt, step)
        if (running.attempt, step) == (1, 5):
            kill_node_of(cluster, running, 0)
        if running.attempt == 2 and step == begun + 5:
            running.signal_driver(signal.SIGKILL)

    def grow(running, step):
        begun = seen.setdefault(running.attempt, step)
        if running.attempt == 3 and step == begun + 5:
            cluster.workers.append(cluster.add_node(num_cpus=2))
            seen["back_s"] = time.monotonic()
        if running.attempt == 4 and "grown_s" not in seen:
            seen["grown_s"] = time.monotonic() - seen["back_s"]
        if running.attempt == 4 and step == begun + 5:
            running.signal_driver(signal.SIGTERM)

    first = run("taken-up", *more, on_step=lose)
    assert first.code == -signal.SIGKILL, first.stderr
    second = run("taken-up", *more, on_step=grow)
    assert second.code == 75, second.stderr
    attempts = [*first.all("attempt"), *second.all("attempt")]
    assert [(each["attempt"], each["grid"]["dp"]) for each in attempts] == [
        (1, 2), (2, 1), (3, 1), (4, 2)
    ]  # fmt: skip
    assert second.all("failure") == [] and attempts[2]["source"] == "store"
    steps = [event["step"] for event in second.all("step")]
    assert steps == list(range(steps[0], steps[-1] + 1)), "growing costs no step"
    record_property("grown_s", seen["grown_s"])
    calm = calm_losses(steps[-1])
    for step, loss in (first.losses | second.losses).items():
        assert loss == pytest.approx(calm[step], rel=1e-9), step


def test_run_that_has_lost_every_node_goes_on_with_the_first_that_comes(run, cluster):
    """On the grid that it had last: nothing waits for the slots that this grid does not need."""
    have_nodes(cluster, 2)
    begun = {}

    def act(running, step):
        begun.setdefault(running.attempt, step)
        at = (running.attempt, step - begun[running.attempt])
        if at == (1, 4):
            kill_node_of(cluster, running, 0)
        if at == (2, 4):
            kill_node_of(cluster, running, 0)
            cluster.workers.append(cluster.add_node(num_cpus=2))
        if at == (3, 4):
            running.signal_driver(signal.SIGTERM)

    more = ("elastic.replan_after_s=1.0", "run.steps=100000", "checkpoint.every=2")
    outcome = run("all-lost", *more, on_step=act)
    assert outcome.code == 75, outcome.stderr
    grids = [event["grid"]["dp"] for event in outcome.all("attempt")]
    assert grids == [2, 1, 1]
    assert outcome.all("attempt")[2]["source"] == "store", "no memory was left"
