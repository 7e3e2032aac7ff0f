"""Which sockets an abort cuts: a world's own connections, and nobody else's."""

import socket
import subprocess
import sys

import pytest

from raymega.parallel.workarounds.sockets import Connections


def pair(server):
    """A connection to ``server``: who called, and what it accepted."""
    caller = socket.create_connection(server.getsockname())
    return caller, server.accept()[0]


def is_open(connection):
    connection.settimeout(1.0)
    try:
        return bool(connection.send(b"x"))
    except OSError:
        return False


@pytest.fixture
def make_server():
    made = []

    def make():
        made.append(socket.create_server(("127.0.0.1", 0)))
        return made[-1]

    yield make
    for server in made:
        server.close()


def test_cuts_what_was_opened_while_the_world_was_built_and_nothing_else(make_server):
    old = make_server()
    before, _ = pair(old)
    world = Connections()
    world.begin()
    new = make_server()
    called, accepted = pair(new)
    world.built()
    after, _ = pair(new)
    world.cut()
    assert not is_open(called) and not is_open(accepted)
    assert is_open(before) and is_open(after)
    again, _ = pair(new)
    assert is_open(again), "a server goes on"
    world.cut()
    assert is_open(again)


CALLER = (
    "import socket, sys; print(socket.create_connection(('127.0.0.1', int(sys.argv[1]))).recv(1))"
)


def test_spares_who_called_a_server_that_was_there_before(make_server):
    """As the driver calls a worker's process while it builds."""
    old = make_server()
    world = Connections()
    world.begin()
    command = [sys.executable, "-c", CALLER, str(old.getsockname()[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caller:
        accepted = old.accept()[0]
        world.built()
        world.cut()
        accepted.send(b"x")
        assert caller.communicate(timeout=100)[0] == "b'x'\n"
