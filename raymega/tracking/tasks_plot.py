"""Curves of a run's evaluation tasks over steps: accuracies above, perplexities and losses below.

Data are the lines of metrics.jsonl.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from raymega.tracking.loss_plot import DOTS_PER_INCH, GREY, INK, make_figure, read_records
from raymega.tracking.names import TASK_METRIC

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curves = dict[str, dict[int, float]]
"""Values by step, by ``TASK/METRIC``."""
COLOURS = ("#2f6fb0", "#d9772b", "#3f8f5a", "#8e5aa8", "#c0392b", "#7a6a4f")
SIZE_INCHES = (8.0, 3.6)
ERRORS = "_stderr"
"""End of the names of standard errors, which have no curve."""


def load_task_curves(path: Path) -> Curves:
    """Read the tasks' metrics of metrics.jsonl; of a step that was evaluated again the last value counts."""
    prefix = f"{TASK_METRIC.partition('/')[2]}/"
    curves: Curves = {}
    for record in read_records(path):
        if record["event"] != "tasks":
            continue
        for name, value in record.items():
            if name.startswith(prefix) and value is not None and not name.endswith(ERRORS):
                curves.setdefault(name.removeprefix(prefix), {})[record["step"]] = value
    return curves


def draw_task_curves(curves: Curves, path: Path, *, title: str) -> None:
    """Draw the curves to ``path``; its suffix (.png, .svg) selects the format."""
    shares = {name: values for name, values in curves.items() if is_share(name)}
    others = {name: values for name, values in curves.items() if name not in shares}
    parts = [
        (part, what) for part, what in ((shares, "accuracy"), (others, "perplexity, loss")) if part
    ]
    width, height = SIZE_INCHES
    figure = make_figure(width, height * len(parts))
    for number, (part, label) in enumerate(parts):
        axes = figure.add_subplot(len(parts), 1, number + 1)
        _draw(axes, part)
        axes.set_ylabel(label, color=INK)
        # Accuracies share a scale from 0; perplexities of different tasks lie far apart.
        if part is shares:
            axes.set_ylim(bottom=0)
        else:
            axes.set_yscale("log")
    figure.suptitle(title, x=0.02, ha="left", fontsize=12, color=INK)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def is_share(name: str) -> bool:
    """Return whether ``TASK/METRIC`` is a share of the task's documents, such as an accuracy."""
    return name.partition("/")[2].startswith(("acc", "exact"))


def _draw(axes: Axes, curves: Mapping[str, Mapping[int, float]]) -> None:
    for number, (name, values) in enumerate(sorted(curves.items())):
        steps = sorted(values)
        axes.plot(
            steps,
            [values[step] for step in steps],
            color=COLOURS[number % len(COLOURS)],
            linestyle=("-", "--", ":")[number // len(COLOURS) % 3],
            marker="o",
            markersize=4,
            label=name,
        )
    axes.set_xlabel("step", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.grid(axis="y", color=GREY, alpha=0.2, linewidth=0.8)
    axes.locator_params(axis="x", integer=True)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
