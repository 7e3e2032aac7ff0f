"""Cuts the text of evaluation tasks out of documents: 13 equal words in a row, and 200 characters around.

The method is that of GPT-3 (Brown et al. 2020, appendix C), which MT-NLG took over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import BytesIO
from itertools import pairwise
from typing import Any

import numpy as np

from raymega.curate.document import CuratedDocument
from raymega.curate.options import Decontaminate
from raymega.curate.steps.step import KEPT, Outcome
from raymega.curate.tokens import Hashes, Positions, shingles, token_blocks, tokenize
from raymega.prepare.readers.long_text import Text, TextBuilder

LEAST_WORDS = 8
"""Least number of words of a task that is looked for as a whole (GPT-3)."""

LOOKED_AT = 256
"""Number of characters in which the end of white space is looked for at once."""


def hash_tasks(texts: Iterable[str], num_words: int) -> bytes:
    """Return the hashes of all runs of words in the texts of tasks, as an ``.npz`` file.

    A text of fewer words than ``num_words`` counts as a whole, if it has at least 8.
    """
    found: dict[int, list[Hashes]] = {}
    for text in texts:
        hashes = tokenize(text).hashes
        if len(hashes) >= LEAST_WORDS:
            found.setdefault(min(num_words, len(hashes)), []).append(shingles(hashes, num_words))
    buffer = BytesIO()
    arrays: Any = {str(n): np.unique(np.concatenate(found[n])) for n in sorted(found)}
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def task_texts(name: str, content: str) -> Iterator[str]:
    """Yield the texts of a task file: every string of .jsonl and .json, every line of another.

    Neighbouring lines of a text also count as one, so that a run across a line end is found.
    """
    if name.endswith(".json"):
        # objects that follow each other, one a line, are read as .jsonl
        with suppress(json.JSONDecodeError):
            yield from _strings(json.loads(content))
            return
    elif not name.endswith((".jsonl", ".ndjson")):
        yield content
        yield from content.splitlines()
        return
    # JSON may hold the other line ends that Python knows, such as U+2028.
    for line in content.split("\n"):
        if line.strip():
            yield from _strings(json.loads(line))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)


class DecontaminateStep:
    """The step ``decontaminate``."""

    def __init__(self, options: Decontaminate, tasks: bytes) -> None:
        """Take over the hashes that :func:`hash_tasks` made."""
        self._options = options
        with np.load(BytesIO(tasks)) as arrays:
            self._hashes = {int(name): arrays[name] for name in arrays}

    def apply(self, document: CuratedDocument) -> Outcome:
        """Cut the hits out; remove the document if little or too many pieces are left."""
        spans = self._spans(document.text)
        if not len(spans):
            return KEPT
        options, text = self._options, document.text
        # What lies between the hits with their surroundings.
        borders = [0, *_merged(spans, options.window, len(text)), len(text)]
        pieces = [_stripped(text, *piece) for piece in list(pairwise(borders))[::2]]
        kept = [
            (start, end) for start, end in pieces if end - start >= max(options.min_characters, 1)
        ]
        first = slice(max(int(spans[0][0]) - 20, 0), int(spans[0][1]) + 20)
        if not kept or len(pieces) > options.max_pieces:
            return Outcome("task text, removed", is_removed=True, shown=text[first])
        builder = TextBuilder()
        for number, (start, end) in enumerate(kept):
            builder.add("\n\n" if number else "")
            builder.add_slice(text, start, end)
        document.text = builder.build()
        document.reasons.append(f"decontaminate: {len(spans)} runs of words")
        return Outcome("task text, cut out", shown=text[first])

    def _spans(self, text: Text) -> Positions:
        """Return the first character of each hit and the one after it, [N, 2], in order."""
        spans, kept = [np.zeros((0, 2), dtype=np.int64)], max(self._hashes, default=1) - 1
        for block, num_old in token_blocks(text, kept=kept):
            for num_words, wanted in self._hashes.items():
                # Runs that end in the block before were looked for there.
                tokens = block.since(max(num_old - num_words + 1, 0))
                if len(tokens.hashes) < num_words or not len(wanted):
                    continue
                hashes = shingles(tokens.hashes, num_words)
                places = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
                hits = np.flatnonzero(wanted[places] == hashes)
                ends = tokens.ends[hits + num_words - 1]
                spans.append(np.stack([tokens.starts[hits], ends], axis=1))
        found = np.concatenate(spans)
        return found[np.lexsort(found.T[::-1])]


def _stripped(text: Text, start: int, end: int) -> tuple[int, int]:
    """Return the borders of a piece of a text without white space at its ends."""
    while start < end and not (left := text[start : min(start + LOOKED_AT, end)].lstrip()):
        start = min(start + LOOKED_AT, end)
    if start < end:
        start = min(start + LOOKED_AT, end) - len(left)
    while start < end and not (left := text[max(end - LOOKED_AT, start) : end].rstrip()):
        end = max(end - LOOKED_AT, start)
    return start, max(end - LOOKED_AT, start) + len(left) if start < end else end


def _merged(spans: Positions, window: int, length: int) -> Iterator[int]:
    """Yield start and end of each range to cut, joined where they overlap."""
    start, end = -1, -1
    for first, last in spans.tolist():
        first, last = max(first - window, 0), min(last + window, length)
        if first > end:
            if end >= 0:
                yield from (start, end)
            start = first
        end = max(end, last)
    yield from (start, end)
