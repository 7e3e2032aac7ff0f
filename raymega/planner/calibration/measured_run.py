"""Read a measured run from its metrics.jsonl, and fit an accelerator's constants to its step times.

The module reads the lines of the jsonl sink. It accesses no store and starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from raymega.config.schema import Job
from raymega.errors import ConfigError, Fault, counted, one_line
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.run_plan import ON_GRID, RunPlan, make_plan
from raymega.planner.calibration.fit import OF_A_STEP, Case, calibrate
from raymega.planner.cost.step_time import step_time
from raymega.storage.rotated_file import read_lines

METRICS_FILE = "metrics.jsonl"
LEFT_OUT = 2
"""Number of steps at the start of an attempt that are ignored: they open connections and load
kernels."""
SPREAD = 0.7
"""Expected distance of a constant from the catalogue's, as a logarithm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLayout:
    """Layout of a run with its median step time.

    Attributes:
        plan: Plan that the steps ran.
        step_s: Median seconds of the steps.
        num_steps: Number of steps that were measured.
    """

    plan: RunPlan
    step_s: float
    num_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Accelerator before and after a fit to a measured run.

    Attributes:
        before: Accelerator before the fit.
        after: Accelerator with constants that fit the run.
        layouts: Measured layouts of the run.
    """

    before: Accelerator
    after: Accelerator
    layouts: tuple[MeasuredLayout, ...]


def read_layouts(run: Path) -> tuple[MeasuredLayout, ...]:
    """Return the layouts of a run that have more steps than are ignored.

    Args:
        run: Path of the run's folder, or of its metrics.jsonl.

    Raises:
        ConfigError: The file cannot be read, or no layout has enough steps.
    """
    path = run / METRICS_FILE if run.is_dir() else run
    try:
        found = tuple(_layouts(_records(path)))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(_no_run(run, one_line(error))) from error
    if not found:
        raise ConfigError(_no_run(run, f"no layout has more than {LEFT_OUT} steps"))
    return found


def calibrate_on(layouts: tuple[MeasuredLayout, ...], device: Accelerator) -> Calibration:
    """Fit the constants of ``device`` to measured steps.

    Constants that steps do not determine stay near the device's own.
    """
    cases = [
        Case(
            name=layout.plan.grid.describe(),
            seconds=layout.step_s,
            predict=lambda at, plan=layout.plan: step_time(plan, at).total_s,  # type: ignore[misc]
        )
        for layout in layouts
    ]
    after = calibrate(device, cases, OF_A_STEP, spread=SPREAD)
    was = max(abs(case.error(device)) for case in cases)
    steps = sum(layout.num_steps for layout in layouts)
    known = (
        f"Fitted to {counted(steps, 'step')} of one run on {counted(len(layouts), 'layout')}, for which the constants of "
        f"{device.name} were {was:.0%} off; other layouts have not been compared."
    )
    return Calibration(before=device, after=replace(after, known_error=known), layouts=layouts)


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the events; a line that a killed driver has torn is skipped."""
    for line in read_lines(path):
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                yield record


def _layouts(records: Iterable[Mapping[str, Any]]) -> Iterable[MeasuredLayout]:
    """Yield the measured layouts of a run, without the first steps of each attempt."""
    job: Job | None = None
    taken: dict[str, list[float]] = {}
    plans: dict[str, RunPlan] = {}
    since_start, key = 0, ""
    for record in records:
        if record["event"] == "run":
            job = Job.model_validate_json(json.dumps(record["job"]))
        elif record["event"] == "attempt" and job is not None:
            # An attempt may run on another grid than the job asked for.
            degrees = {axis: int(degree) for axis, degree in record["grid"].items()}
            plan = make_plan(job.with_values(parallel=degrees, cluster=ON_GRID))
            key, since_start = plan.to_json(), 0
            plans[key] = plan
        elif record["event"] == "step" and key:
            since_start += 1
            if since_start > LEFT_OUT:
                taken.setdefault(key, []).append(float(record["step_time_s"]))
    for key, seconds in taken.items():
        yield MeasuredLayout(plan=plans[key], step_s=median(seconds), num_steps=len(seconds))


def _no_run(run: Path, why: str) -> Fault:
    return Fault(
        fact=f"--calibrate {run}: {why}",
        rule=f"it is the folder of a run that took steps, with its {METRICS_FILE}",
        remedy="give the folder <checkpoint.uri>/<run.name>, or the file itself",
    )
