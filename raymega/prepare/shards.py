"""Runs one task of the preparation: reads a group of documents, writes its tokens, counts them.

It owns the work inside a task. Tasks are distributed by `raymega.prepare.pipeline`, and what they
wrote is joined to the dataset's shards by `raymega.prepare.assembly`.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from raymega.data.arrow import ShardWriter
from raymega.data.format import TOKENIZER_FILE, RowFormat, ShardMeta
from raymega.data.images.files import MARK, BrokenImageError
from raymega.errors import Fault, RaymegaError
from raymega.prepare.answers import AnswerPairs
from raymega.prepare.chat.rows import read_conversations
from raymega.prepare.chat.template import RenderError
from raymega.prepare.documents import BadLine, Document, Documents, read_documents
from raymega.prepare.images.documents import image_document
from raymega.prepare.images.rows import IMAGES_FORMAT
from raymega.prepare.labels.documents import labelled_documents
from raymega.prepare.labels.labelled import Labelled
from raymega.prepare.labels.rows import LABELLED
from raymega.prepare.readers.pieces import ShardGroup
from raymega.prepare.sources import split_of
from raymega.prepare.tokenizer.encoder import (
    Encoder,
    EncodingRules,
    EngineName,
    EnginesDifferError,
    open_encoder,
)
from raymega.prepare.whole_files import write_whole

Counts = npt.NDArray[np.int64]
BATCH_BYTES = 1 << 20
"""Text of a batch; it holds whole documents of this size or a little more."""


# Beside a group's tokens: the piece and the row in it of each document, int64 [N, 2].
ORIGINS_SUFFIX = ".npy"


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitPart:
    """Contribution of one group to one split; ``counts`` has each token's occurrences, [V]."""

    shard: ShardMeta
    num_text_bytes: int
    counts: Counts


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupDone:
    """Report of a task: its parts by split, or the faults for which it failed.

    Attributes:
        index: Number of the group.
        engine: Engine that encoded its documents.
        is_disproved: True if the engines differ on a piece of the group; nothing else is then there.
        num_replaced: Number of replacement characters in its documents.
        num_rows: Number of rows of each of its pieces, with documents or without.
        bad: Bad lines, which were left out, or for which the group failed.
        parts: Contribution to each split.
        faults: Reasons why the group failed; nothing else but bad lines is then there.
    """

    index: int
    engine: EngineName = "tokenizers"
    is_disproved: bool = False
    num_replaced: int = 0
    num_rows: tuple[int, ...] = ()
    bad: tuple[BadLine, ...] = ()
    parts: dict[str, SplitPart] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()


