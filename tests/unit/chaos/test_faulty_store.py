import pytest

from raymega import plugins
from raymega.chaos.faulty_store import begin_trouble, end_trouble, trouble_folders
from raymega.errors import StorageError
from raymega.storage.registry import open_store


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "_PARTS", dict(plugins._PARTS))
    trouble_folders()
    trouble_folders()
    return open_store(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "cause"),
    [("disk-full", "No space left on device"), ("store-errors", "Input/output error")],
)
def test_write_fails_while_there_is_trouble_and_leaves_nothing(store, tmp_path, kind, cause):
    store.put("a", [b"before"], overwrite=False)
    begin_trouble(tmp_path / "chaos", kind)
    with pytest.raises(StorageError, match=cause):
        store.put("b", [b"12345678"], overwrite=False)
    assert store.get("a") == b"before"
    assert [key for key in store.list("") if not key.startswith("chaos/")] == ["a"]
    assert list((tmp_path / ".partial").iterdir()) == []
    end_trouble(tmp_path / "chaos")
    store.put("b", [b"12345678"], overwrite=False)
    assert store.get("b") == b"12345678"
