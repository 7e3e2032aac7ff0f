"""Counts what each step took, with examples; sums do not depend on the order of the tasks.

It owns the content of a group's record and of ``_report/counts.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from raymega.curate.document import CuratedDocument
from raymega.prepare.readers.long_text import utf8_bytes
from raymega.prepare.sources import hash_of

NUM_EXAMPLES = 20
SHOWN_CHARACTERS = 300


@dataclass(kw_only=True, slots=True)
class StepTally:
    """Counts of one step.

    Attributes:
        name: Name of the step; ``read`` for the reading of files.
        documents_in: Number of documents that came.
        documents_out: Number of documents that were kept.
        documents_changed: Number of those kept that were changed.
        bytes_in: Text that came, in bytes of UTF-8.
        bytes_out: Text that was kept.
        cpu_s: CPU seconds, which no result depends on.
        reasons: Number of documents by reason.
        examples: Up to 20 documents that were removed or changed, drawn by a hash of their ids.
    """

    name: str
    documents_in: int = 0
    documents_out: int = 0
    documents_changed: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    cpu_s: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)
    examples: list[dict[str, Any]] = field(default_factory=list)

    def count(self, before: int, after: int, *, reason: str, is_removed: bool) -> None:
        """Count a document of ``before`` bytes that has ``after`` now."""
        self.documents_in += 1
        self.bytes_in += before
        if reason:
            increase(self.reasons, {reason: 1})
        if is_removed:
            return
        self.documents_out += 1
        self.bytes_out += after
        self.documents_changed += bool(reason)

    def show(self, document: CuratedDocument, *, reason: str, text: str, of: str = "") -> None:
        """Keep the document as an example if it is drawn."""
        drawn = hash_of(document.id, "example")
        if len(self.examples) >= NUM_EXAMPLES and drawn >= self.examples[-1]["drawn"]:
            return
        shown = text or document.text[:SHOWN_CHARACTERS]
        self.examples.append(
            {
                "drawn": drawn, "id": document.id, "source": document.source, "reason": reason, "of": of,
                "text": shown[:SHOWN_CHARACTERS].encode("utf-8", "replace").decode(),
            }
        )  # fmt: skip
        self._choose()

    def add(self, other: StepTally) -> None:
        """Add the counts of another group."""
        for name in (
            "documents_in",
            "documents_out",
            "documents_changed",
            "bytes_in",
            "bytes_out",
            "cpu_s",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        increase(self.reasons, other.reasons)
        self.examples += other.examples
        self._choose()

    def _choose(self) -> None:
        self.examples = sorted(self.examples, key=lambda each: (each["drawn"], each["id"]))[
            :NUM_EXAMPLES
        ]


@dataclass(kw_only=True, slots=True)
class Tally:
    """Counts of all steps of a stage, and of the documents before and behind it.

    Attributes:
        steps: Counts by name of the step, in order.
        languages: Documents and bytes behind the stage, by language.
        lengths: Number of documents behind the stage, by the bits of their size in bytes.
        lengths_read: The same of the documents that were read.
        num_bad: Number of bad lines.
        stored_bytes: Size of the group's Parquet.
    """

    steps: dict[str, StepTally] = field(default_factory=dict)
    languages: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    lengths_read: dict[str, int] = field(default_factory=dict)
    num_bad: int = 0
    stored_bytes: int = 0

    def step(self, name: str) -> StepTally:
        """Return the counts of a step, new ones if there are none."""
        return self.steps.setdefault(name, StepTally(name=name))

    def count_result(self, document: CuratedDocument) -> None:
        """Count a document that leaves the stage."""
        size = utf8_bytes(document.text)
        counts = self.languages.setdefault(document.language, [0, 0])
        counts[0] += 1
        counts[1] += size
        increase(self.lengths, {str(size.bit_length()): 1})

    def add(self, other: Tally, *, is_later: bool) -> None:
        """Add the counts of another group; those of a later stage replace what is known of the result."""
        for name, step in other.steps.items():
            self.step(name).add(step)
        self.num_bad += other.num_bad
        increase(self.lengths_read, other.lengths_read)
        if is_later:
            self.stored_bytes += other.stored_bytes
            increase(self.lengths, other.lengths)
            for language, (documents, size) in other.languages.items():
                counts = self.languages.setdefault(language, [0, 0])
                counts[0] += documents
                counts[1] += size

    def encode(self) -> bytes:
        """Return the bytes of a record."""
        return json.dumps(asdict(self)).encode()


def decode_tally(content: bytes) -> Tally:
    """Return the counts of a record."""
    raw = json.loads(content)
    raw["steps"] = {name: StepTally(**step) for name, step in raw["steps"].items()}
    return Tally(**raw)


def increase(counts: dict[str, int], by: Mapping[str, int]) -> None:
    """Add counts to counts of the same names."""
    for name, count in by.items():
        counts[name] = counts.get(name, 0) + count


def counts_of(tally: Tally, order: Iterable[str]) -> Mapping[str, Any]:
    """Return the content of counts.json: all but the speed, so that it is the same for every run."""
    steps = []
    for name in order:
        step = asdict(tally.step(name))
        del step["cpu_s"]
        step["reasons"] = dict(
            sorted(step["reasons"].items(), key=lambda item: (-item[1], item[0]))
        )
        for example in step["examples"]:
            del example["drawn"]
        steps.append(step)
    return {
        "steps": steps,
        "languages": dict(sorted(tally.languages.items(), key=lambda item: (-item[1][0], item[0]))),
        "lengths": {bits: tally.lengths[bits] for bits in sorted(tally.lengths, key=int)},
        "lengths_read": {
            bits: tally.lengths_read[bits] for bits in sorted(tally.lengths_read, key=int)
        },
        "bad_lines": tally.num_bad,
    }
