"""Makes built-in tokens that need no file: a noisy cycle that a small model learns in few steps.

It owns the rule of the sequence. Each window is a pure function of (seed, split, window).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import shake_128
from typing import Any

import numpy as np
import numpy.typing as npt

from raymega.config.data import SYNTHETIC_PATH
from raymega.data.rows import (
    TEXTS,
    UNDESIRABLE,
    Row,
    RowForm,
    ShardRows,
    choice_target,
    value_targets,
    whole_row,
)

SYNTHETIC_VOCAB_SIZE = 64
NUM_WINDOWS = {"train": 1 << 16, "valid": 1 << 10}
SHARD_WINDOWS = 16
"""Windows of a shard: built-in tokens have shards too, so that their order may have blocks."""
NUM_DOCUMENTS = {"train": 1 << 13, "valid": 1 << 9}
HALVINGS = 5  # number of halvings from the longest document to the shortest
ANSWERS = ("assistant", "completion")
"""Values of ``data.loss_on`` that make conversations of the tokens."""
TURN_TOKENS = 4
"""Tokens of a turn of a synthetic conversation."""
NOISE_BYTES = 32  # number of byte values out of 256 that mean noise: one token in eight


class SyntheticSource:
    """Windows whose next token is ``5 * token + 17 mod 64``, except for one in eight at random.

    The rule visits all 64 tokens, so the unigram entropy is ln 64 = 4.16 nats; a model that knows
    the rule reaches 0.9. If a job asks for the labels of answers, runs of TURN_TOKENS tokens are answers or
    not, at random.
    """

    def __init__(self, *, split: str, seq_len: int, seed: str, loss_on: str = "auto") -> None:
        """Make the source of split ``train`` or ``valid``; the two share no window."""
        self._loss_on = loss_on
        self.num_windows = NUM_WINDOWS[split]
        self._split, self.seq_len, self._seed = split, seq_len, seed
        self.context, self.efficiency = float(seq_len), 1.0
        rows = np.full(self.num_windows // SHARD_WINDOWS, SHARD_WINDOWS)
        self.shards = ShardRows(rows=rows, num_bytes=rows * seq_len)

    def need(self, shards: Sequence[int]) -> None:
        """Do nothing: the tokens are computed."""

    def window(self, index: int) -> npt.NDArray[np.int64]:
        """Return the tokens of window ``index``: [S + 1]."""
        return _noisy_cycle(f"{self._seed}/{self._split}/{index}", self.seq_len + 1)

    def row(self, index: int) -> Row:
        """Return window ``index`` as a sample."""
        row = whole_row(self.window(index))
        if self._loss_on not in ANSWERS:
            return row
        name, is_last_only = f"{self._seed}/{self._split}/{index}", self._loss_on == "completion"
        return replace(row, mask=_answers(name, self.seq_len + 1, is_last_only=is_last_only)[1:])


class SyntheticDocuments:
    """Documents of synthetic tokens, some longer than S and most much shorter.

    If a job asks for the labels of answers, they are conversations, as the windows of :class:`SyntheticSource`.
    """

    def __init__(
        self, *, split: str, seq_len: int, seed: str, loss_on: str = "auto", form: RowForm = TEXTS
    ) -> None:
        """Draw the lengths, uniform in their logarithm, up to 1.25 * S; ``form`` has the labels beside the tokens."""
        self._loss_on, self.is_truncated = loss_on, loss_on in ANSWERS or form.has_labels
        self._form = form
        self._name = f"{seed}/{split}/document"
        digits = shake_128(self._name.encode()).digest(2 * NUM_DOCUMENTS[split])
        shares = np.frombuffer(digits, dtype="<u2") / (1 << 16)
        # from 1.25 S down to 1.25 S / 2^HALVINGS
        lengths = 1.25 * seq_len * 2.0 ** (-HALVINGS * shares)
        self.lengths = np.maximum(lengths.astype(np.int64), 1)
        self.shards = ((NUM_DOCUMENTS[split], 0),)

    def need(self, shards: Sequence[int]) -> None:
        """Do nothing: the tokens are computed."""

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return tokens [start, stop) of one document."""
        return _noisy_cycle(f"{self._name}/{document}", int(self.lengths[document]))[start:stop]

    def counted(self, document: int, start: int, stop: int) -> npt.NDArray[Any] | None:
        """Return which of tokens [start, stop) of one document count as labels; None if all do.

        Labelled documents have their labels there, as `raymega.data.heads.labelled` reads them.
        """
        if not self.is_truncated:
            return None
        if self._form.has_labels:
            return self._labels(document)[start:stop]
        name, length = f"{self._name}/{document}", int(self.lengths[document])
        return _answers(name, length, is_last_only=self._loss_on == "completion")[start:stop]

    def _labels(self, document: int) -> npt.NDArray[np.uint8]:
        """Return labels that the tokens decide: the first one a document's, each one its own, the largest first one."""
        form, length = self._form, int(self.lengths[document])
        first = int(self.read(document, 0, 1)[0])
        if form.kind == "answers":
            name, is_last_only = f"{self._name}/{document}", self._loss_on == "completion"
            is_drawn = self._loss_on in ANSWERS
            counted = (
                _answers(name, length, is_last_only=is_last_only) if is_drawn else np.ones(length)
            )
            is_undesirable = int(self.read(document // 2 * 2, 0, 1)[0]) % 2
            return (2 * counted + UNDESIRABLE * is_undesirable).astype(np.uint8)
        if form.kind == "tokens":
            tokens = self.read(document, 0, length)
            return np.where(tokens % 5 == 0, 0, tokens % form.num_classes + 1).astype(np.uint8)
        if form.kind == "choices":
            begin = document // form.size * form.size
            all_first = [int(self.read(begin + n, 0, 1)[0]) for n in range(form.size)]
            is_right = int(np.argmax(all_first)) == document - begin
            return np.full(length, choice_target(form.size, is_right=is_right), dtype=np.uint8)
        if form.kind == "values":
            return value_targets(first % 8 / 2 - 1, length)
        return np.full(length, first % (form.num_classes or 8) + 1, dtype=np.uint8)


def drawn_reference(name: str, num_pairs: int) -> npt.NDArray[np.float64]:
    """Return log-probabilities from -64 to 0 for the answers of synthetic pairs, [N, 2]; no model made them.

    A verification of a job with a stored reference reads them; a run is refused.
    """
    digits = shake_128(f"{name}/reference".encode()).digest(4 * num_pairs)
    return np.frombuffer(digits, dtype="<u2").reshape(num_pairs, 2) / -1024.0


def seed_of(path: str, seed: int) -> str:
    """Return the seed of ``synthetic:NAME``, which differs by name, or of ``synthetic``."""
    return f"{seed}{path.removeprefix(SYNTHETIC_PATH)}"


def _noisy_cycle(name: str, length: int) -> npt.NDArray[np.int64]:
    # two bytes a token: is it noise, and which token then
    noise = shake_128(name.encode()).digest(2 * length)
    tokens = np.empty(length, dtype=np.int64)
    token = noise[0] % SYNTHETIC_VOCAB_SIZE
    for position in range(length):
        is_noise, fresh = noise[2 * position] < NOISE_BYTES, noise[2 * position + 1]
        token = (fresh if is_noise else 5 * token + 17) % SYNTHETIC_VOCAB_SIZE
        tokens[position] = token
    return tokens


def _answers(name: str, length: int, *, is_last_only: bool) -> npt.NDArray[np.bool_]:
    """Return which of ``length`` tokens are in turns of an assistant, or in its last one."""
    digest = shake_128(f"{name}/turns".encode()).digest(-(-length // TURN_TOKENS))
    is_answer = np.frombuffer(digest, dtype=np.uint8) % 2 == 1
    if is_last_only:
        is_answer = is_answer & (np.cumsum(is_answer) == is_answer.sum())
    return np.repeat(is_answer, TURN_TOKENS)[:length]
