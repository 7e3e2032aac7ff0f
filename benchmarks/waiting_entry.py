"""raymega.train.entry whose ranks also wait, for each micro-batch, as they would for an accelerator.

A mock of one. Ranks that share two cores are no faster the more they are, so that a run on fewer of them
has no reason to grow again; and what a new process loads takes from those that train.
"""

from threading import Event

from raymega.train import entry, loop

WAIT_S = 0.1
"""Seconds that a micro-batch waits."""
warm_up, host_rendezvous, held_step = entry.warm_up, entry.host_rendezvous, entry.held_step
TRAIN_STEP = loop.train_step
aborted = Event()


def abort():
    """An accelerator's work ends with its communicators, and so does the wait for it."""
    aborted.set()
    entry.abort()


def run_worker(start, channel, rendezvous):
    aborted.clear()
    loop.train_step = train_step
    entry.run_worker(start, channel, rendezvous)


def train_step(parts, state, wishes, **options):
    aborted.wait(WAIT_S * parts.plan.batch.num_micro_batches)
    return TRAIN_STEP(parts, state, wishes, **options)
