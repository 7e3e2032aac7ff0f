"""Heat map of expert load: one row per expert of each layer, one column per step.

Data are the events ``experts`` of metrics.jsonl.
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
"""Tokens of each expert, by step and layer."""
WIDTH_INCHES, ROW_INCHES = 8.0, 0.09
MIN_INCHES, MAX_INCHES = 3.0, 16.0
MOST_DOUBLINGS = 2.0
"""End of the colour scale, in powers of two: a quarter and four times the mean load."""


def load_expert_loads(path: Path) -> Loads:
    """Read the expert loads of metrics.jsonl; of a recomputed step the last record counts."""
    loads: dict[int, dict[int, list[float]]] = {}
    for record in read_records(path):
        # A restart drops the steps beyond the one from which it resumes.
        if record["event"] == "attempt":
            for later in [step for step in loads if step > record.get("step", 0)]:
                del loads[later]
        elif record["event"] == "experts":
            tokens: Mapping[str, list[float]] = record["tokens"]
            loads[record["step"]] = {int(layer): counts for layer, counts in tokens.items()}
    return loads


def draw_heat(loads: Loads, path: Path, *, title: str) -> None:
    """Draw the heat map to ``path``: steps on the x axis, experts of all layers on the y axis.

    Args:
        loads: Expert loads of at least one step.
        path: Output file; its suffix selects the format.
        title: Title of the figure, such as the run's name.
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
    # colour bar in multiples of the mean load
    ticks = [-2, -1, 0, 1, 2]
    bar.set_ticks(ticks, labels=["1/4", "1/2", "even", "2 x", "4 x"])
    bar.outline.set_visible(False)
    _dress(axes, loads, title)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def _rows(loads: Loads) -> list[list[float]]:
    """Return log2 of each expert's load over the mean load, [experts of all layers, steps]."""
    steps, first = sorted(loads), loads[min(loads)]
    rows = []
    for layer in sorted(first):
        # A load of 0 has no logarithm: clip it well below the end of the colour scale.
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
    # White lines between layers, a label in the middle of every n-th.
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
