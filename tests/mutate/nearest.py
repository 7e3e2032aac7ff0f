"""The tests nearest to a file of the package: those of its name, and those that plant mistakes in it or import it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tests.mutations.proofs import PROOFS
from tests.mutations.tree import ROOT

SEARCHED = ("tests/unit", "tests/dist")
MOST_TESTS = 8
"""Largest number of test files of a mistake: the nearest come first."""
IMPORT = re.compile(
    r"^[ ]*(?:from[ ](raymega[.\w]*)[ ]import[ ](?:\(([^)]*)\)|([^(\n]+)$)|import[ ](raymega[.\w]*))",
    re.MULTILINE,
)
"""An import of the package, wherever it stands; to parse a thousand files takes as long as a mistake's tests."""


def nearest_tests(file: str) -> tuple[str, ...]:
    """Return test files for ``file``, a path in the package, nearest first; empty where none is."""
    module = _module(file)
    named = {name: None for name in _by_name().get(_stem(file), ()) if _is_of(name, file)}
    proofs = {
        test.partition("::")[0]: None for row in PROOFS if row.file == file for test in row.tests
    }
    near = named | proofs | _importing(module)
    # those named after modules of the package that import it, then those that import these
    users = _users().get(module, ())
    for user in users:
        near |= {name: None for name in _by_name().get(_stem(user), ()) if _is_of(name, user)}
    for user in users:
        near |= _importing(_module(user))
    # a part of a layer that no test imports is run by those of the folder's other modules
    if not near:
        folder = module.rpartition(".")[0] + "."
        near = {
            name: None
            for name, seen in _imports().items()
            if any(m.startswith(folder) for m in seen)
        }
    return tuple(near)[:MOST_TESTS]


def _module(file: str) -> str:
    return "raymega." + file.removesuffix(".py").replace("/", ".")


def _importing(module: str) -> dict[str, None]:
    """Return the test files that import a module; those without ranks first, as the first that fails sees a mistake."""
    found = sorted(
        ("dist" in name, len(seen), name) for name, seen in _imports().items() if module in seen
    )
    return {name: None for *_, name in found}


def _stem(file: str) -> str:
    return f"test_{Path(file).stem}.py"


def _is_of(test: str, file: str) -> bool:
    """Return whether a test file of the right name is meant: it lies in the folder that mirrors, or imports the file."""
    return file.split("/")[0] in Path(test).parts or _module(file) in _imports()[test]


@cache
def _by_name() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in _imports():
        found.setdefault(Path(name).name, []).append(name)
    return found


@cache
def _users() -> dict[str, list[str]]:
    """Return the files of the package that import each module, paths in the package."""
    users: dict[str, list[str]] = {}
    for path in sorted((ROOT / "raymega").rglob("*.py")):
        for module in _imported(path):
            users.setdefault(module, []).append(str(path.relative_to(ROOT / "raymega")))
    return users


@cache
def _imports() -> dict[str, frozenset[str]]:
    """Return the modules of the package that each test file imports, by its path from the root."""
    paths = (path for folder in SEARCHED for path in (ROOT / folder).rglob("test_*.py"))
    return {str(path.relative_to(ROOT)): _imported(path) for path in sorted(paths)}


def _imported(path: Path) -> frozenset[str]:
    seen = set()
    for module, *names, whole in IMPORT.findall(path.read_text()):
        aliases = re.sub(r"#.*", "", "".join(names)).split(",")
        seen |= {
            module or whole,
            *(f"{module}.{each.split()[0]}" for each in aliases if each.strip()),
        }
    return frozenset(seen)
