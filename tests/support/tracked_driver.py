"""A driver's part of a run, in a process of its own that may be killed: python -m tests.support.tracked_driver.

Arguments: folder, step of the restored state, last step to report, and how it ends: `killed` at once with
records on their way, `flushed` is killed when all are written, `finished` is an orderly end.
"""

import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from raymega.config.schema import TrackingSection
from raymega.plugins import Registry
from raymega.tracking.jsonl import open_jsonl
from raymega.tracking.queued_sink import QueuedSink
from raymega.tracking.sink import CompositeSink
from raymega.tracking.trackers.makers import TrackerSetup
from tests.unit.tracking.events import attempt_started, run_finished, run_started, step_finished

TRACKERS = ("jsonl", "tensorboard", "wandb")
GUARD_S = 300.0


def main(folder, first, last, end):
    setup = TrackerSetup(section=TrackingSection(trackers=TRACKERS), folder=folder)
    queues = [
        QueuedSink(lambda row=row: row.load()(setup), title=row.name, clock=time.time, flush_s=0.01)
        for row in (Registry().find("tracker", name) for name in TRACKERS)
    ]
    sink = CompositeSink([open_jsonl(folder / "metrics.jsonl"), *queues])
    sink.emit(run_started(is_resumed=first > 0, step=first, total_steps=last))
    sink.emit(attempt_started(1, step=first))
    for step in range(first + 1, last + 1):
        # two metrics of each step are enough to count steps by
        event = step_finished(step)
        sink.emit(replace(event, metrics={n: event.metrics[n] for n in ("train/loss", "train/lr")}))
    if end == "finished":
        sink.emit(run_finished(step=last))
        sink.close(GUARD_S)
        return
    # killed with empty queues, or ("queued") with whatever is in them
    while end == "flushed" and any(len(q._buffer) or q._num_in_flight for q in queues):
        threading.Event().wait(0.01)
    # no exit handler runs: what is on the disk now is what a reader finds
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
