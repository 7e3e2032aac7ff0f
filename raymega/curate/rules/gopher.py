"""Rules of Gopher on words, lines and repetition (Rae et al. 2021, appendix A.1.1 and table A1)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from raymega.curate.options import Quality
from raymega.curate.rules.words import Words, repeats

STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
BULLETS, ELLIPSES = ("\u2022", "-"), ("...", "\u2026")
# Largest share of a document's characters by the number of words of a run.
TOP_SHARES = {2: 0.20, 3: 0.18, 4: 0.16}
REPEATED_SHARES = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
_PARAGRAPHS, _LINES = re.compile(r"\n{2,}"), re.compile(r"\n+")


def broken_rules(words: Words, options: Quality) -> Iterator[str]:
    """Yield the names of the rules on words and lines that a text breaks."""
    proper = words.proper
    if len(proper) < options.min_words:
        yield "gopher few words"
    if len(proper) > options.max_words:
        yield "gopher many words"
    if proper:
        yield from _broken_shares(words)
        if len(STOP_WORDS.intersection(words.words)) < 2:
            yield "gopher stop words"


def _broken_shares(words: Words) -> Iterator[str]:
    text, lines, num_words = words.text, words.text.splitlines(), len(words.words)
    if not 3 <= sum(map(len, words.proper)) / len(words.proper) <= 10:
        yield "gopher word length"
    with_letters = sum(any(map(str.isalpha, word)) for word in words.words)
    shares = {
        "gopher hashes": (text.count("#") / num_words, 0.1),
        "gopher ellipses": (sum(map(text.count, ELLIPSES)) / num_words, 0.1),
        "gopher bullets": (sum(line.lstrip().startswith(BULLETS) for line in lines) / len(lines), 0.9),
        "gopher lines that end in ellipses": (
            sum(line.rstrip().endswith(ELLIPSES) for line in lines) / len(lines), 0.3,
        ),
    }  # fmt: skip
    yield from (name for name, (share, limit) in shares.items() if share > limit)
    if with_letters / num_words < 0.8:
        yield "gopher words without letters"


def broken_repetition_rules(words: Words) -> Iterator[str]:
    """Yield the names of the rules on repetition that a text breaks."""
    text = words.text
    # Paragraphs, then lines: their number, and the characters in them.
    for name, parts in (
        ("paragraphs", _PARAGRAPHS.split(text.strip())),
        ("lines", _LINES.split(text)),
    ):
        number, characters = repeats(parts)
        if number / len(parts) > 0.3:
            yield f"gopher repeated {name}"
        if characters / max(len(text), 1) > 0.2:
            yield f"gopher characters in repeated {name}"
    for size, limit in TOP_SHARES.items():
        if words.top_share(size) > limit:
            yield f"gopher most frequent {size} words"
    for size, limit in REPEATED_SHARES.items():
        runs = words.runs(size)
        if len(runs) and words.repeated_share(runs, size, limit) > limit:
            yield f"gopher repeated {size} words"
