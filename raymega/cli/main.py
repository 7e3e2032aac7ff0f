"""Command `raymega`: the typer application, and the exit codes of errors; `commands.py` has its commands."""

from __future__ import annotations

import sys
from errno import ENAMETOOLONG
from typing import Annotated

import typer

from raymega.cli.commands import LazyGroup
from raymega.errors import EXIT_CODES, ConfigError, RaymegaError

INTERRUPTED = 130
"""Exit code of a process that Ctrl-C ended."""

app = typer.Typer(
    name="raymega",
    cls=LazyGroup,
    epilog="Exit codes:\n\n" + "\n\n".join(f"{code}: {what}" for code, what in EXIT_CODES.items()),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from importlib import metadata

        print(f"raymega {metadata.version('raymega')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Megatron-style training on Ray. Every command has --help with an example."""


def run() -> None:
    """Run the command line; the entry point of the console script."""
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            print("interrupted; the same command resumes what is saved", file=sys.stderr)
        raise
    except OSError as error:
        if error.errno != ENAMETOOLONG:
            raise
        _refuse_name(error)
    # other exceptions are bugs and keep their traceback
    except RaymegaError as error:
        _end(error)


def _end(error: RaymegaError) -> None:
    """End with the error's code, after one line per fault."""
    for fault in error.faults:
        print(f"{type(error).__name__}: {fault}", file=sys.stderr)
    raise SystemExit(error.exit_code) from None


def _refuse_name(error: OSError) -> None:
    """End with a name that no file can have, in whichever option it stood."""
    name = f"{error.filename!s:.60}..."
    _end(ConfigError(fact=name, rule="no file has so long a name", remedy="give its path"))
