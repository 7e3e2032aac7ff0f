"""The job file's sections of encoders and of encoder-decoder models, and of the masks and spans that train them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raymega.config.fields import MOST, Fraction, NonNegative, Positive, Section

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


class EncoderDecoderSection(Section):
    """Parts of encoder-decoder families alone: which blocks and tokens are whose, and relative positions."""

    num_encoder_layers: NonNegative = 0
    """Blocks of the encoder: the first of model.num_layers. The others are the decoder's."""
    decoder_seq_len: NonNegative = 0
    """Tokens of each row that the decoder reads, its last ones; the encoder reads the data.seq_len -
    decoder_seq_len before them."""
    relative_attention_num_buckets: Positive = 32
    """Rows of each table of relative positions. The encoder uses half of them for keys behind the query."""
    relative_attention_max_distance: Positive = 128
    """Distance in tokens from which all keys share the last bucket."""


class SpanCorruptionSection(Section):
    """Span corruption: which tokens an encoder-decoder model predicts, and what stands in their place."""

    # Tokens of the tokenizer.
    first_sentinel_id: TokenId = NO_TOKEN
    """Id of the token in the place of a document's first span, as <extra_id_0>; the next spans have the
    ids below it. Encoder-decoder families need it."""
    num_sentinels: Positive = 100
    """Sentinels of the tokenizer, which is the most spans of a document."""
    eos_token_id: TokenId = NO_TOKEN
    """Id of the token at the end of what encoder and decoder read of a document; they need it."""
    decoder_start_token_id: TokenId = 0
    """Id of the token that the decoder reads first. T5 takes that of padding."""
    # Text of a row.
    text_seq_len: NonNegative = 0
    """Tokens of text that are read for a row, such as the 568 that become 512 of T5's encoder and 114 of its
    decoder. Encoder-decoder families need it."""
    # Choice of spans.
    noise_density: Probability = 0.15
    """Share of a document's tokens that are predicted."""
    mean_span_length: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 3.0
    """Mean tokens of a span, for span_lengths=segments."""
    span_lengths: Literal["segments", "geometric"] = "segments"
    """segments: T5's, as many spans as the mean length gives, of random lengths between random gaps.
    geometric: Megatron's (SpanBERT's), spans at random places until the share is reached, with lengths
    of a geometric distribution with p = 0.2."""
    max_span_length: Positive = 10
    """Most tokens of a span, for span_lengths=geometric."""
