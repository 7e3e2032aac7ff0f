"""A spot notice for a node that hosts a rank: the run saves, moves and loses nothing, before the node is gone.

The metadata service is a mock of AWS' (IMDSv2) over real HTTP; agent, drain, run and the node's end are real.
"""

import subprocess
import time

import pytest
from ray.cluster_utils import Cluster

from tests.ray.test_snapshots import HEALTH
from tests.support.command import RAYMEGA, train
from tests.support.servers.instance_metadata import metadata_mock

pytestmark = [pytest.mark.ray, pytest.mark.wide]

NOTICE_S = 600.0
"""Long: what is shown is that the run leaves at the notice, however slow this machine is."""
SETTINGS = (
    "run.name=spot", "run.eval_samples=0", "checkpoint.every=0", "optimizer.lr_decay_steps=100",
    "tracking.mlflow_uri=off", "parallel.pp=1", "parallel.dp=2", "cluster.cpus_per_worker=1.0",
    "elastic.drain_margin_s=5",
)  # fmt: skip


@pytest.fixture
def cluster():
    """A head without slots and three nodes of one: two host ranks."""
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": HEALTH}
    )
    cluster.workers = [cluster.add_node(num_cpus=1) for _ in range(3)]
    yield cluster
    cluster.shutdown()


def test_spot_notice_moves_the_run_before_the_node_is_gone(cluster, tmp_path, record_property):
    agents, seen = [], {}

    def act(running, step):
        if step == 5 and not agents:
            seen["node"] = running.nodes["1"]
            words = [
                "node-agent",
                "--address",
                cluster.address,
                "--provider",
                "aws",
                "--poll-s",
                "0.5",
            ]
            words += ["--metadata", mock.url, "--node-id", seen["node"]]
            mock.take_back(NOTICE_S)
            seen["told"] = time.monotonic()
            agents.append(subprocess.Popen([*RAYMEGA, *words]))
        if running.attempt == 2 and "moved" not in seen:
            seen["moved"] = (step, time.monotonic() - seen["told"])
            assert seen["node"] not in running.nodes.values()
            node = next(n for n in cluster.workers if n.node_id == seen["node"])
            cluster.remove_node(node, allow_graceful=False)
        if "moved" in seen and step == seen["moved"][0] + 20:
            running.signal_driver(15)

    settings = (*SETTINGS, f"checkpoint.uri={tmp_path}", "run.steps=100000")
    with metadata_mock() as mock:
        try:
            outcome = train(*settings, address=cluster.address, on_step=act)
        finally:
            for agent in agents:
                agent.terminate()
                agent.wait(100)
    assert outcome.code == 75, outcome.stderr
    assert "leave in" in outcome.all("attempt")[1]["reason"]
    record_property("moved_s", seen["moved"][1])
    assert outcome.all("failure") == [], "also the node's end costs nothing"
    steps = [event["step"] for event in outcome.all("step")]
    assert steps == list(range(1, len(steps) + 1)), "no step is done twice"
