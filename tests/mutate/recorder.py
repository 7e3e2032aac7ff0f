"""Plug-in of pytest that writes down which functions of the package each test has run, in a copy that tells.

Each function of that copy begins with a note of itself: a line in the file ``LOG``, once a process and test. So what ranks
and commands ran counts as their test's, however they end. What an import runs counts as no test's.
"""

from __future__ import annotations

import ast
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

NOTES = '''
"""Notes of the functions that have run, in a file beside this one."""
import os
from pathlib import Path

LOG = str(Path(__file__).with_suffix(".log"))
SEEN = set()
os.register_at_fork(after_in_child=SEEN.clear)


def note(name, add=SEEN.add, open=os.open, write=os.write, close=os.close, how=os.O_WRONLY | os.O_APPEND | os.O_CREAT):
    add(name)
    log = open(LOG, how, 0o666)
    write(log, (name + chr(10)).encode())
    close(log)
'''
"""The copy's module ``notes_of_runs``."""
RECORDS = "records.jsonl"
"""File in the copy to which a line is appended for each test file."""
SHARED: dict[str, set[str]] = {}
"""Functions that a fixture of several tests has run, by its name."""
BEFORE: set[str] = set()
"""Functions that the test under way has run before such a fixture."""
TESTS: dict[str, dict[str, list]] = {}
"""Seconds, whether all cases passed, and functions that ran, by file and function of a test."""


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of a syntax tree by their qualified names, outer ones first."""
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{child.name}."
            if not isinstance(child, ast.ClassDef):
                yield name[:-1], child
        yield from functions(child, name)


def telling(source: str, file: str) -> str:
    """Return a module whose functions note that they run; ``file`` is its path in the package."""
    tree = ast.parse(source)
    for name, function in list(functions(tree)):
        place = int(ast.get_docstring(function) is not None)
        key = f"{file}:{name}"
        function.body[place:place] = ast.parse(f"{key!r} in _SEEN or _note({key!r})").body
    # behind the docstring and what a module imports of the future
    place = int(ast.get_docstring(tree) is not None)
    place += any(getattr(each, "module", "") == "__future__" for each in tree.body)
    words = "from notes_of_runs import SEEN as _SEEN, note as _note"
    tree.body[place:place] = ast.parse(words).body
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _drained() -> set[str]:
    """Return what has run since the last call."""
    from notes_of_runs import LOG, SEEN

    SEEN.clear()
    log = Path(LOG)
    ran = set(log.read_text().split("\n")) - {""} if log.exists() else set()
    log.write_text("")
    return ran


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef):
    """Keep apart what a fixture of several tests runs: it is run by each of them."""
    is_shared = fixturedef.scope != "function"
    if is_shared:
        BEFORE.update(_drained())
    yield
    if is_shared:
        SHARED[fixturedef.argname] = _drained()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """Add what a case has run to its function's."""
    _drained()
    BEFORE.clear()
    began = time.monotonic()
    yield
    ran = _drained().union(BEFORE, *(SHARED.get(name, ()) for name in item.fixturenames))
    file, _, function = item.nodeid.partition("[")[0].partition("::")
    test = TESTS.setdefault(file, {}).setdefault(function, [0.0, True, set()])
    test[0] = round(test[0] + time.monotonic() - began, 3)
    test[2] |= ran


def pytest_runtest_logreport(report):
    """A test that does not pass here says nothing when it fails with a mistake."""
    file, _, function = report.nodeid.partition("[")[0].partition("::")
    if report.failed:
        TESTS.setdefault(file, {}).setdefault(function, [0.0, True, set()])[1] = False


def pytest_sessionfinish(session):
    """Write a line for each file."""
    with (Path(session.config.rootpath) / RECORDS).open("a") as lines:
        for file, tests in TESTS.items():
            names = sorted(set().union(*(ran for *_, ran in tests.values())))
            places = {name: place for place, name in enumerate(names)}
            told = {
                function: [seconds, passed, sorted(places[name] for name in ran)]
                for function, (seconds, passed, ran) in tests.items()
            }
            lines.write(json.dumps({"file": file, "names": names, "tests": told}) + "\n")
