"""No name server is asked while torch makes its store, and all are afterwards."""

import socket
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from raymega.parallel.groups import host_store
from raymega.parallel.name_lookups import TRIES, _resolver_state, without_name_lookups

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="of glibc's resolver")


def test_name_server_is_asked_again_after_the_body():
    state = _resolver_state()
    before = state[TRIES]
    assert before > 0
    with pytest.raises(KeyError), without_name_lookups():
        assert state[TRIES] == 0
        raise KeyError
    assert state[TRIES] == before


def test_lookup_in_the_body_fails_at_once_and_names_of_the_hosts_file_are_found():
    started = time.monotonic()
    with without_name_lookups():
        with pytest.raises(socket.gaierror):
            socket.getaddrinfo("no-such-host.invalid", 80)
        assert socket.getaddrinfo("localhost", 80)
    assert time.monotonic() - started < 1.0


def test_other_threads_go_on_asking():
    seen = []
    with without_name_lookups():
        thread = threading.Thread(target=lambda: seen.append(_resolver_state()[TRIES]))
        thread.start()
        thread.join(10)
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

    monkeypatch.setattr("raymega.parallel.groups.without_name_lookups", body)
    monkeypatch.setattr("raymega.parallel.groups.TCPStore", make_store)
    assert host_store("192.0.2.1")[0] == "192.0.2.1:1"
    assert seen == ["in", "store", "out"]
