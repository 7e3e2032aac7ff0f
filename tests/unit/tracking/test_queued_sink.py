import json
import logging
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import patch

import pytest

from raymega.api import load_job
from raymega.config.load import parse_job
from raymega.config.schema import TrackingSection
from raymega.errors import ConfigError
from raymega.events import EvaluationFinished
from raymega.plan.validation.registry import job_faults
from raymega.plugins import Registry
from raymega.tracking import queued_sink
from raymega.tracking.queued_sink import EventBuffer, QueuedSink
from raymega.tracking.sink import CompositeSink, Stamped
from raymega.tracking.trackers import webhook
from raymega.tracking.trackers.makers import TrackerSetup
from raymega.tracking.trackers.selection import chosen_trackers
from tests.support.jobs import VERIFY
from tests.unit.tracking.events import attempt_started, run_started, step_finished, whole_run

GUARD_S = 300.0


class Hung:
    """A tracker that never returns from its first record."""

    def __init__(self):
        self.began, self.is_released = threading.Event(), threading.Event()

    def record(self, batch):
        self.began.set()
        self.is_released.wait()

    def close(self):
        pass

    def is_refusal(self, error):
        return True


class Kept(Hung):
    """A tracker that keeps what it gets."""

    def __init__(self):
        self.events = []

    def record(self, batch):
        self.events += [item.event for item in batch]


def test_tracker_that_hangs_for_ever_holds_up_nobody_and_no_more_memory_than_its_queue(
    caplog, monkeypatch
):
    """Its thread is inside its first record all the time: an emit that waited for it would not end."""
    monkeypatch.setattr(queued_sink, "MAX_PENDING_EVENTS", 500)
    hung, kept = Hung(), Kept()
    sink = QueuedSink(lambda: hung, title="tracker hung", clock=time.time, every=1)
    other = QueuedSink(lambda: kept, title="tracker kept", clock=time.time, flush_s=0.001)
    both = CompositeSink([sink, other])
    both.emit(run_started())
    assert hung.began.wait(GUARD_S)
    for step in range(1, 401):
        both.emit(step_finished(step))
    for step in range(401, 2001):
        sink.emit(step_finished(step))
    assert (len(sink._buffer), sink._buffer.num_dropped) == (500, 1500)
    with caplog.at_level(logging.WARNING, logger="raymega"):
        sink.close(0.0)
        other.close(GUARD_S)
    assert "tracker hung lacks 2001 records after 0 s of closing" in caplog.text
    assert kept.events == [run_started(), *map(step_finished, range(1, 401))]
    hung.is_released.set()
    sink._thread.join(GUARD_S)


def test_full_queue_keeps_what_places_the_other_events():
    buffer = EventBuffer(3)
    first, start = run_started(), attempt_started(1)
    evaluations = [EvaluationFinished(step=step, metrics={"eval/loss": 1.0}) for step in range(9)]
    for event in (first, start, *evaluations):
        buffer.put(Stamped(time_s=0.0, event=event))
    taken = [item.event for _ in range(3) for item in buffer.pop(9)]
    assert taken == [first, start, evaluations[-1]]
    assert buffer.num_dropped == 8


@contextmanager
def address(*codes):
    """An address that answers with the codes, then with 200; the bodies that it took, and its URL."""
    left, taken = list(codes), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            code = left.pop(0) if left else 200
            if code == 200:
                taken.append(body)
            self.send_response(code)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        # a client that gave up on a slow answer would post once more
        with patch.object(webhook, "HTTP_TIMEOUT_S", GUARD_S):
            yield taken, f"http://127.0.0.1:{server.server_port}/hook"
        server.shutdown()


def webhook_sink(url):
    setup = TrackerSetup(
        section=TrackingSection(trackers=("webhook",), webhook_url=url), folder=None
    )
    row = Registry().find("tracker", "webhook")
    return QueuedSink(
        lambda: row.load()(setup), title="tracker webhook", clock=time.time, flush_s=0.001
    )


def test_webhook_gets_each_incident_once_also_from_an_address_that_was_away(monkeypatch):
    with address(503, 503) as (taken, url):
        monkeypatch.setenv("HOOK_OF_THE_TEST", url)
        sink = webhook_sink("$HOOK_OF_THE_TEST")
        for event in whole_run():
            sink.emit(event)
            while event.json_name == "bad_step" and not taken:
                threading.Event().wait(0.005)
        sink.close(GUARD_S)
    assert [body["event"] for body in taken] == [
        "bad_step", "save_failed", "failure", "recovered", "straggler", "finished",
    ]  # fmt: skip
    assert taken[2]["text"] == "demo: attempt 1 failed after step 3: killed by signal 9; "
    assert {body["run"] for body in taken} == {"demo"}


def test_address_that_refuses_is_said(caplog):
    with address(404) as (taken, url), caplog.at_level(logging.WARNING, logger="raymega"):
        sink = webhook_sink(url)
        for event in whole_run():
            sink.emit(event)
        sink.close(GUARD_S)
    assert caplog.text.count("tracker webhook refused BadStep: HTTP Error 404") == 1
    assert len(taken) == 5, "the later ones"


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("trackers=[wandbb]", "write wandb"),
        ("trackers=[mlflow, mlflow]", "names 'mlflow' 2 times"),
        ("trackers=[webhook]", "set tracking.webhook_url=https://HOST/PATH"),
        ("webhook_url=http://x", "it has no effect without webhook"),
        ("wandb_mode=online", "it has no effect without wandb"),
    ],
)
def test_job_file_with_a_wrong_tracker_is_refused(setting, told):
    faults = job_faults(parse_job(VERIFY, [f"tracking.{setting}"]).values)
    assert told in "".join(map(str, faults))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            ["trackers=[webhook]", "webhook_url=$NO_SUCH_NAME"],
            "run `export NO_SUCH_NAME=https://...`",
        ),
        (["trackers=[webhook]", "webhook_url=chat"], "write https://HOST/PATH"),
        (["trackers=[wandb]", "wandb_mode=online"], "run `wandb login`"),
    ],
)
def test_run_whose_tracker_lacks_something_here_is_refused_before_it_starts(
    settings, told, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    overrides = [f"tracking.{setting}" for setting in settings]
    overrides.append(f"checkpoint.uri={tmp_path}")
    load_job(VERIFY, overrides)
    with pytest.raises(ConfigError, match="tracking") as refused:
        load_job(VERIFY, overrides, is_for_training=True)
    assert told in str(refused.value)


def test_package_that_is_not_installed_is_told_with_the_line_that_installs_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("raymega.plugins.find_spec", lambda name: None)
    overrides = ["tracking.trackers=[wandb]", f"checkpoint.uri={tmp_path}"]
    with pytest.raises(ConfigError, match=r"pip install 'raymega\[trackers\]'") as refused:
        load_job(VERIFY, overrides, is_for_training=True)
    assert refused.value.exit_code == 2


def test_mlflow_that_is_off_is_no_tracker():
    assert [row.name for row in chosen_trackers(load_job(VERIFY))] == ["mlflow"]
    assert chosen_trackers(load_job(VERIFY, ["tracking.mlflow_uri=off"])) == []
