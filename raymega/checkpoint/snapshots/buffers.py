"""The host memory that a rank's snapshots are copied to, of which its node's keeper has a view.

So the copy of the rank's process and that of its node's keeper are one, which outlives the process. Which
snapshots are whole is snapshot_writer's to know.
"""

from __future__ import annotations

import logging

from raymega.checkpoint.format.keys import folder_of
from raymega.checkpoint.save.host_copy import HostCopy
from raymega.errors import RaymegaError
from raymega.storage.remote_memory_store import RemoteMemoryStore
from raymega.storage.shared_memory import SharedMemories

log = logging.getLogger(__name__)


class SnapshotBuffers:
    """Two, in turn: the newest whole snapshot stays as it is while the next one is copied.

    Where the keeper has no view, or is lost, one is enough: what was written from it may change.
    """

    def __init__(
        self, keeper: RemoteMemoryStore | None, shared: SharedMemories, *, owner: str
    ) -> None:
        """``keeper`` is that of the own node; ``owner`` begins the names of all that the rank writes."""
        self._keeper, self._owner = keeper, owner
        self._buffers = [HostCopy(shared), HostCopy(shared)]
        self._steps = [0, 0]

    @property
    def num_bytes(self) -> int:
        """Host memory of both."""
        return sum(buffer.num_bytes for buffer in self._buffers)

    def free(self, *, whole_step: int, step: int = 0) -> HostCopy:
        """The one for the snapshot of ``step``, where that of ``whole_step`` is the newest whole one.

        0 is none: with that it may be used for anything until it is asked for again.
        Nothing is being written. The keeper forgets what lay there.
        """
        if self._is_seen():
            number = int(bool(whole_step) and self._steps[0] == whole_step)
            if self._forgets(self._steps[number]):
                self._steps[number] = step
                return self._buffers[number]
        if self._buffers[0].is_shared or len(self._buffers) > 1:
            self._keeper, self._buffers = None, [HostCopy()]
        return self._buffers[0]

    def _is_seen(self) -> bool:
        is_private = any(buffer.num_bytes and not buffer.is_shared for buffer in self._buffers)
        return self._keeper is not None and self._keeper.is_sharing and not is_private

    def _forgets(self, step: int) -> bool:
        try:
            if self._keeper and step:
                self._keeper.clear(folder_of(step) + self._owner)
        except RaymegaError as error:
            log.warning("snapshots: %s", error)
            return False
        return True
