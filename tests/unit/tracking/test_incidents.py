"""One page for each recovery, told of before the run's end."""

from raymega.events import (
    ArtefactWritten,
    AttemptFailed,
    AttemptStarted,
    BadStep,
    Recovered,
    RunFinished,
    WorkersStarted,
)
from raymega.tracking.incidents import IncidentsSink
from tests.support.fakes import MemorySink
from tests.unit.tracking.events import run_started


def attempt(number, tp):
    return AttemptStarted(attempt=number, step=0, grid={"tp": tp, "pp": 1}, reason="")


def failure(number, cause="rank 1 hung: its process is stopped"):
    return AttemptFailed(
        attempt=number, rank=1, step=7, cause=cause, decision="restart 1 of at most 3",
        whereabouts={0: "after step 7 it waits for all_reduce", 1: "after step 7"},
    )  # fmt: skip


def tell(folder, *events):
    watcher = MemorySink()
    sink = IncidentsSink(folder, clock=lambda: 0.0, watcher=watcher)
    for event in (run_started(), *events):
        sink.emit(event)
    return [event.path for event in watcher.of(ArtefactWritten)]


RECOVERED = Recovered(
    attempt=3, rank=1, step=7, restored_step=6, lost_steps=1, detection_s=2.5, recovery_s=1.25,
    source="memory", phases={"abort": 0.25, "steps": 1.0},
)  # fmt: skip
BAD_STEP = BadStep(attempt=1, step=5, kind="nan", fact="loss=nan", where="", action="left out")


def test_page_says_what_failed_who_stood_where_what_was_decided_and_what_it_took(tmp_path):
    started = WorkersStarted(attempt=1, pids={0: 1, 1: 2}, nodes={0: "a" * 40, 1: "b" * 40})
    again = failure(2, "rank 0 died: gone|away")
    events = (attempt(1, 2), started, BAD_STEP, failure(1), attempt(2, 2), again, attempt(3, 1))
    (path,) = tell(tmp_path / "incidents", *events, RECOVERED)
    text = (tmp_path / "incidents" / "incident-001.md").read_text()
    assert path.endswith("incident-001.md")
    for part in (
        "- Cause: rank 1 hung: its process is stopped", "1970-01-01T00:00:00.000+00:00",
        "- Decision: restart 1 of at most 3", "in attempt 2: rank 0 died: gone/away",
        "Grid before: tp=2; after: one rank", "Steps lost: 1; attempt 3 resumed from step 6",
        "State from: snapshot in memory of other nodes", "| detect | 2.500 |", "| abort | 0.250 |",
        "| total | 3.750 |", "| 0 | aaaaaaaaaaaa | after step 7 it waits for all_reduce |",
        "| 1 (failed first) | bbbbbbbbbbbb |", "- step 5: loss=nan; left out",
    ):  # fmt: skip
        assert part in text, part


def test_run_that_ends_in_an_incident_leaves_a_page_and_numbers_go_on(tmp_path):
    end = RunFinished(
        status="failed", step=0, checkpoint_uri="", goodput=0.0, wall_s=1.0, reason="restarts are spent"
    )  # fmt: skip
    tell(tmp_path, attempt(1, 2), failure(1), RECOVERED)
    (path,) = tell(tmp_path, attempt(4, 2), failure(4), end)
    assert path.endswith("incident-002.md")
    assert (
        "the run failed at step 0: restarts are spent" in (tmp_path / "incident-002.md").read_text()
    )


def test_calm_run_leaves_no_folder(tmp_path):
    assert tell(tmp_path / "none", attempt(1, 2)) == []
    assert not (tmp_path / "none").exists()
