"""IncidentsSink writes a Markdown page for each failure and its recovery: cause, ranks, decision, cost.

The page is assembled from events. `orchestrate/driver/recovery_log.py` measures the phases of a recovery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from raymega.errors import counted
from raymega.events import (
    ArtefactWritten,
    AttemptFailed,
    AttemptStarted,
    BadStep,
    Recovered,
    RunEvent,
    RunFinished,
    RunStarted,
    StragglerDetected,
    WorkersStarted,
)
from raymega.tracking.sink import Sink

STATE_SOURCES = {
    "nothing": "nothing", "store": "store", "memory": "snapshot in memory of other nodes",
    "replicas": "memory of the workers themselves",
}  # fmt: skip
"""Sources of a restored state, by their names in events."""
NEW_PROCESS = ("reserve", "rendezvous")
"""Phases of a recovery that wait for new processes."""
LEAST_WAIT_S = 2.0
"""Wait for new processes from which on the page names spares, in seconds."""
MAX_RANKS = 64
"""Maximum number of rows in the table of ranks; a larger run shows the lowest ranks."""


@dataclass(kw_only=True, slots=True)
class _Incident:
    """Events from the first failure until its lost steps are recomputed or the run ends."""

    number: int
    noticed_s: float
    attempt: int
    grid: Mapping[str, int]
    nodes: Mapping[int, str]
    failures: list[AttemptFailed] = field(default_factory=list)
    attempts: list[AttemptStarted] = field(default_factory=list)
    signs: list[BadStep | StragglerDetected] = field(default_factory=list)


class IncidentsSink:
    """Sink that writes ``incident-001.md`` and so on, after each recovery or when the run ends without one.

    It must come before the sinks behind ``watcher``, which get RunFinished after its files.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float], watcher: Sink) -> None:
        """Write into ``folder``, which is created with the first page.

        Args:
            folder: Output folder; pages of earlier drivers are kept, and numbers continue.
            clock: Clock in seconds since the epoch.
            watcher: Sink that gets an ArtefactWritten for each page.
        """
        self._folder, self._clock, self._watcher = folder, clock, watcher
        self._name = ""
        self._has_spares = True  # until the job is known
        self._grid: Mapping[str, int] = {}
        self._nodes: Mapping[int, str] = {}
        self._signs: list[BadStep | StragglerDetected] = []
        self._open: _Incident | None = None

    def emit(self, event: RunEvent) -> None:
        """Record the event; at the end of an incident write its page, some kilobytes in a local file."""
        match event:
            # context, kept for the page of a later failure
            case RunStarted():
                self._name = event.name
                elastic = event.job.get("elastic")
                self._has_spares = isinstance(elastic, dict) and bool(elastic.get("spares"))
            case WorkersStarted():
                self._nodes = event.nodes
            case BadStep() | StragglerDetected():
                # The five newest are enough to see a pattern.
                self._signs = [*self._signs[-4:], event]
            # the failure itself, further failures, and the attempts that follow
            case AttemptStarted():
                self._start(event)
            case AttemptFailed():
                self._fail(event)
            # the end of the incident
            case Recovered() | RunFinished() if self._open is not None:
                self._write(self._open, event)
                self._open = None

    def close(self, timeout_s: float) -> None:
        """Return at once: no file is open."""

    def _start(self, event: AttemptStarted) -> None:
        self._grid = event.grid
        if self._open is not None:
            self._open.attempts.append(event)

    def _fail(self, event: AttemptFailed) -> None:
        # A failure before the recovery is over belongs to the same incident.
        if self._open is None:
            number = 1 + len(list(self._folder.glob("incident-*.md")))
            self._open = _Incident(
                number=number, noticed_s=self._clock(), attempt=event.attempt, grid=self._grid,
                nodes=self._nodes, signs=self._signs,
            )  # fmt: skip
            self._signs = []
        self._open.failures.append(event)

    def _write(self, incident: _Incident, end: Recovered | RunFinished) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"incident-{incident.number:03d}.md"
        path.write_text("\n".join(self._lines(incident, end)) + "\n", encoding="utf-8")
        self._watcher.emit(ArtefactWritten(path=str(path), title=f"Incident {incident.number}"))

    def _lines(self, incident: _Incident, end: Recovered | RunFinished) -> Iterator[str]:
        yield from _page(self._name, incident, end)
        if isinstance(end, Recovered) and not self._has_spares:
            waited_s = sum(end.phases.get(phase, 0.0) for phase in NEW_PROCESS)
            if waited_s > LEAST_WAIT_S:
                yield ""
                yield (
                    f"A new process took most of the {waited_s:.1f} s of {' and '.join(NEW_PROCESS)}. "
                    "With --set elastic.spares=1 a loaded one stands by."
                )


