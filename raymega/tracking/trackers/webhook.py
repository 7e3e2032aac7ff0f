"""WebhookRecorder posts a run's incidents as JSON to an address: a chat, a pager, a script."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from raymega.errors import counted
from raymega.events import (
    AttemptFailed,
    BadStep,
    Recovered,
    RoutingCollapsed,
    RunEvent,
    RunFinished,
    RunStarted,
    SaveFailed,
    StragglerDetected,
)
from raymega.tracking.queued_sink import is_local_refusal
from raymega.tracking.sink import Stamped

HTTP_TIMEOUT_S = 10.0
TOO_MANY_REQUESTS = 429
INCIDENTS = (
    AttemptFailed, Recovered, BadStep, SaveFailed, StragglerDetected, RoutingCollapsed, RunFinished,
)  # fmt: skip


class WebhookRecorder:
    """Recorder that posts failures, recoveries, bad steps, failed saves, slow ranks and the run's end.

    The body has ``text``, which Slack, Mattermost and Teams show, then the run's name and the event's fields.
    """

    def __init__(self, url: str) -> None:
        """Post to ``url``."""
        self._url, self._name = url, ""

    def record(self, batch: Sequence[Stamped]) -> None:
        """Post the event if it is an incident; raise where the address does not take it."""
        event = batch[0].event
        if isinstance(event, RunStarted):
            self._name = event.name
        if isinstance(event, INCIDENTS):
            body = json.dumps(_body(self._name, event)).encode()
            head = {"Content-Type": "application/json", "User-Agent": "raymega"}
            with urlopen(Request(self._url, data=body, headers=head), timeout=HTTP_TIMEOUT_S):
                pass

    def close(self) -> None:
        """Do nothing: no connection is kept."""

    def is_refusal(self, error: Exception) -> bool:
        """Return whether the address refused the request, so that a retry would fail the same way."""
        if isinstance(error, HTTPError):
            return 400 <= error.code < 500 and error.code != TOO_MANY_REQUESTS
        return is_local_refusal(error)


def _body(name: str, event: RunEvent) -> Mapping[str, object]:
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    plain = {n: dict(v) if isinstance(v, Mapping) else v for n, v in values.items()}
    return {"text": f"{name}: {_sentence(event)}", "run": name, "event": event.json_name} | plain


def _sentence(event: RunEvent) -> str:
    match event:
        case AttemptFailed():
            return f"attempt {event.attempt} failed after step {event.step}: {event.cause}; {event.decision}"
        case Recovered():
            return f"recovered at step {event.step}, {counted(event.lost_steps, 'step')} done again"
        case BadStep():
            return f"bad step {event.step}: {event.fact}; {event.action}"
        case SaveFailed():
            return f"the checkpoint of step {event.step} failed: {event.reason}"
        case StragglerDetected():
            return f"rank {event.rank} works {event.ratio:.1f} times as long as the others"
        case RoutingCollapsed():
            return f"experts {event.experts} of layer {event.layer} get hardly a token"
        case RunFinished():
            return (
                f"{event.status} at step {event.step}{f': {event.reason}' if event.reason else ''}"
            )
        case _:
            return event.json_name
