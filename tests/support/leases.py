"""Leases for tests of code that runs under one; a lease left by an earlier test blocks no later one."""

from raymega.orchestrate.core.clock import SystemClock
from raymega.orchestrate.run_store.lease import Lease
from raymega.orchestrate.run_store.lease_holder import this_process


def take_lease(store, clock=None):
    """Return a lease held by this process, which outlasts any test without renewal."""
    lease = Lease(
        store,
        holder=this_process(),
        duration_s=10_000.0,
        clock=clock or SystemClock(),
        knows_gone=lambda _holder: True,
    )
    lease.acquire()
    return lease
