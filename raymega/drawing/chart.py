"""Line charts over steps: curves, reference levels, restarts, a second axis in tokens.

Curves of any length are drawn: many points become a mean line over the band of their extremes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import log10

from raymega.drawing.style import SERIES
from raymega.drawing.svg import (
    CHARACTER_PX,
    line_path,
    log_ticks,
    picture,
    rect,
    short,
    swatches,
    text,
    ticks,
)

# All in pixels of the drawing; a page scales it, and a file of its own is ALONE times as large.
ALONE = 1.8
WIDTH_PX, LEFT_PX, RIGHT_PX = 460, 48, 50
HEAD_PX, PLOT_PX, BELOW_PX, FOOT_PX, TOKENS_PX = 26, 190, 56, 24, 15
BELOW_LABEL_PX, END_LABEL_PX = 16, 13
LABEL_ROOM_PX = 66
"""Least distance of two labels of restarts; nearer ones share a label."""
MOST_POINTS = 240
"""Most points of a drawn line."""
MIN_POINTS_TO_SMOOTH = 60
NUM_X_TICKS, NUM_Y_TICKS = 6, 5
LEAST_TICK_PX = 15
MOST_MARKS = 40
"""Most points of a curve that are marked by dots."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A line: ``ys`` at the steps ``xs``, which rise."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A labelled line at a step, such as ``attempt 2``; steps from ``since`` on were done again."""

    label: str
    at: float
    since: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Content of a chart.

    Attributes:
        title: Heading, with the unit.
        curves: Lines, each in a colour of its own.
        marks: Restarts of the run, or other moments, in the order of their steps.
        levels: Heights of horizontal lines, by label.
        tokens: Tokens that the run has read by each step, for a second row of numbers below the axis.
        below: Curve in a narrow panel under the others, such as the learning rate.
        is_log: Whether the heights are logarithmic; values of 0 and less are left out.
        starts_at_zero: Whether the axis begins at 0.
    """

    title: str
    curves: Sequence[Curve]
    marks: Sequence[Mark] = ()
    levels: Mapping[str, float] = field(default_factory=dict)
    tokens: Curve | None = None
    below: Curve | None = None
    is_log: bool = False
    starts_at_zero: bool = False


def draw_chart(chart: Chart, *, alone: bool = False) -> str:
    """Return the chart as an SVG document; with ``alone`` it is a file of its own."""
    curves = [_positive(curve) if chart.is_log else curve for curve in chart.curves]
    # legend and labels above the plot, the narrow panel and the axis below it
    named = [
        *((curve.label, _colour(at + 1)) for at, curve in enumerate(curves) if len(curves) > 1),
        *([("steps done again", ".lost")] if len(curves) > 1 and _has_bands(chart.marks) else []),
    ]
    legend, legend_px = swatches(
        named, left=LEFT_PX, top=HEAD_PX + 2, right=WIDTH_PX - 8
    )  # broken into lines where there are many curves
    top = HEAD_PX + legend_px + (14 if chart.marks else 6)
    frame = _make_frame(chart, curves, top)
    bottom = top + PLOT_PX + (BELOW_PX + 10 if chart.below else 0)
    parts = [
        text(8, 17, chart.title, kind="heading"),
        *legend,
        *_grid(frame),
        *_levels(frame, chart.levels),
        *_marks(frame, chart.marks, bottom),
        *(part for at, curve in enumerate(curves) for part in _line(frame, curve, at + 1)),
        *_last_values(frame, curves),
        *(_below(frame, chart.below, bottom) if chart.below else ()),
        *_steps(frame, bottom, chart.tokens),
    ]
    height = bottom + FOOT_PX + (TOKENS_PX if chart.tokens else 0)
    return picture(parts, width=WIDTH_PX, height=height, kind="chart", alone=alone, enlarged=ALONE)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """Positions of steps and values in the picture."""

    first: float
    last: float
    low: float
    high: float
    top: float
    is_log: bool

    def x(self, step: float) -> float:
        """Return the horizontal position of a step."""
        room = WIDTH_PX - LEFT_PX - RIGHT_PX
        return LEFT_PX + (step - self.first) / (self.last - self.first) * room

    def y(self, value: float) -> float:
        """Return the vertical position of a value."""
        share = (self._at(value) - self._at(self.low)) / (self._at(self.high) - self._at(self.low))
        return self.top + PLOT_PX * (1 - share)

    def _at(self, value: float) -> float:
        return log10(value) if self.is_log else value


