"""States by chunks and their convolution, against the recurrences and torch's convolution."""

import pytest
import torch
from torch.nn.functional import conv1d, pad

from raymega.data.rows import positions_of
from raymega.model.linear_attention.delta_rule import (
    CHUNK,
    convolve,
    gated_delta_rule,
    normalise,
    scan,
)
from tests.support.references import plain_models, plain_states

LIMIT = 1e-12
h, r, K, V = 2, 3, 4, 5
ROWS = {
    "short": ((7,),),
    "a-chunk": ((CHUNK,),),
    "longer": ((2 * CHUNK + 9,),),
    "borders": ((1, 62, 3, 64, 5, 40), (64, 1, 1, 64, 42, 3)),
}


def _draw(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def _inputs(N, B):
    q, k, v = _draw(1, N, B, h, K), normalise(_draw(2, N, B, h, K)), _draw(3, N, B, h, r, V)
    # so slow that a state outlives a chunk
    decay, beta = -0.02 * _draw(4, N, B, h, r).exp(), _draw(5, N, B, h, r).sigmoid()
    return [t.requires_grad_() for t in (q, k, v, decay, beta)]


def _positions(rows):
    return torch.stack([torch.from_numpy(positions_of(row)) for row in rows], 1)


def _plain(recurrence, inputs, rows):
    """What the recurrence of each head reads in each document; inputs as the chunked forms have them."""
    q, k, v, *rest = inputs
    y = torch.empty_like(v)
    for b, lengths in enumerate(rows):
        begin = 0
        for length in lengths:
            at = slice(begin, begin + length)
            for i in range(h):
                for j in range(r):
                    of_head = (t[at, b, i, j] for t in (v, *rest))
                    y[at, b, i, j] = recurrence(q[at, b, i], k[at, b, i], *of_head)
            begin += length
    return y


RULES = {
    "delta": (gated_delta_rule, plain_states.recurrence, 5),
    "sums": (scan, plain_states.sums, 4),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_chunks_give_what_the_recurrence_gives_document_by_document(rows, rule):
    N, B = sum(rows[0]), len(rows)
    chunked, recurrence, count = rule
    inputs, again = _inputs(N, B)[:count], _inputs(N, B)[:count]
    y, wanted = chunked(*inputs, _positions(rows)), _plain(recurrence, again, rows)
    grad = _draw(6, *y.shape)
    y.backward(grad)
    wanted.backward(grad)
    assert plain_models.difference(y, wanted) < LIMIT
    for number, (ours, plain) in enumerate(zip(inputs, again, strict=True)):
        assert plain_models.difference(ours.grad, plain.grad) < LIMIT, number


@pytest.mark.parametrize("rows", [((9,),), ((2, 1, 6), (4, 4, 1)), ((2,),)], ids=str)
def test_convolution_begins_anew_with_each_document(rows):
    N, B, taps = sum(rows[0]), len(rows), 4
    x, filters = _draw(1, N, B, h, K), _draw(2, h, K, taps)
    y = convolve(x, filters, _positions(rows))
    for b, lengths in enumerate(rows):
        for found, document in zip(y[:, b].split(lengths), x[:, b].split(lengths), strict=True):
            channels = pad(document.flatten(1).T[None], (taps - 1, 0))
            wanted = conv1d(channels, filters.flatten(0, 1)[:, None], groups=h * K)[0].T
            assert plain_models.difference(found.flatten(1), wanted) < LIMIT
