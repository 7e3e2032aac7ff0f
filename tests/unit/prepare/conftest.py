from contextlib import nullcontext

import pytest

from raymega.prepare import assembly, groups, pipeline


@pytest.fixture
def without_ray(monkeypatch):
    """Preparations whose tasks run in this process, one after the other."""
    monkeypatch.setattr(pipeline, "on_cluster", lambda items, run: map(run, items))
    monkeypatch.setattr(pipeline, "session_at", lambda _: nullcontext())


@pytest.fixture
def small_groups(monkeypatch):
    """Groups of 4 KiB and shards of 16 Ki tokens, so that a small corpus has many."""
    monkeypatch.setattr(groups, "MIN_GROUP_BYTES", 1 << 12)
    monkeypatch.setattr(assembly, "SHARD_TOKENS", 1 << 14)
