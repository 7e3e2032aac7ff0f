"""History of a run from the lines of metrics.jsonl: the curves that survived, and what went wrong.

Of a step that was done again the last value counts. It reads a file and draws nothing.
"""

from __future__ import annotations

import json
import logging
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raymega.storage.rotated_file import parts_of, read_placed_lines
from raymega.tracking.jsonl import kind_of_line

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
MOST_READ_BYTES = 64 * 2**20
"""Bytes of lines of steps that a reader of curves parses at most: a second or two."""
Record = dict[str, Any]  # Any: a line of JSON
PLACE = frozenset({"event", "step", "attempt", "grid"})
"""Fields of a step's line that are no metrics."""
NUMBER, TEXT, OBJECT = (int, float), (str,), (dict,)
NEEDED: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "attempt": {"step": NUMBER},
    "step": {"step": NUMBER},
    "evaluation": {"step": NUMBER},
    "tasks": {"step": NUMBER},
    "checkpoint": {"step": NUMBER},
    "recovered": dict.fromkeys(("lost_steps", "detection_s", "recovery_s"), NUMBER),
    "finished": {"status": TEXT, "wall_s": NUMBER, "goodput": NUMBER},
    "bad_step": {"fact": TEXT, "action": TEXT},
    "straggler": {"rank": NUMBER, "ratio": NUMBER},
    "routing_collapsed": {"layer": NUMBER, "experts": (list,)},
}
"""Fields that readers of a line take for granted, with the types of their values."""
GIVEN: Mapping[str, tuple[type, ...]] = {
    "name": TEXT,
    "uri": TEXT,
    "total_steps": NUMBER,
    "job": OBJECT,
    "grid": OBJECT,
    "plan": OBJECT,
}
"""Types of fields that a line may lack."""
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
        """Add the next line.

        Raises:
            KeyError: It lacks a field.
            TypeError: A field has a value of another type.
        """
        _check(record)
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


def load_history(path: Path, *, most_bytes: int = MOST_READ_BYTES) -> RunHistory:
    """Read metrics.jsonl and its older parts; a line that was torn by a killed driver, or damaged, is skipped.

    Beyond ``most_bytes`` only some lines of steps, memory, experts and timelines are read, evenly spaced: a
    curve needs no more.

    Raises:
        OSError: The file cannot be read.
        ValueError: It has lines, but none is an event.
    """
    history, num_events = RunHistory(), 0
    num_bytes = sum(part.stat().st_size for part in parts_of(path))
    for place, record in _placed_records(path, stride=-(-num_bytes // most_bytes)):
        try:
            history.add(record)
            num_events += 1
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            _warn(place, repr(error))
    if not num_events and path.read_bytes().strip():
        raise ValueError("no line is an event")
    return history


def read_records(path: Path) -> Iterator[Record]:
    """Yield the events of metrics.jsonl and its older parts, one at a time; lines that hold none are skipped."""
    for _, record in _placed_records(path):
        yield record


def _placed_records(path: Path, *, stride: int = 1) -> Iterator[tuple[tuple[Path, int], Record]]:
    """Yield each event with its file and the first byte of its line.

    Of the many lines, such as those of steps, one in ``stride`` of each kind is yielded.
    """
    numbers: Counter[str] = Counter()
    for part, byte, line in read_placed_lines(path):
        # thin by the line's kind, before it is parsed
        if stride > 1 and (kind := kind_of_line(line.decode("utf-8", errors="replace"))):
            numbers[kind] += 1
            if numbers[kind] % stride:
                continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            _warn((part, byte), str(error))
            continue
        if isinstance(record, dict) and isinstance(record.get("event"), str):
            yield (part, byte), record
        else:
            _warn((part, byte), "it is no event")


def _check(record: Record) -> None:
    """Raise if a line lacks a field that readers need, or has one of another type."""
    needed = NEEDED.get(record["event"], {})
    for name, kinds in {**GIVEN, **needed}.items():
        if (name in record or name in needed) and not isinstance(record[name], kinds):
            raise TypeError(f"{name}={record[name]!r} is no {kinds[0].__name__}")


def _warn(place: tuple[Path, int], why: str) -> None:
    log.warning("%s: the line at byte %d is skipped, it is damaged (%s)", *place, why)


def _put(series: dict[str, Series], record: Record) -> None:
    metrics: Iterable[tuple[str, object]] = record.items()
    for name, value in metrics:
        # NaN and infinity are null: they have no place in a curve.
        if name not in PLACE and isinstance(value, int | float):
            series.setdefault(name, Series()).put(record["step"], float(value))