def _page(name: str, incident: _Incident, end: Recovered | RunFinished) -> Iterator[str]:
    # head: what failed, when it was detected, what the driver decided
    first = incident.failures[0]
    noticed = datetime.fromtimestamp(incident.noticed_s, tz=UTC).isoformat(timespec="milliseconds")
    yield f"# Run {name}: incident {incident.number}"
    yield ""
    yield f"- Cause: {_line(first.cause)}"
    yield f"- Detected: {noticed}, in attempt {first.attempt}, after step {first.step}"
    yield f"- Decision: {_line(first.decision) or 'nothing'}"
    for later in incident.failures[1:]:
        yield f"- Then, in attempt {later.attempt}: {_line(later.cause)}; {_line(later.decision)}"
    # result, earlier warnings, ranks
    yield from _outcome(incident, end)
    if incident.signs:
        yield from ("", "## Warnings before the failure", "")
        yield from (f"- {_sign(sign)}" for sign in incident.signs)
    yield from _ranks(first, incident.nodes)


def _outcome(incident: _Incident, end: Recovered | RunFinished) -> Iterator[str]:
    after = incident.attempts[-1].grid if incident.attempts else {}
    yield f"- Grid before: {_grid(incident.grid)}; after: {_grid(after) if after else 'none'}"
    if isinstance(end, RunFinished):
        yield f"- Outcome: the run {end.status} at step {end.step}: {_line(end.reason)}"
        return
    yield f"- Steps lost: {end.lost_steps}; attempt {end.attempt} resumed from step {end.restored_step}"
    yield f"- State from: {STATE_SOURCES[end.source]}"
    yield from ("", "## Time by phase", "", "| phase | seconds |", "|---|---|")
    phases = {"detect": end.detection_s} | dict(end.phases)
    yield from (f"| {phase} | {seconds:.3f} |" for phase, seconds in phases.items())
    yield f"| total | {end.detection_s + end.recovery_s:.3f} |"


def _ranks(first: AttemptFailed, nodes: Mapping[int, str]) -> Iterator[str]:
    if not first.whereabouts:
        return
    yield from (
        "",
        "## Last known state of each rank",
        "",
        "| rank | node | state |",
        "|---|---|---|",
    )
    states = set(first.whereabouts.values())
    if len(states) == 1 and len(first.whereabouts) > 1:
        alike = f"all {len(first.whereabouts)}, {first.rank} failed first"
        yield f"| {alike} | {counted(len(set(nodes.values())) or 1, 'node')} | {_line(states.pop())} |"
        return
    for rank in sorted(first.whereabouts)[:MAX_RANKS]:
        mark = " (failed first)" if rank == first.rank else ""
        yield f"| {rank}{mark} | {nodes.get(rank, '')[:12]} | {_line(first.whereabouts[rank])} |"
    if len(first.whereabouts) > MAX_RANKS:
        yield f"| ... | | {len(first.whereabouts) - MAX_RANKS} more |"


def _sign(sign: BadStep | StragglerDetected) -> str:
    if isinstance(sign, BadStep):
        return f"step {sign.step}: {_line(sign.fact)}; {sign.action}"
    return f"step {sign.step}: rank {sign.rank} worked {sign.ratio:.1f} times as long as the others"


def _grid(grid: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={degree}" for axis, degree in grid.items() if degree > 1) or "one rank"


def _line(text: str) -> str:
    """Return the text on one line, without the separator of table cells."""
    return " ".join(text.split()).replace("|", "/")
