"""The pages: exit codes, and no link or path that leads nowhere."""

import ast
import re
from pathlib import Path

import pytest
import yaml

from raymega.errors import EXIT_CODES, RaymegaError

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for folder in (".", "docs", "benchmarks", "benchmarks/figures")
    for page in sorted((ROOT / folder).glob("*.md"))
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FOLDERS = ("raymega", "tests", "docs", "jobs")
# A path in this repository, and whether the page says that the reader makes the file.
PATH = re.compile(rf"(?<![\w./~-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)(?![\w*<{{])(`? \(new\))?")
# A file and what of it the page speaks of: `raymega/plan/grid.py`: `Grid.coords`.
REFERENCE = re.compile(r"`((?:raymega|tests|jobs)/[\w/]+\.py)`: `(\w+(?:\.\w+)*)")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def _kinds(kind):
    """An error and all that are derived from it."""
    yield kind
    for child in kind.__subclasses__():
        yield from _kinds(child)


def test_one_table_has_every_exit_code_with_its_errors():
    _, _, rest = (ROOT / "docs" / "failures.md").read_text().partition("\n## Exit codes\n")
    rows = re.findall(r"^\| (\d+) \| (.*?) ?\| (.+) \|$", rest.partition("\n## ")[0], re.MULTILINE)
    assert {int(code): meaning for code, _, meaning in rows} == EXIT_CODES
    named = {name: int(code) for code, names, _ in rows for name in re.findall(r"`(\w+)`", names)}
    codes = {kind.__name__: kind.exit_code for kind in _kinds(RaymegaError)}
    assert named == {name: codes[name] for name in named}
    assert set(codes.values()) <= set(EXIT_CODES)


@pages
def test_relative_links_lead_somewhere(page):
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    targets = [link.partition("#")[0] for link in links]
    assert [t for t in targets if t and not (page.parent / t).exists()] == []


def _anchors(page: Path) -> set[str]:
    """What links to a page's headings end with, by GitHub's rule."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pages
def test_links_to_headings_lead_to_one(page):
    found = [link.partition("#") for link in LINK.findall(page.read_text(encoding="utf-8"))]
    inside = [(page.parent / path if path else page, at) for path, _, at in found if at]
    assert [
        (str(to), at)
        for to, at in inside
        if to.suffix == ".md" and to.is_file() and at not in _anchors(to)
    ] == []


def test_index_names_every_page():
    index = ROOT / "docs" / "README.md"
    linked = {link.partition("#")[0] for link in LINK.findall(index.read_text(encoding="utf-8"))}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - linked == {"README.md"}


def _leaves(tree: object) -> list[str]:
    """The pages of mkdocs' navigation."""
    if isinstance(tree, str):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree
    return [page for part in parts for page in _leaves(part)]


def test_site_has_every_page_once():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(_leaves(nav)) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_site_is_built_so_that_a_dead_link_fails():
    (build,) = (
        line for line in (ROOT / "Makefile").read_text().splitlines() if "mkdocs build" in line
    )
    assert "--strict" in build and "--quiet" not in build, (
        "--quiet hides the warnings that --strict counts"
    )


@pages
def test_paths_of_the_repository_exist(page):
    found = PATH.findall(page.read_text(encoding="utf-8"))
    new = {path for path, is_new in found if is_new}
    assert [path for path, _ in found if path not in new and not (ROOT / path).exists()] == []
    assert [path for path in new if (ROOT / path).exists()] == []


def _has(path: Path, name: str) -> bool:
    """Whether a module defines a dotted name: functions, classes, constants, fields, methods."""
    body = ast.parse(path.read_text()).body
    for part in name.split("."):
        inside = {name: getattr(node, "body", []) for node in body for name in _names_of(node)}
        if part not in inside:
            return False
        body = inside[part]
    return True


def _names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [name.id for target in targets if target for name in ast.walk(target)
            if isinstance(name, ast.Name)]  # fmt: skip


@pages
def test_what_a_page_names_in_a_file_is_there(page):
    found = REFERENCE.findall(page.read_text(encoding="utf-8"))
    assert [(path, name) for path, name in found if not _has(ROOT / path, name)] == []


def test_references_are_found_and_missing_ones_told():
    text = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    assert len(REFERENCE.findall(text)) > 10
    grid = ROOT / "raymega" / "plan" / "grid.py"
    assert _has(grid, "Grid.coords") and not _has(grid, "Grid.cords") and not _has(grid, "Gird")


@pages
def test_pages_are_ascii(page):
    assert page.read_text(encoding="utf-8").isascii()
