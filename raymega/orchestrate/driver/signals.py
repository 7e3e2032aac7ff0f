"""Handles Ctrl-C and SIGTERM: the first asks the run to stop and save, the second ends it at once.

``ray.init`` replaces the SIGTERM handler, so install these handlers after it.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signals(request_stop: Callable[[], None]) -> Iterator[None]:
    """Call ``request_stop`` at the first signal during the body, raise at the second.

    Python runs signal handlers in the main thread only; in another thread this does nothing.

    Raises:
        KeyboardInterrupt: At the second signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []

    # runs between two bytecodes of the main thread, so it must not block
    def handle(number: int, _frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        log.warning("%s: saving and stopping; once more ends at once", signal.Signals(number).name)
        request_stop()

    before = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
