"""Charts: curves where the values are, labels that can be read, any number of points."""

import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from math import sin

import pytest

from raymega.drawing.chart import MOST_POINTS, WIDTH_PX, Chart, Curve, Mark, draw_chart
from raymega.drawing.svg import log_ticks, short, stack, ticks

SVG = "{http://www.w3.org/2000/svg}"


def curve(ys, label="training", first=1):
    return Curve(label=label, xs=range(first, first + len(ys)), ys=ys)


def drawn(**values):
    chart = Chart(**{"title": "Loss", "curves": [curve([4.0, 3.0, 2.0, 1.0])]} | values)
    root = ET.fromstring(draw_chart(chart))
    return root, [text.text for text in root.iter(f"{SVG}text")]


def points_of(root, kind="curve"):
    paths = [path.get("d") for path in root.iter(f"{SVG}path") if path.get("class") == kind]
    return [
        [tuple(map(float, pair.split())) for pair in re.split("[ML]", path)[1:]] for path in paths
    ]


def test_points_are_where_their_values_are():
    root, texts = drawn()
    (points,) = points_of(root)
    xs, ys = zip(*points, strict=True)
    assert [b - a for a, b in pairwise(xs)] == pytest.approx([xs[1] - xs[0]] * 3, abs=0.1)
    assert ys == tuple(sorted(ys)), "a falling loss falls on the screen"
    assert {"Loss", "step", "1"} <= set(texts)


def test_nothing_is_drawn_outside_the_picture():
    marks = [Mark(label=f"attempt {n}", at=4.0, since=2.0) for n in (2, 3, 4)]
    root, _ = drawn(marks=marks, levels={"a level": 9.0}, below=curve([0.1, 0.2, 0.1, 0.0]))
    width, height = map(float, root.get("viewBox").split()[2:])
    for element in root.iter(f"{SVG}text"):
        assert 0 <= float(element.get("x")) <= width and 0 <= float(element.get("y")) <= height
    for line in points_of(root):
        assert all(0 <= x <= width and 0 <= y <= height for x, y in line)


def test_restarts_at_one_place_are_one_band_and_one_label():
    marks = [Mark(label="attempt 2", at=3.0, since=2.0), Mark(label="attempt 3", at=3.0, since=2.0)]
    root, texts = drawn(marks=marks, curves=[curve([2.0, 1.0, 0.5]), curve([2.0, 1.5, 1.0], "b")])
    bands = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "lost"]
    assert len(bands) == 2, "one in the legend, one over the steps"
    assert "attempt 2 to 3" in texts and "steps done again" in texts


def test_marks_without_lost_steps_have_no_band():
    root, texts = drawn(marks=[Mark(label="kill-worker", at=3.0, since=3.0)])
    assert "kill-worker" in texts and "steps done again" not in texts
    assert not [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "lost"]


def test_tokens_stand_below_the_steps_at_which_they_were_read():
    _, texts = drawn(tokens=curve([1000.0, 2000.0, 3000.0, 4000.0], "tokens"))
    assert texts.index("2k") > texts.index("tokens")
    assert {"1k", "2k", "3k", "4k"} <= set(texts)


def test_many_points_are_a_mean_over_the_band_of_their_extremes():
    values = [5 + sin(n) for n in range(100_000)]
    picture = draw_chart(Chart(title="Loss", curves=[curve(values)]))
    root = ET.fromstring(picture)
    (mean,) = points_of(root)
    assert len(mean) <= MOST_POINTS + 2
    assert len(picture) < 40_000
    assert [path for path in root.iter(f"{SVG}path") if path.get("class") == "spread"]


def test_last_values_of_near_curves_do_not_overlap():
    root, _ = drawn(curves=[curve([2.0, 1.0]), curve([2.0, 1.001], "validation")])
    ends = [
        text for text in root.iter(f"{SVG}text") if (text.get("style") or "").startswith("fill")
    ]
    first, second = (float(text.get("y")) for text in ends)
    assert abs(first - second) >= 12
    assert ends[0].get("style") != ends[1].get("style")


@pytest.mark.parametrize("ys", [[], [3.0], [2.0, 2.0], [0.0, 0.0]])
def test_few_or_equal_values_are_drawn(ys):
    for is_log in (False, True):
        ET.fromstring(draw_chart(Chart(title="x", curves=[curve(ys)], is_log=is_log)))


def test_log_axis_leaves_out_what_has_no_logarithm():
    root, _ = drawn(curves=[curve([0.0, 1.0, 100.0])], is_log=True)
    (points,) = points_of(root)
    assert len(points) == 2


def test_ticks_are_round_and_few():
    assert [*ticks(0.0, 10.0, 5)] == [0, 2, 4, 6, 8, 10]
    assert [*log_ticks(1.0, 1000.0)] == [1, 10, 100, 1000]
    assert len([*log_ticks(0.54, 1.4)]) > 2


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234, "1.23k"), (2.5e9, "2.5G"), (0.5, "0.5"), (3e-4, "3e-4"), (0, "0"), (float("nan"), "-")],
)
def test_numbers_are_short(value, text):
    assert short(value) == text


def test_stacked_pictures_lie_below_each_other_and_have_their_theme():
    picture = stack([draw_chart(Chart(title=name, curves=[curve([1.0, 2.0])])) for name in "ab"])
    root = ET.fromstring(picture)
    first, second = root.findall(f"{SVG}svg")
    assert float(second.get("y")) >= float(first.get("height"))
    assert float(root.get("width")) == WIDTH_PX
    assert "prefers-color-scheme: dark" in picture
