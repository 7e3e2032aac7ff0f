"""docs/job-file.md: its tables are made from the schema, the text between them is written by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raymega.config.fields import MOST, PLUGIN_NAME, Section
from raymega.config.schema import Job

PAGE = Path(__file__).parents[2] / "docs" / "job-file.md"
HEADING = re.compile(r"^##+ ([a-z][\w.]*)\n", re.MULTILINE)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
HEAD = "| field | value | default | what it is |\n|---|---|---|---|\n"
KINDS = {"integer": "whole number", "number": "number", "string": "text", "object": "mapping"}
PLUGIN = "a plug-in's name"
EXAMPLES = {"family": "stablelm", "loss": "focal", "name": "nesterov", "lr_schedule": "triangle", "transforms": "skip",
            "callbacks": "steps", "metrics": "bits"}  # fmt: skip
"""Part of the package of docs/extending.md by the field that names it."""
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def rendered(page: str) -> str:
    """Return the page with the first table of each section made anew.

    Raises:
        ValueError: The page's sections are not those of the schema, in its order, each with a table.
    """
    sections = dict(_sections(Job, ""))
    intro, *parts = HEADING.split(page)
    found = parts[::2]
    if found != list(sections):
        raise ValueError(f"docs/job-file.md has the sections {found}; write {list(sections)}")
    texts = [intro]
    for name, text in zip(found, parts[1::2], strict=True):
        made, tables = TABLE.subn(lambda _, kind=sections[name]: _table(kind), text, count=1)
        if not tables:
            raise ValueError(f"section {name} of docs/job-file.md has no table; write one row")
        texts.append(f"##{'#' * name.count('.')} {name}\n{made}")
    return "".join(texts)


def _sections(section: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    """Yield each section by its dotted name, and those inside it behind it."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield f"{prefix}{name}", kind
            yield from _sections(kind, f"{prefix}{name}.")


def _table(section: type[Section]) -> str:
    schema = section.model_json_schema()
    rows = [
        f"| `{name}` | {_words(name, field, schema)} | {_default(section, name)} | {_cell(field['description'])} |\n"
        for name, field in schema["properties"].items()
    ]
    return HEAD + "".join(rows)


def _words(name: str, field: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Say which values a field takes, with an example of a plug-in's name."""
    text = _value(field, schema)
    if PLUGIN not in text:
        return text
    return (
        f"{text.replace(f'list of {PLUGIN}', 'list of plug-ins')}, such as `acme.{EXAMPLES[name]}`"
    )


def _value(field: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Say in words what JSON schema allows."""
    if "anyOf" in field:
        return " or ".join(_value(each, schema) for each in field["anyOf"])
    if "$ref" in field:
        inner = schema["$defs"][field["$ref"].rpartition("/")[2]]
        is_section = "default" in field  # one with a table of its own
        if inner["title"] == "ModelSection":  # a teacher's, whose fields have a table too
            return "mapping as `model`"
        return "mapping" if is_section else f"{{{', '.join(inner['properties'])}}}"
    words = field.get("enum", [field["const"]] if "const" in field else [])
    if field.get("type") == "boolean":
        words = [True, False]
    if words:
        return ", ".join(
            f"`{word if isinstance(word, str) else json.dumps(word)}`" for word in words
        )
    if field["type"] == "array":
        return f"list of {_value(field['items'], schema)}"
    bounds = [
        f"{sign} {field[key]}" for key, sign in BOUNDS.items() if field.get(key, MOST) != MOST
    ]
    if field.get("pattern") == PLUGIN_NAME:
        return PLUGIN
    pattern = [f"that matches `{field['pattern']}`"] if "pattern" in field else []
    return " ".join([KINDS[field["type"]], *pattern, ", ".join(bounds)]).rstrip()


def _default(section: type[Section], name: str) -> str:
    field = section.model_fields[name]
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Section):
        return "`{}`"
    text = value if isinstance(value, str) else json.dumps(value)
    return f"`{text.replace(str(Path.home()), '~')}`"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
