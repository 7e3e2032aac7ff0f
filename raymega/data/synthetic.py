"""Built-in tokens that need no file: a noisy cycle that a small model learns in a few steps.

It owns the sequence's rule; each window is a pure function of (seed, split, window).
"""

from __future__ import annotations

from hashlib import shake_128

import numpy as np
import numpy.typing as npt

SYNTHETIC_PATH = "synthetic"
SYNTHETIC_VOCAB_SIZE = 64
NUM_WINDOWS = {"train": 1 << 16, "valid": 1 << 10}
NOISE_BYTES = 32  # of 256: one token in eight is drawn afresh


class SyntheticSource:
    """Windows whose next token is ``5 * token + 17 mod 64``, but for one in eight at random.

    The rule visits all 64 tokens, so the unigram entropy is ln 64 = 4.16 nats; a model that knows
    the rule reaches 0.9.
    """

    def __init__(self, *, split: str, seq_len: int, seed: int) -> None:
        """``split`` is ``train`` or ``valid``; the two share no window."""
        self.num_windows = NUM_WINDOWS[split]
        self._split, self._seq_len, self._seed = split, seq_len, seed

    def window(self, index: int) -> npt.NDArray[np.int64]:
        """Tokens of window ``index``: [S + 1]."""
        name = f"{self._seed}/{self._split}/{index}".encode()
        noise = shake_128(name).digest(2 * (self._seq_len + 1))
        tokens = np.empty(self._seq_len + 1, dtype=np.int64)
        token = noise[0] % SYNTHETIC_VOCAB_SIZE
        for position in range(self._seq_len + 1):
            is_noise, fresh = noise[2 * position] < NOISE_BYTES, noise[2 * position + 1]
            token = (fresh if is_noise else 5 * token + 17) % SYNTHETIC_VOCAB_SIZE
            tokens[position] = token
        return tokens
