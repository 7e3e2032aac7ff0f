"""Removes documents, and for C4 lines, that break the published rules of quality."""

from __future__ import annotations

from collections.abc import Iterator

from raymega.curate.document import CuratedDocument
from raymega.curate.options import Quality
from raymega.curate.rules import c4, fineweb, gopher
from raymega.curate.rules.words import Words
from raymega.curate.steps.step import KEPT, Outcome

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
        lines = set(document.text.splitlines())
        shown = next((each for each in before.splitlines() if each.strip() not in lines), "")
        document.reasons.append("quality: c4 lines")
        return Outcome("c4 lines", shown=shown)

    def _broken(self, family: str, text: str) -> Iterator[str]:
        # What is longer than any limit of a word count decides by its beginning, to bound the memory.
        words = Words(text[:MOST_CHARACTERS])
        if family == "gopher":
            yield from gopher.broken_rules(words, self._options)
        elif family == "gopher_repetition":
            yield from gopher.broken_repetition_rules(words)
        else:
            yield from fineweb.broken_rules(words)
