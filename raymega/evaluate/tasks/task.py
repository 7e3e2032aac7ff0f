"""Task: what an evaluation asks a model, and what its answers mean; the registry of tasks by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from raymega.config.vision.section import VisionSection
from raymega.evaluate.requests import Request, Scores


class TextTokenizer(Protocol):
    """Tokenizer of the evaluated model, as tasks need it."""

    @property
    def eod_id(self) -> int | None:
        """Token that closes a document; None where the tokenizer has none."""

    def ids(self, text: str) -> list[int]:
        """Return the tokens of ``text``, without any that a model's input would begin or end with."""

    def marked_ids(self, text: str, token_id: int) -> list[int]:
        """Return the tokens of ``text``, in which special tokens are parsed and ``<image>`` is the token ``token_id``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of a task.

    Attributes:
        seq_len: Largest number of tokens that the model reads at once (S).
        stride: Number of tokens by which a window moves on; 0 is the task's own.
        limit: Number of documents, or of windows, that are evaluated; 0 is all.
        vision: Section of the model's tower, for tasks with images.
    """

    seq_len: int
    stride: int = 0
    limit: int = 0
    vision: VisionSection = field(default_factory=VisionSection)


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """Requests of a task, and what turns their scores into its result.

    Attributes:
        requests: Requests, in the order in which ``judge`` gets their scores.
        judge: Function from scores to metrics by name, and one record of each sample.
        documents: Number of documents that are evaluated.
        words: Number of words of the raw text, where the task counts them.
        notes: Facts that a reader must know to compare the result, one line each.
    """

    requests: Sequence[Request]
    judge: Callable[[Sequence[Scores]], tuple[Mapping[str, float], list[dict[str, object]]]]
    documents: int
    words: int = 0
    notes: tuple[str, ...] = field(default=())


Task = Callable[[Path, TextTokenizer, Settings], Questions]