def write_group(
    group: ShardGroup,
    *,
    folder: Path,
    valid_fraction: float,
    rules: EncodingRules,
    max_bad_lines: int = 0,
    is_fast: bool = True,
) -> GroupDone:
    """Write the group's tokens below ``folder``, which holds the tokenizer.

    The files are ``SPLIT/KEY.arrow``, a shard, and ``SPLIT/KEY.npy``, the documents' origins. The
    result depends on the arguments and input files alone, so a task may safely run twice. With
    ``is_fast`` the engine may be another than `tokenizers`, with the same ids as far as both were asked.
    What is wrong with the inputs is returned as faults in the report, not raised.

    Raises:
        OSError: The folder cannot be written.
    """
    documents = read_documents(group, max_bad_lines=max_bad_lines)
    try:
        text = (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
        encoder = open_encoder(text, rules, is_fast=is_fast)
        return _write_group(group, documents, folder, valid_fraction, encoder)
    except EnginesDifferError:
        return GroupDone(index=group.index, is_disproved=True)
    except RaymegaError as error:
        faults = tuple(fault for fault in error.faults if isinstance(fault, Fault))
        return GroupDone(index=group.index, bad=tuple(documents.bad), faults=faults)


def _write_group(
    group: ShardGroup, documents: Documents, folder: Path, valid_fraction: float, encoder: Encoder
) -> GroupDone:
    splits: dict[str, _Split] = {}
    answers = defaultdict[str, AnswerPairs[Document]](lambda: AnswerPairs(encoder.label))
    # A split's shard is opened at its first document, so an empty split has no shard.
    num_replaced = 0
    with ExitStack() as stack:
        for document in documents:
            name = split_of(document.text, valid_fraction)
            try:
                labelled = _labelled(document, group.row_format, encoder, answers[name])
            except (RenderError, BrokenImageError) as error:
                documents.refuse(document.name, str(error))
                continue
            if name not in splits:
                file = f"{name}/{group.key or f'{group.index:06d}'}.arrow"
                writer = ShardWriter(
                    folder,
                    file,
                    dtype=encoder.dtype,
                    has_targets=group.row_format != "text",
                    has_images=group.row_format == IMAGES_FORMAT,
                )
                splits[name] = _Split(stack.enter_context(writer), encoder)
            if group.row_format != "text":
                splits[name].add_labelled(document, labelled)
            else:
                splits[name].add(document)
            num_replaced += document.num_replaced
        # the first rows of each split, which the last one's answer follows
        for name, waiting in answers.items():
            for document, labelled in waiting.close(
                lambda refused, why: documents.refuse(refused.name, why)
            ):
                splits[name].add_labelled(document, labelled)
        # Closing finishes the files; an error before leaves them to the ExitStack.
        parts = {name: split.close() for name, split in splits.items()}
    for name, part in parts.items():
        path = (folder / part.shard.file).with_suffix(ORIGINS_SUFFIX)
        origins = np.array(splits[name].origins, dtype=np.int64)
        write_whole(path, [encode_array(origins)])
    return GroupDone(
        index=group.index,
        engine=encoder.engine,
        num_replaced=num_replaced,
        num_rows=tuple(documents.num_rows),
        bad=tuple(documents.bad),
        parts=parts,
    )


def _labelled(
    document: Document, row_format: RowFormat, encoder: Encoder, answers: AnswerPairs[Document]
) -> list[Labelled]:
    """Return the documents of a row with the byte beside each token; none of plain text, or of a row that waits.

    Raises:
        RenderError: The row's conversation is refused.
        BrokenImageError: An image of the row is broken.
    """
    text = document.text
    if row_format == "kto":
        return answers.add(document, text)
    rules = encoder.rules
    if rules.images is not None:
        around = {"bos_id": rules.bos_id, "eod_id": rules.eod_id}

        def encode(part: str) -> npt.NDArray[np.unsignedinteger]:
            return encoder.ids(part.replace(MARK, rules.patch_token))

        return [image_document(text, encode, rules.images, **around)]
    if row_format in LABELLED:
        return labelled_documents(
            text, row_format, encoder.ids, encoder.placed, bos_id=rules.bos_id, eod_id=rules.eod_id
        )
    if encoder.labeller is None:
        return []
    return list(map(encoder.labeller.label, read_conversations(text)))


def encode_array(array: Counts) -> bytes:
    """Return the bytes of an ``.npy`` file."""
    buffer = BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


class _Split:
    """An unfinished shard of one split: token counts, documents' origins, a batch to encode."""

    def __init__(self, writer: ShardWriter, encoder: Encoder) -> None:
        self._writer, self._encoder = writer, encoder
        self._counts = np.zeros(encoder.vocab_size, dtype=np.int64)
        self._texts: list[str] = []
        self._num_text_bytes = self._num_batch_bytes = 0
        self.origins: list[tuple[int, int]] = []

    def add(self, document: Document) -> None:
        self._texts.append(document.text)
        self._num_text_bytes += document.num_bytes
        self.origins.append((document.piece, document.row))
        self._num_batch_bytes += document.num_bytes
        if self._num_batch_bytes >= BATCH_BYTES:
            self._encode()

    def add_labelled(self, document: Document, labelled: list[Labelled]) -> None:
        own = [each.num_text_bytes for each in labelled if each.num_text_bytes >= 0]
        self._num_text_bytes += sum(own) if own else document.num_bytes * bool(labelled)
        for each in labelled:
            self.origins.append((document.piece, document.row))
            self._counts += np.bincount(each.ids, minlength=len(self._counts))
            self._writer.append(each.ids.astype(self._encoder.dtype), each.targets, each.images)

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
