"""How every command ends and what it tells, in one process: the cases of cases/commands.yaml."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import shlex
import shutil
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer.main
import yaml

from raymega.cli.main import run
from raymega.cli.plan import notes
from raymega.planner.calibration.published_runs import COLUMNS
from raymega.prepare.tokenizer.trained import byte_tokenizer
from tests.golden.scenery import WORDS
from tests.golden.scratch import placed, plain
from tests.support.jobs import VERIFY

CASES = Path(__file__).parent / "cases" / "commands.yaml"
MACHINE = notes.Machine(num_cpus=2, has_gpu=False)
"""Machine on which all commands run, as far as they tell of it."""
USAGE = "Usage:"
"""Begins what typer says of a mistake of usage, which its version decides."""
TEXTS = {
    "COLUMNS": "\n".join(
        (",".join(COLUMNS), ",".join("many" if n == "n_gpus" else "" for n in COLUMNS))
    ),
    "FREE_JOB": VERIFY.read_text().replace("parallel: {tp: 1, pp: 2, dp: 1}", "parallel: {}"),
    "BYTES": byte_tokenizer(),
    "WORDS": WORDS,
    "OTHER_JOB": VERIFY.read_text().replace("num_layers: 4", "num_layers: 3"),
}
"""Files that cases name by a word."""
Case = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """What a command left: its exit code, and what it wrote."""

    code: int
    stdout: str
    stderr: str


_built = functools.cache(typer.main.get_command)


def groups() -> dict[str, dict[str, Case]]:
    """Cases by group and name."""
    table: dict[str, dict[str, Case]] = yaml.safe_load(CASES.read_text())
    return table


def called(*words: str) -> Ended:
    """The command as a console script runs it, without a process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        patch.object(sys, "argv", ["raymega", *words]),
        patch.object(typer.main, "get_command", _built),  # 25 ms a command
        patch.object(notes, "this_machine", lambda: MACHINE),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of libraries, with paths and lines
        try:
            run()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Ended(code=code, stdout=out.getvalue(), stderr=err.getvalue())


def told_of_cases(folder: Path, cases: Mapping[str, Case]) -> tuple[str, list[str]]:
    """Every case with what it told; and those that did not end with the code that they should."""
    told, wrong = [], []
    for name, case in cases.items():
        _prepare(folder, case)
        with patch.dict("os.environ", case.get("env", {})):
            ended = called(*shlex.split(placed(case["words"], folder)))
        told.append(_told(name, case, ended, folder))
        if ended.code != case["code"]:
            wrong.append(f"{name}: exit {ended.code}, not {case['code']}")
    return "\n".join(told), wrong


def _told(name: str, case: Case, ended: Ended, folder: Path) -> str:
    lines = [f"== {name}", f"$ raymega {case['words']}", f"exit {ended.code}"]
    if USAGE in ended.stderr + ended.stdout:
        lines.append(USAGE)
    else:
        lines += ended.stdout.splitlines()
        lines += (f"2> {line}" for line in ended.stderr.splitlines())
    return plain("\n".join(lines) + "\n", folder, mask=case.get("mask", ""))


def _prepare(folder: Path, case: Case) -> None:
    """Put the case's own files there."""
    copy = folder / "copied"
    for left in (copy, folder / "new"):
        shutil.rmtree(left, ignore_errors=True)
    if "config" in case:
        shutil.copytree(folder / "theirs", copy)
        config = json.loads((copy / "config.json").read_text()) | case["config"]
        (copy / "config.json").write_text(json.dumps(config))
    if "without" in case:
        (copy / case["without"]).unlink()
    for name, text in case.get("files", {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(TEXTS.get(text, text))
