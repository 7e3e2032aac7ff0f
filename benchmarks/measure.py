"""Interleaved pairs: both sides of a comparison run in turn, so that a busy machine slows both.

The ratio of each pair is one sample; what is reported is their median with a 95 % interval of the
median by order statistics, which assumes nothing of how times are spread.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import comb, nan

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Seconds of one call, on the clock and of this process's CPUs."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Median:
    """A median and the 95 % interval around it."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def timed(call: Callable[[], object]) -> Sample:
    """Run ``call`` and return its wall and CPU time."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return Sample(wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu)


def interleave(
    ours: Callable[[], object], theirs: Callable[[], object], *, rounds: int, warmup: int = 2
) -> list[tuple[Sample, Sample]]:
    """Return pairs of samples of both, in alternating order.

    After the first round gc.freeze() exempts the live objects from garbage collection, as in a worker.
    """
    pairs = []
    for number in range(warmup + rounds):
        if number == 1:
            gc.collect()
            gc.freeze()
        if number % 2:
            b, a = timed(theirs), timed(ours)
        else:
            a, b = timed(ours), timed(theirs)
        if number >= warmup:
            pairs.append((a, b))
    gc.unfreeze()
    return pairs


def median(values: list[float]) -> Median:
    """The median with the narrowest order statistics that hold it in 95 % of all runs."""
    ordered = sorted(values)
    n = len(ordered)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    below = 0.0
    rank = -1
    while below + comb(n, rank + 1) / 2**n <= 0.025:
        rank += 1
        below += comb(n, rank) / 2**n
    if rank < 0:  # fewer than six samples cannot say
        return Median(value=middle, low=nan, high=nan)
    return Median(value=middle, low=ordered[rank], high=ordered[n - 1 - rank])


def report(name: str, pairs: list[tuple[Sample, Sample]], **facts: object) -> dict[str, object]:
    """Print and return the figures of a comparison: theirs over ours, above 1 is faster."""
    row: dict[str, object] = {
        "name": name,
        **facts,
        "rounds": len(pairs),
        "load": os.getloadavg()[0],
    }
    for clock in ("wall_s", "cpu_s"):
        ours = median([getattr(a, clock) for a, _ in pairs])
        theirs = median([getattr(b, clock) for _, b in pairs])
        ratio = median([getattr(b, clock) / getattr(a, clock) for a, b in pairs])
        row[clock] = {
            "ours": ours.value, "theirs": theirs.value, "ratio": ratio.value,
            "low": ratio.low, "high": ratio.high,
        }  # fmt: skip
        print(
            f"{name:32} {clock:6} ours {1e3 * ours.value:9.2f} ms  theirs "
            f"{1e3 * theirs.value:9.2f} ms  theirs / ours {ratio}"
        )
    print(json.dumps(row), flush=True)
    return row


def set_threads(threads: int) -> None:
    """Threads of this process, for both sides."""
    torch.set_num_threads(threads)
