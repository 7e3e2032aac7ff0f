"""Head of a run's page: how the run stands, how far it is, and how fast."""

from __future__ import annotations

from statistics import median

from raymega.checkpoint.format.epochs import LeaseGrant
from raymega.drawing.svg import short
from raymega.tracking.history import RunHistory, Series

RECENT_STEPS = 50
"""Steps from whose median time the time left is reckoned."""
ENDS = {
    "finished": "finished",
    "failed": "failed",
    "preempted": "stopped in good order; the same command resumes it",
    "superseded": "continued by another driver",
}


def standing(history: RunHistory, driver: LeaseGrant | None) -> str:
    """Return how the run stands, in a few words.

    Args:
        history: History of the run.
        driver: Driver that holds the run now, or None.
    """
    if history.end is not None:
        status = str(history.end["status"])
        return ENDS.get(status, status)
    if driver is not None:
        return f"under way, driven by {driver.holder}"
    if not history.run:
        return "not started"
    return "its driver is gone; the same command resumes it"


def is_running(history: RunHistory, driver: LeaseGrant | None) -> bool:
    """Return whether a driver works on the run now."""
    return history.end is None and driver is not None


def run_facts(history: RunHistory, driver: LeaseGrant | None) -> dict[str, str]:
    """Return the run's most important figures, by name."""
    # curves may be empty: a restart from step 0 drops the values of all steps
    steps = {name: series for name, series in history.steps.items() if series.values}
    total = history.run.get("total_steps", 0)
    found = {
        "step": f"{history.step:,} of {total:,}",
        "training loss": _last(steps.get("loss"), ".4f"),
        "validation loss": _last(history.evaluations.get("loss"), ".4f"),
        "tokens": short(steps["tokens"].values[-1]) if "tokens" in steps else "",
        "tokens/s, median": _median(steps.get("tokens_per_s")),
        "MFU, median": f"{median(steps['mfu'].values):.1%}" if "mfu" in steps else "",
        "step time, median": f"{median(steps['step_time_s'].values):.3g} s"
        if "step_time_s" in steps
        else "",
        "workers": f"{_workers(history):,}" if history.attempts else "",
        "grid": describe_grid(history) if history.attempts else "",
        "attempts": f"{history.attempts[-1].get('attempt', 1)}" if history.attempts else "",
        "newest checkpoint": f"step {history.checkpoints[-1]['step']:,}"
        if history.checkpoints
        else "none",
    }
    if is_running(history, driver) and (left_s := time_left_s(history)) is not None:
        found["time left"] = f"about {duration(left_s)}"
    if history.end is not None:
        found["wall time, last driver"] = duration(history.end["wall_s"])
        found["goodput, last driver"] = f"{history.end['goodput']:.1%}"
    return {name: value for name, value in found.items() if value}


def time_left_s(history: RunHistory) -> float | None:
    """Return the seconds that the steps left take at the pace of the newest; None without a pace."""
    times = history.steps.get("step_time_s")
    if times is None or not times.values:
        return None
    left = max(0, history.run.get("total_steps", 0) - history.step)
    return left * median(times.values[-RECENT_STEPS:])


def describe_grid(history: RunHistory) -> str:
    """Return the newest attempt's degrees above 1, such as ``tp2 pp2``."""
    degrees = [f"{axis}{degree}" for axis, degree in history.grid.items() if degree > 1]
    return " ".join(degrees) or "one rank"


def duration(seconds: float) -> str:
    """Return a length of time with its two largest units: ``3 h 12 min``."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} days {hours % 24} h"


def _workers(history: RunHistory) -> int:
    size = history.attempts[-1].get("plan", {}).get("world_size")
    return int(size) if size else len(history.memory)


def _last(series: Series | None, form: str) -> str:
    return format(series.values[-1], form) if series is not None and series.values else ""


def _median(series: Series | None) -> str:
    return short(median(series.values)) if series is not None and series.values else ""
