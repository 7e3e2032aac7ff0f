"""Scores requests by a checkpoint's weights on the workers of a grid of one's own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from raymega.checkpoint.tools.handle import Checkpoint
from raymega.errors import NumericsError, WorkerError, raise_faults
from raymega.evaluate.requests import (
    Request,
    Scores,
    pack_requests,
    rows_on_grid,
    score_faults,
    unpack_scores,
)
from raymega.messages import EntryOutput, Progress, Report
from raymega.orchestrate.core.worker_group_api import AttemptSpec, WorkerStatus
from raymega.orchestrate.workers.single_run import EntryWorkers, run_entry
from raymega.plan.run_plan import RunPlan

ENTRY, ENTRY_BESIDE = "raymega.evaluate.worker", "raymega.evaluate.beside_worker"
LOG_DIR = Path(tempfile.gettempdir()) / "raymega-eval"
OnRows = Callable[[int, int], None]
"""Function that is told how many rows of tokens are done, and of how many."""


def score(
    checkpoint: Checkpoint, plan: RunPlan, requests: Sequence[Request], *, on_rows: OnRows
) -> list[Scores]:
    """Return the scores of ``requests`` by the checkpoint's weights, from ``plan``'s workers.

    Raises:
        NumericsError: A score is NaN or Inf.
        WorkerError: A worker failed.
        CapacityError: The cluster has no room for the workers.
    """
    answers: list[bytes] = []
    num_rows = rows_on_grid(requests, plan).num_rows

    def hear(report: Report | WorkerStatus) -> None:
        if isinstance(report, EntryOutput):
            answers.append(report.data)
        elif isinstance(report, Progress) and report.rank == 0:
            on_rows(report.step, num_rows)

    uri = f"{checkpoint.store.uri}/{checkpoint.manifest.key}"
    done = run_entry(
        plan, _spec(plan, uri, pack_requests(requests)), ENTRY, log_dir=LOG_DIR, on_report=hear
    )
    if done.fault is not None:
        raise WorkerError(done.fault)
    (answer,) = answers
    return _finite(unpack_scores(answer, requests))


class ScoringWorkers:
    """Workers beside a run that score the same requests by one checkpoint after the other; used from one thread."""

    def __init__(self, plan: RunPlan, requests: Sequence[Request]) -> None:
        """Prepare; nothing is started."""
        self._plan, self._requests = plan, requests
        self._packed = pack_requests(requests)
        self._workers = EntryWorkers(plan, ENTRY_BESIDE, log_dir=LOG_DIR)
        self._num_runs = 0

    def score(self, uri: str) -> list[Scores]:
        """Return the scores of the requests by the checkpoint at ``uri``.

        Raises:
            NumericsError: A score is NaN or Inf.
            WorkerError: A worker failed.
            CapacityError: The cluster has no room for the workers.
        """
        answers: list[bytes] = []

        def hear(report: Report | WorkerStatus) -> None:
            if isinstance(report, EntryOutput):
                answers.append(report.data)

        self._num_runs += 1
        spec = _spec(self._plan, uri, self._packed, attempt=self._num_runs)
        done = self._workers.run(spec, on_report=hear)
        if done.fault is not None:
            raise WorkerError(done.fault)
        (answer,) = answers
        return _finite(unpack_scores(answer, self._requests))

    def close(self) -> None:
        """End the workers."""
        self._workers.close()


def _finite(scores: list[Scores]) -> list[Scores]:
    raise_faults(NumericsError, score_faults(scores))
    return scores


def _spec(plan: RunPlan, uri: str, packed: bytes, *, attempt: int = 0) -> AttemptSpec:
    return AttemptSpec(
        plan_json=plan.to_json(), run_uri=uri, attempt=attempt, restore=uri, entry_input=packed
    )
