"""The job file's model.head section: what follows the last block, if it is no language model's head."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raymega.config.fields import PositiveFloat, Section

MOST_CLASSES = 255
"""Most classes: a dataset holds a label as a byte, of which 0 says that there is none."""
HeadKind = Literal[
    "language_model", "sequence_classification", "token_classification", "multiple_choice", "regression", "reward",
    "embedding", "none",
]  # fmt: skip
Pooling = Literal["last", "first", "mean"]


class HeadSection(Section):
    """Head behind the last block; with any but a language model's there is no projection to the vocabulary."""

    kind: HeadKind = "language_model"
    """language_model: logits of the next or masked token. sequence_classification: a class a document.
    token_classification: a class a token. multiple_choice: a score a choice, softmax over those of a question.
    regression: a number a document, squared error. reward: a score an answer, for
    preference.loss_type=bradley_terry. embedding: a document's pooled states, trained by InfoNCE on texts that
    match. none: the last block's states, of an imported encoder without a head, from which runs with another
    kind begin; it has no loss."""
    num_labels: Annotated[int, Field(ge=2, le=MOST_CLASSES)] = 2
    """Classes of sequence_classification and token_classification."""
    num_choices: Annotated[int, Field(ge=2, le=63)] = 4
    """multiple_choice only: choices of a question, as RACE has four."""
    pooling: Literal["auto", "last", "first", "mean"] = "auto"
    """Tokens of a document that its scores come from. last: its last one. first: its first one, through
    BERT's pooler in encoders unless the head is an embedding. mean: the mean over all. auto: last in decoders, first in
    encoders, whose embeddings are means."""
    temperature: PositiveFloat = 0.05
    """embedding only: similarities are divided by it before the softmax."""
    normalize: bool = True
    """embedding only: embeddings have length 1, so that a similarity is a cosine."""

    @property
    def is_on(self) -> bool:
        """True where the head is no language model's."""
        return self.kind != "language_model"

    @property
    def num_scores(self) -> int:
        """Number of scores of a token or document, C."""
        if self.kind in ("none", "embedding"):
            return 0
        has_classes = self.kind in ("sequence_classification", "token_classification")
        return self.num_labels if has_classes else 1

    def pools(self, *, is_causal: bool) -> Pooling:
        """Return the pooling of a family that is causal or not."""
        if self.pooling == "auto":
            of_encoder: Pooling = "mean" if self.kind == "embedding" else "first"
            return "last" if is_causal else of_encoder
        return self.pooling

    def has_pooler(self, *, is_causal: bool) -> bool:
        """Return whether scores pass BERT's pooler: tanh(linear(x)) of a document's first token."""
        is_first = self.pools(is_causal=is_causal) == "first"
        return (
            is_first
            and not is_causal
            and self.kind not in ("language_model", "token_classification", "embedding")
        )

    def has_bias(self, *, is_causal: bool) -> bool:
        """Return whether the linear layer has a bias, as transformers' class for the family has."""
        return not is_causal or self.kind == "token_classification"
