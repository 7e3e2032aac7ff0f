"""Draws a time line, simulated or recorded, as an SVG picture.

There is one row per rank. Forwards, backwards and their parts are blocks with the micro-batch's
number, paler on later chunks. Receives that wait are hatched, collectives are strips at the row's
foot, and the rest is idle time. It reads events only and writes no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor
from statistics import median

from raymega.drawing.svg import CHARACTER_PX, ink_on, picture, rect, swatches, text, tick_step
from raymega.schedule.instructions import COMPUTE, RECEIVE, Op
from raymega.schedule.timeline import (
    BETWEEN_CP,
    BETWEEN_EXPERTS,
    IN_UPDATE,
    SUMS_AND_WEIGHTS,
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
STRIPS = (
    ("gradients and weights", SUMS_AND_WEIGHTS, "#0072b2"),
    ("between context-parallel ranks", BETWEEN_CP, "#cc79a7"),
    ("between experts", BETWEEN_EXPERTS, "#882255"),
    ("in the update", IN_UPDATE, "#d55e00"),
)
"""Kinds of collectives, each a strip of its own colour."""

# All in pixels. A block of median length is wide enough for its number, within these widths of
# the picture.
TITLE_PX, AXIS_PX, MARGIN_PX = 34, 44, 16
ROW_PX, ROW_GAP_PX, STRIP_PX = 30, 6, 4
BLOCK_PX, MIN_WIDTH_PX, MAX_WIDTH_PX = 26, 720, 3200
NUMBER_PX, LEAST_NUMBER_PX = 12.0, 3.0
"""Largest and smallest text of a micro-batch's number; small ones are for who zooms in."""
TICK_PX = 90

PATTERN = (
    '<defs><pattern id="wait" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<rect width="6" height="6" style="fill:var(--wait)"/>'
    '<path d="M-1 1L1 -1M0 6L6 0M5 7L7 5" style="stroke:var(--hatch)" stroke-width="1"/>'
    "</pattern></defs>"
)


