"""JsonLinesSink writes each event as one line of JSON: metrics.jsonl and ``raymega train --json``.

docs/watching.md lists the events. `tracking/history.py` reads the lines back.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import fields
from heapq import nlargest
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Protocol

from raymega.events import (
    AttemptFailed,
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
    WorkersStarted,
)
from raymega.storage.rotated_file import RotatedFile
from raymega.tracking.names import find_metric

Record = dict[str, object]
MOST_RANKS, NUM_WORST = 64, 8
"""Number of ranks up to which a line has each, and number of ranks of each metric that it has of more."""
MANY = ("step", "memory", "experts", "timeline")
"""Events of each step or of each few steps, of which a long run needs one in ten."""


class Stream(Protocol):
    """Destination of the lines."""

    def write(self, text: str, /) -> int:
        """Append one line."""

    def flush(self) -> None:
        """Make it visible to readers."""

    def close(self) -> None:
        """End the file."""


class JsonLinesSink:
    """Sink that writes and flushes one line per event, so that a reader sees it at once.

    Lines of steps and evaluations hold the metrics under their short names, and the attempt's grid.
    Floats survive a round trip bit for bit; NaN and infinity become null.
    """

    def __init__(self, stream: Stream, *, is_owner: bool = False) -> None:
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
                return head | _place(event) | _of_ranks(event.ranks)
            case ExpertLoads():
                tokens = {str(layer): [*counts] for layer, counts in event.tokens.items()}
                return head | _place(event) | {"tokens": tokens}
            case AttemptFailed() | WorkersStarted():
                return head | {name: _few(value) for name, value in _fields(event).items()}
            case _:
                return head | _fields(event)


def open_jsonl(path: Path) -> JsonLinesSink:
    """Return a sink that appends to ``path``, whose folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return JsonLinesSink(RotatedFile(path, kind_of=kind_of_line), is_owner=True)


def kind_of_line(line: str) -> str:
    """Return the event of a line of which a long run needs some only; '' for one that must stay."""
    return next((kind for kind in MANY if line.startswith(f'{{"event": "{kind}"')), "")


def _of_ranks(ranks: Mapping[int, Mapping[str, float]]) -> Record:
    """Return the values of each rank, or of many ranks those with the largest values and a summary.

    The summary has the least, the median and the largest value of each metric.
    """
    if len(ranks) <= MOST_RANKS:
        return {"ranks": {str(rank): _by_short_name(row) for rank, row in ranks.items()}}
    # each metric's worst ranks
    columns: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for rank, row in ranks.items():
        for name, value in row.items():
            columns[name].append((value, rank))
    worst = sorted({r for column in columns.values() for _, r in nlargest(NUM_WORST, column)})
    summary = {
        kind: _by_short_name({n: of([value for value, _ in c]) for n, c in columns.items()})
        for kind, of in (("least", min), ("median", median), ("most", max))
    }
    shown = {str(rank): _by_short_name(ranks[rank]) for rank in worst}
    return {"ranks": shown, "num_ranks": len(ranks), **summary}


def _few(value: object) -> object:
    """Return a mapping by rank cut to MOST_RANKS entries; anything else as it is."""
    if not isinstance(value, dict) or len(value) <= MOST_RANKS:
        return value
    return dict(islice(value.items(), MOST_RANKS))


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
