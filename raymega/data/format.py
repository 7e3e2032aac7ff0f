"""Layout of a prepared dataset: a folder of token shards that one JSON file describes.

It owns dataset.json and the names of the other files; `raymega.data.arrow` owns a shard's bytes.

    dataset.json        written last: a folder without it is not a dataset
    tokenizer.json      a `tokenizers` file, whatever the tokenizer was made from
    tokenizer_config.json, chat_template.jinja, ...  its other files, as AutoTokenizer reads them
    train/000000.arrow  token shards, Arrow IPC
    train/lengths.u32   number of tokens of each document of the split, uint32, little-endian
    train/unigram.npy   number of occurrences of each token, int64 [vocab_size]
    train/000000.origins, sources.json   the documents' origins, see `raymega.prepare.origins`
    valid/...           the same for the held-out documents
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from raymega.config.vision.section import CHANNELS
from raymega.config.vision.sizes import ImageSizes
from raymega.errors import ConfigError, DataError, Fault
from raymega.storage.json_objects import damage_at
from raymega.storage.local import split_file_uri

META_FILE = "dataset.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_PATTERNS = (
    "tokenizer*", "vocab.*", "merges.txt", "added_tokens.json", "special_tokens_map.json",
    "chat_template*", "spiece.model",
)  # fmt: skip
"""Names of the files of a Hugging Face tokenizer."""
COUNTS_FILE = "unigram.npy"
LENGTHS_FILE, LENGTHS_DTYPE = "lengths.u32", "<u4"
END_OF_DOCUMENT = "<|endoftext|>"
"""End-of-document token of tokenizers that raymega makes, and of files that name no other."""
SPLITS = ("train", "valid")
SHARD_TOKENS = 1 << 26
"""Tokens of a shard, without the end of its last document."""
RowFormat = Literal[
    "text",
    "chat",
    "preference",
    "kto",
    "classification",
    "token_classification",
    "multiple_choice",
    "regression",
    "embedding",
    "images",
]
"""Forms of the rows that a dataset is prepared from."""
CONTEXT, EARLIER_ANSWER, LAST_ANSWER = 0, 1, 2
"""Kind of a token of a conversation as a label: none, of an earlier answer of the assistant, of its last one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamShard:
    """Part of a split's stream: its numbers of tokens, documents and bytes."""

    num_tokens: int
    num_documents: int
    num_bytes: int


NO_CRC32 = -1
"""Checksum of what has none: Megatron's files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardMeta:
    """Description of one file of tokens.

    Attributes:
        file: Path relative to the dataset's folder.
        num_documents: Number of documents, each closed by an end-of-document token.
        num_tokens: Number of tokens, including end-of-document tokens.
        num_bytes: Size of the file in bytes.
        crc32: Checksum ``zlib.crc32`` of the file; NO_CRC32 for a part of a file that has none.
    """

    file: str
    num_documents: int
    num_tokens: int
    num_bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitMeta:
    """Files of one split.

    Attributes:
        shards: Shards in stream order.
        num_text_bytes: Size of their text in UTF-8 bytes.
        lengths: File with the lengths of its documents; None of datasets that were prepared without it.
    """

    shards: tuple[ShardMeta, ...]
    num_text_bytes: int
    lengths: ShardMeta | None = None

    @property
    def files(self) -> tuple[ShardMeta, ...]:
        """Shards, and the file of lengths where there is one."""
        return self.shards if self.lengths is None else (*self.shards, self.lengths)

    @property
    def num_tokens(self) -> int:
        """Length of the split's token stream."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        """Number of documents of the split."""
        return sum(shard.num_documents for shard in self.shards)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceMeta:
    """Sources of a dataset's text.

    Attributes:
        inputs: Files, folders or URIs that the user gave.
        num_files: Number of files that were read.
        num_bytes: Total size of these files in bytes.
        num_replaced: Number of replacement characters inserted where bytes were not UTF-8.
        num_tokenizer_bytes: Size in bytes of the sample that the tokenizer was trained on; 0 when
            it was not trained.
        num_bad_lines: Number of lines, rows and files that were left out, having no document.
    """

    inputs: tuple[str, ...]
    num_files: int
    num_bytes: int
    num_replaced: int
    num_tokenizer_bytes: int
    num_bad_lines: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerMeta:
    """Tokenizer of a dataset; the defaults describe datasets that were prepared without this entry.

    Attributes:
        files: Names of the tokenizer's files in the dataset's folder; AutoTokenizer loads them.
        eod_token: Text of the end-of-document token.
        bos_id: Id of the token that begins every document; -1 when documents begin with their text.
        is_special_parsed: True if special tokens that documents spell out became these tokens; False
            if they were read as text.
    """

    files: tuple[str, ...] = (TOKENIZER_FILE,)
    eod_token: str = END_OF_DOCUMENT
    bos_id: int = -1
    is_special_parsed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageMeta:
    """Images of a dataset.

    Attributes:
        size: Height and width of each in pixels; 0 where they have several sizes. Their pixels have their grid before them then.
        num_patches: Tokens that stand for each, or for the largest.
        token_id: Id of these tokens.
        patch_size: Height and width in pixels of what becomes a token; 0 where ``size`` says it.
        min_pixels: Least area of images of several sizes.
        max_pixels: Largest area of these.
    """

    size: int
    num_patches: int
    token_id: int
    patch_size: int = 0
    min_pixels: int = 0
    max_pixels: int = 0

    @property
    def sizes(self) -> ImageSizes:
        """Rule by which they were resized."""
        square = self.patch_size or self.size // max(1, isqrt(self.num_patches))
        return ImageSizes(square, self.size, self.min_pixels, self.max_pixels)

    @property
    def tokens_worth(self) -> int:
        """Number of tokens of text, of four bytes each, that are as large as a patch's token with its pixels."""
        return 1 + CHANNELS * self.sizes.square**2 // 4


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetMeta:
    """Content of dataset.json.

    Attributes:
        recipe: Inputs and options that determine the tokens; equal recipes give equal shards.
        vocab_size: Number of tokens of the tokenizer, including the end-of-document token.
        eod_id: Id of the end-of-document token, which closes every document.
        dtype: Element type of the shards.
        splits: Splits by name: ``train`` and, unless nothing was held out, ``valid``.
        valid_entropy: Cross entropy of the valid split under the train split's unigram
            distribution, nats per token; the loss of a model that knows only token frequencies.
            -1 without a valid split.
        source: Sources of the text.
        tokenizer: Files and rules of the tokenizer.
        version: Version of this layout. Shards of version 2 hold the lengths of their documents, those of
            version 3 also what each token is as a label.
        row_format: Form of the rows: texts, conversations, or pairs of a chosen and a rejected one, which
            follow each other.
        images: Form of its images, whose pixels the shards hold; None without any.
    """

    recipe: dict[str, str]
    vocab_size: int
    eod_id: int
    dtype: Literal["uint16", "uint32"]
    splits: dict[str, SplitMeta]
    valid_entropy: float
    source: SourceMeta
    tokenizer: TokenizerMeta = TokenizerMeta()
    version: Literal[1, 2, 3] = 2
    row_format: RowFormat = "text"
    images: ImageMeta | None = None

    @property
    def has_documents(self) -> bool:
        """True if the shards hold the lengths of their documents."""
        return self.version >= 2

    @property
    def has_targets(self) -> bool:
        """True if the shards hold what each token is as a label."""
        return self.version >= 3


