"""Encodes batches of documents, by the fastest engine that proves equal to `tokenizers`.

It owns the engines and the tokens around a document's text. Which tokenizer and which rules a
dataset has is decided in `raymega.prepare.tokenizer.choice`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from raymega.data.arrow import token_dtype
from raymega.data.format import ImageMeta
from raymega.prepare.chat.rows import Conversation
from raymega.prepare.chat.targets import Labeller
from raymega.prepare.chat.template import ChatTemplate
from raymega.prepare.labels.labelled import Labelled

Tokens = npt.NDArray[np.unsignedinteger]
EngineName = Literal["gigatoken", "tokenizers"]
Engine = Callable[[str], Tokens]

CHECKED_CHARACTERS = 2048
MIN_CHECKED = 1 << 16
CHECKED_SHARE = 1 / 1024
"""Text that both engines encode in each process: its first MIN_CHECKED characters, then this share."""

CACHE_CHARACTERS = 1 << 29
"""Text after which the fast engine's words are forgotten; one takes about 115 bytes."""

log = logging.getLogger(__name__)


class EnginesDifferError(Exception):
    """`gigatoken` gives other ids than `tokenizers` for a piece of the corpus."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodingRules:
    """Tokens around a document's text, and the reading of special tokens inside it.

    Attributes:
        eod_id: Id of the token that ends every document.
        bos_id: Id of the token that begins every document; -1 without.
        is_special_parsed: True if special tokens that the text spells out become these tokens.
        chat: Template of conversations, which writes special tokens; None for texts.
        images: Form of the images of rows; None for rows without.
        patch_token: Text of the token of an image's patches; empty without images.
    """

    eod_id: int
    bos_id: int = -1
    is_special_parsed: bool = False
    chat: ChatTemplate | None = None
    images: ImageMeta | None = None
    patch_token: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedBatch:
    """Tokens of a batch of documents, one after the other, [N], and the length of each, [B]."""

    tokens: Tokens
    lengths: tuple[int, ...]


class Encoder:
    """Encoder from texts to tokens; every document ends with the end-of-document token."""

    def __init__(
        self, tokenizer_json: str, rules: EncodingRules, *, engine: EngineName = "tokenizers"
    ) -> None:
        """Load the tokenizer for ``engine``; its ids are checked unless that is `tokenizers`."""
        self.rules = rules
        self.engine = engine
        is_special_parsed = rules.is_special_parsed or bool(rules.chat or rules.images)
        loaded = load_tokenizer(tokenizer_json, is_special_parsed=is_special_parsed)
        self.labeller = (
            Labeller(rules.chat, loaded, eod_id=rules.eod_id) if rules.chat is not None else None
        )
        self.vocab_size = vocab_size_of(loaded)
        self.dtype = token_dtype(self.vocab_size)
        self._loaded, self._reference = loaded, _tokenizers_engine(loaded)
        self._json = tokenizer_json
        self._encode = self._reference
        if engine == "gigatoken":
            self._encode = _gigatoken(tokenizer_json, is_special_parsed=rules.is_special_parsed)
        self._num_seen = self._num_checked = self._num_documents = self._num_cached = 0

    def encode_batch(self, texts: Sequence[str]) -> EncodedBatch:
        """Return the tokens of documents, each with the tokens around it.

        Raises:
            EnginesDifferError: The engine's ids are not those of `tokenizers`.
        """
        if self._encode is not self._reference:
            self._check(texts)
            self._bound_cache()
        parts: list[Tokens] = []
        lengths = []
        eod, bos = (
            np.array([token], dtype=self.dtype)
            for token in (self.rules.eod_id, max(self.rules.bos_id, 0))
        )
        # Special tokens that a text spells out may be parsed: neither end nor begin is doubled.
        for text in texts:
            ids = self._encode(text)
            is_begun = self.rules.bos_id < 0 or (len(ids) > 0 and ids[0] == self.rules.bos_id)
            is_ended = len(ids) > 0 and ids[-1] == self.rules.eod_id
            parts += [ids] if is_begun else [bos, ids]
            parts += [] if is_ended else [eod]
            lengths.append(len(ids) + (not is_begun) + (not is_ended))
        tokens = np.concatenate(parts, dtype=self.dtype, casting="unsafe")
        return EncodedBatch(tokens=tokens, lengths=tuple(lengths))

    def label(self, conversation: Conversation) -> Labelled:
        """Return the tokens of a conversation and what each is as a label, by the chat template.

        Raises:
            RenderError: The template refuses the conversation, or its targets cannot be proven.
        """
        assert self.labeller is not None, "conversations have a template"
        return self.labeller.label(conversation)

    def ids(self, text: str) -> Tokens:
        """Return the tokens of a text by `tokenizers`, without tokens around it."""
        return self._reference(text)

    def placed(self, text: str) -> tuple[Tokens, Sequence[tuple[int, int]]]:
        """Return :meth:`ids` of a text, and the characters [start, stop) of each token."""
        # One text a call: a batch would take threads of other tasks.
        (encoding,) = self._loaded.encode_batch([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32), encoding.offsets

    def _check(self, texts: Sequence[str]) -> None:
        """Encode pieces of the texts by both engines, from their beginnings, middles and ends."""
        for text in texts:
            self._num_seen += len(text)
            self._num_cached += len(text)
            if self._num_checked > MIN_CHECKED + CHECKED_SHARE * self._num_seen:
                continue
            last = max(len(text) - CHECKED_CHARACTERS, 0)
            start = last * (self._num_documents % 3) // 2
            piece = text[start : start + CHECKED_CHARACTERS]
            self._num_documents += 1
            self._num_checked += len(piece)
            if not np.array_equal(self._encode(piece), self._reference(piece)):
                raise EnginesDifferError(piece)

    def _bound_cache(self) -> None:
        """Start `gigatoken` anew after CACHE_CHARACTERS: it keeps every word that it has seen."""
        if self._num_cached > CACHE_CHARACTERS:
            self._encode = _gigatoken(self._json, is_special_parsed=self.rules.is_special_parsed)
            self._num_cached = 0


@lru_cache(maxsize=2)
def open_encoder(tokenizer_json: str, rules: EncodingRules, *, is_fast: bool = True) -> Encoder:
    """Return the process's encoder: a worker encodes many groups, and parses the file once.

    Its engine is `gigatoken` where that is installed and knows this kind of tokenizer. It has no places of
    tokens in a text, which conversations need.
    """
    if is_fast and not (rules.chat or rules.images) and find_spec("gigatoken") is not None:
        try:
            return Encoder(tokenizer_json, rules, engine="gigatoken")
        except (ValueError, RuntimeError, TypeError, AttributeError, KeyError):
            log.info("gigatoken does not know this tokenizer; tokenizers encodes", exc_info=True)
    return Encoder(tokenizer_json, rules)


def vocab_size_of(tokenizer: Tokenizer) -> int:
    """Return the largest id plus one; ids may have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def load_tokenizer(tokenizer_json: str, *, is_special_parsed: bool) -> Tokenizer:
    """Return the tokenizer of a `tokenizers` JSON, with its whole text encoded.

    Raises:
        Exception: The JSON is none of a tokenizer; `tokenizers` raises nothing more specific.
    """
    if not is_special_parsed:
        tokenizer_json = _without_special_pieces(tokenizer_json)
    tokenizer = Tokenizer.from_str(tokenizer_json)
    # A file may come with truncation to its model's length, which would lose text.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # Text that spells a special token stays text.
    tokenizer.encode_special_tokens = not is_special_parsed
    return tokenizer


