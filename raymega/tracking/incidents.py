"""IncidentsSink: one page for each recovery of a run: what failed, who stood where, what was decided, what it cost.

It puts together what other events said; what a recovery passes through is orchestrate's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

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

MAX_RANKS = 64
"""Rows of the table of ranks; a larger run shows the first ones."""


@dataclass(kw_only=True, slots=True)
class _Incident:
    """From the first failure to the step that makes up for it."""

    number: int
    noticed_s: float
    attempt: int
    grid: Mapping[str, int]
    nodes: Mapping[int, str]
    failures: list[AttemptFailed] = field(default_factory=list)
    attempts: list[AttemptStarted] = field(default_factory=list)
    signs: list[BadStep | StragglerDetected] = field(default_factory=list)


class IncidentsSink:
    """Writes ``incident-001.md`` and so on, when a recovery is over or the run ends without one.

    It must come before ``watcher``'s sinks, so that they hear of the files before the end.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float], watcher: Sink) -> None:
        """Write into ``folder``, which is made when there is something to write.

        Args:
            folder: Pages of earlier drivers stay.
            clock: Seconds since the epoch.
            watcher: Told of each file.
        """
        self._folder, self._clock, self._watcher = folder, clock, watcher
        self._name = ""
        self._grid: Mapping[str, int] = {}
        self._nodes: Mapping[int, str] = {}
        self._signs: list[BadStep | StragglerDetected] = []
        self._open: _Incident | None = None

    def emit(self, event: RunEvent) -> None:
        """Remember, and write at the end of an incident: some kilobytes to a local file."""
        match event:
            case RunStarted():
                self._name = event.name
            case WorkersStarted():
                self._nodes = event.nodes
            case BadStep() | StragglerDetected():
                self._signs = [*self._signs[-4:], event]
            case AttemptStarted():
                self._start(event)
            case AttemptFailed():
                self._fail(event)
            case Recovered() | RunFinished() if self._open is not None:
                self._write(self._open, event)
                self._open = None

    def close(self, timeout_s: float) -> None:
        """Nothing is open."""

    def _start(self, event: AttemptStarted) -> None:
        self._grid = event.grid
        if self._open is not None:
            self._open.attempts.append(event)

    def _fail(self, event: AttemptFailed) -> None:
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
        path.write_text("\n".join(_page(self._name, incident, end)) + "\n", encoding="utf-8")
        self._watcher.emit(ArtefactWritten(path=str(path), title=f"Incident {incident.number}"))


def _page(name: str, incident: _Incident, end: Recovered | RunFinished) -> Iterator[str]:
    first = incident.failures[0]
    noticed = datetime.fromtimestamp(incident.noticed_s, tz=UTC).isoformat(timespec="milliseconds")
    yield f"# Run {name}: incident {incident.number}"
    yield ""
    yield f"- What: {_line(first.cause)}"
    yield f"- Noticed: {noticed}, in attempt {first.attempt}, after step {first.step}"
    yield f"- Decided: {_line(first.decision) or 'nothing'}"
    for later in incident.failures[1:]:
        yield f"- Then, in attempt {later.attempt}: {_line(later.cause)}; {_line(later.decision)}"
    yield from _outcome(incident, end)
    if incident.signs:
        yield from ("", "## Seen before", "")
        yield from (f"- {_sign(sign)}" for sign in incident.signs)
    yield from _ranks(first, incident.nodes)


def _outcome(incident: _Incident, end: Recovered | RunFinished) -> Iterator[str]:
    after = incident.attempts[-1].grid if incident.attempts else {}
    yield f"- Grid before: {_grid(incident.grid)}; after: {_grid(after) if after else 'none'}"
    if isinstance(end, RunFinished):
        yield f"- Outcome: the run {end.status} at step {end.step}: {_line(end.reason)}"
        return
    yield f"- Steps lost: {end.lost_steps}; attempt {end.attempt} went on from step {end.restored_step}"
    yield f"- State from: {'memory of other nodes' if end.source == 'memory' else end.source}"
    yield from ("", "## Where the time went", "", "| phase | seconds |", "|---|---|")
    phases = {"detect": end.detection_s} | dict(end.phases)
    yield from (f"| {phase} | {seconds:.3f} |" for phase, seconds in phases.items())
    yield f"| in all | {end.detection_s + end.recovery_s:.3f} |"


def _ranks(first: AttemptFailed, nodes: Mapping[int, str]) -> Iterator[str]:
    if not first.whereabouts:
        return
    yield from (
        "",
        "## Where each rank was last seen",
        "",
        "| rank | node | where |",
        "|---|---|---|",
    )
    for rank in sorted(first.whereabouts)[:MAX_RANKS]:
        mark = " (here it began)" if rank == first.rank else ""
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
    """On one line, and harmless in a table."""
    return " ".join(text.split()).replace("|", "/")
