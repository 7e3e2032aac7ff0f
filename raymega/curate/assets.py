"""Reads the user's files that steps need: tasks, models and lists.

They are read where the command runs and kept below ``_state/``, where the tasks find them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from raymega.curate.options import Decontaminate, QualityModel, Urls
from raymega.curate.recipe import StepSpec
from raymega.curate.steps.decontaminate import LEAST_WORDS, hash_tasks, task_texts
from raymega.curate.steps.quality_model import decode_model
from raymega.curate.tokens import tokenize
from raymega.errors import ConfigError, Fault, first_few, one_line


def read_assets(specs: Sequence[StepSpec]) -> dict[str, bytes]:
    """Return the content that each step needs that has files, by the step's name.

    Raises:
        ConfigError: With one fault for each file that is missing or no such file.
    """
    faults, assets = list[Fault | str](), dict[str, bytes]()
    for spec in specs:
        reader = _READERS.get(spec.name)
        if reader is None:
            continue
        try:
            assets[spec.name] = reader(spec.options)
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(*faults)
    return assets


def read_tasks(options: Decontaminate) -> bytes:
    """Return the hashes of the files of tasks.

    Raises:
        ConfigError: A file is missing or no such file.
    """
    texts = list[str]()
    for name in options.tasks:
        texts += _read("decontaminate.tasks", name, partial(_task_texts, name))
    if not any(len(tokenize(text).hashes) >= LEAST_WORDS for text in texts):
        raise ConfigError(
            fact=f"decontaminate.tasks {first_few(list(options.tasks))}: no text has {LEAST_WORDS} words",
            rule=f"a task is found by {options.words} words in a row, or as a whole of at least {LEAST_WORDS}",
            remedy="name files with the texts of the tasks, or leave the step out",
        )
    return hash_tasks(texts, options.words)


def _task_texts(name: str, content: bytes) -> list[str]:
    try:
        return list(task_texts(name, content.decode("utf-8-sig")))
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error}") from error


def _model(options: QualityModel) -> bytes:
    def checked(content: bytes) -> bytes:
        decode_model(content)
        return content

    found: bytes = _read("quality_model.model", options.model, checked)
    return found


def _without_bom(content: bytes) -> str:
    return content.decode("utf-8-sig")


def _lists(options: Urls) -> bytes:
    lines = [_read("urls.lists", name, _without_bom) for name in options.lists]
    return "\n".join(lines).encode()


def _read(field: str, name: str, decode: Callable[[bytes], Any]) -> Any:
    try:
        return decode(Path(name).read_bytes())
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else one_line(error, 200)
        raise ConfigError(
            fact=f"{field} {name!r} cannot be read: {cause}",
            rule="the file of a step must be readable where the command runs",
            remedy="give .jsonl or text of tasks, a model of raymega data train-quality, or a text with a domain in each line",
        ) from error


_READERS: dict[str, Callable[[Any], bytes]] = {
    "decontaminate": read_tasks,
    "quality_model": _model,
    "urls": _lists,
}
