from errno import EACCES, EIO
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from raymega.errors import Fault, StorageError
from raymega.storage.local import LocalStore
from raymega.storage.retry import RetryingStore, RetryPolicy, at_once
from raymega.storage.s3_errors import S3Location, failures
from raymega.storage.store import RefusedError, delete_all, folders_below, sizes_below
from tests.support.memory_store import MemoryStore

AWAY = StorageError(Fault(fact="no answer", rule="a store answers", remedy="wait"))


class Failing(MemoryStore):
    """Fails ``times`` times, after or before it has written."""

    def __init__(self, times, *, writes_first=False):
        super().__init__()
        self.times, self.writes_first = times, writes_first

    def put(self, key, chunks, *, overwrite):
        if self.times and self.writes_first:
            super().put(key, chunks, overwrite=overwrite)
        if self.times:
            self.times -= 1
            raise AWAY
        super().put(key, chunks, overwrite=overwrite)


def patient(store):
    slept = []
    return RetryingStore(store, retry=RetryPolicy(pauses_s=(1.0, 2.0), sleep=slept.append)), slept


def test_write_is_tried_again_with_pauses():
    store, slept = patient(Failing(2))
    store.put("a", iter([b"1", b"2"]), overwrite=False)
    assert store.get("a") == b"12" and slept == [1.0, 2.0]


def test_write_fails_when_patience_is_over():
    store, slept = patient(Failing(3))
    with pytest.raises(StorageError):
        store.put("a", [b"1"], overwrite=False)
    assert slept == [1.0, 2.0]


class Refusing(MemoryStore):
    """Has no right to anything."""

    def put(self, key, chunks, *, overwrite):
        raise RefusedError("AccessDenied")

    def get(self, key, *, start=0, num_bytes=-1):
        raise RefusedError("AccessDenied")

    def size(self, key):
        raise RefusedError("AccessDenied")

    def list(self, prefix):
        raise RefusedError("AccessDenied")

    def delete(self, key):
        raise RefusedError("AccessDenied")


def test_refusal_to_read_or_delete_is_an_answer_and_one_to_write_waits_for_who_corrects_it():
    """A start without the right to read hung for half a minute at each look."""
    store, slept = patient(Refusing())
    for ask in (
        lambda: store.get("a"),
        lambda: store.size("a"),
        lambda: [*store.list("a")],
        lambda: [*store.folders("")],
        lambda: store.delete("a"),
        lambda: delete_all(store, ["a", "b"]),
    ):
        with pytest.raises(RefusedError):
            ask()
    assert slept == []
    with pytest.raises(RefusedError):
        store.put("a", [b"1"], overwrite=True)
    assert slept == [1.0, 2.0]


@pytest.mark.parametrize(
    ("code", "kind"),
    [("AccessDenied", RefusedError), ("NoSuchBucket", RefusedError), ("SlowDown", StorageError)],
)
def test_refusals_of_s3_are_told_from_faults_that_pass(code, kind):
    place = S3Location(bucket="b", endpoint="http://here")
    with pytest.raises(StorageError) as told, failures("read", "a", place):
        raise ClientError({"Error": {"Code": code}}, "GetObject")
    assert type(told.value) is kind


@pytest.mark.parametrize(("cause", "kind"), [(EACCES, RefusedError), (EIO, StorageError)])
def test_refusals_of_a_folder_are_told_from_faults_that_pass(tmp_path, monkeypatch, cause, kind):
    def refuse(_path):
        raise OSError(cause, "no")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(StorageError) as told:
        LocalStore(tmp_path).delete("a")
    assert type(told.value) is kind


@pytest.mark.parametrize(
    "seconds, pauses_s",
    [(0, ()), (0.5, (1.0,)), (3.0, (1.0, 2.0)), (8.0, (1.0, 2.0, 2.0, 2.0, 2.0))],
)
def test_patience_is_lengthened_by_its_last_pause(seconds, pauses_s):
    assert RetryPolicy(pauses_s=(1.0, 2.0)).lasting(seconds).pauses_s == pauses_s


