"""Reads a job file, applies overrides, and reports every fault in one pass.

Each field is validated by itself, so that one bad value hides no other fault: the values that did
parse are handed on to the rules between values. It looks at no cluster, store or data.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from raymega.config.fields import Section
from raymega.config.schema import Job
from raymega.config.shipped_files import shipped_file
from raymega.errors import ConfigError, Fault


class _Yaml12Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's scalars: 3e-4 is a number; on, off, yes, no and 2026-11-30 are words.

    Sequences become tuples, which the strict fields of a job are.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012  # PyYAML's own form
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if not tag.endswith((":bool", ":float", ":int", ":timestamp"))
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        """Refuse a key that stands twice, of which PyYAML silently takes the last."""
        keys = [key.value for key, _ in node.value]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {twice[0]!r} stands twice", node.start_mark
            )
        return super().construct_mapping(node, deep)

    def construct_tuple(self, node: yaml.SequenceNode) -> tuple[Any, ...]:
        """A sequence, whole at once: PyYAML fills lists later."""
        return tuple(self.construct_sequence(node, deep=True))

    def refuse_tag(self, node: yaml.Node) -> object:
        """Of YAML 1.1's timestamps, for which 1.2 has no tag."""
        return self.construct_undefined(node)


_Yaml12Loader.add_constructor("tag:yaml.org,2002:seq", _Yaml12Loader.construct_tuple)
_Yaml12Loader.add_constructor("tag:yaml.org,2002:timestamp", _Yaml12Loader.refuse_tag)

_Yaml12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9]\d*)$"), list("-+0123456789")
)
_Yaml12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Yaml12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf)$|^\.(nan|NaN)$"
    ),
    list("-+0123456789."),
)

