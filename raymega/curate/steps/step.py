"""The protocol of steps that look at one document at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from raymega.curate.document import CuratedDocument


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a step for one document.

    Attributes:
        reason: Name of the rule that removed or changed it; empty if it is as it was.
        is_removed: Whether the document is removed.
        shown: Text for the report: what was found or changed; empty is the document's beginning.
    """

    reason: str = ""
    is_removed: bool = False
    shown: str = ""


KEPT = Outcome()


class Step(Protocol):
    """Step with one method, called once for each document in any process; it blocks, and keeps no state."""

    def apply(self, document: CuratedDocument) -> Outcome:
        """Change the document in place, or say that it is removed."""
