"""Figure of a drill: both loss curves with the faults, and the wall time by cause."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raymega.chaos.experiment import Verdict
from raymega.chaos.run_comparison import surviving
from raymega.drawing.bars import Bars, draw_bars
from raymega.drawing.chart import Chart, Curve, Mark, draw_chart
from raymega.drawing.svg import stack

CAUSE_FILL = "#e69f00"


def draw_verdict(verdict: Verdict, path: Path, *, title: str) -> None:
    """Write the figure of the verdict to ``path``, an SVG file."""
    runs = (("undisturbed", verdict.calm), ("under faults", verdict.tried))
    losses = draw_chart(
        Chart(
            title=f"{title}: loss, nats per token",
            curves=[_losses(label, surviving(output)) for label, output in runs],
            marks=[
                Mark(
                    label=each.injected.fault.kind, at=each.injected.step, since=each.injected.step
                )
                for each in verdict.incidents
            ],
        )
    )
    causes = sorted(verdict.sheet.by_cause.items(), key=lambda item: -item[1])
    times = draw_bars(
        Bars(
            title=f"Seconds by cause, of {verdict.sheet.wall_s:.0f}",
            unit="s",
            rows={cause: {cause: seconds} for cause, seconds in causes},
            fills={cause: CAUSE_FILL for cause, _ in causes},
            has_legend=False,
        )
    )
    path.write_text(stack([losses, times]), encoding="utf-8")


def _losses(label: str, steps: Mapping[int, Mapping[str, Any]]) -> Curve:
    return Curve(label=label, xs=[*steps], ys=[each["loss"] for each in steps.values()])
