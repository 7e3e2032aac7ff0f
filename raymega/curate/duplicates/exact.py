"""Finds copies of documents and of lines: of equal keys the smallest ids are kept."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import numpy as np
import xxhash

from raymega.curate.document import CuratedDocument
from raymega.curate.duplicates.keys import KEY, REMOVAL, id_numbers, order_of, part_of
from raymega.curate.options import Exact, Lines
from raymega.curate.plan import Stage
from raymega.curate.recipe import StepSpec
from raymega.curate.spool import TableSpool
from raymega.curate.state import Rows, State, get_keys, put_table, runs
from raymega.prepare.readers.long_text import LINE_END, Text, TextBuilder, portions_of, split_text

_LOW = (1 << 64) - 1
PACKED_ROWS = 1 << 14
SHOWN_LINES = 20
"""Number of removed lines of a document in the report's examples."""
_PARAGRAPHS = re.compile(r"\n[ \t]*\n\s*")


class KeyCollector:
    """Rows of the documents of a group: one each for `exact`, one a line for `lines`."""

    def __init__(self, spec: StepSpec, num_parts: int) -> None:
        self._spec, self._rows = spec, list[tuple[int, ...]]()
        self._spool = TableSpool(KEY, num_parts)
        self._num_parts = num_parts

    def add(self, document: CuratedDocument, row: int) -> None:
        """Take the keys of a document, which is the one with number ``row`` of the group."""
        name = id_numbers(document)
        if isinstance(self._spec.options, Exact):
            self._rows.append((*document_key(document.text, self._spec.options), *name, 0, row, 0))
            self._pack()
            return
        options = cast(Lines, self._spec.options)
        for number, line in enumerate(split_lines(document.text, options)):
            if len(line.strip()) >= options.min_characters:
                self._rows.append((*_key(line.strip()), *name, 0, row, number))
                self._pack()

    def write(self, state: State, folder: str, name: str) -> None:
        """Write the table ``FOLDER/keys/NAME``."""
        self._pack(at_least=1)
        self._spool.write(state, f"{folder}/keys/{name}")

    def _pack(self, at_least: int = 0) -> None:
        # A row as a tuple of Python has seven times the size.
        if len(self._rows) >= (at_least or PACKED_ROWS):
            rows = np.array(self._rows, dtype=KEY)
            self._spool.add(rows, part_of(rows["key"], self._num_parts))
            self._rows.clear()


def document_key(text: Text, options: Exact) -> tuple[int, int]:
    """Return the key of a text, which equal texts share."""
    return _key_of(_normal(text) if options.ignores_space else portions_of(text))


def _normal(text: Text) -> Iterator[str]:
    """Yield the text in small letters with one space between words."""
    between = ""
    for portion in portions_of(text):
        words = " ".join(portion.split()).casefold()
        if not words:
            between = between and " "
            continue
        # A word may continue from the portion before.
        yield ("" if between != " " and not portion[0].isspace() else between and " ") + words
        between = " " if portion[-1].isspace() else "word"


def split_lines(text: Text, options: Lines) -> Iterator[str]:
    """Yield the lines or paragraphs of a text."""
    return split_text(text, LINE_END if options.unit == "line" else _PARAGRAPHS)


def without_lines(text: Text, removed: Sequence[int], options: Lines) -> tuple[Text, list[str]]:
    """Return what is left of a text, and the first of what is removed.

    Args:
        text: The text.
        removed: Numbers of lines or paragraphs, each once, in order.
        options: Options of the step.
    """
    builder, shown, between = TextBuilder(), list[str](), ""
    taken, has_text = iter([*removed, -1]), False
    first = next(taken)
    for number, line in enumerate(split_lines(text, options)):
        if number == first:
            first = next(taken)
            if len(shown) < SHOWN_LINES:
                shown.append(line)
            continue
        builder.add(between)
        builder.add(line)
        between = "\n" if options.unit == "line" else "\n\n"
        has_text = has_text or bool(line.strip())
    return builder.build() if has_text else "", shown


def find_copies(rows: Rows, copies: int) -> tuple[Rows, Rows]:
    """Return what is removed, and the group of each.

    Args:
        rows: Rows of the KEY table, in any order, [N].
        copies: Number of copies that are kept: those with the smallest ids, and in one document the first lines.
    """
    rows = rows[order_of(rows, "key", "key2", "high", "low", "line")]
    rank, first = runs(rows["key"], rows["key2"])
    removed = np.flatnonzero(rank >= copies)
    found = np.zeros(len(removed), dtype=REMOVAL)
    for column in ("row", "line"):
        found[column] = rows[column][removed]
    for column in ("high", "low"):
        found[column] = rows[column][first[removed]]
    found["score"] = 1
    groups = rows["group"][removed]
    order = np.lexsort([found["line"], found["row"], groups])
    return found[order], groups[order]


def remove_copies(
    part: int, *, state: State, stage: Stage, names: Sequence[str], spec: StepSpec, num_parts: int
) -> None:
    """Find the copies of one part of all tables, and write the table ``removed/PART`` by group."""
    rows = get_keys(state, stage.folder, names, part, num_parts, KEY)
    copies = spec.options.copies if isinstance(spec.options, Lines) else 1
    found, groups = find_copies(rows, copies)
    put_table(state, f"{stage.whole_folder}/removed/{part:05d}", found, groups, len(names))


def _key(text: str) -> tuple[int, int]:
    value = xxhash.xxh3_128_intdigest(text.encode("utf-8", "surrogatepass"))
    return value >> 64, value & _LOW


def _key_of(portions: Iterable[str]) -> tuple[int, int]:
    """Return the key of the text that the portions are."""
    state = xxhash.xxh3_128()
    for portion in portions:
        state.update(portion.encode("utf-8", "surrogatepass"))
    return state.intdigest() >> 64, state.intdigest() & _LOW
