"""ChaosRun runs one job under faults, listed or random, until its driver ends.

It decides when a fault is injected, and restarts a driver that a fault ended. `chaos/fault_injector.py` injects
faults, `chaos/time_accounting.py` evaluates the result.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from signal import SIGKILL

from raymega.chaos.driver_process import DriverOutput, DriverProcess
from raymega.chaos.fault_injector import FaultInjector, FaultTarget
from raymega.chaos.faults import KINDS, ChaosFault, ScheduledFault
from raymega.chaos.phase_barriers import RAISE, Arrival, Gate, arrival_at, close_gate, open_gate
from raymega.chaos.processes import Memory, look_at
from raymega.errors import PreemptedError

TICK_S = 0.01
TIMED_OUT = -1
"""Code of a run that did not end in time."""
ENDED_BY_US = (0, PreemptedError.exit_code, -SIGKILL)
"""Exit codes of a driver that a fault may have ended; with any other it failed by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InjectedFault:
    """Fault that was injected.

    Attributes:
        fault: Kind and phase; the phase of a random fault is ``step``, whatever the run was doing.
        at_s: Time of injection on the monotonic clock, in seconds.
        rank: Rank of the affected worker; -1 for a process without a rank and for faults of no worker.
        step: Number of completed steps at that time.
    """

    fault: ChaosFault
    at_s: float
    rank: int
    step: int


@dataclass(kw_only=True)
class ChaosRun:
    """Run of a job under faults.

    Attributes:
        driver: Driver process of the run, not started yet.
        injector: Injector of the faults.
        world_size: Number of ranks of the job's own grid.
        faults: Listed faults; each is injected after the previous one.
        scheduled_faults: Random faults; each follows a time after the recovery from the previous one.
        stop_after_s: Seconds after which a run under random faults is stopped.
        injected_faults: Faults injected so far.
        memory: Memory, threads and files of the run's processes after each recovery.
        is_stopped: Whether the run was stopped by ``stop_after_s``.
    """

    driver: DriverProcess
    injector: FaultInjector
    world_size: int
    faults: Sequence[ChaosFault] = ()
    scheduled_faults: Iterator[ScheduledFault] = field(default_factory=lambda: iter(()))
    stop_after_s: float = float("inf")
    injected_faults: list[InjectedFault] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    is_stopped: bool = False
    _pids: Mapping[int, int] = field(default_factory=dict)
    _step: int = 0
    _num_closed: int = 0
    _next: ScheduledFault | None = None
    _calm_since_s: float | None = None

    def run(self, *, timeout_s: float) -> int:
        """Run to the end and return the exit code of the last driver; TIMED_OUT after ``timeout_s`` seconds."""
        deadline_s = time.monotonic() + timeout_s
        # The first gate must exist before the first worker can pass it.
        self._close_next()
        self.driver.start()
        try:
            while time.monotonic() < deadline_s:
                if (code := self._tick()) is not None:
                    return code
                time.sleep(TICK_S)
        finally:
            self.injector.undo()
            self.driver.end()
            self.driver.read_output()
        return TIMED_OUT

    def _tick(self) -> int | None:
        # read events, end faults that last a time, inject the next one
        for output in self.driver.read_output():
            self._hear(output)
        self.injector.undo_what_is_due()
        if self.faults:
            self._inject_at_the_gate()
        else:
            self._inject_by_time()
        # driver ended: start it again if a fault ended it
        code = self.driver.code
        if code is None:
            return None
        if code in ENDED_BY_US and self._was_ended_by_us():
            self._calm_since_s = None
            self.driver.start()
            return None
        return code

    def _hear(self, output: DriverOutput) -> None:
        match output.name:
            case "workers":
                self._pids = {int(rank): pid for rank, pid in output.event["pids"].items()}
            # Calm begins with the first step of an attempt: the run trains.
            case "step":
                self._step = output.event["step"]
                if self._calm_since_s is None:
                    self._calm_since_s = output.at_s
            case "attempt":
                self._calm_since_s = None
            case "recovered":
                self.memory.append(look_at(self.driver.pid, tuple(self._pids.values())))

    # Listed faults: a gate holds the worker in the phase until the fault is injected.

    def _close_next(self) -> None:
        if self._num_closed < len(self.faults):
            fault = self.faults[self._num_closed]
            is_small = fault.phase == "replan"
            gate = Gate(
                name=self._gate_name,
                phase=fault.phase,
                at=fault.at,
                rank=fault.rank if not is_small else -1,
                below=self.world_size if is_small else 0,
            )
            close_gate(self.injector.folder, gate)

    def _inject_at_the_gate(self) -> None:
        if self._num_closed >= len(self.faults):
            return
        arrival = arrival_at(self.injector.folder, self._gate_name)
        if arrival is None:
            return
        name = self._gate_name
        # Inject, close the next gate, and only then release the worker: it may meet that gate at once.
        answer = self._injected(self.faults[self._num_closed], arrival)
        self._num_closed += 1
        self._close_next()
        open_gate(self.injector.folder, name, answer=answer)

    @property
    def _gate_name(self) -> str:
        return f"{self._num_closed:04d}"

    # Random faults, by time.

    def _inject_by_time(self) -> None:
        now_s = time.monotonic()
        if now_s - self.driver.begun_s[0] > self.stop_after_s:
            self._stop()
            return
        # wait until the run has been calm for the drawn time
        self._next = self._next or next(self.scheduled_faults, None)
        if self._next is None or self._calm_since_s is None:
            return
        if now_s - self._calm_since_s < self._next.after_s:
            return
        scheduled, self._next, self._calm_since_s = self._next, None, None
        # A smaller grid may lack the drawn rank.
        rank = scheduled.rank if scheduled.rank in self._pids else next(iter(self._pids))
        fault = ChaosFault(kind=scheduled.kind, phase="step", at=self._step, rank=rank)
        if scheduled.kind == "raise":
            self._raise_somewhere(fault)
            return
        self._injected(fault, Arrival(pid=self._pids[rank], rank=rank, attempt=0, step=self._step))

    def _raise_somewhere(self, fault: ChaosFault) -> None:
        """Make the worker raise at its next step: it meets a gate that is open already, with that answer."""
        name = f"{len(self.injected_faults):04d}"
        open_gate(self.injector.folder, name, answer=RAISE)
        gate = Gate(name=name, phase="step", at=0, rank=fault.rank)
        close_gate(self.injector.folder, gate)
        self._note(fault, fault.rank)

    def _stop(self) -> None:
        if not self.is_stopped:
            self.is_stopped = True
            self.driver.signal(15)

    def _injected(self, fault: ChaosFault, arrival: Arrival) -> str:
        target = FaultTarget(pid=arrival.pid, node=self.injector.box.node_of(arrival.pid))
        family = KINDS[fault.kind].family
        # An arriving worker knows its step before the driver reports it.
        done = arrival.step - (fault.phase == "step")
        self._step = max(self._step, done)
        self._note(fault, arrival.rank if family in ("worker", "node") else -1)
        if not KINDS[fault.kind].ends_attempt:
            self._calm_since_s = time.monotonic()
        return self.injector.inject(fault.kind, target)

    def _note(self, fault: ChaosFault, rank: int) -> None:
        self.injected_faults.append(
            InjectedFault(fault=fault, at_s=time.monotonic(), rank=rank, step=self._step)
        )

    def _was_ended_by_us(self) -> bool:
        """Return whether a fault of the driver was injected since its process was started."""
        begun_s = self.driver.begun_s[-1]
        return any(
            KINDS[injected.fault.kind].family == "driver" and injected.at_s > begun_s
            for injected in self.injected_faults
        )
