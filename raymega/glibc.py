"""Calls into the C library that Python has no module for; they do nothing where it is not glibc.

Each function names the condition under which it can be removed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

M_MMAP_THRESHOLD = -3
"""Parameter of mallopt(3): the size from which a block gets pages of its own."""
CLONE_NEWNET = 0x40000000
"""Namespace type of setns(2): network."""
NUM_TRIES = 1
"""Index of the number of tries for each name server in the resolver state, an array of int."""


def map_blocks_from(num_bytes: int) -> None:
    """Give each block of ``num_bytes`` or more its own pages, which free() returns to the system.

    Goes when gRPC's buffers, which Arrow Flight receives into, can use our own allocator.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, num_bytes)


def return_freed_memory() -> None:
    """Return the free pages of all heaps to the system.

    glibc has up to eight heaps a core. A new thread gets one in turn, and what it frees stays there. So the memory of a
    process would grow with each thread that does the same work, until every heap has held it once.
    Goes when all attempts of a worker's process run in one thread.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def enter_network_namespace(file: int) -> None:
    """Move the calling thread into the network namespace of the open descriptor ``file``.

    Goes when Python 3.12, which has os.setns, is the oldest supported version.

    Raises:
        OSError: The system refuses, for lack of privileges for example.
    """
    # use_errno keeps errno from being overwritten before it is read.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(file, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def without_name_servers() -> Iterator[None]:
    """Make this thread's DNS lookups fail at once in the body; /etc/hosts is still read.

    torch's TCPStore makes a reverse lookup of every peer's address, for its messages only, and has no
    setting for it. Where no server answers for the cluster's addresses, each new worker waited 6 s or
    more. After one failure torch stops asking in that process
    (https://github.com/pytorch/pytorch/pull/159596), so one fast failure is enough.
    Goes when TCPStore takes an address without a reverse lookup.
    """
    state = _resolver_state()
    if state is None:
        yield
        return
    # No try at all: the resolver fails without sending a packet.
    before, state[NUM_TRIES] = state[NUM_TRIES], 0
    try:
        yield
    finally:
        state[NUM_TRIES] = before


def _resolver_state() -> ctypes._Pointer[ctypes.c_int] | None:
    """Return the calling thread's resolver state; it begins with seconds a try, number of tries."""
    libc = ctypes.CDLL(None)
    try:
        make, find = libc["__res_init"], libc["__res_state"]
    except AttributeError:
        return None
    find.restype = ctypes.POINTER(ctypes.c_int)
    return None if make() else find()
