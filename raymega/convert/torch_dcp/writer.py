"""Writes a folder that torch.distributed.checkpoint loads: tensors block by block, metadata last.

Memory: the one block that is being written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import numpy as np

from raymega.box import Box
from raymega.convert.number_formats import Array
from raymega.convert.torch_dcp.file_part import FilePart
from raymega.convert.torch_dcp.pickle_reader import STORAGES
from raymega.convert.torch_dcp.pickle_writer import Call, Instance, Name, Outside, Table, to_pickle
from raymega.convert.torch_dcp.reader import METADATA

FILE_BYTES = 2 * 2**30
"""Size in bytes from which on the next block goes to a new data file."""
# Constants of the pickles: names and calls as torch's own writer has them.
_STORAGE_OF = {dtype: storage for storage, dtype in STORAGES.items()}
_MODULE = "torch.distributed.checkpoint.metadata"
_NO_HOOKS = Call(function=Name(module="collections", name="OrderedDict"))
_STRIDED = Call(
    function=Name(module="torch.serialization", name="_get_layout"), arguments=("torch.strided",)
)
_CONTIGUOUS = Call(function=Name(module=_MODULE, name="_MEM_FORMAT_ENCODING"), arguments=(0,))
# The earliest date of a zip entry, so that equal tensors give equal files.
_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DcpNewTensor:
    """A tensor that is to be written.

    Attributes:
        path: Keys of the tensor in the nested dict that torch loads; joined by dots they are its name.
        dtype: Element type, numpy's name or bfloat16.
        shape: Global shape.
        blocks: Boxes that tile the tensor, each with a function that returns its values.
    """

    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[tuple[Box, Callable[[], Array]], ...]

    @property
    def name(self) -> str:
        """Name of the tensor in torch's metadata."""
        return ".".join(self.path)


def write_dcp(folder: Path, tensors: Iterable[DcpNewTensor]) -> tuple[str, ...]:
    """Write ``tensors`` into ``folder``, which exists, and return the names of its files."""
    entries: dict[str, object] = {}
    paths: dict[str, object] = {}
    places: list[tuple[object, object]] = []
    # Data files, and for the metadata the location of each block.
    with closing(_Files(folder)) as files:
        for tensor in tensors:
            for number, (box, read) in enumerate(tensor.blocks):
                place = files.add(tensor.dtype, box.shape, read())
                places.append((_index(tensor.name, number, box), place))
            entries[tensor.name] = _entry(tensor)
            paths[tensor.name] = tensor.path
    # The metadata come last: without them there is no checkpoint.
    whole = _metadata(
        "Metadata",
        state_dict_metadata=entries,
        planner_data=paths,
        storage_data=Table(items=tuple(places)),
        storage_meta=None,
        version="1.0.0",
    )
    (folder / METADATA).write_bytes(to_pickle(whole))
    return (*files.names, METADATA)


class _Files:
    """Writer of data files, one after another; a new one begins when FILE_BYTES are reached."""

    def __init__(self, folder: Path) -> None:
        self.names: list[str] = []
        self._folder = folder
        self._stream: BinaryIO | None = None

    def close(self) -> None:
        """Close the file that is being written."""
        if self._stream is not None:
            self._stream.close()

    def add(self, dtype: str, shape: tuple[int, ...], values: Array) -> Instance:
        """Append one block as torch.save would write it, and return its location for the metadata."""
        if self._stream is None or self._stream.tell() >= FILE_BYTES:
            self._stream = self._next(self._stream)
        start = self._stream.tell()
        _write_block(self._stream, dtype, shape, values)
        return Instance(
            kind=Name(module="torch.distributed.checkpoint.filesystem", name="_StorageInfo"),
            state={
                "relative_path": self.names[-1],
                "offset": start,
                "length": self._stream.tell() - start,
            },
        )

    def _next(self, stream: BinaryIO | None) -> BinaryIO:
        if stream is not None:
            stream.close()
        self.names.append(f"__0_{len(self.names)}.distcp")
        return (self._folder / self.names[-1]).open("xb")


def _write_block(stream: BinaryIO, dtype: str, shape: tuple[int, ...], values: Array) -> None:
    assert values.shape == shape, f"{values.shape} instead of {shape}"
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    # The records of torch.save's zip archive that torch.load reads.
    records: dict[str, bytes | memoryview] = {
        "data.pkl": to_pickle(_tensor(dtype, shape)),
        "byteorder": b"little",
        "data/0": data,
        "version": b"3\n",
    }
    with ZipFile(FilePart(stream, stream.tell()), "w", ZIP_STORED) as archive:
        for name, content in records.items():
            archive.writestr(ZipInfo(f"archive/{name}", _DATE), content)


def _tensor(dtype: str, shape: tuple[int, ...]) -> Call:
    num_elements = prod(shape)
    storage = Name(module="torch", name=_STORAGE_OF[dtype])
    # Arguments: storage, offset, size, strides, requires_grad, backward hooks.
    strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return Call(
        function=Name(module="torch._utils", name="_rebuild_tensor_v2"),
        arguments=(
            Outside(key=("storage", storage, "0", "cpu", num_elements)),
            0, shape, strides, False, _NO_HOOKS,
        ),
    )  # fmt: skip


def _entry(tensor: DcpNewTensor) -> Instance:
    dtype = Name(module="torch", name=tensor.dtype)
    # Element type, layout, requires_grad, memory format, pin_memory.
    properties = Instance(
        kind=Name(module=_MODULE, name="TensorProperties"),
        state=(dtype, _STRIDED, False, _CONTIGUOUS, False),
    )
    chunks = [
        _metadata("ChunkStorageMetadata", offsets=_size(box.offset), sizes=_size(box.shape))
        for box, _ in tensor.blocks
    ]
    return _metadata(
        "TensorStorageMetadata", properties=properties, size=_size(tensor.shape), chunks=chunks
    )


def _index(name: str, number: int, box: Box) -> Instance:
    return _metadata("MetadataIndex", fqn=name, index=number, offset=_size(box.offset))


def _metadata(name: str, **state: object) -> Instance:
    return Instance(kind=Name(module=_MODULE, name=name), state=state)


def _size(extents: Sequence[int]) -> Call:
    return Call(function=Name(module="torch", name="Size"), arguments=(tuple(extents),))
