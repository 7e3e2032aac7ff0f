"""Keeps torch's store from asking name servers; it owns that switch and nothing of the store.

Goes when TCPStore takes an address without a reverse lookup.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

TRIES = 1
"""Place of glibc's number of tries for each name server in a thread's resolver state."""


@contextmanager
def without_name_lookups() -> Iterator[None]:
    """In the body, this thread's lookups in the DNS fail at once; /etc/hosts is still read.

    torch's store looks up a name for every address it meets, for its messages only, and has no
    setting for it. Where no server answers for the cluster's addresses, each new worker stood still
    for 6 s and more. After one failure torch asks no more in that process
    (https://github.com/pytorch/pytorch/pull/159596), so failing fast once is enough. Systems
    without glibc are left as they are.
    """
    state = _resolver_state()
    if state is None:
        yield
        return
    before, state[TRIES] = state[TRIES], 0
    try:
        yield
    finally:
        state[TRIES] = before


def _resolver_state() -> ctypes._Pointer[ctypes.c_int] | None:
    """The calling thread's, made if need be; it begins with seconds a try and number of tries."""
    library = ctypes.CDLL(None)
    try:
        make, find = library["__res_init"], library["__res_state"]
    except AttributeError:
        return None
    find.restype = ctypes.POINTER(ctypes.c_int)
    return None if make() else find()
