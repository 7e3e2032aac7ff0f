"""Reads a recipe: which steps a corpus goes through, in which order, with which options.

It owns the form of the file and its faults. Options are in `raymega.curate.options`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from raymega.config.fields import Section
from raymega.config.load import section_faults
from raymega.config.shipped_files import shipped_file
from raymega.config.yaml_text import read_yaml, yaml_fault
from raymega.curate.options import DEFAULT_STEPS, OPTIONS
from raymega.errors import ConfigError, Fault

_EXAMPLE = "write steps: [extract, {language: {keep: [en]}}, exact, near]"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpec:
    """Step of a recipe: its name and options."""

    name: str
    options: Section


def read_recipe(path: str) -> tuple[StepSpec, ...]:
    """Return the steps of a recipe in order; one without ``steps`` has those that need no file.

    Args:
        path: Path of the file, or the name of a shipped one such as ``jobs/curate/fineweb.yaml``.

    Raises:
        ConfigError: With one fault for each wrong step or option.
    """
    raw = _read(path)
    faults: list[Fault | str] = [_unknown_key(key) for key in raw if key != "steps"]
    given = raw.get("steps", DEFAULT_STEPS)
    if not isinstance(given, tuple) or not given:
        raise ConfigError(
            *faults, fact=f"steps={given!r}", rule="it must be a list of steps", remedy=_EXAMPLE
        )
    specs = [spec for each in given if (spec := _read_step(each, faults))]
    faults += _order_faults([spec.name for spec in specs])
    if faults:
        raise ConfigError(*faults)
    return tuple(specs)


def _read(path: str) -> Mapping[str, Any]:
    file = Path(path)
    if not file.exists() and not file.is_absolute():
        file = shipped_file(path) or file
    try:
        raw = read_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            fact=f"--recipe {path} cannot be read: {error.strerror}",
            rule="a recipe is a YAML file",
            remedy="give its path; jobs/curate/fineweb.yaml is one that works as it is",
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        cause, remedy = yaml_fault(error)
        raise ConfigError(
            fact=f"{path} is not YAML: {cause}", rule="a recipe is a YAML mapping", remedy=remedy
        ) from error
    if not isinstance(raw, Mapping):
        raise ConfigError(
            fact=f"{path} holds no mapping", rule="a recipe has the key steps", remedy=_EXAMPLE
        )
    return raw


def _read_step(given: object, faults: list[Fault | str]) -> StepSpec | None:
    """Return a step of the list; its faults are added to ``faults``."""
    name: object = given
    options: Any = {}
    if isinstance(given, Mapping) and len(given) == 1:
        ((name, options),) = given.items()
    if not isinstance(name, str) or name not in OPTIONS:
        near = get_close_matches(str(name), OPTIONS, n=1, cutoff=0.5)
        faults.append(
            Fault(
                fact=f"{given!r} is no step",
                rule=f"a step is a name, or {{name: options}}; names are {', '.join(OPTIONS)}",
                remedy=f"did you mean {near[0]}?" if near else _EXAMPLE,
            )
        )
        return None
    section, values = OPTIONS[name], dict[str, Any]()
    # {exact: } is a step without options; any other value but a mapping is refused, false too.
    options = {} if options is None else options
    found = section_faults(options, section, name, values)
    faults += found
    return None if found else StepSpec(name=name, options=section.model_validate(options))


def _order_faults(names: list[str]) -> list[Fault]:
    faults = []
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        faults.append(
            Fault(
                fact=f"the recipe has {', '.join(twice)} twice",
                rule="a step stands once",
                remedy="remove one of them",
            )
        )
    if "extract" in names[1:]:
        faults.append(
            Fault(
                fact=f"extract is step {names.index('extract') + 1}",
                rule="pages become text as they are read, so it must be the first step",
                remedy="move extract to the first place",
            )
        )
    return faults


def _unknown_key(key: str) -> Fault:
    return Fault(
        fact=f"{key} is not a known key of a recipe",
        rule="a recipe has the key steps",
        remedy="remove it, or write it below a step",
    )
