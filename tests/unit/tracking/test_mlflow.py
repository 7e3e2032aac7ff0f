import dataclasses
import json
import logging
import os
import socket
import subprocess
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow import environment_variables as settings

from raymega.api import load_job
from raymega.events import ArtefactWritten, AttemptFailed, Measured, TasksEvaluated
from raymega.tracking import mlflow, mlflow_facts, mlflow_recorder
from raymega.tracking.mlflow import open_recorder, tracking_uri
from raymega.tracking.mlflow_facts import datasets_of, describe
from raymega.tracking.mlflow_metrics import last_steps_in, mlflow_name
from raymega.tracking.mlflow_recorder import Recorder, is_refusal
from raymega.tracking.names import METRICS
from raymega.tracking.queued_sink import EventBuffer, QueuedSink
from raymega.tracking.sink import Stamped
from tests.support.jobs import make_test_plan
from tests.support.servers.ports import CLOSED_PORT
from tests.unit.tracking.events import (
    JOB,
    attempt_started,
    checkpoint,
    run_finished,
    run_started,
    step_finished,
    whole_run,
)

GUARD_S = 100
JOBS = Path(__file__).parents[3] / "jobs"


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    return tracking_uri("run", tmp_path_factory.mktemp("mlflow"))


@pytest.fixture
def experiment(request):
    return request.node.name


@pytest.fixture
def client(uri):
    return MlflowClient(uri)


def record(recorder, *events, time_s=100.0):
    for event in events:
        recorder.record([Stamped(time_s=time_s, event=event)])


def driver(uri, experiment, *events, time_s=100.0):
    """One driver's life: a fresh recorder and its events."""
    recorder = Recorder(uri=uri, experiment=experiment)
    record(recorder, *events, time_s=time_s)
    return recorder


def runs_of(client, experiment):
    """The parent and its attempts, oldest first."""
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    parents = [run for run in found if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in found if run not in parents]
    assert len(parents) == 1
    assert all(r.data.tags["mlflow.parentRunId"] == parents[0].info.run_id for r in children)
    return parents[0], sorted(children, key=lambda run: run.data.tags["raymega.attempt"])


def series(client, run, name):
    return [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]


def test_whole_run_is_one_parent_and_a_child_an_attempt(client, uri, experiment, tmp_path):
    picture = tmp_path / "loss.svg"
    picture.write_bytes(b"picture")
    recorder = driver(uri, experiment, *whole_run(artefact=str(picture)))
    parent, children = runs_of(client, experiment)
    assert recorder.run_id == parent.info.run_id
    assert parent.info.status == "FINISHED"
    assert [child.info.status for child in children] == ["FAILED", "FINISHED"]
    assert children[0].data.tags["failure.cause"] == "killed by signal 9"
    assert children[1].data.tags["reason"] == "worker 3 died"
    assert children[1].data.params["grid.tp"] == "2"
    assert children[1].data.params["plan.schedule"] == "1f1b"
    assert children[1].data.params["init_from"] == "store"
    assert parent.data.tags["raymega.checkpoint"].endswith("step-00000004")
    assert parent.data.metrics["system/run/goodput"] == 0.93
    files = {item.path for item in client.list_artifacts(parent.info.run_id)}
    assert files == {"environment.yaml", "job.yaml", "loss.svg", "samples"}
    (text,) = client.list_artifacts(parent.info.run_id, "samples")
    assert text.path == "samples/step-00000004.txt"


def test_replayed_step_is_once_in_the_parent_and_attempts_have_first_values(
    client, uri, experiment
):
    driver(uri, experiment, *whole_run()[:-2])
    parent, children = runs_of(client, experiment)
    assert [step for step, _ in series(client, parent, "train/loss")] == [1, 2, 3, 4]
    assert [step for step, _ in series(client, children[0], "train/loss")] == [1]
    assert [step for step, _ in series(client, children[1], "train/loss")] == [3]


