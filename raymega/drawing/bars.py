"""Bars: horizontal ones cut into parts, with marks and a limit; and heat maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import log2

from raymega.drawing.chart import ALONE
from raymega.drawing.svg import CHARACTER_PX, ink_on, picture, rect, short, swatches, text

WIDTH_PX, LEFT_PX, RIGHT_PX = 460, 46, 74
ROW_PX, GAP_PX, LEAST_NUMBER_PX = 20, 8, 36
HEAT_ROW_PX, MOST_HEAT_PX = 13.0, 420.0
MOST_COLUMNS = 60
LEAST_LABELLED_PX = 10.0
MOST_DOUBLINGS = 2.0
"""End of the heat map's scale, in powers of two: a quarter and four times the mean."""
HEAT = (
    "#2166ac",
    "#5b9bcb",
    "#a5cce3",
    "#dde9f0",
    "#eeeeec",
    "#f8ddcc",
    "#f0aa85",
    "#d6604d",
    "#a81c2e",
)
"""Colours from a quarter of the mean to four times it; the middle is even."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """Content of a picture of bars, one a row.

    Attributes:
        title: Heading above the bars.
        unit: Unit of the sizes.
        rows: Sizes of the parts by row and name.
        fills: Colour of each part, like ``#0072b2``.
        marks: Least and largest measured value of a row, drawn as a thinner bar under it.
        limit: Label and size of a vertical line.
        width: Width of the drawing in pixels.
        has_legend: Whether the colours of the parts are named above the bars.
    """

    title: str
    unit: str
    rows: Mapping[str, Mapping[str, float]]
    fills: Mapping[str, str]
    marks: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    limit: tuple[str, float] | None = None
    width: float = WIDTH_PX
    has_legend: bool = True

    @property
    def left_px(self) -> float:
        """Room for the rows' labels."""
        return max([LEFT_PX, *(CHARACTER_PX * len(label) + 14 for label in self.rows)])

    @property
    def scale(self) -> float:
        """Pixels of one unit."""
        sizes = [sum(parts.values()) for parts in self.rows.values()]
        sizes += [value for pair in self.marks.values() for value in pair]
        sizes += [self.limit[1]] if self.limit else []
        return (self.width - self.left_px - RIGHT_PX) / (max(sizes, default=0.0) or 1.0)

    def legend(self) -> list[tuple[str, str]]:
        """Return names and looks of the parts that some row has."""
        has = {name for parts in self.rows.values() for name, size in parts.items() if size}
        named = [(name, fill) for name, fill in self.fills.items() if name in has]
        named += [("measured", "var(--ink)")] if self.marks else []
        return named if self.has_legend else []


def draw_bars(bars: Bars) -> str:
    """Return one bar a row, each cut into parts, with the sum at its end."""
    left = bars.left_px
    legend, legend_px = swatches(bars.legend(), left=left, top=30, right=bars.width - 8)
    top = 34 + legend_px
    pitch = ROW_PX + GAP_PX + (8 if bars.marks else 0)
    parts = [text(8, 17, bars.title, kind="heading"), *legend]
    for row, label in enumerate(bars.rows):
        y = top + row * pitch
        parts.append(text(left - 6, y + 14, label, anchor="end"))
        parts += _bar(bars, label, y)
        if label in bars.marks:
            parts += _measured(bars, label, y + ROW_PX + 1)
    bottom = top + len(bars.rows) * pitch
    if bars.limit is not None:
        x = left + bars.limit[1] * bars.scale
        parts.append(f'<path class="cut" d="M{x:.1f} {top - 6:.0f}V{bottom:.0f}"/>')
        parts.append(text(x, bottom + 12, bars.limit[0], kind="small", anchor="middle"))
    height = bottom + (20 if bars.limit else 4)
    return picture(parts, width=bars.width, height=height, kind="bars")


