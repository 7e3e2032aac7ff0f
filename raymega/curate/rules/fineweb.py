"""Rules that FineWeb adds (Penedo et al. 2024, section 3.6), and the share of line ends of its code."""

from __future__ import annotations

from collections.abc import Iterator

from raymega.curate.rules.words import Words, repeats

# Marks that end a sentence, in the scripts that have their own.
END_MARKS = tuple(
    ".?!\u0589\u061d\u061e\u061f\u06d4\u0700\u0701\u0702\u0964\u0965\u104a\u104b\u1362\u1367\u1368\u17d4\u17d5"
    "\u203c\u203d\u2047\u2048\u2049\u2e2e\u3002\ufe52\ufe56\ufe57\uff01\uff0e\uff1f\uff61"
)
SHORT_LINE = 30


def broken_rules(words: Words) -> Iterator[str]:
    """Yield the names of the rules that a text breaks."""
    lines = [line for line in words.text.split("\n") if line.strip()]
    if not lines:
        yield "fineweb no lines"
        return
    if sum(line.endswith(END_MARKS) for line in lines) / len(lines) < 0.12:
        yield "fineweb lines without end mark"
    if sum(len(line) <= SHORT_LINE for line in lines) / len(lines) > 0.67:
        yield "fineweb short lines"
    num_characters = len(words.text) - words.text.count("\n")
    if repeats(lines)[1] / num_characters > 0.1:
        yield "fineweb characters in repeated lines"
    if words.text.count("\n") / max(len(words.words), 1) > 0.3:
        yield "fineweb line ends"
