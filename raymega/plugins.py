"""Parts that a job file chooses by name: the package's own, and those of the modules in ``plugins``.

A row names its code as ``package.module:attribute``, which is imported where it is used: the driver and
`raymega plan` stay without torch. Nothing registers by being imported elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

from pydantic import TypeAdapter

from raymega.built_in_parts import BUILT_IN_PARTS
from raymega.errors import ConfigError, Fault, RaymegaError, raise_faults
from raymega.plugin_faults import has_fields, line_of, raised_fault, value_faults

Kind = Literal[
    "tracker", "lr_schedule", "callback", "metric", "loss", "optimizer", "data_source", "transform", "activation",
    "norm", "family", "hf_family", "store",
]  # fmt: skip
WITHOUT_OPTIONS = ("activation", "norm", "family", "hf_family", "store")
"""Kinds that are chosen where no job is known."""
ATTRIBUTE = "PLUGINS"
"""Name of a module's list of plug-ins."""
ENTRY_POINTS = "raymega.plugins"
"""Group of the entry points by which a wheel gives a module of plug-ins a short name."""
RAISED_IN = "it was raised in"
"""Begin of the fault that names the plug-in in which an error of raymega's own was raised."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugin:
    """Part that a job file chooses by name.

    Attributes:
        kind: Kind of the part, which says how its code is called (docs/extending.md).
        name: Name in job files; with a dot, such as ``acme.triangle``, unless it is the package's own.
        target: Place of its code, ``package.module:attribute``.
        options: Class of its own fields, a pydantic model or dataclass: a job sets them in ``plugins.options``, and
            the code gets an instance as its argument ``options``; None for a part without fields.
        package: Package that it needs beside its own; empty for none.
        extra: Raymega's extra that installs the package; empty for none.
    """

    kind: Kind
    name: str
    target: str
    options: type[Any] | None = None
    package: str = ""
    extra: str = ""

    @property
    def is_outside(self) -> bool:
        """Return whether the part is of a module in the job's ``plugins``."""
        return "." in self.name

    def load(self) -> Any:
        """Import and return the code; its type depends on the kind.

        Raises:
            ConfigError: The code is not there, or fails at import.
        """
        return _loaded(self)

    def with_options(self, given: Mapping[str, Any]) -> Any:
        """Return the code, with an instance of its options made of ``given`` where it has any.

        Raises:
            ConfigError: The code is not there, or a value is refused.
        """
        code = self.load()
        if self.options is None:
            return code
        raise_faults(ConfigError, self.option_faults(given))
        return partial(code, options=TypeAdapter(self.options).validate_python(given))

    def option_values(self, given: Mapping[str, Any]) -> Any:
        """Return all options as plain JSON values: those ``given``, and the defaults of the others."""
        assert self.options is not None, "the part has options"
        adapter: TypeAdapter[Any] = TypeAdapter(self.options)
        return adapter.dump_python(adapter.validate_python(given), mode="json")

    def option_faults(self, given: Mapping[str, Any]) -> Iterator[Fault]:
        """Yield the faults of the values that a job gives to the options."""
        if self.options is None:
            yield Fault(
                fact=f"plugins.options has {self.name}", rule=f"the {self.kind} {self.name} has no options",
                remedy="remove them",
            )  # fmt: skip
            return
        yield from value_faults(self.options, given, name=self.name, target=self.target)


@cache
def _loaded(row: Plugin) -> Any:
    module, _, attribute = row.target.partition(":")
    # the target may be an entry of a table, package.module:TABLE[key]
    name, _, key = attribute.removesuffix("]").partition("[")

    def imported() -> Any:
        value = getattr(import_module(module), name)
        return value[key] if key else value

    return call_plugin(row, imported)


BUILT_IN = tuple(
    Plugin(
        kind=cast(Kind, kind), name=name, target=target.format(name), package=package, extra=extra
    )
    for kind, names, target, package, extra in BUILT_IN_PARTS
    for name in names.split()
)


