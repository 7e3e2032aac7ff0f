"""Whether a rank hangs: how much silence is too much, what is looked at then, and who is named.

The deadline is learned from the run's own steps. Silence alone condemns nobody before the job's upper
bound: a process must be seen to be stopped, or every thread to stand still, at two looks. It reads signs
and a clock; to look is the group's, and what to do about a hang policies'.
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
"""The deadline: so many median steps, and so many seconds; a look more, and a hang is known within 2 s."""
NUM_STEPS, MIN_STEPS = 20, 3
"""Newest steps that the median is of, and how few say nothing yet."""
LOOK_AHEAD_S = LOOK_EVERY_S = 0.5
"""Looks begin so long before the deadline, and are so far apart."""
BUSY_SHARE = 0.1
"""A thread that had this share of a CPU between two looks is at work."""
IDLE_STATES = ("S", "I")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """Who hangs, -1 for nobody alone, and how that shows."""

    rank: int
    message: str


class HangDetector:
    """What is known of the ranks of one attempt beside what they report."""

    def __init__(self, elastic: ElasticSection, steps_s: Iterable[float] = ()) -> None:
        """``steps_s`` are the run's earlier steps on the same grid, the newest last."""
        self._least_s, self._most_s = elastic.hang_timeout_min_s, elastic.hang_timeout_max_s
        self._steps_s: deque[float] = deque(steps_s, maxlen=NUM_STEPS)
        self._answered_s: dict[int, float] = {}
        self._states: dict[int, str] = {}
        self._stands: dict[int, list[tuple[float, ThreadStatus]]] = {}
        self._probed_s = -inf

    @property
    def deadline_s(self) -> float:
        """Silence that is too much, of a process as of all training threads."""
        usual_s = median(self._steps_s) if self._steps_s else 0.0
        return min(max(MEDIANS * usual_s + MARGIN_S, self._least_s), self._most_s)

    @property
    def standings(self) -> dict[int, ThreadStatus]:
        """Where each rank stood when it was last asked."""
        return {rank: samples[-1][1] for rank, samples in self._stands.items()}

    def add_step(self, seconds: float) -> None:
        """A step is complete."""
        self._steps_s.append(seconds)
        self._stands.clear()

    def observe(self, sign: WorkerStatus, now_s: float) -> None:
        """Take in one sign."""
        match sign:
            case Heartbeat():
                self._answered_s[sign.rank] = now_s
                self._states.pop(sign.rank, None)
            case ProcessStatus():
                self._states[sign.rank] = sign.state
            case ThreadStatus():
                samples = self._stands.setdefault(sign.rank, [])
                samples.append((now_s, sign))
                del samples[:-2]

    def probe_due(
        self, now_s: float, *, last_sign_s: float, is_training: bool
    ) -> frozenset[int] | None:
        """Ranks whose process is silent, when it is time to look at all; None when it is not.

        Threads are looked at from when all ranks have their state: before, they wait for those that start.
        """
        near_s = self.deadline_s - LOOK_AHEAD_S
        silent = frozenset(self._silent(near_s, now_s))
        is_quiet = self._is_armed(is_training=is_training) and now_s - last_sign_s >= near_s
        if not (silent or is_quiet) or now_s - self._probed_s < LOOK_EVERY_S:
            return None
        self._probed_s = now_s
        return silent

    def hang(self, now_s: float, *, last_sign_s: float, is_training: bool) -> Hang | None:
        """Who hangs, if that is sure, or has lasted longer than the job allows."""
        limit_s = self.deadline_s
        silent = self._silent(limit_s, now_s)
        for rank, silence_s in silent.items():
            if self._states.get(rank) == "T":
                return Hang(rank=rank, message=_stopped(silence_s, limit_s))
        for rank, silence_s in silent.items():
            if silence_s >= self._most_s:
                message = f"its process has not answered for elastic.hang_timeout_max_s={self._most_s:g} s"
                return Hang(rank=rank, message=message)
        if silent or not self._is_armed(is_training=is_training) or now_s - last_sign_s < limit_s:
            return None
        if self._answered_s.keys() - self._stands.keys():
            return None
        return _standstill(self._stands, since_s=last_sign_s, limit_s=limit_s)

    def _is_armed(self, *, is_training: bool) -> bool:
        return is_training and len(self._steps_s) >= MIN_STEPS

    def _silent(self, limit_s: float, now_s: float) -> dict[int, float]:
        """Ranks whose process has not answered for so long, and how long.

        Until the next answer of any is due: a driver that was held up itself has heard nobody.
        """
        newest_s = max(self._answered_s.values(), default=now_s)
        is_nobody_heard = now_s - newest_s >= limit_s
        until_s = now_s if is_nobody_heard else min(now_s, newest_s + ANSWER_EVERY_S)
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
    """A hang, when since ``since_s`` every thread was found idle at one place, twice."""
    pairs = {rank: samples for rank, samples in stands.items() if samples[-1][1].stack}
    if not pairs or not all(_is_idle(samples, since_s) for samples in pairs.values()):
        return None
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
    (before_s, first), (after_s, second) = samples
    is_still = first.stack == second.stack and second.state in IDLE_STATES
    busy_s = second.cpu_s - first.cpu_s
    return is_still and not second.is_patient and busy_s < BUSY_SHARE * (after_s - before_s)


def _words(stands: Mapping[int, ThreadStatus], most: int = 4) -> str:
    shown: Iterable[int] = sorted(stands)[:most]
    return "; ".join(f"rank {rank}: {stands[rank]}" for rank in shown)
