"""Decides which tokens of a conversation are targets, and proves it for every one.

A token is a target if the assistant wrote it: the content of its messages, its calls of tools, and the special token
that ends them.
It is proven per conversation, as templates differ: what is rendered up to and after each answer must be a
token-exact prefix of the whole, and what lies between must hold the answer. What cannot be proven is refused.

Templates with ``{% generation %}`` say themselves what the assistant writes; theirs is taken, and must hold each
answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from raymega.data.format import CONTEXT, EARLIER_ANSWER, LAST_ANSWER
from raymega.prepare.chat.rows import ANSWERING, Conversation, Message
from raymega.prepare.chat.template import ChatTemplate, RenderError
from raymega.prepare.labels.labelled import Labelled

SHOWN_CHARACTERS = 30
RENDERED = (
    "role",
    "name",
    "content",
    "reasoning_content",
    "thinking",
    "reasoning",
    "tool_calls",
    "tool_call_id",
)
"""Parts of a message that templates write into the text."""


class Labeller:
    """Renders conversations by one template, tokenizes them and marks their targets."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, *, eod_id: int) -> None:
        """Require a tokenizer that reads special tokens in its input; ``eod_id`` ends each document."""
        self._template, self._tokenizer, self._eod_id = template, tokenizer, eod_id
        added = tokenizer.get_added_tokens_decoder()
        self._special = {number: token.content for number, token in added.items() if token.special}

    def label(self, conversation: Conversation) -> Labelled:
        """Return the tokens of a conversation, with the end of the document, and its targets.

        Raises:
            RenderError: The template refuses the conversation, or its targets cannot be proven.
        """
        messages, tools = conversation.messages, conversation.tools
        answers = [index for index, each in enumerate(messages) if each["role"] == ANSWERING]
        self._refuse_spelled(messages)
        self._refuse_special("the list of tools", tools)
        # The characters of each answer in the text.
        if self._template.marks_answers:
            text, marked = self._template.render_marked(messages, tools)
            encoding = self._encode(text)
            spans = _marked_spans(messages, answers, text, marked)
        else:
            text = self._template.render(messages, tools)
            encoding = self._encode(text)
            spans = [self._proven_span(conversation, at, text, encoding) for at in answers]
        targets = np.full(len(encoding.ids), CONTEXT, dtype=np.uint8)
        for start, stop in spans:
            first, end = _token_range(encoding, start, stop)
            # What was the last answer so far is an earlier one.
            targets[targets == LAST_ANSWER] = EARLIER_ANSWER
            targets[first:end] = LAST_ANSWER
        is_answered = bool(answers) and answers[-1] == len(messages) - 1
        return self._end(np.array(encoding.ids, dtype=np.int64), targets, is_answered=is_answered)

    def _end(
        self, ids: npt.NDArray[np.int64], targets: npt.NDArray[np.uint8], *, is_answered: bool
    ) -> Labelled:
        """Close the document, unless the template has; an answer that closes it without an end of its own learns it."""
        if ids[-1] != self._eod_id:
            ends = np.flatnonzero(targets)
            is_open = is_answered and len(ends) > 0 and int(ids[ends[-1]]) not in self._special
            ids = np.append(ids, self._eod_id)
            targets = np.append(targets, np.uint8(LAST_ANSWER if is_open else CONTEXT))
        return Labelled(ids=ids, targets=targets)

    def _encode(self, text: str) -> Encoding:
        # One text a call: a batch would take threads of other tasks. The template writes special tokens.
        return self._tokenizer.encode_batch([text], add_special_tokens=False)[0]

    def _proven_span(
        self, conversation: Conversation, index: int, text: str, encoding: Encoding
    ) -> tuple[int, int]:
        """Return the characters [start, stop) of the answer in message ``index``."""
        before, after = conversation.messages[:index], conversation.messages[: index + 1]
        prompt = self._template.render(before, conversation.tools, is_prompt=True)
        answered = self._template.render(after, conversation.tools)
        # Text first, as it is cheaper, and tokens then: text may merge into other tokens at the border.
        for name, prefix in (("the prompt of", prompt), ("all up to", answered)):
            if not text.startswith(prefix):
                at = _first_difference(text, prefix)
                raise RenderError(
                    f"{name} message {index} renders as {_cut(prefix[at:])} where the whole conversation has "
                    f"{_cut(text[at:])}, at character {at}"
                )
            ids = self._encode(prefix).ids
            if encoding.ids[: len(ids)] != ids:
                raise RenderError(
                    f"{name} message {index} ends inside a token of the whole conversation, at character "
                    f"{len(prefix)} of {_cut(text[max(len(prefix) - 5, 0) :])}"
                )
        # What the assistant wrote begins with the content, maybe after white space of the template.
        span, content = text[len(prompt) : len(answered)], _content(conversation.messages[index])
        if not span.lstrip().startswith(content):
            raise RenderError(
                f"the answer of message {index} renders as {_cut(span)} and not as {_cut(content)}"
            )
        # A call of a tool may begin with a special token: it is all that was written, but the space at its end.
        if conversation.messages[index].get("tool_calls"):
            return len(prompt), len(prompt) + len(span.rstrip())
        # It ends with the special token after the content, or with the content if none follows.
        at = len(prompt) + span.find(content) + len(content)
        return len(prompt), next(self._special_ends(encoding, at, len(answered)), at)

    def _special_ends(self, encoding: Encoding, start: int, stop: int) -> Iterator[int]:
        """Yield the end of each special token within the characters [start, stop)."""
        for token, (first, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._special and first >= start and end <= stop:
                yield end

    def _refuse_spelled(self, messages: Sequence[Message]) -> None:
        """Refuse messages that spell a special token: it would be one in the rendered text."""
        for index, message in enumerate(messages):
            for key in RENDERED:
                self._refuse_special(f"the {key} of message {index}", message.get(key, ""))

    def _refuse_special(self, name: str, value: Any) -> None:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for token in self._special.values():
            if token in text:
                raise RenderError(f"{name} spells the special token {token!r}")


def _marked_spans(
    messages: Sequence[Message],
    answers: Sequence[int],
    text: str,
    marked: Sequence[tuple[int, int]],
) -> list[tuple[int, int]]:
    if len(marked) != len(answers):
        raise RenderError(
            f"the chat template marks {len(marked)} answers of {len(answers)} (messages {_told(answers)})"
        )
    for index, (start, stop) in zip(answers, marked, strict=True):
        content = _content(messages[index])
        if content not in text[start:stop]:
            raise RenderError(
                f"the chat template marks {_cut(text[start:stop])} for message {index}, {_cut(content)}"
            )
    return list(marked)


def _token_range(encoding: Encoding, start: int, stop: int) -> tuple[int, int]:
    """Return the tokens [first, end) that hold the characters [start, stop)."""
    offsets = encoding.offsets
    inside = [index for index, (first, end) in enumerate(offsets) if first < stop and end > start]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


def _content(message: dict[str, Any]) -> str:
    # Templates often strip contents.
    return str(message.get("content", "")).strip()


def _first_difference(text: str, prefix: str) -> int:
    pairs = zip(text, prefix, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), len(text))


def _cut(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}...")


def _told(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8]))