def _tokenizers_engine(tokenizer: Tokenizer) -> Engine:
    def encode(text: str) -> Tokens:
        # One text a call: a batch would take threads of other tasks.
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)

    return encode


def _gigatoken(tokenizer_json: str, *, is_special_parsed: bool) -> Engine:
    # It has no switch for special tokens: without their entries they are text.
    definition = json.loads(tokenizer_json)
    definition |= {"truncation": None, "padding": None, "post_processor": None}
    if not is_special_parsed:
        added = definition.get("added_tokens") or []
        definition["added_tokens"] = [token for token in added if not token["special"]]
    gigatoken = import_module("gigatoken")
    backend: Any = gigatoken.Tokenizer.from_json(json.dumps(definition)).backend
    encode: Engine = backend.encode
    return encode


def _without_special_pieces(tokenizer_json: str) -> str:
    """Rename the special tokens of a Unigram model, whose pieces they are, so that no text matches."""
    if '"Unigram"' not in tokenizer_json:
        return tokenizer_json
    definition = json.loads(tokenizer_json)
    model, added = definition["model"], definition.get("added_tokens") or []
    if model.get("type") != "Unigram":
        return tokenizer_json
    names = {token["content"]: f"\U0010ffff{token['id']}" for token in added if token["special"]}
    for token in added:
        token["content"] = names.get(token["content"], token["content"])
    model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    return json.dumps(definition)
