"""Interface of the driver to the evaluation tasks of a run, which its workers score and it judges."""

from __future__ import annotations

from typing import Protocol

from raymega.events import TasksEvaluated
from raymega.messages import EntryOutput


class TaskScores(Protocol):
    """Tasks of a run; called from the control loop's thread."""

    def pack(self) -> bytes:
        """Return the requests that every worker of an attempt gets; takes milliseconds."""

    def judge_output(self, output: EntryOutput) -> TasksEvaluated:
        """Return the metrics from the scores that rank 0 has reported; takes milliseconds."""
