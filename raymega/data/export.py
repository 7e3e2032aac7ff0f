"""Writes a split of a prepared dataset as Megatron's files, as `raymega.data.megatron` describes them."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from raymega.data.arrow import TokenStream
from raymega.data.format import DatasetMeta
from raymega.data.megatron import DTYPES, HEADER, MAGIC, VERSION, megatron_dtype
from raymega.data.open_split import missing_split, no_documents
from raymega.data.streaming.remote_dataset import open_files
from raymega.errors import ConfigError, DataError, Fault, raise_faults

PIECE_TOKENS = 1 << 20
PLAIN = ("text", "chat")
"""Formats of rows without pairs and labels."""


def export_megatron(
    uri: str, prefix: str, *, split: str, on_progress: Callable[[int, int], None]
) -> dict[str, int | str]:
    """Write a split as PREFIX.bin and PREFIX.idx, and return what was written.

    Each document is one sequence, with its end-of-document token, as Megatron's tool writes it with
    ``--append-eod``. Tokens are int32 from a vocabulary of 65,500 on. The .idx file comes last, and
    neither file has its name before it is whole.

    Args:
        uri: Folder of the dataset, or its URI in an object store.
        prefix: Path of the two files without their ends.
        split: Name of the split.
        on_progress: Callback with (done, total) tokens.

    Raises:
        ConfigError: The prefix has no name, there is no dataset, it has no such split, its rows have pairs or labels, or one of the
            files exists or cannot be written.
        DataError: The dataset is damaged, or its shards do not hold the lengths of their documents.
        StorageError: The dataset's store cannot be reached.
    """
    # refuse before anything is read or written
    paths = [Path(f"{prefix}.{end}").expanduser() for end in ("bin", "idx")]
    raise_faults(
        ConfigError, [_no_name(prefix)] if prefix.rpartition("/")[2] in ("", ".", "..") else []
    )
    raise_faults(ConfigError, [_exists(path) for path in paths if path.exists()])
    meta, files = open_files(uri)
    if split not in meta.splits:
        raise ConfigError(missing_split(uri, split))
    raise_faults(ConfigError, [] if meta.row_format in PLAIN else [_has_labels(uri, meta)])
    raise_faults(DataError, [] if meta.has_documents else [no_documents(uri, field="URI")])
    # tokens, then the index of their documents
    stream, dtype = TokenStream(files, meta.splits[split]), megatron_dtype(meta.vocab_size)
    lengths = stream.document_lengths()
    partial = [path.with_name(f"{path.name}.partial") for path in paths]
    try:
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        _write_tokens(partial[0], stream, dtype, on_progress)
        partial[1].write_bytes(index_bytes(lengths, dtype))
        for one, path in zip(partial, paths, strict=True):
            one.replace(path)
    except OSError as error:
        raise ConfigError(_unwritable(paths[0], error)) from error
    finally:
        with suppress(OSError):
            for one in partial:
                one.unlink(missing_ok=True)
    return {
        "documents": len(lengths),
        "tokens": stream.num_tokens,
        "dtype": dtype,
        "vocab_size": meta.vocab_size,
        "eod_id": meta.eod_id,
    }


def index_bytes(lengths: npt.NDArray[np.integer], dtype: str) -> bytes:
    """Return an .idx file for documents of one sequence each, with ``lengths`` tokens of ``dtype``."""
    code = next(code for code, name in DTYPES.items() if name == dtype)
    offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * np.dtype(dtype).itemsize
    borders = np.arange(len(lengths) + 1)
    return b"".join(
        [
            HEADER.pack(MAGIC, VERSION, code, len(lengths), len(borders)),
            lengths.astype("<i4").tobytes(),
            offsets.astype("<i8").tobytes(),
            borders.astype("<i8").tobytes(),
        ]
    )


def _write_tokens(
    path: Path, stream: TokenStream, dtype: str, on_progress: Callable[[int, int], None]
) -> None:
    with path.open("wb") as file:
        for start in range(0, stream.num_tokens, PIECE_TOKENS):
            stop = min(start + PIECE_TOKENS, stream.num_tokens)
            file.write(stream.read(start, stop).astype(np.dtype(dtype).newbyteorder("<")).tobytes())
            on_progress(stop, stream.num_tokens)


def _no_name(prefix: str) -> Fault:
    return Fault(
        fact=f"--out {prefix!r} has no name for the files",
        rule="it is the path of two files, without .bin and .idx",
        remedy=f"give --out {shlex.quote(str(Path(prefix, 'corpus')))}",
    )


def _exists(path: Path) -> Fault:
    return Fault(
        fact=f"{path} exists",
        rule="an export overwrites nothing",
        remedy="give another --out, or remove the file",
    )


def _has_labels(uri: str, meta: DatasetMeta) -> Fault:
    return Fault(
        fact=f"the rows of {uri} are of format {meta.row_format}",
        rule="Megatron's files hold tokens alone: pairs and labels would be lost, and their texts read as documents",
        remedy="train from the dataset as it is, or export one of format text or chat",
    )


def _unwritable(path: Path, error: OSError) -> Fault:
    return Fault(
        fact=f"{path} cannot be written ({error.strerror or error})",
        rule="--out is the path of two files on this machine, without .bin and .idx",
        remedy="give a prefix in a folder that can be written",
    )
