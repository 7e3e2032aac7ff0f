"""Network connects namespaces of this machine by a bridge; each has an address and a link that can be cut.

It needs root on Linux, and removes everything at the end. `chaos/sandbox.py` runs nodes in the namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from raymega.errors import one_line
from raymega.glibc import enter_network_namespace

NAMESPACES = Path("/run/netns")
TIMEOUT_S = 20.0


def missing() -> str:
    """Return why such a network cannot be created here; '' when it can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` command (iproute2)"
    try:
        Network().close()
    except (OSError, subprocess.SubprocessError) as error:
        return f"namespaces cannot be created ({one_line(error)})"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Socket:
    """Place of a node: name of the namespace, its address, and the bridge's end of its link."""

    namespace: str
    address: str
    cable: str

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Move this thread, and the processes it starts, into the namespace for the body."""
        # Namespaces belong to threads: keep this thread's own, to return to it.
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(NAMESPACES / self.namespace, os.O_RDONLY)
        try:
            enter_network_namespace(there)
            yield
        finally:
            enter_network_namespace(own)
            os.close(own)
            os.close(there)


class Network:
    """Bridge with names and addresses derived from this process's pid, so that several can exist."""

    def __init__(self) -> None:
        """Create the bridge, without namespaces."""
        pid = os.getpid()
        self._bridge, self._net = f"rmb{pid}", f"10.{100 + pid % 100}.{pid // 100 % 250}"
        self._sockets: list[Socket] = []
        self._num = 0
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.gateway}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")

    @property
    def gateway(self) -> str:
        """Return the bridge's own address."""
        return f"{self._net}.1"

    def plug_in(self) -> Socket:
        """Add a namespace, which reaches the gateway and all other namespaces."""
        self._num += 1
        name = f"{self._bridge}n{self._num}"
        socket = Socket(namespace=name, address=f"{self._net}.{1 + self._num}", cable=f"{name}c")
        # a pair of virtual interfaces: one end on the bridge, the other in the namespace
        _ip("netns", "add", name)
        self._sockets.append(socket)
        _ip("link", "add", socket.cable, "type", "veth", "peer", "eth0", "netns", name)
        _ip("link", "set", socket.cable, "master", self._bridge, "up")
        # inside: loopback, address and default route
        for words in (
            "link set lo up",
            f"addr add {socket.address}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {self.gateway}",
        ):
            _ip("-n", name, *words.split())
        return socket

    def pull(self, socket: Socket) -> None:
        """Cut the link of a namespace: packets are dropped without any error to either side."""
        _ip("link", "set", socket.cable, "down")

    def unplug(self, socket: Socket) -> None:
        """Remove the namespace, in which no process may run any more."""
        self._sockets.remove(socket)
        for words in (("link", "del", socket.cable), ("netns", "del", socket.namespace)):
            with suppress(subprocess.CalledProcessError):  # deleting the one may delete the other
                _ip(*words)

    def close(self) -> None:
        """Remove all namespaces and the bridge."""
        for socket in tuple(self._sockets):
            self.unplug(socket)
        _ip("link", "del", self._bridge)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=TIMEOUT_S)
