"""Commits checkpoints: collects the ranks' ShardSaved reports, writes the manifest, deletes old ones.

It commits when every rank has written its shard, in the executor's thread, so that a slow store does not
delay the control loop. A save that fails is an outcome, never an exception.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from math import inf
from threading import Event

from raymega.checkpoint.format.commit_log import CommitLog
from raymega.checkpoint.format.epochs import newest_epoch
from raymega.checkpoint.format.keys import CheckpointId, checkpoint_of, folder_of, is_manifest
from raymega.checkpoint.format.manifest import Manifest, commit
from raymega.checkpoint.format.manifest_builder import assemble
from raymega.checkpoint.load.fingerprint import SOURCES
from raymega.checkpoint.tools.retention import Pruner, RetentionPolicy
from raymega.errors import CheckpointError, RaymegaError, StorageError, one_line
from raymega.events import (
    CheckpointCommitted,
    EvaluationFinished,
    SaveFailed,
    SaveProgress,
)
from raymega.messages import RankSaveProgress, Report, ShardSaved
from raymega.orchestrate.core.clock import Clock
from raymega.orchestrate.core.worker_group_api import WorkerStatus
from raymega.orchestrate.driver.rank_reports import RankCollector
from raymega.orchestrate.driver.save_requests import SaveRequests
from raymega.plan.run_plan import RunPlan
from raymega.storage.retry import RETRY, RetryPolicy
from raymega.storage.store import Store, delete_all

log = logging.getLogger(__name__)

PROGRESS_EVERY_S, WARN_EVERY_S = 2.0, 30.0
"""Least seconds between two reports of a save's progress, and between two warnings about its retries."""

ONCE, COMMIT_PAUSE_S = RetryPolicy(pauses_s=()), 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Superseded:
    """Outcome of a save in a run that has a newer epoch: the checkpoint of ``step`` may not count."""

    step: int


Outcome = CheckpointCommitted | SaveFailed | Superseded


