"""NamedRecorder calls the recorder of a plug-in, and names plug-in and line where it raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from raymega.errors import ConfigError
from raymega.plugins import Plugin, plugin_error
from raymega.tracking.queued_sink import Recorder
from raymega.tracking.sink import Stamped

T = TypeVar("T")


class NamedRecorder:
    """Recorder of a plug-in; an OSError is the tracker's, and passes as it is."""

    def __init__(self, row: Plugin, open_recorder: Callable[[], Recorder]) -> None:
        """Open the recorder of ``row``."""
        self._row = row
        self._inner: Recorder = self._call(open_recorder)

    def record(self, batch: Sequence[Stamped]) -> None:
        """Write the batch."""
        self._call(lambda: self._inner.record(batch))

    def close(self) -> None:
        """Close the recorder."""
        self._call(self._inner.close)

    def is_refusal(self, error: Exception) -> bool:
        """Return whether an error would come again; one of the plug-in's code does."""
        return isinstance(error, ConfigError) or self._call(lambda: self._inner.is_refusal(error))

    def _call(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except OSError:
            raise
        except Exception as error:
            raise plugin_error(self._row, error) from error
