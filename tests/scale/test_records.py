"""Records of a million steps: what is written does not grow with the world, and stays under two gigabytes."""

import io
import json

import pytest

from raymega.events import AttemptFailed, ExpertLoads, Memory, StepFinished, WorkersStarted
from raymega.storage.rotated_file import MOST_BYTES, RotatedFile, parts_of
from raymega.tracking.history import load_history
from raymega.tracking.jsonl import JsonLinesSink, kind_of_line
from raymega.tracking.queued_sink import interval
from tests.unit.tracking.events import step_finished

WORLDS = (128, 512, 4096, 16384)
MLFLOW_ROW_BYTES = 288
"""Measured bytes of one value in MLflow's sqlite file."""
MOST_RECORD_BYTES = 2 * 10**9


def memory(world_size, step=10):
    ranks = {
        rank: {
            "memory/peak_bytes": 1e10 + rank,
            "memory/allocated_bytes": 1e9,
            "worker/work_s": 0.1,
        }
        for rank in range(world_size)
    }
    return Memory(step=step, metrics={"memory/max_peak_bytes": 1e10}, ranks=ranks)


def line_of(event):
    stream = io.StringIO()
    JsonLinesSink(stream).emit(event)
    return stream.getvalue()


def events_of_ranks(world_size):
    ranks = range(world_size)
    return (
        memory(world_size),
        WorkersStarted(pids=dict.fromkeys(ranks, 4194304), nodes=dict.fromkeys(ranks, 56 * "f")),
        AttemptFailed(
            rank=3, step=7, cause="killed", whereabouts=dict.fromkeys(ranks, "after step 7")
        ),
    )


def test_line_with_values_of_ranks_is_as_long_in_every_world():
    small, *others = [[len(line_of(event)) for event in events_of_ranks(n)] for n in WORLDS]
    for lengths in others:
        assert all(length < 1.1 * before for length, before in zip(lengths, small, strict=True))


def test_line_of_many_ranks_has_the_extremes_and_the_worst():
    line = json.loads(line_of(memory(4096)))
    assert (line["num_ranks"], line["most"]["peak_bytes"]) == (4096, 1e10 + 4095)
    assert line["least"]["peak_bytes"] == 1e10 and line["median"]["work_s"] == 0.1
    assert {str(rank) for rank in range(4088, 4096)} <= line["ranks"].keys()


def test_million_steps_in_mlflow_and_in_lines_are_under_two_gigabytes():
    """By the steps that are recorded, the bytes of a row and the limit of the lines; for DeepSeek-V3's metrics."""
    num_records = sum(1 for n in range(1, 1_000_001) if n % interval(n) == 0)
    mlflow_bytes = num_records * 400 * MLFLOW_ROW_BYTES
    assert mlflow_bytes + MOST_BYTES < MOST_RECORD_BYTES / 2


def write_run(path, number, *, most_bytes):
    """Steps, experts and memory as a run of many ranks writes them."""
    file = RotatedFile(
        path, kind_of=kind_of_line, part_bytes=most_bytes // 16, most_bytes=most_bytes
    )
    sink = JsonLinesSink(file, is_owner=True)
    experts = {layer: [float(layer)] * 16 for layer in range(8)}
    for step in range(1, number + 1):
        sink.emit(
            StepFinished(step=step, metrics={"train/loss": 10.0 / step, "train/step_time_s": 1.0})
        )
        if step % 10 == 0:
            sink.emit(ExpertLoads(step=step, tokens=experts))
            sink.emit(memory(128, step))
    sink.close(0.0)


@pytest.mark.parametrize("number", [2000, 8000])
def test_lines_of_a_longer_run_take_no_more_room_and_give_the_whole_curve(number, tmp_path):
    most_bytes = 600_000
    path = tmp_path / "metrics.jsonl"
    write_run(path, number, most_bytes=most_bytes)
    assert sum(part.stat().st_size for part in parts_of(path)) <= most_bytes
    curve = load_history(path).steps["loss"]
    assert curve.steps[0] == 1 and curve.steps[-1] == number
    gaps = [b - a for a, b in zip(curve.steps, curve.steps[1:], strict=False)]
    assert min(gaps) >= 1 and max(gaps) <= number / 10


def test_reader_of_curves_parses_no_more_than_its_limit(tmp_path):
    """A picture is drawn from evenly spaced lines, however long the run was."""
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        sink = JsonLinesSink(file)
        for step in range(1, 3001):
            sink.emit(step_finished(step))
    whole, few = load_history(path), load_history(path, most_bytes=path.stat().st_size // 10)
    assert len(whole.steps["loss"].steps) == 3000
    assert 250 <= len(few.steps["loss"].steps) <= 300
    assert few.step >= 2989
