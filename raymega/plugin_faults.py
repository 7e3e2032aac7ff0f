"""Faults of plug-ins: of code that raised, with its file and line, and of the options that a job gives."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from traceback import extract_tb
from typing import Any

from pydantic import TypeAdapter, ValidationError

from raymega.errors import Fault, one_line

MAX_MESSAGE_CHARS = 300


def raised_fault(what: str, error: Exception, *, target: str) -> Fault:
    """Return the fault of plug-in code that raised, with its line."""
    message = one_line(str(error), MAX_MESSAGE_CHARS)
    return Fault(
        fact=f"{what} raised {type(error).__name__}{line_of(error, target)}: {message}",
        rule=f"its code is {target}, which raymega only calls",
        remedy="correct that line, or take the plug-in out of the job file",
    )


def line_of(error: Exception, target: str) -> str:
    """Return " at FILE:LINE": the innermost line of the target's package, else one that is not raymega's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {error.filename}:{error.lineno}"
    frames = [f for f in extract_tb(error.__traceback__) if "importlib" not in f.filename]
    others = [f for f in frames if Path(__file__).parent not in Path(f.filename).parents]
    package = sys.modules.get(target.partition(":")[0].partition(".")[0])
    folders = [Path(folder) for folder in getattr(package, "__path__", [])]
    own = [f for f in others if any(folder in Path(f.filename).parents for folder in folders)]
    found = own or others
    return f" at {found[-1].filename}:{found[-1].lineno}" if found else ""


def value_faults(
    options: type[Any], given: Mapping[str, Any], *, name: str, target: str
) -> Iterator[Fault]:
    """Yield the faults of the values ``given`` to the options of the part ``name``."""
    adapter = TypeAdapter(options)
    known = adapter.json_schema().get("properties", {})
    for field in given:
        if field not in known:
            yield Fault(
                fact=f"plugins.options gives {name}.{field}", rule=f"{name} has {', '.join(known) or 'no options'}",
                remedy="remove it",
            )  # fmt: skip
    try:
        adapter.validate_python(given)
    except ValidationError as error:
        for at in error.errors():
            where = ".".join(map(str, (name, *at["loc"])))
            yield Fault(
                fact=f"plugins.options gives {where}={at['input']!r}", rule=at["msg"][:1].lower() + at["msg"][1:],
                remedy=f"correct it; `raymega schema --plugins ...` lists the options of {name}",
            )  # fmt: skip
    except Exception as error:  # noqa: BLE001  # code of the plug-in's class
        yield raised_fault(f"options of {name}", error, target=target)


def has_fields(options: object) -> bool:
    """Return whether a part's options are a class whose fields pydantic knows."""
    try:
        return isinstance(options, type) and "properties" in TypeAdapter(options).json_schema()
    except Exception:  # noqa: BLE001  # pydantic's refusals have no common class
        return False
