"""Windows over a long text: each token is scored once, with as much context as the model reads.

The protocol is Megatron-LM's zero-shot evaluation (``--overlapping-eval``): the first window scores all its targets,
each later one begins ``stride`` tokens further and scores its last ``stride``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf

import numpy as np

from raymega.evaluate.requests import Request, Scores


def windows(tokens: Sequence[int], *, seq_len: int, stride: int) -> list[Request]:
    """Return the windows of ``tokens``, whose targets are all tokens but the first, each once."""
    text = np.asarray(tokens, dtype=np.int64)
    first = min(seq_len, len(text) - 1)
    found = [Request(tokens=text[: first + 1], num_targets=first)]
    # done: number of targets that windows have scored so far
    for done in range(first, len(text) - 1, stride):
        end = min(done + stride, len(text) - 1)
        begin = done + stride - seq_len
        found.append(Request(tokens=text[begin : end + 1], num_targets=end - done))
    return found


LARGEST = 709.0
"""Largest whole x for which exp(x) is a number in float64."""


def perplexity_of(nats: float) -> float:
    """Return exp(nats); infinity where no float has it, as of the words of a text without spaces."""
    return exp(nats) if nats < LARGEST else inf


def mean_loss(scores: Sequence[Scores]) -> tuple[float, int]:
    """Return the mean of -log p over all targets in nats, and their number."""
    count = sum(len(each.log_probs) for each in scores)
    return -float(sum(each.log_probs.sum() for each in scores)) / count, count
