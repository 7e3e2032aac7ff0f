"""Which tests run a function: what a copy of the package notes, and the tests that are tried first."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from tests.mutate import __main__ as engine
from tests.mutate.ran import PORTIONS_S, Ran, Timed, portions
from tests.mutate.recorder import NOTES, RECORDS, telling

ROOT = Path(__file__).parents[3]
PACKAGE = '''
"""Count."""
from __future__ import annotations

import os


class Counter:
    def count(self):
        """Count one."""
        def one():
            return 1
        return one()


def lost():
    return 2


def in_a_fork():
    if (pid := os.fork()) == 0:
        lost()
        os._exit(0)
    os.waitpid(pid, 0)


def shared():
    return 3


at_import = shared()
'''
TESTS = """
import pytest, counting

@pytest.fixture(scope="module")
def three():
    return counting.shared()

@pytest.mark.parametrize("case", [1, 2])
def test_count(case):
    assert counting.Counter().count() == 1

def test_fork(three):
    counting.in_a_fork()

def test_red(three):
    assert counting.Counter().count() == three
"""


def test_each_test_has_the_functions_that_it_and_its_forks_and_fixtures_ran(tmp_path):
    (tmp_path / "notes_of_runs.py").write_text(NOTES)
    (tmp_path / "counting.py").write_text(telling(PACKAGE, "counting.py"))
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.mutate.recorder",
        "--rootdir",
        ".",
    ]
    subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}, check=False
    )
    line = json.loads((tmp_path / RECORDS).read_text())
    ran = {
        test: (is_healthy, {line["names"][place].partition(":")[2] for place in places})
        for test, (_, is_healthy, places) in line["tests"].items()
    }
    counted = {"Counter.count", "Counter.count.one"}
    assert ran == {
        "test_count": (True, counted),
        "test_fork": (True, {"in_a_fork", "lost", "shared"}),
        "test_red": (False, counted | {"shared"}),
    }


def test_tests_of_a_function_are_tried_before_those_of_its_file():
    source = (ROOT / "raymega" / "optim" / "clip.py").read_text().splitlines()
    lines = [
        {
            "file": "tests/dist/train/test_some.py",
            "names": ["optim/clip.py:clip_factor", "optim/clip.py:other"],
            "tests": {"test_both": [0.1, True, [0, 1]], "test_other": [0.1, True, [1]]},
        },
        {
            "file": "tests/unit/train/test_some.py",
            "names": ["optim/clip.py:clip_factor"],
            "tests": {"test_slow": [0.9, True, [0]], "test_quick": [0.1, True, [0]]},
        },
    ]
    ran = Ran(list(map(json.dumps, lines)))
    inside = next(n for n, text in enumerate(source, 1) if "def clip_factor" in text)
    names = [test.name.partition("::")[2] for test in ran.of("optim/clip.py", inside)]
    assert names == ["test_quick", "test_slow", "test_both"]
    # a line outside of all functions
    assert {test.name.partition("::")[2] for test in ran.of("optim/clip.py", 1)} == {
        *names,
        "test_other",
    }


def test_portions_grow_and_end():
    tests = [
        Timed(name=f"test_{n % 2}.py::test_{n}", seconds=4.0, is_healthy=True, num_functions=1)
        for n in range(1000)
    ]
    tried = list(portions(tests))
    taken_s = [4 * len(some) for some in tried]
    assert len(tried) == len(PORTIONS_S)
    assert taken_s[0] <= PORTIONS_S[0] + 4
    assert PORTIONS_S[-1] - 20 <= sum(taken_s) <= PORTIONS_S[-1] + 4
    assert len({name for some in tried for name in some}) == sum(map(len, tried))
    # a file's together
    assert [name[:9] for name in tried[0]] == sorted(name[:9] for name in tried[0])


def test_a_survivor_is_tried_again_once_another_test_runs_its_function(tmp_path, monkeypatch):
    keys, runs = ["seen", "survivor", "new"], []
    mistakes = [{"key": key, "file": key, "line": 1, "change": ""} for key in keys]

    def attempt(_tree, mistake, ran):
        runs.append(mistake["key"])
        verdict = "killed" if mistake["key"] == "seen" else "survived"
        return {**mistake, "verdict": verdict, "of": len(ran.of("", 1)), "seconds": 0}

    tests = [1, 2]
    ran = SimpleNamespace(of=lambda *_: tests)
    monkeypatch.setattr(engine, "attempt", attempt)
    monkeypatch.setattr(engine, "recorded", lambda *_: ran)
    monkeypatch.setattr(engine, "Tree", lambda _: None)
    assert len(engine._results(tmp_path / "1.jsonl", mistakes[:2])) == 2
    engine._results(tmp_path / "1.jsonl", mistakes)
    assert runs == keys
    tests.append(3)
    results = engine._results(tmp_path / "1.jsonl", mistakes)
    assert runs == [*keys, "survivor", "new"] and len(results) == 3


def test_first_fork_server_has_what_its_process_had():
    code = (
        "import builtins, multiprocessing; from tests.support.fork_servers import fork_early;"
        "builtins.before = 7; fork_early(); builtins.before = 8;"
        "context = multiprocessing.get_context('forkserver');"
        "ends = 'import builtins, os; os._exit(builtins.before)';"
        "two = [context.Process(target=exec, args=(ends,)) for _ in range(2)];"
        "[(each.start(), each.join()) for each in two]; print([each.exitcode for each in two])"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert said.stdout == "[7, 7]\n", said.stderr
