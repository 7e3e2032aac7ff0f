"""Reads the pickles that torch.distributed.checkpoint writes; no other module reads pickles.

A pickle names functions and classes that its reader calls. This reader looks each name up in a fixed
table of stand-ins that keep values and do nothing else. A name that is not in the table ends the
reading before anything of the pickle has run. torch is not needed.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from raymega.errors import ConfigError

ELEMENTS = (
    "float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "complex64", "complex128",
)  # fmt: skip
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "BFloat16Storage": "bfloat16",
    "HalfStorage": "float16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
}  # fmt: skip
"""Element type of each of torch's storage classes."""
T = TypeVar("T")
_METADATA = "torch.distributed.checkpoint.metadata"
# Everything that the unpickler raises for bytes that are no pickle, or one of another structure.
_MALFORMED = (
    pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, LookupError,
    ImportError, OverflowError, RecursionError, MemoryError,
)  # fmt: skip


class _Sealed(type):
    """Metaclass that keeps a pickle from changing a class, as the BUILD opcode otherwise could."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"a state for a class sets {name}")


class Values(metaclass=_Sealed):
    """Stand-in for an object of torch: the attributes that the pickle sets, and no behaviour."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict):
            raise pickle.UnpicklingError(f"a state is {type(state).__name__}")
        self.__dict__.update(state)

    def __getattr__(self, name: str) -> Any:  # an attribute of a pickle can have any type
        """Raise AttributeError for an attribute that the pickle does not set."""
        raise AttributeError(f"a {type(self).__name__} without {name}")


class Whole(Values):
    """Metadata of a checkpoint, the root of its ``.metadata`` file."""


class Tensor(Values):
    """Tensor with its properties, size and chunks."""


class Bytes(Values):
    """Entry that is not a tensor, stored as bytes."""


class Chunk(Values):
    """Block of a tensor with its offsets and sizes."""


class Place(Values):
    """Location of a block: relative_path, offset, length."""


class Origin(Values):
    """Record of the writer of the checkpoint, not used here."""


class Properties(Values):
    """Properties of a tensor, of which only the element type is kept."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:  # type: ignore[override]  # torch's own
        super().__setstate__({"dtype": state[0]})


class Index(Values):
    """Key of a block: the tensor's name and the block's offset."""

    @property
    def key(self) -> tuple[str, tuple[int, ...] | None]:
        """Tensor's name and block's offset; torch compares indices by these, not by ``index``."""
        return self.fqn, self.__dict__.get("offset")

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Index) and self.key == other.key


@dataclass(frozen=True, slots=True)
class Strided:
    """A tensor in a file, as a strided view of a storage.

    Attributes:
        storage: Key of the storage in the file.
        dtype: Element type of the storage.
        num_elements: Number of elements of the storage.
        first: Index of the tensor's first element in the storage.
        shape: Shape of the tensor.
        strides: Strides of the tensor, in elements.
    """

    storage: str
    dtype: str
    num_elements: int
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild_tensor(
    storage: tuple[str, str, int], first: int, shape: tuple[int, ...], strides: tuple[int, ...],
    *_: object,
) -> Strided:  # fmt: skip
    return Strided(*storage, first, shape, strides)


def _text(*parts: str) -> str:
    return "/".join(parts)


def _member(enumeration: object, name: str) -> str:
    """Return the name of an enumeration's member, which Python before 3.11.4 pickles by getattr."""
    # The only getattr that is allowed: on the stand-in of torch's memory formats.
    if enumeration is not int or not isinstance(name, str):
        raise pickle.UnpicklingError(f"attribute {name!r} of {enumeration!r} is no member")
    return name


# Stand-ins by module and name: for .metadata, and for the head of each tensor.
_IN_METADATA: Mapping[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): Whole,
    (_METADATA, "TensorStorageMetadata"): Tensor,
    (_METADATA, "BytesStorageMetadata"): Bytes,
    (_METADATA, "ChunkStorageMetadata"): Chunk,
    (_METADATA, "TensorProperties"): Properties,
    (_METADATA, "MetadataIndex"): Index,
    (_METADATA, "StorageMeta"): Origin,
    (_METADATA, "_MEM_FORMAT_ENCODING"): int,
    ("builtins", "getattr"): _member,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Place,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _text,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): _text,
    ("pathlib", "WindowsPath"): _text,
    **{("torch", name): name for name in ELEMENTS},
}
_IN_TENSORS: Mapping[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("collections", "OrderedDict"): dict,
    **{("torch", name): dtype for name, dtype in STORAGES.items()},
}


class _Unpickler(pickle.Unpickler):
    """Unpickler that finds names only in ``admitted``; it imports nothing."""

    def __init__(
        self, stream: IO[bytes], admitted: Mapping[tuple[str, str], Any], source: str
    ) -> None:
        super().__init__(stream)
        self._admitted, self._source = admitted, source

    def find_class(self, module: str, name: str) -> Any:  # stand-ins have different types
        """Return the stand-in for a name that the pickle uses.

        Raises:
            ConfigError: The name is not in the table.
        """
        if (module, name) in self._admitted:
            return self._admitted[module, name]
        raise ConfigError(
            fact=f"{self._source} is a pickle that names {module}.{name}",
            rule="of a torch checkpoint only these are read: "
            + ", ".join(".".join(at) for at in self._admitted if at[1] not in ELEMENTS),
            remedy="take a checkpoint from where you trust it; nothing of this one has run",
        )

    def persistent_load(self, pid: Any) -> tuple[str, str, int]:  # hook of pickle.Unpickler
        """Return key, element type and number of elements of a storage."""
        word, dtype, key, _, num_elements = pid
        if word != "storage" or dtype not in ELEMENTS:
            raise pickle.UnpicklingError(f"{word!r} of {dtype!r} is no storage")
        return str(key), dtype, int(num_elements)


def read_metadata(stream: IO[bytes], *, source: str) -> Whole:
    """Read the metadata of a checkpoint; ``source`` names the file in messages.

    Raises:
        ConfigError: The stream holds anything else.
    """
    return _read(stream, _IN_METADATA, source, Whole)


def read_tensor(stream: IO[bytes], *, source: str) -> Strided:
    """Read the description of the one tensor in a file of torch.save.

    Raises:
        ConfigError: The stream holds anything else.
    """
    return _read(stream, _IN_TENSORS, source, Strided)


def malformed(source: str, fact: str) -> ConfigError:
    """Return the error for a file that is not as torch writes it."""
    return ConfigError(
        fact=f"{source} {fact}",
        rule="a folder is read as torch.distributed.checkpoint's file system writer made it",
        remedy="save it again with torch.distributed.checkpoint.save(..., checkpoint_id=DIR)",
    )


def _read(
    stream: IO[bytes], admitted: Mapping[tuple[str, str], Any], source: str, kind: type[T]
) -> T:
    try:
        value = _Unpickler(stream, admitted, source).load()
    except _MALFORMED as error:
        raise malformed(source, f"cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(value, kind):
        raise malformed(source, f"holds a {type(value).__name__}")
    return value
