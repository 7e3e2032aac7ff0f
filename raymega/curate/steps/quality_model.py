"""Scores documents by logistic regression on hashed words, and draws by the score as MT-NLG did.

It owns the features, the file of a model and the draw. Training is in `raymega.curate.train_quality`.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
from numpy.lib.npyio import NpzFile

from raymega.curate.document import CuratedDocument
from raymega.curate.options import QualityModel
from raymega.curate.steps.sample import uniform
from raymega.curate.steps.step import KEPT, Outcome
from raymega.curate.tokens import BLOCK_CHARACTERS, token_blocks
from raymega.prepare.readers.long_text import Text

FEATURE_BITS = 18
FORMAT = "raymega-quality-1"


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearModel:
    """Logistic regression: ``weights`` of hashed words, [2**18], and the bias."""

    weights: npt.NDArray[np.float32]
    bias: float

    def score(self, text: Text) -> float:
        """Return the probability that a text is one of the good ones."""
        places, values = features(text)
        return float(
            1 / (1 + np.exp(-(self.weights[places].astype(np.float64) @ values + self.bias)))
        )

    def encode(self) -> bytes:
        """Return the bytes of the model's file."""
        buffer = BytesIO()
        np.savez_compressed(buffer, format=FORMAT, weights=self.weights, bias=self.bias)
        return buffer.getvalue()


def decode_model(content: bytes) -> LinearModel:
    """Return the model of a file.

    Raises:
        ValueError: The bytes are no such file.
    """
    try:
        found = np.load(BytesIO(content))
        if not isinstance(found, NpzFile):
            raise ValueError("it is one array")
        with found as arrays:
            if str(arrays["format"]) != FORMAT:
                raise ValueError(f"its format is {arrays['format']}")
            return LinearModel(weights=arrays["weights"], bias=float(arrays["bias"]))
    except (KeyError, OSError, EOFError, BadZipFile) as error:
        raise ValueError(str(error)) from error


def features(text: Text) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return places of the words of a text and their values, log(1 + count), of Euclidean length 1."""
    places, counts = _counts(text)
    values = np.log1p(counts)
    return places, values / max(float(np.linalg.norm(values)), 1e-12)


def _counts(text: Text) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the places of the words of a text, in order, and how often each is there."""
    blocks = (tokens.hashes >> np.uint64(64 - FEATURE_BITS) for tokens, _ in token_blocks(text))
    if len(text) <= BLOCK_CHARACTERS:
        return np.unique(
            np.concatenate([*blocks, np.zeros(0, np.uint64)]).astype(np.int64), return_counts=True
        )
    counts = np.zeros(1 << FEATURE_BITS, dtype=np.int64)
    for block in blocks:
        counts += np.bincount(block.astype(np.int64), minlength=len(counts))
    places = np.flatnonzero(counts)
    return places, counts[places]


class QualityModelStep:
    """The step ``quality_model``; it sets the score ``quality``."""

    def __init__(self, options: QualityModel, model: bytes) -> None:
        """Take over the model."""
        self._options, self._model = options, decode_model(model)

    def apply(self, document: CuratedDocument) -> Outcome:
        """Score the document; remove it if the score or the draw is too low."""
        score = self._model.score(document.text)
        document.scores["quality"] = round(score, 6)
        if score < self._options.min_score:
            return Outcome("score", is_removed=True)
        alpha = self._options.pareto_alpha
        if not alpha:
            return KEPT
        # Lomax distribution: P(draw > 1 - score) = (2 - score) ** -alpha, where a draw itself may be beyond float64.
        is_drawn = 1 - uniform(document.id, "quality") < (2 - score) ** -alpha
        return KEPT if is_drawn else Outcome("not drawn", is_removed=True)
