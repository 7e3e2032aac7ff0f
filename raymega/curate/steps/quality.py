"""Removes documents, and for C4 lines, that break the published rules of quality."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash

from raymega.curate.document import CuratedDocument
from raymega.curate.options import Quality
from raymega.curate.rules import c4, fineweb, gopher
from raymega.curate.rules.words import Words
from raymega.curate.steps.step import KEPT, Outcome
from raymega.prepare.readers.long_text import LongText, Text, split_lines

MOST_CHARACTERS = 16_000_000
"""Length of the text that rules on words look at."""


class QualityStep:
    """The step ``quality``."""

    def __init__(self, options: Quality) -> None:
        """Take over which rules are asked."""
        self._options = options

    def apply(self, document: CuratedDocument) -> Outcome:
        """Ask the families in order; the first broken rule removes the document."""
        options, before = self._options, document.text
        # Without the step language no language is known, and all documents are asked about.
        if document.language and options.languages and document.language not in options.languages:
            return KEPT
        for family in options.rules:
            if family == "c4":
                text, broken = c4.clean_page(document.text, options)
                document.text = document.text if broken else text
            else:
                broken = next(self._broken(family, document.text), "")
            if broken:
                document.text = before
                return Outcome(broken, is_removed=True)
        if document.text == before:
            return KEPT
        shown = _first_lost(before, document.text)
        document.reasons.append("quality: c4 lines")
        return Outcome("c4 lines", shown=shown)

    def _broken(self, family: str, text: Text) -> Iterator[str]:
        # What is longer than any limit of a word count decides by its beginning, to bound the memory.
        words = Words(text[:MOST_CHARACTERS])
        if family == "gopher":
            yield from gopher.broken_rules(words, self._options)
        elif family == "gopher_repetition":
            yield from gopher.broken_repetition_rules(words)
        else:
            yield from fineweb.broken_rules(words)


def _first_lost(before: Text, after: Text) -> str:
    """Return the first line of a text that is none of those of another, or empty."""
    lost = split_lines(before)
    if not isinstance(after, LongText):
        kept = set(after.splitlines())
        return next((line for line in lost if line.strip() not in kept), "")
    # By hashes of eight bytes, as a string of Python has ten times the size.
    hashes = np.fromiter(map(_hash, split_lines(after)), dtype=np.uint64)
    hashes.sort()
    for line in lost:
        wanted = np.uint64(_hash(line.strip()))
        at = int(np.searchsorted(hashes, wanted))
        if at == len(hashes) or hashes[at] != wanted:
            return line
    return ""


def _hash(line: str) -> int:
    return xxhash.xxh3_64_intdigest(line.encode("utf-8", "surrogatepass"))