def test_evaluation_outside_a_run_is_in_its_parent_once_and_at_its_step(
    client, uri, experiment, tmp_path
):
    picture = tmp_path / "loss.png"
    picture.write_bytes(b"picture")
    driver(uri, experiment, *whole_run(artefact=str(picture)))
    parent, _ = runs_of(client, experiment)
    assert series(client, parent, "eval/task/race/accuracy") == [(2, 0.5)]
    # step 1 is behind the run's last one, and is written all the same
    event = TasksEvaluated(step=1, metrics={"eval/task/race/accuracy": 0.25})
    for _ in range(2):
        told = Recorder(uri=uri, experiment=experiment).add_evaluation(
            event, run_id="r1", name="demo", files={"evaluations/race.json": "{}"}, time_s=400.0
        )
    assert told == parent.info.run_id
    assert series(client, parent, "eval/task/race/accuracy") == [(2, 0.5), (1, 0.25)]
    (file,) = client.list_artifacts(told, "evaluations")
    assert file.path == "evaluations/race.json"
    assert client.get_run(told).info.status == "FINISHED"
    # a run that was not recorded gets a parent of its own, which a driver would find
    other = Recorder(uri=uri, experiment=experiment).add_evaluation(
        event, run_id="r2", name="new", files={}, time_s=400.0
    )
    assert other != told and client.get_run(other).info.status == "FINISHED"


def test_next_driver_goes_on_in_the_same_run(client, uri, experiment):
    killed = [run_started(), attempt_started(1), step_finished(1), step_finished(2)]
    driver(uri, experiment, *killed)
    resumed = run_started(is_resumed=True, step=1)
    driver(uri, experiment, resumed, attempt_started(2), time_s=200.0)
    parent, children = runs_of(client, experiment)
    assert parent.info.status == "RUNNING"
    assert [child.info.status for child in children] == ["KILLED", "RUNNING"]

    rest = [step_finished(2, attempt=2), step_finished(3, attempt=2), run_finished("preempted")]
    driver(uri, experiment, resumed, attempt_started(2), *rest, time_s=300.0)
    parent, children = runs_of(client, experiment)
    assert parent.info.status == "KILLED"
    assert len(children) == 2
    assert [step for step, _ in series(client, parent, "train/loss")] == [1, 2, 3]


def test_params_hold_the_job_and_tags_what_has_changed_since(client, uri, experiment, caplog):
    driver(uri, experiment, run_started(), run_finished("failed"))
    changed = JOB | {"model": {"family": "gpt2", "hidden_size": 128}, "parallel": {"tp": 4}}
    with caplog.at_level(logging.WARNING):
        driver(uri, experiment, run_started(is_resumed=True, job=changed))
    parent, _ = runs_of(client, experiment)
    assert parent.data.params == {
        "run.steps": "4",
        "run.seed": "7",
        "model.family": "gpt2",
        "model.hidden_size": "64",
        "parallel.tp": "2",
    }
    assert parent.data.tags["changed.parallel.tp"] == "4"
    assert parent.data.tags["changed.model.hidden_size"] == "128"
    assert "model.hidden_size=64" in caplog.text
    assert "parallel.tp" not in caplog.text, "a resumed run may have another layout"


def test_experiment_opens_as_model_training(client, uri, experiment):
    client.create_experiment(experiment)
    for name in (experiment, f"{experiment}-new"):
        driver(uri, name, run_started())
        tags = client.get_experiment_by_name(name).tags
        assert tags["mlflow.experimentKind"] == "custom_model_development"


@pytest.mark.parametrize(
    ("sets", "used"),
    [
        (["data.validation=[{name: a, path: 'synthetic:v'}]"],
         [("synthetic", "training"), ("synthetic:v", "validation")]),
        (["data.stages=[{from_tokens: 99, sources: [{path: 'synthetic:late'}]}]"],
         [("synthetic", "training"), ("synthetic:late", "training")]),
    ],
)  # fmt: skip
def test_datasets_are_those_of_all_stages_beside_validation_sets(sets, used):
    job = make_test_plan(*sets).job.model_dump(mode="json")
    assert [(each.source, each.context) for each in datasets_of(job)] == used


def test_description_counts_the_tokens_of_a_ramp():
    job = make_test_plan("data.batch_ramp=[{until_samples: 100, global_batch_size: 2}]").job
    assert "(1.28k)" in describe(job.model_dump(mode="json")), "20 steps of 2 rows of 32 tokens"


