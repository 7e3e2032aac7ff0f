"""A real run's time line: on one clock, complete, beside what its schedule alone would cost."""

import json
from collections import Counter
from itertools import pairwise

import pytest
from mlflow import MlflowClient

from raymega.schedule.instructions import COMPUTE
from tests.support.command import train

pytestmark = [pytest.mark.ray, pytest.mark.wide]

PP, DP, CHUNKS, MICRO_BATCHES = 2, 2, 2, 4


@pytest.fixture(scope="module")
def traced(local_ray, tmp_path_factory):
    """(the run's folder, its events, the trace's)."""
    store = tmp_path_factory.mktemp("traced")
    outcome = train(
        "run.name=traced",
        "run.steps=2",
        f"parallel.pp={PP}",
        f"parallel.dp={DP}",
        "parallel.sharding=optimizer",
        "schedule.name=interleaved",
        f"schedule.chunks={CHUNKS}",
        "tracking.timeline_every=2",
        f"checkpoint.uri={store}",
        address=local_ray.address,
    )
    assert outcome.code == 0, outcome.stderr
    folder = store / "traced"
    return folder, outcome, json.loads((folder / "trace.json").read_text())["traceEvents"]


def _span_at(events, arrow):
    (span,) = [
        e for e in events
        if e["ph"] == "X" and (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"])
        and e["cat"].split("_")[0] in ("send", "recv")
        and e["ts"] <= arrow["ts"] <= e["ts"] + e["dur"]
    ]  # fmt: skip
    return span


def test_every_rank_has_every_instruction_and_collective(traced):
    _, _, events = traced
    found = Counter((e["tid"], e["cat"]) for e in events if e["ph"] == "X")
    for rank in range(PP * DP):
        for op in ("forward", "backward"):
            assert found[rank, op] == MICRO_BATCHES * CHUNKS
        assert found[rank, "reduce"] > 0 and found[rank, "gather"] > 0


def test_no_message_arrives_before_it_is_sent(traced):
    _, _, events = traced
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    hops = PP * CHUNKS - 1
    assert starts.keys() == ends.keys() and len(starts) == 2 * hops * MICRO_BATCHES * DP
    for number, start in starts.items():
        sent, received = _span_at(events, start), _span_at(events, ends[number])
        assert sent["cat"].removeprefix("send") == received["cat"].removeprefix("recv")
        assert sent["args"]["micro_batch"] == received["args"]["micro_batch"]
        assert received["ts"] + received["dur"] >= sent["ts"] - 1e-3


def test_work_of_a_rank_never_overlaps(traced):
    _, _, events = traced
    for rank in range(PP * DP):
        row = [e for e in events if e["ph"] == "X" and e["tid"] == rank and e["cat"] in COMPUTE]
        for before, after in pairwise(row):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3


def test_measured_bubble_stands_beside_the_simulated_one(traced):
    folder, outcome, _ = traced
    (line,) = outcome.all("timeline")
    assert line["simulated_bubble"] > 0 and line["bubble"] > 0
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (experiment,) = [e for e in client.search_experiments() if e.name == "raymega"]
    metrics = [run.data.metrics for run in client.search_runs([experiment.experiment_id])]
    assert any(
        m.get("system/run/simulated_bubble") == pytest.approx(line["simulated_bubble"])
        for m in metrics
    )
    assert "simulated bubble of the schedule: " in (folder / "timeline.svg").read_text()
