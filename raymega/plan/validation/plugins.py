"""Check that plug-ins can be imported, and that the parts that a job names are there and have their options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError

from raymega.config.data import source_name
from raymega.errors import ConfigError, Fault
from raymega.plan.layers.family_parts import CLAMPED, LINEAR_LAYERS, FamilyParts
from raymega.plan.layers.norm_kinds import NormKind
from raymega.plan.memory.optimizer_state import OptimizerKind
from raymega.plugins import (
    Kind,
    Plugin,
    Registry,
    code_of,
    known_parts,
    module_faults,
    registry_of,
)

CHOOSERS: Mapping[str, Kind] = {
    "plugins.callbacks": "callback",
    "plugins.metrics": "metric",
    "optimizer.lr_schedule": "lr_schedule",
    "optimizer.name": "optimizer",
    "model.loss": "loss",
    "model.family": "family",
    "data.transforms": "transform",
    "tracking.trackers": "tracker",
}
"""Fields that name parts, and the kind of each; a field may have a list of names."""
DECLARATIONS: Mapping[Kind, type] = {
    "optimizer": OptimizerKind,
    "family": FamilyParts,
    "norm": NormKind,
}
"""Kinds whose code is a declaration that the planner reads, and its class."""
OF_STREAMS = {"norm", "activation", "has_gate"}
"""Parts that encoder-decoder families may choose."""


def without_broken_parts(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """Return the values without those that name a part that cannot be used, and the faults of a job's plug-ins.

    Args:
        values: Values of the job's valid fields, by dotted path; without ``plugins.modules``, parts that this
            process knows may be named.
    """
    broken = _faults_by_field(values)
    left = {path: value for path, value in values.items() if path not in broken}
    return left, [fault for found in broken.values() for fault in found]


def _faults_by_field(values: Mapping[str, Any]) -> dict[str, list[Fault]]:
    """Return the faults by field; a name of a module that is broken has none of its own."""
    # modules first: they decide which names are known
    modules: tuple[str, ...] = values.get("plugins.modules", ())
    of_modules = module_faults(modules)
    faults, is_broken = {"plugins.modules": of_modules} if of_modules else {}, bool(of_modules)
    known = known_parts() if is_broken or "plugins.modules" not in values else registry_of(modules)
    used: list[Plugin] = []
    # names, each by the field that has it
    for field, kind, names in [*_chosen(values), *_sources(values)]:
        for name in names:
            found = list(known.name_faults(kind, name, field=field))
            if found:
                faults.setdefault(field, []).extend([] if is_broken and "." in name else found)
                continue
            used.append(known.find(kind, name))
            if found := list(_declaration_faults(used[-1], known)):
                faults.setdefault(field, []).extend(found)
    # options, of the parts that were found
    given = values.get("plugins.options", {})
    if "plugins.options" not in values:
        return faults
    if found := list(_option_faults(given, used, is_broken=is_broken)):
        faults["plugins.options"] = found
    return faults


def _chosen(values: Mapping[str, Any]) -> Iterator[tuple[str, Kind, list[str]]]:
    """Yield each field that names parts, their kind, and the names, each once."""
    for field, kind in CHOOSERS.items():
        value = values.get(field, ())
        names = [value] if isinstance(value, str) else [*dict.fromkeys(value)]
        # the console is no part, but the command's own stream
        yield field, kind, [name for name in names if name != "console"]


def _sources(values: Mapping[str, Any]) -> Iterator[tuple[str, Kind, list[str]]]:
    """Yield each field with paths of datasets, and the data sources that they name."""
    blends = [
        ("data.path", [values.get("data.path", "")]),
        ("data.sources", [each.path for each in values.get("data.sources", ())]),
        ("data.stages", [each.path for stage in values.get("data.stages", ()) for each in stage.sources]),
        ("data.validation", [each.path for each in values.get("data.validation", ())]),
    ]  # fmt: skip
    for field, paths in blends:
        yield field, "data_source", [*dict.fromkeys(filter(None, map(source_name, paths)))]


def _declaration_faults(row: Plugin, known: Registry) -> Iterator[Fault]:
    wanted = DECLARATIONS.get(row.kind)
    if wanted is None or not row.is_outside:
        return
    # import the declaration; an error names the plug-in's line
    try:
        found = code_of(row.kind, row.name)
    except ConfigError as error:
        yield from error.faults
        return
    if not isinstance(found, wanted):
        yield Fault(
            fact=f"{row.kind} {row.name} has the target {row.target}, which is {type(found).__name__}",
            rule=f"a {row.kind} is a {wanted.__module__}.{wanted.__name__}",
            remedy=f"correct {row.target}",
        )
        return
    where = f"{row.kind} {row.name}"
    for name, value, rule in _wrong_values(found):
        yield Fault(fact=f"{where} has {name}={value!r}", rule=rule, remedy=f"correct {row.target}")
    if isinstance(found, FamilyParts):
        yield from _family_faults(found, known, where)


def _family_faults(family: FamilyParts, known: Registry, where: str) -> Iterator[Fault]:
    """Yield the faults of the parts that a plug-in's family names."""
    if not (family.has_gate and family.activation == CLAMPED):
        yield from known.name_faults("activation", family.activation, field=where)
    if faults := list(known.name_faults("norm", family.norm, field=where)):
        yield from faults
    else:
        yield from _declaration_faults(known.find("norm", family.norm), known)


