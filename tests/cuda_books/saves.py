"""A save beside a step: the share is copied to the host while the next step runs, and its update must wait."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from threading import Event
from typing import TYPE_CHECKING, Any

from raymega.checkpoint.save import writer as writer_module
from raymega.checkpoint.save.host_copy import HostCopy
from raymega.checkpoint.save.writer import CheckpointWriter
from raymega.checkpoint.snapshots.writer import SnapshotWriter
from raymega.messages import Replicas
from raymega.storage.memory_server import MemoryStoreServer
from raymega.train.save_schedule import NO_SNAPSHOTS, SaveScheduler

if TYPE_CHECKING:
    from raymega.train.build import TrainingComponents
    from tests.cuda_books.rank import Rank

TOKEN = "books"


class Forgetful:
    """A store that keeps nothing, and so reads no byte of what is written."""

    uri = "forgetful"

    def put(self, _key: str, _chunks: Iterable[Any], *, overwrite: bool) -> None:
        """Take an object and forget it."""


def make_scheduler(parts: TrainingComponents, rank: int) -> SaveScheduler:
    """Return the scheduler of a rank's saves, and of its snapshots where the job has some."""
    # memory behind large device addresses is never written, so checksums would only read zeros
    writer_module.crc32 = lambda _: 0
    nowhere: Any = Forgetful()
    writer = CheckpointWriter(nowhere, rank=rank, attempt=1, report=lambda _: None)
    snapshots = None
    if parts.plan.job.elastic.snapshot_every:
        home = _server().uri
        replicas = Replicas(token=TOKEN, write_to=(home,), num_copies=1, home=home)
        snapshots = SnapshotWriter(parts.plan, rank=rank, attempt=1, replicas=replicas)
    nobody: Any = None  # a channel that no skipped save is reported to
    return SaveScheduler(parts, channel=nobody, writer=writer, snapshots=snapshots, rank=rank)


@cache
def _server() -> MemoryStoreServer:
    """Return the snapshot server of this process."""
    return MemoryStoreServer("127.0.0.1", TOKEN)


def save_beside_a_step(rank: Rank, *, is_snapshot: bool) -> None:
    """Save a checkpoint, or only what snapshots are due, and do a step before the writer has waited for the copy.

    The writer waits in a thread of its own, at a moment that varies: here always after the step, which is the most
    that the step's own ordering has to bear.
    """
    is_step_over = Event()
    wait = HostCopy.wait

    def wait_later(self: HostCopy) -> None:
        is_step_over.wait()
        wait(self)

    HostCopy.wait = wait_later  # type: ignore[method-assign]
    scheduler = rank.scheduler
    outcome = rank.step(extra_reductions=(0.0, *NO_SNAPSHOTS))
    outcome = replace(outcome, extra_reductions=(0.0, *NO_SNAPSHOTS), save=not is_snapshot)
    scheduler.observe(outcome)
    scheduler.save_what_is_due(outcome, is_last=False)
    rank.step(before_update=scheduler.fence, extra_reductions=scheduler.extra_reductions())
    is_step_over.set()
    scheduler.wait()
    if scheduler._snapshots:
        scheduler._snapshots.wait()
    HostCopy.wait = wait  # type: ignore[method-assign]
