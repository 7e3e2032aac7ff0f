"""A network on this machine: namespaces on one bridge, each with an address and a cable that can be pulled.

It takes root on Linux, and leaves nothing behind. What runs in a namespace is the sandbox's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from raymega.glibc import enter_network_namespace

NAMESPACES = Path("/run/netns")
TIMEOUT_S = 20.0


def missing() -> str:
    """Why no such network can be made here; '' when it can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "making network namespaces takes root"
    if shutil.which("ip") is None:
        return "there is no `ip` command (iproute2)"
    try:
        Network().close()
    except (OSError, subprocess.SubprocessError) as error:
        return f"namespaces cannot be made ({' '.join(str(error).split())})"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Socket:
    """Where a node is plugged in: a namespace, its address, and the bridge's end of its cable."""

    namespace: str
    address: str
    cable: str

    @contextmanager
    def inside(self) -> Iterator[None]:
        """This thread, and what it starts, are in the namespace for the body."""
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
    """One bridge; its names and addresses are this process's own, so that several can be at work."""

    def __init__(self) -> None:
        """Put it up, with nothing plugged in."""
        pid = os.getpid()
        self._bridge, self._net = f"rmb{pid}", f"10.{100 + pid % 100}.{pid // 100 % 250}"
        self._sockets: list[Socket] = []
        self._num = 0
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.gateway}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")

    @property
    def gateway(self) -> str:
        """The address of this machine's own end."""
        return f"{self._net}.1"

    def plug_in(self) -> Socket:
        """One more namespace, which reaches the gateway and all others."""
        self._num += 1
        name = f"{self._bridge}n{self._num}"
        socket = Socket(namespace=name, address=f"{self._net}.{1 + self._num}", cable=f"{name}c")
        _ip("netns", "add", name)
        self._sockets.append(socket)
        _ip("link", "add", socket.cable, "type", "veth", "peer", "eth0", "netns", name)
        _ip("link", "set", socket.cable, "master", self._bridge, "up")
        for words in (
            "link set lo up",
            f"addr add {socket.address}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {self.gateway}",
        ):
            _ip("-n", name, *words.split())
        return socket

    def pull(self, socket: Socket) -> None:
        """Nothing comes through its cable any more, and nobody is told."""
        _ip("link", "set", socket.cable, "down")

    def unplug(self, socket: Socket) -> None:
        """Take the namespace away; whatever ran in it has ended."""
        self._sockets.remove(socket)
        for words in (("link", "del", socket.cable), ("netns", "del", socket.namespace)):
            with suppress(subprocess.CalledProcessError):  # the one may go with the other
                _ip(*words)

    def close(self) -> None:
        """Leave nothing."""
        for socket in tuple(self._sockets):
            self.unplug(socket)
        _ip("link", "del", self._bridge)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=TIMEOUT_S)
