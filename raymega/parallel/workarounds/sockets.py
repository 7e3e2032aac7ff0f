"""The sockets that a world has opened, so that an abort can shut them down.

gloo cannot abort a transfer: it ends when the peer closes the connection or its process ends, and a hung
machine does neither. A connection that is shut down fails all that waits on it, on both sides. Linux lists
a process's sockets in /proc. Elsewhere there are none to shut down, and such a wait ends with its timeout.
Goes when gloo can abort a transfer.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

OWN_FILES = Path("/proc/self/fd")


@dataclass(slots=True)
class Connections:
    """Sockets of this process that belong to a world: those that appeared while it was built."""

    _before: frozenset[str] = frozenset()
    _opened: frozenset[str] = field(default=frozenset())

    def begin(self) -> None:
        """Note the sockets that exist before a world is opened."""
        self._before, self._opened = frozenset(_sockets()), frozenset()

    def built(self) -> None:
        """Note that all connections of the world exist: later sockets are not its own."""
        self._opened = frozenset(_sockets()) - self._before

    def cut(self) -> None:
        """Shut the world's connections down; do nothing before :meth:`built`, or a second time."""
        found, opened, self._opened = _sockets(), self._opened, frozenset()
        # Connections that a client made meanwhile to an older server of this process are not the world's.
        ports = {_port(found[name]) for name in found.keys() - opened if _is_listening(found[name])}
        for name in opened & found.keys():
            if _port(found[name]) not in ports:
                _shut_down(found[name], name)


def _sockets() -> dict[str, int]:
    """Return the descriptors of this process's sockets by unique kernel name, such as ``socket:[1234]``."""
    found = {}
    with suppress(FileNotFoundError):
        for entry in OWN_FILES.iterdir():
            with suppress(OSError):  # closed meanwhile
                name = str(entry.readlink())
                if name.startswith("socket:"):
                    found[name] = int(entry.name)
    return found


def _port(descriptor: int) -> int:
    """Return the local port of a TCP socket; -1 if the descriptor is no longer one."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
        if found.family in (socket.AF_INET, socket.AF_INET6):
            return int(found.getsockname()[1])
    return -1


def _is_listening(descriptor: int) -> bool:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
        return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def _shut_down(descriptor: int, name: str) -> None:
    """Shut a TCP connection down, unless its descriptor was closed and reused meanwhile."""
    if _port(descriptor) < 0 or _is_listening(descriptor):
        return
    with suppress(OSError):
        # The duplicate cannot be reused by others, so its name stays valid from the check to the shutdown.
        mine = os.dup(descriptor)
        with socket.socket(fileno=mine) as connection:
            if str((OWN_FILES / str(mine)).readlink()) == name:
                connection.shutdown(socket.SHUT_RDWR)