def test_run_has_its_datasets_its_source_and_a_description(
    client, uri, experiment, monkeypatch, tmp_path
):
    job = load_job(JOBS / "verify.yaml").model_dump(mode="json")
    job["data"]["path"] = "/corpora/books"
    monkeypatch.setattr(mlflow_facts, "GIT_TIMEOUT_S", GUARD_S)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    commit = [
        "git",
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b",
        "commit",
        "-q",
        "--allow-empty",
        "-m",
        "a",
    ]
    subprocess.run(commit, check=True, cwd=tmp_path)
    monkeypatch.chdir(tmp_path)
    driver(uri, experiment, run_started(job=job))
    parent, _ = runs_of(client, experiment)
    (used,) = parent.inputs.dataset_inputs
    assert (used.dataset.name, json.loads(used.dataset.source)) == (
        "books",
        {"uri": "/corpora/books"},
    )
    assert {tag.key: tag.value for tag in used.tags} == {"mlflow.data.context": "training"}
    tags = parent.data.tags
    assert len(tags["mlflow.source.git.commit"]) == 40
    assert tags["mlflow.user"]
    assert "parameters" in tags["mlflow.note.content"]
    assert len([name for name in tags if not name.startswith("mlflow.")]) <= 8
    params = parent.data.params
    assert params["parallel.tp"] and params["model.num_parameters"] and params["optimizer.lr"]
    assert "elastic.lease_s" not in params and "checkpoint.uri" not in params
    assert len(params) < 60


def test_note_of_a_user_is_kept(client, uri, experiment):
    job = load_job(JOBS / "verify.yaml").model_dump(mode="json")
    recorder = driver(uri, experiment, run_started(job=job))
    client.set_tag(recorder.run_id, "mlflow.note.content", "my best run")
    driver(uri, experiment, run_started(job=job, is_resumed=True))
    parent, _ = runs_of(client, experiment)
    assert parent.data.tags["mlflow.note.content"] == "my best run"
    assert len(parent.inputs.dataset_inputs) == 1, "the second driver's dataset is the first one's"


