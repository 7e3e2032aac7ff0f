"""Runs one task of the preparation: reads a group of documents, writes shards, counts tokens.

It owns the work inside a task. Tasks are distributed by `raymega.prepare.pipeline`.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raymega.data.arrow import ShardWriter
from raymega.data.format import TOKENIZER_FILE, ShardMeta
from raymega.errors import Fault, RaymegaError
from raymega.prepare.documents import Document, read_documents
from raymega.prepare.sources import ShardGroup, split_of
from raymega.prepare.tokenizer.encoder import (
    Encoder,
    EncodingRules,
    EngineName,
    EnginesDifferError,
    open_encoder,
)

Counts = npt.NDArray[np.int64]
BATCH_BYTES = 1 << 20
"""Text of a batch; it holds whole documents of this size or a little more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitPart:
    """Contribution of one group to one split; ``counts`` has each token's occurrences, [V]."""

    shard: ShardMeta
    num_text_bytes: int
    counts: Counts


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupDone:
    """Report of a task: its parts by split and their engine, or the faults for which it failed.

    Without either, the engines differ on a piece of the group (``is_disproved``) and nothing was written.
    """

    index: int
    engine: EngineName = "tokenizers"
    is_disproved: bool = False
    num_replaced: int = 0
    parts: dict[str, SplitPart] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()


def write_group(
    group: ShardGroup,
    *,
    folder: Path,
    valid_fraction: float,
    rules: EncodingRules,
    is_fast: bool = True,
) -> GroupDone:
    """Write the group's shards below ``folder``, which holds the tokenizer.

    The result depends on the arguments and input files alone, so a task may safely run twice. With
    ``is_fast`` the engine may be another than `tokenizers`, with the same ids as far as both were asked.
    Errors are returned as faults in the report, not raised.
    """
    try:
        text = (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
        encoder = open_encoder(text, rules, is_fast=is_fast)
        return _write_group(group, folder, valid_fraction, encoder)
    except EnginesDifferError:
        return GroupDone(index=group.index, is_disproved=True)
    except RaymegaError as error:
        faults = tuple(fault for fault in error.faults if isinstance(fault, Fault))
        return GroupDone(index=group.index, faults=faults)
    except (OSError, pa.ArrowException) as error:
        return GroupDone(index=group.index, faults=(_io_fault(group, folder, error),))


def _write_group(
    group: ShardGroup, folder: Path, valid_fraction: float, encoder: Encoder
) -> GroupDone:
    splits: dict[str, _Split] = {}
    # A split's shard is opened at its first document, so an empty split has no shard.
    num_replaced = 0
    with ExitStack() as stack:
        for document in read_documents(group):
            name = split_of(document.name, valid_fraction)
            if name not in splits:
                file = f"{name}/{group.index:06d}.arrow"
                writer = ShardWriter(folder, file, dtype=encoder.dtype)
                splits[name] = _Split(stack.enter_context(writer), encoder)
            splits[name].add(document)
            num_replaced += document.num_replaced
        # Closing finishes the files; an error before leaves them to the ExitStack.
        parts = {name: split.close() for name, split in splits.items()}
    return GroupDone(
        index=group.index, num_replaced=num_replaced, parts=parts, engine=encoder.engine
    )


class _Split:
    """An unfinished shard of one split, with its token counts and a batch of documents to encode."""

    def __init__(self, writer: ShardWriter, encoder: Encoder) -> None:
        self._writer, self._encoder = writer, encoder
        self._counts = np.zeros(encoder.vocab_size, dtype=np.int64)
        self._texts: list[str] = []
        self._num_text_bytes = self._num_batch_bytes = 0

    def add(self, document: Document) -> None:
        self._texts.append(document.text)
        self._num_text_bytes += document.num_bytes
        self._num_batch_bytes += document.num_bytes
        if self._num_batch_bytes >= BATCH_BYTES:
            self._encode()

    def close(self) -> SplitPart:
        self._encode()
        return SplitPart(
            shard=self._writer.close(), num_text_bytes=self._num_text_bytes, counts=self._counts
        )

    def _encode(self) -> None:
        if not self._texts:
            return
        batch = self._encoder.encode_batch(self._texts)
        self._texts, self._num_batch_bytes = [], 0
        # One count a batch, and one document at a time for the writer.
        self._counts += np.bincount(batch.tokens, minlength=len(self._counts))
        start = 0
        for length in batch.lengths:
            self._writer.append(batch.tokens[start : start + length])
            start += length


def _io_fault(group: ShardGroup, folder: Path, error: Exception) -> Fault:
    files = sorted({piece.file.path for piece in group.pieces})
    return Fault(
        fact=f"{type(error).__name__}: {error}, with {files[0]} and {len(files) - 1} more files",
        rule=f"every node must be able to read the inputs and to write to {folder}",
        remedy="put both where every node sees them, with room for the tokens",
    )
