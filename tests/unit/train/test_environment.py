"""Which network card gloo is told to listen on."""

import os
import socket
import sys

import pytest

from raymega.train.environment import listen_towards

VARIABLE = "GLOO_SOCKET_IFNAME"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cards are asked as Linux answers")


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)


def test_loopback_leads_to_loopback():
    listen_towards("127.0.0.1:1")
    assert os.environ[VARIABLE] == "lo"


def test_card_is_the_one_that_leads_there_whatever_the_machines_name_resolves_to(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.99", 1))
        except OSError:
            pytest.skip("no network")
    listen_towards("192.0.2.99:1")
    assert os.environ[VARIABLE] in {name for _, name in socket.if_nameindex()} - {"lo"}


def test_users_choice_is_kept(monkeypatch):
    monkeypatch.setenv(VARIABLE, "mine")
    listen_towards("127.0.0.1:1")
    assert os.environ[VARIABLE] == "mine"
