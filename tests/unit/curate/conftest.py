import pytest

from raymega.curate import pipeline
from raymega.prepare import groups
from tests.unit.curate.corpora import in_this_process


@pytest.fixture
def without_ray(monkeypatch):
    """Curations whose tasks run in this process, on groups of 4 KiB that are compared in 3 parts or so."""
    for module, name, value in in_this_process():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(groups, "MIN_GROUP_BYTES", 1 << 12)
    monkeypatch.setattr(pipeline, "COMPARED_BYTES", 20_000)
