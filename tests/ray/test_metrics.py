"""A live run seen through Prometheus: every query has an answer."""

import math
import time
from pathlib import Path
from signal import SIGINT

import pytest
from ray.cluster_utils import Cluster

from raymega import ray_private
from raymega.tracking.names import METRICS
from tests.support.command import train
from tests.support.servers.ports import free_port
from tests.support.servers.prometheus import (
    dashboard_queries,
    needs_prometheus,
    prometheus_of,
)

pytestmark = [
    pytest.mark.ray,
    pytest.mark.prometheus,
    needs_prometheus,
    pytest.mark.wide,
]

# Without a GPU nobody knows the peak; the others are of float16, of blends with named sets, of tasks, and of
# data in an object store.
NOT_OF_THIS_RUN = (
    "train_mfu", "train_loss_scale", "train_skipped_steps", "data_source_tokens", "data_source_epochs",
    "eval_set_loss", "eval_set_perplexity", "eval_task", "eval_ema_loss", "eval_ema_accuracy", "eval_ema_perplexity",
    "eval_set_ema_loss", "eval_set_ema_accuracy", "eval_set_ema_perplexity",
    "data_wait_s", "data_fetched_bytes", "data_cache_hits", "data_cache_misses",
)  # fmt: skip
RUN, PACKED = "watched", "packed"
OF_RUN = f'{{run="{RUN}"}}'
WORLD_SIZE = 2
STOPPED = 75
SEEN_S = 4.0
"""A few publications and scrapes, however fast this machine steps."""


