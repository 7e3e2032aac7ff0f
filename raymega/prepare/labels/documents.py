"""Tokenizes rows with labels: the documents of a row, and the byte beside each of their tokens.

What the bytes mean is said in `raymega.data.heads.labelled`, which reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from raymega.data.format import RowFormat
from raymega.data.rows import choice_target
from raymega.prepare.labels.labelled import Labelled
from raymega.prepare.labels.rows import NO_CLASS

Encode = Callable[[str], npt.NDArray[np.unsignedinteger]]


def labelled_documents(
    text: str, row_format: RowFormat, encode: Encode, *, bos_id: int, eod_id: int
) -> list[Labelled]:
    """Return the documents of a row: one, or one a choice.

    Args:
        text: Text of the row, `labelled_text`.
        row_format: Format of the row.
        encode: Function from text to ids, without tokens around them.
        bos_id: Id of the token that begins a document; -1 for none.
        eod_id: Id of the token that ends a document.
    """
    row: dict[str, Any] = json.loads(text)

    def whole(pieces: Sequence[tuple[str, int]], around: int) -> Labelled:
        """Return a document of pieces of text with the byte of the first token of each, and ``around`` elsewhere."""
        ids, targets = ([bos_id] if bos_id >= 0 else []), ([around] if bos_id >= 0 else [])
        for piece, target in pieces:
            found = encode(piece).tolist()
            # of a word's tokens the first one has the class
            targets += ([target] + [around] * (len(found) - 1)) if found else []
            ids += found
        ids, targets = [*ids, eod_id], [*targets, around]
        return Labelled(
            ids=np.array(ids, dtype=np.int64), targets=np.array(targets, dtype=np.uint8)
        )

    if row_format == "classification":
        target = row["label"] + 1
        return [whole([(row["text"], target)], target)]
    if row_format == "multiple_choice":
        count, documents = len(row["choices"]), []
        for number, choice in enumerate(row["choices"]):
            target = choice_target(count, is_right=number == row["label"])
            documents.append(whole([("\n".join([*row["begin"], choice]), target)], target))
        return documents
    classes = [0 if tag == NO_CLASS else tag + 1 for tag in row["tags"]]
    # words are separated as in text
    words = [f" {word}" if number else word for number, word in enumerate(row["words"])]
    return [whole(list(zip(words, classes, strict=True)), 0)]
