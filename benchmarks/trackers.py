"""Time that the driver's control loop spends on a tracker: none, and one that hangs for ever.

A step's event is handed to the sinks of a run: microseconds an event, beside a step of 100 ms. Then steps of a real
run's kind, each with work and an event, go in turns to sinks with and without the tracker that hangs: the share of
all steps' time that its events take, measured in this one run.

    python -m benchmarks.trackers [--quick]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence

from raymega.events import AttemptStarted, RunStarted, StepFinished
from raymega.tracking.queued_sink import QueuedSink, Recorder
from raymega.tracking.sink import CompositeSink, Stamped

STEP_S = 0.1
WORK_BYTES = 64 << 20
"""Bytes whose digest is a step's work: some 50 ms, half a step of the demo."""
METRICS = {f"train/output_std/{layer}": 1.0 for layer in range(60)} | {"train/loss": 2.0}


class Hung:
    """Tracker that never returns from its first record."""

    def record(self, _batch: Sequence[Stamped]) -> None:
        threading.Event().wait()

    def close(self) -> None: ...

    def is_refusal(self, _error: Exception) -> bool:
        return True


def begun_sink(open_recorder: Callable[[], Recorder] | None) -> CompositeSink:
    # without a tracker the sink is empty: what remains is the driver's own cost
    sinks = []
    if open_recorder is not None:
        sinks = [QueuedSink(open_recorder, title="tracker", clock=time.time)]
    sink = CompositeSink(sinks)
    sink.emit(
        RunStarted(run_id="r", name="n", uri="", is_resumed=False, step=0, total_steps=1, job={})
    )
    sink.emit(AttemptStarted(attempt=1, step=0, grid={}, reason="first start"))
    return sink


def share_of_steps(num_pairs: int) -> dict[str, float]:
    """Return percent of the steps' time that events take, by tracker; steps with and without it take turns."""
    sinks = {"none": begun_sink(None), "hung": begun_sink(Hung)}
    work, steps, emits = bytes(WORK_BYTES), dict.fromkeys(sinks, 0.0), dict.fromkeys(sinks, 0.0)
    for step in range(1, num_pairs + 1):
        for name, sink in sinks.items():
            began = time.perf_counter()
            hashlib.blake2b(work).digest()
            worked = time.perf_counter()
            sink.emit(StepFinished(attempt=1, step=step, metrics=METRICS))
            ended = time.perf_counter()
            steps[name] += ended - began
            emits[name] += ended - worked
    for sink in sinks.values():
        sink.close(0.0)
    return {name: 100 * emits[name] / steps[name] for name in sinks}


def seconds_of_emits(open_recorder: Callable[[], Recorder] | None, num_steps: int) -> list[float]:
    sink, spent = begun_sink(open_recorder), []
    for step in range(1, num_steps + 1):
        # made outside of the clock, as a run makes it anyway
        event = StepFinished(attempt=1, step=step, metrics=METRICS)
        began = time.perf_counter()
        sink.emit(event)
        spent.append(time.perf_counter() - began)
    sink.close(0.0)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2,000 events and 40 steps")
    is_quick = parser.parse_args().quick
    num_steps = 2_000 if is_quick else 60_000
    result = {}
    for name, open_recorder in {"none": None, "hung": Hung}.items():
        spent = seconds_of_emits(open_recorder, num_steps)
        mean, most = statistics.fmean(spent), max(spent)
        result[name] = {"mean_us": mean * 1e6, "max_ms": most * 1e3}
        # seconds over seconds of a step, in percent
        share = 100 * mean / STEP_S
        print(
            f"{name:5} {mean * 1e6:6.2f} us an event, {share:.4f} % of a step; at most {most * 1e3:.2f} ms"
        )
    shares = share_of_steps(40 if is_quick else 400)
    told = ", ".join(f"{name} {share:.3f} %" for name, share in shares.items())
    print(f"events' share of the time of steps in turns: {told}")
    print(json.dumps({**result, "share_of_steps": shares}))


if __name__ == "__main__":
    main()
