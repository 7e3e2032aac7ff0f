"""Keeps a share of the documents, by source, drawn by a hash of their ids."""

from __future__ import annotations

from fnmatch import fnmatchcase

from raymega.curate.document import CuratedDocument
from raymega.curate.options import Sample
from raymega.curate.steps.step import KEPT, Outcome
from raymega.prepare.sources import hash_of


def uniform(identity: str, purpose: str) -> float:
    """Return a number of [0, 1) that depends on an id and a purpose alone."""
    return hash_of(identity, purpose) / 2**64


class SampleStep:
    """The step ``sample``."""

    def __init__(self, options: Sample) -> None:
        """Take over the shares."""
        self._options = options

    def apply(self, document: CuratedDocument) -> Outcome:
        """Remove a document that is not drawn."""
        options = self._options
        name = document.source.rpartition("@")[0]
        shares = (rate for like, rate in options.sources.items() if fnmatchcase(name, like))
        rate = next(shares, options.rate)
        if uniform(document.id, f"sample{options.seed}"[:16]) < rate:
            return KEPT
        return Outcome("not drawn", is_removed=True)
