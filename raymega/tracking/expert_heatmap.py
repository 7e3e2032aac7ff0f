"""The heat map of a run's experts: each one's load over the steps, layer by layer.

It reads metrics.jsonl, the complete local record, and draws; it computes no metric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING

from raymega.tracking.loss_plot import DOTS_PER_INCH, GREY, INK, make_figure, read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Loads = Mapping[int, Mapping[int, Sequence[float]]]
"""Tokens by expert: of each step, of each layer."""
WIDTH_INCHES, ROW_INCHES = 8.0, 0.09
MIN_INCHES, MAX_INCHES = 3.0, 16.0
MOST_DOUBLINGS = 2.0
"""Colours end at a quarter and at four times an even load."""


def load_expert_loads(path: Path) -> Loads:
    """Read the lines of metrics.jsonl; of a step that was done twice the last counts."""
    loads: dict[int, dict[int, list[float]]] = {}
    for record in read_records(path):
        if record["event"] == "attempt":
            for later in [step for step in loads if step > record.get("step", 0)]:
                del loads[later]
        elif record["event"] == "experts":
            tokens: Mapping[str, list[float]] = record["tokens"]
            loads[record["step"]] = {int(layer): counts for layer, counts in tokens.items()}
    return loads


def draw_heat(loads: Loads, path: Path, *, title: str) -> None:
    """Write the picture to ``path``: steps across, experts of all layers down.

    Args:
        loads: At least one step.
        path: Where to write; its suffix says the format.
        title: Headline, such as the run's name.
    """
    rows = _rows(loads)
    height = min(MAX_INCHES, max(MIN_INCHES, 1.2 + ROW_INCHES * len(rows)))
    figure = make_figure(WIDTH_INCHES, height)
    axes = figure.add_subplot()
    image = axes.imshow(
        rows,
        aspect="auto",
        interpolation="nearest",
        cmap="RdBu_r",
        vmin=-MOST_DOUBLINGS,
        vmax=MOST_DOUBLINGS,
    )
    bar = figure.colorbar(image, ax=axes, pad=0.02)
    ticks = [-2, -1, 0, 1, 2]
    bar.set_ticks(ticks, labels=["1/4", "1/2", "even", "2 x", "4 x"])
    bar.outline.set_visible(False)
    _dress(axes, loads, title)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def _rows(loads: Loads) -> list[list[float]]:
    """Doublings of an even load: a row an expert, a column a step."""
    steps, first = sorted(loads), loads[min(loads)]
    rows = []
    for layer in sorted(first):
        for expert in range(len(first[layer])):
            shares = []
            for step in steps:
                counts = loads[step][layer]
                share = counts[expert] * len(counts) / max(sum(counts), 1.0)
                shares.append(log2(max(share, 2.0 ** (-2 * MOST_DOUBLINGS))))
            rows.append(shares)
    return rows


def _dress(axes: Axes, loads: Loads, title: str) -> None:
    steps, first = sorted(loads), loads[min(loads)]
    axes.set_title(title, loc="left", fontsize=12, color=INK, pad=10)
    axes.set_xlabel("step", color=INK)
    shown = range(0, len(steps), max(1, len(steps) // 8))
    axes.set_xticks([*shown], labels=[str(steps[place]) for place in shown])
    edges, places = 0, []
    for layer in sorted(first):
        size = len(first[layer])
        places.append((edges + (size - 1) / 2, layer))
        edges += size
        axes.axhline(edges - 0.5, color="white", linewidth=1.5)
    shown_layers = places[:: max(1, len(places) // 16)]
    axes.set_yticks(
        [place for place, _ in shown_layers], labels=[f"layer {layer}" for _, layer in shown_layers]
    )
    axes.spines[:].set_visible(False)
    axes.tick_params(color=GREY, labelcolor=INK, labelsize=9, length=0)
