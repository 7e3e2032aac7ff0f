"""Declares commands: options that several share, and docstrings that describe the others."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a field: --set run.steps=50")
]
Address = Annotated[
    str,
    typer.Option(help="auto joins a running cluster, else starts a local one; local; HOST:PORT."),
]
Uri = Annotated[
    str, typer.Argument(help="A run's folder, one of its checkpoints/step-... or a manifest.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]
AsJsonLines = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]

_OPTIONS = re.compile(r"^Options:\n((?: .*\n|\n)*)", re.MULTILINE)
_OPTION = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def add_command(app: typer.Typer, function: Callable[..., None], name: str | None = None) -> None:
    """Make ``function`` a command of ``app``, its docstring the help.

    A section ``Options:`` of the docstring has an entry ``parameter: text`` for each parameter that
    does not bring its help along. A parameter that is annotated by its type alone is an option.
    """
    text = f"{inspect.getdoc(function)}\n"
    found = _OPTIONS.search(text)
    hints = get_type_hints(function, include_extras=True)
    for parameter, described in _OPTION.findall(found[1] if found else ""):
        hints[parameter] = _described(parameter, hints[parameter], " ".join(described.split()))
    function.__annotations__ = hints
    app.command(name, help=_OPTIONS.sub("", text).strip())(function)


def _described(name: str, hint: Any, text: str) -> Any:
    """The annotation of a parameter with ``text`` for its help; a flag has no opposite."""
    kind, declared = hint, typer.Option(*[f"--{name.replace('_', '-')}"] * (hint is bool))
    if hasattr(hint, "__metadata__"):
        kind, declared = get_args(hint)
    declared = copy(declared)
    declared.help = text
    return Annotated[kind, declared]
