"""Name servers are not asked while torch makes its store; pages of freed memory go back to the system."""

import ctypes
import socket
import struct
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from raymega.glibc import NUM_TRIES, _resolver_state, return_freed_memory, without_name_servers
from raymega.parallel.comm.world import host_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="of glibc's resolver")
SERVERS_AT, MAX_SERVERS, SERVER_BYTES = 20, 3, 16
"""Where name servers are in a thread's resolver state, how many, and how large one is."""
NO_SUCH_NAME = b"\x81\x83"


class NameServer:
    """Keeps what it is asked, and knows no name."""

    def __init__(self):
        self.asked, self._state = [], _resolver_state()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()

    def look_up(self, name):
        """Ask the resolver of this thread, whose only name server this is."""
        host, port = self._socket.getsockname()
        address = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port)
        address += socket.inet_aton(host)
        servers = ctypes.addressof(self._state.contents) + SERVERS_AT
        for each in range(MAX_SERVERS):
            ctypes.memmove(servers + each * SERVER_BYTES, address, len(address))
        with pytest.raises(socket.gaierror):
            socket.getaddrinfo(name, 80)

    def _serve(self):
        while True:
            query, sender = self._socket.recvfrom(4096)
            self.asked.append(query)
            self._socket.sendto(query[:2] + NO_SUCH_NAME + query[4:], sender)


def test_name_server_is_asked_again_after_the_body():
    state = _resolver_state()
    before = state[NUM_TRIES]
    assert before > 0
    with pytest.raises(KeyError), without_name_servers():
        assert state[NUM_TRIES] == 0
        raise KeyError
    assert state[NUM_TRIES] == before


def test_lookup_in_the_body_asks_nobody_and_names_of_the_hosts_file_are_found():
    server = NameServer()
    server.look_up("no-such-host.test")
    if not server.asked:
        pytest.skip("names are looked up by other means than glibc's DNS client here")
    server.asked.clear()
    with without_name_servers():
        server.look_up("no-such-host.test")
        assert socket.getaddrinfo("localhost", 80)
    assert server.asked == []


def test_other_threads_go_on_asking():
    seen = []
    with without_name_servers():
        thread = threading.Thread(target=lambda: seen.append(_resolver_state()[NUM_TRIES]))
        thread.start()
        thread.join(100)
    assert seen[0] > 0


def test_store_is_made_in_such_a_body(monkeypatch):
    seen = []

    @contextmanager
    def body():
        seen.append("in")
        yield
        seen.append("out")

    def make_store(*_args, **_settings):
        seen.append("store")
        return SimpleNamespace(port=1)

    monkeypatch.setattr("raymega.parallel.comm.world.without_name_servers", body)
    monkeypatch.setattr("raymega.parallel.comm.world.TCPStore", make_store)
    assert host_store("192.0.2.1")[0] == "192.0.2.1:1"
    assert seen == ["in", "store", "out"]


def _resident_kib(address):
    """Resident memory of the mapping that has the address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *others = line.split()
        if not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "Rss:":
            return int(others[0])
    raise AssertionError(f"no mapping has {address:#x}")


def test_memory_that_an_ended_thread_freed_goes_back_to_the_system():
    libc, num_blocks, num_bytes, lasting = ctypes.CDLL(None), 200, 1 << 16, []
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("another C library")
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]

    def work():
        blocks = [libc.malloc(num_bytes) for _ in range(num_blocks)]
        for block in blocks:
            ctypes.memset(block, 1, num_bytes)
        # a last block above the free ones keeps the heap as large as it is
        lasting.append(blocks.pop())
        for block in blocks:
            libc.free(block)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    before = _resident_kib(lasting[0])
    return_freed_memory()
    assert before - _resident_kib(lasting[0]) > 0.9 * num_blocks * num_bytes / 1024
    libc.free(lasting[0])
