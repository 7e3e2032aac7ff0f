"""Calls into the C library that Python has no module for; nothing happens where it is not glibc.

Each function says when it goes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

M_MMAP_THRESHOLD = -3
"""Name of mallopt(3) for the size from which a block has pages of its own."""
CLONE_NEWNET = 0x40000000
"""Kind of namespace for setns(2): of network devices."""
NUM_TRIES = 1
"""Place of the number of tries for each name server in a thread's resolver state."""


def map_blocks_from(num_bytes: int) -> None:
    """Give each block of ``num_bytes`` and more pages of its own, which free() gives back at once.

    Goes when gRPC's buffers, which Arrow Flight receives into, can come from an allocator of ours.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, num_bytes)


def enter_network_namespace(file: int) -> None:
    """Move the calling thread into the namespace that the open ``file`` is.

    Goes when Python 3.12, which has os.setns, is the oldest that is supported.

    Raises:
        OSError: The system refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(file, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def without_name_servers() -> Iterator[None]:
    """In the body, this thread's lookups in the DNS fail at once; /etc/hosts is still read.

    torch's store looks up a name for every address that it meets, for its messages only, and has no
    setting for it. Where no server answers for the cluster's addresses, each new worker waited
    for 6 s and more. After one failure torch asks no more in that process
    (https://github.com/pytorch/pytorch/pull/159596), so failing fast once is enough.
    Goes when TCPStore takes an address without a reverse lookup.
    """
    state = _resolver_state()
    if state is None:
        yield
        return
    before, state[NUM_TRIES] = state[NUM_TRIES], 0
    try:
        yield
    finally:
        state[NUM_TRIES] = before


def _resolver_state() -> ctypes._Pointer[ctypes.c_int] | None:
    """The calling thread's, made if need be; it begins with seconds a try and number of tries."""
    libc = ctypes.CDLL(None)
    try:
        make, find = libc["__res_init"], libc["__res_state"]
    except AttributeError:
        return None
    find.restype = ctypes.POINTER(ctypes.c_int)
    return None if make() else find()
