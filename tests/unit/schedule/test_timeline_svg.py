"""The picture: blocks where the events are, waits visible, numbers, axis and legend."""

import xml.etree.ElementTree as ET

import pytest

from raymega.schedule.order import Sizes
from raymega.schedule.simulate import Durations, simulate
from raymega.schedule.table import make_schedule
from raymega.schedule.text import timetable
from raymega.schedule.timeline_svg import draw_svg

SVG = "{http://www.w3.org/2000/svg}"


def _simulated():
    program = make_schedule("1f1b", Sizes(pp=2, num_micro_batches=3))
    events = simulate(program, Durations()).events
    return {f"rank {i}": row for i, row in enumerate(events)}


def _draw(rows, **kwargs):
    root = ET.fromstring(draw_svg(rows, title="a <b> & c", **kwargs))
    return root, [text.text for text in root.iter(f"{SVG}text")]


def _rects(root, kind):
    return [rect.attrib for rect in root.iter(f"{SVG}rect") if rect.get("class") == kind]


def _numbers(root):
    return [
        text for text in root.iter(f"{SVG}text") if (text.get("style") or "").startswith("fill")
    ]


def test_every_forward_and_backward_is_a_block_in_proportion():
    root, texts = _draw(_simulated())
    blocks = _rects(root, "block")
    assert len(blocks) == 2 * 3 * 2
    widths = sorted({round(float(block["width"])) for block in blocks})
    assert widths[1] == pytest.approx(2 * widths[0], abs=1)
    assert [text for text in texts if text in ("0", "1", "2")].count("1") >= 4


def test_waits_are_drawn_and_sends_are_not():
    root, _ = _draw(_simulated())
    waits = _rects(root, "wait")
    # Stage 1 waits for micro-batch 0; stage 0 for the gradients of 0 and of the last.
    assert len(waits) == 3
    assert len({wait["y"] for wait in waits}) == 2


def test_rows_lie_inside_the_paper_and_do_not_overlap():
    root, _ = _draw(_simulated())
    rows = _rects(root, "lane")
    tops = [float(row["y"]) for row in rows]
    assert tops[1] >= tops[0] + float(rows[0]["height"])
    right = max(float(row["x"]) + float(row["width"]) for row in rows)
    assert right <= float(root.get("width"))
    blocks = _rects(root, "block")
    ends = [float(block["x"]) + float(block["width"]) for block in blocks]
    assert max(ends) == pytest.approx(right, abs=0.1)


def test_title_is_escaped_and_legend_gives_the_bubble():
    _, texts = _draw(_simulated())
    assert texts[0] == "a <b> & c"
    assert "bubble: 0.333 of ideal time, 25.0% of all time" in texts
    assert {"forward", "backward", "waiting", "rank 0", "rank 1", "time (units)"} <= set(texts)


def test_recorded_seconds_look_the_same_in_milliseconds_from_any_start():
    shifted = {
        label: [(name, mb, chunk, 5 + start / 1e3, 5 + end / 1e3) for name, mb, chunk, start, end in r]
        for label, r in _simulated().items()
    }  # fmt: skip
    root, texts = _draw(shifted, time_unit="ms", scale=1e3)
    simulated, _ = _draw(_simulated())
    assert "time (ms)" in texts

    def geometry(picture):
        return [[float(block[k]) for k in ("x", "width")] for block in _rects(picture, "block")]

    for mine, wanted in zip(geometry(root), geometry(simulated), strict=True):
        assert mine == pytest.approx(wanted, abs=0.05)


def test_nothing_recorded_is_an_empty_picture():
    root, _ = _draw({"rank 0": []})
    assert _rects(root, "block") == []


def test_timetable_is_cut_and_aligned_when_it_is_long():
    program = make_schedule("gpipe", Sizes(pp=11, num_micro_batches=12))
    lines = timetable(program, max_units=5).splitlines()
    assert lines[0] == "rank  0  F0  F1  F2  F3  F4  ..."
    assert lines[1] == "rank  1  .   F0  F1  F2  F3  ..."
    assert lines[10].startswith("rank 10  .")


