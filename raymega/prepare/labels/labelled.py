"""Tokens of a document with what each is as a label."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled:
    """Tokens of a document, [N], and the byte beside each, [N]: CONTEXT or an answer of a conversation, or a label."""

    ids: npt.NDArray[np.int64]
    targets: npt.NDArray[np.uint8]
