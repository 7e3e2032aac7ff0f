"""The merged trace is what Chrome and Perfetto read."""

import json

from raymega.schedule.trace import merge_trace


def test_trace_has_a_named_row_a_rank_and_a_span_an_instruction():
    rows = {
        1: (("recv_forward", 0, 0, 0.0, 0.5), ("forward", 0, 0, 0.5, 0.75)),
        0: (("forward", 0, 0, 0.0, 0.5),),
    }
    trace = json.loads(json.dumps(merge_trace(rows)))
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"]
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert names == ["rank 0", "rank 1"]
    assert [(e["tid"], e["name"], e["ts"], e["dur"]) for e in spans] == [
        (0, "forward 0", 0.0, 5e5),
        (1, "recv_forward 0", 0.0, 5e5),
        (1, "forward 0", 5e5, 2.5e5),
    ]
    assert spans[2]["cat"] == "forward" and spans[2]["args"] == {"micro_batch": 0, "chunk": 0}


def test_collectives_have_rows_of_their_own_and_waits_lie_among_the_work():
    rows = {0: (("reduce", 3, 0, 0.0, 0.5), ("wait_reduce", 3, 0, 0.25, 0.5)), 1: ()}
    events = merge_trace(rows)["traceEvents"]
    names = [e["args"]["name"] for e in events if e["ph"] == "M"]
    reduce, wait = (e for e in events if e["ph"] == "X")
    assert names == ["rank 0", "rank 1", "rank 0, gradients and weights"]
    assert (reduce["pid"], wait["pid"]) == (1, 0)
    assert reduce["args"] == wait["args"] == {"bucket": 3, "chunk": 0}
