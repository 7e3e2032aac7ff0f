"""Loss curve of a run: training and validation loss over steps, with restarts and reference levels.

Data are the lines of metrics.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY, RED, INK = "#2f6fb0", "#d9772b", "#8a8f98", "#c0392b", "#22262b"
SIZE_INCHES = (8.0, 4.5)
DOTS_PER_INCH = 160
MIN_POINTS_TO_SMOOTH = 60


@dataclass(kw_only=True, slots=True)
class LossCurve:
    """Losses of the surviving history: of a recomputed step the last value counts.

    Attributes:
        train: Training loss by step.
        evaluation: Validation loss by step.
        restarts: Last step of each lost attempt, and the step from which the next one resumed.
    """

    train: dict[int, float] = field(default_factory=dict)
    evaluation: dict[int, float] = field(default_factory=dict)
    restarts: list[tuple[int, int]] = field(default_factory=list)


def load_curve(path: Path) -> LossCurve:
    """Read the losses of metrics.jsonl; a line torn by a killed driver is skipped."""
    curve = LossCurve()
    for record in read_records(path):
        step = record.get("step", 0)
        if record["event"] == "attempt":
            _restart(curve, step)
        elif record["event"] == "step" and record.get("loss") is not None:
            curve.train[step] = record["loss"]
        elif record["event"] == "evaluation" and record.get("loss") is not None:
            curve.evaluation[step] = record["loss"]
    return curve


def draw_curve(
    curve: LossCurve, path: Path, *, title: str, references: Mapping[str, float]
) -> None:
    """Draw the curve to ``path``; its suffix (.png, .svg) selects the format.

    Args:
        curve: Losses and restarts to draw.
        path: Output file.
        title: Title of the figure, such as the run's name.
        references: Levels of horizontal lines in nats by label, such as the unigram entropy of the data.
    """
    figure = make_figure(*SIZE_INCHES)
    axes = figure.add_subplot()
    _draw_train(axes, curve.train)
    _draw_evaluation(axes, curve.evaluation)
    _draw_references(axes, references)
    _draw_restarts(axes, curve.restarts)
    _dress(axes, title)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def make_figure(width: float, height: float) -> Figure:
    """Return an empty figure of ``width`` by ``height`` inches, to be written by ``savefig``.

    pyplot is avoided: it keeps process-wide state and may look for a display. matplotlib is imported
    here because that takes a second, and only a finished run draws.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def read_records(path: Path) -> Iterable[dict[str, Any]]:  # Any: lines of JSON
    """Yield the lines of metrics.jsonl that are valid JSON."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def _restart(curve: LossCurve, step: int) -> None:
    """Record a restart from ``step``, and drop the values of the lost attempt beyond it."""
    # The first attempt of a run is no restart.
    if curve.train:
        curve.restarts.append((max(curve.train), step))
    for series in (curve.train, curve.evaluation):
        for later in [known for known in series if known > step]:
            del series[later]


def _draw_train(axes: Axes, train: Mapping[int, float]) -> None:
    steps = sorted(train)
    losses = [train[step] for step in steps]
    # Few points: one plain curve.
    if len(steps) < MIN_POINTS_TO_SMOOTH:
        axes.plot(steps, losses, color=BLUE, linewidth=1.8, label="training")
        return
    # Many points: the raw curve in the background, its running mean in front.
    axes.plot(steps, losses, color=BLUE, linewidth=0.8, alpha=0.3)
    axes.plot(steps, _smooth(losses), color=BLUE, linewidth=2.0, label="training (smoothed)")


def _smooth(values: list[float]) -> list[float]:
    """Return the mean over a centred window of about 2 % of the curve, narrower at its ends."""
    half = max(1, len(values) // 100)
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _draw_evaluation(axes: Axes, evaluation: Mapping[int, float]) -> None:
    if not evaluation:
        return
    steps = sorted(evaluation)
    losses = [evaluation[step] for step in steps]
    axes.plot(
        steps,
        losses,
        color=ORANGE,
        linewidth=1.0,
        marker="o",
        markersize=5.5,
        markeredgecolor="white",
        zorder=4,
        label="validation",
    )
    # The last value, as a number beside its point.
    axes.annotate(
        f"{losses[-1]:.2f}",
        (steps[-1], losses[-1]),
        xytext=(7, 0),
        textcoords="offset points",
        color=ORANGE,
        va="center",
        fontsize=9,
    )


def _draw_references(axes: Axes, references: Mapping[str, float]) -> None:
    for label, level in references.items():
        axes.axhline(level, color=GREY, linewidth=1.0, linestyle=(0, (5, 3)), zorder=1)
        axes.annotate(
            f"{label} {level:.2f}",
            (1.0, level),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 4),
            textcoords="offset points",
            ha="right",
            color=GREY,
            fontsize=9,
        )


def _draw_restarts(axes: Axes, restarts: list[tuple[int, int]]) -> None:
    """Draw a line where each attempt was lost, and a band over the recomputed steps."""
    # One entry in the legend for all restarts.
    for number, (lost, restored) in enumerate(restarts):
        label = "restart, with recomputed steps" if number == 0 else None
        axes.axvspan(restored, lost, color=RED, alpha=0.12, linewidth=0, label=label)
        axes.axvline(lost, color=RED, linewidth=1.0, linestyle=(0, (1, 2)))


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, color=INK, pad=10)
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("loss, nats per token", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(color=GREY, labelcolor=INK, labelsize=9)
    axes.grid(axis="y", color=GREY, alpha=0.2, linewidth=0.8)
    axes.margins(x=0.02)
    axes.locator_params(axis="x", integer=True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)
