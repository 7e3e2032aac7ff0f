"""Rows of labelled documents: texts with a class, tokens with classes, choices of a question, texts that match.

A dataset holds a byte beside each token. Of a text with class k it is k + 1 at every token, and so the label
survives a cut; of a token with class k it is k + 1, and 0 of one without. Of a choice it is the number of its
question's choices times 2, plus 1 if it is right. Of two texts that belong together it is 1. Of a text with a number
it is a byte of its float32. Of an answer that is desirable or not it is what the token is in
the conversation, plus UNDESIRABLE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from raymega.data.packing import Keep, no_keep
from raymega.data.preference.pairs import PairDocuments, PairedSource
from raymega.data.rows import UNDESIRABLE, VALUE_BYTES, Ints, Row, RowForm, value_of
from raymega.errors import DataError, Fault


class LabelledSource(PairedSource):
    """Packed rows of labelled documents, or of groups of them: those of a row are its first documents.

    Attributes:
        form: Form of the documents.
    """

    def __init__(
        self, documents: PairDocuments, form: RowForm, *, window: int, keep: Keep = no_keep
    ) -> None:
        """Pack groups of documents, ``window`` of them together."""
        super().__init__(documents, window=window, keep=keep)
        self.form = form

    def row(self, index: int) -> Row:
        """Read row ``index``.

        Raises:
            DataError: A label is none of the model's.
        """
        row = super().row(index)
        # an encoder's few tokens may be cut to fewer than a number has bytes
        least = VALUE_BYTES if self.form.kind == "values" else 0
        groups = [self.pairs.targets(held.document, least=least) for held in self.held(index)]
        starts = np.cumsum([0, *row.documents])[: len(row.lengths)]
        places = [np.arange(at, at + n) for at, n in zip(starts, row.lengths, strict=True)]
        if self.form.kind == "answers":
            is_desirable = [int(group[0][0]) < UNDESIRABLE for group in groups]
            return replace(row, classes=np.array(is_desirable, dtype=np.int64))
        mask = np.zeros(len(row.tokens), dtype=np.bool_)
        if self.form.kind != "tokens":
            # all tokens count as read; the loss has a label a group
            mask[np.concatenate(places)] = True
            return replace(row, mask=mask, classes=np.array([self._label(g) for g in groups]))
        labels = np.zeros_like(row.labels)
        targets = [each for group in groups for each in group]
        self._check(np.concatenate(targets) - 1)
        for at, each in zip(places, targets, strict=True):
            labels[at], mask[at] = np.maximum(each - 1, 0), each > 0
        return replace(row, labels=labels, mask=mask, num_pairs=0)

    def _label(self, group: Sequence[Ints]) -> int | float:
        if self.form.kind == "values":
            return value_of(group[0])
        first = np.array([targets[0] for targets in group])
        if self.form.kind == "choices":
            if set((first // 2).tolist()) != {self.form.size} or (first % 2).sum() != 1:
                raise DataError(_other_choices(int(first[0]) // 2, self.form.size))
            return int(np.argmax(first % 2))
        if self.form.kind == "matches":
            return 0
        label: int = int(first[0]) - 1
        self._check(np.array([label]))
        return label

    def _check(self, labels: npt.NDArray[np.integer]) -> None:
        """Refuse a class that the model does not have."""
        largest = int(labels.max())
        if self.form.num_classes and largest >= self.form.num_classes:
            raise DataError(
                Fault(
                    fact=f"the dataset has the label {largest}",
                    rule=f"model.head.num_labels={self.form.num_classes} has classes 0 to {self.form.num_classes - 1}",
                    remedy=f"set model.head.num_labels={largest + 1} or more",
                )
            )


def _other_choices(found: int, wanted: int) -> Fault:
    return Fault(
        fact=f"the dataset has a question with {found} choices",
        rule=f"model.head.num_choices={wanted}, and a question's choices are scored together",
        remedy=f"set model.head.num_choices={found}, and prepare questions of one number of choices",
    )
