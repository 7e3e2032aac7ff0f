"""Masks of encoders' rows: which tokens are predicted, what is read in their place, and pairs of segments.

Everything is drawn by keys of seed, split, sample and document, so every layout and every attempt has the
same. Documents are masked one by one, so none sees another's tokens. Megatron-core's datasets have the same
distributions; their sentences are tokens here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from raymega.config.data import is_synthetic
from raymega.config.encoder import NO_TOKEN, MaskingSection
from raymega.config.schema import Job
from raymega.data.format import TOKENIZER_FILE
from raymega.data.rows import Ints, Row
from raymega.data.synthetic import SYNTHETIC_VOCAB_SIZE
from raymega.data.tokenizer_files import tokenizer_of_dataset
from raymega.errors import DataError
from raymega.plan.layers.family_parts import parts_of

Bools = npt.NDArray[np.bool_]
Text = tuple[Ints, int]
"""Tokens of a piece of a document, and its length in the row with padding."""
NEIGHBOURS = 64
"""Number of samples after a row from which one is drawn for a segment that does not follow."""
SPACES = ("\u0120", "\u2581")
"""Space in front of a token, as byte-level BPE and SentencePiece write it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Masks:
    """Rule by which the rows of a split get masks.

    Attributes:
        section: Numbers of the rule, as ``data.masking``.
        sentence_loss: Loss on pairs of segments, as ``model.encoder.sentence_loss``.
        vocab_size: Number of tokens from which random ones are drawn.
        name: Seed of the run and name of the split, which begin all keys.
        multiple: Multiple of a document's length in a row; tokens that do not fill one are left out.
        begins_word: Whether each token begins a word, [V]; None where every token is a word.
    """

    section: MaskingSection
    sentence_loss: str
    vocab_size: int
    name: str
    multiple: int = 1
    begins_word: Bools | None = None

    def other(self, sample: int) -> int:
        """Return the sample whose text may take the place of segment B in the pairs of ``sample``."""
        return sample + 1 + int(self._random(sample, "other").random() * NEIGHBOURS)

    def row(self, texts: Sequence[Text], other: Ints | None, sample: int, *, seq_len: int) -> Row:
        """Return the row of a sample's texts, one document each.

        Args:
            texts: Pieces of documents, end to end.
            other: Text of another sample, where segment B may be of one.
            sample: Number of the sample in the run.
            seq_len: Number of tokens of the row (S).
        """
        tokens, labels, token_types = (np.zeros(seq_len, dtype=np.int64) for _ in range(3))
        mask, pairs = np.zeros(seq_len, dtype=np.bool_), np.full(seq_len, -1, dtype=np.int64)
        documents, at = list[int](), 0
        for number, (text, padded) in enumerate(texts):
            # Padding would be seen: the document ends at the last multiple that it fills.
            length = len(text) // self.multiple * self.multiple
            found = self._example(text, length, other, self._random(sample, str(number)))
            if found is None:
                length = padded
            else:
                here = slice(at, at + length)
                tokens[here], labels[here], mask[here], token_types[here], pairs[at] = found
            # padding is a document of its own, so that no token sees it
            documents += [length, padded - length] if padded > length else [length]
            at += padded
        documents += [seq_len - at] if at < seq_len else []
        return Row(
            tokens=tokens, labels=labels, mask=mask, documents=tuple(documents), token_types=token_types,
            segment_pairs=pairs,
        )  # fmt: skip

    def _example(
        self, text: Ints, length: int, other: Ints | None, random: np.random.Generator
    ) -> tuple[Ints, Ints, Bools, Ints, int] | None:
        """Return tokens, labels, mask and types [length] of a document, and the class of its pair.

        None where the document is too short.
        """
        section, has_pairs = self.section, self.sentence_loss != "none"
        # special tokens that the tokenizer has, and the room that they leave for text
        begin = [section.cls_token_id] * (section.cls_token_id != NO_TOKEN)
        end = [section.sep_token_id] * (section.sep_token_id != NO_TOKEN)
        room = length - len(begin) - len(end) * (1 + has_pairs)
        if room < 1 + has_pairs:
            return None
        # segments, and the class of the pair
        segments, label = [text[:room]], -1
        if has_pairs:
            segments, label = self._pair(text[:room], other, random)
        # [CLS] A [SEP] B [SEP]
        parts = [[*begin, *segments[0], *end], *([*each, *end] for each in segments[1:])]
        labels = np.array([token for part in parts for token in part], dtype=np.int64)
        types = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        # masked words, and what is read in their place
        words, at = list[list[Ints]](), len(begin)
        for each in segments:
            words.append(self._words(each, at))
            at += len(each) + len(end)
        chosen = self._choose(words, random)
        tokens, mask = labels.copy(), np.zeros(length, dtype=np.bool_)
        mask[chosen] = True
        tokens[chosen] = self._read_as(labels[chosen], random)
        return tokens, labels, mask, types, label

    def _pair(
        self, text: Ints, other: Ints | None, random: np.random.Generator
    ) -> tuple[list[Ints], int]:
        """Cut a text into segments A and B; with probability 1/2 exchange them, or B for another text."""
        # cut: at the begin of a word where there is one, so that both segments have whole words
        places = np.arange(1, len(text))
        if self.begins_word is not None and self.begins_word[text[1:]].any():
            places = places[self.begins_word[text[1:]]]
        cut = int(places[int(random.random() * len(places))])
        # class 0: segment B follows A
        if random.random() >= 0.5:
            return [text[:cut], text[cut:]], 0
        # class 1: the segments exchanged, or B of another sample
        if self.sentence_loss == "sentence_order":
            return [text[cut:], text[:cut]], 1
        assert other is not None, "segment B is of another sample"
        # A grows where the other text is too short, so that the row stays full.
        b = other[: len(text) - cut]
        return [text[: len(text) - len(b)], b], 1

    def _words(self, segment: Ints, first: int) -> list[Ints]:
        """Return the places of each word's tokens that may be masked; the segment begins at ``first``."""
        begins = np.ones(len(segment), dtype=np.bool_)
        if self.begins_word is not None:
            begins[1:] = self.begins_word[segment[1:]]
        # special tokens in the text are words of their own, and are never predicted
        special = (self.section.cls_token_id, self.section.sep_token_id, self.section.mask_token_id)
        is_special = np.isin(segment, special)
        begins[1:] |= is_special[1:] | is_special[:-1]
        words = np.split(np.arange(first, first + len(segment)), np.flatnonzero(begins)[1:])
        return [word for word in words if not is_special[word[0] - first]]

    def _choose(self, words: Sequence[Sequence[Ints]], random: np.random.Generator) -> Ints:
        """Return the places of the tokens that are predicted.

        Words are tried in random order, each with some that follow it in its segment. What would exceed the
        share, or overlaps a word that is chosen, is left out.
        """
        # budget of tokens, and the n-gram that begins at each word
        num_tokens = sum(len(word) for segment in words for word in segment)
        budget = max(1.0, self.section.masking_probability * num_tokens)
        starts = [(segment, at) for segment in words for at in range(len(segment))]
        lengths = self._ngram_lengths(len(starts), random)
        chosen: dict[int, None] = {}
        # n-grams in random order, until the budget is used up
        for index in random.random(len(starts)).argsort(kind="stable").tolist():
            if len(chosen) >= budget:
                break
            segment, at = starts[index]
            # shorten an n-gram until it fits into the budget
            for n in range(int(lengths[index]), 0, -1):
                places = np.concatenate(segment[at : at + n]).tolist()
                if len(chosen) + len(places) <= budget:
                    if chosen.keys().isdisjoint(places):
                        chosen |= dict.fromkeys(places)
                    break
        return np.array(sorted(chosen), dtype=np.int64)

    def _ngram_lengths(self, count: int, random: np.random.Generator) -> Ints:
        """Return ``count`` numbers of neighbouring words, n in proportion to 1 / n."""
        if self.section.max_ngram == 1:
            return np.ones(count, dtype=np.int64)
        # inverse of the cumulative distribution
        shares = 1.0 / np.arange(1, self.section.max_ngram + 1)
        ends = np.cumsum(shares) / shares.sum()
        return 1 + np.searchsorted(ends[:-1], random.random(count), side="right")

    def _read_as(self, labels: Ints, random: np.random.Generator) -> Ints:
        """Return what is read in place of predicted tokens: the mask, a random token, or the token."""
        kinds, drawn = random.random(len(labels)), random.random(len(labels))
        section, tokens = self.section, labels.copy()
        # one draw chooses between mask, random token and the token itself
        is_masked = kinds < section.mask_replace_prob
        is_random = ~is_masked & (kinds < section.mask_replace_prob + section.random_replace_prob)
        tokens[is_masked] = section.mask_token_id
        tokens[is_random] = (drawn * self.vocab_size).astype(np.int64)[is_random]
        return tokens

    def _random(self, sample: int, what: str) -> np.random.Generator:
        key = blake2b(f"{self.name}/{sample}/{what}".encode(), digest_size=16).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def masks_of(job: Job, split: str) -> Masks | None:
    """Return the rule of masks of a job's split; None where the model predicts no masked tokens.

    Raises:
        DataError: Whole words are asked for, and the dataset has no tokenizer.
    """
    if parts_of(job.model).is_causal or job.model.head.is_on:
        return None
    is_packed = job.data.packing != "none"
    return Masks(
        section=job.data.masking,
        sentence_loss=job.model.encoder.sentence_loss,
        vocab_size=job.model.vocab_size,
        name=f"{job.run.seed}/mask/{split}",
        multiple=job.data.document_multiple if is_packed else 1,
        begins_word=_word_begins(job) if job.data.masking.whole_word else None,
    )