@dataclass(frozen=True, slots=True)
class Registry:
    """Parts of a job by kind and name."""

    plugins: tuple[Plugin, ...] = BUILT_IN

    def names(self, kind: Kind) -> list[str]:
        """Return the names of a kind, in the order of the table."""
        return [plugin.name for plugin in self.plugins if plugin.kind == kind]

    def find(self, kind: Kind, name: str) -> Plugin:
        """Return the row of a name, which a rule of the job file has checked."""
        return next(row for row in self.plugins if (row.kind, row.name) == (kind, name))

    def name_faults(self, kind: Kind, name: str, *, field: str) -> Iterator[Fault]:
        """Yield a fault if no part of the kind has the name."""
        names = self.names(kind)
        if name not in names:
            near = get_close_matches(name, names, n=1, cutoff=0.5)
            yield Fault(
                fact=f"{field} names {name!r}",
                rule=f"it is one of {', '.join(names)}"
                if names
                else "`plugins` has none of this kind",
                remedy=f"write {near[0]}" if near else "add the module that has it to `plugins`",
            )

    def package_faults(self, kind: Kind, name: str, *, field: str) -> Iterator[Fault]:
        """Yield a fault if the part's package is not installed here; nothing is imported."""
        row = self.find(kind, name)
        if row.package and find_spec(row.package) is None:
            wanted = f"raymega[{row.extra}]" if row.extra else row.package
            yield Fault(
                fact=f"{field} names {name!r}, and the package {row.package} is not installed here",
                rule=f"the {kind} {name!r} is written by that package",
                remedy=f"run `pip install '{wanted}'`",
            )


_PARTS: dict[tuple[Kind, str], Plugin] = {(row.kind, row.name): row for row in BUILT_IN}
"""Parts that this process can use: the package's own, and those of modules that a job of it has named."""


def register(rows: Iterable[Plugin]) -> None:
    """Enter parts into the process's table; one of the same kind and name is replaced."""
    for row in rows:
        _PARTS[row.kind, row.name] = row


def find(kind: Kind, name: str) -> Plugin:
    """Return the part of a name.

    Raises:
        ConfigError: It is neither the package's own nor of a module that a job of this process has named.
    """
    row = _PARTS.get((kind, name))
    if row is None:
        raise ConfigError(*known_parts().name_faults(kind, name, field=kind))
    return row


def is_known(kind: Kind, name: str) -> bool:
    """Return whether this process knows the part."""
    return (kind, name) in _PARTS


def known_parts() -> Registry:
    """Return all parts that this process knows."""
    return Registry(tuple(_PARTS.values()))


def known_names(kind: Kind) -> list[str]:
    """Return the names of a kind that this process knows."""
    return known_parts().names(kind)


def use_entry_point(name: str) -> None:
    """Register the module of a wheel's entry point, for a URI that names a part of it; no such wheel is no error."""
    if metadata.entry_points(group=ENTRY_POINTS, name=name):
        registry_of((name,))


def code_of(kind: Kind, name: str) -> Any:
    """Return the code of a part; its type depends on the kind.

    Raises:
        ConfigError: There is no such part, or its code fails at import.
    """
    return find(kind, name).load()


@cache
def registry_of(modules: tuple[str, ...]) -> Registry:
    """Return the package's own parts and those of ``modules``, as a job's ``plugins.modules`` lists them.

    This process can use them from then on.

    Raises:
        ConfigError: A module cannot be imported, imports torch, has another version or a wrong list.
    """
    found = [row for entry in modules for row in _rows(entry)]
    register(found)
    return Registry((*BUILT_IN, *found))


def use_for_checkpoint(modules: Sequence[str]) -> None:
    """Make the parts of the modules that a checkpoint names known to this process.

    A checkpoint may be anybody's: the working folder is not searched for them, unless PYTHONPATH has it.

    Raises:
        ConfigError: A module is not installed, or not in the version that the checkpoint names.
    """
    faults: list[Fault] = []
    for entry in modules:
        try:
            register(_rows(entry, is_asked_for=False))
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(
            *faults,
            Fault(
                fact="the checkpoint's model has a part of these modules",
                rule="modules that a checkpoint names are imported from installed wheels and PYTHONPATH alone",
                remedy="install the wheel; if you trust the working folder, export PYTHONPATH=$PWD",
            ),
        )


def module_faults(modules: Sequence[str]) -> list[Fault]:
    """Return the faults of the modules; the parts of the others can be used."""
    faults: list[Fault] = []
    for entry in modules:
        try:
            registry_of((entry,))
        except ConfigError as error:
            faults += error.faults
    return faults


def with_versions(modules: Sequence[str]) -> tuple[str, ...]:
    """Return the modules with the versions that are installed, ``acme.plugins==1.2``; faulty ones as they are."""
    return tuple(entry if "==" in entry else _pinned(entry) for entry in modules)


