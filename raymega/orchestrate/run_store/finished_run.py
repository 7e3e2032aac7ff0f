"""Tells, from its store alone, whether a run has nothing left to do."""

from __future__ import annotations

from collections.abc import Sequence

from raymega.checkpoint.format.epochs import newest_grant
from raymega.checkpoint.format.manifest import find_restore
from raymega.errors import RaymegaError
from raymega.events import RunFinished, RunStarted
from raymega.orchestrate.core.state import State
from raymega.orchestrate.run_store.journal import RunRecord
from raymega.storage.store import Store
from raymega.tracking.sink import SINK_CLOSE_S, CompositeSink, Sink


def finished_run(store: Store, record: RunRecord) -> tuple[RunStarted, RunFinished] | None:
    """Return the events of a run whose last step is saved and that no driver holds; else None.

    Args:
        store: Store of the run's own folder.
        record: Record of the run, with the number of steps that the job asks for.
    """
    if record.status != State.FINISHED or record.step < record.total_steps:
        return None
    try:
        grant, restore = newest_grant(store), find_restore(store)
    except RaymegaError:  # the driver says what is wrong
        return None
    saved = restore.manifest
    if saved is None or saved.step < record.total_steps or (grant and not grant.is_released):
        return None
    started = RunStarted(
        run_id=record.run_id,
        name=record.name,
        uri=store.uri,
        is_resumed=True,
        step=saved.step,
        total_steps=record.total_steps,
        job=saved.job,
    )
    ended = RunFinished(
        status="finished",
        step=saved.step,
        checkpoint_uri=f"{store.uri}/{restore.key}",
        goodput=1.0,
        wall_s=0.0,
        reason=f"nothing is left to do: step {saved.step} of {record.total_steps} is saved",
    )
    return started, ended


def tell(done: tuple[RunStarted, RunFinished], sinks: Sequence[Sink]) -> RunFinished:
    """Give the events of a finished run to ``sinks``, close them, and return the last event."""
    sink = CompositeSink(sinks)
    for event in done:
        sink.emit(event)
    sink.close(SINK_CLOSE_S)
    return done[1]
