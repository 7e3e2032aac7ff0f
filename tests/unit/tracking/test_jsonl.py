import io
import json
import math
import re
from pathlib import Path

from raymega import events
from raymega.events import StepFinished
from raymega.tracking.jsonl import JsonLinesSink, open_jsonl
from tests.unit.tracking.events import GRID, attempt_started, step_finished, whole_run


def lines_of(events):
    stream = io.StringIO()
    sink = JsonLinesSink(stream)
    for event in events:
        sink.emit(event)
    sink.close(0.0)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_step_line_has_the_promised_keys_and_every_bit():
    loss = 0.1 + 0.2
    line = lines_of([attempt_started(2), step_finished(3, attempt=2, loss=loss)])[-1]
    promised = {"event", "step", "loss", "grad_norm", "lr", "tokens", "step_time_s", "grid"}
    assert promised | {"attempt"} <= set(line)
    assert line["event"] == "step"
    assert line["loss"] == loss
    assert (line["step"], line["attempt"], line["grid"]) == (3, 2, GRID)


def test_lines_tell_the_whole_run_in_order():
    lines = lines_of(whole_run())
    names = [line["event"] for line in lines]
    assert names[:3] == ["run", "attempt", "workers"]
    assert names[-6:] == ["memory", "straggler", "samples", "checkpoint", "artefact", "finished"]
    tasks = lines[names.index("tasks")]
    assert (tasks["step"], tasks["task/lambada/accuracy"]) == (2, 0.25)
    assert {"evaluation", "save_failed", "failure", "recovered", "bad_step"} <= set(names)


def test_workers_line_has_pids_by_rank():
    line = lines_of(whole_run())[2]
    assert line["pids"] == {"0": 100, "1": 101}


def test_last_line_has_run_id_step_checkpoint_and_goodput():
    line = lines_of(whole_run())[-1]
    assert (line["event"], line["run_id"], line["step"]) == ("finished", "r1", 4)
    assert line["checkpoint_uri"].endswith("step-00000004")
    assert line["goodput"] == 0.93
    assert line["status"] == "finished"


def test_number_that_is_not_finite_becomes_null():
    event = StepFinished(attempt=1, step=1, metrics={"train/loss": math.nan, "train/lr": math.inf})
    line = lines_of([event])[0]
    assert line["loss"] is None
    assert line["lr"] is None


def test_timeline_line_has_the_bubble_and_not_the_events():
    line = next(line for line in lines_of(whole_run()) if line["event"] == "timeline")
    hidden = {
        "exposed_s": 0.5,
        "hidden_share": 0.5,
        "cp_exposed_s": 0.125,
        "cp_hidden_share": 0.75,
        "experts_exposed_s": 0.125,
        "experts_hidden_share": 0.5,
        "update_exposed_s": 0.125,
    }
    assert line == {
        "event": "timeline",
        "step": 4,
        "attempt": 2,
        "bubble": 2.0,
        "simulated_bubble": 0.5,
        **hidden,
    }


def test_file_goes_on_where_an_earlier_driver_stopped(tmp_path):
    path = tmp_path / "logs" / "metrics.jsonl"
    for step in (1, 2):
        sink = open_jsonl(path)
        sink.emit(step_finished(step))
        sink.close(0.0)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_closing_leaves_a_given_stream_open():
    stream = io.StringIO()
    JsonLinesSink(stream).close(0.0)
    assert not stream.closed


def test_docs_list_every_event_under_its_name_in_json():
    page = (Path(__file__).parents[3] / "docs" / "watching.md").read_text()
    table = page.split("## Events")[1].split("\n## ")[0]
    rows = {kind: name for name, kind in re.findall(r"^\| `(\w+)` \| `(\w+)` \|", table, re.M)}
    kinds = {name: kind for name, kind in vars(events).items() if hasattr(kind, "json_name")}
    assert rows == {name: kind.json_name for name, kind in kinds.items()}
