"""Mends text that was decoded wrongly, by ftfy, where a cheap test says that there is something."""

from __future__ import annotations

import re

from raymega.curate.document import CuratedDocument
from raymega.curate.steps.step import KEPT, Outcome
from raymega.extras import import_extra
from raymega.prepare.readers.long_text import PORTION_BYTES, Text, TextBuilder

# What ftfy would change: signs of UTF-8 read as Latin-1 or Windows-1252, controls, entities, ligatures.
_SUSPECT = re.compile(
    "[\u00c2-\u00f4][\u0080-\u00bf\u0152\u0153\u0160\u0161\u0178\u017d\u017e\u0192\u02c6\u02dc\u2013-\u203a\u20ac\u2122]"
    "|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufb00-\ufb06\ufeff\ufff9-\ufffc]"
    "|&(?:[A-Za-z]{2,8}|#\\d{2,7}|#x[\\dA-Fa-f]{2,6});"
)
LONGEST_SIGN = 16


class Mend:
    """The step ``mend``; about 1 document in 20 of clean text goes through ftfy."""

    def __init__(self) -> None:
        """Import ftfy.

        Raises:
            ConfigError: It is not installed.
        """
        ftfy = import_extra("ftfy", extra="curate", purpose="the step mend")
        # Quotes stay as their author wrote them, and so do wide marks: they are the commas of Chinese and Japanese.
        self._config = ftfy.TextFixerConfig(
            uncurl_quotes=False, fix_character_width=False, explain=False
        )
        self._fix = ftfy.fix_text

    def apply(self, document: CuratedDocument) -> Outcome:
        """Mend the text."""
        if not _is_suspect(document.text):
            return KEPT
        mended = self._mended(document.text)
        if mended == document.text:
            return KEPT
        at = _first_difference(document.text, mended)
        shown = (
            f"{document.text[max(at - 40, 0) : at + 60]!r} -> {mended[max(at - 40, 0) : at + 60]!r}"
        )
        document.text = mended
        document.reasons.append("mend")
        return Outcome("mended", shown=shown)

    def _mended(self, text: Text) -> Text:
        if isinstance(text, str):
            return str(self._fix(text, self._config))
        # By lines, as ftfy itself does; behind the first tag it leaves entities alone.
        builder, config = TextBuilder(), self._config
        for section in text.sections():
            builder.add(self._fix(section, config))
            if "<" in section:
                config = config._replace(unescape_html=False)
        return builder.build()


def _is_suspect(text: Text) -> bool:
    if isinstance(text, str):
        return _SUSPECT.search(text) is not None
    before = ""
    for portion in text.portions():
        if _SUSPECT.search(before + portion):
            return True
        before = portion[-LONGEST_SIGN:]
    return False


def _first_difference(text: Text, mended: Text) -> int:
    """Return the first place at which two texts differ, or the end of the shorter one."""
    shorter = min(len(text), len(mended))
    for at in range(0, shorter, PORTION_BYTES):
        first, second = (each[at : at + PORTION_BYTES] for each in (text, mended))
        if first != second:
            found = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
            return at + next(found, min(len(first), len(second)))
    return shorter
