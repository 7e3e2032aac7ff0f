"""What runs inside each worker of a TorchTrainer: raymega's own entry, between a mailbox and a thread.

It is the thin half of ray_train_group. It knows nothing of training, as worker, its elder, does not.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from threading import Event, Thread
from typing import Any, cast

import ray
import ray.train

from raymega.errors import WorkerError
from raymega.messages import StartWorker
from raymega.orchestrate.ray_train.mailbox import RemoteWorker
from raymega.orchestrate.workers.worker_actor import (
    EntryModule,
    ReportQueue,
    last_words,
    worker_location,
)

log = logging.getLogger(__name__)

EXCHANGE_EVERY_S = 0.25
ANSWER_TIMEOUT_S = 60.0
START_PATIENCE_S = 10.0
"""Of one call for the message; the driver bounds how often it is made."""


def run_worker(config: Mapping[str, Any]) -> None:
    """The training function of a TorchTrainer.

    Args:
        config: ``mailbox``, the actor, and ``entry``, the module to run.

    Raises:
        WorkerError: The attempt was over before it began.
    """
    mailbox = config["mailbox"]
    entry = cast(EntryModule, importlib.import_module(config["entry"]))
    entry.abort()  # the trainer's own process group would be in the way
    location = worker_location()
    address, rendezvous = entry.host_rendezvous(location.address)
    index = ray.train.get_context().get_world_rank()
    _ask(mailbox.come.remote(index, RemoteWorker(location=location, rendezvous=address)))
    start = _await_start(mailbox, index)
    queue, is_over = ReportQueue(), Event()
    thread = Thread(
        target=_exchange, args=(mailbox, start.rank, queue, entry, is_over), daemon=True
    )
    thread.start()
    try:
        entry.run_worker(start, queue, rendezvous if start.rank == 0 else None)
    except BaseException as error:
        queue.report(last_words(start.rank, 0, error))
        raise
    finally:
        is_over.set()
        thread.join(ANSWER_TIMEOUT_S)


def _exchange(
    mailbox: Any, rank: int, queue: ReportQueue, entry: EntryModule, is_over: Event
) -> None:  # Any: an actor class made at run time has no static type
    """Reports there, wishes back, until both the work and the reports are at an end."""
    while True:
        is_last = is_over.is_set()
        reports = queue.drain(0.0 if is_last else EXCHANGE_EVERY_S)
        requests = _ask(mailbox.exchange.remote(rank, reports))
        if requests is None:
            entry.abort()
            return
        if is_last:
            return
        if requests.save or requests.stop:
            queue.set_requests(requests)


def _await_start(mailbox: Any, index: int) -> StartWorker:
    while True:
        start = _ask(mailbox.start_of.remote(index, START_PATIENCE_S))
        if start is not None:
            return cast(StartWorker, start)
        if not _ask(mailbox.is_open.remote()):
            raise WorkerError("the attempt was over before its workers had met")


def _ask(ref: ray.ObjectRef[Any]) -> Any:
    return ray.get(ref, timeout=ANSWER_TIMEOUT_S)
