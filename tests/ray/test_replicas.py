"""Workers are lost whose state replicas hold: the others go on with it, and what is lost joins again."""

import signal

import pytest
from ray.cluster_utils import Cluster

from tests.ray.test_snapshots import HEALTH
from tests.support.command import runs_in

pytestmark = [pytest.mark.ray, pytest.mark.wide]

COMMON = (
    "run.eval_samples=8", "run.eval_every=4", "optimizer.lr_decay_steps=100",
    "tracking.mlflow_uri=off", "cluster.cpus_per_worker=1.0", "run.steps=100000",
    "data.global_batch_size=8", "elastic.on_replica_loss=continue", "elastic.scale_up_horizon_s=1e6",
)  # fmt: skip
GRIDS = {
    "dp2": ("parallel.tp=1", "parallel.pp=1", "parallel.dp=2"),
    "dp4": ("parallel.tp=1", "parallel.pp=1", "parallel.dp=4"),
    "tp2-pp2-dp2": ("parallel.tp=2", "parallel.pp=2", "parallel.dp=2"),
    "hybrid-dp4": (
        "parallel.tp=1", "parallel.pp=1", "parallel.dp=4", "parallel.sharding=optimizer",
        "parallel.data_parallel_shard_degree=2",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster():
    """A head without slots and two nodes with room for four workers each."""
    head = {"num_cpus": 0, "_system_config": HEALTH}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=4)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def run(cluster, tmp_path_factory):
    return runs_in(tmp_path_factory.mktemp("runs"), cluster.address, *COMMON)


def agree(run, outcome, grid, left):
    """Compare the run with an undisturbed one: every step, once, and every evaluation."""
    steps = [event["step"] for event in outcome.all("step")]
    assert steps == list(range(1, len(steps) + 1)), "no step is lost, and none is done twice"
    calm = run(f"calm-{grid}-{left}", *GRIDS[grid], f"run.steps={len(steps)}", "checkpoint.every=0")
    for step, loss in outcome.losses.items():
        assert loss == pytest.approx(calm.losses[step], rel=1e-9), step
    evaluations = {event["step"]: event for event in outcome.all("evaluation")}
    for event in calm.all("evaluation"):
        if event["step"] < len(steps):
            mine = evaluations[event["step"]]
            assert mine["loss"] == pytest.approx(event["loss"], rel=1e-9), event["step"]


def lose_and_wait(*victims):
    """A watcher that kills ``victims`` after step 5, and ends the run when they have joined again."""
    begun = {}

    def act(running, step):
        begun.setdefault(running.attempt, step)
        if (running.attempt, step) == (1, 5):
            for rank in victims:
                running.kill_worker(rank)
        if running.attempt == 3 and step == begun[3] + 5:
            running.signal_driver(signal.SIGTERM)

    return act


@pytest.mark.parametrize(
    ("grid", "victims", "left"),
    [
        ("dp2", (0,), 1),
        ("dp4", (1, 2), 2),
        ("tp2-pp2-dp2", (3,), 1),
        ("hybrid-dp4", (2,), 2),
    ],
)
def test_lost_replica_costs_no_step_and_joins_again(run, grid, victims, left):
    outcome = run(
        f"{grid}-{left}", *GRIDS[grid], "checkpoint.every=0", on_step=lose_and_wait(*victims)
    )
    assert outcome.code == 75, outcome.stderr
    attempts = outcome.all("attempt")
    whole = attempts[0]["grid"]["dp"]
    assert [event["source"] for event in attempts] == ["nothing", "replicas", "replicas"]
    assert [event["grid"]["dp"] for event in attempts] == [whole, left, whole]
    (recovered,) = outcome.all("recovered")
    assert recovered["lost_steps"] == 0
    agree(run, outcome, grid, left)


def test_batch_that_does_not_divide_by_the_replicas_left_is_the_same_batch(run):
    """Eight samples on three replicas; three of four are hardly slower, so nobody waits for the fourth."""
    begun = {}

    def act(running, step):
        begun.setdefault(running.attempt, step)
        if (running.attempt, step) == (1, 5):
            running.kill_worker(3)
        if running.attempt == 2 and step == begun[2] + 5:
            running.signal_driver(signal.SIGTERM)

    more = ("checkpoint.every=0", "elastic.scale_up=false")
    outcome = run("uneven", *GRIDS["dp4"], *more, on_step=act)
    assert outcome.code == 75, outcome.stderr
    assert [event["grid"]["dp"] for event in outcome.all("attempt")] == [4, 3]
    agree(run, outcome, "dp4", 3)


def test_spare_gets_the_state_of_a_replica_bit_for_bit(run):
    done = set()

    def act(running, step):
        is_time = running.attempt == 2 or (step > 5 and running.last["spares"] == 1)
        if is_time and running.attempt not in done:
            done.add(running.attempt)
            if running.attempt == 2:
                running.signal_driver(signal.SIGTERM)
            else:
                running.kill_worker(1)

    outcome = run("spare", *GRIDS["dp2"], "elastic.spares=1", "checkpoint.every=0", on_step=act)
    assert outcome.code == 75, outcome.stderr
    assert [event["source"] for event in outcome.all("attempt")] == ["nothing", "replicas"]
    assert [event["grid"]["dp"] for event in outcome.all("attempt")] == [2, 2]
    last = max(outcome.losses)
    calm = run("calm-spare", *GRIDS["dp2"], f"run.steps={last}", "checkpoint.every=0")
    assert outcome.losses == {step: calm.losses[step] for step in outcome.losses}


def test_state_that_no_worker_holds_comes_from_the_checkpoint(run):
    begun = {}

    def act(running, step):
        if (running.attempt, step) == (1, 7):
            for rank in (0, 2):  # the first stage's tp rank 0 of both replicas
                running.kill_worker(rank)
        begun.setdefault(running.attempt, step)
        if running.attempt == 2 and step == begun[2]:
            running.signal_driver(signal.SIGTERM)

    grid = ("parallel.tp=2", "parallel.pp=1", "parallel.dp=2")
    outcome = run("lost", *grid, "checkpoint.every=2", on_step=act)
    assert outcome.code == 75, outcome.stderr
    first, second = outcome.all("attempt")
    assert (first["source"], second["source"]) == ("nothing", "store")
