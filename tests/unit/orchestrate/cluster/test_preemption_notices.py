"""Spot notices against a mock of the clouds' metadata services."""

from datetime import datetime, timedelta

import pytest

from raymega.errors import ConfigError
from raymega.orchestrate.cluster import preemption_notices
from raymega.orchestrate.cluster.preemption_notices import asker, choose_provider
from tests.support.servers.instance_metadata import metadata_mock


@pytest.fixture
def mock(monkeypatch):
    """It may be slow to answer on a busy machine."""
    monkeypatch.setattr(preemption_notices, "TIMEOUT_S", 100.0)
    with metadata_mock() as mock:
        yield mock


class Stopped(datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, _zone):
        return cls.time


@pytest.mark.parametrize("provider", ["aws", "gcp"])
def test_machine_that_stays_has_no_notice_and_one_that_goes_has_its_time(
    mock, provider, monkeypatch
):
    ask = asker(provider, address=mock.url)
    assert ask() is None and ask() is None
    mock.take_back(100)
    Stopped.time = mock.until - timedelta(seconds=100)
    monkeypatch.setattr(preemption_notices, "datetime", Stopped)
    notice = ask()
    assert notice.seconds == pytest.approx(100 if provider == "aws" else 30, abs=1)
    assert {"aws": "terminate this spot", "gcp": "Google preempts"}[provider] in notice.reason


def test_token_is_asked_for_once_and_again_when_it_has_expired(mock):
    ask = asker("aws", address=mock.url)
    ask(), ask()
    assert mock.num_tokens == 1
    mock.is_token_known = False
    mock.take_back(60)
    assert ask() is not None and mock.num_tokens == 2


def test_nobody_who_answers_is_no_notice(mock):
    mock.close()
    assert asker("aws", address=mock.url)() is None
    assert asker("gcp", address=mock.url)() is None
    assert asker("none")() is None


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe",
        b"HTTP/1.0 200 OK\r\nContent-Length: 900\r\n\r\n{",
        b"HTTP/1.0 200 OK\r\n\r\n<html>sign in</html>",
        b'HTTP/1.0 200 OK\r\n\r\n{"action": "terminate", "time": "2030-01-01T00:00:00"}',
        b'HTTP/1.0 200 OK\r\n\r\n{"action": "terminate"}',
        b"no HTTP\r\n",
    ],
)
def test_answer_that_cannot_be_read_is_no_notice_and_no_error(mock, raw):
    """The agent of a node ends Ray's process when it ends, so one torn answer took the node's ranks."""
    mock.raw = raw
    assert asker("aws", address=mock.url)() is None
    assert asker("gcp", address=mock.url)() is None


def test_provider_must_be_known():
    assert choose_provider("gcp") == "gcp"
    with pytest.raises(ConfigError, match="must be auto, aws, gcp or none"):
        choose_provider("azure")
