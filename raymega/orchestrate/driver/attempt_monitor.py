"""Tracks one attempt from its workers' reports: its progress, and whether and why it is lost.

It names the root cause of a failure; ``core/failure_policy.py`` decides what follows. It reads only reports
and a clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from raymega.config.schema import ElasticSection
from raymega.errors import CheckpointError
from raymega.events import EvaluationFinished, SamplesDrawn, StepFinished
from raymega.messages import (
    Entered,
    Progress,
    RankSaveProgress,
    Report,
    ShardSaved,
    WorkerDied,
    WorkerFailed,
    WorkerFinished,
    Working,
)
from raymega.orchestrate.core.failure_policy import Failure, FailureKind
from raymega.orchestrate.core.worker_group_api import (
    Heartbeat,
    ProcessStatus,
    ThreadStatus,
    WorkerStatus,
)
from raymega.orchestrate.driver.hang_detector import HangDetector
from raymega.plugins import RAISED_IN

SETTLE_S = 2.0
"""Wait after a lost connection for its cause, the death or error of another rank, in seconds."""
PROGRESS_MARGIN_S = 10.0
"""Wait beyond the workers' own timeout, whose error explains more and so should come first, in seconds."""
MAX_NAMED = 8


class AttemptMonitor:
    """Progress and failure of one attempt, from its start to its end.

    Attributes:
        step: Largest number of completed steps that a rank has reported.
        last_sign_s: Time of the last sign of progress, in seconds of the driver's clock.
    """

    def __init__(
        self,
        *,
        world_size: int,
        first_step: int,
        elastic: ElasticSection,
        now_s: float,
        steps_s: Iterable[float] = (),
    ) -> None:
        """Start with ``first_step`` completed steps.

        ``steps_s`` are the run's earlier step times on the same grid in seconds, newest last.
        """
        self.step = first_step
        self.last_sign_s = now_s
        self._begun_s = now_s
        self._elastic = elastic
        self._hang_detector = HangDetector(elastic, steps_s)
        self._entered: dict[str, set[int]] = defaultdict(set)
        self._finished: set[int] = set()
        self._steps = dict.fromkeys(range(world_size), first_step)
        # a death or an error of a rank's own; lost connections by rank, which are consequences
        self._primary: Failure | None = None
        self._secondary: dict[int, tuple[float, WorkerFailed]] = {}

    @property
    def has_met(self) -> bool:
        """True when every rank has joined the rendezvous."""
        return self.has_passed("rendezvous")

    @property
    def is_finished(self) -> bool:
        """True when every rank has left its loop without an error."""
        return len(self._finished) == len(self._steps)

    def observe(self, report: Report | WorkerStatus, now_s: float) -> None:
        """Handle one report; reports must come in order of arrival."""
        match report:
            # of every rank each second; then signs of life without progress of training
            case StepFinished() | Progress():
                self._advance(report, now_s)
            case Heartbeat() | ThreadStatus() | ProcessStatus():
                self._hang_detector.observe(report, now_s)
            # failures: the first one with a cause of its own counts
            case WorkerDied():
                self._lose(_death(report, step=self.step))
            case WorkerFailed(is_secondary=True):
                self._secondary[report.rank] = (now_s, report)
            case WorkerFailed():
                self._lose(self._error(report))
            # progress
            case Entered():
                self._entered[report.phase].add(report.rank)
                self.last_sign_s = now_s
            case WorkerFinished():
                self._finished.add(report.rank)
                self.last_sign_s = now_s
            case ShardSaved() | EvaluationFinished() | SamplesDrawn() | Working():
                self.last_sign_s = now_s
            # the present step's save counts, because the training thread may be waiting for it
            case RankSaveProgress() if report.step >= self.step:
                self.last_sign_s = now_s

    def failure(self, now_s: float) -> Failure | None:
        """Return the root cause if the attempt is lost, else None."""
        # failures that workers reported
        if self._primary is not None:
            return self._primary
        if self._secondary:
            return self._settled(now_s)
        # hangs, then the upper bounds for a start and for a step
        is_training = self.has_passed("restored")
        hang = self._hang_detector.hang(
            now_s, last_sign_s=self.last_sign_s, is_training=is_training
        )
        if hang is not None:
            return self._hang({hang.rank}, hang.message)
        if not self.has_met:
            return self._late_start(now_s)
        return self._standstill(now_s)

    def probe_due(self, now_s: float) -> frozenset[int] | None:
        """Return the ranks whose process is silent if all ranks should be probed now, else None."""
        is_training = self.has_passed("restored")
        return self._hang_detector.probe_due(
            now_s, last_sign_s=self.last_sign_s, is_training=is_training
        )

    def whereabouts(self) -> dict[int, str]:
        """Return the last known position of each rank's training thread, as text."""
        seen = self._hang_detector.thread_statuses
        return {
            rank: str(seen[rank]) if rank in seen else f"after step {step}"
            for rank, step in self._steps.items()
        }

    def has_passed(self, phase: str) -> bool:
        """Return whether every rank has passed ``phase`` of its start."""
        return len(self._entered[phase]) == len(self._steps)

    def has_restored(self, rank: int) -> bool:
        """Return whether ``rank`` has loaded its state, or had none to load."""
        return rank in self._entered["restored"]

    def could_not_restore(self, failure: Failure) -> bool:
        """Return whether ``failure`` is a rank's error in reading the checkpoint at its start."""
        return failure.error == CheckpointError.__name__ and not self.has_restored(failure.rank)

    def _lose(self, failure: Failure) -> None:
        if self._primary is None:
            self._primary = failure

    def _advance(self, report: StepFinished | Progress, now_s: float) -> None:
        rank = 0  # StepFinished comes from rank 0 only
        if isinstance(report, StepFinished):
            self._hang_detector.add_step(report.metrics.get("train/step_time_s", 0.0))
        else:
            rank = report.rank
        if report.step > self._steps[rank]:
            self._steps[rank] = report.step
            self.step = max(report.step, self.step)
            self.last_sign_s = now_s

    def _error(self, report: WorkerFailed) -> Failure:
        return Failure(
            kind=FailureKind.RAISED,
            rank=report.rank,
            step=max(report.step, self._steps.get(report.rank, 0)),
            error=report.error,
            message=report.message,
            traceback=report.traceback,
            exit_code=report.exit_code,
            next_sample=report.next_sample,
        )

    def _settled(self, now_s: float) -> Failure | None:
        """Return the failure behind lost connections once SETTLE_S have passed without a cause.

        It is a hang of the only silent rank if there is one, else the first lost connection.
        """
        since_s, first = min(self._secondary.values(), key=lambda item: item[0])
        if now_s - since_s < SETTLE_S:
            return None
        silent = set(self._steps) - set(self._secondary) - self._finished
        if len(silent) != 1:
            # a rank that waited inside a plug-in says more than those that waited for it
            inside = [each for _, each in self._secondary.values() if RAISED_IN in each.message]
            return self._error(inside[0] if inside else first)
        # a single rank did not complain: the others lost their connection to it
        (rank,) = silent
        message = f"it is silent and the others lost it; rank {first.rank} has {first.message}"
        return Failure(kind=FailureKind.HUNG, rank=rank, step=self._steps[rank], message=message)

    def _late_start(self, now_s: float) -> Failure | None:
        limit_s = self._elastic.start_timeout_s
        if now_s - self._begun_s < limit_s:
            return None
        missing = set(self._steps) - self._entered["rendezvous"]
        message = f"the start has not joined {_names(missing)} in elastic.start_timeout_s={limit_s}"
        return self._hang(missing, message)

    def _standstill(self, now_s: float) -> Failure | None:
        limit_s = self._elastic.collective_timeout_s + PROGRESS_MARGIN_S
        if now_s - self.last_sign_s < limit_s:
            return None
        # ranks that are a step behind the others; all of them where none is
        behind = {rank for rank, step in self._steps.items() if step < self.step}
        missing = (behind or set(self._steps)) - self._finished
        message = (
            f"no step after step {self.step} for {limit_s:g} s "
            f"(elastic.collective_timeout_s plus {PROGRESS_MARGIN_S:g}); "
            f"{_names(missing)} did not get further"
        )
        return self._hang(missing, message)

    def _hang(self, missing: set[int], message: str) -> Failure:
        # a rank is named only when it is the only one
        rank = min(missing) if len(missing) == 1 else -1
        return Failure(kind=FailureKind.HUNG, rank=rank, step=self.step, message=message)


def is_sign_of_life(report: Report | WorkerStatus) -> bool:
    """Return whether the report is one of those that each rank makes each second, which say nothing else."""
    return isinstance(report, Heartbeat | Progress | Working)


def _death(report: WorkerDied, *, step: int) -> Failure:
    return Failure(kind=FailureKind.DIED, rank=report.rank, step=step, message=report.cause)


def _names(ranks: Iterable[int]) -> str:
    ordered = sorted(ranks)
    shown = ", ".join(map(str, ordered[:MAX_NAMED]))
    more = f" and {len(ordered) - MAX_NAMED} more" if len(ordered) > MAX_NAMED else ""
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {shown}{more}"
