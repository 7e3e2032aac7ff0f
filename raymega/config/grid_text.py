"""Reads and writes texts of the command line: degrees of ``--grid``, and overrides of ``--set``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from raymega.config.fields import section_of
from raymega.config.schema import Job
from raymega.config.yaml_text import read_yaml, yaml_fault
from raymega.errors import ConfigError, Fault

AXES = ("tp", "cp", "pp", "dp", "ep", "etp")
"""Axes that have a degree in the section ``parallel``."""
OPTIONS = ("sequence_parallel", "cp_method")
"""Other fields of that section that a grid may name: how ranks of an axis cut a sequence."""
SHORT_FORMS = {
    re.compile(r"parallel=(auto)"): "parallel.layout",
    re.compile(r"plugins=(\[.*\])"): "plugins.modules",
    re.compile(r"precision=(\w+)"): "precision.dtype",
}
"""Overrides of a whole section that stand for one of its fields, as a job file states two of them for short."""
_DEGREE = re.compile(r"\s*-?\d+\s*")
_PAIR = re.compile(r"([a-z]+)\s*=?\s*(\d+)")


def grid_overrides(text: str) -> list[str]:
    """Return a text such as ``tp=2,pp=2`` as overrides of a job; empty is no override.

    Fields of OPTIONS may follow: ``cp=2,cp_method=all_to_all``.

    Raises:
        ConfigError: The text is not of this form, or names an axis that no grid has.
    """
    pairs = [pair.strip() for pair in text.split(",") if pair.strip()]
    cut = [pair.partition("=") for pair in pairs]
    # Whether a degree is large enough is checked with the other fields of the job.
    is_whole = [
        equals and (axis.strip() in OPTIONS or (axis.strip() in AXES and _DEGREE.fullmatch(value)))
        for axis, equals, value in cut
    ]
    is_unique = len({axis.strip() for axis, _, _ in cut}) == len(cut)
    if all(is_whole) and is_unique:
        return [f"parallel.{axis.strip()}={value.strip()}" for axis, _, value in cut]
    found = {axis: degree for axis, degree in _PAIR.findall(text.lower()) if axis in AXES}
    meant = [f"{axis}={degree}" for axis, degree in found.items()]
    if not meant and text.strip().isdigit():
        meant = [f"dp={text.strip()}"]
    raise ConfigError(
        Fault(
            fact=f"--grid {text}",
            rule="it must be pairs axis=degree with commas between them, each axis once; axes are "
            f"{', '.join(AXES)}; {' and '.join(OPTIONS)} may follow",
            remedy=f"write --grid {','.join(meant or ['tp=2', 'pp=2'])}",
        )
    )


def set_options(overrides: Iterable[str]) -> str:
    """Return overrides as options of a command line, quoted for a shell: a placement of layers has pipes."""
    return " ".join(f"--set {shlex.quote(text)}" for text in overrides)


def degrees_of(text: str) -> dict[str, int]:
    """Return the degrees of tp, cp, pp and dp in a text such as ``tp=2,pp=2``; 1 where it has none above 0.

    Raises:
        ConfigError: The text is not of this form, or names an axis that no grid has.
    """
    given = dict(text.split("=", 1) for text in grid_overrides(text))
    return {
        axis: max(1, int(given.get(f"parallel.{axis}", 1))) for axis in ("tp", "cp", "pp", "dp")
    }


def override_list(overrides: Iterable[str]) -> list[str]:
    """Return the overrides of a job as a list.

    Raises:
        ConfigError: They are one text, which Python would read letter by letter, or a mapping.
    """
    if not isinstance(overrides, str | Mapping):
        return list(overrides)
    pairs = [overrides] if isinstance(overrides, str) else overrides.items()
    meant = [pair if isinstance(pair, str) else "=".join(map(str, pair)) for pair in pairs]
    raise ConfigError(
        fact=f"overrides={overrides!r}",
        rule="overrides are a list of texts section.field=value",
        remedy=f"write overrides={meant!r}",
    )


def apply_override(raw: dict[str, Any], override: str) -> list[Fault]:
    """Write one override into ``raw``, or return the fault of an override that cannot be read."""
    path, equals, text = override.partition("=")
    *sections, field = path.strip().split(".")
    if not equals or not sections or not all((*sections, field)):
        return [_bad_override(override, "it must read section.field=value", _nearest(override))]
    try:
        value = read_yaml(text)
    except yaml.YAMLError as error:
        return [_bad_override(override, f"its value must be YAML ({yaml_fault(error)[0]})")]
    # Sections on the way are created; unknown ones are faults of the validation.
    section = raw
    for name in sections:
        if not isinstance(section.get(name), dict):
            section[name] = {}
        section = section[name]
    section[field] = value
    return []


def _bad_override(override: str, rule: str, meant: str = "") -> Fault:
    remedy = f"did you mean --set {meant}?" if meant else "write for example --set run.steps=50"
    return Fault(fact=f"override {override!r}", rule=rule, remedy=remedy)


def _nearest(override: str) -> str:
    """Return the override that a text without a section means: optimizer.lr=1e-3 for lr=1e-3; or empty."""
    pair = override.replace(":", "=", 1)
    for form, field in SHORT_FORMS.items():
        if found := form.fullmatch("".join(pair.split())):
            return f"{field}={found[1]}"
    field, _, value = pair.partition("=")
    if "." in field:
        return f"{field.strip()}={value.strip()}" if value and ":" in override else ""
    for name, info in Job.model_fields.items():
        section = section_of(info)
        if section is not None and field.strip() in section.model_fields and value:
            return f"{name}.{field.strip()}={value.strip()}"
    return ""
