"""Bars as long as their sizes, with readable numbers; heat maps of any size."""

import xml.etree.ElementTree as ET

import pytest

from raymega.drawing.bars import HEAT, Bars, draw_bars, draw_heat
from raymega.drawing.style import THEME
from raymega.drawing.svg import ink_on

SVG = "{http://www.w3.org/2000/svg}"
FILLS = {"weights": "#0072b2", "moments": "#8fd3bd"}


def rects(picture):
    return {
        hint.text: rect
        for rect in ET.fromstring(picture).iter(f"{SVG}rect")
        if (hint := rect.find(f"{SVG}title")) is not None
    }


def test_bars_parts_and_marks_are_on_one_scale():
    bars = {"pp 0": {"weights": 2.0, "moments": 4.0}, "pp 1": {"weights": 1.0}}
    found = rects(
        draw_bars(
            Bars(title="Memory", unit="GiB", rows=bars, fills=FILLS, marks={"pp 0": (5.0, 8.0)})
        )
    )
    width = {hint: float(rect.get("width")) for hint, rect in found.items()}
    assert width["pp 0, moments: 4 GiB"] == pytest.approx(
        2 * width["pp 0, weights: 2 GiB"], rel=1e-3
    )
    assert width["pp 0, measured: 5 to 8 GiB"] == pytest.approx(
        4 * width["pp 0, weights: 2 GiB"], rel=1e-3
    )


def test_numbers_on_bars_are_black_on_light_and_white_on_dark():
    assert ink_on("#0072b2") == "#fff" and ink_on("#8fd3bd") == "#111"


def test_heat_map_has_a_colour_a_value_and_few_elements():
    picture = draw_heat("Load", {"0": [0.25, 1.0, 4.0], "gap": []}, [10, 20, 30])
    for fill in (HEAT[0], HEAT[4], HEAT[-1]):
        assert f'<path fill="{fill}"' in picture
    wide = draw_heat("Load", {str(n): [1.0] * 5000 for n in range(90)}, range(5000))
    assert len(ET.fromstring(wide).findall(f"{SVG}path")) == 1
    assert len(wide) < 300_000


def _luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(
    "name", ["ink", "muted", "alarm", "good", "s1", "s2", "s3", "s4", "s5", "s6"]
)
def test_colours_of_texts_and_curves_have_contrast_to_the_paper(theme, name):
    """By WCAG's formula and its least ratio for text."""
    block = THEME.split("@media")[theme]
    colours = dict(
        part.strip().removeprefix("--").split(": ")
        for part in block.split(";")
        if ": #" in part
        for part in [part[part.index("--") :]]
    )
    light, dark = sorted((_luminance(colours[name]), _luminance(colours["card"])), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5
