"""Rules of C4 on lines and pages (Raffel et al. 2020, section 2.2), with the later ones of its code."""

from __future__ import annotations

import re

from raymega.curate.options import Quality
from raymega.prepare.readers.long_text import Text, TextBuilder, split_lines, stripped

END_MARKS = (".", "?", "!", '"', "'")
LONGEST_WORD = 1000
POLICIES = (
    "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies",
)  # fmt: skip
_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
# A mark that ends a sentence, with the quotes and brackets behind it, before a space and a new beginning.
_SENTENCE_END = re.compile(r"[.?!]+[\"'\u201d\u2019)\]]*\s+(?=[\"'\u201c\u2018(\[]*[A-Z0-9])")
_ABBREVIATION = re.compile(
    r"(?:\b(?:[A-Za-z]|e\.g|i\.e|etc|vs|cf|Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|Inc|Ltd|Co|Corp|No|Fig|al|approx|resp))\.\s+$"
)


def clean_page(text: Text, options: Quality) -> tuple[Text, str]:
    """Return the lines that are kept, and the rule for which the whole page is removed, or empty."""
    kept, num_kept, num_sentences = TextBuilder(), 0, 0
    for line in split_lines(text):
        line = line.strip()
        if _has_long_word(line):
            continue
        num_words = len(line.split())
        if "[" in line:
            line = _CITATION.sub("", line)
        if not _is_sentence(line, num_words, options):
            continue
        small = line.lower()
        if "lorem ipsum" in small:
            return "", "c4 lorem ipsum"
        is_notice = "javascript" in small
        if not is_notice and options.refuses_brackets and "{" in line:
            return "", "c4 curly bracket"
        if is_notice or any(policy in small for policy in POLICIES):
            continue
        # Sentences cost the most, and only the first few decide.
        if num_sentences < options.min_sentences:
            num_sentences += count_sentences(line)
        kept.add(f"\n{line}" if num_kept else line)
        num_kept += 1
    if num_sentences < options.min_sentences:
        return "", "c4 few sentences"
    return stripped(kept.build()), ""


def _has_long_word(line: str) -> bool:
    return len(line) > LONGEST_WORD and max(map(len, line.split())) > LONGEST_WORD


def _is_sentence(line: str, num_words: int, options: Quality) -> bool:
    is_ended = line.endswith(END_MARKS) and not line.endswith("...")
    return (is_ended or not options.needs_punctuation) and num_words >= options.min_words_per_line


def count_sentences(line: str) -> int:
    """Return the number of sentences in a line that is not empty."""
    ends = (found.end() for found in _SENTENCE_END.finditer(line))
    return 1 + sum(_ABBREVIATION.search(line[max(end - 12, 0) : end]) is None for end in ends)
