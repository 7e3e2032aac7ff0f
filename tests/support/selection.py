"""Selection of a session's tests: cases drawn by a seed, shards of the suite, and tests that passed before.

`make test` runs of a function marked ``sample(n)`` only n cases, drawn by a seed that is printed (of cases marked
``sample(n, of=kind)`` n of each kind), a quarter of hypothesis's examples, and no test marked ``wide`` or ``matrix``. The seed is made of the files of
the last commit: each commit draws other cases, and one commit draws the same cases on every machine. `make test-all` runs
everything (``--everything``), in shards of equal cost (``--shard 3/8``), and with ``--resume`` leaves out what has
passed since a file was last changed. ``-m wide`` or ``-m matrix`` asks for such tests by name.
"""

from __future__ import annotations

import hashlib
import random
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import settings

ROOT = Path(__file__).parents[2]
COSTS_FILE = ROOT / "tests" / "costs.yaml"
DEFAULT_COST_S = 0.05
LEAST_EXAMPLES = 10
SOURCES = (
    "raymega",
    "tests",
    "jobs",
    "cluster",
    "dashboards",
    "docs",
    "benchmarks",
    "README.md",
    "CONTRIBUTING.md",
    "pyproject.toml",
)
ONLY_IN_ALL = ("wide", "matrix")
PASSED_FOLDER = ROOT / ".test-all"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this module to pytest's own."""
    group = parser.getgroup("selection")
    group.addoption(
        "--everything", action="store_true", help="wide and matrix tests, and all cases"
    )
    group.addoption("--sample-seed", type=int, default=None, help="seed of the drawn cases")
    group.addoption("--shard", metavar="I/N", help="the I-th of N parts of equal cost")
    group.addoption(
        "--resume", action="store_true", help="leave out what passed on these very files"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the seed once: workers of xdist have that of the process which starts them."""
    option = config.option
    if hasattr(config, "workerinput"):
        option.sample_seed = config.workerinput["sample_seed"]
    elif option.sample_seed is None:
        option.sample_seed = seed_of_commit(ROOT)
    if option.shard:
        read_shard(option.shard)
    if option.resume and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(passed_file()), "passed-recorder")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the seed to a worker of xdist."""
    node.workerinput["sample_seed"] = node.config.option.sample_seed


def pytest_report_header(config: pytest.Config) -> str:
    """Say how the drawn cases are drawn again."""
    option = config.option
    if option.everything:
        return f"selection: everything{f', shard {option.shard}' if option.shard else ''}"
    return f"selection: cases drawn by --sample-seed {option.sample_seed}; all with --everything"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what this session does not run."""
    option = config.option
    kept = items
    if not option.everything:
        left_out = [mark for mark in ONLY_IN_ALL if mark not in option.markexpr]
        kept = drawn(items, seed=option.sample_seed, left_out=left_out)
        draw_fewer_examples(kept)
    if option.shard:
        kept = cut(kept, *read_shard(option.shard))
    if option.resume:
        passed = read_passed(passed_file())
        kept = [item for item in kept if item.nodeid not in passed]
    chosen = {item.nodeid for item in kept}
    others = [item for item in items if item.nodeid not in chosen]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item.nodeid in chosen]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A shard in which nothing is left to run has passed."""
    if session.config.option.resume and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def drawn(items: list[pytest.Item], *, seed: int, left_out: list[str]) -> list[pytest.Item]:
    """Tests without a mark that is ``left_out``, and of sampled functions some cases."""
    items = [item for item in items if not any(map(item.get_closest_marker, left_out))]
    # cases of each sampled function, or of each kind of its cases
    cases: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for item in items:
        if mark := item.get_closest_marker("sample"):
            kind = f"{item.nodeid.partition('[')[0]} {mark.kwargs.get('of', '')}"
            cases.setdefault(kind, []).append(item.nodeid)
            sizes[kind] = mark.args[0]
    # the draw of a kind depends on the seed and its name alone, so other tests do not move it
    chosen = {
        nodeid
        for kind, nodeids in cases.items()
        for nodeid in random.Random(f"{seed} {kind}").sample(
            nodeids, min(sizes[kind], len(nodeids))
        )
    }
    return [i for i in items if not i.get_closest_marker("sample") or i.nodeid in chosen]


def draw_fewer_examples(items: list[pytest.Item]) -> None:
    """Let hypothesis draw a quarter of each test's examples, but as many as it has up to LEAST_EXAMPLES."""
    # by the function, as the cases of one share their settings; hypothesis has no public name for them
    tests = {id(test): test for item in items if (test := getattr(item, "obj", None))}
    for test in tests.values():
        if used := getattr(test, "_hypothesis_internal_use_settings", None):
            number = max(min(used.max_examples, LEAST_EXAMPLES), used.max_examples // 4)
            test._hypothesis_internal_use_settings = settings(used, max_examples=number)


def seed_of_commit(folder: Path) -> int:
    """Return a seed below 10**6 made of the tree of the last commit in ``folder``, or a random one without git."""
    try:
        command = ["git", "-C", str(folder), "rev-parse", "HEAD^{tree}"]
        tree = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return random.SystemRandom().randrange(10**6)
    return int(tree, 16) % 10**6


def read_shard(text: str) -> tuple[int, int]:
    """(index from 0, number of shards) of ``3/8``."""
    index, _, number = text.partition("/")
    if not (index.isdigit() and number.isdigit() and 1 <= int(index) <= int(number)):
        raise pytest.UsageError(f"--shard={text} must be I/N with 1 <= I <= N, such as 3/8")
    return int(index) - 1, int(number)


def cut(items: list[pytest.Item], index: int, number: int) -> list[pytest.Item]:
    """The ``index``-th of ``number`` runs of neighbours, so that tests that share a cluster stay together."""
    # a test belongs to the shard in which the middle of its cost falls
    costs = [cost_s(item.nodeid) for item in items]
    share, begun, kept = sum(costs) / number, 0.0, []
    for item, cost in zip(items, costs, strict=True):
        if min(int((begun + cost / 2) / share), number - 1) == index:
            kept.append(item)
        begun += cost
    return kept


def cost_s(nodeid: str) -> float:
    """Seconds of a test: of its function, else of its file, else a constant."""
    function = nodeid.partition("[")[0]
    known = _costs()
    return known.get(function, known.get(function.partition("::")[0], DEFAULT_COST_S))


@cache
def _costs() -> dict[str, float]:
    return yaml.safe_load(COSTS_FILE.read_text())


def passed_file() -> Path:
    """The list of what has passed on these very files: its name is their digest."""
    return PASSED_FOLDER / _digest()


@cache
def _digest() -> str:
    seen = hashlib.sha256()
    for source in SOURCES:
        path = ROOT / source
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                seen.update(f"{file.relative_to(ROOT)} {file.stat().st_size}\n".encode())
                seen.update(file.read_bytes())
    return seen.hexdigest()[:16]


def read_passed(path: Path) -> set[str]:
    """Node ids of the tests that have passed; a last line that was cut off counts as none."""
    if not path.exists():
        return set()
    return {line[:-1] for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")}


class Recorder:
    """Writes down each test that has passed or was skipped, as soon as it has."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        self._path = path
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Append the test whose last phase this is, if no phase of it failed."""
        if report.failed:
            self._failed.add(report.nodeid)
        if report.when == "teardown" and report.nodeid not in self._failed:
            with self._path.open("a") as file:
                file.write(f"{report.nodeid}\n")


def renewed(known: Mapping[str, float], reports: Iterable[Path]) -> dict[str, float]:
    """Costs by function: of those in JUnit files the mean of their cases, of all others the ``known`` ones."""
    from xml.etree import ElementTree

    times: dict[str, list[float]] = {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            file = case.get("classname", "").replace(".", "/") + ".py"
            name = case.get("name", "").partition("[")[0]
            times.setdefault(f"{file}::{name}", []).append(float(case.get("time", 0)))
    means = {name: round(sum(each) / len(each), 2) for name, each in times.items()}
    # functions that cost about the default need no line, nor do those of a file that is gone
    return {
        name: cost
        for name, cost in sorted((known | means).items())
        if cost > 2 * DEFAULT_COST_S and (ROOT / name.partition("::")[0]).is_file()
    }


if __name__ == "__main__":
    import sys

    costs = renewed(_costs(), map(Path, sys.argv[1:]))
    COSTS_FILE.write_text(
        "# Seconds of a case, by test function or file, on two idle cores: how shards are cut.\n"
        "# Written by `python -m tests.support.selection JUNIT.xml ...`.\n" + yaml.safe_dump(costs)
    )
