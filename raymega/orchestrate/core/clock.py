"""The driver's clock, passed as an argument everywhere so that tests run without waiting."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Source of durations and dates; both methods return at once."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start, never decreasing; for durations and deadlines."""

    def timestamp(self) -> str:
        """Return the date and time in UTC, ISO 8601; for records that people read."""


class SystemClock:
    """Clock of this machine."""

    def monotonic(self) -> float:
        """See Clock."""
        return time.monotonic()

    def timestamp(self) -> str:
        """See Clock."""
        return datetime.now(UTC).isoformat(timespec="seconds")
