"""Signs of a worker beside its reports: that it answers, where its training thread stands, how its process is.

They stay within orchestrate. What follows from them is watch's.
"""

from __future__ import annotations

from dataclasses import dataclass

ANSWER_EVERY_S = 1.0
"""A worker's process that has nothing to report answers so often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """A worker's process has met a call. It says nothing of its training."""

    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadStatus:
    """Where a rank's training thread stands, which a worker is asked for when progress lacks.

    Attributes:
        rank: Of the worker.
        step: Completed steps.
        doing: Instruction of the schedule; empty between passes.
        waits_for: Collective or transfer that it waits for; empty for none.
        is_patient: It waits for a store, a disk or a compiler, which may take longer than a step.
        state: The kernel's letter for the thread, ``R`` while it runs; empty where nobody says so.
        cpu_s: CPU that the thread has had.
        stack: Its innermost calls, the last one innermost.
    """

    rank: int
    step: int
    doing: str
    waits_for: str
    is_patient: bool
    state: str
    cpu_s: float
    stack: tuple[str, ...]

    def __str__(self) -> str:
        location = self.waits_for or " of ".join(self.stack[:-4:-1]) or "nowhere"
        verb = "waits for" if self.waits_for else "is in"
        doing = f" at {self.doing}" if self.doing else ""
        return f"after step {self.step}{doing} it {verb} {location}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStatus:
    """A neighbour on the node has looked at the process of a rank that does not answer.

    ``state`` is the kernel's letter, ``T`` of one that is stopped; empty when there is none.
    """

    rank: int
    state: str


WorkerStatus = Heartbeat | ThreadStatus | ProcessStatus
