"""A checkpoint as Python code meets it: which tensors it has, and their values, whole."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymega.checkpoint.format.data_file import read_block
from raymega.checkpoint.format.manifest import Manifest
from raymega.checkpoint.format.manifest_builder import tensor_faults
from raymega.errors import CheckpointError, ConfigError, Fault, raise_faults
from raymega.messages import Box, SavedBox
from raymega.storage.store import Store


class Checkpoint(NamedTuple):
    """One checkpoint and the store that it lies in.

    Attributes:
        store: Folder of the run.
        manifest: Steps, job and grid of the run that wrote it, and where each tensor's blocks are.
    """

    store: Store
    manifest: Manifest

    @property
    def step(self) -> int:
        """Optimizer steps that were complete."""
        return self.manifest.step

    @property
    def names(self) -> list[str]:
        """Global names of the tensors, such as ``model/layers.0.mlp.up.weight``, sorted."""
        return sorted({saved.tensor for saved in self.manifest.boxes})

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor, whatever grid it was saved on.

        Raises:
            ConfigError: The checkpoint has no such tensor.
        """
        return self._boxes(name)[0].global_shape

    def dtype(self, name: str) -> str:
        """Element type of the tensor as it is saved: ``float64``, ``float32``, ``bfloat16``, ``uint8``.

        Raises:
            ConfigError: The checkpoint has no such tensor.
        """
        return self._boxes(name)[0].dtype

    def read(self, name: str) -> NDArray[Any]:
        """Read one whole tensor; bfloat16, which numpy lacks, becomes float32 of the same values.

        Every block is held against its checksum.

        Raises:
            ConfigError: The checkpoint has no such tensor.
            CheckpointError: A block of it is missing, or is not what was written.
        """
        first, *others = self._boxes(name)
        raise_faults(CheckpointError, tensor_faults(self.manifest, name, [first, *others]))
        shape = first.global_shape
        if not others:
            return self.read_box(first)
        whole = Box(offset=(0,) * len(shape), shape=shape)
        values = np.empty(shape, np.float32 if first.dtype == "bfloat16" else first.dtype)
        for saved in (first, *others):
            values[saved.box.within(whole)] = self.read_box(saved)
        return values

    def read_box(self, saved: SavedBox) -> NDArray[Any]:
        """Read one block of a tensor as numbers.

        Raises:
            CheckpointError: It is missing, or is not what was written.
        """
        data = read_block(self.store, self.manifest, saved)
        if saved.dtype == "bfloat16":  # the upper half of a float32
            bits = np.frombuffer(data, "<u2").astype(np.uint32) << 16
            return bits.view(np.float32).reshape(saved.box.shape)
        dtype = np.dtype(saved.dtype).newbyteorder("<")
        return np.frombuffer(data, dtype).reshape(saved.box.shape)

    def _boxes(self, name: str) -> list[SavedBox]:
        boxes = [saved for saved in self.manifest.boxes if saved.tensor == name]
        if boxes:
            return boxes
        names = self.names
        near = get_close_matches(name, names, n=3) or names[:3]
        raise ConfigError(
            Fault(
                fact=f"{name!r} is no tensor of {self.store.uri}/{self.manifest.key}",
                rule=f"that checkpoint has {len(names)} tensors",
                remedy=f"use one of its names, such as {', '.join(near)}",
            )
        )