class CheckpointCommitter:
    """The saves of one attempt, from the ranks' reports to the manifest.

    Attributes:
        error: Cause of the newest save's failure in a few words; empty when that save is committed.
    """

    def __init__(  # the run's context is the one place that calls it
        self,
        *,
        plan: RunPlan,
        attempt: int,
        store: Store,
        executor: Executor,
        clock: Clock,
        sources: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare for the saves of ``attempt``; ``executor`` must have one thread, to keep commits in order.

        ``sources`` are the fingerprints of the checkpoints that the run reads in each restart, by field.
        """
        self._sources = {SOURCES: dict(sources)} if sources else {}
        self.error = ""
        self._plan, self._attempt = plan, attempt
        self._store, self._executor, self._clock = store, executor, clock
        self._shards: RankCollector[ShardSaved] = RankCollector(plan.grid.world_size)
        self._under_way: list[Future[Outcome]] = []
        self._requests = SaveRequests(store, executor, clock)
        # evaluation metrics by step, progress by rank, time of the last SaveProgress
        self._metrics: dict[int, Mapping[str, float]] = {}
        self._progress: dict[int, RankSaveProgress] = {}
        self._told_s = clock.monotonic()
        self._warned_s = -inf
        self._is_over = Event()
        # A commit of the last step; the store itself already retries each call for a while.
        each_s, last_s = sum(RETRY.pauses_s), plan.job.checkpoint.last_save_retry_s
        self._last_retry = RetryPolicy(
            pauses_s=(COMMIT_PAUSE_S,) * int(last_s // each_s), sleep=self._pause
        )
        section = plan.job.checkpoint
        keep = RetentionPolicy(
            last=section.keep_last, every=section.keep_every, best=section.keep_best
        )
        self._pruner = Pruner(store, keep)
        self._log = CommitLog(store, attempt)

    @property
    def is_idle(self) -> bool:
        """True when no commit is pending and every outcome was fetched by ``pop_outcomes``."""
        return not self._under_way

    def handle_report(self, report: Report | WorkerStatus) -> SaveProgress | None:
        """Handle a report if it concerns saves, and return the progress to emit, if any. Never blocks."""
        match report:
            case ShardSaved():
                self._add(report)
            case EvaluationFinished():
                self._metrics[report.step] = report.metrics
            case RankSaveProgress():
                return self._advance(report)
        return None

    def is_requested(self, step: int) -> bool:
        """Return whether a new save request was found; ``step`` is the last completed step."""
        return self._requests.has_new(step)

    def pop_outcomes(self) -> list[Outcome]:
        """Return the outcomes of saves since the last call, and answer save requests. Never blocks."""
        done = [future for future in self._under_way if future.done()]
        self._under_way = [future for future in self._under_way if not future.done()]
        outcomes = [future.result() for future in done]
        for outcome in outcomes:
            if isinstance(outcome, CheckpointCommitted):
                self._requests.answer(outcome.step, uri=outcome.uri)
            if isinstance(outcome, SaveFailed):
                self._requests.answer(outcome.step, error=outcome.reason)
        return outcomes

    def end(self, timeout_s: float) -> None:
        """Wait ``timeout_s`` seconds at most for pending commits; those still left are tried no more."""
        wait(self._under_way, timeout=timeout_s)
        self._is_over.set()

    def _add(self, shard: ShardSaved) -> None:
        """Add a rank's shard; the last missing one starts the commit."""
        shards = self._shards.add(rank=shard.rank, step=shard.step, value=shard)
        if shards:
            metrics = self._metrics.get(shard.step, {})
            self._metrics = {step: at for step, at in self._metrics.items() if step > shard.step}
            self._under_way.append(self._executor.submit(self._finish, shards, metrics))

    def _advance(self, report: RankSaveProgress) -> SaveProgress | None:
        """Return the sum of all ranks' progress with this save, once every PROGRESS_EVERY_S, else None."""
        self._progress[report.rank] = report
        now_s = self._clock.monotonic()
        if report.error and now_s - self._warned_s >= WARN_EVERY_S:
            self._warned_s = now_s
            log.warning(
                "rank %d could not write step %d and tries again: %s",
                report.rank, report.step, report.error,
            )  # fmt: skip
        if now_s - self._told_s < PROGRESS_EVERY_S:
            return None
        self._told_s = now_s
        of_step = [each for each in self._progress.values() if each.step == report.step]
        return SaveProgress(
            step=report.step,
            written_bytes=sum(each.written_bytes for each in of_step),
            num_bytes=sum(each.num_bytes for each in of_step),
        )

    def _finish(self, shards: Mapping[int, ShardSaved], metrics: Mapping[str, float]) -> Outcome:
        step = next(iter(shards.values())).step
        begun_s = self._clock.monotonic()
        self._pruner.note_save(step)
        # assemble: shards that do not add up to the whole state make no checkpoint
        try:
            manifest = self._assemble(shards, metrics)
        except CheckpointError as error:
            self._clear_away(step)
            self.error = _cause(shards.values()) or one_line(error)
            return SaveFailed(step=step, reason=str(error))
        # commit; a manifest of the last step is tried again for long, as no later one makes up for it
        is_last = step >= self._plan.job.run.steps
        try:
            is_mine = (self._last_retry if is_last else ONCE).run(lambda _: self._commit(manifest))
        except RaymegaError as error:
            self.error = one_line(error.faults[0].fact)
            return SaveFailed(step=step, reason=str(error))
        if not is_mine:
            return Superseded(step=step)
        self.error = ""
        # delete old checkpoints, and report the durations of the slowest rank
        self._delete_old(step)
        written_s = max(shard.stall_s + shard.write_s for shard in shards.values())
        return CheckpointCommitted(
            step=step,
            uri=f"{self._store.uri}/{manifest.key}",
            stall_s=max(shard.stall_s for shard in shards.values()),
            save_s=written_s + self._clock.monotonic() - begun_s,
            num_bytes=sum(shard.num_bytes for shard in shards.values()),
        )

    def _commit(self, manifest: Manifest) -> bool:
        """Write the manifest, and return whether no newer epoch, which may begin at any time, outdates it."""
        if self._is_overtaken():
            return False
        at = CheckpointId(attempt=self._attempt, step=manifest.step)
        self._log.begin(at, self._pruner.known)
        commit(self._store, manifest)
        self._log.end(at)
        return not self._is_overtaken()  # readers ignore manifests that came after the newer epoch

    def _pause(self, seconds: float) -> None:
        if self._is_over.wait(seconds):
            raise StorageError("the attempt ended before its last checkpoint was committed")

    def _is_overtaken(self) -> bool:
        return newest_epoch(self._store) > self._attempt

    def _assemble(self, shards: Mapping[int, ShardSaved], metrics: Mapping[str, float]) -> Manifest:
        grid = self._plan.grid
        return assemble(
            tuple(shards.values()),
            world_size=grid.world_size,
            attempt=self._attempt,
            created=self._clock.timestamp(),
            job=self._plan.job.model_dump(mode="json") | self._sources,
            grid=grid.degrees(),
            metrics=metrics,
        )

    def _clear_away(self, step: int) -> None:
        """Delete the shards of a save that will never have a manifest."""
        mine = CheckpointId(attempt=self._attempt, step=step)
        try:
            keys = [key for key in self._store.list(folder_of(step)) if checkpoint_of(key) == mine]
            delete_all(self._store, () if any(map(is_manifest, keys)) else keys)
        except RaymegaError as error:
            log.warning("files of the failed save of step %d were not deleted: %s", step, error)

    def _delete_old(self, step: int) -> None:
        try:
            self._pruner.prune(CheckpointId(attempt=self._attempt, step=step))
        except RaymegaError as error:
            log.warning("old checkpoints were not deleted: %s", error)


def _cause(shards: Iterable[ShardSaved]) -> str:
    """Return the first rank that could not write and its error's fact, in one line; empty without."""
    failed = [shard for shard in shards if shard.error]
    if not failed:
        return ""
    others = f" (and {len(failed) - 1} other ranks)" if failed[1:] else ""
    return f"rank {failed[0].rank}{others}: {one_line(failed[0].error.partition('; ')[0])}"