_ABSENT = object()
YAML_WORDS = {
    "valid dictionary or instance of BatchStage": "mapping",
    "valid tuple": "list",
    "field required": "it is missing",
    "extra inputs are not permitted": "it is not a known key",
}
"""What pydantic calls things, and what who writes YAML calls them."""
_PATHS = (("data", "path"), ("checkpoint", "uri"), ("checkpoint", "init_from"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedJob:
    """What could be read of a job file.

    Attributes:
        values: Dotted path to value, for every field that is right by itself.
        faults: Every field that is not.
        raw: The mapping as written, overrides applied.
    """

    values: Mapping[str, Any]
    faults: tuple[Fault, ...]
    raw: Mapping[str, Any]

    def job(self) -> Job:
        """The whole job.

        Raises:
            ConfigError: With every fault there is.
        """
        if self.faults:
            raise ConfigError(*self.faults)
        return Job.model_validate(self.raw)

    @property
    def stated(self) -> frozenset[str]:
        """Dotted paths that the file or an override sets."""
        sections = ((name, given) for name, given in self.raw.items() if isinstance(given, Mapping))
        return frozenset(f"{name}.{key}" for name, given in sections for key in given)

    def with_overrides(self, overrides: Iterable[str]) -> ParsedJob:
        """The same job with other values."""
        raw = {k: dict(v) if isinstance(v, Mapping) else v for k, v in self.raw.items()}
        faults = [fault for override in overrides for fault in _apply(raw, override)]
        _spell_fp8_out(raw)
        parsed = parse_mapping(raw)
        return replace(parsed, faults=(*faults, *parsed.faults))


def parse_job(path: Path | str, overrides: Iterable[str] = ()) -> ParsedJob:
    """Read ``path`` and apply ``a.b=c`` overrides.

    Relative paths in the job become absolute here, once, against the working folder.

    Raises:
        ConfigError: When the file is missing or is not a YAML mapping; field faults are returned.
    """
    raw = _read(Path(path))
    if raw.get("parallel") == "auto":
        raw["parallel"] = {"layout": "auto"}
    faults = [fault for override in overrides for fault in _apply(raw, override)]
    _spell_fp8_out(raw)
    for section, key in _PATHS:
        _make_absolute(raw.get(section), key)
    parsed = parse_mapping(raw)
    return replace(parsed, faults=(*faults, *parsed.faults))


def read_yaml(text: str) -> Any:
    """YAML 1.2's scalars, tuples for sequences, no key twice.

    Raises:
        yaml.YAMLError: It is none.
    """
    try:
        return yaml.load(text, Loader=_Yaml12Loader)
    except (ValueError, LookupError, RecursionError) as error:
        # Of scalars that its own patterns let through, such as !!int x, and of lists without an end.
        raise yaml.YAMLError(str(error)) from error


def parse_mapping(raw: Mapping[str, Any]) -> ParsedJob:
    """Validate every field of a mapping by itself."""
    values: dict[str, Any] = {}
    faults = _unknown_keys(raw, Job, prefix="")
    for name, field in Job.model_fields.items():
        section = _section_of(field)
        assert section is not None, name
        faults += _read_section(raw.get(name, {}), section, name, values)
    return ParsedJob(values=values, faults=tuple(faults), raw=raw)


def _read(path: Path) -> dict[str, Any]:
    """The file's mapping; a relative path that is not here may be that of a shipped file.

    Raises:
        ConfigError: There is no such file, or it is no mapping.
    """
    if not path.exists() and not path.is_absolute():
        path = shipped_file(path.as_posix()) or path
    if not path.is_file():
        raise ConfigError(
            Fault(
                fact=f"job file {str(path)!r} {'is no file' if path.exists() else 'does not exist'}",
                rule="a job is a YAML file",
                remedy="give its path; jobs/verify.yaml is one that runs as it is",
            )
        )
    try:
        raw = read_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            Fault(
                fact=f"{path} is not YAML: {_one_line(error)}",
                rule="a job is a YAML mapping of sections",
                remedy="correct the line named",
            )
        ) from error
    if not isinstance(raw, dict):
        raise ConfigError(
            Fault(
                fact=f"{path} holds a {type(raw).__name__}",
                rule=f"a job is a mapping of the sections {', '.join(Job.model_fields)}",
                remedy="start from jobs/verify.yaml",
            )
        )
    return raw


def _apply(raw: dict[str, Any], override: str) -> list[Fault]:
    """Put one override into ``raw``, or say why it cannot be read."""
    path, equals, text = override.partition("=")
    *sections, field = path.strip().split(".")
    if not equals or not sections or not all((*sections, field)):
        return [_bad_override(override, "it must read section.field=value")]
    try:
        value = read_yaml(text)
    except yaml.YAMLError as error:
        return [_bad_override(override, f"its value must be YAML ({_one_line(error)})")]
    section = raw
    for name in sections:
        if not isinstance(section.get(name), dict):
            section[name] = {}
        section = section[name]
    section[field] = value
    return []


def _spell_fp8_out(raw: dict[str, Any]) -> None:
    """``precision.dtype: fp8`` is short for products in fp8 by rows, and bfloat16 for all else."""
    precision = raw.get("precision")
    if isinstance(precision, dict) and precision.get("dtype") == "fp8":
        raw["precision"] = {"fp8": "rowwise", **precision, "dtype": "bfloat16"}


def _bad_override(override: str, rule: str) -> Fault:
    return Fault(
        fact=f"override {override!r}", rule=rule, remedy="write for example --set run.steps=50"
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _make_absolute(section: object, key: str) -> None:
    if not isinstance(section, dict) or not isinstance(section.get(key), str):
        return
    path = section[key]
    if "://" not in path and path not in ("", "synthetic", "none"):
        with suppress(RuntimeError):  # ~name of nobody: left for the checks to refuse
            path = Path(path).expanduser()
        section[key] = str(Path(path).absolute())


def _unknown_keys(raw: Mapping[str, Any], model: type[Section], *, prefix: str) -> list[Fault]:
    known = list(model.model_fields)
    faults = []
    for key in raw:
        if key in known:
            continue
        near = get_close_matches(str(key), known, n=1, cutoff=0.5)
        faults.append(
            Fault(
                fact=f"{prefix}{key} is not a known key",
                rule=f"{prefix[:-1] or 'a job'} has {', '.join(known)}",
                remedy=f"did you mean {prefix}{near[0]}?" if near else "remove it",
            )
        )
    return faults


def _not_a_mapping(name: str, given: object, section: type[Section]) -> Fault:
    return Fault(
        fact=f"{name}={given!r}",
        rule=f"it must be a mapping with {', '.join(section.model_fields)}",
        remedy=f"write {name}: and its fields below, indented",
    )


def _section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a field is, or None of a plain one."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _read_section(
    given: object, section: type[Section], name: str, values: dict[str, Any]
) -> list[Fault]:
    """Every field by itself; a section inside this one is a value too when it has no fault."""
    if not isinstance(given, Mapping):
        return [_not_a_mapping(name, given, section)]
    faults = _unknown_keys(given, section, prefix=f"{name}.")
    for key, field in section.model_fields.items():
        path = f"{name}.{key}"
        value = given.get(key, _ABSENT)
        inner = _section_of(field)
        if inner is not None and value is not _ABSENT:
            found = _read_section(value, inner, path, {})
            faults += found
            if not found:
                values[path] = inner.model_validate(value)
            continue
        if value is _ABSENT and field.is_required():
            faults.append(_missing(path, field))
            continue
        try:
            values[path] = (
                field.get_default(call_default_factory=True)
                if value is _ABSENT
                else _validate(field, value)
            )
        except ValidationError as error:
            faults.append(_invalid(path, value, field, error))
    return faults


def _validate(field: FieldInfo, value: object) -> object:
    adapter: TypeAdapter[object] = TypeAdapter(field.rebuild_annotation(), config={"strict": True})
    return adapter.validate_python(value)


def _missing(path: str, field: FieldInfo) -> Fault:
    return Fault(
        fact=f"{path} is missing",
        rule="it has no default",
        remedy=f"set it: {field.description}",
    )


def _invalid(path: str, value: object, field: FieldInfo, error: ValidationError) -> Fault:
    rules = dict.fromkeys(_rule(path, detail) for detail in error.errors())
    between = " and " if isinstance(value, tuple) else " or "
    return Fault(
        fact=f"{path}={_as_yaml(value)}",
        rule=between.join(rules),
        remedy=f"{path.rpartition('.')[2]} is: {field.description}",
    )


def _rule(path: str, detail: ErrorDetails) -> str:
    """What pydantic found, in YAML's words; of a value inside a list, with its place."""
    rule = detail["msg"][:1].lower() + detail["msg"][1:]
    for theirs, ours in YAML_WORDS.items():
        rule = rule.replace(theirs, ours)
    number, *keys = detail["loc"] or ("",)
    if not isinstance(number, int):
        return rule
    return f"{path}[{number}]{''.join(f'.{key}' for key in keys)}: {rule}"


def _as_yaml(value: object) -> str:
    return repr(list(value)) if isinstance(value, tuple) else repr(value)
