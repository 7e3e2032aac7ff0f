"""Saves on request: an object in the run's store asks for a checkpoint, and another one answers.

Any process that can write to the store can ask. The driver lists requests in another thread, so that a slow
store does not delay its loop. A request survives the end of a driver or an attempt. ``jobs/find_run.py``
finds a run by its name.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from shlex import quote
from uuid import uuid4

from pydantic import TypeAdapter

from raymega.errors import ConfigError, RaymegaError, StorageError
from raymega.orchestrate.core.clock import Clock
from raymega.orchestrate.core.state import State
from raymega.orchestrate.run_store.journal import RunRecord, read_record
from raymega.storage.json_objects import parse_object
from raymega.storage.store import Store

log = logging.getLogger(__name__)

REQUESTS, ANSWERS = "requests/", "answers/"
LOOK_EVERY_S = 2.0
"""Interval in which the driver lists requests, in seconds; object stores charge for each listing."""
ASK_EVERY_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveAnswer:
    """Answer to a request: the checkpoint of ``step`` is at ``uri``, or ``error`` says why there is none."""

    step: int
    uri: str
    error: str


_ANSWER: TypeAdapter[SaveAnswer] = TypeAdapter(SaveAnswer)


class SaveRequests:
    """The driver's side of save requests in one attempt. Called from the control loop; never blocks."""

    def __init__(self, store: Store, executor: Executor, clock: Clock) -> None:
        self._store, self._executor, self._clock = store, executor, clock
        # names of open requests with the step after which they came, and of answered ones
        self._asked_at: dict[str, int] = {}
        self._answered: set[str] = set()
        self._look: Future[list[str]] | None = None
        self._next_look_s = clock.monotonic()

    def has_new(self, step: int) -> bool:
        """Return whether a new request was found; ``step`` is the last completed step."""
        # start a listing when one is due
        if self._look is None:
            if self._clock.monotonic() < self._next_look_s:
                return False
            self._look = self._executor.submit(self._list)
        if not self._look.done():
            return False
        # take the result of the one before
        found, self._look = self._look.result(), None
        self._next_look_s = self._clock.monotonic() + LOOK_EVERY_S
        new = [name for name in found if name not in self._answered | self._asked_at.keys()]
        self._asked_at |= dict.fromkeys(new, step)
        return bool(new)

    def answer(self, step: int, *, uri: str = "", error: str = "") -> None:
        """Answer every request that came before ``step``, whose save is committed or has failed."""
        told = [name for name, asked_at in self._asked_at.items() if asked_at < step]
        for name in told:
            del self._asked_at[name]
            self._answered.add(name)
            self._executor.submit(self._tell, name, SaveAnswer(step=step, uri=uri, error=error))

    def _list(self) -> list[str]:
        try:
            return [key.removeprefix(REQUESTS) for key in self._store.list(REQUESTS)]
        except RaymegaError as error:
            log.warning("save requests cannot be listed: %s", error)
            return []

    def _tell(self, name: str, answer: SaveAnswer) -> None:
        """Write the answer, then delete the request."""
        # in this order: if the driver dies in between, its successor answers again
        try:
            self._store.put(ANSWERS + name, [json.dumps(asdict(answer)).encode()], overwrite=True)
            self._store.delete(REQUESTS + name)
        except RaymegaError as error:
            log.warning("a save request was not answered: %s", error)


def ask_for_save(
    store: Store, *, timeout_s: float, sleep: Callable[[float], None] = time.sleep
) -> SaveAnswer:
    """Ask the driver of the run in ``store`` for a checkpoint and wait until it is committed.

    Raises:
        ConfigError: No driver runs there.
        StorageError: No answer came within ``timeout_s`` seconds, or the run ended first.
    """
    _refuse_if_over(store)
    name = f"{uuid4().hex}.json"
    deadline_s = time.monotonic() + timeout_s
    store.put(REQUESTS + name, [b"{}"], overwrite=False)
    try:
        while time.monotonic() < deadline_s:
            # record before answer: a driver writes its answers before it records its end
            record = read_record(store)
            with suppress(KeyError):
                return parse_object(
                    store.get(ANSWERS + name),
                    _ANSWER,
                    name=f"{store.uri}/{ANSWERS}{name}",
                    rule="it says where the checkpoint is that was asked for",
                    remedy=f"raymega checkpoint list {quote(store.uri)}",
                )
            if record is None or State(record.status).is_end:
                raise _ended(store, record)
            sleep(ASK_EVERY_S)
        raise StorageError(
            fact=f"the run in {store.uri!r} has not answered for {timeout_s:g} s",
            rule="its driver looks for requests every few seconds, and answers when the checkpoint of "
            "the step under way is committed",
            remedy="see whether its driver lives; a longer --timeout covers longer steps and saves",
        )
    # a request that was given up must not cause a save later
    finally:
        for key in (REQUESTS + name, ANSWERS + name):
            store.delete(key)


def _refuse_if_over(store: Store) -> None:
    record = read_record(store)
    if record is not None and not State(record.status).is_end:
        return
    stands = f"is {record.status} at step {record.step}" if record else "was never begun"
    raise ConfigError(
        fact=f"the run in {store.uri!r} {stands}",
        rule="only a run that is at work can save",
        remedy="give <checkpoint.uri>/<run.name> of a run whose driver lives; `raymega "
        "checkpoint list` shows what it has saved",
    )


def _ended(store: Store, record: RunRecord | None) -> StorageError:
    stands = f"is {record.status} at step {record.step}" if record else "is gone"
    return StorageError(
        fact=f"the run in {store.uri!r} {stands}, and has not answered",
        rule="a request is answered by the driver of a run at work",
        remedy="`raymega checkpoint list` shows whether its last save is enough",
    )
