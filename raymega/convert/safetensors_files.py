"""Reads and writes a folder of safetensors files as one set of named tensors, one tensor at a time.

Reading holds one tensor in memory; writing holds the one that it is given. Pickled weights are refused,
because opening a pickle runs the code in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from raymega.checkpoint.format.data_file import pack, safetensors_header
from raymega.convert.number_formats import (
    CODE_OF,
    SAFETENSORS_CODES,
    Array,
    storage_type,
)
from raymega.errors import ConfigError, Fault

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth")
PLAIN_FORMATS = tuple(SAFETENSORS_CODES.values())
"""Number formats of weights that need no scales."""
LeftOut = Callable[[str], bool]
"""Function that says by its name whether a tensor of a file is left out."""
_CODED = {"U8": "uint8", "F8_E4M3": "float8_e4m3fn"}
_STORED_BYTES = {"float8_e4m3fn": np.dtype(np.uint8)}
MAX_HEADER_BYTES = 100 * 2**20  # the format's own limit


def all_are_read(_name: str) -> bool:
    """Leave no tensor out."""
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightEntry:
    """Location of one tensor in a folder.

    Attributes:
        dtype: Element type: numpy's name, or bfloat16.
        shape: Shape of the tensor.
        file: Path of the file that holds the tensor.
        start: First byte of the tensor in that file.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int

    @property
    def num_bytes(self) -> int:
        """Length in the file in bytes."""
        return prod(self.shape) * _stored(self.dtype).itemsize

    def read(self) -> Array:
        """Read the values, [*shape]; those of float8 as their bits."""
        values = np.fromfile(
            self.file, dtype=_stored(self.dtype), count=prod(self.shape), offset=self.start
        )
        return values.reshape(self.shape)


def _stored(dtype: str) -> np.dtype[Any]:
    return _STORED_BYTES[dtype] if dtype in _STORED_BYTES else storage_type(dtype)


def open_weights(
    folder: Path, *, may_be_coded: bool = False, is_left_out: LeftOut = all_are_read
) -> dict[str, WeightEntry]:
    """Read the headers in ``folder`` and return the location of every tensor, by name.

    With ``may_be_coded`` there may be codes of 8 bits, which `quantized_weights.py` multiplies out. Tensors whose
    name ``is_left_out`` may have any format.

    Raises:
        ConfigError: There are no weights, they are pickled, a file is not whole, or a name occurs twice.
    """
    files = _weight_files(folder)
    entries: dict[str, WeightEntry] = {}
    for file in files:
        for name, entry in read_header(
            file, may_be_coded=may_be_coded, is_left_out=is_left_out
        ).items():
            if name in entries:
                raise ConfigError(
                    _damaged(file, f"holds {name}, as {entries[name].file.name} does")
                )
            entries[name] = entry
    return entries


def _weight_files(folder: Path) -> list[Path]:
    # In order: an index of several files, one file, or an error that says what is there instead.
    if (folder / INDEX).is_file():
        return _indexed_files(folder / INDEX)
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ConfigError(
            fact=f"{str(folder)!r} holds {pickles[0]} and no safetensors file",
            rule="a pickled file runs code of its author when it is opened",
            remedy="in a place where that may happen, load it with transformers and call "
            "model.save_pretrained(folder), which writes safetensors",
        )
    raise ConfigError(
        fact=f"{str(folder)!r} holds neither {WHOLE} nor {INDEX}",
        rule="weights are read from safetensors files by the names that Hugging Face gives",
        remedy="give the folder that save_pretrained wrote or a model repository's download",
    )


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(_damaged(index, f"is not an index of weights ({error!r})")) from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ConfigError(_damaged(index, f"names {', '.join(missing)}, which is not there"))
    return [index.parent / name for name in names]


def read_header(
    file: Path, *, may_be_coded: bool = False, is_left_out: LeftOut = all_are_read
) -> dict[str, WeightEntry]:
    """Return the location of every tensor of one safetensors file, by name, without those left out.

    Raises:
        ConfigError: The file is not whole.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            # A length that the file cannot hold means a torn file, or another format.
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        codes = {**SAFETENSORS_CODES, **(_CODED if may_be_coded else {})}
        return {
            name: _entry(file, at, 8 + length, size, codes)
            for name, at in header.items()
            if not is_left_out(name)
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(_damaged(file, f"is not a whole safetensors file ({error})")) from error


def _entry(
    file: Path, at: Mapping[str, Any], data_start: int, size: int, codes: Mapping[str, str]
) -> WeightEntry:
    if at["dtype"] not in codes:
        known = ", ".join(SAFETENSORS_CODES)
        raise ConfigError(
            fact=f"{str(file)!r} has a tensor of format {at['dtype']}",
            rule=f"weights are read in {known}",
            remedy="save the model unquantised first",
        )
    start, end = at["data_offsets"]
    entry = WeightEntry(
        dtype=codes[at["dtype"]],
        shape=tuple(at["shape"]),
        file=file,
        start=data_start + start,
    )
    # Offsets count from the header's end; the range must match the shape and lie inside the file.
    if end - start != entry.num_bytes or data_start + end > size:
        raise ValueError(f"bytes {start} to {end} of {size - data_start} for shape {entry.shape}")
    return entry


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTensor:
    """Name, format and shape of a tensor that is to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Length in a file in bytes."""
        return prod(self.shape) * storage_type(self.dtype).itemsize


def write_weights(
    folder: Path, tensors: Sequence[NewTensor], values: Iterable[Array], *, max_file_bytes: int
) -> None:
    """Write ``tensors``, whose ``values`` come one by one in their order, into ``folder``.

    Files hold at most ``max_file_bytes`` unless a single tensor is larger; several get an index.
    """
    # Tensors to files, and the file names that transformers expects.
    parts = pack([tensor.num_bytes for tensor in tensors], max_file_bytes)
    shards = [tensors[part] for part in parts]
    names = [WHOLE]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    source = iter(values)
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, shard, source)
    # The index that says which file holds which tensor.
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)},
            "weight_map": {
                tensor.name: name
                for name, shard in zip(names, shards, strict=True)
                for tensor in shard
            },
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_file(path: Path, tensors: Sequence[NewTensor], values: Iterator[Array]) -> None:
    """Write ``tensors`` as one safetensors file; ``values`` come one by one in their order."""
    with path.open("xb") as stream:
        stream.write(_header(tensors))
        for tensor in tensors:
            array = next(values)
            assert array.shape == tensor.shape, f"{tensor.name} is {array.shape}"
            stream.write(np.ascontiguousarray(array, storage_type(tensor.dtype)).data)


def _header(tensors: Sequence[NewTensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    start = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": CODE_OF[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (start, start + tensor.num_bytes),
        }
        start += tensor.num_bytes
    return safetensors_header(entries)


def _damaged(file: Path, fact: str) -> Fault:
    return Fault(
        fact=f"{str(file)!r} {fact}",
        rule="every tensor must lie whole in one file",
        remedy="download or save the model again",
    )
