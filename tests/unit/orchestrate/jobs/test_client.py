"""Answers of a job server, by a client in its place: which are asked again, and what is told of the others."""

import pytest
import requests

from raymega.errors import StorageError
from raymega.orchestrate.jobs import client as jobs
from raymega.storage.retry import RetryPolicy

HEAD = 'Request failed with status code 500: Traceback (most recent call last):\n  File "job_head.py"\n'


class Server:
    """Job client whose answers are given; None takes the job."""

    def __init__(self, *answers):
        self.answers, self.num_asked = list(answers), 0

    def list_jobs(self):
        return []

    def submit_job(self, **_):
        self.num_asked += 1
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            raise RuntimeError(answer)


def submit(server, monkeypatch):
    monkeypatch.setattr(jobs, "RETRY", RetryPolicy(pauses_s=(1.0, 2.0), sleep=lambda _: None))
    client = object.__new__(jobs.JobsClient)
    client._client = server
    client.submit_beside("run", submission_id="run-a1", entrypoint="true")


@pytest.mark.parametrize(
    "answer",
    [
        "Request failed with status code 500: No available agent to submit job, please try again later..",
        HEAD
        + "aiohttp.client_exceptions.ClientConnectorError: Cannot connect to host 127.0.0.1:52365",
        HEAD + "aiohttp.client_exceptions.ServerDisconnectedError: Server disconnected",
    ],
)
def test_cluster_whose_agents_start_is_asked_again(monkeypatch, answer):
    server = Server(answer, answer, None)
    submit(server, monkeypatch)
    assert server.num_asked == 3


def test_job_whose_answer_was_lost_is_not_refused_as_another_ones(monkeypatch):
    server = Server(
        HEAD + "ServerDisconnectedError: Server disconnected", "Job run-a1 already exists"
    )
    submit(server, monkeypatch)
    assert server.num_asked == 2


def test_head_that_is_gone_is_told_without_a_traceback(monkeypatch):
    # requests' error of a connection is an OSError, and no ConnectionError of Python's
    gone = requests.exceptions.ConnectionError("Connection refused")
    with pytest.raises(StorageError, match="'run-a1': Connection refused;"):
        submit(Server(gone, gone, gone), monkeypatch)


def test_refusal_tells_the_cause_and_is_not_asked_again(monkeypatch):
    server = Server(HEAD + "  return 1\nOSError: [Errno 28] No space left on device")
    with pytest.raises(StorageError) as caught:
        submit(server, monkeypatch)
    assert "'run-a1': OSError: [Errno 28] No space left on device;" in str(caught.value)
    assert "Traceback" not in str(caught.value) and server.num_asked == 1
