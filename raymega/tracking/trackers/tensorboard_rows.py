"""Rows of a run as TensorBoard's event files, written by TensorBoard's own package.

Each driver writes a file of its own into ``tensorboard/`` of the run's folder; TensorBoard reads them as one
run. Only the sink's thread imports this module.
"""

# mypy: allow-untyped-calls
# tensorboard's package has no types.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from raymega.events import RunStarted
from raymega.tracking.trackers.series import Row

FOLDER = "tensorboard"


class TensorboardRows:
    """RowStore of TensorBoard: a scalar for each metric, in float32."""

    def __init__(self, folder: Path) -> None:
        """Write into ``folder``/tensorboard."""
        self._folder = folder / FOLDER
        self._writer: Any = None  # Any: a class without types

    def last_steps(self) -> Mapping[str, int]:
        """Return the last step of each scalar; a record that a killed driver has torn ends its file."""
        found: dict[str, int] = {}
        for path in sorted(self._folder.glob("events.out.tfevents.*")):
            for event in LegacyEventFileLoader(str(path)).Load():
                for value in event.summary.value:
                    found[value.tag] = max(event.step, found.get(value.tag, -1))
        return found

    def open(self, event: RunStarted) -> None:
        """Begin a file, whose name has the driver's time and process."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(self._folder), filename_suffix=f".{event.step}")

    def write(self, rows: Sequence[Row]) -> None:
        """Write and flush the rows."""
        for row in rows:
            values = [Summary.Value(tag=n, simple_value=v) for n, v in row.metrics.items()]
            self._writer.add_event(
                Event(step=row.step, wall_time=row.time_s, summary=Summary(value=values))
            )
        self._writer.flush()

    def close(self, *, has_failed: bool) -> None:  # noqa: ARG002 - TensorBoard knows no state
        """Close the file."""
        self._writer.close()