def _wrong_values(found: Any) -> Iterator[tuple[str, object, str]]:
    """Yield the fields of a declaration that have no meaning: name, value, and the rule that it breaks."""
    try:
        TypeAdapter(type(found)).validate_python(asdict(found))
    except ValidationError as error:
        for at in error.errors():
            message = at["msg"][:1].lower() + at["msg"][1:]
            yield ".".join(map(str, at["loc"])), at["input"], message
        return
    if isinstance(found, OptimizerKind) and ":" not in found.update:
        yield "update", found.update, "it reads package.module:attribute"
    if isinstance(found, NormKind):
        if ":" not in found.apply:
            yield "apply", found.apply, "it reads package.module:attribute"
        for name in ("statistics", "kept"):
            if (number := getattr(found, name)) < 0:
                yield name, number, "it is 0 or more"
        if unfit := [name for name in found.tensors if not name.isidentifier()]:
            yield "tensors", unfit, "a tensor's name is a word of letters, digits and underscores"
    if isinstance(found, FamilyParts):
        yield from _wrong_parts(found)


def _wrong_parts(family: FamilyParts) -> Iterator[tuple[str, object, str]]:
    """Yield the parts of a family that its blocks would not have, as :func:`_wrong_values`."""
    if unknown := sorted(family.biased - LINEAR_LAYERS):
        yield "biased", unknown, f"layers with a bias are of {', '.join(sorted(LINEAR_LAYERS))}"
    plain = FamilyParts(is_encoder_decoder=True)
    for name in sorted(asdict(family).keys() - OF_STREAMS) if family.is_encoder_decoder else ():
        if (value := getattr(family, name)) != getattr(plain, name):
            yield (
                name,
                value,
                f"blocks of two streams are T5's, except {', '.join(sorted(OF_STREAMS))}",
            )


def _option_faults(
    given: Mapping[str, Mapping[str, Any]], used: list[Plugin], *, is_broken: bool
) -> Iterator[Fault]:
    """Yield the faults of the options that the job gives to the parts that it uses."""
    for row in used:
        if row.options is not None or row.name in given:
            yield from row.option_faults(given.get(row.name, {}))
    # options of a part that the job does not use would have no effect
    for name in given:
        if not is_broken and name not in {row.name for row in used}:
            yield Fault(
                fact=f"plugins.options has {name}",
                rule="the job uses no such part",
                remedy="remove it, or name the part where it is used",
            )
