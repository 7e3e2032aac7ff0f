"""`raymega train` as far as no worker starts: the grid, MLflow's variable, the bill, a finished run."""

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from raymega.cli.plan.bill import dollars_per_s
from raymega.cli.plan.notes import Machine, notes
from raymega.cli.plan.ranks import intervals, rank_sizes
from raymega.cli.progress import BillSink, StepBar
from raymega.events import RunFinished
from raymega.plan.memory.state_bytes import rank_state
from raymega.tracking.console import ConsoleSink
from tests.golden.commands import called
from tests.support.jobs import VERIFY, make_test_plan
from tests.unit.tracking.events import attempt_started, run_started, step_finished


@pytest.fixture
def trained(monkeypatch):
    """Jobs that would have been trained."""
    jobs = []
    monkeypatch.setattr("raymega.api.train", lambda job, **_: jobs.append(job))
    return jobs


def test_grid_overrides_the_job_files(trained):
    assert called("train", str(VERIFY), "--grid", "tp=2,pp=1").code == 0
    assert (trained[0].parallel.tp, trained[0].parallel.pp) == (2, 1)


def test_mlflow_s_variable_is_taken_where_the_job_says_nothing(trained, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    called("train", str(VERIFY))
    called("train", str(VERIFY), "--set", "tracking.mlflow_uri=off")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    called("train", str(VERIFY))
    uris = [job.tracking.mlflow_uri for job in trained]
    assert uris == ["http://127.0.0.1:5000", "off", "run"]


def _billed(plan, *events, price=0.0):
    stream = io.StringIO()
    sink = BillSink(Console(file=stream), plan, price=price)
    for event in events:
        sink.emit(event)
    return stream.getvalue()


def test_bill_of_the_remaining_steps_comes_once():
    plan = make_test_plan("cluster.accelerator=h100", "run.steps=1000")
    text = _billed(plan, run_started(total_steps=1000), attempt_started(1), price=2.5)
    assert text.count("\n") == 1 and text.startswith("Expected on 2 x h100: 1,000 steps")
    assert "at $2.5 an hour" in text
    assert _billed(plan, run_started(total_steps=1000, step=1000)) == ""
    assert dollars_per_s(plan, 2.5) == pytest.approx(2 * 2.5 / 3600)


def test_unnamed_gpu_has_no_bill_but_a_way_to_one():
    text = _billed(make_test_plan("cluster.device=cuda"), run_started(total_steps=1000))
    assert "--set cluster.accelerator=h100" in text


def test_bar_has_the_time_and_the_dollars_left():
    with Progress(disable=True) as progress:
        bar = StepBar(progress, dollars_per_s=2.0)
        for event in (run_started(total_steps=11), attempt_started(1), step_finished(1)):
            bar.emit(event)
        assert progress.tasks[0].fields["left"] == ""
        bar.emit(step_finished(2))  # 9 steps of 125 ms are left
        assert progress.tasks[0].fields["left"] == "1.1 s left, $2.25"


def test_step_lines_have_the_time_left():
    stream = io.StringIO()
    sink = ConsoleSink(stream, every=1)
    for event in (
        run_started(total_steps=81),
        attempt_started(1),
        step_finished(1),
        step_finished(2),
    ):
        sink.emit(event)
    first, second = stream.getvalue().splitlines()[-2:]
    assert "left" not in first and second.endswith("left 9.9 s")


def test_finished_run_is_told_without_attempt_and_with_the_way_on():
    stream = io.StringIO()
    sink = ConsoleSink(stream, every=1)
    sink.emit(run_started(total_steps=20, step=20, is_resumed=True))
    reason = "nothing is left to do: step 20 of 20 is saved"
    sink.emit(
        RunFinished(
            status="finished", step=20, checkpoint_uri="x", goodput=1.0, wall_s=0.0, reason=reason
        )
    )
    text = stream.getvalue()
    assert "has all its 20 steps" in text and "--set run.steps=40" in text and "goodput" not in text


def test_equal_ranks_are_one_interval():
    assert intervals([3, 0, 1, 2, 8]) == "0-3, 8"
    assert intervals([0, 2, 4, 6, 8]) == "0, 2, 4, 6, ..."


def test_sizes_are_those_of_each_rank():
    plan = make_test_plan("parallel.tp=2", "parallel.dp=2", "parallel.sharding=optimizer")
    grid = plan.grid
    assert rank_sizes(plan) == [
        rank_state(plan.job, plan.stages_of(rank), grid, tp_rank=grid.coords(rank).tp)
        for rank in range(grid.world_size)
    ]


def test_notes_say_what_keeps_a_run_from_starting_here(monkeypatch):
    monkeypatch.setattr(
        "raymega.cli.plan.notes.this_machine", lambda: Machine(num_cpus=2, has_gpu=False)
    )

    def told(*overrides):
        plan = make_test_plan(*overrides)
        return list(notes(plan, rank_sizes(plan)))

    assert told() == []
    assert "no GPU" in told("cluster.device=cuda")[0]
    (few,) = told("cluster.cpus_per_worker=2", "parallel.dp=2")
    assert "--set cluster.cpus_per_worker=0.5" in few
    assert told("cluster.cpus_per_worker=0.5", "parallel.dp=2") == []
    # a setting that needs another replica, on a grid that has none
    continuing = ("elastic.on_replica_loss=continue", "cluster.cpus_per_worker=0.1")
    assert told(*continuing, "parallel.dp=2") == []
    (alone,) = told(*continuing)
    assert "on_replica_loss=continue has no effect" in alone and "raise parallel.dp" in alone
    shared = (
        "parallel.dp=2",
        "parallel.sharding=optimizer",
        "parallel.data_parallel_shard_degree=2",
    )
    assert "all replicas share the state" in told(*continuing, *shared)[0]


def test_a_note_says_what_is_counted_of_images_of_several_sizes(monkeypatch):
    monkeypatch.setattr(
        "raymega.cli.plan.notes.this_machine", lambda: Machine(num_cpus=2, has_gpu=False)
    )
    tower = (
        "kind: qwen2_vl, patch_size: 4, num_layers: 2, hidden_size: 16, num_heads: 2, ffn_hidden_size: 8, "
        "feature_layer: -1, image_token_id: 255, max_pixels: 96"
    )
    for more, fact in (
        ("", "6 tokens (model.vision.max_pixels)"),
        (", mean_pixels: 32", "2 tokens"),
    ):
        plan = make_test_plan(f"model.vision={{{tower}{more}}}")
        (note,) = notes(plan, rank_sizes(plan))
        assert f"an image is counted as {fact}" in note and note.endswith("of the largest, of 6")
