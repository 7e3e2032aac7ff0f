"""Documents of a dataset as a run reads them: token by token, with what counts in the loss and their origin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from tokenizers import Tokenizer

from raymega.data.arrow import TokenStream
from raymega.data.format import TOKENIZER_FILE, DatasetMeta
from raymega.data.open_split import LossOn, labels_of, missing_split
from raymega.data.streaming.remote_dataset import open_files
from raymega.errors import ConfigError, DataError, Fault
from raymega.prepare.origins import trace
from raymega.storage.registry import open_store

UNFINISHED = "\ufffd"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownToken:
    """Token of a document: its id, its text, and whether it counts as a label."""

    id: int
    text: str
    counts: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownDocument:
    """Document with its number in the split, and the file and row that it came from."""

    number: int
    file: str
    row: int
    tokens: tuple[ShownToken, ...]


def show_documents(
    uri: str, meta: DatasetMeta, *, split: str, first: int, count: int, loss_on: LossOn
) -> Iterator[ShownDocument]:
    """Yield documents of a split.

    Args:
        uri: Folder of the dataset, or its URI in an object store.
        meta: Description of the dataset.
        split: Name of the split.
        first: Number of the first document.
        count: Number of documents.
        loss_on: Labels that count, as ``data.loss_on``.

    Raises:
        ConfigError: There is no such split or document.
        DataError: The dataset is damaged, or has no tokenizer.
    """
    if split not in meta.splits:
        raise ConfigError(missing_split(uri, split))
    stream = TokenStream(open_files(uri)[1], meta.splits[split])
    labels = labels_of(stream, meta, loss_on)
    lengths = stream.document_lengths().tolist()
    if first >= len(lengths):
        raise ConfigError(_no_document(uri, split, first, len(lengths)))
    tokenizer = _tokenizer(uri)
    at = sum(lengths[:first])
    for number, length in islice(enumerate(lengths), first, first + count):
        ids = stream.read(at, at + length).tolist()
        counted = labels(at, at + length).tolist() if labels else [True] * length
        origin = trace(uri, meta, split=split, token=at)
        tokens = zip(ids, _texts(tokenizer, ids), counted, strict=True)
        yield ShownDocument(
            number=number, file=origin.file, row=origin.row,
            tokens=tuple(ShownToken(id=i, text=text, counts=counts) for i, text, counts in tokens),
        )  # fmt: skip
        at += length


def _tokenizer(uri: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(open_store(uri).get(TOKENIZER_FILE).decode())
    except KeyError:
        raise DataError(
            fact=f"{uri} has no {TOKENIZER_FILE}",
            rule="it says which text a token stands for",
            remedy="copy it from where the dataset was prepared, or prepare it again",
        ) from None


def _texts(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[str]:
    """Yield the text of each token; of a character's tokens the last one has it."""
    before: list[int] = []
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        # decoders of SentencePiece drop the space that begins a text
        head, whole = (
            tokenizer.decode(each, skip_special_tokens=False) for each in (before, before + pending)
        )
        text = whole.removeprefix(head)
        if text.endswith(UNFINISHED) and len(pending) < 4:  # bytes of a character of UTF-8
            yield ""
            continue
        before, pending = pending, []
        yield text


def _no_document(uri: str, split: str, first: int, total: int) -> Fault:
    return Fault(
        fact=f"--first {first}",
        rule=f"the {split} split of {uri} has {total} documents, from 0 on",
        remedy="give a smaller number, or another --split",
    )
