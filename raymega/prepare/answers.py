"""Answers with a boolean label (KTO): each is followed by the answer of another row under its own prompt.

KTO estimates the divergence from the reference on such answers to other prompts. TRL takes those of the example
before in a batch; here it is the row before in the split's part of a group of files, and for the first row the last.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from raymega.data.rows import UNDESIRABLE
from raymega.prepare.chat.rows import Conversation, Message
from raymega.prepare.chat.template import RenderError
from raymega.prepare.labels.labelled import Labelled

D = TypeVar("D")
"""Knowledge of a caller about a row's document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Prompt and answer of a row, and whether the answer is desirable."""

    conversation: Conversation
    num_prompt: int
    is_desirable: bool

    @property
    def written(self) -> tuple[Message, ...]:
        """Messages of the answer."""
        return self.conversation.messages[self.num_prompt :]

    def under(self, prompt: Answer) -> Conversation:
        """Return this answer behind the prompt of another row."""
        whole = prompt.conversation
        return replace(whole, messages=(*whole.messages[: prompt.num_prompt], *self.written))


def read_answer(text: str) -> Answer:
    """Return the answer of a row's text."""
    (row,) = json.loads(text)
    conversation = Conversation(messages=tuple(row["messages"]), tools=tuple(row["tools"]))
    return Answer(
        conversation=conversation, num_prompt=row["num_prompt"], is_desirable=row["label"]
    )


class AnswerPairs(Generic[D]):
    """Answers of a split, one row after another; the first one waits for the last."""

    def __init__(self, label: Callable[[Conversation], Labelled]) -> None:
        self._label = label
        self._first: tuple[D, Answer] | None = None
        self._before: Answer | None = None

    def add(self, document: D, text: str) -> list[Labelled]:
        """Return the answer of a row and the one before under its prompt; none of the first row.

        Args:
            document: Document of the row, which :meth:`close` returns of the first.
            text: Text of the row.

        Raises:
            RenderError: The template refuses one of the two.
        """
        answer, before = read_answer(text), self._before
        if before is None:
            self._label(
                answer.conversation
            )  # so that a row without a rendering is refused where it is read
            self._first, self._before = (document, answer), answer
            return []
        found = self._pair(answer, before)
        self._before = answer
        return found

    def close(self, refuse: Callable[[D, str], None]) -> Iterator[tuple[D, list[Labelled]]]:
        """Yield the first row, with the last one's answer under its prompt.

        Args:
            refuse: Function that is told the row and the reason where the template refuses the two.
        """
        if self._first is None or self._before is None:
            return
        document, answer = self._first
        try:
            found = self._pair(answer, self._before)
        except RenderError as error:
            refuse(document, str(error))
            return
        yield document, found

    def _pair(self, answer: Answer, other: Answer) -> list[Labelled]:
        added = 0 if answer.is_desirable else UNDESIRABLE
        both = map(self._label, (answer.conversation, other.under(answer)))
        return [replace(each, targets=each.targets + added) for each in both]
