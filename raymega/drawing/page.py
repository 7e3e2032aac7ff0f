"""Pages of HTML: one self-contained document, its facts, tables and foldable parts.

A page needs no server, no other file and no script; it follows the reader's light or dark theme.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from xml.sax.saxutils import escape

from raymega.drawing.style import PAGE, PICTURE, THEME

_BREAK = re.compile(r"([._/])")


def page(title: str, parts: Iterable[str]) -> str:
    """Return a document with ``title`` as its heading; ``parts`` are HTML."""
    name = escape(title)
    document = "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{name}</title><style>{THEME}{PAGE}{PICTURE}</style></head><body><main>",
            f"<h1>{name}</h1>",
            *parts,
            "</main></body></html>\n",
        )
    )
    # ASCII, so that no server or mail program can show it in a wrong encoding.
    return document.encode("ascii", "xmlcharrefreplace").decode("ascii")


def facts(named: Mapping[str, str]) -> str:
    """Return tiles, each with a name and a short text."""
    tiles = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in named.items()
    )
    return f'<dl class="facts">{"".join(tiles)}</dl>'


def card(title: str, texts: Iterable[str], named: Mapping[str, str]) -> str:
    """Return a framed part: a heading, paragraphs, and short facts that wrap."""
    lines = "".join(f"<p>{escape(each)}</p>" for each in texts)
    pairs = "".join(
        f"<span><i>{escape(name)}</i> {escape(value)}</span>" for name, value in named.items()
    )
    return f'<article><h3>{escape(title)}</h3>{lines}<p class="pairs">{pairs}</p></article>'


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; numbers are to the right, texts to the left."""
    lines = [list(row) for row in rows]
    kinds = [
        ' class="number"' if lines and all(_is_number(line[at]) for line in lines) else ""
        for at in range(len(headers))
    ]
    head = "".join(
        f"<th{kind}>{escape(each)}</th>" for kind, each in zip(kinds, headers, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{_cell(each)}</td>" for kind, each in zip(kinds, line, strict=True))
        + "</tr>"
        for line in lines
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def folded(summary: str, content: str) -> str:
    """Return ``content`` under a line that opens it."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def note(content: str) -> str:
    """Return a paragraph in a quieter colour."""
    return f'<p class="note">{escape(content)}</p>'


def charts(pictures: Iterable[str]) -> str:
    """Return pictures side by side, as many as fit the screen's width."""
    return f'<div class="charts">{"".join(f"<figure>{each}</figure>" for each in pictures)}</div>'


def wide(picture: str) -> str:
    """Return a picture over the whole width; a narrow screen scrolls it sideways."""
    return f'<div class="wide">{picture}</div>'


def zoomable(picture: str, *, name: str = "zoom") -> str:
    """Return a wide picture with buttons that enlarge it; ``name`` tells several on a page apart."""
    buttons = "".join(
        f'<input type="radio" name="{name}" class="z{size}" id="{name}{size}"'
        f'{" checked" if size == 1 else ""}><label for="{name}{size}">{size}x</label>'
        for size in (1, 2, 4, 8)
    )
    return f'<div class="zoom"><span class="muted">Zoom</span>{buttons}{wide(picture)}</div>'


def _cell(value: object) -> str:
    if _is_number(value):
        return f"{value:,}"
    words = escape(str(value))
    # names and paths may be broken behind their points, on a narrow screen
    return words if " " in words else _BREAK.sub(r"\1<wbr>", words)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
