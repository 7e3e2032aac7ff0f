"""Tells when a run has no loaded spare, and when it has all of them again."""

from __future__ import annotations

from raymega.events import SparesChanged


class SpareWatch:
    """Watch over a run's spares, which tells each change once."""

    def __init__(self, wanted: int) -> None:
        """Watch over ``wanted`` spares, the job's elastic.spares; 0 tells nothing."""
        self._wanted, self._told = wanted, -1

    def observe(self, ready: int, *, step: int) -> SparesChanged | None:
        """Return the news after ``step``: none of the spares is loaded, or all are; None where neither is new."""
        ready = min(ready, self._wanted)
        is_news = ready in (0, self._wanted) and ready != self._told
        if not self._wanted or not is_news:
            return None
        self._told = ready
        return SparesChanged(step=step, ready=ready, wanted=self._wanted)
