"""Host memory for a rank's snapshots, shared with its node's snapshot server.

The rank copies into shared memory that the snapshot server maps, so one copy serves both and outlives the rank's
process. ``snapshots/writer.py`` knows which snapshots are whole.
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
    """Two buffers in turn: the newest whole snapshot stays unchanged while the next one is copied.

    When the snapshot server cannot map them or is lost, one private buffer is enough: snapshot servers then have copies.
    """

    def __init__(
        self, server: RemoteMemoryStore | None, shared: SharedMemories, *, owner: str
    ) -> None:
        """Make both buffers, empty.

        Args:
            server: Snapshot server of this rank's node; None when it is lost.
            shared: Shared memory to allocate from.
            owner: Prefix of the names of all objects that the rank writes.
        """
        self._server, self._owner = server, owner
        self._buffers = [HostCopy(shared), HostCopy(shared)]
        self._steps = [0, 0]

    @property
    def num_bytes(self) -> int:
        """Host memory of all buffers in bytes."""
        return sum(buffer.num_bytes for buffer in self._buffers)

    def all(self) -> list[HostCopy]:
        """Return the buffers that :meth:`free` will return in turn; call it before the first snapshot."""
        first = self.free(whole_step=0)
        return [first, *(self._buffers[1:] if self._is_seen() else ())]

    def free(self, *, whole_step: int, step: int = 0) -> HostCopy:
        """Return a buffer that may be overwritten; the snapshot server drops the objects that were in it.

        Call it only while nothing is being written.

        Args:
            whole_step: Step of the newest whole snapshot, whose buffer is kept; 0 when there is none.
            step: Step of the snapshot to be copied; 0 when the buffer is only lent for other data.
        """
        # Shared: the buffer that does not hold the newest whole snapshot.
        if self._is_seen():
            number = int(bool(whole_step) and self._steps[0] == whole_step)
            if self._forgets(self._steps[number]):
                self._steps[number] = step
                return self._buffers[number]
        # No longer shared: leave the old memory to what still refers to it, and take a private buffer.
        if self._buffers[0].is_shared or len(self._buffers) > 1:
            self._server, self._buffers = None, [HostCopy()]
        return self._buffers[0]

    def _is_seen(self) -> bool:
        # A buffer in private memory means that shared memory ran out.
        is_private = any(buffer.num_bytes and not buffer.is_shared for buffer in self._buffers)
        return self._server is not None and self._server.is_sharing and not is_private

    def _forgets(self, step: int) -> bool:
        # The snapshot server's views of that memory must be gone before it is overwritten.
        try:
            if self._server and step:
                self._server.clear(folder_of(step) + self._owner)
        except RaymegaError as error:
            log.warning("snapshots: %s", error)
            return False
        return True
