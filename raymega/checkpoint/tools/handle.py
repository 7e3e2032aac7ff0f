"""Checkpoint: a handle for Python code on a checkpoint's tensors: names, shapes, and whole values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymega.box import Box, SavedBox
from raymega.checkpoint.format.data_file import read_block
from raymega.checkpoint.format.dtypes import from_bfloat16, storage_type
from raymega.checkpoint.format.manifest import Manifest
from raymega.checkpoint.format.manifest_builder import tensor_faults
from raymega.errors import CheckpointError, ConfigError, counted, raise_faults
from raymega.storage.store import Store


class Checkpoint(NamedTuple):
    """Handle on one checkpoint of a run.

    Attributes:
        store: Store of the run.
        manifest: Manifest of the checkpoint.
    """

    store: Store
    manifest: Manifest

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        return self.manifest.step

    @property
    def names(self) -> list[str]:
        """Global names of the tensors, such as ``model/layers.0.mlp.up.weight``, sorted."""
        return sorted({saved.tensor for saved in self.manifest.boxes})

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor, whatever grid it was saved on.

        Raises:
            ConfigError: The checkpoint has no such tensor.
        """
        return self._boxes(name)[0].global_shape

    def dtype(self, name: str) -> str:
        """Return the saved element type: ``float64``, ``float32``, ``bfloat16`` or ``uint8``.

        Raises:
            ConfigError: The checkpoint has no such tensor.
        """
        return self._boxes(name)[0].dtype

    def read(self, name: str) -> NDArray[Any]:
        """Read one whole tensor; bfloat16, which numpy lacks, becomes float32 of the same values.

        Every block is verified against its checksum.

        Raises:
            ConfigError: The checkpoint has no such tensor.
            CheckpointError: A block is missing, or differs from what was written.
        """
        boxes = self._boxes(name)
        raise_faults(CheckpointError, tensor_faults(self.manifest, name, boxes))
        return _put_together(boxes, self.read_box)

    def read_box(self, saved: SavedBox) -> NDArray[Any]:
        """Read one block of a tensor as numbers; bfloat16 becomes float32.

        Raises:
            CheckpointError: The block is missing, or differs from what was written.
        """
        values = self.read_bits(saved)
        return from_bfloat16(values) if saved.dtype == "bfloat16" else values

    def read_bits(self, saved: SavedBox) -> NDArray[Any]:
        """Read one block of a tensor in its saved format; bfloat16 is returned as bits in uint16.

        Raises:
            CheckpointError: The block is missing, or differs from what was written.
        """
        data = read_block(self.store, self.manifest, saved)
        return np.frombuffer(data, storage_type(saved.dtype)).reshape(saved.box.shape)

    def read_bits_of(self, boxes: Sequence[SavedBox]) -> NDArray[Any]:
        """Read the whole tensor that ``boxes`` tile, in its saved format as :meth:`read_bits`.

        Raises:
            CheckpointError: A block is missing, or differs from what was written.
        """
        return _put_together(boxes, self.read_bits)

    def _boxes(self, name: str) -> list[SavedBox]:
        boxes = [saved for saved in self.manifest.boxes if saved.tensor == name]
        if boxes:
            return boxes
        # No such tensor: suggest names that are spelled alike.
        names = self.names
        near = get_close_matches(name, names, n=3) or names[:3]
        raise ConfigError(
            fact=f"{name!r} is no tensor of {self.store.uri}/{self.manifest.key}",
            rule=f"that checkpoint has {counted(len(names), 'tensor')}",
            remedy=f"use one of its names, such as {', '.join(near)}",
        )


def _put_together(
    boxes: Sequence[SavedBox], read: Callable[[SavedBox], NDArray[Any]]
) -> NDArray[Any]:
    """Return the whole tensor that ``boxes`` tile, reading one box at a time with ``read``."""
    first, *others = boxes
    part = read(first)
    # A single box is the tensor; no copy.
    if not others:
        return part
    # The first box tells the dtype of the whole array.
    values = np.empty(first.global_shape, part.dtype)
    whole = Box.whole(first.global_shape)
    values[first.box.within(whole)] = part
    for saved in others:
        values[saved.box.within(whole)] = read(saved)
    return values
