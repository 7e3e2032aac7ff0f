"""The world of an attempt: open it, close it or abort it, and refuse numbers that were read after an abort.

Any thread may abort: the driver's call, a rank that fails, or the watcher of NCCL's errors. gloo then fails the
operation that a rank waits in. NCCL ends its kernels instead, and the rank reads what they left: garbage. So
each blocking read of a reduced number is followed by :func:`raise_if_aborted`.
"""

from __future__ import annotations

import logging
import sys
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store, TCPStore

from raymega.errors import CommunicationError, Fault
from raymega.glibc import without_name_servers
from raymega.parallel.workarounds.sockets import Connections
from raymega.parallel.workarounds.torch_private import abort_groups, count_groups_anew, nccl_errors

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between two looks at NCCL's errors."""
CAUSES = {
    "TIMEOUT": "an operation took longer than {timeout_s:g} s",
    "COMM_ERROR": "NCCL lost a peer or failed",
    "REMOTE_ERROR": "another rank's NCCL failed",
}


@dataclass(slots=True)
class _World:
    """State of this process's world.

    Attributes:
        connections: Sockets that it opened.
        cause: Cause of its abort; empty if it was not aborted.
        is_over: Set when it is closed or aborted.
        lock: Held by a thread that aborts, so that others return when it is done.
    """

    connections: Connections = field(default_factory=Connections)
    cause: str = ""
    is_over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)


_world = _World()


def host_store(host: str) -> tuple[str, Store]:
    """Serve a TCPStore on a free port; return its ``host:port`` and the store, which must be kept."""
    with without_name_servers():
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return f"{host}:{store.port}", store


def file_store(path: Path, world_size: int) -> Store:
    """Return a store in a file, for ranks of one machine."""
    return FileStore(str(path), world_size)


def open_world(
    *,
    rank: int,
    world_size: int,
    rendezvous: str,
    store: Store | None,
    timeout_s: float,
    device: torch.device,
) -> None:
    """Initialise torch.distributed with the other ranks: NCCL for a GPU, gloo for a CPU.

    Args:
        rank: Global rank of this process.
        world_size: Number of ranks to wait for.
        rendezvous: ``host:port`` of the store.
        store: The store itself where this process already has it, else None.
        timeout_s: Longest wait for the other ranks, and of any later operation, in seconds.
        device: Device of the tensors that will be sent; a GPU must be the current one.

    Raises:
        CommunicationError: The store or a rank did not answer in time.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        # rendezvous store
        if store is None:
            host, _, port = rendezvous.rpartition(":")
            with without_name_servers():
                store = TCPStore(host, int(port), is_master=False, timeout=timeout)
        store.set_timeout(timeout)
        # world: sockets that appear from here until finish_world belong to it
        _world.cause, _world.is_over = "", threading.Event()
        _world.connections.begin()
        count_groups_anew()
        # device_id is left out: it makes torch split every group off the world, in which all
        # ranks must take part, and then a rank could no longer build its own groups alone.
        # Transfers of a group would share one communicator, too, and wait for each other.
        hook = sys.excepthook
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
        # torch wraps it once more in each world, and never takes that back; the log has the rank anyway
        sys.excepthook = hook
    except RuntimeError as error:
        raise CommunicationError(meeting_fault("the world", rank, timeout_s, error)) from error
    if device.type == "cuda":
        _watch_nccl(timeout_s)


def finish_world() -> None:
    """Note that all connections of the new world exist."""
    _world.connections.built()


def close_world() -> None:
    """Destroy every group once all work is done; do nothing without a world."""
    _world.is_over.set()
    if dist.is_initialized():
        dist.destroy_process_group()


def abort_world(cause: str = "its attempt is over") -> None:
    """Fail the operations that this process and its peers wait in; any thread may call it.

    Afterwards the groups are gone, and a new world may be opened on a new store. A rank that is still
    in the rendezvous fails with its timeout.
    """
    with _world.lock:
        if not dist.is_initialized():
            return
        # First of all: whoever reads what an aborted kernel left must find the cause.
        _world.cause = cause
        _world.is_over.set()
        is_gloo = dist.get_backend() == "gloo"
        groups = abort_groups()
        # Destroying a gloo group blocks until its pending operation has ended, so a thread does it.
        while groups:
            threading.Thread(target=[groups.pop()].clear, name="close-group", daemon=True).start()
        if is_gloo:  # it aborts collectives, but not point-to-point transfers
            _world.connections.cut()


def raise_if_aborted(what: str) -> None:
    """Refuse a number that was read from the device; call it after each blocking read of a reduced one.

    Args:
        what: Name of the number, for the message.

    Raises:
        CommunicationError: The world was aborted, before the read or during it.
    """
    error = abort_error(f"a read of {what}")
    if error is not None:
        raise error


def abort_error(what: str) -> CommunicationError | None:
    """Return the error of ``what``, if the world was aborted; else None."""
    if not _world.cause:
        return None
    return CommunicationError(
        Fault(
            fact=f"the world was aborted during {what}: {_world.cause}",
            rule="a reduced number counts only if every rank took part",
            remedy="look at the rank that failed first; if all are only slow, raise "
            "elastic.collective_timeout_s",
        )
    )


def _watch_nccl(timeout_s: float) -> None:
    """Start the thread that aborts the world at NCCL's first error, which torch's watchdog notes.

    gloo's operations raise where a rank waits for them. With NCCL the host waits for a stream, which has no
    limit. torch's watchdog knows each operation's age; see `raymega.train.environment` for why it only notes.
    """
    watcher = threading.Thread(
        target=_watch, args=(_world.is_over, timeout_s), name="nccl-errors", daemon=True
    )
    watcher.start()


def _watch(is_over: threading.Event, timeout_s: float) -> None:
    while not is_over.wait(POLL_S):
        for group, error in nccl_errors():
            cause = f"group {group}: {CAUSES[error].format(timeout_s=timeout_s)}"
            log.error("aborting the world: %s", cause)
            # unless a new world was opened meanwhile
            if _world.is_over is is_over:
                abort_world(cause)
            return


def meeting_fault(what: str, rank: int, timeout_s: float, error: RuntimeError) -> Fault:
    """Return the fault of ranks that did not meet in time."""
    return Fault(
        fact=f"rank {rank} could not open {what}: {str(error).strip().splitlines()[0]}",
        rule=f"its ranks must meet within elastic.collective_timeout_s={timeout_s:g} s",
        remedy="look at the ranks that failed before, or raise elastic.collective_timeout_s",
    )
