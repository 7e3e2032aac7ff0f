"""Output of `raymega plan --calibrate RUN`: prediction errors for a run, and an accelerator fitted to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from raymega.cli.output import print_json, table
from raymega.plan.hardware.catalog import CATALOGUE
from raymega.plan.hardware.catalog_file import find_accelerator
from raymega.planner.calibration.fit import OF_A_STEP, accelerator_yaml
from raymega.planner.calibration.measured_run import (
    Calibration,
    MeasuredLayout,
    calibrate_on,
    read_layouts,
)
from raymega.planner.cost.step_time import step_time
from raymega.planner.search.selection import seconds


def show_calibration(run: Path, gpu: str, *, as_json: bool) -> None:
    """Print measured steps beside predictions with the constants of ``gpu``, and with fitted ones."""
    layouts = read_layouts(run)
    job = layouts[0].plan.job
    name = gpu or ("cpu" if job.cluster.device == "cpu" else "h100")
    done = calibrate_on(layouts, find_accelerator(name))
    text = _yaml(done, job.run.name)
    if as_json:
        print_json(_object(done, text))
        return
    # one row per measured layout
    rows = [
        (
            layout.plan.grid.describe(), layout.num_steps, seconds(layout.step_s),
            seconds(before), f"{before / layout.step_s - 1:+.1%}",
            seconds(after), f"{after / layout.step_s - 1:+.1%}",
        )
        for layout, before, after in _predicted(done)
    ]  # fmt: skip
    print(f"run {job.run.name}, predicted as {done.before.name} and with fitted constants")
    headers = ("grid", "steps", "measured", "predicted", "error", "fitted", "error")
    print(table(headers, rows))
    print(
        table(
            ("constant", done.before.name, "fitted"),
            [
                (
                    each,
                    f"{getattr(done.before.fitted, each):.4g}",
                    f"{getattr(done.after.fitted, each):.4g}",
                )
                for each in OF_A_STEP
            ],
        )
    )
    # the fitted accelerator, to paste into a file
    print("\naccelerator file: save these lines as FILE.yaml for --gpu FILE.yaml\n")
    print(text, end="")


def _predicted(done: Calibration) -> Iterator[tuple[MeasuredLayout, float, float]]:
    """Yield each layout with its predicted step time (s), before and after the fit."""
    for layout in done.layouts:
        before, after = (
            step_time(layout.plan, device).total_s for device in (done.before, done.after)
        )
        yield layout, before, after


def _object(done: Calibration, text: str) -> dict[str, object]:
    return {
        "layouts": [
            {
                "grid": layout.plan.grid.degrees(),
                "steps": layout.num_steps,
                "measured_s": layout.step_s,
                "predicted_s": before,
                "fitted_s": after,
            }
            for layout, before, after in _predicted(done)
        ],
        "before": done.before.fitted,
        "after": done.after.fitted,
        "accelerator": text,
    }


def _yaml(done: Calibration, run: str) -> str:
    base = done.before.name
    like = base if base in CATALOGUE else "cpu" if done.before.shared_cores else "h100"
    name = re.sub(r"[^a-z0-9_.-]", "-", f"{base}-{run}".lower())
    comment = f"Constants fitted to the run {run} by raymega plan --calibrate."
    return accelerator_yaml(replace(done.after, name=name), like=like, comment=comment)