def local_folder(uri: str) -> Path:
    """Return the folder that ``uri`` names.

    Datasets in object stores are handled by `raymega.data.streaming.remote_dataset`.

    Raises:
        ConfigError: The URI's scheme is not that of a local folder.
    """
    # a plain path, or file://; object stores are not folders
    scheme, separator, _ = uri.partition("://")
    if not separator:
        return Path(uri).expanduser()
    host, path = split_file_uri(uri)
    if scheme == "file" and host in ("", "localhost"):
        return path
    other = f"file://{host}" if scheme == "file" else f"{scheme}://"
    fault = Fault(
        fact=f"dataset URI {uri!r}",
        rule=f"a folder is a path or file:///path, and {other} is none",
        remedy="use a folder that every node sees",
    )
    raise ConfigError(fault)


def read_meta(folder: Path) -> DatasetMeta:
    """Read dataset.json of ``folder``.

    Raises:
        ConfigError: The file does not exist, so the folder is no dataset.
        DataError: The file is not a valid description of version 1 to 3.
    """
    path = folder / META_FILE
    if not path.is_file():
        raise ConfigError(no_dataset(f"{path} does not exist"))
    return parse_meta(path.read_bytes(), str(path))


def parse_meta(content: bytes, name: str) -> DatasetMeta:
    """Parse the description in ``content``; error messages call it ``name``.

    Raises:
        DataError: The content is not a valid description of version 1 to 3.
    """
    try:
        return _ADAPTER.validate_json(content)
    except ValidationError as error:
        byte, why = damage_at(content, error)
        fact = (
            f"{name} is not a description of version 1 to 3: byte {byte} of {len(content)}: {why}"
        )
        raise DataError(no_dataset(fact)) from error


def encode_meta(meta: DatasetMeta) -> bytes:
    """Return the bytes of dataset.json for ``meta``."""
    return _ADAPTER.dump_json(meta, indent=1) + b"\n"


def size_faults(folder: Path, meta: DatasetMeta) -> list[Fault]:
    """Return a fault for each file of a split that is missing or has a wrong size; reads no data."""
    faults = []
    for shard in (shard for split in meta.splits.values() for shard in split.files):
        path = folder / shard.file
        size = path.stat().st_size if path.is_file() else -1
        if size == shard.num_bytes:
            continue
        fact = f"{path} has {size} bytes" if size >= 0 else f"{path} does not exist"
        faults.append(shard_fault(fact, f"{META_FILE} says {shard.num_bytes} bytes"))
    return faults


def lengths_meta(split: str, shards: Sequence[ShardMeta], *, crc32: int) -> ShardMeta:
    """Return the description of the file with the lengths of the documents of ``shards``."""
    num_documents = sum(shard.num_documents for shard in shards)
    return ShardMeta(
        file=f"{split}/{LENGTHS_FILE}",
        num_documents=num_documents,
        num_tokens=sum(shard.num_tokens for shard in shards),
        num_bytes=4 * num_documents,
        crc32=crc32,
    )


def shard_fault(fact: str, rule: str) -> Fault:
    """Return the fault of a shard that does not match dataset.json."""
    return Fault(
        fact=fact,
        rule=rule,
        remedy="copy the dataset again from where it was whole, or prepare it again",
    )


def wrong_crc32(name: str, crc32: int, file: ShardMeta) -> Fault:
    """Return the fault of a file ``name`` whose checksum is not what dataset.json says."""
    return shard_fault(f"{name} has crc32 {crc32:08x}", f"{META_FILE} says {file.crc32:08x}")


def no_dataset(fact: str) -> Fault:
    """Return the fault of a location without a dataset that this version can read."""
    return Fault(
        fact=fact,
        rule=f"a dataset is a folder with a {META_FILE} written by `raymega data prepare`",
        remedy="prepare the corpus again into a new folder",
    )


_ADAPTER: TypeAdapter[DatasetMeta] = TypeAdapter(DatasetMeta)
