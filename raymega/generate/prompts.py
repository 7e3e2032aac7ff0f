"""Reads the prompts of `raymega generate`: texts, a file of them, or chats that the model's template renders."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raymega.errors import ConfigError, Fault, raise_faults
from raymega.extras import import_extra

JSON_SUFFIXES = (".jsonl", ".json")
TEMPLATE_FILE = "chat_template.jinja"
Chat = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """Prompts as the user gives them: one of the three has some.

    Attributes:
        texts: Texts of ``--prompt``.
        file: File of ``--file``: a prompt a line, or JSON lines with ``prompt``.
        chat: File of ``--chat``: JSON of one chat, a list of messages, or JSON lines with one each.
    """

    texts: tuple[str, ...] = ()
    file: Path | None = None
    chat: Path | None = None


def read_prompts(prompts: Prompts, files: Mapping[str, bytes], *, source: str) -> list[str]:
    """Return the text of each prompt; those of chats are rendered.

    Args:
        prompts: Prompts as the user gives them.
        files: Files of the model's tokenizer, by name.
        source: Name of the model, for messages.

    Raises:
        ConfigError: There is no prompt, an empty one, an unreadable file, or a tokenizer without a chat template.
    """
    given = [bool(prompts.texts), prompts.file is not None, prompts.chat is not None]
    if sum(given) != 1:
        raise ConfigError(
            fact=f"{sum(given)} of --prompt, --file and --chat are given",
            rule="the prompts come from one of them",
            remedy="give --prompt 'Once upon a time', for example",
        )
    if prompts.chat is not None:
        chats = list(_chats(prompts.chat))
        _refuse_none(chats, f"--chat {prompts.chat}")
        return render_chats(chats, files, source=source)
    texts = list(prompts.texts) or list(_lines(prompts.file or Path()))
    _refuse_none(texts, f"--file {prompts.file}")
    empty = [number for number, text in enumerate(texts) if not text]
    raise_faults(
        ConfigError,
        [
            Fault(
                fact=f"prompt {number + 1} of {len(texts)} is empty",
                rule="a prompt has at least one character",
                remedy="give --prompt 'Once upon a time', for example",
            )
            for number in empty
        ],
    )
    return texts


def render_chats(chats: Sequence[Chat], files: Mapping[str, bytes], *, source: str) -> list[str]:
    """Return each chat as text that the model's answer continues, by the tokenizer's chat template.

    Raises:
        ConfigError: transformers is not installed, the tokenizer has no template, or the template refuses a chat.
    """
    transformers = import_extra(
        "transformers", extra="hf", purpose="--chat, which renders a chat template,"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        raise ConfigError(
            fact=f"--chat: the tokenizer of {source} has no chat template",
            rule="a chat becomes text by the template with which the model was trained",
            remedy=f"use --prompt, or put the model's {TEMPLATE_FILE} into {source}/hf/",
        )
    rendered = []
    for number, chat in enumerate(chats, start=1):
        try:
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template raises what it likes
            raise ConfigError(
                fact=f"--chat: the chat template refuses chat {number}: {error}",
                rule="its messages have the roles and keys that the template expects",
                remedy="correct the file",
            ) from error
        rendered.append(str(text))
    return rendered


def _refuse_none(found: Sequence[object], what: str) -> None:
    if not found:
        raise ConfigError(
            fact=f"{what} has no prompt", rule="it has at least one", remedy="write one into it"
        )


def _lines(path: Path) -> Iterator[str]:
    """Yield the prompts of a file: those of JSON lines, or each line that is not blank."""
    for number, line in enumerate(_read(path, "--file").splitlines(), start=1):
        if path.suffix not in JSON_SUFFIXES:
            yield from [line] if line.strip() else []
        elif line.strip():
            found = _parsed(line, f"--file {path}:{number}", rule="a line is {'prompt': text}")
            text = found.get("prompt") if isinstance(found, dict) else None
            if not isinstance(text, str):
                raise _wrong(f"--file {path}:{number}", found, rule="a line is {'prompt': text}")
            yield text


def _chats(path: Path) -> Iterator[Chat]:
    """Yield the chats of a file."""
    rule = "a chat is a list of {'role': name, 'content': text}"
    text = _read(path, "--chat")
    try:
        found = [(str(path), json.loads(text))]
    except json.JSONDecodeError:
        lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
        found = [
            (f"{path}:{n}", _parsed(line, f"--chat {path}:{n}", rule=rule)) for n, line in lines
        ]
    for place, value in found:
        chat = value.get("messages") if isinstance(value, dict) else value
        is_chat = isinstance(chat, list) and all(isinstance(m, dict) and "role" in m for m in chat)
        if not chat or not is_chat:
            raise _wrong(f"--chat {place}", value, rule=rule)
        yield chat


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            fact=f"{option} {path} cannot be read: {reason}",
            rule="it is a text file of prompts",
            remedy="give the path of such a file",
        ) from error


def _parsed(line: str, place: str, *, rule: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise _wrong(place, error, rule=rule) from error


def _wrong(place: str, found: object, *, rule: str) -> ConfigError:
    return ConfigError(fact=f"{place}: {str(found)[:80]}", rule=rule, remedy="correct the line")
