"""Nodes that will be taken away: what Ray knows of drains, and how long each has left.

Who tells Ray is node_agent's; what a run does about it is the controller's.
"""

from __future__ import annotations

import logging
import time

from raymega.ray_private import drain_deadlines_ms

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0


class DrainingNodes:
    """Asks Ray once a second, from one thread."""

    def __init__(self) -> None:
        self._probed_s = -LOOK_EVERY_S
        self._seconds: dict[str, float] = {}

    def poll(self) -> dict[str, float]:
        """Seconds that are left, by node id; infinite for a drain without a deadline."""
        now_s = time.monotonic()
        if now_s - self._probed_s >= LOOK_EVERY_S:
            self._probed_s, before = now_s, self._seconds
            self._seconds = _draining_nodes()
            for node in self._seconds.keys() - before.keys():
                log.warning("node %s leaves in %.0f s", node[:8], self._seconds[node])
        return self._seconds

    def is_leaving(self, node_id: str) -> bool:
        """As of the last look."""
        return node_id in self._seconds


def _draining_nodes() -> dict[str, float]:
    """Ray's table of drains, which is private: without it a node that leaves is a node that is lost."""
    try:
        deadlines_ms = drain_deadlines_ms()
    except (AttributeError, RuntimeError) as error:
        log.debug("no table of drains: %s", error)
        return {}
    now_ms = time.time_ns() / 1e6
    return {
        node: max(0.0, (at_ms - now_ms) / 1000) if at_ms else float("inf")
        for node, at_ms in deadlines_ms.items()
    }