def _bar(bars: Bars, label: str, y: float) -> Iterator[str]:
    x, sizes = bars.left_px, bars.rows[label]
    for name, size in sizes.items():
        width = size * bars.scale
        if width <= 0:
            continue
        fill = bars.fills[name]
        yield rect(x, y, width, ROW_PX, fill, f"{label}, {name}: {size:.3g} {bars.unit}")
        if width > LEAST_NUMBER_PX:
            yield text(
                x + width / 2, y + 14, f"{size:.3g}", anchor="middle", style=f"fill:{ink_on(fill)}"
            )
        x += width
    if sizes:
        yield text(x + 5, y + 14, f"{sum(sizes.values()):.3g} {bars.unit}")


def _measured(bars: Bars, label: str, y: float) -> Iterator[str]:
    low, high = bars.marks[label]
    width = high * bars.scale
    hint = f"{label}, measured: {low:.3g} to {high:.3g} {bars.unit}"
    yield rect(bars.left_px, y, width, 5, "var(--ink)", hint)
    yield text(bars.left_px + width + 5, y + 7, f"{short(high)} {bars.unit}", kind="small")


def draw_heat(
    title: str, rows: Mapping[str, Sequence[float]], columns: Sequence[int], *, alone: bool = False
) -> str:
    """Return a heat map of multiples of a mean: 1 is even, and colours end at 1/4 and 4.

    Args:
        title: Heading above the map.
        rows: Values by the row's label; an empty row is a gap.
        columns: Number of each column, such as its step.
        alone: Whether the picture is a file of its own.
    """
    size = max(1, -(-len(columns) // MOST_COLUMNS))
    shown = columns[::size]
    height = min(HEAT_ROW_PX, MOST_HEAT_PX / max(1, len(rows)))
    left, top = 84.0, 50.0
    width = (WIDTH_PX - left - 10) / max(1, len(shown))
    parts = [text(8, 17, title, kind="heading"), *_heat_legend(left)]
    paths: dict[str, list[str]] = {}
    last_label = -LEAST_LABELLED_PX
    for at, (label, values) in enumerate(rows.items()):
        y = top + at * height
        if values and y - last_label >= LEAST_LABELLED_PX:
            parts.append(
                text(left - 5, y + height / 2 + 4, label, kind="muted small", anchor="end")
            )
            last_label = y
        for column in range(len(shown) if values else 0):
            group = values[column * size : (column + 1) * size]
            fill = _heat_fill(sum(group) / len(group))
            x = left + column * width
            paths.setdefault(fill, []).append(
                f"M{x:.1f} {y:.1f}h{width:.2f}v{height:.1f}h-{width:.2f}z"
            )
    # one element a colour: a map has thousands of cells
    parts += [
        f'<path fill="{fill}" shape-rendering="crispEdges" d="{"".join(cells)}"/>'
        for fill, cells in paths.items()
    ]
    bottom = top + len(rows) * height
    for at in range(0, len(shown), max(1, len(shown) // 6)):
        x = left + (at + 0.5) * width
        parts.append(text(x, bottom + 15, short(shown[at]), kind="muted small", anchor="middle"))
    parts.append(text(left - 5, bottom + 15, "step", kind="muted small", anchor="end"))
    return picture(
        parts, width=WIDTH_PX, height=bottom + 22, kind="heat", alone=alone, enlarged=ALONE
    )


def _heat_legend(left: float) -> Iterator[str]:
    for at, fill in enumerate(HEAT):
        yield rect(left + at * 16, 28, 16, 10, fill)
    yield text(left - 5, 37, "1/4 of even", kind="muted small", anchor="end")
    yield text(left + len(HEAT) * 16 + 5, 37, "4 times", kind="muted small")


def _heat_fill(share: float) -> str:
    """Return the colour of a value's multiple of the mean; 0 has no logarithm and is the first."""
    doublings = log2(max(share, 2.0 ** (-2 * MOST_DOUBLINGS)))
    place = (doublings + MOST_DOUBLINGS) / (2 * MOST_DOUBLINGS) * (len(HEAT) - 1)
    return HEAT[min(max(round(place), 0), len(HEAT) - 1)]
