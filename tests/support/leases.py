"""Leases for tests of what is done under one; those of tests that are over keep nobody out."""

from raymega.orchestrate.core.clock import SystemClock
from raymega.orchestrate.run_store.lease import Lease
from raymega.orchestrate.run_store.lease_holder import this_process


def take_lease(store, clock=None):
    """A lease that this process holds, which nobody renews: it outlasts any test."""
    lease = Lease(
        store,
        holder=this_process(),
        duration_s=10_000.0,
        clock=clock or SystemClock(),
        knows_gone=lambda _holder: True,
    )
    lease.acquire()
    return lease
