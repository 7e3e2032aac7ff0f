"""Rules for the English of docstrings and pages: what begins with a subject, which phrases say nothing.

``python -m tests.support.english raymega/train docs`` lists each line that breaks one, and counts.
"""

import ast
import functools
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeGuard

_RELATIVE = (
    "what where when which who whose whom that whether how why if as because since until while so than then "
    "it they those these this them its their he she one ones both each's others others' "
    "of by to with in on at from into for over under between among through per about against behind beyond "
    "but and or nor not also only too yet else besides beside never always still even just "
    "is are was were be been has have had does did will would can could may might must shall should"
)
NO_SUBJECT = frozenset(_RELATIVE.split())
"""Words that no docstring and no line of Args begins with: neither a verb that says what is done nor a noun."""
ELLIPTICAL = NO_SUBJECT - {"whether"}
"""The same for a line of Args, where Google's style has "Whether to ..."."""
MAX_SENTENCE_WORDS = 40
BANNED = (
    r"\bso many\b", r"\bso much\b", r"\bno good\b", r"\bst(?:ood|ands?|anding) still\b", r"\bgo(?:es)? by\b",
    r"\bwent on\b", r"\bgo(?:es)? on\b", r"\btaken up again\b", r"\bputs? off\b", r"\bwithout a word\b",
    r"\bbut for\b", r"\bfor beside\b", r"\bby and by\b", r"\bnobody\b", r"\bone expects\b", r"\bmade again\b",
)  # fmt: skip
_ANY_BANNED = re.compile("|".join(BANNED), re.IGNORECASE)
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):$")
_ARGUMENT = re.compile(r"^ {4}(\*{0,2}[\w, *]+): ?(.*)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Docstring:
    """A docstring of one file.

    Attributes:
        line: the number of the line on which its owner begins.
        text: text of the docstring, without indentation.
        is_description: whether it describes a job-file field, and is shown after the field's name.
    """

    path: Path
    line: int
    text: str
    is_description: bool = False


def docstrings(path: Path) -> Iterator[Docstring]:
    """Yield the docstrings of a file: of the module, its classes, functions, constants and fields."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text:
            yield Docstring(path=path, line=getattr(node, "lineno", 1), text=text)
        for owner, below in pairwise(node.body):
            if isinstance(owner, ast.Assign | ast.AnnAssign) and _is_text(below):
                yield Docstring(
                    path=path, line=below.lineno, text=inspect.cleandoc(below.value.value),
                    is_description=_is_section(node),
                )  # fmt: skip


def _is_section(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any(ast.unparse(b) == "Section" for b in node.bases)


def _is_text(statement: ast.stmt) -> TypeGuard[ast.Expr]:
    return isinstance(statement, ast.Expr) and isinstance(
        getattr(statement.value, "value", None), str
    )


def argument_lines(text: str) -> Iterator[tuple[str, str]]:
    """Yield each name and description under Args and Attributes."""
    section = ""
    for line in text.splitlines():
        heading = _SECTION.match(line)
        section = heading.group(1) if heading else section
        argument = _ARGUMENT.match(line)
        if section in ("Args", "Attributes") and argument:
            yield argument.group(1), argument.group(2)


def first_word(text: str) -> str:
    """Return the first word in lower case, without marks; empty where the text begins with a name in backticks."""
    word = text.split(maxsplit=1)[0] if text.split() else ""
    return "" if word.startswith("`") else word.strip(".,;:!?()\"'`").lower()


def prose(text: str) -> str:
    """Return the text without code, tables, lists' marks, headings and links' targets."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"^(\||#|>|    |!\[).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"``?[^`]*``?", "code", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)


def sentences(text: str) -> list[int]:
    """Return the number of words of each sentence of a page's prose."""
    parts = re.split(r"(?<=[.!?:])\s+|\n\s*\n", prose(text))
    return [n for part in parts if (n := len(re.findall(r"[A-Za-z0-9]\S*", part)))]


def faults_of_docstring(doc: Docstring) -> Iterator[str]:
    """Yield what is wrong with one docstring, with its place."""
    place = f"{doc.path}:{doc.line}"
    if first_word(doc.text) in NO_SUBJECT and not doc.is_description:
        yield f"{place}: subject: {doc.text.splitlines()[0]}"
    for name, description in argument_lines(doc.text):
        if first_word(description) in ELLIPTICAL or not description:
            yield f"{place}: argument: {name}: {description}"
    for phrase in banned_phrases(doc.text):
        yield f"{place}: phrase: {phrase!r} in: {doc.text.splitlines()[0]}"
    body = re.split(r"^(?:Args|Attributes|Returns|Raises|Yields):$", doc.text, flags=re.MULTILINE)[
        0
    ]
    longest = max(sentences(body), default=0)
    if longest > MAX_SENTENCE_WORDS:
        yield f"{place}: long: a sentence of {longest} words: {doc.text.splitlines()[0]}"


def banned_phrases(text: str) -> list[str]:
    """Return the first place of each banned phrase of a text, as it stands there."""
    # one search finds that most texts have none
    if not _ANY_BANNED.search(text):
        return []
    found = (re.search(phrase, text, re.IGNORECASE) for phrase in BANNED)
    return [each.group() for each in found if each]


@functools.cache
def _comments(path: Path) -> tuple[tuple[int, str], ...]:
    """Return the line and the text of each comment of a file."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return tuple(
        (token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT
    )


def faults_of_comments(path: Path) -> Iterator[str]:
    """Yield each banned phrase of a file's comments."""
    for line, text in _comments(path):
        for _ in banned_phrases(text):
            yield f"{path}:{line}: phrase: {text}"


def comments_and_lines(path: Path) -> tuple[int, int]:
    """Return the lines of a file that hold a comment for readers, and all that are not blank."""
    found = [
        line
        for line, text in _comments(path)
        if not re.match(r"#\s*(type:|noqa|fmt:|pragma)", text)
    ]
    return len(found), sum(1 for line in path.read_text().splitlines() if line.strip())


def main(names: list[str]) -> None:
    """Print the faults of the folders, files and pages named, and the shares."""
    files = [
        f
        for n in names
        for f in ([Path(n)] if Path(n).is_file() else sorted(Path(n).rglob("*.py")))
    ]
    docs = [d for f in files if f.suffix == ".py" for d in docstrings(f)]
    faults = [fault for d in docs for fault in faults_of_docstring(d)]
    faults += [fault for f in files if f.suffix == ".py" for fault in faults_of_comments(f)]
    print("\n".join(faults))
    arguments = sum(1 for d in docs for _ in argument_lines(d.text))
    counts = [comments_and_lines(f) for f in files if f.suffix == ".py"]
    kinds = {
        k: sum(f": {k}: " in fault for fault in faults)
        for k in ("subject", "argument", "phrase", "long")
    }
    if docs:
        print(
            f"{len(docs)} docstrings, without subject {100 * kinds['subject'] / len(docs):.1f} %; {arguments} lines "
            f"of Args, elliptical {100 * kinds['argument'] / max(1, arguments):.1f} %; phrases {kinds['phrase']}; "
            f"long {kinds['long']}; comments a 100 lines {100 * sum(c for c, _ in counts) / sum(n for _, n in counts):.2f}"
        )
    for n in names:
        for page in [Path(n)] if n.endswith(".md") else sorted(Path(n).glob("*.md")):
            words = sentences(page.read_text())
            long = sum(w > 30 for w in words)
            print(f"{page}: {len(page.read_text().split())} words, mean sentence {sum(words) / len(words):.1f}, "
                  f"over 30 words {100 * long / len(words):.1f} %")  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
