"""History of a run from the lines of metrics.jsonl: the curves that survived, and what went wrong.

Of a step that was done again the last value counts. It reads a file and draws nothing.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
Record = dict[str, Any]  # Any: a line of JSON
PLACE = frozenset({"event", "step", "attempt", "grid"})
"""Fields of a step's line that are no metrics."""
SIGNS = frozenset({"bad_step", "straggler", "routing_collapsed", "save_failed"})


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one metric by step, in compact arrays: a run has hundreds of thousands of steps."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def put(self, step: int, value: float) -> None:
        """Add a value; those of this step and of later ones are dropped, for they are done again."""
        if self.steps and self.steps[-1] >= step:
            self.cut(step - 1)
        self.steps.append(step)
        self.values.append(value)

    def cut(self, last: int) -> None:
        """Drop the values of steps beyond ``last``."""
        if self.steps and self.steps[-1] > last:
            keep = bisect_right(self.steps, last)
            del self.steps[keep:], self.values[keep:]

    def at(self, step: int) -> float | None:
        """Return the value of a step, or None."""
        place = bisect_left(self.steps, step)
        is_there = place < len(self.steps) and self.steps[place] == step
        return self.values[place] if is_there else None


@dataclass(kw_only=True, slots=True)
class Incident:
    """Events from a failure until its lost steps are done again, or until the run ends."""

    failures: list[Record]
    attempt: Record | None = None
    recovered: Record | None = None


@dataclass(kw_only=True, slots=True)
class RunHistory:
    """Content of a run's lines.

    Attributes:
        run: Newest line of a driver that took the run up; empty before there is one.
        end: Line of that driver's end; None while it is under way, or when it was killed.
        step: Number of completed steps.
        steps: Training metrics by short name.
        evaluations: Validation metrics, and those of evaluation tasks, by short name.
        attempts: Lines of the attempts.
        restarts: Attempt, last step of the lost attempt, and the step from which the new one resumed.
        incidents: Failures with what followed.
        signs: Lines of bad steps, slow ranks, collapsed routing and failed saves.
        checkpoints: Lines of the checkpoints.
        memory: Metrics of each rank in the newest attempt, the largest of each.
        experts: Tokens of each expert, by step and layer.
        drivers: Number of drivers that have worked on the run.
    """

    run: Record = field(default_factory=dict)
    end: Record | None = None
    step: int = 0
    steps: dict[str, Series] = field(default_factory=dict)
    evaluations: dict[str, Series] = field(default_factory=dict)
    attempts: list[Record] = field(default_factory=list)
    restarts: list[tuple[int, int, int]] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    signs: list[Record] = field(default_factory=list)
    checkpoints: list[Record] = field(default_factory=list)
    memory: dict[int, dict[str, float]] = field(default_factory=dict)
    experts: dict[int, dict[int, list[float]]] = field(default_factory=dict)
    drivers: int = 0

    @property
    def grid(self) -> Mapping[str, int]:
        """Degrees of the newest attempt's axes; empty before there is one."""
        return self.attempts[-1].get("grid", {}) if self.attempts else {}

    def add(self, record: Record) -> None:
        """Add the next line."""
        match record["event"]:
            case "run":
                self.run, self.end = record, None
                self.drivers += 1
            case "attempt":
                self._restart(record)
            case "step" | "evaluation" | "tasks":
                self._measure_step(record)
            case "checkpoint":
                self.checkpoints.append(record)
            case "memory":
                self._measure_ranks(record)
            case "experts":
                tokens: Mapping[str, list[float]] = record["tokens"]
                self.experts[record["step"]] = {int(at): counts for at, counts in tokens.items()}
            case "failure" | "recovered":
                self._fail(record)
            case "finished":
                self.end = record
            case sign if sign in SIGNS:
                self.signs.append(record)

    def _restart(self, record: Record) -> None:
        """Add an attempt; the values of the lost one beyond its start do not count."""
        first = record["step"]
        # The first attempt of a run is no restart.
        if self.attempts:
            lost = max(self.step, first)
            self.restarts.append((record.get("attempt", 0), lost, first))
        self.attempts.append(record)
        self.step, self.memory = first, {}
        for series in (*self.steps.values(), *self.evaluations.values()):
            series.cut(first)
        for later in [step for step in self.experts if step > first]:
            del self.experts[later]
        if self.incidents and self.incidents[-1].recovered is None:
            self.incidents[-1].attempt = record

    def _fail(self, record: Record) -> None:
        is_open = bool(self.incidents) and self.incidents[-1].recovered is None
        if record["event"] == "recovered":
            if is_open:
                self.incidents[-1].recovered = record
        # A failure before the recovery is over belongs to the same incident.
        elif is_open:
            self.incidents[-1].failures.append(record)
        else:
            self.incidents.append(Incident(failures=[record]))

    def _measure_step(self, record: Record) -> None:
        is_step = record["event"] == "step"
        _put(self.steps if is_step else self.evaluations, record)
        if is_step:
            self.step = record["step"]

    def _measure_ranks(self, record: Record) -> None:
        for rank, metrics in record["ranks"].items():
            known = self.memory.setdefault(int(rank), {})
            for name, value in metrics.items():
                known[name] = max(value or 0.0, known.get(name, 0.0))


def load_history(path: Path) -> RunHistory:
    """Read metrics.jsonl; a line torn by a killed driver is skipped.

    Raises:
        OSError: The file cannot be read.
    """
    history = RunHistory()
    for record in read_records(path):
        history.add(record)
    return history


def read_records(path: Path) -> Iterator[Record]:
    """Yield the lines of metrics.jsonl that are valid JSON, one at a time."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def _put(series: dict[str, Series], record: Record) -> None:
    metrics: Iterable[tuple[str, object]] = record.items()
    for name, value in metrics:
        # NaN and infinity are null: they have no place in a curve.
        if name not in PLACE and isinstance(value, int | float):
            series.setdefault(name, Series()).put(record["step"], float(value))
