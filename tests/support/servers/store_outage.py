"""A server of an object store that dies, and is away for as long as its clients have not met that."""

import threading
import time
from types import SimpleNamespace

GUARD_S = 200


class Outage:
    """Outage of a server, which restarts once a failed client pauses; pauses of clients last until then.

    So no client's patience races the server's start, and none is spared.
    """

    def __init__(self, monkeypatch) -> None:
        self._is_met, self._is_over = threading.Event(), threading.Event()
        self._is_over.set()
        self._starter: threading.Thread | None = None
        pausing = SimpleNamespace(sleep=self._pause)
        monkeypatch.setattr("botocore.endpoint.time", pausing)

    def begin(self, kill, start) -> None:
        """``kill`` the server now, and have it ``start`` again later; the second death does nothing."""
        # only the first death is an outage
        if self._starter is None:
            self._is_over.clear()
            kill()
            self._starter = threading.Thread(target=self._end, args=(start,))
            self._starter.start()

    def check(self) -> None:
        """Assert that the outage began, that a client met it, and that it is over."""
        assert self._starter is not None, "nothing died"
        self._starter.join(GUARD_S)
        assert self._is_met.is_set() and self._is_over.is_set()

    def _end(self, start) -> None:
        self._is_met.wait(GUARD_S)
        start()
        self._is_over.set()

    def _pause(self, seconds) -> None:
        # a client's pause between two tries proves that it met the outage
        if not self._is_over.is_set():
            self._is_met.set()
            self._is_over.wait(GUARD_S)
        time.sleep(seconds)
