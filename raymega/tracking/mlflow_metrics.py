"""Metrics as MLflow shows them: their names, which have a curve, and which may wait for a second value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TypeVar

from mlflow.entities import Metric

from raymega.events import EvaluationFinished, StepFinished, TasksEvaluated
from raymega.tracking.names import TASK_METRIC, metrics_of
from raymega.tracking.sink import Stamped

NO_CURVE = frozenset(
    {
        "run/lease_age_s", "run/spares", "checkpoint/snapshot_step", "checkpoint/snapshot_lacking",
        "checkpoint/written_share",
    }
)  # fmt: skip
"""Metrics of the present moment, for alerts: over a run's life their curves say nothing."""
FIRST_FAMILIES = ("train", "eval")
"""Families that MLflow shows at once; it sorts families by name, and would begin with checkpoints."""
OFTEN_CONSTANT = frozenset({"train/global_batch_size", "train/loss_scale", "train/skipped_steps"})
KINDS = ("step", "evaluation", "tasks")
HIDDEN = frozenset(f"system/{name}" for name in NO_CURVE)
T = TypeVar("T")


def metrics_in(item: Stamped) -> Iterator[Metric]:
    """Yield the metrics of an event, with the time at which it was stamped."""
    step = getattr(item.event, "step", 0)
    for name, value in metrics_of(item.event).items():
        yield Metric(mlflow_name(name), float(value), int(item.time_s * 1000), step)


def mlflow_name(name: str) -> str:
    """Return a metric's name in MLflow: all but loss, speed and results are system metrics."""
    return name if name.partition("/")[0] in FIRST_FAMILIES else f"system/{name}"


def may_be_constant(key: str) -> bool:
    """Return whether the metric's curve waits for a second value; loss, speed and results never do."""
    is_of_machine = key.startswith("system/") and not key.startswith("system/run/")
    return is_of_machine or key in OFTEN_CONSTANT


def kind_of(key: str) -> str:
    """Return the kind of series to which a metric belongs; those of one kind advance together."""
    if key.startswith(f"{TASK_METRIC}/"):
        return "tasks"
    return "evaluation" if key.startswith("eval/") else "step"


def last_steps_in(tag: str) -> dict[str, int]:
    """Return the last step of each kind of series from the tag's text.

    Earlier versions had the last step of each metric there, and MLflow cut a long text: all of it that can be
    read counts.
    """
    found: dict[str, int] = {}
    for name, step in re.findall(r'"([^"]+)": (\d+)(?=[,}])', tag):
        kind = name if name in KINDS else kind_of(name)
        found[kind] = max(int(step), found.get(kind, -1))
    return found


def is_series(item: Stamped) -> bool:
    """Return whether the event is part of a per-step series, which a restart may repeat."""
    return isinstance(item.event, StepFinished | EvaluationFinished | TasksEvaluated)


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield ``items`` in parts of ``size``, the last one shorter."""
    return (items[start : start + size] for start in range(0, len(items), size))
