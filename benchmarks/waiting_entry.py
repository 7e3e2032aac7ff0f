"""raymega.train.entry whose ranks also wait, for each micro-batch, as they would for an accelerator.

A mock of one. Ranks that share two cores are no faster the more they are, so that a run on fewer of them
has no reason to grow again; and what a new process loads takes from those that train.
"""

import time

from raymega.train import entry, loop

WAIT_S = 0.1
"""Of a micro-batch."""
warm_up, host_rendezvous, abort = entry.warm_up, entry.host_rendezvous, entry.abort
TRAIN_STEP = loop.train_step


def run_worker(start, channel, rendezvous):
    loop.train_step = train_step
    entry.run_worker(start, channel, rendezvous)


def train_step(parts, state, wishes, **options):
    time.sleep(WAIT_S * parts.plan.batch.num_micro_batches)
    return TRAIN_STEP(parts, state, wishes, **options)
