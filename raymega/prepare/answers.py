"""Answers with a boolean label (KTO): each is followed by the answer of another row under its own prompt.

KTO estimates the divergence from the reference on such answers to other prompts. TRL takes those of the example
before in a batch; here it is the newest row with another prompt in the split's part of a group of files, and for the
first rows the last one.
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
    def prompt(self) -> tuple[Message, ...]:
        """Messages before the answer."""
        return self.conversation.messages[: self.num_prompt]

    @property
    def written(self) -> tuple[Message, ...]:
        """Messages of the answer."""
        return self.conversation.messages[self.num_prompt :]

    def under(self, prompt: Answer) -> Conversation:
        """Return this answer behind the prompt of another row."""
        whole = prompt.conversation
        return replace(whole, messages=(*prompt.prompt, *self.written))


def read_answer(text: str) -> Answer:
    """Return the answer of a row's text."""
    (row,) = json.loads(text)
    conversation = Conversation(messages=tuple(row["messages"]), tools=tuple(row["tools"]))
    return Answer(
        conversation=conversation, num_prompt=row["num_prompt"], is_desirable=row["label"]
    )


class AnswerPairs(Generic[D]):
    """Answers of a split, one row after another; the first ones wait for the last row of another prompt."""

    def __init__(self, label: Callable[[Conversation], Labelled]) -> None:
        self._label = label
        self._waiting = list[tuple[D, Answer]]()
        # newest row, and the newest one of another prompt than that
        self._newest: Answer | None = None
        self._other: Answer | None = None

    def add(self, document: D, text: str) -> list[Labelled]:
        """Return the answer of a row and the newest one of another prompt under its prompt; none where there is none yet.

        Args:
            document: Document of the row, which :meth:`close` returns of those that wait.
            text: Text of the row.

        Raises:
            RenderError: The template refuses one of the two.
        """
        answer, found = read_answer(text), list[Labelled]()
        other = self._of_another_prompt(answer)
        if other is None:
            self._label(
                answer.conversation
            )  # so that a row without a rendering is refused where it is read
            self._waiting.append((document, answer))
        else:
            found = self._pair(answer, other)
        if self._newest is not None and self._newest.prompt != answer.prompt:
            self._other = self._newest
        self._newest = answer
        return found

    def close(self, refuse: Callable[[D, str], None]) -> Iterator[tuple[D, list[Labelled]]]:
        """Yield the rows that wait; where all rows have one prompt, the row before takes the other's place.

        Args:
            refuse: Function that is told the row and the reason where the template refuses the two.
        """
        for number, (document, answer) in enumerate(self._waiting):
            other = self._of_another_prompt(answer) or self._waiting[number - 1][1]
            try:
                found = self._pair(answer, other)
            except RenderError as error:
                refuse(document, str(error))
                continue
            yield document, found

    def _of_another_prompt(self, answer: Answer) -> Answer | None:
        rows = (self._newest, self._other)
        return next((row for row in rows if row and row.prompt != answer.prompt), None)

    def _pair(self, answer: Answer, other: Answer) -> list[Labelled]:
        added = 0 if answer.is_desirable else UNDESIRABLE
        both = map(self._label, (answer.conversation, other.under(answer)))
        return [replace(each, targets=each.targets + added) for each in both]
