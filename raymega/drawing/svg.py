"""Elements of SVG pictures: text, rectangles, ticks, numbers, and the document around them.

Colours are CSS variables of `drawing/style.py`, so that a picture follows the reader's light or dark theme.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from math import ceil, floor, isfinite, log10
from xml.sax.saxutils import escape

from raymega.drawing.style import PICTURE, THEME

CHARACTER_PX = 7.2
"""Mean width of a character of the pictures' text, at 12 px."""
DARKEST_FOR_INK = 0.36
"""Luminance of a colour below which white text is easier to read on it than black."""
_VIEW_BOX = re.compile(r'viewBox="0 0 (\d+) (\d+)"')
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def picture(
    parts: Iterable[str], *, width: float, height: float, kind: str = "", alone: bool = False,
    enlarged: float = 1.0,
) -> str:  # fmt: skip
    """Return an SVG document of ``width`` by ``height`` pixels.

    Args:
        parts: Elements, painted in this order.
        width: Width of the drawing; a page scales it to the room that it has.
        height: Height of the drawing.
        kind: CSS class of the document.
        alone: Whether the picture is a file of its own, which needs its theme inside.
        enlarged: Factor from the drawing's size to the file's, when it is alone.
    """
    head = f"<style>{THEME}{PICTURE}</style>" if alone else ""
    size = f' width="{width * enlarged:.0f}" height="{height * enlarged:.0f}"' if alone else ""
    paper = '<rect class="paper" width="100%" height="100%"/>' if alone else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="picture {kind}"{size} '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img">\n{head}{paper}'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def stack(pictures: Iterable[str]) -> str:
    """Return one SVG file with several pictures, one below the other."""
    parts, top, widest = [], 0.0, 0.0
    for each in pictures:
        width, height = (float(number) for number in _VIEW_BOX.findall(each)[0])
        parts.append(
            each.replace(
                "<svg ", f'<svg y="{top:.0f}" width="{width:.0f}" height="{height:.0f}" ', 1
            )
        )
        top, widest = top + height + 10, max(widest, width)
    return picture(parts, width=widest, height=top, alone=True)


def text(
    x: float, y: float, content: str, *, kind: str = "", anchor: str = "", style: str = ""
) -> str:
    """Return a text element; ``anchor`` is ``start``, ``middle`` or ``end``."""
    attributes = "".join(
        f' {name}="{value}"'
        for name, value in (("class", kind), ("text-anchor", anchor), ("style", style))
        if value
    )
    return f'<text{attributes} x="{x:.1f}" y="{y:.1f}">{escape(content)}</text>'


def rect(x: float, y: float, width: float, height: float, look: str, hint: str = "") -> str:
    """Return a rectangle.

    Args:
        x: Left edge.
        y: Upper edge.
        width: Width in pixels.
        height: Height in pixels.
        look: Fill, CSS class with a dot before it, or both: ``#fff``, ``.lane``, ``.block #fff``.
        hint: Text that is shown where the pointer rests on it.
    """
    kinds = [each[1:] for each in look.split() if each.startswith(".")]
    fills = [each for each in look.split() if not each.startswith(".")]
    paint = "".join(f' class="{each}"' for each in kinds) + "".join(
        f' fill="{each}"' for each in fills
    )
    title = f"<title>{escape(hint)}</title>" if hint else ""
    return (
        f'<rect{paint} x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}">'
        f"{title}</rect>"
    )


def line_path(points: Iterable[tuple[float, float]]) -> str:
    """Return the path data of a line through ``points``."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def swatches(
    named: Iterable[tuple[str, str]], *, left: float, top: float, right: float
) -> tuple[list[str], float]:
    """Return a legend's elements, broken into lines, and the height that they take.

    Args:
        named: Pairs of a name and its look, as in :func:`rect`.
        left: Position of the first swatch.
        top: Upper edge of the first line.
        right: Position beyond which no name may reach.
    """
    x, y, parts = left, top, []
    for name, look in named:
        width = 22 + CHARACTER_PX * len(name)
        if x > left and x + width > right:
            x, y = left, y + 18
        parts.append(rect(x, y, 12, 12, look))
        parts.append(text(x + 17, y + 10, name))
        x += width + 10
    return parts, (y - top + 18 if parts else 0)


def ink_on(fill: str) -> str:
    """Return the colour of text on ``fill``, a colour like ``#0072b2``: black or white."""
    red, green, blue = (int(fill[at : at + 2], 16) / 255 for at in (1, 3, 5))
    luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return "#fff" if luminance < DARKEST_FOR_INK / 2 else "#111"


def tick_step(least: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is not below ``least``."""
    power = 10.0 ** floor(log10(least))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least * (1 - 1e-9))


def ticks(low: float, high: float, most: int) -> Iterator[float]:
    """Yield round numbers from ``low`` to ``high``, at most ``most`` of them."""
    step = tick_step((high - low) / most) if high > low else 1.0
    first = ceil(low / step - 1e-9)
    for index in range(first, floor(high / step + 1e-9) + 1):
        yield index * step


def log_ticks(low: float, high: float) -> Iterator[float]:
    """Yield round numbers for a logarithmic axis from ``low`` to ``high``."""
    digits = (1, 2, 5) if log10(high / low) < 2.5 else (1,)
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    found = [d * 10.0**power for power in powers for d in digits if low <= d * 10.0**power <= high]
    # Less than a third of a decade may have none of them.
    yield from found if len(found) > 2 else ticks(low, high, 8)


def short(value: float) -> str:
    """Return a number in few characters: 1.2k, 3.45M, 0.012, 3e-7."""
    if not isfinite(value):
        return "-"
    for size, prefix in PREFIXES:
        if abs(value) >= size:
            return f"{value / size:.3g}{prefix}"
    if 0 < abs(value) < 1e-3:
        digits, _, power = f"{value:.1e}".partition("e")
        return f"{digits.removesuffix('.0')}e{int(power)}"
    return f"{value:.3g}"
