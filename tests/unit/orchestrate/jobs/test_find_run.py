"""The folder of a live run by its name, without Ray: workers that cannot answer are passed over."""

from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError, OutOfMemoryError

from raymega.errors import ConfigError
from raymega.orchestrate.jobs import find_run as module
from raymega.orchestrate.jobs.find_run import find_run

NAMED = [
    {"name": "demo/a1/rank0-tp0", "namespace": "x"},
    {"name": "demo/a2/rank0-tp0", "namespace": "y"},
]


@pytest.fixture
def answers(monkeypatch):
    """The answer of each namespace's worker."""
    found = {}

    def get(ref, timeout):
        if isinstance(found[ref], Exception):
            raise found[ref]
        return found[ref]

    def get_actor(name, namespace):
        return SimpleNamespace(run_uri=SimpleNamespace(remote=lambda: namespace))

    monkeypatch.setattr(module, "ray", SimpleNamespace(get=get, get_actor=get_actor))
    monkeypatch.setattr(module, "list_named_actors", lambda all_namespaces: NAMED)
    monkeypatch.setattr(module, "open_session", lambda *_, **__: None)
    monkeypatch.setattr(module, "close_session", lambda: None)
    return found


@pytest.mark.parametrize(
    "error",
    [ActorDiedError(), OutOfMemoryError("the node is low on memory"), GetTimeoutError()],
    ids=lambda error: type(error).__name__,
)
def test_worker_that_is_gone_tells_no_folder(error, answers):
    answers.update(x=error, y="/runs/demo")
    assert find_run("demo", address="auto") == "/runs/demo"
    answers.update(x=error, y=error)
    with pytest.raises(ConfigError, match="no run 'demo' is at work"):
        find_run("demo", address="auto")