def _make_frame(chart: Chart, curves: Sequence[Curve], top: float) -> _Frame:
    steps = [x for curve in curves for x in (*curve.xs[:1], *curve.xs[-1:])] or [0.0]
    values = [y for curve in curves for y in curve.ys] or [1.0]
    values += [level for level in chart.levels.values() if level > 0 or not chart.is_log]
    low, high = min(values), max(values)
    # room above and below, so that no line lies on the frame
    if chart.is_log:
        low, high = low / 1.2, high * 1.2
    else:
        low = 0.0 if chart.starts_at_zero else low
        room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        low, high = (low if chart.starts_at_zero else low - room), high + room
    first, last = min(steps), max(steps)
    if first == last:
        first, last = first - 1, last + 1
    return _Frame(first=first, last=last, low=low, high=high, top=top, is_log=chart.is_log)


def _grid(frame: _Frame) -> Iterator[str]:
    marks = (
        log_ticks(frame.low, frame.high)
        if frame.is_log
        else ticks(frame.low, frame.high, NUM_Y_TICKS)
    )
    last = float("inf")
    for value in marks:
        y = frame.y(value)
        if last - y < LEAST_TICK_PX:
            continue
        last = y
        yield f'<path class="tick" d="M{LEFT_PX} {y:.1f}H{WIDTH_PX - RIGHT_PX}"/>'
        yield text(LEFT_PX - 5, y + 4, short(value), kind="muted small", anchor="end")


def _steps(frame: _Frame, bottom: float, tokens: Curve | None) -> Iterator[str]:
    """Yield the axis of steps, and below it the tokens that were read by each."""
    yield f'<path class="axis" d="M{LEFT_PX} {bottom:.1f}H{WIDTH_PX - RIGHT_PX}"/>'
    yield text(LEFT_PX - 5, bottom + 15, "step", kind="muted small", anchor="end")
    if tokens is not None:
        yield text(LEFT_PX - 5, bottom + 30, "tokens", kind="muted small", anchor="end")
    for step in ticks(frame.first, frame.last, NUM_X_TICKS):
        if step != round(step):
            continue
        x = frame.x(step)
        yield f'<path class="axis" d="M{x:.1f} {bottom:.1f}v3"/>'
        yield text(x, bottom + 15, short(step), kind="muted small", anchor="middle")
        if tokens is not None:
            yield text(
                x, bottom + 30, short(_value_at(tokens, step)), kind="muted small", anchor="middle"
            )


def _levels(frame: _Frame, levels: Mapping[str, float]) -> Iterator[str]:
    for label, level in levels.items():
        y = frame.y(level)
        yield f'<path class="level" d="M{LEFT_PX} {y:.1f}H{WIDTH_PX - RIGHT_PX}"/>'
        yield text(
            WIDTH_PX - RIGHT_PX - 4, y - 5, f"{label} {short(level)}", kind="muted small",
            anchor="end",
        )  # fmt: skip


def _marks(frame: _Frame, marks: Sequence[Mark], bottom: float) -> Iterator[str]:
    """Yield a band over the steps that were done again, a line at each mark, and its label."""
    # Bands over the same steps are one band: two would be a colour that the legend lacks.
    for low, high in _merged((each.since, each.at) for each in marks if each.since < each.at):
        x = frame.x(max(low, frame.first))
        width = max(frame.x(min(high, frame.last)) - x, 1.0)
        yield rect(x, frame.top, width, bottom - frame.top, ".lost")
    # marks that are too near each other share a label
    groups: list[list[Mark]] = []
    for each in sorted(marks, key=lambda mark: mark.at):
        x = frame.x(min(max(each.at, frame.first), frame.last))
        yield f'<path class="cut" d="M{x:.1f} {frame.top:.1f}V{bottom:.1f}"/>'
        if groups and x - frame.x(groups[-1][0].at) < LABEL_ROOM_PX:
            groups[-1].append(each)
        else:
            groups.append([each])
    for group in groups:
        label = _joined([each.label for each in group])
        x = frame.x(max(group[0].at, frame.first))
        is_right = x + CHARACTER_PX * len(label) > WIDTH_PX - 4
        yield text(x, frame.top - 3, label, kind="alarm small", anchor="end" if is_right else "")


def _joined(labels: Sequence[str]) -> str:
    """Return labels as one: ``attempt 2 to 4`` where they differ in their last word only."""
    heads = {label.rpartition(" ")[0] for label in labels}
    if len(labels) > 1 and len(heads) == 1 and "" not in heads:
        return f"{labels[0]} to {labels[-1].rpartition(' ')[2]}"
    return ", ".join(dict.fromkeys(labels))


def _has_bands(marks: Sequence[Mark]) -> bool:
    return any(each.since < each.at for each in marks)


