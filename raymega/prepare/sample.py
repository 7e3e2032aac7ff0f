"""Draws the sample of text that a tokenizer is trained or checked on.

It owns which documents are in the sample. They depend on the documents and the names of files
without suffixes, so that every form of one corpus gives the same tokenizer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from raymega.prepare.documents import Document, read_documents
from raymega.prepare.options import PrepareOptions
from raymega.prepare.readers.pieces import FilePiece, ShardGroup, SourceFile
from raymega.prepare.sources import hash_of, split_of

# Bytes that are taken of one file before it is the next one's turn.
TURN_BYTES = 64 << 10


def draw_sample(
    files: Sequence[SourceFile],
    options: PrepareOptions,
    *,
    num_bytes: int,
    on_progress: Callable[[int, int], None],
) -> list[str]:
    """Return texts of the training split, of ``num_bytes`` in all or a little more.

    Files take turns in an order given by a hash of their names, each from its beginning.

    Args:
        files: Files of the corpus.
        options: Options of the preparation: which text is a document, and which is held out.
        num_bytes: Size of the sample; nothing is read for 0.
        on_progress: Callback with (done, total) bytes.

    Raises:
        ConfigError: A file is damaged or has too many bad lines.
    """
    shuffled = sorted(files, key=lambda file: (hash_of(file.form.stem, "sample"), file.name))
    waiting = deque(_documents(file, options) for file in shuffled if file.num_bytes)
    texts, drawn = list[str](), 0
    while waiting and drawn < num_bytes:
        documents, turn = waiting.popleft(), 0
        for document in documents:
            if split_of(document.text, options.valid_fraction) == "train":
                texts.append(document.text)
                turn += document.num_bytes
            if turn >= TURN_BYTES or drawn + turn >= num_bytes:
                waiting.append(documents)
                break
        drawn += turn
        on_progress(min(drawn, num_bytes), num_bytes)
    # Iterators that are not at their end hold files open.
    waiting.clear()
    return texts


def _documents(file: SourceFile, options: PrepareOptions) -> Iterator[Document]:
    # Nothing is opened before the first document is asked for.
    piece = FilePiece(file=file, start=0, end=file.num_bytes, num_bytes=file.num_bytes)
    group = ShardGroup(
        index=0, pieces=(piece,), text_key=options.text_key, row_format=options.row_format
    )
    return iter(read_documents(group, max_bad_lines=options.max_bad_lines))
