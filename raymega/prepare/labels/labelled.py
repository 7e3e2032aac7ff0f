"""Tokens of a document with what each is as a label."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled:
    """Tokens of a document with what lies beside them.

    Attributes:
        ids: Tokens, [N].
        targets: Byte beside each, [N]: CONTEXT or an answer of a conversation, or a label.
        images: Pixels of its images, each with the place of its first token.
        num_text_bytes: Size of its text in bytes; -1 for that of its row.
    """

    ids: npt.NDArray[np.int64]
    targets: npt.NDArray[np.uint8]
    images: tuple[tuple[int, bytes], ...] = ()
    num_text_bytes: int = -1
