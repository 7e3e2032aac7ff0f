import os
import socket
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest

from raymega import ray_private, session
from raymega.errors import ConfigError
from raymega.session import open_session


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ, "RAY_ADDRESS": ""})


@pytest.mark.parametrize(
    "address, rule",
    [
        ("ray://head:10001", "not a remote client"),
        ("http://head:8265", "not a remote client"),
        ("head", "not of the form HOST:PORT"),
        ("head:x", "not of the form HOST:PORT"),
        ("127.0.0.1:99999", "the port must be 1 to 65535"),
        ("127.0.0.1:0", "the port must be 1 to 65535"),
    ],
)
def test_addresses_that_cannot_be_joined_are_refused(address, rule):
    with pytest.raises(ConfigError, match=rule):
        open_session(address)


def test_dead_head_is_refused_by_address_and_when_the_environment_names_it():
    # bound and not listening: no other process can take the port meanwhile
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"address='{dead}' does not answer"):
            open_session(dead)
        os.environ["RAY_ADDRESS"] = dead
        with pytest.raises(ConfigError, match=rf"address='{dead}' does not answer"):
            open_session("auto")


def test_server_that_is_no_ray_head_is_refused_at_once(monkeypatch):
    """Ray tries such a port again for many minutes: the dashboard's, say."""
    monkeypatch.setattr(session, "PROBE_TIMEOUT_S", 200.0)
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(ConfigError, match="another server listens there, not a Ray head"):
            open_session(f"127.0.0.1:{server.server_port}")


@pytest.mark.parametrize("code", [None, 1], ids=["alive", "dead"])
def test_raylet_that_comes_late_is_waited_for_while_its_process_lives(code, monkeypatch):
    from ray._private import services

    answers = [{"node": "here"}, RuntimeError("not yet"), RuntimeError("not yet")]

    def get_node(*_):
        answer = answers.pop()
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(
        services, "ConsolePopen", lambda *_, **__: SimpleNamespace(poll=lambda: code)
    )
    monkeypatch.setattr(ray_private, "ASKED_AGAIN_S", 0)
    with ray_private.own_processes():
        services.ConsolePopen(["raylet"])
        if code is None:
            assert services.get_node("127.0.0.1:6379", "id") == {"node": "here"}
        else:
            with pytest.raises(RuntimeError):
                services.get_node("127.0.0.1:6379", "id")
    assert services.get_node is get_node
