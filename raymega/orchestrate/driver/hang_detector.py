"""Detects a hanging rank: learns the deadline, asks for probes, and names the rank.

The deadline follows the run's own step times. Before the job's upper bound, silence alone is no proof: a
process must be in state T, or every training thread must be at the same place in two probes. It reads signs
of life and a clock; the worker group makes the probes, and ``core/failure_policy.py`` decides what follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from statistics import median

from raymega.config.elastic import ElasticSection
from raymega.orchestrate.core.worker_group_api import (
    ANSWER_EVERY_S,
    Heartbeat,
    ProcessStatus,
    ThreadStatus,
    WorkerStatus,
)

MEDIANS, MARGIN_S = 3.0, 1.5
"""Factor of the median step time, and seconds added to it, of the deadline.

With one more probe after it, a hang is known within 2 s beyond the three median steps.
"""
NUM_STEPS, MIN_STEPS = 20, 3
"""Number of newest steps in the median, and number of steps from which on it is trusted."""
LOOK_AHEAD_S = LOOK_EVERY_S = 0.5
"""Lead of the first probe before the deadline, and interval between probes, in seconds."""
PROBES_PER_S = 1024
"""Ranks that are probed in a second, at most: thousands are probed less often."""
BUSY_SHARE = 0.1
"""Share of a CPU between two probes from which on a thread counts as computing."""
IDLE_STATES = ("S", "I")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """A detected hang: the rank, -1 when no single one can be named, and the evidence as text."""

    rank: int
    message: str


class HangDetector:
    """Signs of life of one attempt's processes and threads, and the verdict on them."""

    def __init__(self, elastic: ElasticSection, steps_s: Iterable[float] = ()) -> None:
        """Start from ``steps_s``, the run's earlier step times on the same grid, newest last."""
        self._least_s, self._most_s = elastic.hang_timeout_min_s, elastic.hang_timeout_max_s
        self._steps_s: deque[float] = deque(steps_s, maxlen=NUM_STEPS)
        # by rank: time of the last answer, state letter of a silent process, the last two probes
        self._answered_s: dict[int, float] = {}
        self._states: dict[int, str] = {}
        self._probes: dict[int, list[tuple[float, ThreadStatus]]] = {}
        self._probed_s = -inf
        self._every_s = ANSWER_EVERY_S  # interval in which processes give signs of life

    @property
    def deadline_s(self) -> float:
        """Deadline in seconds for a process to answer, and for any training thread to progress."""
        usual_s = median(self._steps_s) if self._steps_s else 0.0
        return min(max(MEDIANS * usual_s + MARGIN_S, self._least_s), self._most_s)

    @property
    def thread_statuses(self) -> dict[int, ThreadStatus]:
        """Newest ThreadStatus of each rank since the last step."""
        return {rank: samples[-1][1] for rank, samples in self._probes.items()}

    def add_step(self, seconds: float) -> None:
        """Add the time of a completed step, which makes earlier probes obsolete."""
        self._steps_s.append(seconds)
        self._probes.clear()

    def observe(self, sign: WorkerStatus, now_s: float) -> None:
        """Handle one sign of life."""
        match sign:
            case Heartbeat():
                self._answered_s[sign.rank] = now_s
                self._every_s = sign.every_s
                self._states.pop(sign.rank, None)
            case ProcessStatus():
                self._states[sign.rank] = sign.state
            case ThreadStatus():
                samples = self._probes.setdefault(sign.rank, [])
                samples.append((now_s, sign))
                del samples[:-2]

    def probe_due(
        self, now_s: float, *, last_sign_s: float, is_training: bool
    ) -> frozenset[int] | None:
        """Return the ranks whose process is silent if all ranks should be probed now, else None.

        ``is_training`` says that all ranks have their state. Before that only silent processes are probed,
        because threads wait for ranks that still start.
        """
        near_s = self.deadline_s - LOOK_AHEAD_S
        silent = frozenset(self._silent(near_s, now_s))
        is_quiet = self._is_armed(is_training=is_training) and now_s - last_sign_s >= near_s
        pause_s = max(LOOK_EVERY_S, len(self._answered_s) / PROBES_PER_S)
        if not (silent or is_quiet) or now_s - self._probed_s < pause_s:
            return None
        self._probed_s = now_s
        return silent

    def hang(self, now_s: float, *, last_sign_s: float, is_training: bool) -> Hang | None:
        """Return the hang if it is certain, or has lasted longer than the job allows; else None."""
        limit_s = self.deadline_s
        silent = self._silent(limit_s, now_s)
        # a stopped process is certain at the deadline
        for rank, silence_s in silent.items():
            if self._states.get(rank) == "T":
                return Hang(rank=rank, message=_stopped(silence_s, limit_s))
        # any other silent process only at the job's upper bound
        for rank, silence_s in silent.items():
            if silence_s >= self._most_s:
                message = f"its process has not answered for elastic.hang_timeout_max_s={self._most_s:g} s"
                return Hang(rank=rank, message=message)
        # processes answer, but no thread progresses: needs two probes of every rank
        if silent or not self._is_armed(is_training=is_training) or now_s - last_sign_s < limit_s:
            return None
        if self._answered_s.keys() - self._probes.keys():
            return None
        return _standstill(self._probes, since_s=last_sign_s, limit_s=limit_s)

    def _is_armed(self, *, is_training: bool) -> bool:
        return is_training and len(self._steps_s) >= MIN_STEPS

    def _silent(self, limit_s: float, now_s: float) -> dict[int, float]:
        """Return the ranks whose process has not answered for ``limit_s``, with the seconds of silence.

        Where signs come in a longer interval, silence may last as much longer. It is counted only until the next answer of any rank is due. A driver that was delayed itself
        has heard no rank and must not count its own delay.
        """
        limit_s += self._every_s - ANSWER_EVERY_S
        if not self._answered_s or now_s - min(self._answered_s.values()) < limit_s:
            return {}
        newest_s = max(self._answered_s.values())
        are_all_silent = now_s - newest_s >= limit_s
        until_s = now_s if are_all_silent else min(now_s, newest_s + self._every_s)
        ages = {rank: until_s - at_s for rank, at_s in self._answered_s.items()}
        return {rank: age_s for rank, age_s in ages.items() if age_s >= limit_s}


