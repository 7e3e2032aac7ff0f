"""The job file's model.encoder and data.masking sections: encoders, and the masks that train them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raymega.config.fields import MOST, Fraction, Positive, Section

NO_TOKEN = -1
"""Value of a token id that the tokenizer does not have."""
TokenId = Annotated[int, Field(ge=NO_TOKEN, le=MOST)]
Probability = Annotated[float, Field(gt=0, lt=1)]


class EncoderSection(Section):
    """Parts of bidirectional families alone: token types, and a head that classifies pairs of segments."""

    type_vocab_size: Positive = 2
    """Token types, rows of their table. Segment A of a row has type 0; with a second one B has type 1."""
    sentence_loss: Literal["none", "next_sentence", "sentence_order"] = "none"
    """Loss on the first token's pooled state, added to that of masked tokens. next_sentence: whether B
    follows A or is of another row. sentence_order: whether B follows A or they have changed places.
    none: a row is one segment, and the model has no pooler."""

    @property
    def has_pairs(self) -> bool:
        """True where rows are pairs of segments, and the model has a pooler and a head for them."""
        return self.sentence_loss != "none"


class MaskingSection(Section):
    """Masks of masked-language training: which tokens an encoder predicts, and what it reads in their place."""

    # Tokens of the tokenizer.
    mask_token_id: TokenId = NO_TOKEN
    """Id of the token that stands for a masked one, such as [MASK]; encoders need it."""
    cls_token_id: TokenId = NO_TOKEN
    """Id of the token before a row's first segment, such as [CLS]; -1 puts none there."""
    sep_token_id: TokenId = NO_TOKEN
    """Id of the token after each segment, such as [SEP]; -1 puts none there."""
    # Choice of tokens.
    masking_probability: Probability = 0.15
    """Share of a document's tokens that are predicted, rounded down; at least one, if a word is that short."""
    whole_word: bool = False
    """Mask all tokens of a word or none. The tokens of data.path's tokenizer say where words begin: those
    of WordPiece without `##`, those of other tokenizers with a space in front."""
    max_ngram: Positive = 1
    """Most neighbouring words that are masked together; n of them are drawn in proportion to 1 / n."""
    # What is read in their place.
    mask_replace_prob: Fraction = 0.8
    """Share of the predicted tokens that are read as mask_token_id."""
    random_replace_prob: Fraction = 0.1
    """Share of the predicted tokens that are read as a random token; the rest is read as it is."""