@pytest.fixture(scope="module")
def open_cluster():
    """Clusters of this module ask for no token, whatever this machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        ray_private.reread_environment()
        yield
    ray_private.reread_environment()


@pytest.fixture(scope="module")
def scraped(open_cluster, tmp_path_factory):
    """A run with one killed worker, and the Prometheus that watched it; (server, since, outcome).

    Ray's agents report once a second here, where 10 s is Ray's default.
    """
    folder = tmp_path_factory.mktemp("watched")
    head = {
        "num_cpus": 2,
        "include_dashboard": True,
        "dashboard_host": "127.0.0.1",
        "dashboard_port": free_port(),
        "_system_config": {"metrics_report_interval_ms": 1000},
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        session_folder = Path(cluster.head_node.get_session_dir_path())
        with prometheus_of(session_folder, folder) as server:
            since = time.time()
            outcome = _watched(cluster.address, folder)
            assert outcome.code == STOPPED, outcome.stderr
            packed = _packed(cluster.address, folder)
            assert packed.code == STOPPED, packed.stderr
            _wait_for(server, "ray_raymega_run_goodput", since=since)
            yield server, since, outcome
    finally:
        cluster.shutdown()


def _watched(address, folder):
    """Steps for a while, loses a worker, steps for a while, is asked to stop."""
    return _run(
        address,
        folder,
        RUN,
        [lambda running: running.kill_worker(1), lambda running: running.signal_driver(SIGINT)],
        "tracking.activations_every=5",
        "elastic.snapshot_every=5",
        "model.moe={num_experts: 4, intermediate_size: 16}",
        "model.num_nextn_predict_layers=1",
    )


def _packed(address, folder):
    """What only a run on packed documents has, whose packs take as many ranks as they need; its experts
    are spread over them, and ranks that hold the same weights are compared."""
    return _run(
        address,
        folder,
        PACKED,
        [lambda running: running.signal_driver(SIGINT)],
        "parallel.tp=1",
        "parallel.pp=1",
        "parallel.cp=2",
        "parallel.dynamic_cp=true",
        "data.packing=best_fit",
        "data.document_multiple=4",
        "schedule.micro_batch_size=1",
        "parallel.ep=2",
        "model.moe={num_experts: 4, intermediate_size: 16, load_balancing_type: none}",
        "optimizer.embedding_lr=0.002",
        "optimizer.name=muon",
        "elastic.replica_check_every=5",
    )


def _run(address, folder, name, acts, *settings):
    workers, since_s = {}, 0.0

    def act_in_time(running, _step):
        nonlocal workers, since_s
        if running.pids != workers:
            workers, since_s = running.pids, time.monotonic()
        elif acts and time.monotonic() - since_s > SEEN_S:
            acts.pop(0)(running)
            since_s = math.inf

    return train(
        f"run.name={name}",
        "run.steps=1000000",
        "run.eval_every=10",
        "run.eval_samples=2",
        f"checkpoint.uri={folder / 'runs'}",
        "checkpoint.every=10",
        "tracking.timeline_every=5",
        "tracking.norms_every=5",
        "tracking.mlflow_uri=off",
        *settings,
        address=address,
        on_step=act_in_time,
    )


def _wait_for(server, expr, *, since, patience_s=100.0):
    deadline_s = time.monotonic() + patience_s
    while not server.range(expr, since=since) and time.monotonic() < deadline_s:
        time.sleep(0.5)


def test_every_query_of_the_dashboard_is_answered(scraped):
    server, since, *_ = scraped
    silent = [
        title
        for (title, expr), (_, packed) in zip(
            dashboard_queries(run=RUN), dashboard_queries(run=PACKED), strict=True
        )
        if not any(
            map(
                math.isfinite, server.values(expr, since=since) + server.values(packed, since=since)
            )
        )
    ]
    no_gpu = {title for title, _ in dashboard_queries() if title.startswith("GPU ")}
    of_blends = {
        f"{what} of each {of}"
        for what, of in (
            ("Tokens read", "dataset"), ("Epochs", "dataset"),
            ("Loss", "validation set"), ("Perplexity", "validation set"),
        )
    }  # fmt: skip
    of_tasks = {"Accuracy by task", "Perplexity and loss by task"}
    wanted = {"MFU", "Loss scale"} | no_gpu | of_blends | of_tasks
    assert set(silent) == wanted, "a CPU has no known peak, and only float16 a loss scale"


def test_every_metric_that_a_run_measures_is_scraped(scraped):
    server, since, *_ = scraped
    query = f'{{__name__=~"ray_raymega_.+", run=~"{RUN}|{PACKED}"}}'
    found = server.range(query, since=since)
    names = {series["metric"]["__name__"].removesuffix("_total") for series in found}
    declared = {f"ray_{metric.prometheus_name}" for metric in METRICS}
    assert declared - names == {f"ray_raymega_{name}" for name in NOT_OF_THIS_RUN}
    assert names <= declared


def test_values_are_those_of_the_run(scraped):
    server, since, outcome = scraped
    losses = server.values(f"ray_raymega_train_loss{OF_RUN}", since=since)
    assert losses and set(losses) <= {event["loss"] for event in outcome.all("step")}
    assert (
        server.values(f"max(ray_raymega_run_step{OF_RUN})", since=since)[-1]
        == outcome.events[-1]["step"]
    )
    totals = server.values(f"max(ray_raymega_train_tokens_total{OF_RUN})", since=since)
    assert totals == sorted(totals) and totals[-1] == outcome.all("step")[-1]["tokens"]


def test_attempts_and_ranks_are_told_apart_by_stable_labels(scraped):
    server, since, *_ = scraped
    attempts = server.range(f"ray_raymega_run_attempt{OF_RUN}", since=since)
    seen = {series["metric"]["attempt"]: series["values"][-1][1] for series in attempts}
    assert seen == {"1": "1", "2": "2"}
    ranks = server.range(f"group by (rank) (ray_raymega_worker_forward_s{OF_RUN})", since=since)
    assert {series["metric"]["rank"] for series in ranks} == {str(r) for r in range(WORLD_SIZE)}
    peaks = server.range(f"max by (rank) (ray_raymega_memory_peak_bytes{OF_RUN})", since=since)
    assert len(peaks) == WORLD_SIZE
    assert all(float(series["values"][-1][1]) > 50e6 for series in peaks), "a process with torch"