def _stopped(silence_s: float, limit_s: float) -> str:
    return (
        f"its process is stopped (state T) and has not answered for {silence_s:.1f} s; the deadline is "
        f"{limit_s:.1f} s, three median steps and {MARGIN_S:g} s"
    )


def _standstill(
    stands: Mapping[int, list[tuple[float, ThreadStatus]]], *, since_s: float, limit_s: float
) -> Hang | None:
    """Return a hang if two probes after ``since_s`` found every thread idle at an unchanged place.

    Of the ranks that wait for no collective or transfer, a single one is named.
    """
    pairs = {rank: samples for rank, samples in stands.items() if samples[-1][1].stack}
    if not pairs or not all(_is_idle(samples, since_s) for samples in pairs.values()):
        return None
    # astray: ranks that do not wait for another one, so the others wait for them
    last = {rank: samples[-1][1] for rank, samples in pairs.items()}
    astray = sorted(rank for rank, thread_status in last.items() if not thread_status.waits_for)
    told = f"no rank has moved for {limit_s:.1f} s, three median steps and {MARGIN_S:g} s"
    if not astray:
        return Hang(rank=-1, message=f"{told}: each waits for another; {_words(last)}")
    rank = astray[0] if len(astray) == 1 else -1
    return Hang(rank=rank, message=f"{told}; {_words({each: last[each] for each in astray})}")


def _is_idle(samples: list[tuple[float, ThreadStatus]], since_s: float) -> bool:
    if len(samples) < 2 or samples[0][0] < since_s:
        return False
    # same stack, asleep, hardly any CPU time, and not waiting for a store, disk or compiler
    (before_s, first), (after_s, second) = samples
    is_still = first.stack == second.stack and second.state in IDLE_STATES
    busy_s = second.cpu_s - first.cpu_s
    return is_still and not second.is_patient and busy_s < BUSY_SHARE * (after_s - before_s)


def _words(stands: Mapping[int, ThreadStatus], most: int = 4) -> str:
    shown: Iterable[int] = sorted(stands)[:most]
    return "; ".join(f"rank {rank}: {stands[rank]}" for rank in shown)