def call_plugin(row: Plugin, function: Callable[[], T]) -> T:
    """Call code of a plug-in.

    An error that raymega's own functions raised in it, such as a collective's time-out, keeps its class.

    Raises:
        ConfigError: It failed; the error names the plug-in and the line.
    """
    if not row.is_outside:
        return function()
    try:
        return function()
    except RaymegaError as error:
        raise _named(row, error) from error
    except Exception as error:
        raise plugin_error(row, error) from error


def _named(row: Plugin, error: RaymegaError) -> RaymegaError:
    """Return an error of raymega's own with the plug-in that was running, which is named once."""
    where = f"{RAISED_IN} {row.kind} {row.name}"
    if any(fault.fact.startswith(where) for fault in error.faults):
        return error
    line = line_of(error, row.target)
    return type(error)(*error.faults, Fault(fact=f"{where}{line}"))


def plugin_error(row: Plugin, error: Exception) -> ConfigError:
    """Return the error of a plug-in that raised ``error``, with the line."""
    return ConfigError(raised_fault(f"{row.kind} {row.name}", error, target=row.target))


def _rows(entry: str, *, is_asked_for: bool = True) -> tuple[Plugin, ...]:
    """Import a module, and return its plug-ins; the working folder has it only if a job file asked for it."""
    module, version = _module_of(entry), entry.partition("==")[2]
    _check_version(module, version)
    # the folder that --working-dir ships, which a command that is installed does not look into
    if is_asked_for and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    # import the list, and notice whether that alone brought torch in
    had_torch = "torch" in sys.modules
    try:
        rows = tuple(getattr(import_module(module), ATTRIBUTE))
    except Exception as error:
        raise ConfigError(
            raised_fault(f"plugins names {entry}, which", error, target=module)
        ) from error
    if not had_torch and "torch" in sys.modules:
        raise ConfigError(
            fact=f"plugins names {entry}, and importing {module} imports torch",
            rule="the driver and `raymega plan` read the list, and stay without torch",
            remedy=f"move what needs torch to another module, and name it as the target in {ATTRIBUTE}",
        )
    # check the form of each entry; no code of a part is imported here
    faults = [fault for row in rows for fault in _row_faults(entry, row)]
    if faults:
        raise ConfigError(*faults)
    return rows


def _row_faults(entry: str, row: object) -> Iterator[Fault]:
    if not isinstance(row, Plugin):
        yield Fault(
            fact=f"{entry} has {row!r} in {ATTRIBUTE}",
            rule="its entries are of raymega.plugins.Plugin",
            remedy="write Plugin(kind=..., name=..., target='package.module:attribute')",
        )
        return
    rules = (
        (row.kind in get_args(Kind), f"kind={row.kind!r}", f"it is one of {', '.join(get_args(Kind))}"),
        ("." in row.name, f"name={row.name!r}", "names without a dot are raymega's own; write acme.NAME"),
        (":" in row.target, f"target={row.target!r}", "it reads package.module:attribute"),
        (row.options is None or has_fields(row.options), f"options={row.options!r}",
         "it is a dataclass or a pydantic model, whose fields have types that a job file can write"),
        (row.options is None or row.kind not in WITHOUT_OPTIONS, f"kind={row.kind!r} and options",
         f"{', '.join(WITHOUT_OPTIONS)} have none"),
    )  # fmt: skip
    for is_right, fact, rule in rules:
        if not is_right:
            yield Fault(
                fact=f"a plug-in of {entry} has {fact}", rule=rule, remedy=f"correct {entry}"
            )


def _module_of(entry: str) -> str:
    """Return the module of an entry, which may be the name of an installed entry point."""
    name = entry.partition("==")[0]
    for point in metadata.entry_points(group=ENTRY_POINTS, name=name):
        return point.module
    return name


def _installed_version(module: str) -> str:
    """Return the version of the wheel that has the module; empty for a module of the working folder."""
    top = module.partition(".")[0]
    packages = metadata.packages_distributions().get(top, [])
    return metadata.version(packages[0]) if packages else ""


def _pinned(entry: str) -> str:
    version = _installed_version(_module_of(entry))
    return f"{entry}=={version}" if version else entry


def _check_version(module: str, version: str) -> None:
    installed = _installed_version(module)
    if version and installed != version:
        raise ConfigError(
            fact=f"plugins names {module}=={version}, and here is {installed or 'no wheel of it'}",
            rule="driver and workers run the same version",
            remedy=f"install version {version} on every node, or leave ==... out of `plugins`",
        )
