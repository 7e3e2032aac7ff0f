"""Command `raymega`: the typer application, and the exit codes of errors."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from raymega.cli.chaos import chaos
from raymega.cli.checkpoint import checkpoint_app
from raymega.cli.convert import convert_app
from raymega.cli.data import data_app
from raymega.cli.doctor import doctor
from raymega.cli.evaluate import evaluate
from raymega.cli.generate import generate
from raymega.cli.node_agent import node_agent
from raymega.cli.options import add_command
from raymega.cli.plan.command import plan
from raymega.cli.schedule import schedule
from raymega.cli.submit import submit
from raymega.cli.train import train
from raymega.cli.verify import verify
from raymega.config.schema import Job
from raymega.errors import EXIT_CODES, RaymegaError

app = typer.Typer(
    name="raymega",
    epilog="Exit codes:\n\n" + "\n\n".join(f"{code}: {what}" for code, what in EXIT_CODES.items()),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
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


def schema() -> None:
    """Print the JSON schema of job files.

    Example: raymega schema > job.schema.json
    """
    text = json.dumps(Job.model_json_schema(), indent=2)
    print(
        text.replace(str(Path.home()), "~")
    )  # defaults name the home of the reader, not of this user


# top-level commands, then groups of commands
for _command in (
    train,
    submit,
    doctor,
    plan,
    verify,
    chaos,
    schedule,
    schema,
    generate,
    node_agent,
):
    add_command(app, _command)
add_command(app, evaluate, name="eval")
app.add_typer(data_app, name="data")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(convert_app, name="convert")


def run() -> None:
    """Run the command line; the entry point of the console script."""
    try:
        app()
    # One line per fault; other exceptions are bugs and keep their traceback.
    except RaymegaError as error:
        for fault in error.faults:
            print(f"{type(error).__name__}: {fault}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
