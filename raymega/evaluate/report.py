"""Report of an evaluation: metrics, what they were computed from, and what a reader must know to compare them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalReport:
    """Result of an evaluation.

    Attributes:
        task: Name of the task.
        checkpoint: URI of the manifest.
        step: Number of completed steps of the run.
        metrics: Metrics by name.
        documents: Number of documents that were evaluated.
        tokens: Number of tokens that were scored.
        words: Number of words of the raw text; 0 where the task counts none.
        grid: Degrees of the grid that evaluated.
        samples: Record of each sample, in the order of the file.
        notes: Facts that a reader must know to compare the result, one line each.
        seconds: Duration of the evaluation.
    """

    task: str
    checkpoint: str
    step: int
    metrics: Mapping[str, float]
    documents: int
    tokens: int
    words: int
    grid: Mapping[str, int]
    samples: Sequence[Mapping[str, object]]
    notes: tuple[str, ...]
    seconds: float

    def summary(self) -> dict[str, object]:
        """Return everything but the samples, as plain JSON values."""
        return {
            "task": self.task,
            "metrics": {
                name: value if isfinite(value) else None for name, value in self.metrics.items()
            },
            "documents": self.documents,
            "tokens": self.tokens,
            "words": self.words,
            "step": self.step,
            "checkpoint": self.checkpoint,
            "grid": dict(self.grid),
            "notes": list(self.notes),
            "seconds": self.seconds,
        }
