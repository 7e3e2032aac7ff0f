"""The driver's clock: an argument everywhere, so that tests run without waiting."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Two readings; both return at once."""

    def monotonic(self) -> float:
        """Seconds from an unknown start, never backwards: for durations and deadlines."""

    def timestamp(self) -> str:
        """The date and time in UTC, ISO 8601: for records that people read."""


class SystemClock:
    """The machine's."""

    def monotonic(self) -> float:
        """See Clock."""
        return time.monotonic()

    def timestamp(self) -> str:
        """See Clock."""
        return datetime.now(UTC).isoformat(timespec="seconds")
