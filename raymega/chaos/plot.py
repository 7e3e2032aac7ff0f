"""Figure of a drill: both loss curves with the faults, and the wall time by cause."""

from __future__ import annotations

from pathlib import Path

from raymega.chaos.experiment import Verdict
from raymega.chaos.run_comparison import surviving
from raymega.tracking.loss_plot import BLUE, GREY, ORANGE, RED, make_figure

SIZE_INCHES = (8.0, 6.0)


def draw_verdict(verdict: Verdict, path: Path, *, title: str) -> None:
    """Draw the verdict to ``path``, whose suffix selects the format."""
    figure = make_figure(*SIZE_INCHES)
    curves, times = figure.subplots(2, 1, height_ratios=(3, 1))
    # loss curves: the undisturbed one thick and grey, in the background
    for output, color, width, label in (
        (verdict.calm, GREY, 4.0, "undisturbed"),
        (verdict.tried, BLUE, 1.2, "under faults"),
    ):
        steps = surviving(output)
        curves.plot(
            [*steps], [e["loss"] for e in steps.values()], color=color, lw=width, label=label
        )
    # faults, at the step of their injection
    for each in verdict.incidents:
        curves.axvline(each.injected.step, color=RED, lw=0.8, ls=":")
        curves.annotate(
            each.injected.fault.kind,
            (each.injected.step, 1.0),
            xycoords=("data", "axes fraction"),
            rotation=90,
            ha="right",
            va="top",
            fontsize=7,
            color=RED,
        )
    curves.set(title=title, xlabel="step", ylabel="loss, nats per token")
    curves.legend()
    # wall time by cause
    causes = sorted(verdict.sheet.by_cause.items(), key=lambda item: item[1])
    times.barh([name for name, _ in causes], [seconds for _, seconds in causes], color=ORANGE)
    times.set_xlabel(f"seconds of {verdict.sheet.wall_s:.0f}")
    figure.savefig(path)
