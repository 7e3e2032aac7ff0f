"""Connections that a world has opened, so that an abort can cut them; it owns no group and sends nothing.

gloo cannot give up a transfer: it ends when the peer lets go or its process ends, and a machine that stands
still does neither. A connection that is shut down fails whatever waits on it, on both of its sides.
Linux tells a process its sockets. Elsewhere there are none to cut, and such a wait ends with its timeout.
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
    """Sockets of this process that are a world's: those that came while it was built."""

    _before: frozenset[str] = frozenset()
    _opened: frozenset[str] = field(default=frozenset())

    def begin(self) -> None:
        """A world is about to be opened."""
        self._before, self._opened = frozenset(_sockets()), frozenset()

    def built(self) -> None:
        """All connections are there: what is opened from now on belongs to others."""
        self._opened = frozenset(_sockets()) - self._before

    def cut(self) -> None:
        """Shut them down; does nothing before they are all there, or a second time."""
        found, opened, self._opened = _sockets(), self._opened, frozenset()
        ports = {_port(found[name]) for name in found.keys() - opened if _is_listening(found[name])}
        for name in opened & found.keys():
            if _port(found[name]) not in ports:  # who called a server that was there before
                _shut_down(found[name], name)


def _sockets() -> dict[str, int]:
    """By the kernel's name, such as ``socket:[1234]``, which no later one gets, the descriptor."""
    found = {}
    with suppress(FileNotFoundError):
        for entry in OWN_FILES.iterdir():
            with suppress(OSError):  # closed meanwhile
                name = str(entry.readlink())
                if name.startswith("socket:"):
                    found[name] = int(entry.name)
    return found


def _port(descriptor: int) -> int:
    """Of this side of a TCP connection or server; -1 for whatever else it may be by now."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
        if found.family in (socket.AF_INET, socket.AF_INET6):
            return int(found.getsockname()[1])
    return -1


def _is_listening(descriptor: int) -> bool:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
        return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def _shut_down(descriptor: int, name: str) -> None:
    """Of a TCP connection; the descriptor may have been closed, and be another's by now."""
    if _port(descriptor) < 0 or _is_listening(descriptor):
        return
    with suppress(OSError):
        mine = os.dup(descriptor)
        with socket.socket(fileno=mine) as connection:
            if str((OWN_FILES / str(mine)).readlink()) == name:
                connection.shutdown(socket.SHUT_RDWR)
