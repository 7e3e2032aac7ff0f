"""The merged trace is what Chrome and Perfetto read."""

import json

from raymega.schedule.order import Sizes
from raymega.schedule.recording import Recording
from raymega.schedule.simulate import Durations, simulate
from raymega.schedule.table import make_schedule
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


def test_arrows_lead_from_the_span_of_a_send_to_that_of_its_receive():
    program = make_schedule("interleaved", Sizes(pp=2, num_micro_batches=3, chunks=2))
    rows = dict(enumerate(simulate(program, Durations(transfer=0.3, handling=0.1)).events))
    recording = Recording(rows=rows, pipelines=((0, 1),), placement=program.placement)
    transfers = list(recording.transfers())
    events = merge_trace(rows, transfers)["traceEvents"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) == len(transfers) == 18
    for number, start in starts.items():
        assert start["ts"] <= ends[number]["ts"] and start["tid"] != ends[number]["tid"]
        for arrow, prefix in ((start, "send"), (ends[number], "recv")):
            (span,) = [
                e for e in events
                if e["ph"] == "X" and e["tid"] == arrow["tid"] and e["cat"].startswith(prefix)
                and e["ts"] <= arrow["ts"] < e["ts"] + e["dur"]
            ]  # fmt: skip
            assert f"message {span['args']['micro_batch']}" == arrow["name"]


def test_transfers_between_context_parallel_ranks_have_rows_of_their_own():
    row = [
        ("forward", 0, 0, 0.0, 2.0),
        ("cp_pass", 5, 0, 0.5, 1.5),
        ("wait_cp_pass", 5, 0, 1.0, 1.5),
    ]
    names, spans = _split(merge_trace({1: row}))
    assert [name["args"]["name"] for name in names][1:] == [
        "rank 1, between context-parallel ranks"
    ]
    assert [span["pid"] for span in spans] == [0, 2, 0]
    assert spans[1]["args"] == spans[2]["args"] == {"transfer": 5, "chunk": 0}


def test_transfers_between_experts_have_rows_of_their_own():
    row = [("forward", 0, 0, 0.0, 2.0), ("ep_exchange", 3, 0, 0.5, 1.5)]
    names, spans = _split(merge_trace({0: row}))
    assert names[1]["args"]["name"] == "rank 0, between experts"
    assert spans[1]["pid"] == 3 and spans[1]["args"] == {"transfer": 3, "chunk": 0}


def _split(trace):
    events = trace["traceEvents"]
    return [e for e in events if e["ph"] == "M"], [e for e in events if e["ph"] == "X"]
