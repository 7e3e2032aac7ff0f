"""The data file is a valid safetensors file, and one block of it reads back verified."""

import json
from dataclasses import replace

import pytest
import torch
from isal.isal_zlib import crc32
from safetensors import safe_open
from safetensors.torch import load as load_safetensors

from raymega.checkpoint.format.data_file import read_block, read_header
from raymega.checkpoint.format.manifest import commit, parse_manifest
from raymega.checkpoint.save.writer import CheckpointWriter
from raymega.checkpoint.tools.copy import copy_checkpoint
from raymega.checkpoint.tools.inspection import verify_checkpoints
from raymega.errors import CheckpointError
from raymega.parallel.data_parallel.state_tensors import TensorBlock
from raymega.storage.local import LocalStore
from tests.support.memory_store import MemoryStore
from tests.unit.checkpoint.format.test_share_boxes import _tensor
from tests.unit.checkpoint.support import (
    MODELS,
    NO_WAIT,
    QUIET,
    block_values,
    make_grid,
    save_checkpoint,
)

GRID = make_grid("tp2-pp2-dp2")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_safetensors_library_reads_every_block(dtype):
    store = MemoryStore()
    manifest = save_checkpoint(store, MODELS["llama-tied"], GRID, dtype=dtype)
    files = {key: load_safetensors(store.get(key)) for key in manifest.file_sizes()}
    assert sum(len(tensors) for tensors in files.values()) == len(manifest.boxes)
    for box in manifest.boxes:
        at = ",".join(map(str, box.box.offset))
        tensor = files[manifest.file_key(box)][f"{box.tensor}@{at}"]
        wanted = block_values(box.tensor, box.global_shape, box.box, dtype)
        assert tensor.dtype == dtype and torch.equal(tensor, wanted)


def test_file_tells_its_step_and_mixes_element_types(tmp_path):
    store, shards = MemoryStore(), []
    tensor = _tensor("t", 3, 1)
    dtypes = (torch.bfloat16, torch.float64, torch.float32)
    blocks = [
        TensorBlock(
            kind=str(dtype),
            tensor=tensor,
            box=tensor.whole,
            values=torch.tensor([[1], [2], [3]], dtype=dtype),
            is_primary=True,
        )
        for dtype in dtypes
    ]
    _save(store, shards, blocks)
    (key,) = store.list("")
    path = tmp_path / "file.safetensors"
    path.write_bytes(store.get(key))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"step": "7", "attempt": "3"}
        for dtype in dtypes:
            assert torch.equal(
                file.get_tensor(f"{dtype}/t@0,0"), torch.tensor([[1], [2], [3]]).to(dtype)
            )
    assert all(box.start % 8 == 0 for box in shards[0].boxes if box.dtype == "float64")


def _save(store, shards, blocks):
    writer = CheckpointWriter(
        store, rank=0, attempt=3, report=shards.append, retry=NO_WAIT, limits=QUIET
    )
    writer.save(7, blocks, {})
    assert writer.wait()


class TestReadBlock:
    @pytest.fixture
    def saved(self):
        store = MemoryStore()
        manifest = save_checkpoint(store, MODELS["gpt2-tied"], make_grid("tp1"))
        return store, manifest, manifest.boxes[5]

    def _rewrite(self, store, key, data):
        store.put(key, [data], overwrite=True)

    def test_gives_the_bytes(self, saved):
        store, manifest, box = saved
        data = torch.frombuffer(bytearray(read_block(store, manifest, box)), dtype=torch.float32)
        wanted = block_values(box.tensor, box.global_shape, box.box, torch.float32)
        assert torch.equal(data.view(box.box.shape), wanted)

    @pytest.mark.parametrize("at", ["first", "last"])
    def test_refuses_a_flipped_bit(self, saved, at):
        store, manifest, box = saved
        key = manifest.file_key(box)
        data = bytearray(store.get(key))
        data[box.start if at == "first" else box.start + box.num_bytes - 1] ^= 1
        self._rewrite(store, key, data)
        with pytest.raises(CheckpointError, match=f"{key}.*{box.tensor}.*crc32"):
            read_block(store, manifest, box)

    def test_refuses_a_torn_file(self, saved):
        store, manifest, box = saved
        key = manifest.file_key(box)
        self._rewrite(store, key, store.get(key)[: box.start + 3])
        with pytest.raises(CheckpointError, match=f"{key}.*only 3 bytes"):
            read_block(store, manifest, box)

    def test_names_a_missing_file(self, saved):
        store, manifest, box = saved
        store.delete(manifest.file_key(box))
        with pytest.raises(CheckpointError, match="the file is missing"):
            read_block(store, manifest, box)


class TestReadHeader:
    def test_tells_a_flip_in_each_byte_by_the_file(self, tmp_path):
        store = LocalStore(tmp_path)
        manifest = save_checkpoint(store, MODELS["gpt2-tied"], make_grid("tp1"))
        commit(store, manifest)
        ((key, num_bytes),) = manifest.header_sizes().items()
        whole = store.get(key)
        assert read_header(store, manifest, key) == whole[:num_bytes]
        memory = MemoryStore()
        for at in range(num_bytes):
            memory.put(key, [whole[:at], bytes([whole[at] ^ 1]), whole[at + 1 :]], overwrite=True)
            with pytest.raises(CheckpointError, match=f"{key}, bytes 0 to {num_bytes}.*header"):
                read_header(memory, manifest, key)
        # the command that reads every byte names it, and a copy refuses it
        store.put(key, [memory.get(key)], overwrite=True)
        (summary,) = verify_checkpoints(str(tmp_path))
        (fault,) = summary.faults
        assert fault.startswith(f"{key}, bytes 0 to {num_bytes} (its header): their crc32 is")
        with pytest.raises(CheckpointError, match="its header"):
            copy_checkpoint(store, manifest, MemoryStore())

    @pytest.mark.parametrize("version", [1, 2])
    def test_manifest_without_header_checksums_is_read(self, version):
        store = MemoryStore()
        manifest = save_checkpoint(store, MODELS["gpt2-tied"], make_grid("tp1"))
        body = json.loads(manifest.to_json())["checkpoint"]
        del body["headers"]
        checksum = crc32(json.dumps(body, separators=(",", ":")).encode())
        text = json.dumps({"version": version, "crc32": checksum, "checkpoint": body})
        old = parse_manifest(text, key="k")
        assert old == replace(manifest, headers={})
        (key,) = old.header_sizes()
        assert read_header(store, old, key)