def _line(frame: _Frame, curve: Curve, number: int) -> Iterator[str]:
    """Yield the elements of a curve: its raw values pale, its mean in front."""
    if not curve.xs:
        return
    colour = _colour(number)
    points = [(frame.x(x), frame.y(y)) for x, y in zip(curve.xs, curve.ys, strict=True)]
    # few points are dots too, each with its value where the pointer rests
    if len(points) <= MOST_MARKS:
        for (x, y), step, value in zip(points, curve.xs, curve.ys, strict=True):
            yield (
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}">'
                f"<title>step {step:g}: {value:.5g}</title></circle>"
            )
    if len(points) >= MIN_POINTS_TO_SMOOTH:
        # Pale behind the mean: all values, or of very many the band from the least to the largest.
        if len(points) > MOST_POINTS:
            yield f'<path class="spread" fill="{colour}" d="{_band(points)}Z"/>'
        else:
            yield f'<path class="raw" stroke="{colour}" d="{line_path(points)}"/>'
        points = list(_smooth(points))
    yield f'<path class="curve" stroke="{colour}" d="{line_path(points)}"/>'


def _last_values(frame: _Frame, curves: Sequence[Curve]) -> Iterator[str]:
    """Yield the last value of each curve beside its end, pushed apart where they would overlap."""
    ends = sorted(
        (frame.y(curve.ys[-1]), frame.x(curve.xs[-1]), curve.ys[-1], _colour(at + 1))
        for at, curve in enumerate(curves)
        if curve.ys
    )
    lowest = 0.0
    for wanted, x, value, colour in ends:
        lowest = max(wanted + 4, lowest + END_LABEL_PX)
        yield text(x + 5, lowest, short(value), kind="small", style=f"fill:{colour}")


def _colour(number: int) -> str:
    """Return the colour of the curve ``number``, from 1."""
    return f"var(--s{(number - 1) % SERIES + 1})"


def _below(frame: _Frame, curve: Curve, bottom: float) -> Iterator[str]:
    """Yield the narrow panel, whose curve begins at 0 and has its largest value as a number."""
    high = max((y for y in curve.ys), default=0.0) or 1.0
    panel = _Frame(
        first=frame.first, last=frame.last, low=0.0, high=high * PLOT_PX / (BELOW_PX - BELOW_LABEL_PX),
        top=bottom - PLOT_PX, is_log=False,
    )  # fmt: skip
    top = bottom - BELOW_PX
    yield f'<path class="tick" d="M{LEFT_PX} {top:.1f}H{WIDTH_PX - RIGHT_PX}"/>'
    yield text(LEFT_PX + 4, top + 12, f"{curve.label}, at most {short(high)}", kind="muted small")
    points = [(panel.x(x), panel.y(y)) for x, y in zip(curve.xs, curve.ys, strict=True)]
    points = list(_smooth(points)) if len(points) > MOST_POINTS else points
    yield f'<path class="curve" stroke="var(--s3)" d="{line_path(points)}"/>'


def _smooth(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield means over windows of about 2 % of the points, at most MOST_POINTS of them."""
    half = max(1, len(points) // 100)
    stride = max(1, len(points) // MOST_POINTS)
    for at in (*range(0, len(points) - 1, stride), len(points) - 1):
        window = points[max(0, at - half) : at + half + 1]
        yield points[at][0], sum(y for _, y in window) / len(window)


def _band(points: Sequence[tuple[float, float]]) -> str:
    """Return the path around the least and largest value of each of MOST_POINTS groups of points."""
    size = -(-len(points) // MOST_POINTS)
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    upper = [(group[0][0], min(y for _, y in group)) for group in groups]
    lower = [(group[0][0], max(y for _, y in group)) for group in groups]
    return line_path([*upper, *reversed(lower)])


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for low, high in sorted(spans):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found


def _positive(curve: Curve) -> Curve:
    kept = [(x, y) for x, y in zip(curve.xs, curve.ys, strict=True) if y > 0]
    return Curve(label=curve.label, xs=[x for x, _ in kept], ys=[y for _, y in kept])


def _value_at(curve: Curve, x: float) -> float:
    """Return the curve's height at ``x``, on straight lines between its points and beyond them."""
    if len(curve.xs) < 2:
        return curve.ys[0] if curve.ys else 0.0
    at = min(max(bisect_left(curve.xs, x), 1), len(curve.xs) - 1)
    (x0, x1), (y0, y1) = next(pairwise(curve.xs[at - 1 : at + 1])), curve.ys[at - 1 : at + 1]
    return max(0.0, y0 + (x - x0) / (x1 - x0) * (y1 - y0))
