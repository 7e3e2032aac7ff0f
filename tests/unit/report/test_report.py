"""The page of a run: whole by itself, true to the records, for a run in any state."""

from __future__ import annotations

import json
import re
import shlex
import xml.etree.ElementTree as ET
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path

import pytest

from raymega import api
from raymega.errors import ConfigError
from raymega.events import AttemptFailed, Memory, RunFinished
from raymega.orchestrate.core.clock import SystemClock
from raymega.orchestrate.run_store.lease import Lease
from raymega.orchestrate.run_store.lease_holder import this_process
from raymega.report.find import find_run
from raymega.report.page import run_page
from raymega.storage.registry import open_store
from raymega.tracking.jsonl import open_jsonl
from tests.unit.tracking.events import whole_run

JOBS = Path(__file__).parents[3] / "jobs"
NOW = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
VOID = {"meta", "circle", "rect", "path", "wbr", "input"}


@pytest.fixture(scope="module")
def job():
    return api.load_job(JOBS / "verify.yaml", ["parallel.pp=2", "parallel.dp=1"])


def written(folder, job, *, events=None, without=()):
    """Write the records of a run of ``job`` below ``folder`` and return the run's folder."""
    run = folder / "demo"
    events = events or whole_run()
    sink = open_jsonl(run / "metrics.jsonl")
    grid = {"tp": 1, "pp": 2, "dp": 1, "cp": 1, "ep": 1, "etp": 1}
    for event in events:
        if isinstance(event, without):
            continue
        if event.json_name == "run":
            event = replace(event, uri=str(run), job=job.model_dump(mode="json"))
        if event.json_name == "attempt":
            event = replace(event, grid=grid)
        sink.emit(event)
    sink.close(0.0)
    return run


def page_of(run):
    return run_page(find_run(str(run)), now=NOW, levels_of=lambda _job: {"unigrams": 5.6})


class Balance(HTMLParser):
    """Counts that each element that opens is closed, in order."""

    def __init__(self):
        super().__init__()
        self.open, self.faults = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID and (not self.open or self.open.pop() != tag):
            self.faults.append(tag)


def test_page_is_one_file_for_any_screen(tmp_path, job):
    page = page_of(written(tmp_path, job))
    outside = re.findall(
        r"(?:src|href)=|<script|<link|@import|@font-face|url\((?!#)|https?://(?!www\.w3\.org/2000/svg)",
        page,
    )
    assert not outside, "it needs nothing beside it"
    assert page.isascii()
    assert "width=device-width" in page and "prefers-color-scheme: dark" in page
    balance = Balance()
    balance.feed(page)
    assert not balance.faults and not balance.open
    for picture in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        ET.fromstring(picture)


def test_page_says_what_the_records_say(tmp_path, job):
    page = page_of(written(tmp_path, job))
    for said in (
        "Run demo", "finished", "4 of 4", "2.5000", "5.2500", "2026-01-02 03:04", "unigrams 5.6",
        "killed by signal 9", "attempt 2", "loss=nan", "model.<wbr>hidden_<wbr>size", "not be written: disk is full",
        "93.0%",
    ):  # fmt: skip
        assert said in page, said


def test_memory_stands_beside_the_plan_by_stage(tmp_path, job):
    memory = Memory(
        attempt=2, step=4, metrics={},
        ranks={0: {"memory/peak_bytes": 3 * 2.0**30}, 1: {"memory/peak_bytes": 5 * 2.0**30}},
    )  # fmt: skip
    events = [*whole_run()[:-1], memory, whole_run()[-1]]
    page = page_of(written(tmp_path, job, events=events))
    assert "pp 0, measured: 3 to 3 GiB" in page and "pp 1, measured: 5 to 5 GiB" in page
    assert re.search(r"pp 1, weights: [\d.e-]+ GiB", page)
    assert "each of 2 ranks" in page


def test_run_that_a_driver_holds_is_under_way_and_has_a_time_left(tmp_path, job):
    run = written(tmp_path, job, events=whole_run()[:6], without=RunFinished)
    lease = Lease(
        open_store(str(run)), holder=this_process(), duration_s=600.0, clock=SystemClock()
    )
    lease.acquire()
    page = run_page(find_run(str(run)), now=datetime.now(UTC), levels_of=lambda _job: {})
    assert "under way, driven by" in page
    assert "about 0.375 s" in page, "three of four steps of 0.125 s"
    lease.release()
    later = datetime.now(UTC) + timedelta(seconds=1)
    page = run_page(find_run(str(run)), now=later, levels_of=lambda _job: {})
    assert "its driver is gone" in page and "time left" not in page


