"""What the driver knows of the worker group at work: how far it is, and whether it is lost.

It reads reports and a clock, and names the first cause of a failure. What to do about one is
policies', and how reports arrive is the group's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from raymega.config.schema import ElasticSection
from raymega.errors import CheckpointError
from raymega.events import EvaluationFinished, StepFinished
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

SETTLE_S = 2.0
"""How long a lost connection waits for its cause: the death or the error of another rank."""
PROGRESS_MARGIN_S = 10.0
"""Beyond the workers' own timeout, so that their better explained failure comes first."""
MAX_NAMED = 8


class AttemptMonitor:
    """One worker group, from its start to its end."""

    def __init__(
        self,
        *,
        world_size: int,
        first_step: int,
        elastic: ElasticSection,
        now_s: float,
        steps_s: Iterable[float] = (),
    ) -> None:
        """``steps_s`` are the run's earlier steps on the same grid, the newest last."""
        self.step = first_step
        self.last_sign_s = now_s
        self._begun_s = now_s
        self._elastic = elastic
        self._watch = HangDetector(elastic, steps_s)
        self._entered: dict[str, set[int]] = defaultdict(set)
        self._finished: set[int] = set()
        self._steps = dict.fromkeys(range(world_size), first_step)
        self._primary: Failure | None = None
        self._secondary: dict[int, tuple[float, WorkerFailed]] = {}

    @property
    def has_met(self) -> bool:
        """Every rank has joined the others."""
        return self.has_passed("rendezvous")

    @property
    def is_finished(self) -> bool:
        """Every rank has left its loop in good order."""
        return len(self._finished) == len(self._steps)

    def observe(self, report: Report | WorkerStatus, now_s: float) -> None:
        """Take in one report, in order of arrival."""
        match report:
            case Heartbeat() | ThreadStatus() | ProcessStatus():
                self._watch.observe(report, now_s)
            case WorkerDied():
                self._lose(_death(report, step=self.step))
            case WorkerFailed(is_secondary=True):
                self._secondary[report.rank] = (now_s, report)
            case WorkerFailed():
                self._lose(self._error(report))
            case Entered():
                self._entered[report.phase].add(report.rank)
                self.last_sign_s = now_s
            case StepFinished() | Progress():
                self._advance(report, now_s)
            case WorkerFinished():
                self._finished.add(report.rank)
                self.last_sign_s = now_s
            case ShardSaved() | EvaluationFinished() | Working():
                self.last_sign_s = now_s
            case RankSaveProgress() if report.step >= self.step:  # training may be waiting for it
                self.last_sign_s = now_s

    def failure(self, now_s: float) -> Failure | None:
        """Why the attempt is lost, or None while it is not."""
        if self._primary is not None:
            return self._primary
        if self._secondary:
            return self._settled(now_s)
        is_training = self.has_passed("restored")
        hang = self._watch.hang(now_s, last_sign_s=self.last_sign_s, is_training=is_training)
        if hang is not None:
            return self._hang({hang.rank}, hang.message)
        if not self.has_met:
            return self._late_start(now_s)
        return self._standstill(now_s)

    def probe_due(self, now_s: float) -> frozenset[int] | None:
        """Ranks that do not answer, when it is time to look where everybody stands; else None."""
        is_training = self.has_passed("restored")
        return self._watch.probe_due(now_s, last_sign_s=self.last_sign_s, is_training=is_training)

    def whereabouts(self) -> dict[int, str]:
        """By rank where it was last seen."""
        seen = self._watch.standings
        return {
            rank: str(seen[rank]) if rank in seen else f"after step {step}"
            for rank, step in self._steps.items()
        }

    def has_passed(self, phase: str) -> bool:
        """Every rank has passed ``phase`` of its start."""
        return len(self._entered[phase]) == len(self._steps)

    def has_restored(self, rank: int) -> bool:
        """``rank`` has loaded its state, or had none to load."""
        return rank in self._entered["restored"]

    def could_not_restore(self, failure: Failure) -> bool:
        """``failure`` is of a checkpoint that cannot be read."""
        return failure.error == CheckpointError.__name__ and not self.has_restored(failure.rank)

    def _lose(self, failure: Failure) -> None:
        if self._primary is None:
            self._primary = failure

    def _advance(self, report: StepFinished | Progress, now_s: float) -> None:
        rank = 0  # reports for all
        if isinstance(report, StepFinished):
            self._watch.add_step(report.metrics.get("train/step_time_s", 0.0))
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
        """Connections broke, and no rank owned up to it in time."""
        since_s, first = min(self._secondary.values(), key=lambda item: item[0])
        if now_s - since_s < SETTLE_S:
            return None
        silent = set(self._steps) - set(self._secondary) - self._finished
        if len(silent) != 1:
            return self._error(first)
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
        behind = {rank for rank, step in self._steps.items() if step < self.step}
        missing = (behind or set(self._steps)) - self._finished
        message = (
            f"no step after step {self.step} for {limit_s:g} s "
            f"(elastic.collective_timeout_s plus {PROGRESS_MARGIN_S:g}); "
            f"{_names(missing)} did not get further"
        )
        return self._hang(missing, message)

    def _hang(self, missing: set[int], message: str) -> Failure:
        rank = min(missing) if len(missing) == 1 else -1
        return Failure(kind=FailureKind.HUNG, rank=rank, step=self.step, message=message)


def _death(report: WorkerDied, *, step: int) -> Failure:
    return Failure(kind=FailureKind.DIED, rank=report.rank, step=step, message=report.cause)


def _names(ranks: Iterable[int]) -> str:
    ordered = sorted(ranks)
    shown = ", ".join(map(str, ordered[:MAX_NAMED]))
    more = f" and {len(ordered) - MAX_NAMED} more" if len(ordered) > MAX_NAMED else ""
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {shown}{more}"
