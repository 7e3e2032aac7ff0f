"""Commands import what they need: help and plan load neither Ray nor torch, nor anything as slow."""

import subprocess
import sys

import pytest
from typer.main import get_command

from raymega.cli.commands import COMMANDS, load_command
from raymega.cli.main import app

SLOW = ("torch", "ray", "mlflow", "matplotlib", "pandas", "aiohttp", "requests", "boto3")
CODE = """
import contextlib, io, sys
sys.argv[0] = "raymega"
from raymega.cli.main import run
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
    run()
assert "{expected}" in out.getvalue(), out.getvalue()
print(*(name for name in {slow!r} if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("words", "expected", "slow"),
    [
        (["--help"], "Exit codes", (*SLOW, "numpy", "pydantic", "pyarrow")),
        (["plan", "jobs/verify.yaml"], "pp2", SLOW),
    ],
)
def test_short_commands_import_nothing_slow(words, expected, slow):
    code = CODE.format(expected=expected, slow=slow)
    ran = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == []


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_has_the_first_line_of_each_help(name):
    command = load_command(name)
    assert command.name == name
    assert " ".join(command.help.partition("\n\n")[0].split()) == COMMANDS[name][1]


def test_the_group_knows_its_commands():
    group = get_command(app)
    assert list(group.commands) == list(COMMANDS)
    assert group.get_command(None, "unknown") is None
    with pytest.raises(KeyError):
        group.commands["unknown"]