def test_killed_driver_leaves_a_page(tmp_path, job):
    run = written(tmp_path, job, without=RunFinished)
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"event": "step", "st')
    assert "its driver is gone; the same command resumes it" in page_of(run)


def test_failed_run_says_why(tmp_path, job):
    failure = AttemptFailed(attempt=1, rank=3, step=3, cause="out of <memory>")
    end = replace(whole_run()[-1], status="failed", reason="restart budget spent")
    page = page_of(written(tmp_path, job, events=[*whole_run()[:9], failure, end]))
    assert (
        "out of &lt;memory&gt;" in page
        and "restart budget spent" in page
        and "not recovered" in page
    )


def test_run_without_a_step_has_a_page(tmp_path, job):
    page = page_of(written(tmp_path, job, events=whole_run()[:2]))
    assert "No step has finished yet." in page and "0 of 4" in page


def test_run_that_begins_anew_has_a_page(tmp_path, job):
    """A restart from step 0, before a checkpoint: the curves are there, and empty."""
    again = replace(whole_run()[1], attempt=2, step=0)
    page = page_of(written(tmp_path, job, events=[*whole_run()[:6], again]))
    assert "0 of 4" in page and "training loss" not in page


def test_job_of_another_version_is_shown_as_it_is(tmp_path, job):
    run = written(tmp_path, job)
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace('"hidden_size"', '"width"'))
    page = page_of(run)
    assert "model.<wbr>width" in page and "Memory by rank" in page


@pytest.mark.parametrize("given", ["demo", "demo/", "demo/metrics.jsonl"])
def test_run_is_found_by_folder_and_file(tmp_path, job, given, monkeypatch):
    run = written(tmp_path, job)
    monkeypatch.chdir(tmp_path)
    assert find_run(given).folder == run


def test_run_is_found_by_its_name_below_the_default_root(tmp_path, job, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run = written(tmp_path / "home" / ".raymega" / "runs", job)
    assert find_run("demo").folder == run
    with pytest.raises(
        ConfigError, match=r"there is no run at 'demmo'; in .* are demo; .*report .*runs/demo"
    ):
        find_run("demmo")


@pytest.mark.parametrize(
    ("given", "fact"),
    [
        (
            "s3://bucket/runs/demo",
            r"there is no .*/remote/s3/bucket/runs/demo/metrics.jsonl; .*on the driver's machine",
        ),
        ("ftp://x", "scheme 'ftp' is unknown"),
        ("", "must name a folder"),
        (".", "'.' holds runs and is none itself: demo; .*report .*/demo"),
    ],
)
def test_place_without_a_run_is_refused_with_a_remedy(tmp_path, job, given, fact, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    written(tmp_path, job)
    with pytest.raises(ConfigError, match=fact):
        find_run(given)


def test_lines_of_something_else_are_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1.0}\n')
    with pytest.raises(ConfigError, match="cannot be read"):
        page_of(tmp_path)


DAMAGED = [
    {"event": "finished"},
    {"event": "finished", "status": "finished", "wall_s": 1.0, "goodput": None},
    {"event": "checkpoint"},
    {"event": "recovered", "lost_steps": 1},
    {"event": "bad_step"},
    {"event": "straggler", "ratio": "high"},
    {"event": "routing_collapsed", "layer": 1},
    {"event": "run", "job": "verify"},
    {"event": "run", "total_steps": "many"},
    {"event": "run", "uri": 5},
    {"event": "step", "step": 10**30, "loss": 1.0},
    {"event": "step", "step": 9, "loss": 10**400},
    {"event": "attempt", "step": 0, "grid": [2]},
]


@pytest.mark.parametrize("line", DAMAGED, ids=str)
def test_a_line_without_what_the_page_needs_is_left_out(line, tmp_path, job, caplog):
    run = written(tmp_path, job)
    whole = page_of(run)
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write(f"{json.dumps(line)}\n")
    assert page_of(run) == whole
    assert "is skipped, it is damaged" in caplog.text


def test_attempts_of_lines_without_a_grid_are_listed(tmp_path):
    lines = [{"event": "run"}, *[{"event": "attempt", "step": 0, "attempt": n} for n in (1, 2)]]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    assert "2 attempts" in page_of(tmp_path)


def test_a_line_to_paste_has_a_folder_with_a_space_in_quotes(tmp_path, job):
    run = written(tmp_path / "my runs", job)
    with pytest.raises(ConfigError) as caught:
        find_run(str(tmp_path / "my runs"))
    command = shlex.split(caught.value.faults[0].remedy)
    assert command == ["raymega", "report", str(run)]
