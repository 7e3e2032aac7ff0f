"""Draws a time line, simulated or recorded, as an SVG picture.

There is one row per rank. Forwards, backwards and their parts are blocks with the micro-batch's
number, paler on later chunks. Receives that wait are hatched, and the rest is idle time. It reads
events only and writes no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10
from statistics import median
from xml.sax.saxutils import escape

from raymega.schedule.instructions import COMPUTE, RECEIVE, Op
from raymega.schedule.timeline import (
    BETWEEN_CP,
    BETWEEN_EXPERTS,
    COLLECTIVES,
    IN_UPDATE,
    TRANSFERS,
    WAITS,
    EventTuple,
    bubble,
    overlap,
    span,
)

Rows = Mapping[str, Sequence[EventTuple]]

# Okabe and Ito's palette, which people with any colour vision can tell apart.
FILLS = {
    Op.FORWARD: "#56b4e9",
    Op.BACKWARD: "#e69f00",
    Op.BACKWARD_INPUT: "#f0c35e",
    Op.BACKWARD_WEIGHT: "#33b38d",
}
NAMES = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward, input part",
    Op.BACKWARD_WEIGHT: "weight part",
}
WAIT_FILL = "url(#wait)"
MOST_WHITE = 0.6
"""Share of white in the colour of the last chunk; chunk 0 has none."""
COLLECTIVE_FILL = "#0072b2"

# All in pixels. A block of median length is wide enough for its number, within these widths of
# the picture.
TITLE_PX, LEGEND_PX, AXIS_PX, MARGIN_PX = 34, 30, 44, 16
ROW_PX, ROW_GAP_PX, STRIP_PX = 30, 6, 5
BLOCK_PX, MIN_WIDTH_PX, MAX_WIDTH_PX = 26, 720, 3200
CHARACTER_PX = 7.2
TICK_PX = 90

STYLE = """
text { font: 12px Helvetica, Arial, sans-serif; fill: #222 }
.title { font-size: 15px; font-weight: bold }
.number { text-anchor: middle }
.label { text-anchor: end }
.row { fill: #f4f4f4 }
.block { stroke: #fff; stroke-width: 1 }
.grid { stroke: #bbb; stroke-width: 1 }
"""
PATTERN = (
    '<defs><pattern id="wait" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<rect width="6" height="6" fill="#e4e4e4"/>'
    '<path d="M-1 1L1 -1M0 6L6 0M5 7L7 5" stroke="#a8a8a8" stroke-width="1"/></pattern></defs>'
)


def draw_svg(rows: Rows, *, title: str, time_unit: str = "units", scale: float = 1.0) -> str:
    """Return the picture of a step as one SVG document.

    Args:
        rows: Events by row label, such as ``rank 0``; rows are drawn in this order.
        title: Heading above the picture.
        time_unit: Name of one unit on the time axis.
        scale: Units on the time axis per unit of the events; 1000 shows seconds as ``ms``.
    """
    last_chunk = max((event[2] for events in rows.values() for event in events), default=0)
    legend, legend_px = _legend(rows, last_chunk)
    frame = _make_frame(rows, scale, legend_px=legend_px)
    # Heading and axis first, so that the rows are painted over the grid lines.
    parts = [
        PATTERN,
        _text(MARGIN_PX, 24, title, "title"),
        *legend,
        *_axis(frame, len(rows), time_unit),
    ]
    for index, (label, events) in enumerate(rows.items()):
        parts += _row(frame, index, label, events, last_chunk)
    height = frame.row_y(len(rows)) + AXIS_PX
    width = frame.left_px + frame.width_px + MARGIN_PX
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">\n<style>{STYLE}</style>\n'
        '<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """Positions of times and rows in the picture; ``first`` and ``length`` are in scaled time."""

    first: float
    length: float
    scale: float
    left_px: float
    width_px: float

    def x(self, time: float) -> float:
        """Return the horizontal pixel position of an event's time."""
        return self.left_px + (time * self.scale - self.first) / self.length * self.width_px

    def row_y(self, index: int) -> float:
        """Return the vertical pixel position of a row's upper edge."""
        return TITLE_PX + LEGEND_PX + index * (ROW_PX + ROW_GAP_PX)


def _make_frame(rows: Rows, scale: float, *, legend_px: float) -> _Frame:
    """Make a frame wide enough for the numbers in the blocks and for the legend."""
    first, last = span(rows.values())
    blocks = [e[4] - e[3] for row in rows.values() for e in row if e[0] == Op.FORWARD]
    typical = median(blocks) if blocks else 0.0
    width_px = (last - first) / typical * BLOCK_PX if typical > 0 else 0.0
    labels_px = CHARACTER_PX * max((len(label) for label in rows), default=0)
    left_px = MARGIN_PX + labels_px + 8
    return _Frame(
        first=first * scale,
        length=(last - first) * scale or 1.0,
        scale=scale,
        left_px=left_px,
        width_px=min(max(width_px, MIN_WIDTH_PX, legend_px - left_px), MAX_WIDTH_PX),
    )


def _row(
    frame: _Frame, index: int, label: str, events: Sequence[EventTuple], last_chunk: int
) -> Iterator[str]:
    y = frame.row_y(index)
    yield _text(frame.left_px - 8, y + ROW_PX / 2 + 4, label, "label")
    yield _rect(frame.left_px, y, frame.width_px, "row")
    for name, micro_batch, chunk, start, end in events:
        x, width = frame.x(start), frame.x(end) - frame.x(start)
        if name in RECEIVE | WAITS and width > 0:
            yield _rect(x, y, width, "wait", WAIT_FILL)
        elif name in COLLECTIVES:
            yield _strip(x, y + ROW_PX - STRIP_PX, width, _strip_hint(name, micro_batch))
        elif name in COMPUTE:
            hint = f"{name} {micro_batch}" + (f", chunk {chunk}" if chunk else "")
            fill = _paler(FILLS[Op(name)], chunk, last_chunk)
            yield _rect(x, y, width, "block", fill, hint)
            if width > CHARACTER_PX * len(str(micro_batch)) + 2:
                yield _text(x + width / 2, y + ROW_PX / 2 + 4, str(micro_batch), "number")


def _strip_hint(name: str, number: int) -> str:
    return f"{name}, {'transfer' if name in TRANSFERS else 'bucket'} {number}"


def _legend(rows: Rows, last_chunk: int) -> tuple[list[str], float]:
    """Return the elements of colour key and measures, and the pixel position of their right end."""
    x: float = MARGIN_PX
    parts = []
    present = {event[0] for events in rows.values() for event in events}
    shown = [(name, FILLS[op]) for op, name in NAMES.items() if op in present]
    for name, fill in (*shown, ("waiting", WAIT_FILL)):
        parts.append(f'<rect x="{x:.1f}" y="{TITLE_PX + 2}" width="16" height="16" fill="{fill}"/>')
        parts.append(_text(x + 22, TITLE_PX + 14, name))
        x += 22 + CHARACTER_PX * len(name) + 18
    text = _measures(rows) + ("; paler: later chunks" if last_chunk else "")
    return [*parts, _text(x, TITLE_PX + 14, text)], x + CHARACTER_PX * len(text)


def _measures(rows: Rows) -> str:
    ratio, rate = bubble(rows.values())
    text = f"bubble: {ratio:.3f} of ideal time, {rate:.1%} of all time"
    found = {
        "gradients and weights": overlap(rows.values()),
        "between context-parallel ranks": overlap(rows.values(), BETWEEN_CP),
        "between experts": overlap(rows.values(), BETWEEN_EXPERTS),
        "in the update": overlap(rows.values(), IN_UPDATE),
    }
    strips = [
        f"{what} under way, {hidden.hidden_share:.0%} hidden"
        for what, hidden in found.items()
        if hidden is not None
    ]
    return "; strips: ".join([text, ", ".join(strips)]) if strips else text


def _axis(frame: _Frame, num_rows: int, time_unit: str) -> Iterator[str]:
    top, bottom = frame.row_y(0), frame.row_y(num_rows)
    step = _tick_step(frame.length * TICK_PX / frame.width_px)
    for tick in range(floor(frame.length / step * (1 + 1e-9)) + 1):
        x = frame.left_px + tick * step / frame.length * frame.width_px
        yield f'<path class="grid" d="M{x:.1f} {top - 4:.0f}V{bottom + 4:.0f}"/>'
        yield _text(x, bottom + 18, f"{tick * step:g}", "number")
    yield _text(frame.left_px + frame.width_px / 2, bottom + 36, f"time ({time_unit})", "number")


def _tick_step(least: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is not below ``least``."""
    power = 10.0 ** floor(log10(least))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least)


def _paler(fill: str, chunk: int, last_chunk: int) -> str:
    """Return the colour of a chunk: mixed with white, the more the later the chunk."""
    share = MOST_WHITE * chunk / (last_chunk or 1)
    parts = (int(fill[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def _rect(x: float, y: float, width: float, kind: str, fill: str = "", hint: str = "") -> str:
    paint = f' fill="{fill}"' if fill else ""
    title = f"<title>{escape(hint)}</title>" if hint else ""
    return (
        f'<rect class="{kind}" x="{x:.2f}" y="{y:.0f}" width="{width:.2f}" height="{ROW_PX}"'
        f"{paint}>{title}</rect>"
    )


def _strip(x: float, y: float, width: float, hint: str) -> str:
    return (
        f'<rect class="strip" x="{x:.2f}" y="{y:.0f}" width="{width:.2f}" height="{STRIP_PX}" '
        f'fill="{COLLECTIVE_FILL}"><title>{escape(hint)}</title></rect>'
    )


def _text(x: float, y: float, content: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f'<text{attribute} x="{x:.1f}" y="{y:.0f}">{escape(content)}</text>'
