"""The layout of a prepared dataset: a folder of token shards that one JSON file describes.

It owns dataset.json and the names beside it; the bytes of a shard are data.arrow's.

    dataset.json        written last: a folder without it is not a dataset
    tokenizer.json      a `tokenizers` file
    train/000000.arrow  token shards, Arrow IPC (data.arrow)
    train/unigram.npy   how often each token occurs, int64 [vocab_size]
    valid/...           the same for the held-out documents
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from raymega.errors import ConfigError, DataError, Fault

META_FILE = "dataset.json"
TOKENIZER_FILE = "tokenizer.json"
COUNTS_FILE = "unigram.npy"
END_OF_DOCUMENT = "<|endoftext|>"
SPLITS = ("train", "valid")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardMeta:
    """One file of tokens.

    Attributes:
        file: Path relative to the dataset.
        num_documents: Documents in it, each closed by an end-of-document token.
        num_tokens: Tokens in it, end-of-document tokens included.
        num_bytes: Size of the file.
        crc32: ``zlib.crc32`` of the file.
    """

    file: str
    num_documents: int
    num_tokens: int
    num_bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitMeta:
    """The shards of one split in stream order, and the UTF-8 bytes of the text they came from."""

    shards: tuple[ShardMeta, ...]
    num_text_bytes: int

    @property
    def num_tokens(self) -> int:
        """Length of the split's token stream."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        """Documents of the split."""
        return sum(shard.num_documents for shard in self.shards)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceMeta:
    """Where the text came from.

    Attributes:
        inputs: What the user named.
        num_files: Files that were read.
        num_bytes: Their size.
        num_replaced: Replacement characters put where bytes were not UTF-8.
        num_tokenizer_bytes: Size of the sample that the tokenizer was trained on; 0 when it was
            given ready.
    """

    inputs: tuple[str, ...]
    num_files: int
    num_bytes: int
    num_replaced: int
    num_tokenizer_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetMeta:
    """Everything that dataset.json says.

    Attributes:
        recipe: What the tokens are a function of; equal recipes give equal shards.
        vocab_size: Tokens of the tokenizer, the end of document included.
        eod_id: The token that closes every document.
        dtype: Element type of the shards.
        splits: By name, ``train`` and, unless nothing was held out, ``valid``.
        valid_entropy: Cross entropy of the valid split under the train split's unigram
            distribution, nats per token; the loss of a model that knows only token frequencies.
            -1 without a valid split.
        source: Where the text came from.
        version: Of this layout. Shards of version 2 know where documents begin.
    """

    recipe: dict[str, str]
    vocab_size: int
    eod_id: int
    dtype: Literal["uint16", "uint32"]
    splits: dict[str, SplitMeta]
    valid_entropy: float
    source: SourceMeta
    version: Literal[1, 2] = 2

    @property
    def has_documents(self) -> bool:
        """Whether the shards know where documents begin."""
        return self.version >= 2


def local_folder(uri: str) -> Path:
    """The folder that ``uri`` names; datasets in object stores are data.remote's.

    Raises:
        ConfigError: The scheme is not a local folder's.
    """
    scheme, separator, path = uri.partition("://")
    if not separator:
        return Path(uri).expanduser()
    if scheme == "file":
        return Path(path)
    fault = Fault(
        fact=f"dataset URI {uri!r}",
        rule=f"a folder is a path or file://, and {scheme}:// is none",
        remedy="use a folder that every node sees",
    )
    raise ConfigError(fault)


def read_meta(folder: Path) -> DatasetMeta:
    """Read dataset.json.

    Raises:
        ConfigError: There is none, so the folder is no dataset.
        DataError: It is not of this layout.
    """
    path = folder / META_FILE
    if not path.is_file():
        raise ConfigError(no_dataset(f"{path} does not exist"))
    return parse_meta(path.read_bytes(), str(path))


def parse_meta(content: bytes, name: str) -> DatasetMeta:
    """The description in ``content``, which messages call ``name``.

    Raises:
        DataError: It is not of this layout.
    """
    try:
        return _ADAPTER.validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        fact = f"{name} is not a version 1 or 2 description: {first['loc']}: {first['msg']}"
        raise DataError(no_dataset(fact)) from error


def encode_meta(meta: DatasetMeta) -> bytes:
    """The bytes of dataset.json."""
    return _ADAPTER.dump_json(meta, indent=1) + b"\n"


def size_faults(folder: Path, meta: DatasetMeta) -> list[Fault]:
    """Shards that are missing or not of the size that was written; reads no data."""
    faults = []
    for shard in (shard for split in meta.splits.values() for shard in split.shards):
        path = folder / shard.file
        size = path.stat().st_size if path.is_file() else -1
        if size == shard.num_bytes:
            continue
        fact = f"{path} has {size} bytes" if size >= 0 else f"{path} does not exist"
        faults.append(shard_fault(fact, f"{META_FILE} says {shard.num_bytes} bytes"))
    return faults


def shard_fault(fact: str, rule: str) -> Fault:
    """The fault of a shard that is not what dataset.json says."""
    return Fault(
        fact=fact,
        rule=rule,
        remedy="copy the dataset again from where it was whole, or prepare it again",
    )


def no_dataset(fact: str) -> Fault:
    """The fault of a place that holds no dataset, or none that this version reads."""
    return Fault(
        fact=fact,
        rule=f"a dataset is a folder with a {META_FILE} written by `raymega data prepare`",
        remedy="prepare the corpus again into a new folder",
    )


_ADAPTER: TypeAdapter[DatasetMeta] = TypeAdapter(DatasetMeta)
