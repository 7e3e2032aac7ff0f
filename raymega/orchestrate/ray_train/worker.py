"""The training function of a TorchTrainer: runs raymega's entry module and exchanges with the mailbox.

It is the worker's side of ``ray_train/worker_group.py``. Like ``workers/worker_actor.py`` it knows nothing of
training.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from threading import Event, Thread
from typing import Any, cast

import ray
import ray.train
from ray.exceptions import RayError

from raymega.errors import WorkerError
from raymega.messages import StartWorker
from raymega.orchestrate.ray_train.mailbox import RemoteWorker
from raymega.orchestrate.workers.worker_actor import (
    EntryModule,
    ReportQueue,
    last_words,
    rank_metrics_of,
    worker_location,
)

log = logging.getLogger(__name__)

EXCHANGE_EVERY_S = 0.25
ANSWER_TIMEOUT_S = 60.0
START_PATIENCE_S = 10.0
"""Longest wait of one call for the start message, in seconds; the driver bounds the whole wait."""


def run_worker(config: Mapping[str, Any]) -> None:
    """Run one worker inside a TorchTrainer, as its ``train_loop_per_worker``.

    Args:
        config: Mapping with ``mailbox``, the actor, and ``entry``, the name of the module to run.

    Raises:
        WorkerError: The attempt ended before the worker got its start message.
    """
    # register with the mailbox
    mailbox = config["mailbox"]
    entry = cast(EntryModule, importlib.import_module(config["entry"]))
    entry.abort()  # Train has made a default process group, which raymega's would collide with
    location = worker_location()
    address, rendezvous = entry.host_rendezvous(location.address)
    index = ray.train.get_context().get_world_rank()
    _ask(mailbox.come.remote(index, RemoteWorker(location=location, rendezvous=address)))
    # rank and plan, and a thread that exchanges reports for requests
    start = _await_start(mailbox, index)
    queue, is_over = ReportQueue(rank_metrics_of(start)), Event()
    thread = Thread(
        target=_exchange, args=(mailbox, start.rank, queue, entry, is_over), daemon=True
    )
    thread.start()
    # train; the driver learns of an error from the report, Train from the exception
    try:
        entry.run_worker(start, queue, rendezvous if start.rank == 0 else None)
    except BaseException as error:
        queue.report(last_words(start.rank, 0, error))
        raise
    finally:
        queue.end_metrics()
        is_over.set()
        thread.join(ANSWER_TIMEOUT_S)


def _exchange(
    mailbox: Any, rank: int, queue: ReportQueue, entry: EntryModule, is_over: Event
) -> None:  # Any: an actor class made at run time has no static type
    """Send reports and hand requests to the worker, until it has ended and all reports are sent."""
    while True:
        # read the flag before draining, so that the last reports are sent
        is_last = is_over.is_set()
        reports = queue.drain(0.0 if is_last else EXCHANGE_EVERY_S)
        try:
            requests = _ask(mailbox.exchange.remote(rank, reports))
        except RayError as error:  # or it would train on unheard
            log.warning("rank %d ends, as its mailbox does not answer: %s", rank, error)
            requests = None
        if requests is None:  # the attempt is over: fail the collectives that the worker waits in
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
