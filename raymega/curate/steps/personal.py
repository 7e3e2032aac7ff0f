"""Masks personal data: e-mail addresses, public IP addresses and phone numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from ipaddress import ip_address

from raymega.curate.document import CuratedDocument
from raymega.curate.options import Personal
from raymega.curate.steps.step import KEPT, Outcome
from raymega.prepare.readers.long_text import PORTION_BYTES, LongText, Text, TextBuilder

_EMAIL = re.compile(
    r"(?<![\w.+%-])[A-Za-z0-9][\w.+%-]{0,63}@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}\b",
    re.ASCII,
)
# Of IPv6 the public addresses, 2000::/3, so that names of code such as Bad::Cafe are none.
_IP = re.compile(
    r"(?<![\w.:])(?:(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)|[23][0-9A-Fa-f]{3}:(?:[0-9A-Fa-f]{0,4}:){1,6}[0-9A-Fa-f]{1,4}(?![\w:]))",
    re.ASCII,
)
# An international number, or (555) 555-0123 and 555-555-0123 as they are written in North America.
_PHONE = re.compile(
    r"(?<![\w.+-])(?:\+[1-9]\d{0,2}[ .-]?(?:\(0?\d{1,4}\)[ .-]?)?\d{1,4}(?:[ .-]?\d{2,4}){2,4}"
    r"|\(\d{3}\) ?\d{3}[ .-]\d{4}|\d{3}[.-]\d{3}[.-]\d{4})(?![\w-]|\.\d)",
    re.ASCII,
)

LONGEST = 1024
"""Number of characters that no match has, with what it looks at behind it."""


class PersonalStep:
    """The step ``personal``."""

    def __init__(self, options: Personal) -> None:
        """Take over which kinds are masked by what."""
        masks: dict[str, Callable[[re.Match[str]], str]] = {
            "email": lambda _: options.email,
            "ip": lambda found: options.ip if _is_public(found[0]) else found[0],
            "phone": lambda found: options.phone if _is_long(found[0]) else found[0],
        }
        patterns = {"email": (_EMAIL, "@"), "ip": (_IP, ""), "phone": (_PHONE, "")}
        self._kinds = [(kind, *patterns[kind], masks[kind]) for kind in options.kinds]

    def apply(self, document: CuratedDocument) -> Outcome:
        """Mask what is found."""
        masked, shown = [], ""
        for kind, pattern, sign, mask in self._kinds:
            before = document.text
            if isinstance(before, LongText):
                first, text = _masked(before, pattern, mask)
            elif sign and sign not in before:
                continue
            else:
                found = pattern.search(before)
                first = found.span() if found else (0, 0)
                text = pattern.sub(mask, before) if found else before
            if first[1] and text != before:
                masked.append(kind)
                shown = shown or before[max(first[0] - 40, 0) : first[1] + 40]
                document.text = text
        if not masked:
            return KEPT
        document.reasons.append(f"personal: {', '.join(masked)}")
        return Outcome(", ".join(masked), shown=shown)


def _masked(
    text: LongText, pattern: re.Pattern[str], mask: Callable[[re.Match[str]], str]
) -> tuple[tuple[int, int], Text]:
    """Return the place of the first match and what ``pattern.sub`` makes of the text, a window at a time."""
    builder, first, at, size = TextBuilder(), (0, 0), 0, len(text)
    while at < size:
        # Matches that begin before the border end in the window, and the pattern sees what stands before.
        start, border = max(at - LONGEST, 0), min(at + PORTION_BYTES, size)
        window = text[start : border + 2 * LONGEST]
        done = at - start
        while found := pattern.search(window, done):
            if start + found.start() >= border:
                break
            # Up to its first match a text is not copied.
            if not first[1]:
                builder.add_slice(text, 0, at)
            builder.add(window[done : found.start()])
            builder.add(mask(found))
            done = found.end()
            first = first if first[1] else (start + found.start(), start + done)
        last = max(border - start, done)
        if first[1]:
            builder.add(window[done:last])
        at = start + last
    return first, builder.build() if first[1] else text


def _is_public(text: str) -> bool:
    try:
        return ip_address(text).is_global
    except ValueError:
        return False


def _is_long(text: str) -> bool:
    # E.164: at most 15 digits; fewer than 9 are more often versions and dates.
    return 9 <= sum(map(str.isdigit, text)) <= 15
