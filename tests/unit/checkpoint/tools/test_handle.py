"""A checkpoint's tensors, whole, whatever the grid that saved them."""

import numpy as np
import pytest
import torch

from raymega.api import open_checkpoint
from raymega.errors import CheckpointError, ConfigError
from raymega.storage.local import LocalStore
from tests.unit.checkpoint.support import MODELS, make_blocks, make_grid, save_checkpoint

MODEL = MODELS["llama-tied"]
NAME = "model/layers.2.mlp.down.weight"


def _saved(root, layout, **kwargs):
    save_checkpoint(LocalStore(root), MODEL, make_grid(layout), step=100, **kwargs)
    return open_checkpoint(str(root))


@pytest.mark.parametrize("layout", ["tp4", "tp2-dp2", "pp2-dp2"])
def test_tensors_are_those_of_one_rank(tmp_path, layout):
    found = _saved(tmp_path, layout)
    whole = {block.name: block for block in make_blocks(MODEL, make_grid("tp1"), 0)}
    assert found.step == 100 and found.names == sorted(whole)
    for name in (NAME, found.names[0], found.names[-1]):
        values = found.read(name)
        assert values.shape == found.shape(name) and found.dtype(name) == str(values.dtype)
        assert np.array_equal(values.ravel(), whole[name].values.numpy().ravel())


def test_bfloat16_is_read_as_the_same_numbers_in_float32(tmp_path):
    found = _saved(tmp_path, "tp2", dtype=torch.bfloat16)
    assert found.dtype(NAME) == "bfloat16" and found.read(NAME).dtype == np.float32
    whole = {
        block.name: block for block in make_blocks(MODEL, make_grid("tp1"), 0, dtype=torch.bfloat16)
    }
    wanted = whole[NAME].values.float()
    assert np.array_equal(found.read(NAME), wanted.numpy())


def test_absent_tensor_is_told_with_those_of_like_name(tmp_path):
    with pytest.raises(ConfigError, match=rf"'{NAME}s' is no tensor of .*such as {NAME}"):
        _saved(tmp_path, "tp2").read(f"{NAME}s")


def test_flipped_byte_is_refused(tmp_path):
    found = _saved(tmp_path, "tp2")
    saved = next(box for box in found.manifest.boxes if box.tensor == NAME)
    key = found.manifest.file_key(saved)
    data = bytearray(found.store.get(key))
    data[saved.start] ^= 1
    found.store.put(key, [data], overwrite=True)
    with pytest.raises(CheckpointError, match="crc32"):
        found.read(NAME)
