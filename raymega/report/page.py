"""The page of a run: one self-contained HTML document, from the run's own records.

It reads metrics.jsonl and the pictures beside it, and asks the store who drives the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from xml.sax.saxutils import escape

from raymega.checkpoint.format.epochs import LeaseGrant
from raymega.config.fields import by_path
from raymega.config.schema import Job
from raymega.drawing.page import charts, facts, folded, note, page, table, zoomable
from raymega.errors import ConfigError, RaymegaError
from raymega.orchestrate.run_store.lease import driver_of
from raymega.report.events import incidents_section
from raymega.report.find import RunPlace
from raymega.report.memory import job_of, memory_section, plan_of
from raymega.report.summary import is_running, run_facts, standing
from raymega.storage.registry import open_store
from raymega.tracking.history import RunHistory, load_history
from raymega.tracking.plots_sink import TIMELINE_FILE
from raymega.tracking.run_charts import (
    EXPERTS,
    LEARNING,
    SPEED,
    charts_of,
    evaluation_charts,
    expert_map,
    loss_chart,
)

_DOCUMENT = re.compile(r"<svg.*</svg>", re.DOTALL)


def run_page(
    place: RunPlace, *, now: datetime, levels_of: Callable[[Job], Mapping[str, float]]
) -> str:  # fmt: skip
    """Return the page of a run.

    Args:
        place: Place of the run's records.
        now: Time of writing.
        levels_of: Function that returns the horizontal lines of a job's loss curve by label, in nats.

    Raises:
        ConfigError: metrics.jsonl cannot be read.
    """
    try:
        history = load_history(place.metrics)
    except (OSError, ValueError) as error:
        raise ConfigError(
            fact=f"{place.metrics} cannot be read: {error}",
            rule="it must hold the events of a run of this version, one JSON object a line",
            remedy="give the folder of another run",
        ) from error
    # who drives it now, and what its job says
    uri = history.run.get("uri", place.uri)
    name = history.run.get("name", place.folder.name)
    driver = _driver(uri, now=now)
    job = job_of(history)
    levels = levels_of(job) if job is not None else {}
    return page(f"Run {name}", _sections(history, job, driver, place, now=now, levels=levels))


def _sections(
    history: RunHistory,
    job: Job | None,
    driver: LeaseGrant | None,
    place: RunPlace,
    *,
    now: datetime,
    levels: Mapping[str, float],
) -> Iterator[str]:
    # how the run stands
    kind = _mood(history, driver)
    yield f'<p class="{kind}"><b>{escape(standing(history, driver))}</b></p>'
    if history.end is not None and history.end["status"] == "failed":
        yield f'<p class="alarm">{escape(history.end.get("reason", ""))}</p>'
    written = now.astimezone(UTC).isoformat(sep=" ", timespec="seconds")
    yield note(f"{history.run.get('uri', place.uri)}, as of {written}")
    yield facts(run_facts(history, driver))
    # curves
    if not history.steps:
        yield note("No step has finished yet.")
    else:
        yield "<h2>Learning</h2>"
        yield charts(
            [loss_chart(history, levels=levels), *charts_of(history, LEARNING), *evaluation_charts(history)]
        )  # fmt: skip
        yield "<h2>Speed</h2>"
        yield charts(charts_of(history, SPEED))
    # ranks and experts
    if history.memory:
        yield "<h2>Memory by rank</h2>"
        yield memory_section(history, plan_of(job, history.grid))
    found = [*filter(None, [expert_map(history)]), *charts_of(history, EXPERTS)]
    if found:
        yield "<h2>Experts</h2>"
        yield charts(found)
    # incidents, time line, settings
    yield "<h2>Incidents</h2>"
    yield from incidents_section(history)
    if timeline := _timeline(place):
        yield "<h2>Time line of a step</h2>"
        yield zoomable(timeline)
    yield "<h2>Settings</h2>"
    yield _settings(history, job)


def _mood(history: RunHistory, driver: LeaseGrant | None) -> str:
    """Return the CSS class of the run's standing."""
    if is_running(history, driver):
        return "note"
    is_good = history.end is not None and history.end["status"] in ("finished", "preempted")
    return "good" if is_good else "alarm"


def _driver(uri: str, *, now: datetime) -> LeaseGrant | None:
    """Return who drives the run; None also where the store does not answer."""
    try:
        return driver_of(open_store(uri), now=now.astimezone(UTC).isoformat())
    except RaymegaError:
        return None


def _timeline(place: RunPlace) -> str:
    """Return the picture that the run drew at its end, without the head of its file."""
    path = place.folder / TIMELINE_FILE
    if not path.is_file():
        return ""
    found = _DOCUMENT.search(path.read_text(encoding="utf-8"))
    return found[0] if found else ""


def _settings(history: RunHistory, job: Job | None) -> str:
    everything = by_path(history.run.get("job", {}))
    if job is None:
        return table(("setting", "value"), _rows(everything))
    changed = by_path(job.model_dump(mode="json", exclude_defaults=True))
    rest = {name: value for name, value in everything.items() if name not in changed}
    return table(("setting", "value"), _rows(changed)) + folded(
        f"{len(rest)} settings at their default values", table(("setting", "value"), _rows(rest))
    )


def _rows(values: Mapping[str, object]) -> list[tuple[str, str]]:
    return [(name, str(value)) for name, value in values.items()]
