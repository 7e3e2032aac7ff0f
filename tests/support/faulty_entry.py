"""raymega.train.entry with faults planted by the run's name: what real workers run in tests of guards.

``x.flip-1-5-2``: rank 1, in step 5 of attempt 2. nan: one pass makes a NaN. bad: every pass of the step
does, in every attempt, as a bad batch would; 0 for the attempt. flip: the lowest bit of a weight changes
after the step. hang: the training thread waits for nothing. slow: by the clock that measures
its work, all steps up to this one take 1,000 s more, whatever else the machine does.
"""

import math
import time
from threading import Event

import torch

from raymega.train import entry, loop, throughput

warm_up, host_rendezvous, abort = entry.warm_up, entry.host_rendezvous, entry.abort
TRAIN_STEP = loop.train_step


class WorkClock:
    """Stands in for the module ``time`` where a rank's own work is measured."""

    ahead_s = 0.0

    def monotonic(self):
        return time.monotonic() + self.ahead_s


WORK_CLOCK = throughput.time = WorkClock()


def run_worker(start, channel, rendezvous):
    # faults are in the run's name, which a test sets like any other field
    name = start.plan_json.partition('"name":"')[2].partition('"')[0]
    faults = [fault.split("-") for fault in name.split(".")[1:]]
    mine = [
        (kind, int(step))
        for kind, rank, step, attempt in faults
        if int(rank) == start.rank and int(attempt) in (0, start.attempt)
    ]

    def train_step(parts, state, wishes, **options):
        begin(parts, state, mine)
        outcome = TRAIN_STEP(parts, state, wishes, **options)
        end(parts, outcome.state, mine)
        return outcome

    # this process trains nothing else: replace the step, and put it back
    loop.train_step = train_step
    try:
        entry.run_worker(start, channel, rendezvous)
    finally:
        loop.train_step = TRAIN_STEP


def begin(parts, state, faults):
    step, size = state.step + 1, parts.plan.batch.global_batch_size
    for kind, at in faults:
        if kind == "hang" and at == step:
            Event().wait()
        # a clock that runs ahead stands for slow work: no test waits for it
        if kind == "slow" and step <= at:
            WORK_CLOCK.ahead_s += 1000.0
        # bad data come again after a restart, a passing NaN does not
        is_bad_batch = kind == "bad" and state.samples == (at - 1) * size
        if is_bad_batch or (kind == "nan" and at == step):
            spoil(parts, is_once=kind == "nan")


def spoil(parts, *, is_once):
    def make_nan(_module, _args, output):
        if is_once:
            # a bad batch poisons every pass over its samples, a passing fault one pass
            hook.remove()
        return output * math.nan

    hook = next(iter(parts.modules[0].layers.values())).mlp.register_forward_hook(make_nan)


def end(parts, state, faults):
    for kind, at in faults:
        if kind == "flip" and at == state.step:
            # weights may still be gathered: flip a bit when they are whole
            parts.weights.wait_for_all()
            param = next(iter(parts.modules[0].layers.values())).mlp.down.weight
            param.data.view(-1)[:1].view(torch.int64).bitwise_xor_(1)
