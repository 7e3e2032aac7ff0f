"""Sorts the commands that the pages show: run in `make test`, run in `make test-all`, or only parsed."""

from __future__ import annotations

import re
import shlex

import typer.main

from raymega.cli.main import app
from raymega.config.fields import Section
from raymega.config.schema import Job

# Commands that are not run, by a pattern, each with the reason. All options of raymega are parsed nevertheless.
NOT_RUN = {
    r"^(sudo )?make ": "a target of this repository, which CI runs",
    r"^make$|^\. |^python3 -m venv|^pip install|^(sudo )?apt-get|^for deb in ": "sets a machine up",
    r"^git clone|^docker |^kubectl |^aws |^GROUP=\$\(aws": "needs an account",
    r"^nvidia-smi|torch\.cuda|--device cuda": "needs a GPU",
    r"tests\.cuda_books|gpu_day": "needs torch's CUDA build, and a GPU or its stand-in: `make cuda-books`",
    r"^(sudo )?\S*python cluster/rehearse": "tests/cluster does it, as root",
    r"^export |^SETTINGS=": "sets variables for commands that are not run",
    r"^ray (up|down|dashboard|attach|start|stop|job|get-auth-token)|^raymega node-agent": "needs a cluster of nodes",
    r"^serve ": "a server; tests/ray/test_generate.py has the application",
    r"^(\S+=\S+ )*mlflow server|^prometheus |^curl ": "a server; tests/ray/test_metrics.py has the queries",
    r"^kill -9 \$\(pgrep|^cp PATH-TO|\$\(python -c|^raymega submit": "tests/ray/test_submit.py runs a cluster like it",
    r"s3://": "needs an object store; tests/ray/test_s3_runs.py has one",
    r"HEAD:|HOST:": "needs a cluster; the words in capitals are the reader's",
    r"JOB\.yaml|\bmy[-.]\S*|outputs/|\bDIR\b": "the reader's own files",
    r"/tmp/docs-torn|--mtbf ": "tests/unit/data and tests/chaos show it; the fault takes preparing, or minutes",
    r"smollm2|real_model": "needs a package of 93 MB; tests/docs/test_smollm2.py runs them where it is installed",
    r"primer|last_first|sqlite": "needs the changes to the package that docs/in-the-source.md describes",
}  # fmt: skip
QUICK = re.compile(r"raymega (plan|schedule|schema)\b(?!.*(--top|/tmp/docs-))")
"""Commands that `make test` runs: they start nothing, and search no layouts."""
RUNNABLE = re.compile(r"(raymega|python) |kill -9 ")
"""Programs that the tests run."""
_command = typer.main.get_command(app)


def reason(command: str) -> str | None:
    """Return why a command is not run; None when it is."""
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, command)), None)


def parse_faults(command: str) -> list[str]:
    """Parse each raymega command in a line as the console script does, without running it.

    Returns:
        What the parser refuses, and fields of ``--set`` that no job has.
    """
    faults: list[str] = []
    # a line may hold several commands, cut outside of quotes; what a substitution gives is not known
    unquoted = r"(?=(?:[^']*'[^']*')*[^']*$)"
    for part in re.split(rf" *(?:&&|;|\||>) *{unquoted}", re.sub(r"\$\(.*\)", "X", command)):
        if not part.startswith("raymega "):
            continue
        words = shlex.split(part.replace("$SETTINGS", ""))[1:]
        context, found = (
            _command.make_context("raymega", list(words), resilient_parsing=False),
            None,
        )
        try:
            # from group to group down to the command, as click does
            while hasattr(found := context.command, "resolve_command"):
                rest = [*context._protected_args, *context.args]
                name, found, rest = found.resolve_command(context, rest)
                context = found.make_context(name, rest, parent=context)
        except Exception as error:  # of typer's own click
            faults.append(f"{part}: {getattr(error, 'message', error)}")
            continue
        # options are click's; names of fields are the schema's
        for override in context.params.get("overrides") or ():
            if not _is_field(override.partition("=")[0]):
                faults.append(f"{part}: a job has no {override}")
    return faults


def _is_field(path: str) -> bool:
    kind: object = Job
    for name in path.split("."):
        if not (isinstance(kind, type) and issubclass(kind, Section) and name in kind.model_fields):
            return False
        kind = kind.model_fields[name].annotation
    return True