def test_create_only_write_whose_answer_was_lost_is_done():
    store, _ = patient(Failing(1, writes_first=True))
    store.put("a", [b"1"], overwrite=False)
    assert store.get("a") == b"1"


def test_create_only_write_of_another_is_refused():
    inner = Failing(0)
    inner.put("a", [b"theirs"], overwrite=False)
    inner.times = 1
    store, _ = patient(inner)
    with pytest.raises(FileExistsError):
        store.put("a", [b"mine"], overwrite=False)


def test_driver_lists_and_deletes_in_as_few_requests_as_the_store_can(tmp_path):
    asked = []

    class Counting(LocalStore):
        def sizes(self, prefix):
            asked.append(("sizes", prefix))
            return super().sizes(prefix)

        def folders(self, prefix):
            asked.append(("folders", prefix))
            return super().folders(prefix)

        def delete_many(self, keys):
            asked.append(("delete", len(keys)))
            for key in keys:
                self.delete(key)

    driver = RetryingStore(Counting(tmp_path))
    for name in ("a", "b", "c"):
        driver.put(f"x/{name}", [name.encode()], overwrite=False)
    assert sizes_below(driver, "x/", ["x/a"]) == {"x/a": 1, "x/b": 1, "x/c": 1}
    assert list(folders_below(driver, "")) == ["x"]
    delete_all(driver, ["x/a", "x/b"])
    assert asked == [("sizes", "x/"), ("folders", ""), ("delete", 2)]
    assert list(driver.list("")) == ["x/c"]


def test_sizes_through_a_store_that_cannot_list_them():
    driver = RetryingStore(MemoryStore())
    driver.put("x/a", [b"12"], overwrite=False)
    assert sizes_below(driver, "x/", ["x/a", "x/gone"]) == {"x/a": 2}


class Restless(MemoryStore):
    """Fails ``times`` times in whatever is asked; a listing fails after its first key."""

    def __init__(self):
        super().__init__()
        self.times = 0
        self.put("x/a", [b"12"], overwrite=True)
        self.put("x/b", [b"3"], overwrite=True)

    def fail(self):
        if self.times:
            self.times -= 1
            raise AWAY

    def get(self, key, *, start=0, num_bytes=-1):
        self.fail()
        return super().get(key, start=start, num_bytes=num_bytes)

    def size(self, key):
        self.fail()
        return super().size(key)

    def list(self, prefix):
        for key in super().list(prefix):
            yield key
            self.fail()

    def delete(self, key):
        self.fail()
        super().delete(key)


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda store: store.get("x/a", start=1), b"2"),
        (lambda store: store.size("x/a"), 2),
        (lambda store: [*store.list("x/")], ["x/a", "x/b"]),
        (lambda store: store.delete("x/a"), None),
        (lambda store: sizes_below(store, "x/", ["x/a"]), {"x/a": 2, "x/b": 1}),
        (lambda store: [*folders_below(store, "")], ["x"]),
        (lambda store: delete_all(store, ["x/a", "x/b"]), None),
    ],
    ids=["get", "size", "list", "delete", "sizes", "folders", "delete_many"],
)
def test_whatever_the_driver_asks_is_tried_again(ask, answer):
    inner = Restless()
    store, slept = patient(inner)
    inner.times = 2
    assert ask(store) == answer and slept == [1.0, 2.0]
    inner.times = 3
    with pytest.raises(StorageError):
        ask(store)


def test_missing_key_is_an_answer_and_a_question_may_be_asked_once():
    inner = Restless()
    store, slept = patient(inner)
    for ask in (store.get, store.size):
        with pytest.raises(KeyError):
            ask("x/gone")
    inner.times = 1
    with pytest.raises(StorageError):
        at_once(store).size("x/a")
    assert slept == [] and at_once(inner) is inner
