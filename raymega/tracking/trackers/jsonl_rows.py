"""Rows of a run as JSON lines: one line a row, for scripts that want each step once."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from raymega.events import RunStarted
from raymega.tracking.trackers.series import Row

FILE = "curves.jsonl"


class JsonlRows:
    """RowStore of ``curves.jsonl``: ``{"step": 3, "time_s": ..., "train/loss": ...}``; NaN is null."""

    def __init__(self, folder: Path) -> None:
        """Write into ``folder``, which exists or is created."""
        self._path = folder / FILE
        self._stream: TextIO | None = None

    def last_steps(self) -> Mapping[str, int]:
        """Return the last step of each metric in the file; a torn last line counts nowhere."""
        found: dict[str, int] = {}
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(json.JSONDecodeError):
                    row = json.loads(line)
                    found.update(dict.fromkeys(row.keys() - {"step", "time_s"}, int(row["step"])))
        return found

    def open(self, event: RunStarted) -> None:  # noqa: ARG002 - the file's folder says which run
        """Open the file at its end."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        is_torn = self._path.exists() and self._path.read_bytes()[-1:] not in (b"\n", b"")
        self._stream = self._path.open("a", encoding="utf-8")
        # The rest of a line that a killed driver began stays a line of its own.
        if is_torn:
            self._stream.write("\n")

    def write(self, rows: Sequence[Row]) -> None:
        """Write and flush the rows."""
        assert self._stream is not None, "rows come after the run was opened"
        for row in rows:
            metrics = {n: v if math.isfinite(v) else None for n, v in row.metrics.items()}
            line = {"step": row.step, "time_s": row.time_s} | metrics
            self._stream.write(json.dumps(line, allow_nan=False) + "\n")
        self._stream.flush()

    def close(self, *, has_failed: bool) -> None:  # noqa: ARG002 - the file has no state
        """Close the file."""
        assert self._stream is not None, "closed after it was opened"
        self._stream.close()
