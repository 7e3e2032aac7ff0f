"""Makes the tokenizers that need no file: plain bytes, and byte-level BPE trained on the corpus."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from raymega.data.format import END_OF_DOCUMENT

NUM_BYTES = 256


def byte_tokenizer(*further: str) -> str:
    """Return the JSON of the tokenizer whose token b is byte b; the end of document is token 256, then ``further`` ones."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = (END_OF_DOCUMENT, *further)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer.to_str()


def train_bpe(sample: Sequence[str], vocab_size: int) -> str:
    """Return the JSON of a byte-level BPE tokenizer trained on ``sample``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # With all bytes in the alphabet, any text can be encoded, whatever the sample lacks.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=byte_characters(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer.to_str()


def byte_characters() -> list[str]:
    """Return the printable character of each byte in byte-level tokenizers, as in GPT-2."""
    # Bytes that print stand for themselves, the others for characters from U+0100 on.
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(NUM_BYTES)]
