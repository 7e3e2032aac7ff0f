"""Rows that hold conversations: what they must have, and their text for all that follows.

It owns the two forms of rows. A row's text is its conversation as JSON, so that readers, held-out splits and
origins treat it as any document; `raymega.prepare.chat.encoder` renders it.

    chat        {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}
    preference  {"prompt": [...], "chosen": [...], "rejected": [...]}; each messages, or a string
    kto         {"prompt": [...], "completion": [...], "label": true}; messages or strings, and whether it is desirable
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from raymega.data.format import RowFormat as RowFormat
from raymega.prepare.images.rows import IMAGES, IMAGES_FORMAT, image_row_text
from raymega.prepare.labels.rows import KEYS as LABEL_KEYS
from raymega.prepare.labels.rows import LABELLED, labelled_text

CHATS: tuple[RowFormat, ...] = ("chat", "preference", "kto")
"""Formats whose rows hold conversations."""
DEFAULT_KEYS: dict[RowFormat, str] = {
    "text": "text", "chat": "messages", "preference": "chosen", "kto": "completion", "classification": "text",
    "token_classification": "tokens", "multiple_choice": "choices", "embedding": "anchor", "regression": "text", "images": "text",
}  # fmt: skip
"""Key that a row must have, unless --text-key names another."""
KEYS = PROMPT, REJECTED, TOOLS = "prompt", "rejected", "tools"
OTHER_KEYS = (*KEYS, *LABEL_KEYS, IMAGES)
"""Keys that a row may have beside."""
ANSWERING = "assistant"
"""Role whose messages a model learns to write."""

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Messages of one document, and the tools that they may call."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()


def conversation_text(row: Mapping[str, Any], row_format: RowFormat, key: str) -> tuple[str, str]:
    """Return the text of a row and, if it holds no conversation or no labels, the reason.

    Args:
        row: Row of a file, with the key of its format.
        row_format: Format of the row, any but ``text``.
        key: Key of the messages, or of the chosen ones.
    """
    if row_format == IMAGES_FORMAT:
        return image_row_text(row, key)
    if row_format in LABELLED:
        return labelled_text(row, row_format, key)
    try:
        found = list(_conversations(row, row_format, key))
    except ValueError as error:
        return "", str(error)
    told: list[dict[str, Any]] = [
        {"messages": each.messages, "tools": each.tools} for each in found
    ]
    if row_format == "kto":
        if not isinstance(row.get("label"), bool):
            return "", f"its 'label' is {_told(row.get('label'))}, not true or false"
        prompt = len(_messages(row.get(PROMPT), PROMPT, "user"))
        told[0] |= {"num_prompt": prompt, "label": row["label"]}
    # a table may hold times and the like beside what is rendered
    return json.dumps(told, ensure_ascii=False, default=str), ""


def read_conversations(text: str) -> list[Conversation]:
    """Return the conversations of a row's text: one of a chat row; the chosen and the rejected one."""
    return [
        Conversation(messages=tuple(each["messages"]), tools=tuple(each["tools"]))
        for each in json.loads(text)
    ]


def _conversations(
    row: Mapping[str, Any], row_format: RowFormat, key: str
) -> Iterator[Conversation]:
    tools = tools_of(row)
    if row_format == "chat":
        yield Conversation(messages=_messages(row[key], key, ANSWERING), tools=tools)
        return
    prompt = _messages(row.get(PROMPT), PROMPT, "user")
    for name in (key, REJECTED) if row_format == "preference" else (key,):
        if row.get(name) is None:
            raise ValueError(f"it has no {name!r}; a preference row has {key!r} and {REJECTED!r}")
        answer = _messages(row[name], name, ANSWERING)
        # Some corpora repeat the prompt in both answers.
        is_repeated = answer[: len(prompt)] == prompt
        yield Conversation(messages=answer if is_repeated else (*prompt, *answer), tools=tools)


def _messages(value: Any, name: str, role: str) -> tuple[Message, ...]:
    """Return messages, checked; a string is one message of ``role``, and None has none.

    Raises:
        ValueError: They are none; the message says which and why.
    """
    if value is None and name == PROMPT:
        return ()
    if isinstance(value, str) and name != DEFAULT_KEYS["chat"]:
        return ({"role": role, "content": value},)
    if not isinstance(value, list) or not value:
        raise ValueError(f"its {name!r} is {_told(value)}, not a list of messages")
    found = tuple(_message(each, f"{name}[{index}]") for index, each in enumerate(value))
    if role == ANSWERING and not any(each["role"] == ANSWERING for each in found):
        roles = ", ".join(dict.fromkeys(each["role"] for each in found))
        raise ValueError(f"its {name!r} has no message of the {ANSWERING} (roles: {roles})")
    return found


def _message(value: Any, name: str) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        keys = ", ".join(value) if isinstance(value, dict) else _told(value)
        raise ValueError(f"{name} has no 'role' and 'content' ({keys})")
    # Columns of a table give every message all keys: an absent one is a null there.
    kept = {key: each for key, each in value.items() if each is not None}
    content = kept.get("content")
    if not isinstance(content, str) and not (content is None and kept.get("tool_calls")):
        raise ValueError(f"the content of {name} is {_told(content)}, not a string")
    return kept


def tools_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the tools of a row with messages, a list or its text as JSON.

    Raises:
        ValueError: They are something else.
    """
    tools = row.get(TOOLS)
    # Tables often hold them as text, as their schemas differ.
    if isinstance(tools, str):
        tools = json.loads(tools) if tools.strip() else None
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"its {TOOLS!r} is {_told(tools)}, not a list")
    return tuple(tools or ())


def _told(value: Any) -> str:
    if value is None:
        return "null"
    return "an empty list" if value == [] else f"a {type(value).__name__}"
