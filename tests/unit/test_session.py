import os
import socket

import pytest

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
        ("127.0.0.1:99999", "does not answer"),
    ],
)
def test_addresses_that_cannot_be_joined_are_refused(address, rule):
    with pytest.raises(ConfigError, match=rule):
        open_session(address)


def test_dead_head_is_refused_by_address_and_when_the_environment_names_it():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ConfigError, match=rf"address='{dead}' does not answer"):
        open_session(dead)
    os.environ["RAY_ADDRESS"] = dead
    with pytest.raises(ConfigError, match=rf"address='{dead}' does not answer"):
        open_session("auto")
