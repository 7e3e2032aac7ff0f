"""Runs the commands of pages in a scratch folder, and puts what they print into the pages that are generated."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.docs.blocks import ROOT, SHELLS, Block, blocks_of
from tests.docs.commands import QUICK, reason
from tests.golden.commands import called
from tests.golden.scratch import scratch

GENERATED = ("docs/tour.md", "docs/job-file.md")
"""Pages on which a block of text behind one of commands is what these print."""
BEGUN_RUN = "raymega train jobs/verify.yaml --address local --set checkpoint.uri=/tmp/docs-runs"
"""Makes the run of the tour, which other pages look at."""
SECOND_TERMINAL = re.compile(r"second terminal, after the checkpoint of step (\d+)")
"""Title of a block that runs while the one before it does, from the line of that checkpoint on."""
PLACE = "/tmp/docs-"
"""Begins every path of the pages that the reader writes to."""
PATIENT = {
    r"^raymega verify ": "--timeout-s 3000",
    r"^raymega (train|chaos) ": "--set elastic.start_timeout_s=3000",
}
"""Options that tests put in front of a command's own: limits that a busy machine would reach, and that here only end
a hang."""
NO_RAY = re.compile(r"Ray at \S+ did not start \(|node timed out during startup")
"""Error when Ray's own processes need longer than the 30 s that are fixed in Ray."""
RAY_STARTS = 5
"""Number of times that a command is given which ends with that error: it has done nothing yet."""
VARIES = re.compile(
    r" *[\d,.]+ (?:tokens/s|ms|MiB|s\b)| *\d+ min \d+ s| *[\d.]+%|process \d+.*|\d+ lost steps? recomputed|\(abort [^)]*\)"
    r"|failed after step \d+"
)
"""Parts of an output that differ between two runs: times, rates, and where a killed worker was."""


@contextmanager
def page_folder() -> Iterator[Path]:
    """Stand in a folder that has what a reader's checkout has; `raymega` and `python` are this interpreter's."""
    with scratch() as folder:
        for name in ("jobs", "raymega", "benchmarks", "docs", "README.md"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "bin").mkdir()
        for name, words in {"python": '"$@"', "raymega": '-m raymega "$@"'}.items():
            script = folder / "bin" / name
            script.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} {words}\n")
            script.chmod(0o755)
        os.environ["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"
        os.environ["PYTHONPATH"] = str(ROOT)
        # A cluster that somebody else runs on this machine is not joined.
        os.environ["RAY_TMPDIR"] = str(folder / "r")
        (folder / "r").mkdir()
        yield folder


def run(command: str, folder: Path) -> tuple[int, str]:
    """Run a line as a shell does; a raymega command that starts nothing within this process.

    Returns:
        Exit code, and what it printed to either stream.
    """
    placed = _placed(command, folder)
    if QUICK.match(command) and not re.search(r"[|>;&]", command):
        ended = called(*shlex.split(placed)[1:])
        code, told = ended.code, ended.stdout + ended.stderr
    else:
        for _ in range(RAY_STARTS):
            done = subprocess.run(
                ["bash", "-c", placed],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            )  # fmt: skip
            if not NO_RAY.search(done.stdout):
                break
        code, told = done.returncode, done.stdout
    return code, told.replace(f"{folder}/docs-", PLACE)


def _placed(command: str, folder: Path) -> str:
    """Return a command of a page with the paths and the patience of the tests."""
    for pattern, options in PATIENT.items():
        command = re.sub(f"({pattern})", rf"\1{options} ", command)
    return command.replace(PLACE, f"{folder}/docs-")


def is_program(block: Block) -> bool:
    """Return whether a block is Python to run: no module, and no lines of a file that it names."""
    return block.language == "python" and not block.text.startswith(('"""', "# raymega/"))


def faults_of_page(blocks: tuple[Block, ...], folder: Path, *, only_quick: bool) -> list[str]:
    """Run the commands and Python blocks of a page in their order.

    Returns:
        Commands that did not end as the page says: with 0, or with an error where the output names one.
    """
    # pages that show a run's folder need a run in it
    shown = [each for block in blocks for each in block.commands if not reason(each)]
    if not only_quick and any(f"{PLACE}runs" in each for each in shown):
        code, told = run(BEGUN_RUN, folder)
        if code != 0:
            return [f"{BEGUN_RUN}: exit {code}\n{told}"]
    faults = []
    for block in blocks:
        commands = [each for each in block.commands if not reason(each)]
        if only_quick:
            commands = [each for each in commands if QUICK.match(each)]
        elif is_program(block):
            commands = [f"python -c {shlex.quote(block.text)}"]
        is_refused = re.search(r"^\w+Error: ", block.text, re.MULTILINE) is not None
        for command in commands:
            code, told = run(command, folder)
            if (code != 0) != is_refused:
                faults.append(f"{block.where}: {command}: exit {code}\n{told}")
    return faults


def regenerated(text: str, page: str, folder: Path, *, only_quick: bool) -> str:
    """Return a page with the outputs of its commands as they are now, and as they were where nothing but times differs."""
    found = list(blocks_of(text, page))
    # from the end on, so that offsets of earlier blocks stay right
    for at, block in reversed([*enumerate(_outputs(found, folder, only_quick=only_quick))]):
        if block is not None and masked(block) != masked(found[at].text):
            begin = found[at].at
            text = f"{text[:begin]}{block}{text[begin + len(found[at].text) :]}"
    return text


def masked(text: str) -> str:
    """Return a text with stars for what varies."""
    return VARIES.sub("*", text)


def _outputs(found: list[Block], folder: Path, *, only_quick: bool) -> list[str | None]:
    """Return the new text of each block; None of one that is no output, or whose commands were not run."""
    texts: list[str | None] = [None] * len(found)
    for at, block in enumerate(found):
        if block.language not in SHELLS or SECOND_TERMINAL.search(block.title):
            continue
        # a block for a second terminal may lie between the commands and their output
        second, output = (*found[at + 1 : at + 3], None, None)[:2]
        if not second or not SECOND_TERMINAL.search(second.title):
            second, output = None, second
        is_output = output is not None and output.language == "text"
        is_refused = is_output and output.text.startswith("ConfigError: ")
        if only_quick and not is_refused and not all(map(QUICK.match, block.commands)):
            continue
        told = (
            _run_two(block, second, folder)
            if second
            else "".join(run(each, folder)[1] for each in block.commands)
        )
        if is_output:
            texts[found.index(output)] = told
    return texts


def _run_two(first: Block, second: Block, folder: Path) -> str:
    """Run a block's command, and the other block's as soon as the first has told of a checkpoint."""
    signal = f"Checkpoint of step {SECOND_TERMINAL.search(second.title)[1]}:"
    (command,) = first.commands
    lines = []
    with subprocess.Popen(
        ["bash", "-c", _placed(command, folder)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        for line in process.stdout:
            lines.append(line)
            if line.startswith(signal):
                for each in second.commands:
                    run(each, folder)
                signal = "\0"
    return "".join(lines).replace(f"{folder}/docs-", PLACE)
