"""Attempts, incidents and warnings of a run, as tables."""

from __future__ import annotations

from collections.abc import Iterator

from raymega.drawing.page import card, folded, note, table
from raymega.errors import counted
from raymega.report.summary import duration
from raymega.tracking.history import Incident, Record, RunHistory
from raymega.tracking.incidents import STATE_SOURCES

MOST_INCIDENTS, MOST_SIGNS = 50, 50


def incidents_section(history: RunHistory) -> Iterator[str]:
    """Yield the incidents with their costs, then the attempts and the warnings."""
    if not history.incidents:
        yield note("No failure.")
    for number, each in enumerate(history.incidents[-MOST_INCIDENTS:], start=1):
        yield _card(number + max(0, len(history.incidents) - MOST_INCIDENTS), each)
    if len(history.attempts) > 1:
        headers = ("attempt", "from step", "grid", "reason")
        rows = [
            (
                each.get("attempt", 0),
                each["step"],
                " ".join(f"{axis}{n}" for axis, n in each.get("grid", {}).items() if n > 1)
                or "one rank",
                each.get("reason", ""),
            )
            for each in history.attempts
        ]
        yield folded(counted(len(rows), "attempt"), table(headers, rows))
    if history.signs:
        signs = [(each.get("step", 0), _sign(each)) for each in history.signs[-MOST_SIGNS:]]
        yield folded(counted(len(history.signs), "warning"), table(("step", "warning"), signs))


def _card(number: int, incident: Incident) -> str:
    first, after = incident.failures[0], incident.recovered
    causes = [str(each.get("cause", "")) for each in incident.failures]
    title = (
        f"Incident {number}: attempt {first.get('attempt', 0)}, after step {first.get('step', 0)}"
    )
    costs = {"decision": str(first.get("decision", ""))}
    if after is None:
        costs["outcome"] = "not recovered"
    else:
        costs |= {
            "steps lost": str(after["lost_steps"]),
            "detected after": duration(after["detection_s"]),
            "recovered after": duration(after["recovery_s"]),
            "state from": STATE_SOURCES.get(after.get("source", ""), ""),
        }
        phases = after.get("phases") or {}
        if phases:
            longest = max(phases, key=lambda name: phases[name])
            costs["longest phase"] = f"{longest}, {duration(phases[longest])}"
    return card(title, causes, {name: value for name, value in costs.items() if value})


def _sign(record: Record) -> str:
    match record["event"]:
        case "bad_step":
            return f"{record['fact']}; {record['action']}"
        case "straggler":
            return f"rank {record['rank']} worked {record['ratio']:.1f} times as long as the others"
        case "routing_collapsed":
            experts = ", ".join(map(str, record["experts"]))
            return f"routing collapse in layer {record['layer']}: experts {experts}"
        case _:
            return f"a checkpoint could not be written: {record.get('reason', '')}"
