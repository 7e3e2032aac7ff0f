"""JsonLinesSink writes each event as one line of JSON: metrics.jsonl and ``raymega train --json``.

docs/watching.md lists the events. `tracking/history.py` reads the lines back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TextIO

from raymega.events import (
    AttemptStarted,
    EvaluationFinished,
    ExpertLoads,
    Memory,
    RunEvent,
    RunFinished,
    RunStarted,
    StepFinished,
    TasksEvaluated,
    Timeline,
)
from raymega.tracking.names import find_metric

Record = dict[str, object]


class JsonLinesSink:
    """Sink that writes and flushes one line per event, so that a reader sees it at once.

    Lines of steps and evaluations hold the metrics under their short names, and the attempt's grid.
    Floats survive a round trip bit for bit; NaN and infinity become null.
    """

    def __init__(self, stream: TextIO, *, is_owner: bool = False) -> None:
        """Write to ``stream``, and with ``is_owner`` close it together with the sink."""
        self._stream = stream
        self._is_owner = is_owner
        self._run_id = ""
        self._grid: Mapping[str, int] = {}

    def emit(self, event: RunEvent) -> None:
        """Write the event's line; block only while the stream does."""
        if isinstance(event, RunStarted):
            self._run_id = event.run_id
        if isinstance(event, AttemptStarted):
            self._grid = event.grid
        line = json.dumps(self._record(event), allow_nan=False)
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self, timeout_s: float) -> None:  # noqa: ARG002 - nothing is waiting
        """Close the stream if the sink owns it."""
        if self._is_owner:
            self._stream.close()

    def _record(self, event: RunEvent) -> Record:
        head: Record = {"event": event.json_name}
        match event:
            case StepFinished() | EvaluationFinished() | TasksEvaluated():
                place = {"grid": dict(self._grid), "attempt": event.attempt}
                return head | {"step": event.step} | _by_short_name(event.metrics) | place
            # run_id comes from RunStarted: readers find the run by the last line alone.
            case RunFinished():
                return head | {"run_id": self._run_id} | _fields(event)
            case Timeline():
                return head | _place(event) | _by_short_name(event.metrics)
            # JSON has string keys only: ranks and layers become strings.
            case Memory():
                ranks = {str(rank): _by_short_name(row) for rank, row in event.ranks.items()}
                return head | _place(event) | {"ranks": ranks}
            case ExpertLoads():
                tokens = {str(layer): [*counts] for layer, counts in event.tokens.items()}
                return head | _place(event) | {"tokens": tokens}
            case _:
                return head | _fields(event)


def open_jsonl(path: Path) -> JsonLinesSink:
    """Return a sink that appends to ``path``, whose folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return JsonLinesSink(path.open("a", encoding="utf-8"), is_owner=True)


def _place(event: Timeline | Memory | ExpertLoads) -> Record:
    return {"step": event.step, "attempt": event.attempt}


def _by_short_name(metrics: Mapping[str, float]) -> Record:
    return {find_metric(name).short_name: _finite(value) for name, value in metrics.items()}


def _fields(event: RunEvent) -> Record:
    """Return the event's dataclass fields by name, mappings as plain dicts."""
    values = ((field.name, getattr(event, field.name)) for field in fields(event))
    return {n: dict(v) if isinstance(v, Mapping) else _finite(v) for n, v in values}


def _finite(value: object) -> object:
    is_odd = isinstance(value, float) and not math.isfinite(value)
    return None if is_odd else value
