"""Reads the prompts of `raymega generate`: texts, a file of them, or chats that the model's template renders."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from raymega.data.format import TEMPLATE_FILE
from raymega.data.images.files import MARK
from raymega.errors import ConfigError, Fault, raise_faults
from raymega.extras import import_extra
from raymega.prepare.chat.rows import tools_of

JSON_SUFFIXES = (".jsonl", ".json")


class Chat(NamedTuple):
    """Messages of a chat, and the tools that they may call."""

    messages: list[dict[str, Any]]
    tools: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """Prompts as the user gives them: one of the three has some.

    Attributes:
        texts: Texts of ``--prompt``.
        file: File of ``--file``: a prompt a line, or JSON lines with ``prompt`` and, if it has marks, ``images``.
        chat: File of ``--chat``: JSON of one chat, a list of messages, or JSON lines with one each; or objects with
            ``messages`` and ``tools``, as in training. A message's content is a text, or a list with ``{type: image, path}`` among texts.
        images: Files of ``--image``, which the marks of ``texts`` stand for in order.
    """

    texts: tuple[str, ...] = ()
    file: Path | None = None
    chat: Path | None = None
    images: tuple[Path, ...] = ()


class Prompt(NamedTuple):
    """Prompt as text, and its images as the user names them: each is a path or base64, see `read_image`."""

    text: str
    images: tuple[Any, ...] = ()


def read_prompts(prompts: Prompts, files: Mapping[str, bytes], *, source: str) -> list[Prompt]:
    """Return the text and images of each prompt; those of chats are rendered.

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
    if prompts.images and not prompts.texts:
        raise ConfigError(
            fact=f"--image is given {len(prompts.images)} times without --prompt",
            rule="rows of --file and messages of --chat name their own images",
            remedy="leave --image out, and write 'images' into the file's rows",
        )
    if prompts.chat is not None:
        chats = list(_chats(prompts.chat))
        _refuse_none(chats, f"--chat {prompts.chat}")
        rendered = render_chats(chats, files, source=source)
        raise_faults(ConfigError, _half_faults(rendered))
        return [Prompt(text, _images_of(chat)) for text, chat in zip(rendered, chats, strict=True)]
    texts = _with_images(prompts.texts, prompts.images) or list(_lines(prompts.file or Path()))
    _refuse_none(texts, f"--file {prompts.file}")
    raise_faults(ConfigError, _half_faults([prompt.text for prompt in texts]))
    empty = [number for number, prompt in enumerate(texts) if not prompt.text]
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
            remedy=f"use --prompt, or put the {TEMPLATE_FILE} that the model was trained with into {source}/tokenizer/",
        )
    rendered = []
    for number, chat in enumerate(chats, start=1):
        try:
            text = tokenizer.apply_chat_template(
                chat.messages, list(chat.tools) or None, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template raises what it likes
            raise ConfigError(
                fact=f"--chat: the chat template refuses chat {number}: {error}",
                rule="its messages have the roles and keys that the template expects",
                remedy="correct the file",
            ) from error
        rendered.append(str(text))
    return rendered


def _half_faults(texts: Sequence[str]) -> Iterator[Fault]:
    """Yield a fault for each text with halves of characters, which no tokenizer takes."""
    for number, text in enumerate(texts, start=1):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            yield Fault(
                fact=f"prompt {number} of {len(texts)} has {text[error.start]!r} as character {error.start + 1}",
                rule="half of a surrogate pair, or a byte that is not UTF-8, is no text",
                remedy="correct the prompt",
            )


def _refuse_none(found: Sequence[object], what: str) -> None:
    if not found:
        raise ConfigError(
            fact=f"{what} has no prompt", rule="it has at least one", remedy="write one into it"
        )


def _with_images(texts: Sequence[str], images: Sequence[Path]) -> list[Prompt]:
    """Return the texts with the images that their marks stand for, in order."""
    counts = [text.count(MARK) for text in texts]
    if texts and images and sum(counts) != len(images):
        raise ConfigError(
            fact=f"--prompt has {sum(counts)} marks {MARK}, and --image is given {len(images)} times",
            rule="each mark stands for an image, in order",
            remedy=f"write {MARK} into --prompt where an image belongs",
        )
    # absolute: paths of other prompts are relative to their file
    left = iter(str(path.absolute()) for path in images)
    return [
        Prompt(text, tuple(islice(left, count)) if images else ())
        for text, count in zip(texts, counts, strict=True)
    ]


def _images_of(chat: Chat) -> tuple[Any, ...]:
    """Return the images of a chat in order, as its messages' contents name them."""
    contents = [m["content"] for m in chat.messages if isinstance(m.get("content"), list)]
    parts = [part for content in contents for part in content]
    images = [part for part in parts if isinstance(part, dict) and part.get("type") == "image"]
    return tuple(
        next((part[key] for key in ("path", "image", "url", "base64") if key in part), None)
        for part in images
    )


def _lines(path: Path) -> Iterator[Prompt]:
    """Yield the prompts of a file: those of JSON lines, or each line that is not blank."""
    is_json = path.suffix.lower() in JSON_SUFFIXES
    for number, line in enumerate(_read(path, "--file").split("\n"), start=1):
        if not is_json:
            yield from [Prompt(line)] if line.strip() else []
        elif line.strip():
            place, rule = f"--file {path}:{number}", "a line is {'prompt': text}"
            found = _parsed(line, place, rule=rule)
            row = found if isinstance(found, dict) else {}
            text, images = row.get("prompt"), row.get("images") or []
            if not isinstance(text, str):
                raise _wrong(place, found, rule=rule)
            if not isinstance(images, list):
                raise _wrong(place, images, rule="images is a list, of paths or base64")
            yield Prompt(text, tuple(images))


def _chats(path: Path) -> Iterator[Chat]:
    """Yield the chats of a file."""
    rule = "a chat is a list of {'role': name, 'content': text}"
    text = _read(path, "--chat")
    try:
        found = [(str(path), json.loads(text))]
    except json.JSONDecodeError:
        lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        found = [
            (f"{path}:{n}", _parsed(line, f"--chat {path}:{n}", rule=rule)) for n, line in lines
        ]
    for place, value in found:
        chat = value.get("messages") if isinstance(value, dict) else value
        is_chat = isinstance(chat, list) and all(isinstance(m, dict) and "role" in m for m in chat)
        if not chat or not is_chat:
            raise _wrong(f"--chat {place}", value, rule=rule)
        try:
            yield Chat(chat, tools_of(value) if isinstance(value, dict) else ())
        except ValueError as error:
            raise _wrong(f"--chat {place}", error, rule="its tools are a list") from error


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # a mark of the byte order is no text
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
