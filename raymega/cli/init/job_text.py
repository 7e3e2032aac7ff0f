"""Text of a job file with comments: each field under its description."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml
from pydantic import TypeAdapter

from raymega.config.fields import Section
from raymega.config.schema import Job, PluginsSection, PrecisionSection
from raymega.config.yaml_text import read_yaml
from raymega.plugins import Plugin, registry_of

SCHEMA_FILE = "raymega.schema.json"
"""Name of the JSON schema beside a job file, which editors read."""
WIDTH = 100


def schema_text(modules: Sequence[str] = ()) -> str:
    """Return the JSON schema of job files, with the options of the plug-ins of ``modules``.

    Raises:
        ConfigError: A module cannot be used.
    """
    schema = Job.model_json_schema()
    _add_short_forms(schema)
    rows = [row for row in registry_of(tuple(modules)).plugins if row.is_outside]
    if rows:
        field = schema["$defs"][PluginsSection.__name__]["properties"]["options"]
        field |= {"properties": _option_schemas(rows), "additionalProperties": False}
    # Defaults name the home of the reader, not of this user.
    return json.dumps(schema, indent=2).replace(str(Path.home()), "~")


def _add_short_forms(schema: dict[str, Any]) -> None:
    """Allow what a job file may write in place of a mapping or of two fields."""
    auto, modules = {"const": "auto"}, {"type": "array", "items": {"type": "string"}}
    for section, short in (("parallel", auto), ("plugins", modules)):
        schema["properties"][section] = {"anyOf": [schema["properties"][section], short]}
    schema["$defs"][PrecisionSection.__name__]["properties"]["dtype"]["enum"].append("fp8")


def _option_schemas(rows: Sequence[Plugin]) -> dict[str, Any]:
    """Return the schema of the options of each part that has some, by its name."""
    return {
        row.name: TypeAdapter(row.options).json_schema() | {"title": f"{row.kind} {row.name}"}
        for row in rows
        if row.options is not None
    }


def job_text(values: Mapping[str, Any], *, head: list[str], notes: Mapping[str, list[str]]) -> str:
    """Return the job file of ``values``, its sections in the schema's order.

    Args:
        values: Values by section and field.
        head: Comments above the file.
        notes: Comments above a section or field, by dotted path, in place of its description.
    """
    lines = [f"# yaml-language-server: $schema={SCHEMA_FILE}", *_comments(head, "")]
    for name, field in Job.model_fields.items():
        given = values.get(name)
        if not given:
            continue
        lines += ["", *_comments(notes.get(name, []), ""), f"{name}:"]
        section = _section_of(field.annotation)
        assert section is not None, "every key of a job is a section"
        lines += _fields(section, given, notes, path=name, indent="  ")
    return "\n".join(lines) + "\n"


def _fields(
    section: type[Section],
    values: Mapping[str, Any],
    notes: Mapping[str, list[str]],
    *,
    path: str,
    indent: str,
) -> Iterator[str]:
    for name, field in section.model_fields.items():
        if name not in values:
            continue
        at = f"{path}.{name}"
        yield from _comments(notes.get(at, [section.describe(name)]), indent)
        inner = _section_of(field.annotation)
        if inner is None:
            yield f"{indent}{name}: {_scalar(values[name])}"
            continue
        yield f"{indent}{name}:"
        yield from _fields(inner, values[name], notes, path=at, indent=f"{indent}  ")


def _comments(texts: list[str], indent: str) -> Iterator[str]:
    for text in texts:
        # a command is one line, whatever its length
        width = 10_000 if text.startswith(" ") else WIDTH - len(indent) - 2
        for line in wrap(text, width, drop_whitespace=not text.startswith(" ")):
            yield f"{indent}# {line}"


def _section_of(annotation: object) -> type[Section] | None:
    """Return the section that a field is; None for a field with a value."""
    is_section = isinstance(annotation, type) and issubclass(annotation, Section)
    return annotation if is_section else None  # type: ignore[return-value]


def _scalar(value: object) -> str:
    """Return a value in one line of YAML."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    text = text.removesuffix("\n").removesuffix("\n...")
    # PyYAML writes for YAML 1.1, in which 1e3 is a text
    return json.dumps(value) if isinstance(value, str) and read_yaml(text) != value else text
