"""Reads a folder of torch.distributed.checkpoint: a list of its tensors, and their values by block.

Memory: one block. Entries that are not tensors are listed by name and never opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import numpy as np

from raymega.box import Box
from raymega.convert.number_formats import Array, storage_type
from raymega.convert.torch_dcp.file_part import FilePart
from raymega.convert.torch_dcp.pickle_reader import (
    Bytes,
    Index,
    Place,
    Strided,
    Tensor,
    Whole,
    malformed,
    read_metadata,
    read_tensor,
)
from raymega.errors import ConfigError

METADATA = ".metadata"
# Raised when the metadata lack an attribute or have one of another type.
_WRONG_TYPES = (AttributeError, TypeError, ValueError, KeyError)


@dataclass(frozen=True, kw_only=True, slots=True)
class DcpBlock:
    """A block of a tensor, and the bytes of a file that hold it.

    Attributes:
        box: Block of the tensor.
        dtype: Element type, numpy's name or bfloat16.
        file: Path of the file that holds the block.
        start: First byte of the block's archive in the file.
        num_bytes: Length of the archive in bytes, its zip directory included.
    """

    box: Box
    dtype: str
    file: Path
    start: int
    num_bytes: int

    def read(self) -> Array:
        """Read the values, [*box.shape], and verify them by the checksum of the zip archive.

        Raises:
            ConfigError: The values are missing or damaged, or are not one tensor of that shape and type.
        """
        source = f"{str(self.file)!r} at byte {self.start}"
        try:
            with self.file.open("rb") as stream:
                window = FilePart(stream, self.start, self.num_bytes)
                return self._values(ZipFile(window), source)
        except (BadZipFile, OSError, KeyError, EOFError, NotImplementedError) as error:
            raise malformed(source, f"cannot be read: {error}") from error

    def _values(self, archive: ZipFile, source: str) -> Array:
        # torch.save writes a zip archive: data.pkl describes the tensor, data/KEY has the bytes.
        (head,) = [name for name in archive.namelist() if name.endswith("/data.pkl")] or [""]
        root = head.removesuffix("data.pkl")
        order = f"{root}byteorder"
        if order in archive.namelist() and archive.read(order) != b"little":
            raise malformed(source, "is not little-endian")
        # The description must agree with the metadata.
        with archive.open(head) as stream:
            tensor = read_tensor(stream, source=source)
        if (tensor.shape, tensor.dtype) != (self.box.shape, self.dtype):
            found = f"{tensor.dtype} {tensor.shape}"
            raise malformed(source, f"holds {found}, not {self.dtype} {self.box.shape}")
        # Compressed data could expand without bound; torch never writes any.
        data = archive.getinfo(f"{root}data/{tensor.storage}")
        if data.compress_type != ZIP_STORED:
            raise malformed(source, "is compressed")
        return _as_array(archive.read(data), tensor, source)


@dataclass(frozen=True, kw_only=True, slots=True)
class DcpTensor:
    """A tensor of a folder: name, element type, global shape, and the blocks that it is stored in."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[DcpBlock, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DcpFolder:
    """Content of a folder: tensors by name, and the names of the other entries."""

    tensors: Mapping[str, DcpTensor]
    others: tuple[str, ...]


def open_dcp(folder: Path) -> DcpFolder:
    """Read the metadata of ``folder``, and no values.

    Raises:
        ConfigError: The metadata are missing or incomplete, or name anything but torch's own classes.
    """
    source = str(folder / METADATA)
    # The pickle, by stand-ins; then tensors and other entries from the stand-ins' attributes.
    try:
        with (folder / METADATA).open("rb") as stream:
            whole = read_metadata(stream, source=source)
    except OSError as error:
        raise ConfigError(
            fact=f"{source!r} cannot be read: {error.strerror}",
            rule="it says what a torch checkpoint holds, and is written last",
            remedy="give the folder that torch.distributed.checkpoint.save was told",
        ) from error
    try:
        entries = dict(whole.state_dict_metadata)
        tensors = {
            name: _tensor(folder, name, entry, whole)
            for name, entry in entries.items()
            if isinstance(entry, Tensor)
        }
    except _WRONG_TYPES as error:
        raise malformed(source, f"is not whole: {error}") from error
    others = sorted(name for name, entry in entries.items() if isinstance(entry, Bytes))
    return DcpFolder(tensors=tensors, others=tuple(others))


def _tensor(folder: Path, name: str, entry: Tensor, whole: Whole) -> DcpTensor:
    dtype, blocks = str(entry.properties.dtype), []
    for chunk in entry.chunks:
        # storage_data is keyed by name and offset of a block.
        index = Index()
        index.__setstate__({"fqn": name, "offset": tuple(chunk.offsets)})
        box = Box(offset=tuple(chunk.offsets), shape=tuple(chunk.sizes))
        if box.num_elements:
            blocks.append(_block(folder, box, dtype, whole.storage_data[index]))
    return DcpTensor(name=name, dtype=dtype, shape=tuple(entry.size), blocks=tuple(blocks))


def _block(folder: Path, box: Box, dtype: str, place: Place) -> DcpBlock:
    if place.__dict__.get("transform_descriptors"):
        raise ValueError(f"{place.relative_path} is transformed, such as compressed")
    # A path from the pickle must not lead out of the folder.
    path = PurePosixPath(place.relative_path)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{place.relative_path!r} lies outside the folder")
    return DcpBlock(
        box=box, dtype=dtype, file=folder / path, start=int(place.offset),
        num_bytes=int(place.length),
    )  # fmt: skip


def _as_array(data: bytes, tensor: Strided, source: str) -> Array:
    values = np.frombuffer(data, storage_type(tensor.dtype))
    # Shape and strides come from the pickle: keep the view inside the storage.
    extents = zip(tensor.shape, tensor.strides, strict=True)
    last = tensor.first + sum((extent - 1) * stride for extent, stride in extents)
    if tensor.first < 0 or min(tensor.strides, default=0) < 0 or last >= len(values):
        raise malformed(source, f"has {len(values)} elements, and the tensor ends at {last}")
    strides = [stride * values.itemsize for stride in tensor.strides]
    return np.lib.stride_tricks.as_strided(
        values[tensor.first :], tensor.shape, strides, writeable=False
    )
