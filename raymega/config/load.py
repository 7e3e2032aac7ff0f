"""Reads a job file, applies overrides, and reports every fault in one pass.

Each field is validated by itself, so that one bad value hides no other fault. The rules between values
then get the values that are valid. The module reads no cluster, store or data.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from raymega.config.fields import MOST, PLUGIN_NAME, Section, as_section, section_of
from raymega.config.grid_text import apply_override, override_list
from raymega.config.paths import PATH_LISTS, make_absolute, with_absolute_paths
from raymega.config.schema import Job
from raymega.config.shipped_files import shipped_file
from raymega.config.yaml_text import read_yaml, yaml_fault
from raymega.errors import ConfigError, Fault

_ABSENT = object()
MOST_KEYS = 16
"""Most keys of a section that a message lists; of more the nearest are named."""
_QUOTED = re.compile(r"'([^']+)'")
YAML_WORDS = {
    r"valid dictionary or instance of \w+": "mapping",
    r"valid tuple": "list",
    r"tuple should have at \w+ (\d+) items after validation, not \d+": r"it should have \1 entries",
    r"field required": "it is missing",
    r"extra inputs are not permitted": "it is not a known key",
}
"""Patterns of pydantic's messages, with the words that an author of YAML would use."""
_UNITS = re.compile(r"(\d+) ?(?:px|pixels|s|steps|tokens|layers|%)")
# Fields whose relative paths are made absolute.
_PATHS = (
    ("data", "path"), ("checkpoint", "uri"), ("checkpoint", "init_from"), ("checkpoint", "init_adapter"),
    ("distillation", "teacher_checkpoint"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedJob:
    """Result of reading a job file, which may have faults.

    Attributes:
        values: Values of all fields that are valid by themselves, by dotted path.
        faults: Faults of all other fields, and those of no field.
        raw: Mapping as it was written, with overrides applied.
        of_no_field: Faults of overrides that are none, and of a run's length; another look at the fields keeps them.
    """

    values: Mapping[str, Any]
    faults: tuple[Fault, ...]
    raw: Mapping[str, Any]
    of_no_field: tuple[Fault, ...] = ()

    def job(self) -> Job:
        """Return the whole job.

        Raises:
            ConfigError: The job file has faults; the error names all of them.
        """
        if self.faults:
            raise ConfigError(*self.faults)
        return Job.model_validate(self.raw)

    @property
    def stated(self) -> frozenset[str]:
        """Dotted paths that the file or an override sets."""
        sections = ((name, given) for name, given in self.raw.items() if isinstance(given, Mapping))
        return frozenset(f"{name}.{key}" for name, given in sections for key in given)

    def with_steps(self, steps: int, faults: Sequence[Fault]) -> ParsedJob:
        """Return the job with ``run.steps`` from its run.tokens or run.epochs, 0 for neither.

        A job that also states another number of steps keeps it, and is refused by a rule.
        """
        if faults:
            return replace(
                self, faults=(*self.faults, *faults), of_no_field=(*self.of_no_field, *faults)
            )
        if not steps or self.values.get("run.steps"):
            return self
        run = {**self.raw["run"], "steps": steps}
        return replace(
            self, values={**self.values, "run.steps": steps}, raw={**self.raw, "run": run}
        )

    def with_overrides(self, overrides: Iterable[str]) -> ParsedJob:
        """Return the job with ``a.b=c`` overrides applied and every field validated again."""
        raw = {k: dict(v) if isinstance(v, Mapping) else v for k, v in self.raw.items()}
        faults = [fault for override in overrides for fault in apply_override(raw, override)]
        _spell_fp8_out(raw)
        return _parsed(raw, [*self.of_no_field, *faults])


def parse_job(path: Path | str, overrides: Iterable[str] = ()) -> ParsedJob:
    """Read ``path`` and apply ``a.b=c`` overrides.

    Relative paths in the job become absolute here, once, against the working folder.

    Raises:
        ConfigError: The file is missing or is not a YAML mapping, or the overrides are no list; faults of fields
            are returned.
    """
    # The mapping, with overrides and short forms written out, then each field.
    raw = _read(Path(path))
    if raw.get("parallel") == "auto":
        raw["parallel"] = {"layout": "auto"}
    if isinstance(raw.get("plugins"), tuple):
        raw["plugins"] = {"modules": raw["plugins"]}
    given = override_list(overrides)
    faults = [fault for override in given for fault in apply_override(raw, override)]
    _spell_fp8_out(raw)
    for section, key in _PATHS:
        make_absolute(raw.get(section), key)
    for path in PATH_LISTS:
        section, _, key = path.partition(".")
        fields = raw.get(section)
        if isinstance(fields, dict) and key in fields:
            fields[key] = with_absolute_paths(fields[key])
    return _parsed(raw, faults)


def _parsed(raw: Mapping[str, Any], of_no_field: Sequence[Fault]) -> ParsedJob:
    parsed = parse_mapping(raw)
    return replace(parsed, faults=(*of_no_field, *parsed.faults), of_no_field=tuple(of_no_field))


def parse_mapping(raw: Mapping[str, Any]) -> ParsedJob:
    """Validate every field of a mapping by itself; lists count as the tuples that YAML's are read as."""
    raw = {name: _with_tuples(value) for name, value in raw.items()}
    values: dict[str, Any] = {}
    faults = _unknown_keys(raw, Job, prefix="")
    for name, field in Job.model_fields.items():
        section = section_of(field)
        assert section is not None, name
        faults += section_faults(raw.get(name, {}), section, name, values)
    return ParsedJob(values=values, faults=tuple(faults), raw=raw)


def _with_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_tuples(each) for key, each in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _read(path: Path) -> dict[str, Any]:
    """Read the file's mapping; a relative path that does not exist may name a shipped file.

    Raises:
        ConfigError: The file does not exist, or is not a YAML mapping.
    """
    try:
        if not path.exists() and not path.is_absolute():
            path = shipped_file(path.as_posix()) or path
        if not path.is_file():
            raise ConfigError(
                fact=f"job file {str(path)!r} {'is no file' if path.exists() else 'does not exist'}",
                rule="a job is a YAML file",
                remedy="give its path; jobs/verify.yaml is one that runs as it is",
            )
        raw = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            fact=f"job file {str(path)!r:.200} cannot be read: {error.strerror}",
            rule="a job is a YAML file",
            remedy="give its path; jobs/verify.yaml is one that runs as it is",
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        cause, remedy = yaml_fault(error)
        raise ConfigError(
            fact=f"{path} is not YAML: {cause}",
            rule="a job is a YAML mapping of sections",
            remedy=remedy,
        ) from error
    if not isinstance(raw, dict):
        raise ConfigError(
            fact=f"{path} {_content(raw)}",
            rule=f"a job is a mapping of the sections {', '.join(Job.model_fields)}",
            remedy="write run: and its fields below, indented, as in jobs/verify.yaml: "
            "raymega plan jobs/verify.yaml",
        )
    return raw


def _content(raw: object) -> str:
    """Return what a file holds that holds no mapping, in YAML's words."""
    if raw is None:
        return "is empty"
    return "holds a list" if isinstance(raw, tuple) else f"holds the one value {raw!r:.60}"


def _spell_fp8_out(raw: dict[str, Any]) -> None:
    """Expand ``precision.dtype: fp8`` to ``fp8: rowwise`` with ``dtype: bfloat16``."""
    precision = raw.get("precision")
    if isinstance(precision, dict) and precision.get("dtype") == "fp8":
        raw["precision"] = {"fp8": "rowwise", **precision, "dtype": "bfloat16"}


def _unknown_keys(raw: Mapping[str, Any], model: type[Section], *, prefix: str) -> list[Fault]:
    known = list(model.model_fields)
    faults = []
    for key in raw:
        if key in known:
            continue
        below = {name: section_of(field) for name, field in model.model_fields.items()}
        inner = [
            f"{name}.{key}" for name, each in below.items() if each and key in each.model_fields
        ]
        near = [*inner, *get_close_matches(str(key), known, n=1, cutoff=0.5)]
        shown = (
            known
            if len(known) <= MOST_KEYS
            else get_close_matches(str(key), known, n=5, cutoff=0.1)
        )
        others = len(known) - len(shown)
        faults.append(
            Fault(
                fact=f"{prefix}{key} is not a known key",
                rule=f"{prefix[:-1] or 'a job'} has {', '.join(shown)}"
                + (f" and {others} others, which `raymega schema` lists" if others else ""),
                remedy=f"did you mean {prefix}{near[0]}?" if near else "remove it",
            )
        )
    return faults


def _not_a_mapping(name: str, given: object, section: type[Section]) -> Fault:
    return Fault(
        fact=f"{name}={_as_yaml(given)}",
        rule=f"it must be a mapping with {', '.join(section.model_fields)}",
        remedy=f"write {name}: and its fields below, indented",
    )


def section_faults(
    given: object, section: type[Section], name: str, values: dict[str, Any]
) -> list[Fault]:
    """Validate every field of a section into ``values``, and return the faults."""
    if not isinstance(given, Mapping):
        return [_not_a_mapping(name, given, section)]
    faults = _unknown_keys(given, section, prefix=f"{name}.")
    for key, field in section.model_fields.items():
        path = f"{name}.{key}"
        value = given.get(key, _ABSENT)
        # A section inside this one: its faults, or as a whole a value.
        inner = section_of(field)
        kind = field.annotation  # one of two forms, the other is a word; of a list it is none
        if inner is None and isinstance(value, Mapping) and get_origin(kind) is not tuple:
            inner = next(filter(None, map(as_section, get_args(kind))), None)
        if inner is not None and value is not _ABSENT:
            found = section_faults(value, inner, path, {})
            faults += found
            if not found:
                values[path] = inner.model_validate(value)
            continue
        # A plain field: missing, absent with a default, or given.
        if value is _ABSENT and field.is_required():
            remedy = f"set it: {section.describe(key)}"
            faults.append(Fault(fact=f"{path} is missing", rule="it has no default", remedy=remedy))
            continue
        try:
            values[path] = (
                field.get_default(call_default_factory=True)
                if value is _ABSENT
                else _validate(field, value)
            )
        except ValidationError as error:
            faults.append(_invalid(path, value, field, section.describe(key), error))
    return faults


def _validate(field: FieldInfo, value: object) -> object:
    adapter: TypeAdapter[object] = TypeAdapter(field.rebuild_annotation(), config={"strict": True})
    return adapter.validate_python(value)


def _invalid(
    path: str, value: object, field: FieldInfo, description: str, error: ValidationError
) -> Fault:
    # entries that are refused are missing from a list, which is no fault of its own
    details = [each for each in error.errors() if each["type"] != "too_short"] or error.errors()
    rules = dict.fromkeys(_rule(path, detail) for detail in details)
    between = " and " if isinstance(value, tuple) else " or "
    return Fault(
        fact=f"{path}={_as_yaml(value)}",
        rule=between.join(rules),
        remedy=f"{_line(path, _meant(value, details, description, field), field)}"
        f"{path.rpartition('.')[2]} is: {description}",
    )


def _line(path: str, meant: str, field: FieldInfo) -> str:
    """Return the line to write for a value: the one that is meant, else a default that is more than "not set"."""
    if meant:
        return f"write {path}={meant}; "
    default = field.default
    is_told = default not in (0, "none", "") or isinstance(default, float)
    if is_told and isinstance(default, str | int | float):
        return f"write {path}={str(default).lower()}, the default; "
    return ""


def _meant(value: object, details: Sequence[ErrorDetails], text: str, field: FieldInfo) -> str:
    """Return the value that another one stands for: bfloat16 for bf16, sigmoid for DPO, 336 for 336px; else empty."""
    given = str(value).lower()
    known = [
        word
        for detail in details
        if detail["type"] == "literal_error"
        for word in _QUOTED.findall(detail.get("ctx", {}).get("expected", ""))
    ]
    if any(detail["type"] == "int_type" for detail in details):
        unit = _UNITS.fullmatch(given)
        plain = given.replace("_", "").replace(",", "").removesuffix(".0")
        number = unit[1] if unit else plain
        # digits of any script, in those that YAML reads
        return str(int(number)) if number.isdecimal() and len(number) <= len(str(MOST)) else ""
    if any(detail["type"] == "tuple_type" for detail in details):
        of_mappings = any(map(as_section, get_args(field.annotation)))
        is_entry = isinstance(value, Mapping if of_mappings else str | int | float)
        return yaml.safe_dump((value,), default_flow_style=True, width=1000).strip() * is_entry
    if not known:
        return ""
    # names that the description of an option has, such as DPO of sigmoid
    _, *texts = re.split(rf"\b({'|'.join(map(re.escape, known))}): ", text)
    named = {
        name.lower(): word
        for word, text in reversed([*zip(texts[::2], texts[1::2], strict=True)])
        for name in re.findall(r"\w+", text)
        if name != name.lower()
    }
    held = [word for word in known if len(given) > 2 and given in word]
    # fp16 shares half of its letters with float16, and so does ner with none: digits say more
    cutoff = 0.5 if re.search(r"\d", given) else 0.6
    near = get_close_matches(given, known, n=1, cutoff=cutoff)
    exact = [given] if given in known else []
    return next(iter([*exact, *filter(None, [named.get(given)]), *held, *near]), "")


def _rule(path: str, detail: ErrorDetails) -> str:
    """Return pydantic's message in the words of YAML; for a value inside a list, with its index."""
    if detail.get("ctx", {}).get("pattern") == PLUGIN_NAME:
        rule = "the name of a plug-in's part, such as acme.triangle"
    else:
        rule = detail["msg"][:1].lower() + detail["msg"][1:]
    for theirs, ours in YAML_WORDS.items():
        rule = re.sub(theirs, ours, rule)
    number, *keys = detail["loc"] or ("",)
    if not isinstance(number, int):
        return rule
    return f"{path}[{number}]{''.join(f'.{key}' for key in keys)}: {rule}"


def _as_yaml(value: object) -> str:
    return repr(list(value)) if isinstance(value, tuple) else repr(value)
