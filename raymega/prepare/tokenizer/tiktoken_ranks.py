"""Converts `.tiktoken` files, which hold ranks only, to a `tokenizers` JSON.

The rule that cuts text into words and the special tokens are not in such a file. They are looked up by
the file's name, and an unknown name is refused.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from raymega.data.format import END_OF_DOCUMENT
from raymega.errors import ConfigError, Fault
from raymega.extras import import_extra
from raymega.prepare.tokenizer.trained import byte_characters

SUFFIX = ".tiktoken"


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """Facts that a `.tiktoken` file lacks: pattern of the words, special tokens with their ids."""

    pattern: str
    special: Mapping[str, int]


_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
_QWEN = (END_OF_DOCUMENT, "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))

ENCODINGS = {
    "r50k_base": Encoding(pattern=_GPT2, special={END_OF_DOCUMENT: 50256}),
    "p50k_base": Encoding(pattern=_GPT2, special={END_OF_DOCUMENT: 50256}),
    "cl100k_base": Encoding(
        pattern=_WORDS.format(digits=r"\p{N}{1,3}"),
        special={END_OF_DOCUMENT: 100257, **dict(zip(_FIM, range(100258, 100261), strict=True)),
                 "<|endofprompt|>": 100276},
    ),
    "o200k_base": Encoding(
        pattern=_O200K, special={END_OF_DOCUMENT: 199999, "<|endofprompt|>": 200018}
    ),
    "qwen": Encoding(
        pattern=_WORDS.format(digits=r"\p{N}"),
        special={token: 151643 + i for i, token in enumerate(_QWEN)},
    ),
}  # fmt: skip
"""Published encodings by the name of their file."""


def convert_tiktoken(path: Path) -> tuple[str, dict[str, Any], Callable[[str], list[int]]]:
    """Return the `tokenizers` JSON of a file of ranks, its special tokens by name, and tiktoken's ids.

    Raises:
        ConfigError: The file's name is no known encoding, its lines are no ranks, or tiktoken is not
            installed.
    """
    encoding = ENCODINGS.get(path.stem)
    if encoding is None:
        raise ConfigError(_unknown(path))
    ranks = _read_ranks(path)
    # Special tokens lie in the vocabulary: between the ranks there may be gaps for them.
    characters = byte_characters()
    texts = {token: "".join(characters[byte] for byte in token) for token in ranks}
    vocabulary = {texts[token]: rank for token, rank in ranks.items()} | dict(encoding.special)
    # Ids of a merge's result rank the merges; of its splits, the one of lowest ids comes first.
    merges = [
        (rank, ranks[left], ranks[right], texts[left], texts[right])
        for token, rank in ranks.items()
        for left, right in ((token[:i], token[i:]) for i in range(1, len(token)))
        if left in ranks and right in ranks
    ]
    pairs = [(left, right) for *_, left, right in sorted(merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=True))
    words = pre_tokenizers.Split(Regex(encoding.pattern), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = sorted(encoding.special, key=lambda token: encoding.special[token])
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    # tiktoken itself is the witness of the conversion.
    tiktoken = import_extra("tiktoken", extra="hf", purpose=f"--tokenizer {path}")
    original = tiktoken.Encoding(
        path.stem, pat_str=encoding.pattern, mergeable_ranks=ranks,
        special_tokens=dict(encoding.special),
    )  # fmt: skip
    return tokenizer.to_str(), {"eos_token": END_OF_DOCUMENT}, original.encode_ordinary


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        lines = (line.split() for line in path.read_bytes().splitlines() if line)
        ranks = {b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        raise ConfigError(_no_ranks(path, str(error))) from error
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise ConfigError(_no_ranks(path, "it lacks some of the 256 bytes"))
    return ranks


def _unknown(path: Path) -> Fault:
    return Fault(
        fact=f"--tokenizer {path} is a file of ranks with the name {path.stem!r}",
        rule=f"it does not say how text is cut into words; known by name: {', '.join(ENCODINGS)}",
        remedy="give it that name if it is one of them, or use the model's tokenizer.json",
    )


def _no_ranks(path: Path, why: str) -> Fault:
    return Fault(
        fact=f"--tokenizer {path} is no file of ranks ({why})",
        rule="each line is a token in base64 and its rank",
        remedy="fetch the file again",
    )
