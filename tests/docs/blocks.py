"""The code blocks of the pages, and the commands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks/figures").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
]
# A fence of any language, or lines that are indented by four behind an empty one.
_BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<fenced>.*?)^ *```$|(?<=\n\n)(?P<indented>(?: {4}[^\n]*\n)+)",
    re.MULTILINE | re.DOTALL,
)
_PROGRAMS = (
    "raymega ray python python3 pip make export cp kill curl git aws gcloud kubectl docker sudo apt-get prometheus "
    "mlflow nvidia-smi"
)
# What begins a block of commands where the fence does not say so: a prompt, or variables and a program.
_IS_COMMAND = re.compile(rf"\$ |(?:\w+=\S+ +)*(?:{'|'.join(_PROGRAMS.split())}) ")
SHELLS = ("bash", "console", "sh", "shell")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A block of a page.

    Attributes:
        page: Path of the page from the repository's root.
        line: Number of the line in which the block begins.
        language: First word behind the fence; "" where there is none.
        title: Caption that mkdocs shows above the block.
        text: Lines of the block, without the fence.
        at: Offset of the text in the page.
    """

    page: str
    line: int
    language: str
    title: str
    text: str
    at: int

    @property
    def where(self) -> str:
        """Page and line, as editors open them."""
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Commands of a block of these, continued lines joined, without comments."""
        lines = re.sub(r" *\\\n *", " ", self.text).splitlines()
        if self.language not in SHELLS and (self.language or not _IS_COMMAND.match(lines[0])):
            return []
        # with prompts, lines without one are output
        if any(line.startswith("$ ") for line in lines):
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        commands = (re.sub(r"(^|\s+)# .*", "", line).strip() for line in lines)
        return [command for command in commands if command]


def blocks_of(text: str, page: str) -> Iterator[Block]:
    """Yield the blocks of a page in their order."""
    for found in _BLOCK.finditer(text):
        kind = "indented" if found["fenced"] is None else "fenced"
        language, _, rest = (found["info"] or "").partition(" ")
        title = re.search(r'title="([^"]*)"', rest)
        indent = len(found["indent"] or "") if kind == "fenced" else 4
        yield Block(
            page=page,
            line=text.count("\n", 0, found.start()) + 1,
            language=language,
            title=title[1] if title else "",
            text=re.sub(rf"^ {{{indent}}}", "", found[kind], flags=re.MULTILINE),
            at=found.start(kind),
        )


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """Return the blocks of a file."""
    name = page.relative_to(ROOT).as_posix()
    return tuple(block for block in blocks_of(page.read_text(encoding="utf-8"), name) if block.text)
