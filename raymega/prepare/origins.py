"""Origins of documents: which row of which file each document of a shard came from.

It owns the files ``SPLIT/000000.origins`` beside the shards, and ``sources.json``.

    train/000000.origins  int64 [N, 2], Arrow IPC: source number and row of each document
    sources.json          the files by source number, as the inputs were given
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import TypeAdapter

from raymega.data.arrow import shard_lengths
from raymega.data.format import DatasetMeta
from raymega.errors import ConfigError, Fault, one_line
from raymega.storage.json_objects import parse_object
from raymega.storage.registry import open_store

ORIGINS_SUFFIX = ".origins"
SOURCES_FILE = "sources.json"
COLUMNS = ("source", "row")
_SOURCES: TypeAdapter[list[str]] = TypeAdapter(list[str])
_REPAIR = "prepare the corpus again into a new folder"


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Origin of a token.

    Attributes:
        document: Number of its document in the split.
        file: File of the document, as the input was given.
        row: Number of the row in the file, from 0: a line, a record, or 0 for a text.
        offset: Number of the document's tokens before the token.
    """

    document: int
    file: str
    row: int
    offset: int


def encode_origins(origins: npt.NDArray[np.int64]) -> bytes:
    """Return the bytes of an origins file for ``origins`` [N, 2]; small, as rows often follow each other."""
    sink = pa.BufferOutputStream()
    # Differences of following rows, mostly ones, compress to almost nothing.
    steps = np.diff(origins, axis=0, prepend=np.zeros((1, 2), dtype=np.int64))
    batch = pa.record_batch([pa.array(column) for column in steps.T], names=list(COLUMNS))
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def decode_origins(content: bytes) -> npt.NDArray[np.int64]:
    """Return the array that was given to :func:`encode_origins`."""
    table = pa.ipc.open_file(content).read_all()
    return np.cumsum(np.stack([table[name].to_numpy() for name in COLUMNS], axis=1), axis=0)


def encode_sources(files: list[str]) -> bytes:
    """Return the bytes of sources.json."""
    return json.dumps(files, indent=0).encode()


def trace(uri: str, meta: DatasetMeta, *, split: str, token: int) -> Origin:
    """Return where the token with number ``token`` of a split's stream came from.

    Raises:
        ConfigError: There is no such split or token, or the dataset was prepared without origins.
    """
    length = meta.splits[split].num_tokens if split in meta.splits else 0
    if not 0 <= token < length:
        raise ConfigError(_no_token(uri, split, token, length))
    # The shard, then the document in it.
    shards = meta.splits[split].shards
    ends = list(accumulate(shard.num_tokens for shard in shards))
    index = bisect_right(ends, token)
    at = token - (ends[index] - shards[index].num_tokens)
    store = open_store(uri)
    lengths = shard_lengths(store.get(shards[index].file))
    borders = np.cumsum(lengths)
    document = int(np.searchsorted(borders, at, side="right"))
    # Its row.
    try:
        name = shards[index].file.removesuffix(".arrow") + ORIGINS_SUFFIX
        source, row = decode_origins(store.get(name))[document].tolist()
        raw, sources = store.get(SOURCES_FILE), f"{uri}/{SOURCES_FILE}"
        files = parse_object(
            raw, _SOURCES, name=sources, rule="it names the files of documents", remedy=_REPAIR
        )
        file = files[source]
    except KeyError as error:
        raise ConfigError(_no_origins(uri, str(error))) from error
    except (ValueError, IndexError) as error:
        raise ConfigError(
            fact=f"{uri}/{name} or {SOURCES_FILE} is damaged ({one_line(error)})",
            rule="together they say which file and row each document comes from; the tokens are sound",
            remedy=_REPAIR,
        ) from error
    before = sum(shard.num_documents for shard in shards[:index])
    start = int(borders[document] - lengths[document])
    return Origin(document=before + document, file=file, row=row, offset=at - start)


def _no_token(uri: str, split: str, token: int, length: int) -> Fault:
    return Fault(
        fact=f"--token {token} of split {split}",
        rule=f"the {split} split of {uri} has {length} tokens, from 0 on",
        remedy="give a smaller number, or another --split",
    )


def _no_origins(uri: str, name: str) -> Fault:
    return Fault(
        fact=f"{uri} has no {name}",
        rule="the origins of documents are written since they can be traced",
        remedy=_REPAIR,
    )