def test_folder_outside_git_and_user_without_a_name_leave_their_tags_out(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    def nobody():
        raise KeyError("uid not found")

    monkeypatch.setattr(mlflow_facts.getpass, "getuser", nobody)
    assert mlflow_facts.source_tags() == {}


def test_constants_and_states_of_the_moment_have_no_chart(client, uri, experiment):
    driver(uri, experiment, *whole_run()[:-2])
    parent, children = runs_of(client, experiment)
    shown = parent.data.metrics
    assert {"train/loss", "train/lr", "train/mfu", "eval/loss"} <= shown.keys()
    constant = {"system/checkpoint/bytes", "system/comm/cp_sent_bytes", "train/global_batch_size"}
    assert (
        not (constant | {"system/checkpoint/snapshot_step", "system/run/lease_age_s"})
        & shown.keys()
    )
    assert constant <= children[1].data.metrics.keys()


def test_families_sort_so_that_losses_come_first():
    """MLflow sorts the sections of a page by name, and has a page of its own for system metrics."""
    first = {mlflow_name(metric.name).partition("/")[0] for metric in METRICS}
    assert first == {"eval", "train", "system"}


def test_value_that_changes_late_has_its_first_value_too(client, uri, experiment):
    recorder = driver(
        uri, experiment, run_started(), attempt_started(1), checkpoint(2), checkpoint(4)
    )
    record(recorder, dataclasses.replace(checkpoint(6), num_bytes=7))
    parent, _ = runs_of(client, experiment)
    first = checkpoint(2).num_bytes
    assert series(client, parent, "system/checkpoint/bytes") == [(2, first), (6, 7.0)]


def test_repeating_a_request_that_failed_half_way_adds_nothing(client, uri, experiment):
    recorder = driver(uri, experiment, run_started(), attempt_started(1))
    batch = [Stamped(time_s=float(n), event=step_finished(n)) for n in (1, 2)]
    client_of_recorder = recorder._client

    class Broken:
        """Passes the attempt's request and loses the parent's answer."""

        def __getattr__(self, name):
            return getattr(client_of_recorder, name)

        def log_batch(self, run_id, **values):
            client_of_recorder.log_batch(run_id, **values)
            if run_id == recorder.run_id:
                raise TimeoutError("no answer")

    recorder._client = Broken()
    with pytest.raises(TimeoutError):
        recorder.record(batch)
    recorder._client = client_of_recorder
    recorder.record(batch)
    parent, children = runs_of(client, experiment)
    assert [step for step, _ in series(client, parent, "train/loss")] == [1, 2]
    assert [step for step, _ in series(client, children[0], "train/loss")] == [1]


def test_steps_that_a_killed_driver_did_not_send_are_written_by_the_next_one(
    client, uri, experiment, monkeypatch
):
    """The first request told the last step of all of them: what the others would have sent stayed missing."""
    steps = [step_finished(step) for step in range(1, 41)]
    monkeypatch.setattr(mlflow_recorder, "MAX_METRICS_PER_BATCH", 4 * len(steps[0].metrics))
    first = driver(uri, experiment, run_started(), attempt_started(1))
    sent, send = [], first._client.log_batch

    def killed(run_id, *args, **more):
        sent.append(run_id)
        if sent.count(first.run_id) > 3:
            raise SystemExit
        send(run_id, *args, **more)

    first._client.log_batch = killed
    with pytest.raises(SystemExit):
        first.record([Stamped(time_s=100.0, event=event) for event in steps])
    again = driver(uri, experiment, run_started(is_resumed=True), attempt_started(2))
    again.record([Stamped(time_s=200.0, event=event) for event in steps])
    parent, _ = runs_of(client, experiment)
    assert [step for step, _ in series(client, parent, "train/loss")] == [*range(1, 41)]


def test_checkpoint_of_a_replayed_step_does_not_go_back_in_the_parent(client, uri, experiment):
    first, second, third = (
        dataclasses.replace(checkpoint(step), num_bytes=step) for step in (5, 6, 4)
    )
    recorder = driver(uri, experiment, run_started(), attempt_started(1), first, second)
    record(recorder, attempt_started(2), third, time_s=200.0)
    parent, _ = runs_of(client, experiment)
    assert [step for step, _ in series(client, parent, "system/checkpoint/bytes")] == [5, 6, 6]


def test_experiment_that_another_driver_makes_first_is_used(client, uri, experiment):
    made = client.create_experiment(experiment)
    recorder = Recorder(uri=uri, experiment=experiment)
    client_of_recorder, answers = recorder._client, [None]

    class Late:
        """Looks once before the other driver has made the experiment."""

        def __getattr__(self, name):
            return getattr(client_of_recorder, name)

        def get_experiment_by_name(self, name):
            return answers.pop() if answers else client_of_recorder.get_experiment_by_name(name)

    recorder._client = Late()
    record(recorder, run_started())
    assert runs_of(client, experiment)[0].info.experiment_id == made


def test_failure_before_any_attempt_is_no_error(client, uri, experiment):
    failure = AttemptFailed(attempt=1, rank=-1, step=0, cause="no capacity")
    driver(uri, experiment, run_started(), failure, run_finished("failed", step=0))
    assert runs_of(client, experiment)[0].info.status == "FAILED"


def test_sink_writes_from_its_thread_and_closes_with_everything_written(client, uri, experiment):
    sink = mlflow_sink(uri=uri, experiment=experiment, clock=time.time)
    for event in whole_run()[:-2]:
        sink.emit(event)
    sink.emit(ArtefactWritten(path="/no/such/file", title="Lost"))
    sink.emit(run_finished())
    sink.close(GUARD_S)
    parent, children = runs_of(client, experiment)
    assert sink.recorder.run_id == parent.info.run_id
    assert [run.info.status for run in (parent, *children)] == ["FINISHED", "FAILED", "FINISHED"]
    assert [step for step, _ in series(client, parent, "train/loss")] == [1, 2, 3, 4]


def mlflow_sink(uri, experiment, **settings):
    opener = partial(open_recorder, uri=uri, experiment=experiment)
    return QueuedSink(opener, title=f"MLflow at {uri}", **settings)


@pytest.fixture
def writers(monkeypatch):
    """The threads that spoke to a server, or tried to."""
    found, record = [], QueuedSink._record

    def note_and_record(sink, batch):
        found.append(threading.current_thread())
        record(sink, batch)

    monkeypatch.setattr(QueuedSink, "_record", note_and_record)
    return found


def test_dead_server_delays_nothing_and_is_said_once(caplog, writers):
    """Nobody who emits or closes speaks to it."""
    uri = f"http://127.0.0.1:{CLOSED_PORT}"
    with caplog.at_level(logging.WARNING, logger="raymega"):
        sink = mlflow_sink(uri=uri, experiment="x", clock=time.time)
        for event in (run_started(), attempt_started(1), *map(step_finished, range(1, 501))):
            sink.emit(event)
        sink.close(0.3)
        sink._thread.join(GUARD_S)
    assert set(writers) <= {sink._thread} and not sink._thread.is_alive()
    assert caplog.text.count(f"{uri} does not accept records") <= 1
    assert caplog.text.count("records after 0 s of closing") == 1


def test_silent_server_delays_nothing(caplog, writers, monkeypatch):
    """The thread is in its request from the first event on, and a caller that waited would be so too."""
    monkeypatch.setattr(mlflow, "HTTP_TIMEOUT_S", 1000)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(GUARD_S)
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        with caplog.at_level(logging.WARNING, logger="raymega"):
            sink = mlflow_sink(uri=uri, experiment="x", clock=time.time)
            sink.emit(run_started())
            with server.accept()[0]:
                for event in (attempt_started(1), *map(step_finished, range(1, 501))):
                    sink.emit(event)
                sink.close(0.3)
                assert sink._thread.is_alive() and writers == [sink._thread]
                assert getattr(sink.recorder, "run_id", "") == ""
    sink._thread.join(GUARD_S)
    assert "lacks 502 records after 0 s of closing" in caplog.text


def test_server_that_comes_back_gets_everything_in_order(monkeypatch, caplog):
    answers = [ConnectionRefusedError("down"), TimeoutError("down"), None]
    seen = []

    class Flaky:
        run_id = "m1"

        def __init__(self, **_):
            pass

        def record(self, batch):
            if answers and (error := answers.pop(0)) is not None:
                raise error
            seen.extend(item.event for item in batch)

        def close(self):
            pass

        def is_refusal(self, error):
            return is_refusal(error)

    monkeypatch.setattr(mlflow_recorder, "Recorder", Flaky)
    events = whole_run()
    with caplog.at_level(logging.WARNING, logger="raymega"):
        sink = mlflow_sink(uri="http://flaky", experiment="x", clock=time.time, flush_s=0.001)
        for event in events:
            sink.emit(event)
        give_up_s = time.monotonic() + GUARD_S
        while len(seen) < len(events) and time.monotonic() < give_up_s:
            threading.Event().wait(0.005)
        sink.close(GUARD_S)
    # values of single ranks stay out
    assert [type(event) for event in seen] == [type(event) for event in events]
    assert not any(event.ranks for event in seen if isinstance(event, Measured))
    assert caplog.text.count("http://flaky does not accept records, retrying") == 1
    assert caplog.text.count("http://flaky answers again") == 1


def test_refused_run_turns_the_sink_off_with_a_reason(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="raymega"):
        sink = mlflow_sink(uri=f"file:{tmp_path}", experiment="x", clock=time.time)
        sink.emit(run_started())
        sink.emit(step_finished(1))
        sink.close(GUARD_S)
    assert "is not recorded in MLflow" in caplog.text
    assert "lacks" not in caplog.text


def test_client_is_quiet_and_gives_up_soon_unless_the_user_set_it_otherwise(monkeypatch):
    monkeypatch.setattr(os, "environ", {"MLFLOW_HTTP_REQUEST_TIMEOUT": "77"})
    mlflow_recorder.limit_client(timeout_s=5, max_retries=0)
    assert settings.MLFLOW_HTTP_REQUEST_TIMEOUT.get() == 77
    assert settings.MLFLOW_HTTP_REQUEST_MAX_RETRIES.get() == 0
    assert settings.MLFLOW_DISABLE_TELEMETRY.get()
    assert settings.MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT.get()


def test_refusals_are_told_from_absences():
    assert is_refusal(FileNotFoundError())
    assert is_refusal(KeyError())
    assert not is_refusal(ConnectionRefusedError())
    assert not is_refusal(TimeoutError())


@pytest.mark.parametrize("setting", ["http://host:5000", "sqlite:///other.db"])
def test_tracking_uri_takes_a_uri_as_it_is(tmp_path, setting):
    assert tracking_uri(setting, tmp_path) == setting


def buffer_of(*events, max_events=100):
    buffer = EventBuffer(max_events)
    for event in events:
        buffer.put(Stamped(time_s=0.0, event=event))
    return buffer


def events_of(batch):
    return [item.event for item in batch]


def test_take_groups_steps_up_to_the_limit_and_nothing_else():
    first, start, steps = run_started(), attempt_started(1), [step_finished(n) for n in (1, 2, 3)]
    again = attempt_started(2)
    buffer = buffer_of(first, start, *steps, again)
    taken = [events_of(buffer.pop(2)) for _ in range(6)]
    assert taken == [[first], [start], steps[:2], steps[2:], [again], []]


def test_give_back_restores_the_order():
    events = [step_finished(n) for n in (1, 2, 3, 4)]
    buffer = buffer_of(*events)
    buffer.give_back(buffer.pop(2))
    assert events_of(buffer.pop(10)) == events


def test_full_buffer_drops_the_oldest_steps_and_counts_them():
    first, start = run_started(), attempt_started(1)
    steps = [step_finished(n) for n in range(1, 9)]
    buffer = buffer_of(first, start, *steps, max_events=5)
    assert len(buffer) == 5
    assert buffer.num_dropped == 5
    assert events_of(buffer.pop(9) + buffer.pop(9)) == [first, start]
    assert events_of(buffer.pop(9)) == steps[5:]


def test_full_buffer_keeps_what_is_not_a_step_beyond_its_bound():
    starts = [attempt_started(n) for n in range(1, 5)]
    buffer = buffer_of(*starts, max_events=2)
    assert len(buffer) == 4
    assert buffer.num_dropped == 0


def deepseek_step(step, attempt=1):
    """The metrics of a DeepSeek-V3 run: 58 layers of experts, 357 names and more."""
    kinds = ("max_load", "min_load", "starved_share", "drop_rate", "router_entropy", "router_loss")
    layers = {f"moe/{kind}/{layer}": 0.5 + step for layer in range(58) for kind in kinds}
    event = step_finished(step, attempt)
    return dataclasses.replace(event, metrics={**event.metrics, **layers})


def test_run_with_hundreds_of_metrics_goes_on_under_the_next_driver(
    client, uri, experiment, caplog
):
    """MLflow cuts a tag at 8,000 characters: the last step is a few numbers, whatever the number of metrics."""
    steps = [deepseek_step(step) for step in (1, 2, 3)]
    assert len(steps[0].metrics) > 357
    driver(uri, experiment, run_started(), attempt_started(1), *steps)
    parent, _ = runs_of(client, experiment)
    assert len(parent.data.tags["raymega.last_steps"]) < 100
    with caplog.at_level(logging.WARNING, logger="raymega"):
        sink = mlflow_sink(uri=uri, experiment=experiment, clock=time.time)
        later = [deepseek_step(step, 2) for step in (2, 3, 4)]
        for event in (run_started(is_resumed=True, step=1), attempt_started(2, step=1), *later):
            sink.emit(event)
        sink.emit(run_finished())
        sink.close(GUARD_S)
    assert "is not recorded" not in caplog.text
    parent, _ = runs_of(client, experiment)
    for name in ("train/loss", "system/moe/max_load/57"):
        assert [step for step, _ in series(client, parent, name)] == [1, 2, 3, 4]


def test_tag_of_an_earlier_version_is_read_even_where_mlflow_has_cut_it():
    old = {f"system/moe/max_load/{layer}": 7 for layer in range(400)} | {"eval/loss": 4}
    whole = json.dumps({"eval/task/race/accuracy": 2, "eval/loss": 4} | old)
    expected = {"step": 7, "evaluation": 4, "tasks": 2}
    assert last_steps_in(whole) == expected == last_steps_in(whole[:8000])
    assert last_steps_in(json.dumps(expected)) == expected and last_steps_in("") == {}