def _word_begins(job: Job) -> Bools:
    """Return which tokens begin a word, [V], by the tokenizer of the first dataset."""
    path, begins = next(iter(job.data.datasets)), np.ones(job.model.vocab_size, dtype=np.bool_)
    if is_synthetic(path):
        # built-in tokens have no tokenizer: every fourth one continues a word
        begins[3:SYNTHETIC_VOCAB_SIZE:4] = False
        return begins
    files = tokenizer_of_dataset(path)
    if TOKENIZER_FILE not in files:
        raise DataError(
            fact=f"data.masking.whole_word=true, and {path} has no {TOKENIZER_FILE}",
            rule="the tokenizer says which tokens begin a word",
            remedy="prepare the text with `raymega data prepare --tokenizer FOLDER`, or set "
            "data.masking.whole_word=false",
        )
    inside = continuations(json.loads(files[TOKENIZER_FILE]))
    begins[[number for number in inside if number < len(begins)]] = False
    return begins


def continuations(tokenizer: Mapping[str, object]) -> list[int]:
    """Return the ids of the tokens of a tokenizer.json that continue a word."""
    model = tokenizer["model"]
    assert isinstance(model, Mapping), "tokenizer.json has a model"
    # vocabulary: a table of ids, or Unigram's list of (token, score)
    listed = model["vocab"]
    vocab = (
        dict(listed) if isinstance(listed, Mapping) else {t: i for i, (t, _) in enumerate(listed)}
    )
    added = tokenizer.get("added_tokens") or []
    assert isinstance(added, Sequence), "tokenizer.json lists added tokens"
    whole = {token["content"] for token in added}
    # WordPiece marks tokens that continue a word, the others tokens that begin one
    prefix = model.get("continuing_subword_prefix") if model.get("type") == "WordPiece" else None
    return [
        number
        for token, number in vocab.items()
        if token not in whole
        and (token.startswith(prefix) if prefix else not token.startswith(SPACES))
    ]
