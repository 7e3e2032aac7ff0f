"""Numbers that go to a device keep all their bits, and a copy is waited for."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch

from raymega.parallel.core.host_copies import HostMemory, to_device


def test_numbers_of_a_step_are_float64():
    numbers = [1 / 3, 2.0**53 - 1, 1e300, 0.0]
    found = to_device(numbers, torch.device("cpu"))
    assert found.tolist() == numbers
    assert found.dtype == torch.float64


def test_a_copy_on_a_stream_is_waited_for_by_an_event_behind_it(monkeypatch):
    """As on a GPU, of which only the order of calls is told here."""
    told = []

    def fake(name, *calls):
        return SimpleNamespace(
            **{call: lambda *_, call=call, **__: told.append(f"{name}: {call}") for call in calls}
        )

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: fake("compute", "wait_event"))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda: fake("done", "record", "synchronize"))
    memory = HostMemory(torch.device("cpu"))
    memory._out = fake("out", "wait_stream")
    source, target = fake("source", "record_stream"), fake("target", "copy_", "data_ptr")
    copy = memory.start_out(source, target)
    assert told[1:] == [
        "out: wait_stream",
        "target: copy_",
        "done: record",
        "source: record_stream",
    ]
    copy.wait()
    copy.wait_on_host()
    assert told[5:] == ["compute: wait_event", "done: synchronize"]
