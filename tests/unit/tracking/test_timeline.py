import json

import pytest

from raymega.tracking.timeline import measured_bubble, write_trace
from tests.unit.tracking.events import TIMELINE


def test_measured_bubble_is_idle_over_busy_time():
    # span 6 s on 2 ranks, busy 1 + 2 + 1 s; the wait of rank 1 is not work
    assert measured_bubble(TIMELINE.events) == pytest.approx((12 - 4) / 4)


def test_measured_bubble_equals_the_formula_of_a_flushed_pipeline():
    pp, num_micro_batches = 4, 6
    rows = {
        rank: tuple(("forward", m, 0, float(rank + m), rank + m + 1.0) for m in range(6))
        for rank in range(pp)
    }
    assert measured_bubble(rows) == pytest.approx((pp - 1) / num_micro_batches)


def test_measured_bubble_is_zero_when_nothing_was_done():
    assert measured_bubble({0: ()}) == 0.0


def test_trace_has_a_named_row_a_rank_and_microseconds(tmp_path):
    path = tmp_path / "trace.json"
    write_trace(TIMELINE.events, path)
    events = json.loads(path.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = [e for e in events if e["ph"] == "X"]
    assert rows == {0: "rank 0", 1: "rank 1"}
    assert len(spans) == 4
    assert (spans[1]["ts"], spans[1]["dur"]) == (4e6, 2e6)
