"""Removes pages of unwanted domains and addresses."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from raymega.curate.document import CuratedDocument
from raymega.curate.steps.step import KEPT, Outcome


class UrlsStep:
    """The step ``urls``."""

    def __init__(self, lines: Iterable[str]) -> None:
        """Take over the lines of the lists; blank ones and those that begin with # are skipped."""
        entries = {line.strip().lower() for line in lines}
        entries = {entry for entry in entries if entry and not entry.startswith("#")}
        # An address without a path is a domain too: http://example.co is not the beginning of example.com.
        entries = {entry.partition("://")[2] or entry for entry in entries}
        self._domains = {entry.removeprefix("*.") for entry in entries if "/" not in entry}
        starts = (entry.removeprefix("www.") for entry in entries if "/" in entry)
        self._starts = tuple(sorted(starts))

    def apply(self, document: CuratedDocument) -> Outcome:
        """Remove a document whose address is on a list; one without an address is kept."""
        if not document.url:
            return KEPT
        try:
            host = urlsplit(document.url).hostname or ""
        except ValueError:
            return KEPT
        # example.org stands for all below it.
        parts = host.split(".")
        if any(".".join(parts[at:]) in self._domains for at in range(len(parts))):
            return Outcome("domain", is_removed=True, shown=document.url)
        address = document.url.partition("://")[2].lower().removeprefix("www.")
        if address.startswith(self._starts) and self._starts:
            return Outcome("address", is_removed=True, shown=document.url)
        return KEPT
