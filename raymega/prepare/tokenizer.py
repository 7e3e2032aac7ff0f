"""Makes and loads tokenizers: plain bytes, byte-level BPE trained on the corpus, or a given file.

It owns the meaning of ``--tokenizer``. Every tokenizer is stored as a `tokenizers` JSON file with
an end-of-document token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from isal import isal_zlib
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from raymega.data.arrow import token_dtype
from raymega.data.format import END_OF_DOCUMENT
from raymega.errors import ConfigError, Fault

NUM_BYTES = 256
BYTES, BPE_PREFIX = "bytes", "bpe:"


def check_tokenizer(name: str) -> str:
    """Check ``--tokenizer name`` and return its identity in the recipe.

    The identity of a file has its checksum, so that a changed file is noticed.

    Raises:
        ConfigError: The name is no legal tokenizer, or its file is invalid.
    """
    # In order: bytes or a legal bpe:N, an illegal bpe:N, a file.
    if name == BYTES or _bpe_size(name) > NUM_BYTES:
        return name
    if name.startswith(BPE_PREFIX):
        rule = f"bpe:N needs N of at least {NUM_BYTES + 1}: the bytes and {END_OF_DOCUMENT}"
        raise ConfigError(_fault(name, rule))
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(_fault(name, "it must be `bytes`, `bpe:N` or an existing file"))
    _load(path.read_text(encoding="utf-8", errors="replace"), name)
    return f"file:{isal_zlib.crc32(path.read_bytes()):08x}"


def make_tokenizer(name: str, sample: Sequence[str]) -> str:
    """Return the tokenizer as JSON; ``sample`` is used only for ``bpe:N``."""
    if name == BYTES:
        return _byte_tokenizer().to_str()
    if name.startswith(BPE_PREFIX):
        return _train_bpe(sample, _bpe_size(name)).to_str()
    return Path(name).expanduser().read_text(encoding="utf-8")


def needs_sample(name: str) -> bool:
    """Return True if the tokenizer is trained on the corpus."""
    return name.startswith(BPE_PREFIX)


class Encoder:
    """Encoder from text to tokens; it closes each document by the end-of-document token."""

    def __init__(self, tokenizer_json: str) -> None:
        """Load the tokenizer; the JSON must have an end-of-document token."""
        self._tokenizer = _load(tokenizer_json, "the tokenizer")
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod_id = vocabulary[END_OF_DOCUMENT]
        self.dtype = token_dtype(self.vocab_size)

    def encode(self, text: str) -> npt.NDArray[np.unsignedinteger]:
        """Return the tokens of one document, including the end-of-document token."""
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array([*encoding.ids, self.eod_id], dtype=self.dtype)


def _load(text: str, name: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError(_fault(name, f"it must be a `tokenizers` JSON file ({error})")) from error
    if tokenizer.token_to_id(END_OF_DOCUMENT) is None:
        raise ConfigError(_fault(name, f"it must have a token {END_OF_DOCUMENT}"))
    # A file may come with truncation to its model's length, which would lose text.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # Text that spells the end-of-document token must not become that token.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _train_bpe(sample: Sequence[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # With all bytes in the alphabet, any text can be encoded, whatever the sample lacks.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=_byte_characters(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def _byte_tokenizer() -> Tokenizer:
    """Make the tokenizer whose token b is byte b; the end of document is token 256."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True)])
    return tokenizer


def _byte_characters() -> list[str]:
    """Return the printable character of each byte in byte-level tokenizers, as in GPT-2."""
    # Bytes that print stand for themselves, the others for characters from U+0100 on.
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(NUM_BYTES)]


def _bpe_size(name: str) -> int:
    digits = name.removeprefix(BPE_PREFIX)
    return int(digits) if name.startswith(BPE_PREFIX) and digits.isdecimal() else 0


def _fault(name: str, rule: str) -> Fault:
    return Fault(
        fact=f"--tokenizer {name}", rule=rule, remedy="use bytes, bpe:2048 or a tokenizer.json"
    )
