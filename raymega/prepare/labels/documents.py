"""Tokenizes rows with labels: the documents of a row, and the byte beside each of their tokens.

What the bytes mean is said in `raymega.data.heads.labelled`, which reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from raymega.data.format import RowFormat
from raymega.data.rows import choice_target, value_of, value_targets
from raymega.errors import DataError
from raymega.prepare.labels.labelled import Labelled
from raymega.prepare.labels.rows import NO_CLASS

Encode = Callable[[str], npt.NDArray[np.unsignedinteger]]
Place = Callable[[str], tuple[npt.NDArray[np.unsignedinteger], Sequence[tuple[int, int]]]]


def labelled_documents(
    text: str, row_format: RowFormat, encode: Encode, place: Place, *, bos_id: int, eod_id: int
) -> list[Labelled]:
    """Return the documents of a row: one, one a choice, or two that match.

    Args:
        text: Text of the row, `labelled_text`.
        row_format: Format of the row.
        encode: Function from text to ids, without tokens around them.
        place: The same, with the characters [start, stop) of each token.
        bos_id: Id of the token that begins a document; -1 for none.
        eod_id: Id of the token that ends a document.
    """
    row: dict[str, Any] = json.loads(text)

    def whole(ids: Sequence[int], targets: Sequence[int], around: int) -> Labelled:
        """Return a document with the byte of each token, and ``around`` of those around them."""
        begin = [bos_id] if bos_id >= 0 else []
        return Labelled(
            ids=np.array([*begin, *ids, eod_id], dtype=np.int64),
            targets=np.array([*[around] * len(begin), *targets, around], dtype=np.uint8),
        )

    def of_one_label(piece: str, target: int) -> Labelled:
        ids = encode(piece).tolist()
        return whole(ids, [target] * len(ids), target)

    if row_format == "classification":
        return [of_one_label(row["text"], row["label"] + 1)]
    if row_format == "regression":
        document, value = of_one_label(row["text"], 0), row["label"]
        targets = value_targets(value, len(document.ids))
        if value_of(targets) != float(np.float32(value)):
            raise DataError(
                fact=f"the text {row['text'][:40]!r} has {len(document.ids)} tokens, and the label {value!r}",
                rule="a label takes the place of 4 bytes, one beside each token; of fewer tokens it has fewer digits",
                remedy="join short texts with more context, or round their labels to halves",
            )
        return [replace(document, targets=targets)]
    if row_format == "embedding":
        return [of_one_label(each, 1) for each in row["texts"]]
    if row_format == "multiple_choice":
        count, documents = len(row["choices"]), []
        for number, choice in enumerate(row["choices"]):
            target = choice_target(count, is_right=number == row["label"])
            documents.append(of_one_label("\n".join([*row["begin"], choice]), target))
        return documents
    # words are read as text: a space before a word may be a token of its own
    ids, places = place(" ".join(row["words"]))
    return [whole(ids.tolist(), _classes(row["words"], row["tags"], places), 0)]


def _classes(
    words: Sequence[str], tags: Sequence[int], places: Sequence[tuple[int, int]]
) -> list[int]:
    """Return the byte of each token: of a word's tokens the first one has the class."""
    found, start, token = [0] * len(places), 0, 0
    for word, tag in zip(words, tags, strict=True):
        stop = start + len(word)
        while token < len(places) and places[token][1] <= start:
            token += 1
        if token < len(places) and places[token][0] < stop:
            found[token] = 0 if tag == NO_CLASS else tag + 1
            token += 1
        start = stop + 1
    return found
