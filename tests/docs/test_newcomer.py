"""A newcomer's first hour: a fresh clone, text and a small model of one's own, a kill, another layout, export, report.

The commands are those of docs/my-corpus.md, in their order, with the newcomer's folder of text in place of `docs`. The run
is killed as README.md says (`kill -9`), and the same command continues it, with the option that README.md shows for
another layout.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks
from tests.docs.commands import reason
from tests.docs.running import PLACE

pytestmark = [pytest.mark.wide, pytest.mark.ray, pytest.mark.timeout(2400)]

PAGE, READ_ME = ROOT / "docs" / "my-corpus.md", ROOT / "README.md"
OWN_MODEL = "--set model.num_layers=2 --set model.hidden_size=64 --set model.num_heads=4"
OWN_MODEL += " --set model.num_kv_heads=4 --set model.ffn_hidden_size=128 --set checkpoint.every=10"
MOST_FILES = 60
TAKEN = (
    "data prepare", "data show", "init", "plan", "train", "report", "eval", "generate", "convert hf-export",
)  # fmt: skip
"""Commands of the page that the hour needs, each once and in the page's order."""


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The repository as git hands it out, with what is changed in this working tree."""
    folder = tmp_path_factory.mktemp("newcomer")
    # what is committed, then what this working tree has beside it
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder / "raymega")], check=True)
    listed = subprocess.run(
        ["git", "ls-files", "--modified", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            (folder / "raymega" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "raymega" / name).write_bytes((ROOT / name).read_bytes())
    return folder / "raymega"


@pytest.fixture(scope="module")
def own_text(tmp_path_factory):
    """Some source files of Python's library, which has no text of this project."""
    folder = tmp_path_factory.mktemp("text")
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:MOST_FILES]:
        (folder / f"{path.stem}.md").write_text(path.read_text(encoding="utf-8"))
    return folder


class Shell:
    """A newcomer's terminal in the clone: `raymega` is this interpreter's, of the clone's files."""

    def __init__(self, clone, own_text, scratch):
        self.clone, self.own_text, self.scratch = clone, own_text, scratch
        self.env = os.environ | {
            # a short path: sockets of Ray have their names below it
            "PYTHONPATH": str(clone), "HOME": str(scratch), "RAY_TMPDIR": tempfile.mkdtemp(prefix="rn"),
        }  # fmt: skip

    def words(self, command):
        """Return the page's command with the newcomer's folders."""
        placed = command.replace(PLACE, f"{self.scratch}/docs-")
        # the page prepares its own folder of pages: a newcomer names another one
        placed = re.sub(r"(?<=prepare )docs\b", str(self.own_text), placed)
        return [sys.executable, "-m", *shlex.split(placed)]

    def run(self, command):
        done = subprocess.run(
            self.words(command), cwd=self.clone, env=self.env, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        return done.stdout

    def run_and_kill(self, command, line):
        """Start a command, and kill it as soon as it has printed a line of that beginning."""
        told = ""
        with subprocess.Popen(
            self.words(command), cwd=self.clone, env=self.env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            for text in process.stdout:
                told += text
                if text.startswith(line):
                    process.send_signal(signal.SIGKILL)
                    break
            else:
                pytest.fail(f"no line {line!r}\n{told}")
        return told


def page_commands():
    """Return the commands of the page that the hour needs."""
    # the first command of each kind: later ones belong to other chapters
    every = [each for block in blocks(PAGE) for each in block.commands if not reason(each)]
    found = [next(each for each in every if each.startswith(f"raymega {part} ")) for part in TAKEN]
    assert [each for each in every if each in found] == found, "the page has another order"
    return dict(zip(TAKEN, found, strict=True))


def other_layout():
    """Return the option with which README.md resumes a run on another grid."""
    lines = READ_ME.read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if "--grid" in line and "resume" in line]
    assert "kill -9" in READ_ME.read_text(encoding="utf-8")
    return re.search(r"--grid \S+", line)[0]


def test_first_hour_of_a_newcomer(clone, own_text, tmp_path):
    shell, commands = Shell(clone, own_text, tmp_path), page_commands()
    # text to tokens, a look at them, a job file
    for part in TAKEN[:3]:
        shell.run(commands[part])
    shell.run(f"{commands['plan']} {OWN_MODEL}")
    # killed behind its first checkpoint, then the same command with another layout
    train = f"{commands['train']} {OWN_MODEL}"
    shell.run_and_kill(train, "Checkpoint of step")
    told = shell.run(f"{train} {other_layout()}")
    assert "resum" in told.lower(), told
    numbers = [int(each) for each in re.findall(r"^step +(\d+)", told, re.MULTILINE)]
    assert numbers and numbers[0] > 1, f"it began anew\n{told}"
    # report, evaluation, a sample of text, export
    for part in TAKEN[5:]:
        told = shell.run(commands[part])
        print(f"$ {commands[part]}\n{told[-500:]}")
    report = (tmp_path / "docs-corpus.html").read_text(encoding="utf-8")
    assert "docs-corpus" in report
    exported = tmp_path / "docs-corpus-model"
    assert json.loads((exported / "config.json").read_text())["num_hidden_layers"] == 2
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # the export is whole: transformers needs nothing else
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert tokenizer.eos_token_id == model.config.eos_token_id
