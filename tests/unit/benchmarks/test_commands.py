"""Every benchmark starts as its pages say: `python -m benchmarks.X` from the root, with nothing else on the path."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES
from tests.support.preloaded import nursery

ROOT = Path(__file__).parents[3]
NAMES = sorted(
    path.stem
    for path in (ROOT / "benchmarks").glob("*.py")
    if 'if __name__ == "__main__":' in path.read_text()
)
LIMIT_S = 300.0
"""Guards against a benchmark that runs instead of telling its options."""
TELL_ALL = """
import contextlib, io, json, os, runpy, sys
# as `python -m` has it, without what an installed package or PYTHONPATH adds
root = os.getcwd()
sys.path[:] = [root, *(each for each in sys.path if each and os.path.realpath(each) != root)]
for name in sys.argv[1:]:
    said, error, code = io.StringIO(), "", None
    sys.argv = [name, "--help"]
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException as raised:
        error = repr(raised)
    print(json.dumps([name, code, said.getvalue(), error]), flush=True)
"""


def test_every_benchmark_tells_its_options(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    # one fork for all: they share the imports, which are nearly all that --help costs
    with (tmp_path / "log").open("w") as log:
        process = nursery().start(TELL_ALL, NAMES, stderr=log)
        process.stdin.close()
        lines = [json.loads(line) for line in process.stdout.read().splitlines()]
    assert process.wait(LIMIT_S) == 0, (tmp_path / "log").read_text()
    assert [name for name, *_ in lines] == NAMES
    assert [line for line in lines if not _is_told(*line[1:])] == []


@pytest.mark.wide
@pytest.mark.parametrize("name", NAMES)
def test_benchmark_tells_its_options_in_a_process_of_its_own(name):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--help"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert _is_told(ended.returncode, ended.stdout, ended.stderr), ended


def test_no_page_or_docstring_starts_one_as_a_file():
    # as a file it has its own folder on the path, not the root, where `benchmarks` and `tests` are
    texts = {path: path.read_text() for path in [*PAGES, *ROOT.glob("benchmarks/*.py")]}
    pattern = re.compile(r"python3? +(?:\S*/)?benchmarks/\w+|benchmarks/\w+\.py +-")
    assert [(path, each) for path, text in texts.items() for each in pattern.findall(text)] == []


def _is_told(code, said, error):
    return code == 0 and said.startswith("usage: ") and "--help" in said and not error
