"""Lists the runs below a folder or prefix: what each is, how far it got, and whether a driver holds it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from raymega.checkpoint.format.epochs import LEASES, LeaseGrant, newest_grant
from raymega.checkpoint.format.keys import ROOT
from raymega.checkpoint.format.manifest import list_manifests, read_root
from raymega.errors import ConfigError, Fault, RaymegaError, raise_faults
from raymega.orchestrate.core.state import State
from raymega.orchestrate.run_store.journal import RECORD_KEY, read_record
from raymega.orchestrate.run_store.lease_holder import is_gone
from raymega.storage.registry import is_anything_at, local_path, open_store, reading_faults
from raymega.storage.store import Store, folders_below

METRICS = "metrics.jsonl"
CLOSED = re.compile(r"metrics\.\d+\.jsonl")
TAIL_BYTES = 1 << 18
"""Bytes at the end of a run's metrics that are searched for the newest step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """A run as a list shows it.

    Attributes:
        name: Name of the run.
        state: State of its driver; ``interrupted`` where that was killed, ``imported`` for
            weights that no run has written, ``unreadable`` where the record cannot be read.
        step: Newest step that is known, saved or not.
        saved_step: Step of the newest checkpoint; 0 for none.
        total_steps: Number of steps of the whole run; 0 where it is unknown.
        loss: Training loss of ``step``; None where it is unknown.
        attempts: Number of attempts.
        updated: Time of the newest sign of the driver, ISO 8601; empty where there is none.
        uri: Folder of the run.
        driver: Process that drives it and its machine; empty where none does.
    """

    name: str
    state: str
    step: int
    saved_step: int
    total_steps: int
    loss: float | None
    attempts: int
    updated: str
    uri: str
    driver: str


def list_runs(uri: str, *, now: str) -> list[RunSummary]:
    """Return the runs directly below ``uri``, or the one at it, the newest first.

    Args:
        uri: Folder or prefix, such as a job's checkpoint.uri.
        now: Present time, ISO 8601, by which leases have expired.

    Raises:
        ConfigError: There is nothing at the URI, or its store cannot be read.
    """
    raise_faults(ConfigError, reading_faults(uri, field="URI"))
    folder = local_path(uri)
    if not is_anything_at(uri) or (folder is not None and not folder.is_dir()):
        raise ConfigError(_nothing_at(uri, is_file=folder is not None and folder.exists()))
    places = [uri.rstrip("/")] if _is_run(open_store(uri)) else list(_runs_below(uri))
    found = [_summary(open_store(place), now=now) for place in places]
    return sorted(found, key=lambda run: run.updated, reverse=True)


def _is_run(store: Store) -> bool:
    return any(next(iter(store.list(key)), None) for key in (RECORD_KEY, LEASES, ROOT))


def _runs_below(uri: str) -> Iterator[str]:
    """Yield the folders of runs: those of a disk one by one, of an object store by its keys."""
    root, folder = uri.rstrip("/"), local_path(uri)
    if folder is not None:
        names = sorted(each.name for each in folder.iterdir() if each.is_dir())
        yield from (f"{root}/{name}" for name in names if _may_be_run(f"{root}/{name}"))
        return
    store = open_store(uri)
    for name in folders_below(store, ""):
        if f"{name}/{RECORD_KEY}" in store.list(f"{name}/{RECORD_KEY}"):
            yield f"{root}/{name}"


def _may_be_run(uri: str) -> bool:
    """Return whether a folder is a run; one that cannot be read is listed as such, and hides no other."""
    try:
        return _is_run(open_store(uri))
    except RaymegaError:
        return True


def _summary(store: Store, *, now: str) -> RunSummary:
    name = store.uri.rstrip("/").rpartition("/")[2]
    try:
        record, grant = read_record(store), newest_grant(store)
        step, loss = _newest_loss(store)
        saved = _saved_step(store)
    except RaymegaError:
        return RunSummary(
            name=name, state="unreadable", step=0, saved_step=0, total_steps=0, loss=None, attempts=0,
            updated="", uri=store.uri, driver="",
        )  # fmt: skip
    is_held = grant is not None and _is_held(grant, now)
    state = record.status if record else ("starting" if is_held else "imported")
    if record and not is_held and not State(record.status).is_end:
        state = "interrupted"
    return RunSummary(
        name=name,
        state=state,
        step=max(step, saved),
        saved_step=saved,
        total_steps=record.total_steps if record else 0,
        loss=loss,
        attempts=record.num_attempts if record else 0,
        updated=max(record.updated if record else "", grant.renewed if grant else ""),
        uri=store.uri,
        driver=str(grant.holder) if grant and is_held else "",
    )


def _is_held(grant: LeaseGrant, now: str) -> bool:
    """Return whether a driver holds the run, as far as this machine can tell."""
    is_expired = datetime.fromisoformat(now) > datetime.fromisoformat(grant.expires)
    return not grant.is_released and not is_expired and not is_gone(grant.holder)


def _saved_step(store: Store) -> int:
    keys = list_manifests(store)
    return read_root(store, keys[0]).step if keys else 0


def _newest_loss(store: Store) -> tuple[int, float | None]:
    """Return the newest step and its loss: of the run's metrics, else of its newest checkpoint."""
    try:
        # the newest part of the metrics, and if it was just begun the one before
        *_, older = (
            METRICS,
            *sorted(key for key in store.list("metrics.") if CLOSED.fullmatch(key)),
        )
        lines = [line for key in dict.fromkeys((older, METRICS)) for line in _tail(store, key)]
    except KeyError:  # of a run in an object store the metrics are on the driver's machine
        lines = []
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):  # the line that the tail cuts, or a damaged one
            continue
        match event:
            case {"event": "step", "step": int(step)}:
                loss = event.get("loss")
                return step, loss if isinstance(loss, float) else None
    keys = list_manifests(store)
    state = read_root(store, keys[0]).state if keys else {}
    losses = str(state.get("losses", "")).split()
    loss = float(losses[-1]) if losses else math.nan
    return int(state.get("step", 0)), loss if math.isfinite(loss) else None


def _tail(store: Store, key: str) -> list[str]:
    start = max(0, store.size(key) - TAIL_BYTES)
    return store.get(key, start=start).decode(errors="replace").splitlines()


def _nothing_at(uri: str, *, is_file: bool) -> Fault:
    return Fault(
        fact=f"{uri!r} is a file" if is_file else f"there is nothing at {uri!r}",
        rule="it is the root of runs, a job's checkpoint.uri, and must exist",
        remedy="start a run first: raymega train jobs/verify.yaml; or give another root",
    )
