"""Options that several commands share, and help texts of options from the commands' docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="Job file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a field of the job, repeatable: --set run.steps=50"),
]
Grid = Annotated[
    str,
    typer.Option(
        help="Parallel degrees in place of the job's: --grid tp=2,pp=2; others stay as they are."
    ),
]
Address = Annotated[
    str,
    typer.Option(
        help="Ray cluster: auto (a running one, else a new local one), local, or HOST:PORT."
    ),
]
Uri = Annotated[
    str, typer.Argument(help="Folder of a run, one of its checkpoints/step-..., or a manifest.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
AsJsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]

# The section `Options:` of a docstring, and one entry with its continuation lines.
_OPTIONS = re.compile(r"^Options:\n((?: .*\n|\n)*)", re.MULTILINE)
_OPTION = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def add_command(app: typer.Typer, function: Callable[..., None], name: str | None = None) -> None:
    """Add ``function`` to ``app`` as a command, with its docstring as the help text.

    The section ``Options:`` of the docstring describes each parameter whose annotation has no help,
    as ``parameter: text``. A parameter annotated with a plain type becomes an option.
    """
    text = f"{inspect.getdoc(function)}\n"
    # Help texts move from the docstring into the annotations, which typer reads.
    found = _OPTIONS.search(text)
    hints = get_type_hints(function, include_extras=True)
    for parameter, described in _OPTION.findall(found[1] if found else ""):
        hints[parameter] = _described(parameter, hints[parameter], " ".join(described.split()))
    function.__annotations__ = hints
    app.command(name, help=_OPTIONS.sub("", text).strip())(function)


def _described(name: str, hint: Any, text: str) -> Any:
    """Return the annotation with ``text`` as help; a plain bool becomes a flag without ``--no-``."""
    kind, declared = hint, typer.Option(*[f"--{name.replace('_', '-')}"] * (hint is bool))
    if hasattr(hint, "__metadata__"):
        kind, declared = get_args(hint)
    # Annotations such as Overrides are shared by several commands.
    declared = copy(declared)
    declared.help = text
    return Annotated[kind, declared]
