"""The tests that run each function of the package, recorded once by test file, in ``.mutate/ran.jsonl``.

A test file is recorded again when it has changed. A function that has changed keeps its tests; one that is new has none
until then, and is tried by those of its module.
"""

from __future__ import annotations

import ast
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch
from zlib import crc32

from tests.mutate.nearest import nearest_tests
from tests.mutate.recorder import NOTES, RECORDS, functions, telling
from tests.mutations.tree import ROOT, Tree

SEARCHED = (
    *(f"tests/unit/{name}" for name in ("model", "parallel", "optim", "train", "data", "schedule", "checkpoint")),
    "tests/dist",
    "tests/unit",
)  # fmt: skip
"""Folders of the tests, those of the layers that are changed first."""
FILES_AT_ONCE = 8
"""Most files of one pytest: it loads the package once for them, and what has run is kept when it ends."""
RECORDED_S = 1800.0
"""Longest time of these files."""
PORTIONS_S = (4.0, 20.0, 60.0, 200.0)
"""Seconds of the tests that are tried first, next and last, as they took when they were recorded."""
LOADING_S = 0.5
"""Seconds that a further test file takes to load."""
RANKS_S = 5.0
"""Seconds by which a test with ranks comes later: the first one has to load what they need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A test function: its id, seconds, whether it passed without a mistake, and how many functions it runs."""

    name: str
    seconds: float
    is_healthy: bool
    num_functions: int

    @property
    def file(self) -> str:
        """Path of its module."""
        return self.name.partition("::")[0]


class Ran:
    """Tests by the function of the package that they run, and by the file in which it lies."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.tests: dict[str, Timed] = {}
        self._of_function: dict[str, list[Timed]] = {}
        for line in map(json.loads, lines):
            for function, (seconds, is_healthy, places) in line["tests"].items():
                name = f"{line['file']}::{function}"
                test = Timed(
                    name=name, seconds=seconds, is_healthy=is_healthy, num_functions=len(places)
                )
                self.tests[name] = test
                for place in places:
                    self._of_function.setdefault(line["names"][place], []).append(test)

    def of(self, file: str, line: int) -> list[Timed]:
        """Return the tests that run the function at a line of a file, or else the file's, most likely to tell first."""
        source = ast.parse((ROOT / "raymega" / file).read_text())
        around = [
            f"{file}:{name}" for name, each in functions(source) if each.lineno <= line <= each.end_lineno
        ]  # fmt: skip
        near = nearest_tests(file)
        found = self._of_function.get(around[-1], []) if around else []
        if not found:
            named = [test for test in self.tests.values() if test.file in near]
            found = [
                test for key, tests in self._of_function.items() if key.startswith(f"{file}:") for test in tests
            ] + named  # fmt: skip

        def cost(test: Timed) -> float:
            # a test of few functions is about this one
            like = 0.2 if test.file in near else 1.0
            return like * (test.seconds + test.num_functions / 500) + RANKS_S * (
                "/dist/" in test.name
            )

        return sorted({test.name: test for test in found}.values(), key=cost)


def portions(tests: Sequence[Timed]) -> Iterator[list[str]]:
    """Yield tests in portions of about PORTIONS_S, each file's together; what takes longer in all is left out."""
    taken_s, left = 0.0, list(tests)
    for limit_s in PORTIONS_S:
        some: dict[str, list[str]] = {}
        while left and (taken_s < limit_s or not some):
            test = left.pop(0)
            taken_s += test.seconds + LOADING_S * (test.file not in some)
            some.setdefault(test.file, []).append(test.name)
        if some:
            yield [name for names in some.values() for name in names]


def recorded(path: Path, options: Sequence[str]) -> Ran:
    """Return what ``path`` says of tests as they are, after recording those that it does not have."""
    lines = path.read_text().splitlines() if path.exists() else []
    known = {(line["file"], line["digest"]): text for text in lines for line in [json.loads(text)]}
    files = {
        str(test.relative_to(ROOT)): crc32(test.read_bytes())
        for folder in SEARCHED
        for test in sorted((ROOT / folder).rglob("test_*.py"))
    }
    missing = [file for file, digest in files.items() if (file, digest) not in known]
    if missing:
        with tempfile.TemporaryDirectory(prefix="raymega-mutate-") as folder:
            tree = _telling_tree(Path(folder))
            for start in range(0, len(missing), FILES_AT_ONCE):
                some = missing[start : start + FILES_AT_ONCE]
                for line in _lines(tree, some, options):
                    line["digest"] = files[line["file"]]
                    known[line["file"], line["digest"]] = text = json.dumps(line)
                    with path.open("a") as file:
                        file.write(text + "\n")
    return Ran([known[each] for each in files.items() if each in known])


def _telling_tree(folder: Path) -> Tree:
    tree = Tree(folder)
    (folder / "notes_of_runs.py").write_text(NOTES)
    for path in (folder / "raymega").rglob("*.py"):
        path.write_text(telling(path.read_text(), str(path.relative_to(folder / "raymega"))))
    return tree


def _lines(tree: Tree, files: Sequence[str], options: Sequence[str]) -> list[dict]:
    """Run test files, and return what each has run; a file without a test that is selected has run nothing."""
    records = tree.folder / RECORDS
    records.unlink(missing_ok=True)
    # a compiler would trace the notes
    with patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "1"}):
        verdict, _ = tree.verdict(
            files, "--maxfail=1000000", "--continue-on-collection-errors", "-p", "tests.mutate.recorder", *options,
            timeout_s=RECORDED_S,
        )  # fmt: skip
    print(f"recorded ({verdict}): {' '.join(files)}", flush=True)
    # one that did not end is recorded another time
    if not records.exists():
        return []
    lines = records.read_text().splitlines()
    empty = {file: {"file": file, "names": [], "tests": {}} for file in files}
    return list((empty | {line["file"]: line for line in map(json.loads, lines)}).values())