def test_chunks_and_parts_of_a_backward_have_colours_of_their_own():
    program = make_schedule("zb_v", Sizes(pp=2, num_micro_batches=4, chunks=2))
    events = simulate(program, Durations()).events
    root, texts = _draw({f"rank {i}": row for i, row in enumerate(events)})
    assert len({block["fill"] for block in _rects(root, "block")}) == 3 * 2
    assert {"backward, input part", "weight part"} <= set(texts) and "backward" not in texts


def test_collectives_are_strips_and_their_waits_are_hatched():
    rows = {"rank 0": [
        ("forward", 0, 0, 0.0, 1.0), ("backward", 0, 0, 1.0, 3.0),
        ("reduce", 0, 0, 2.0, 4.0), ("wait_reduce", 0, 0, 3.0, 4.0),
    ]}  # fmt: skip
    root, texts = _draw(rows)
    (strip,), (wait,) = _rects(root, "strip"), _rects(root, "wait")
    assert float(strip["width"]) == pytest.approx(2 * float(wait["width"]), abs=0.1)
    assert any("50% hidden" in text for text in texts)


def test_legend_has_a_swatch_for_each_kind_of_strip_and_for_later_chunks():
    rows = {"rank 0": [
        ("forward", 0, 0, 0.0, 1.0), ("backward", 0, 1, 1.0, 3.0),
        *((name, 0, 0, 2.0, 4.0) for name in ("reduce", "ep_exchange", "cp_pass")),
    ]}  # fmt: skip
    root, texts = _draw(rows)
    said = [text for text in texts if text.startswith("strip: ")]
    assert [text.split(",")[0] for text in said] == [
        "strip: gradients and weights", "strip: between context-parallel ranks", "strip: between experts",
    ]  # fmt: skip
    assert any(text.startswith("paler: ") for text in texts)
    strips = _rects(root, "strip")
    assert len({strip["fill"] for strip in strips}) == len({strip["y"] for strip in strips}) == 3
    width = float(root.get("width"))
    assert all(float(text.get("x")) + 6 * len(text.text) < width for text in root.iter(f"{SVG}text")
               if text.text in said)  # fmt: skip


def test_no_number_is_cut_by_a_wait_or_by_its_block():
    rows = {"rank 0": [
        ("forward", 7, 0, 0.0, 10.0), ("wait_reduce", 0, 0, 1.0, 7.0), ("forward", 88, 0, 10.0, 10.01),
        ("forward", 123, 0, 11.0, 11.5),
    ]}  # fmt: skip
    root, _ = _draw(rows, width_px=300)
    numbers = {number.text: number for number in _numbers(root)}
    wait = _rects(root, "wait")[0]
    assert float(numbers["7"].get("x")) > float(wait["x"]) + float(wait["width"])
    assert "88" not in numbers, "a sliver has no number"
    size = float(numbers["123"].get("style").rpartition(":")[2].removesuffix("px"))
    block = next(b for b in _rects(root, "block") if b["width"] == f"{0.5 / 11.5 * 300:.2f}")
    assert 0.55 * 3 * size <= float(block["width"])


def test_width_is_what_is_asked_for():
    root, _ = _draw(_simulated(), width_px=500)
    (first, _) = _rects(root, "lane")
    assert float(first["width"]) == 500


def test_note_stands_behind_the_bubble():
    _, texts = _draw(_simulated(), note="simulated: 0.3")
    assert "bubble: 0.333 of ideal time, 25.0% of all time; simulated: 0.3" in texts


def test_width_follows_the_number_of_blocks_and_not_the_unit_of_time():
    """The paper is as wide as the blocks need, in seconds or in milliseconds."""
    rows = {
        label: [(*event[:3], event[3] * 1e3, event[4] * 1e3, *event[5:]) for event in row]
        for label, row in _simulated().items()
    }
    (seconds, _), (milliseconds, _) = _draw(_simulated()), _draw(rows)
    assert float(milliseconds.get("width")) == pytest.approx(float(seconds.get("width")))
