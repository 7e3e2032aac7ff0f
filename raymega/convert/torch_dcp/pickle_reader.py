"""Reads the pickles that torch.distributed.checkpoint writes: the only place that reads any.

A pickle names what is to be called. Here a name is looked up in a fixed table of stand-ins that keep
values and do nothing; one that is not in the table ends the reading before anything has run. torch is
not needed, nor is any class of it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from raymega.errors import ConfigError, Fault

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
"""torch's names of typed memory."""
T = TypeVar("T")
_METADATA = "torch.distributed.checkpoint.metadata"
_MALFORMED = (
    pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, LookupError,
    ImportError, OverflowError, RecursionError, MemoryError,
)  # fmt: skip


class _Sealed(type):
    """Classes that a pickle cannot change, as it could by giving them a state."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"a state for a class sets {name}")


class Values(metaclass=_Sealed):
    """Stands in for an object of torch: attributes as the pickle has them, and no behaviour."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict):
            raise pickle.UnpicklingError(f"a state is {type(state).__name__}")
        self.__dict__.update(state)

    def __getattr__(self, name: str) -> Any:  # whatever the pickle holds
        """Attributes that a pickle sets; one that it does not is an AttributeError."""
        raise AttributeError(f"a {type(self).__name__} without {name}")


class Whole(Values):
    """The checkpoint's metadata."""


class Tensor(Values):
    """A tensor: properties, size, chunks."""


class Bytes(Values):
    """Something that is no tensor."""


class Chunk(Values):
    """A block of a tensor: offsets and sizes."""


class Place(Values):
    """Where a block lies: relative_path, offset, length."""


class Origin(Values):
    """Where the checkpoint was written and by what."""


class Properties(Values):
    """How a tensor was kept; of that the element type matters."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:  # type: ignore[override]  # torch's own
        super().__setstate__({"dtype": state[0]})


class Index(Values):
    """Key of a block: the tensor's name and the block's offset."""

    @property
    def key(self) -> tuple[str, tuple[int, ...] | None]:
        """What two keys are compared by."""
        return self.fqn, self.__dict__.get("offset")

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Index) and self.key == other.key


@dataclass(frozen=True, kw_only=True, slots=True)
class Strided:
    """A tensor in a file: elements of a storage.

    Attributes:
        storage: Key of the storage in the file.
        dtype: Its element type.
        num_elements: Elements of the storage.
        first: Which of them the tensor begins with.
        shape: The tensor's.
        strides: In elements.
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
    key, dtype, num_elements = storage
    return Strided(
        storage=key, dtype=dtype, num_elements=num_elements, first=first, shape=shape,
        strides=strides,
    )  # fmt: skip


def _text(*parts: str) -> str:
    return "/".join(parts)


def _member(enumeration: object, name: str) -> str:
    """The member of an enumeration, which Python before 3.11.4 pickles as an attribute."""
    if enumeration is not int or not isinstance(name, str):
        raise pickle.UnpicklingError(f"attribute {name!r} of {enumeration!r} is no member")
    return name


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
    """Looks names up in ``admitted`` and nowhere else."""

    def __init__(
        self, stream: IO[bytes], admitted: Mapping[tuple[str, str], Any], source: str
    ) -> None:
        super().__init__(stream)
        self._admitted, self._source = admitted, source

    def find_class(self, module: str, name: str) -> Any:  # a stand-in of any kind
        """The stand-in of a name.

        Raises:
            ConfigError: It has none.
        """
        if (module, name) in self._admitted:
            return self._admitted[module, name]
        raise ConfigError(
            Fault(
                fact=f"{self._source} is a pickle that names {module}.{name}",
                rule="of a torch checkpoint only these are read: "
                + ", ".join(".".join(at) for at in self._admitted if at[1] not in ELEMENTS),
                remedy="take a checkpoint from where you trust it; nothing of this one has run",
            )
        )

    def persistent_load(self, pid: Any) -> tuple[str, str, int]:  # pickle's hook
        """Key, element type and length of a storage."""
        word, dtype, key, _, num_elements = pid
        if word != "storage" or dtype not in ELEMENTS:
            raise pickle.UnpicklingError(f"{word!r} of {dtype!r} is no storage")
        return str(key), dtype, int(num_elements)


def read_metadata(stream: IO[bytes], *, source: str) -> Whole:
    """The metadata of a checkpoint; ``source`` is its name for messages.

    Raises:
        ConfigError: It holds anything else.
    """
    return _read(stream, _IN_METADATA, source, Whole)


def read_tensor(stream: IO[bytes], *, source: str) -> Strided:
    """What a file of torch.save says about the one tensor in it.

    Raises:
        ConfigError: It holds anything else.
    """
    return _read(stream, _IN_TENSORS, source, Strided)


def malformed(source: str, fact: str) -> ConfigError:
    """The error of a file that is not as torch writes it."""
    return ConfigError(
        Fault(
            fact=f"{source} {fact}",
            rule="a folder is read as torch.distributed.checkpoint's file system writer made it",
            remedy="save it again with torch.distributed.checkpoint.save(..., checkpoint_id=DIR)",
        )
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
