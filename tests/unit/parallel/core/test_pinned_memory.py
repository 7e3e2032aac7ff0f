"""Host memory is mapped and pinned in the size asked for, once, and unpinned after its last view."""

import gc
from itertools import pairwise

import pytest
import torch

from raymega.optim.cpu_offload import HostState
from raymega.parallel.core import host_copies, pinned_memory
from raymega.parallel.core.host_copies import AsyncCopy, HostMemory
from raymega.parallel.core.pinned_memory import GROWTH_BYTES, HostPool, map_memory


class _Driver:
    """What is pinned: bytes by first address."""

    def __init__(self, refuses=0):
        self.pinned, self._refuses = {}, refuses

    def cudaHostRegister(self, begin, num_bytes, flags):  # noqa: N802  # the driver names it so
        if not self._refuses:
            self.pinned[begin] = num_bytes
        return self._refuses

    def cudaHostUnregister(self, begin):  # noqa: N802
        del self.pinned[begin]


@pytest.fixture
def driver(monkeypatch):
    found = _Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    return found


def test_memory_is_pinned_in_the_size_asked_for_until_its_last_view_is_gone(driver):
    memory = map_memory(3 * 2**20 + 1, is_pinned=True)
    assert driver.pinned == {memory.data_ptr(): 3 * 2**20 + 1}
    view = memory[5:9].fill_(7)
    del memory
    gc.collect()
    assert len(driver.pinned) == 1 and view.tolist() == [7] * 4
    del view
    gc.collect()
    assert driver.pinned == {}


def test_memory_of_a_cpu_is_not_pinned(driver):
    assert map_memory(4096, is_pinned=False).numel() == 4096
    assert map_memory(0, is_pinned=True).numel() == 0
    assert driver.pinned == {}


def test_memory_that_cannot_be_pinned_is_used_all_the_same(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: _Driver(refuses=2))
    assert map_memory(4096, is_pinned=True).numel() == 4096
    assert "4096 bytes of host memory could not be pinned" in caplog.text


def test_pool_maps_once_what_comes_again_each_step(driver):
    pool = HostPool(is_pinned=True)
    pool.reserve(1000)
    for _ in range(3):
        taken = [pool.take(size) for size in (100, 300, 500)]
        spans = sorted((t.data_ptr(), t.data_ptr() + t.numel()) for t in taken)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert all(begin % 64 == 0 for begin, _ in spans)
        for each in taken:
            pool.give_back(each)
    assert list(driver.pinned.values()) == [1000]
    # more than was reserved is mapped by itself
    held = [pool.take(500), pool.take(500)]
    assert list(driver.pinned.values()) == [1000, GROWTH_BYTES]
    assert held[0].data_ptr() != held[1].data_ptr()


def test_tensors_of_a_portion_share_one_mapping(driver):
    sources = [torch.arange(5.0), torch.arange(3, dtype=torch.uint8), torch.ones(2, 3).double()]
    copies = HostPool(is_pinned=True).like(sources)
    for source, copy in zip(sources, copies, strict=True):
        assert (copy.shape, copy.dtype) == (source.shape, source.dtype)
        copy.copy_(source)
    assert all(torch.equal(*pair) for pair in zip(sources, copies, strict=True))
    assert list(driver.pinned.values()) == [3 * 64]


def test_copy_to_memory_that_was_given_back_comes_after_its_reader():
    order = []

    class Copy(AsyncCopy):
        def wait(self):
            order.append("reader")

    class Memory(HostMemory):
        def _start(self, stream, source, target, *, held, after=None):
            if after is not None:
                after.wait()
            order.append("copy")
            return AsyncCopy(None)

    memory = Memory(torch.device("cpu"))
    for _ in range(2):
        host = memory.take(8)
        memory.start_out(torch.ones(8, dtype=torch.uint8), host)
        memory.give_back(host, Copy(None))
    assert order == ["copy", "reader", "copy"]


def test_portion_has_left_the_device_before_the_next_is_made(monkeypatch):
    waited = []
    monkeypatch.setattr(host_copies.AsyncCopy, "wait_on_host", lambda _self: waited.append(1))
    state, made = HostState(torch.device("cpu")), [torch.ones(4), torch.ones(2)]
    state.add(made)
    assert len(waited) == len(made)
    assert [t.untyped_storage().nbytes() for t in made] == [0, 0]


def test_everything_that_is_pinned_is_pinned_by_one_module():
    from pathlib import Path

    package = Path(pinned_memory.__file__).parents[2]
    users = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if any(word in path.read_text() for word in ("pin_memory=", "cudaHostRegister"))
    }
    assert users == {"parallel/core/pinned_memory.py"}