def draw_svg(
    rows: Rows,
    *,
    title: str,
    time_unit: str = "units",
    scale: float = 1.0,
    note: str = "",
    width_px: float = 0.0,
) -> str:
    """Return the picture of a step as one SVG document.

    Args:
        rows: Events by row label, such as ``tp0 pp1``; rows are drawn in this order.
        title: Heading above the picture.
        time_unit: Name of one unit on the time axis.
        scale: Units on the time axis per unit of the events; 1000 shows seconds as ``ms``.
        note: Text behind the measured bubble.
        width_px: Width of the rows; 0 is as wide as the numbers in the blocks need.
    """
    last_chunk = max((event[2] for events in rows.values() for event in events), default=0)
    frame = _make_frame(rows, scale, width_px=width_px)
    right = frame.left_px + frame.width_px
    legend, legend_px = swatches(_legend(rows, last_chunk), left=MARGIN_PX, top=58, right=right)
    frame = frame.below(58 + legend_px + 6)
    # Heading and axis first, so that the rows are painted over the grid lines.
    parts = [
        PATTERN,
        text(MARGIN_PX, 24, title, kind="heading"),
        text(MARGIN_PX, 45, "; ".join(filter(None, (_measures(rows), note)))),
        *legend,
        *_axis(frame, len(rows), time_unit),
    ]
    for index, (label, events) in enumerate(rows.items()):
        parts += _row(frame, index, label, events, last_chunk)
    return picture(
        parts,
        width=right + MARGIN_PX,
        height=frame.row_y(len(rows)) + AXIS_PX,
        kind="timeline",
        alone=True,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """Positions of times and rows in the picture; ``first`` and ``length`` are in scaled time."""

    first: float
    length: float
    scale: float
    left_px: float
    width_px: float
    top_px: float = 0.0

    def below(self, top_px: float) -> _Frame:
        """Return the frame with its first row at ``top_px``."""
        return replace(self, top_px=top_px)

    def x(self, time: float) -> float:
        """Return the horizontal pixel position of an event's time."""
        return self.left_px + (time * self.scale - self.first) / self.length * self.width_px

    def row_y(self, index: int) -> float:
        """Return the vertical pixel position of a row's upper edge."""
        return self.top_px + index * (ROW_PX + ROW_GAP_PX)


def _make_frame(rows: Rows, scale: float, *, width_px: float) -> _Frame:
    """Make a frame wide enough for the numbers in the blocks, unless its width is given."""
    first, last = span(rows.values())
    blocks = [e[4] - e[3] for row in rows.values() for e in row if e[0] == Op.FORWARD]
    typical = median(blocks) if blocks else 0.0
    wanted_px = (last - first) / typical * BLOCK_PX if typical > 0 else 0.0
    labels_px = CHARACTER_PX * max((len(label) for label in rows), default=0)
    return _Frame(
        first=first * scale,
        length=(last - first) * scale or 1.0,
        scale=scale,
        left_px=MARGIN_PX + labels_px + 8,
        width_px=width_px or min(max(wanted_px, MIN_WIDTH_PX), MAX_WIDTH_PX),
    )


def _row(
    frame: _Frame, index: int, label: str, events: Sequence[EventTuple], last_chunk: int
) -> Iterator[str]:
    y = frame.row_y(index)
    yield text(frame.left_px - 8, y + ROW_PX / 2 + 4, label, anchor="end")
    yield rect(frame.left_px, y, frame.width_px, ROW_PX, ".lane")
    # blocks first, then waits over them, strips, and the numbers where nothing covers them
    waits = []
    for name, micro_batch, chunk, start, end in events:
        if name in COMPUTE:
            hint = f"{name} {micro_batch}" + (f", chunk {chunk}" if chunk else "")
            fill = _paler(FILLS[Op(name)], chunk, last_chunk)
            x = frame.x(start)
            yield rect(x, y, frame.x(end) - x, ROW_PX, f".block {fill}", hint)
        elif name in RECEIVE | WAITS and end > start:
            waits.append((start, end))
    for start, end in waits:
        x = frame.x(start)
        width = frame.x(end) - x
        yield rect(x, y, width, ROW_PX, f".wait {WAIT_FILL}")
    yield from _strips(frame, y, events)
    covers = sorted(waits)
    for name, micro_batch, chunk, start, end in events:
        if name in COMPUTE:
            fill = _paler(FILLS[Op(name)], chunk, last_chunk)
            yield from _number(frame, y, micro_batch, _widest((start, end), covers), fill)


def _strips(frame: _Frame, y: float, events: Sequence[EventTuple]) -> Iterator[str]:
    """Yield a strip for each collective, the kinds above each other at the row's foot."""
    present = {event[0] for event in events}
    lanes = [kind for kind in STRIPS if kind[1] & present]
    for lane, (_, names, fill) in enumerate(lanes):
        top = y + ROW_PX - STRIP_PX * (lane + 1)
        for name, number, _, start, end in events:
            if name in names:
                x = frame.x(start)
                kind = "transfer" if name in TRANSFERS else "bucket"
                hint = f"{name}, {kind} {number}"
                yield rect(x, top, frame.x(end) - x, STRIP_PX, f".strip {fill}", hint)


def _widest(
    block: tuple[float, float], covers: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """Return the longest part of a block that no wait covers."""
    free, start = [], block[0]
    for low, high in covers:
        if high > start and low < block[1]:
            free.append((start, low))
            start = max(start, high)
    return max([*free, (start, block[1])], key=lambda part: part[1] - part[0])


def _number(
    frame: _Frame, y: float, micro_batch: int, part: tuple[float, float], fill: str
) -> Iterator[str]:
    """Yield the micro-batch's number, as small as its block demands; none where it cannot be read."""
    left, right = frame.x(part[0]), frame.x(part[1])
    size = min(NUMBER_PX, (right - left - 1) / (0.62 * len(str(micro_batch))))
    if size < LEAST_NUMBER_PX:
        return
    style = f"fill:{ink_on(fill)}" + (f";font-size:{size:.1f}px" if size < NUMBER_PX else "")
    x, middle = (left + right) / 2, y + ROW_PX / 2 + size / 3
    yield text(x, middle, str(micro_batch), anchor="middle", style=style)


def _legend(rows: Rows, last_chunk: int) -> Iterator[tuple[str, str]]:
    """Yield names and fills of what is in the picture."""
    present = {event[0] for events in rows.values() for event in events}
    shown = [(name, FILLS[op]) for op, name in NAMES.items() if op in present]
    yield from shown
    if last_chunk and shown:
        yield f"paler: later of {last_chunk + 1} chunks", _paler(shown[0][1], 1, 1)
    yield "waiting", WAIT_FILL
    for what, names, fill in STRIPS:
        found = overlap(rows.values(), names)
        if found is not None:
            yield f"strip: {what}, {found.hidden_share:.0%} hidden", fill


def _measures(rows: Rows) -> str:
    ratio, rate = bubble(rows.values())
    return f"bubble: {ratio:.3f} of ideal time, {rate:.1%} of all time"


def _axis(frame: _Frame, num_rows: int, time_unit: str) -> Iterator[str]:
    top, bottom = frame.row_y(0), frame.row_y(num_rows)
    step = tick_step(frame.length * TICK_PX / frame.width_px)
    for tick in range(floor(frame.length / step * (1 + 1e-9)) + 1):
        x = frame.left_px + tick * step / frame.length * frame.width_px
        yield f'<path class="tick" d="M{x:.1f} {top - 4:.0f}V{bottom + 4:.0f}"/>'
        yield text(x, bottom + 18, f"{tick * step:g}", kind="muted", anchor="middle")
    middle = frame.left_px + frame.width_px / 2
    yield text(middle, bottom + 36, f"time ({time_unit})", kind="muted", anchor="middle")


def _paler(fill: str, chunk: int, last_chunk: int) -> str:
    """Return the colour of a chunk: mixed with white, the more the later the chunk."""
    share = MOST_WHITE * chunk / (last_chunk or 1)
    parts = (int(fill[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
